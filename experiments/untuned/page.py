"""The tables of the page, written into its marked regions; what is around them is left alone."""

from __future__ import annotations

import math
import re
from pathlib import Path
from statistics import mean

from experiments.untuned import figures
from experiments.untuned.methods import METHODS, C
from experiments.untuned.plan import LENGTH_TASKS, LENGTHS, read
from experiments.untuned.tables import Best, Difference, Metric, Results, difference
from experiments.untuned.tasks import Task
from wngrad.lab.report.cells import Cell, amount
from wngrad.lab.report.markdown import table

FIGURES = "figures/untuned"  # beside the page
TUNED = ("adamw", "muon", "schedulefree-adamw")


def write(records: Path, page: Path, front: str) -> list[Path]:
    """Draw the figures and fill the page's regions; those it does not have are added at its end.

    A region is what stands between `<!-- begin NAME -->` and `<!-- end NAME -->`.

    Raises:
        ValueError: there are no records.
    """
    results = Results(read(records))
    if not results.records:
        raise ValueError(
            f"`--out` must be a folder with records, got {records}; "
            "`python -m experiments.untuned` makes them."
        )
    paths = figures.write(results, page.parent / FIGURES, front)
    text = page.read_text(encoding="utf-8") if page.is_file() else "# Nothing to tune\n"
    for name, lines in regions(results).items():
        text = fill(text, name, "\n".join(lines))
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return [page, *paths]


def fill(text: str, name: str, content: str) -> str:
    """The page with a region's content replaced."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    region = f"{begin}\n{content}\n{end}"
    if begin not in text:
        return f"{text.rstrip()}\n\n{region}\n"
    pattern = f"{re.escape(begin)}.*?{re.escape(end)}"
    return re.sub(pattern, lambda _: region, text, count=1, flags=re.S)


def regions(results: Results) -> dict[str, list[str]]:
    """Every region's lines."""
    groups = {
        group: [task for task in results.tasks if task.group == group]
        for group in ("judging", "choosing")
    }
    classes = [task for task in results.tasks if not task.context]
    return {
        **{group: _against(results, tasks) for group, tasks in groups.items()},
        "test-loss": _against(results, classes, "loss"),
        "speed": _speed(results),
        "ranks": _ranks(results),
        "flatness": _flatness(results, groups["choosing"]),
        "length": _length(results),
        "runs": _runs(results),
    }


# ---------------------------------------------------------------------------------- tables


def _against(results: Results, tasks: list[Task], metric: Metric | None = None) -> list[str]:
    """WNMuon at its default beside the tuned rivals and the best that is not tuned."""
    heads = ("task", "WNMuon, nothing set", *(f"{METHODS[name].label}, tuned" for name in TUNED))
    rows = []
    for task in tasks:
        ours, tuned = results.best(task, "wnmuon", metric=metric), _tuned(results, task, metric)
        cells = [str(ours[1]) if ours else "–", *(_at(tuned[name]) for name in TUNED)]
        adamw = tuned["adamw"]
        apart = _apart(difference(ours[1], adamw[1]), ours[1]) if ours and adamw else "–"
        rows.append((task.name, *cells, _rival(results, task, metric), apart))
    return table((*heads, "best rival at its default", "WNMuon − AdamW (± s.e.)"), rows)


def _tuned(results: Results, task: Task, metric: Metric | None) -> dict[str, Best | None]:
    return {name: results.best(task, name, metric=metric) for name in TUNED}


def _rival(results: Results, task: Task, metric: Metric | None) -> str:
    cells = results.defaults(task, metric)
    cells.pop("wnmuon", None)
    if not cells:
        return "–"
    name = min(cells, key=lambda each: cells[each].cost)
    return f"{METHODS[name].label}: {cells[name]}"


def _speed(results: Results) -> list[str]:
    """Milliseconds of a training step, and of the optimizer's part, the device waited for."""
    names = ("wnmuon", *TUNED)
    rows = []
    for task in results.tasks:
        times = [results.times(task, name) for name in names]
        cells = ["–" if pair is None else f"{pair[0]:.2f} ({pair[1]:.2f})" for pair in times]
        rows.append((task.name, *cells))
    return table(("task, ms a step (optimizer)", *(METHODS[name].label for name in names)), rows)


