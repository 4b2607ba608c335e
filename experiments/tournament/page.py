"""The tournament's page, from its records. Nothing is trained here, and nothing left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from experiments.tournament import figures
from experiments.tournament.contestants import CONTESTANTS, Contestant
from experiments.tournament.tables import Curve, Outcome, load
from wngrad.lab.report.cells import Cell, amount, lam_text, lead
from wngrad.lab.report.markdown import bullets, table
from wngrad.lab.train.spec import Record

OURS = tuple(who.name for who in CONTESTANTS if who.name.startswith("wn"))
LABELS = {who.name: who.label for who in CONTESTANTS}
VERDICT, FIGURES = "tournament-verdict.md", "figures/tournament"  # beside the page


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
    pictures = figures.write(outcomes, page.parent / FIGURES)
    verdict = page.parent / VERDICT
    advice = verdict.read_text(encoding="utf-8").strip() if verdict.is_file() else ""
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(markdown(outcomes, advice), encoding="utf-8")
    return [page, *pictures]


def markdown(outcomes: Sequence[Outcome], verdict: str = "") -> str:
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
        *["## At the documented default", "", *_defaults(outcomes), ""],
        *["## Over λ", "", *_grid(outcomes), ""],
        *["## Wins and losses", "", *_duels(outcomes), ""],
        *["## Task by task", "", *_details(outcomes), ""],
        *["## What diverged or failed", "", *_lost(outcomes), ""],
        *["## The contestants", "", *_contestants(outcomes), ""],
        *["## How it was made", "", *_made(runs), ""],
    ]
    return "\n".join(lines)


def _trial(runs: Sequence[Record]) -> list[str]:
    scales = {scale for r in runs if (scale := _versions([r]).get("scale"))}
    text = f"**A trial at scale {', '.join(sorted(scales))}: that part of every data set was used."
    return [f"{text}**", ""] if scales else []


def _who(outcomes: Sequence[Outcome]) -> list[Contestant]:
    ran = {name for outcome in outcomes for name in (*outcome.cells, *outcome.curves)}
    return [who for who in CONTESTANTS if who.name in ran]


def _tasks(outcomes: Sequence[Outcome]) -> list[str]:
    rows = []
    for outcome in outcomes:
        task, lam = outcome.event.task, outcome.lam
        length = f"{task.epochs} × batches of {task.batch}"
        seeds = [len({lane.seed for lane in each}) for each in (outcome.default, outcome.grid)]
        over = f"{len(lam)} λ, {lam_text(lam[0])} to {lam_text(lam[-1])}" if lam else "–"
        devices = sorted({str(r.environment.get("device")) for r in outcome.records})
        text = outcome.event.text
        rows.append((task.name, text, length, f"{seeds[0]}; {seeds[1]}", over, "; ".join(devices)))
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


# ------------------------------------------------------------------- the first question


def _defaults(outcomes: Sequence[Outcome]) -> list[str]:
    rows = []
    for who in _who(outcomes):
        ranks = [o.ranks[who.name] for o in outcomes if who.name in o.ranks]
        if ranks:
            mean = sum(ranks) / len(ranks)
            first = sum(who.name in o.leaders for o in outcomes)
            cells = [_ranked(o, who.name) for o in outcomes]
            rows.append((mean, (who.label, lam_text(who.default), f"{mean:.1f}", first, *cells)))
    rows.sort(key=lambda row: row[0])
    heads = ("method", "λ", "mean rank", "in front", *(o.name for o in outcomes))
    n = sorted({cell.lanes for o in outcomes for cell in o.cells.values()})
    return [
        *table(heads, [row for _, row in rows]),
        "",
        f"Final metric: mean ± sample standard deviation over n = {_few(n)} seeds, and in brackets "
        "the rank. Bold: the best, and whatever is behind it by less than two standard errors of "
        "the paired difference; `in front` counts those. A method of which a seed diverged or "
        "failed ranks last.",
        "",
        f"![Ranks at the documented default]({FIGURES}/ranks.png)",
    ]


def _ranked(outcome: Outcome, name: str) -> str:
    """A method's result at a task with its rank, in bold if it is in front."""
    if (cell := outcome.cells.get(name)) is None:
        return "–"
    values = [amount(cell.metric, cell.mean, cell.sd)] if cell.mean is not None else []
    values += [f"lost {cell.diverged} of {cell.lanes}"] if cell.diverged else []
    text = f"{', '.join(values)} ({outcome.ranks[name]})"
    return f"**{text}**" if name in outcome.leaders else text


# ------------------------------------------------------------------ the second question


