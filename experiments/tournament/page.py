"""The tournament's page, from its records. Nothing is trained here, and nothing left out."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.tournament import figures
from experiments.tournament.contestants import CONTESTANTS, Contestant
from experiments.tournament.tables import Curve, Outcome, load
from wngrad.lab.report.cells import Cell, amount, lam_text, lead
from wngrad.lab.report.markdown import bullets, table
from wngrad.lab.train.spec import Record

OURS = tuple(who.name for who in CONTESTANTS if who.name.startswith("wn"))
LABELS = {who.name: who.label for who in CONTESTANTS}
VERDICT = "tournament-verdict.md"


def write(records: Path, page: Path) -> list[Path]:
    """Write the page, and its pictures into figures/tournament beside it.

    Args:
        records: a folder of exported records.
        page: the Markdown file. What is written in `tournament-verdict.md` beside it, by hand, is
            taken into it.

    Returns:
        The files, the page first.
    """
    outcomes = load(records)
    folder = page.parent / "figures" / "tournament"
    pictures = figures.write(outcomes, folder)
    verdict = page.parent / VERDICT
    said = verdict.read_text(encoding="utf-8").strip() if verdict.is_file() else ""
    page.parent.mkdir(parents=True, exist_ok=True)
    where = Path(os.path.relpath(folder, page.parent)).as_posix()
    page.write_text(markdown(outcomes, said, where), encoding="utf-8")
    return [page, *pictures]


def markdown(
    outcomes: Sequence[Outcome], verdict: str = "", figures: str = "figures/tournament"
) -> str:
    """The page, as text."""
    runs = [r for outcome in outcomes for r in outcome.records]
    lines = [
        "# The tournament",
        "",
        f"{len(_who(outcomes))} optimizers at {len(outcomes)} tasks on real data, {len(runs):,} "
        "training runs. Two questions: how far does each method come at its documented default, "
        "with nothing tuned? And over how many decades of λ does it still train, if λ is meant to "
        "be moved? Every optimizer is the real class of its package, run as it is; all methods "
        "start from the same networks and see the same data in the same order for the same seed. "
        "No schedule, no warm-up, no weight decay but a method's own default. The tasks are small "
        "and the runs short, too short for a method that grows its steps from almost nothing: what "
        "holds here need not hold at scale.",
        "",
        *_trial(runs),
        *(["## What to do", "", verdict, ""] if verdict else []),
        *["## The tasks", "", *_tasks(outcomes), ""],
        *["## At the documented default", "", *_defaults(outcomes, figures), ""],
        *["## Over λ", "", *_grid(outcomes, figures), ""],
        *["## Wins and losses", "", *_duels(outcomes), ""],
        *["## Task by task", "", *_details(outcomes), ""],
        *["## What diverged or failed", "", *_lost(outcomes), ""],
        *["## The contestants", "", *_contestants(outcomes), ""],
        *["## How it was made", "", *_made(runs), ""],
    ]
    return "\n".join(lines)


def _trial(runs: Sequence[Record]) -> list[str]:
    scales = {_versions([r])["scale"] for r in runs if "scale" in _versions([r])}
    said = (
        f"**A trial at scale {', '.join(sorted(scales))}: that part of every data set was used.**"
    )
    return [said, ""] if scales else []


def _who(outcomes: Sequence[Outcome]) -> list[Contestant]:
    ran = {name for outcome in outcomes for name in outcome.cells()}
    ran |= {name for outcome in outcomes for name in outcome.curves()}
    return [who for who in CONTESTANTS if who.name in ran]


def _tasks(outcomes: Sequence[Outcome]) -> list[str]:
    rows = []
    for outcome in outcomes:
        task, seeds = outcome.event.task, [_count(outcome.default), _count(outcome.grid)]
        lam = outcome.lam
        over = f"{len(lam)} λ, {lam_text(lam[0])} to {lam_text(lam[-1])}" if lam else "–"
        devices = {str(r.environment.get("device")) for r in outcome.records}
        rows.append(
            (
                task.name,
                outcome.event.text,
                f"{task.epochs} × batches of {task.batch}",
                f"{seeds[0]}; {seeds[1]}",
                over,
                "; ".join(sorted(devices)),
            )
        )
    heads = ("task", "what", "epochs", "seeds: default; grid", "grid", "device")
    return [
        *table(heads, rows),
        "",
        "Test accuracy is reported where there are classes, the test loss (nats per character) "
        "for the text.",
        *(f"\n{remark}" for remark in _remarks(outcomes)),
    ]


def _remarks(outcomes: Sequence[Outcome]) -> list[str]:
    """What whoever ran it has to say, behind the versions in the note."""
    notes = {str(r.settings.get("note", "")) for outcome in outcomes for r in outcome.records}
    return sorted({note.partition("; ")[2] for note in notes} - {""})


def _count(records: Iterable[object]) -> int:
    return len({getattr(lane, "seed", None) for lane in records})


# ------------------------------------------------------------------- the first question


def _defaults(outcomes: Sequence[Outcome], figures: str) -> list[str]:
    ranks = {outcome.event.task.name: outcome.ranks() for outcome in outcomes}
    leaders = {outcome.event.task.name: outcome.leaders() for outcome in outcomes}
    rows = []
    for who in _who(outcomes):
        cells = [(o.event.task.name, o.cell(who)) for o in outcomes]
        mine = [ranks[task][who.name] for task, cell in cells if cell.lanes]
        if mine:
            shown = [
                _ranked(cell, ranks[t].get(who.name), who.name in leaders[t]) for t, cell in cells
            ]
            mean = sum(mine) / len(mine)
            first = sum(who.name in leaders[t] for t, _ in cells)
            rows.append((mean, (who.label, lam_text(who.default), f"{mean:.1f}", first, *shown)))
    rows.sort(key=lambda row: row[0])
    heads = ("method", "λ", "mean rank", "in front", *(o.event.task.name for o in outcomes))
    n = sorted({cell.lanes for o in outcomes for cell in o.cells().values()})
    return [
        *table(heads, [row for _, row in rows]),
        "",
        f"Final metric: mean ± sample standard deviation over n = {_few(n)} seeds, and in brackets "
        "the rank. Bold: the best, and whatever is behind it by less than two standard errors of "
        "the paired difference; `in front` counts those. A method of which a seed diverged or "
        "failed ranks last.",
        "",
        f"![Ranks at the documented default]({figures}/ranks.png)",
    ]


def _ranked(cell: Cell, rank: int | None, front: bool) -> str:
    if not cell.lanes:
        return "–"
    if cell.mean is None:
        return f"lost {cell.diverged} of {cell.lanes} ({rank})"
    lost = f", lost {cell.diverged} of {cell.lanes}" if cell.diverged else ""
    text = f"{amount(cell.metric, cell.mean, cell.sd)}{lost} ({rank})"
    return f"**{text}**" if front else text


# ------------------------------------------------------------------ the second question


def _grid(outcomes: Sequence[Outcome], figures: str) -> list[str]:
    every = {outcome.event.task.name: outcome.curves() for outcome in outcomes}
    rows = []
    for who in _who(outcomes):
        found = {task: curves[who.name] for task, curves in every.items() if who.name in curves}
        if found:
            mean = sum(curve.usable.value for curve in found.values()) / len(found)
            cells = [str(found[task].usable) if task in found else "–" for task in every]
            rows.append((mean, (who.label, f"{mean:.2f}", *_overall(found.values()), *cells)))
    rows.sort(key=lambda row: -row[0])
    n = sorted({len(curve.seeds) for curves in every.values() for curve in curves.values()})
    return [
        *table(("method", "mean", "sensitivity", "diverged", *every), [row for _, row in rows]),
        "",
        "Usable decades of λ, with a 95 % interval from the seeds "
        f"(n = {_few(n)}): how far λ may move, in powers of ten, and the final test loss stays "
        "within 5 % of the way from the best loss of all methods to the loss at the start. 0: the "
        "method never comes so near to the best; ≥: the grid ends before the range does. "
        "Sensitivity (lower is better; defined below): the mean over the tasks.",
        "",
        f"![Final test loss over λ]({figures}/curves.png)",
        "",
        "Mean over the seeds, bars one standard deviation; a run that diverged, failed or ended "
        "above the loss at the start counts as the loss at the start. Methods without a λ to move "
        "are level lines.",
    ]


def _overall(curves: Iterable[Curve]) -> tuple[str, str]:
    """The mean sensitivity over the tasks, and how many runs diverged."""
    every = list(curves)
    means = [mean for curve in every if (mean := curve.sensitivity.mean) is not None]
    sensitivity = f"{sum(means) / len(means):.2f}" if means else "–"
    return sensitivity, f"{sum(c.diverged for c in every)} of {sum(c.runs for c in every)}"


def _details(outcomes: Sequence[Outcome]) -> list[str]:
    lines: list[str] = []
    for outcome in outcomes:
        curves = outcome.curves()
        rows = sorted(curves.items(), key=lambda item: item[1].at_best.cost)
        heads = (
            "method",
            "best λ",
            "test loss there",
            "sensitivity",
            "usable decades",
            "recommended λ",
            "diverged",
        )
        lines += [f"### {outcome.event.task.name}", "", f"{_sentence(outcome.event.text)}", ""]
        lines += table(heads, [_detail(name, curve) for name, curve in rows]) if rows else ["–"]
        lines.append("")
    return [
        "Sensitivity: the mean over the grid of min(loss, loss at start) − the method's own best "
        "loss (Wortsman et al., 2023), here a mean over the seeds; read it beside that best loss, "
        "for a method that is poor everywhere has a low one. Recommended: the geometric middle of "
        "the usable λ.",
        "",
        *lines[:-1],
    ]


def _detail(name: str, curve: Curve) -> tuple[object, ...]:
    lost = f"{curve.diverged} of {curve.runs}"
    return (
        LABELS[name],
        "–" if curve.best_lam is None else lam_text(curve.best_lam),
        curve.at_best,
        curve.sensitivity,
        curve.usable,
        "–" if curve.recommended is None else lam_text(curve.recommended),
        f"{lost}, {curve.failed} failed" if curve.failed else lost,
    )


# ---------------------------------------------------------------- ours against the others


def _duels(outcomes: Sequence[Outcome]) -> list[str]:
    rows = []
    for outcome in outcomes:
        tuned = {name: curve.at_best for name, curve in outcome.curves().items()}
        rows.append((outcome.event.task.name, _duel(outcome.cells()), _duel(tuned)))
    return [
        "The best of WNGrad, WNGrad-Momentum and WN-Adam, per neuron and per tensor, against the "
        "best of all others: by the final metric at the documented default, and by the test loss "
        "at each method's own best λ. The best of several is chosen by these very numbers, on "
        "both sides.",
        "",
        *table(("task", "at the default", "at the best λ"), rows),
    ]


def _duel(cells: dict[str, Cell]) -> str:
    ours = _best({name: cell for name, cell in cells.items() if name in OURS})
    others = _best({name: cell for name, cell in cells.items() if name not in OURS})
    if ours is None or others is None:
        return "–"
    by = lead(cells[ours], cells[others])
    if by.by == 0:
        return f"even: {LABELS[ours]} level with {LABELS[others]}"
    verdict = "even" if by.noise else ("win" if by.by > 0 else "loss")
    return f"{verdict}: {LABELS[ours]} {by} against {LABELS[others]}"


def _best(cells: dict[str, Cell]) -> str | None:
    good = {name: cell.cost for name, cell in cells.items() if cell.cost < math.inf}
    return min(good, key=lambda name: good[name], default=None)


# -------------------------------------------------------------------------- the records


def _lost(outcomes: Sequence[Outcome]) -> list[str]:
    found = []
    for outcome in outcomes:
        targets = {who.target(outcome.event.batch_norm): who.label for who in CONTESTANTS}
        for question, records in (("default", outcome.default), ("grid", outcome.grid)):
            lost = Counter(
                targets.get(r.lane.optimizer, r.lane.optimizer)
                for r in records.values()
                if r.diverged_at is not None
            )
            said = ", ".join(f"{label} {n}" for label, n in lost.most_common())
            if said:
                found.append(f"{outcome.event.task.name}, {question}: diverged: {said}.")
            found += _failures(outcome.event.task.name, question, records.values(), targets)
    return bullets(found or ["Nothing."])


def _failures(
    task: str, question: str, records: Iterable[Record], targets: dict[str, str]
) -> list[str]:
    why = Counter(
        (targets.get(r.lane.optimizer, r.lane.optimizer), r.reason)
        for r in records
        if r.status == "failed"
    )
    return [
        f"{task}, {question}: {label} failed {n} times: {reason}"
        for (label, reason), n in why.items()
    ]


def _contestants(outcomes: Sequence[Outcome]) -> list[str]:
    known = _versions([r for outcome in outcomes for r in outcome.records])
    rows = [
        (
            who.label,
            f"{who.package} {known.get(who.package, '')}".strip(),
            lam_text(who.default) if who.name != "cocob" else "none",
            who.source,
            "yes" if who.moved else "no",
        )
        for who in _who(outcomes)
    ]
    missing = [who.label for who in CONTESTANTS if who not in _who(outcomes)]
    absent = ["", f"Not run: {', '.join(missing)}."] if missing else []
    heads = ("method", "package", "default λ", "where it says so", "λ meant to be moved")
    return [*table(heads, rows), *absent]


def _versions(records: Sequence[Record]) -> dict[str, str]:
    """What the records say of packages: torch and wngrad by name, the peers in the note."""
    found: dict[str, str] = {}
    for record in records:
        for name in ("torch", "wngrad"):
            found[name] = str(record.environment.get(name, ""))
        for part in str(record.settings.get("note", "")).partition("; ")[0].split(", "):
            name, _, number = part.partition(" ")
            found[name] = number
    return found


def _made(runs: Sequence[Record]) -> list[str]:
    facts = {
        key: sorted({str(r.environment.get(key)) for r in runs})
        for key in ("wngrad", "torch", "python", "device", "commit", "threads")
    }
    notes = sorted({str(r.settings.get("note") or "") for r in runs} - {""})
    return [
        *bullets([f"{key}: {'; '.join(values)}" for key, values in facts.items()]),
        *bullets([f"with {note}" for note in notes]),
        "",
        "To make it again:",
        "",
        "```sh",
        "python -m experiments.tournament --device cuda --workers 14",
        "python -m experiments.tournament --report",
        "```",
    ]


def _few(numbers: Sequence[int]) -> str:
    if not numbers:
        return "0"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