def _ranks(results: Results) -> list[str]:
    """The mean rank of every method at its default, over the tasks it was run at."""
    every = [(task, results.ranks(task)) for task in results.tasks]
    ranks = [(task, own) for task, own in every if len(own) > 1]  # alone, nobody is first
    names = list(dict.fromkeys(name for _, each in ranks for name in each))
    rows = []
    for name in names:
        own = {task.name: each[name] for task, each in ranks if name in each}
        cells = [own.get(task.name, "–") for task, _ in ranks]
        rows.append((mean(own.values()), (METHODS[name].label, len(own), *cells)))
    rows.sort(key=lambda row: row[0])
    heads = ("at its default", "mean rank", "tasks", *(task.name for task, _ in ranks))
    return table(heads, [(label, f"{rank:.1f}", *rest) for rank, (label, *rest) in rows])


def _flatness(results: Results, tasks: list[Task]) -> list[str]:
    """WNMuon's two settings moved, and AdamW's λ moved by half a decade."""
    rho, moved = METHODS["wnmuon"].lams[0], METHODS["wnmuon-rho"].lams
    columns: dict[str, tuple[str, float]] = {
        f"ρ = {rho:g}, C = {C:g}": ("wnmuon", rho),
        **{f"ρ = {lam:.2g}": ("wnmuon-rho", lam) for lam in moved},
        **{f"C = {lam:g}": ("wnmuon-c", lam) for lam in METHODS["wnmuon-c"].lams},
    }
    rows = []
    for task in tasks:
        cells = [str(results.cell(task, *place)) for place in columns.values()]
        grid, best = sorted(results.lams(task, "adamw")), results.best(task, "adamw")
        at = grid.index(best[0]) if best else 0
        sides = [grid[k] if best and 0 <= k < len(grid) else None for k in (at - 1, at + 1)]
        beside = [_at((lam, results.cell(task, "adamw", lam))) if lam else "–" for lam in sides]
        rows.append((task.name, *cells, beside[0], _at(best), beside[1]))
    heads = ("task", *columns, "AdamW below its best λ", "AdamW at its best", "above")
    return table(heads, rows)


def _length(results: Results) -> list[str]:
    """WNMuon at its default and AdamW tuned for every length."""
    rows = []
    for task in (task for task in results.tasks if task.name in LENGTH_TASKS):
        for steps in (round(task.steps * k) for k in LENGTHS):
            ours, adamw = (results.best(task, name, steps) for name in ("wnmuon", "adamw"))
            apart = _apart(difference(ours[1], adamw[1]), ours[1]) if ours and adamw else "–"
            rows.append((task.name, f"{steps:,}", str(ours[1]) if ours else "–", _at(adamw), apart))
    heads = ("task", "steps", "WNMuon, nothing set", "AdamW, tuned", "WNMuon − AdamW (± s.e.)")
    return table(heads, rows)


def _runs(results: Results) -> list[str]:
    """What was run: tasks, counts, grids, seeds, where and with what."""
    records = list(results.records.values())
    rows = []
    for task in results.tasks:
        own = [r for r in records if r["task"] == task.name]
        grid = [len(seeds) for seeds in results.lams(task, "adamw").values()]
        counts = " to ".join(map(str, sorted({min(grid), max(grid)}))) if grid else ""
        seeds = f"{len(grid)} λ, seeds: {counts}" if grid else "–"
        devices = sorted({f"{r['environment']['device']}, {r['precision']}" for r in own})
        length = f"{task.steps:,} × {task.batch:,}"
        lost = sum(r["diverged"] for r in own)
        rows.append((task.name, task.text, length, len(own), lost, seeds, "; ".join(devices)))
    made = {f"{k} {r['environment'][k]}" for r in records for k in ("wngrad", "torch", "commit")}
    heads = ("task", "what", "steps × batch", "runs", "diverged", "AdamW's grid", "device")
    return [
        *table(heads, rows),
        "",
        "λ is chosen on the test metric itself, by the mean over the seeds: that favours the tuned "
        "rivals, since WNMuon's is not chosen. All methods start from the same weights and see the "
        f"same batches for a seed. Made with {', '.join(sorted(made))}.",
    ]


# ----------------------------------------------------------------------------------- cells


def _at(best: Best | None) -> str:
    """What a tuned method reaches, and at which λ."""
    return "–" if best is None else f"{best[1]} at {best[0]:g}"


def _apart(gap: Difference, cell: Cell) -> str:
    """The difference with its sign, its standard error and the verdict."""
    if math.isnan(gap.mean):
        return f"{gap.word}, by divergence"
    text = amount(cell.metric, gap.mean, gap.error)
    sign = "+" if gap.mean > 0 else ""
    return f"{sign}{text}: {gap.word} (n = {gap.n})"