def _grid(outcomes: Sequence[Outcome]) -> list[str]:
    rows = []
    for who in _who(outcomes):
        curves = [o.curves[who.name] for o in outcomes if who.name in o.curves]
        if curves:
            mean = sum(curve.decades.value for curve in curves) / len(curves)
            cells = [o.curves[who.name].decades if who.name in o.curves else "–" for o in outcomes]
            rows.append((mean, (who.label, f"{mean:.2f}", *_overall(curves), *cells)))
    rows.sort(key=lambda row: -row[0])
    n = sorted({len(curve.seeds) for o in outcomes for curve in o.curves.values()})
    heads = ("method", "mean", "sensitivity", "diverged", *(o.name for o in outcomes))
    return [
        *table(heads, [row for _, row in rows]),
        "",
        "Usable decades of λ, with a 95 % interval from the seeds "
        f"(n = {_few(n)}): how far λ may move, in powers of ten, and the final test loss stays "
        "within 5 % of the way from the best loss of all methods to the loss at the start. 0: the "
        "method never comes so near to the best; ≥: the grid ends before the range does. "
        "Sensitivity (lower is better; defined below): the mean over the tasks.",
        "",
        f"![Final test loss over λ]({FIGURES}/curves.png)",
        "",
        "Mean over the seeds, bars one standard deviation; a run that diverged, failed or ended "
        "above its own loss at the start counts as that loss. Methods without a λ to move are "
        "level lines.",
    ]


def _overall(curves: Sequence[Curve]) -> tuple[str, str]:
    """The mean sensitivity over the tasks, and how many runs diverged."""
    means = [mean for curve in curves if (mean := curve.sensitivity.mean) is not None]
    sensitivity = f"{sum(means) / len(means):.2f}" if means else "–"
    return sensitivity, f"{sum(c.diverged for c in curves)} of {sum(c.runs for c in curves)}"


def _details(outcomes: Sequence[Outcome]) -> list[str]:
    heads = ["method", "best λ", "test loss there", "sensitivity", "usable decades"]
    heads += ["recommended λ", "diverged"]
    lines: list[str] = []
    for outcome in outcomes:
        rows = sorted(outcome.curves.items(), key=lambda item: item[1].at_best.cost)
        text = outcome.event.text
        lines += [f"### {outcome.name}", "", f"{text[0].upper()}{text[1:]}.", ""]
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
        lam_text(curve.best_lam),
        curve.at_best,
        curve.sensitivity,
        curve.decades,
        lam_text(curve.recommended),
        f"{lost}, {curve.failed} failed" if curve.failed else lost,
    )


# ---------------------------------------------------------------- ours against the others


def _duels(outcomes: Sequence[Outcome]) -> list[str]:
    rows = []
    for outcome in outcomes:
        tuned = {name: curve.at_best for name, curve in outcome.curves.items()}
        rows.append((outcome.name, _duel(outcome.cells), _duel(tuned)))
    return [
        "The best of WNMuon and of WNGrad, WNGrad-Momentum and WN-Adam, per neuron and per tensor, "
        "against the best of all others: by the final metric at the documented default, and by "
        "the test loss at each method's own best λ. The best of several is chosen by these very "
        "numbers, on both sides.",
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
    lines = []
    for outcome in outcomes:
        labels = {outcome.target(who): who.label for who in CONTESTANTS}
        for question, records in (("default", outcome.default), ("grid", outcome.grid)):
            where = f"{outcome.name}, {question}"
            runs = [(labels.get(r.lane.optimizer, r.lane.optimizer), r) for r in records.values()]
            lost = Counter(name for name, r in runs if r.diverged_at is not None)
            if text := ", ".join(f"{name} {n}" for name, n in lost.most_common()):
                lines.append(f"{where}: diverged: {text}.")
            failed = Counter((name, r.reason) for name, r in runs if r.status == "failed")
            for (name, reason), n in failed.items():
                lines.append(f"{where}: {name} failed {n} times: {reason}")
    return bullets(lines or ["Nothing."])


def _contestants(outcomes: Sequence[Outcome]) -> list[str]:
    known = _versions([r for outcome in outcomes for r in outcome.records])
    rows, absent = [], []
    for who in CONTESTANTS:
        package = f"{who.package} {known.get(who.package, '')}".strip()
        lam = lam_text(who.default) if who.name != "cocob" else "none"
        if who in _who(outcomes):
            rows.append((who.label, package, lam, who.source, "yes" if who.moved else "no"))
        else:
            absent.append(who.label)
    heads = ("method", "package", "default λ", "where it says so", "λ meant to be moved")
    return [*table(heads, rows), *(["", f"Not run: {', '.join(absent)}."] if absent else [])]


def _versions(records: Sequence[Record]) -> dict[str, str]:
    """The versions of the packages: torch's and wngrad's by name, the peers' in the note."""
    versions: dict[str, str] = {}
    for record in records:
        versions |= {name: str(record.environment.get(name, "")) for name in ("torch", "wngrad")}
        peers = str(record.settings.get("note", "")).partition("; ")[0].split(", ")
        versions |= {name: number for name, _, number in (peer.partition(" ") for peer in peers)}
    return versions


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
    ends = dict.fromkeys((*numbers[:1], *numbers[-1:]))
    return " to ".join(map(str, ends)) or "0"
