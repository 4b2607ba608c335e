"""What a sweep of a user's own task tells of each optimizer: one row, from the records alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from wngrad.lab.report.cells import Cell, label, lam_text, lead
from wngrad.lab.report.results import Best, Results
from wngrad.lab.report.sensitivity import (
    LEVEL,
    WITHIN,
    Estimate,
    Range,
    lr_sensitivity,
    usable_decades,
    usable_range,
)
from wngrad.lab.train.spec import Metric

BY: Metric = "test_loss"


@dataclass(frozen=True, slots=True)
class Row:
    """One optimizer. What the lanes that are there do not tell is None."""

    optimizer: str
    best: Best | None
    usable: Range | None
    sensitivity: Cell | None  # in units of the loss
    decades: Estimate | None
    diverged: int
    lanes: int  # that have a result
    failed: int

    @property
    def recommended(self) -> float | None:
        return None if self.usable is None else self.usable.middle


@dataclass(frozen=True, slots=True)
class _Curves:
    """The seeds of an optimizer that have a loss at every λ, or have diverged there."""

    seeds: list[int]
    losses: Any  # (seeds, grid)
    start: Any  # (seeds,)


def rows(results: Results) -> list[Row]:
    """In the order of the sweep. Usable is measured from the best of all optimizers, by seed."""
    curves = {name: _curves(results, name) for name in results.sweep.optimizers}
    floor = _best_of_all(curves)
    return [_row(results, name, curves[name], floor) for name in results.sweep.optimizers]


def limit(results: Results) -> float | None:
    """Up to where a mean loss is usable; None if no seed is whole."""
    curves = {name: _curves(results, name) for name in results.sweep.optimizers}
    floor = _best_of_all(curves)
    starts = {s: b for c in curves.values() for s, b in zip(c.seeds, c.start, strict=True)}
    found = [low + WITHIN * (starts[s] - low) for s, low in floor.items() if low < starts[s]]
    return float(np.mean(found)) if found else None


def heads(results: Results) -> list[str]:
    """Of the columns."""
    own = [results.label(metric) for metric in _others(results)]
    return [
        "optimizer",
        f"best {results.label(BY)}",
        *(f"{text} there" for text in own),
        "best λ",
        "recommended λ",
        "sensitivity",
        f"usable decades [{100 * LEVEL:g} %]",
        "diverged lanes",
    ]


def texts(results: Results, row: Row) -> list[str]:
    """The cells of a row, as a reader sees them."""
    best, own = row.best, _others(results)
    there = ["–" for _ in own]
    if best is not None:
        there = [str(results.cell(row.optimizer, best.lam, metric)) for metric in own]
    return [
        label(row.optimizer),
        "–" if best is None else str(best.cell),
        *there,
        "–" if best is None else lam_text(best.lam),
        "–" if row.recommended is None else lam_text(row.recommended),
        "–" if row.sensitivity is None else str(row.sensitivity),
        "–" if row.decades is None else str(row.decades),
        f"{row.diverged} of {row.lanes}" + (f"; {row.failed} failed" if row.failed else ""),
    ]


def legend(results: Results) -> str:
    """What the columns mean."""
    grid = results.sweep.lam
    start = results.start(BY)
    before = "" if start is None else f" (here {start:.3g})"
    return (
        f"At epoch {results.epochs}, over {len(grid)} λ from {min(grid):.3g} to {max(grid):.3g}; "
        "± is one sample standard deviation over the n seeds. Best λ: the lowest mean "
        f"{results.label(BY)} among the λ at which no seed diverged. Sensitivity: the mean over "
        f"the grid of min(loss, loss at the start{before}) − the optimizer's own best loss, so 0 "
        "means that any λ of the grid will do. A λ is usable if it keeps all but "
        f"{100 * WITHIN:g} % of what the best of all optimizers gains over the start; the decades "
        f"are those around the optimizer's best λ, with Student's {100 * LEVEL:g} % interval over "
        "the seeds; ≥: they reach an end of the grid. Recommended: the geometric middle of the "
        "usable range; –: no λ is usable."
    )


def verdict(results: Results, found: list[Row]) -> str:
    """Who reaches the lowest loss, and who does over the widest range, in a sentence."""
    able = [row for row in found if row.best is not None and row.decades is not None]
    if not able:
        return "No optimizer has a result at every λ: see what was left out."
    low = min(able, key=lambda row: row.best.cell.cost if row.best else math.inf)
    wide = max(able, key=lambda row: row.decades.value if row.decades else 0)
    assert low.best is not None
    return (
        f"Lowest {results.label(BY)}: {label(low.optimizer)}, {low.best.cell} at "
        f"λ = {lam_text(low.best.lam)}{_level(low, able)}. Most usable decades: "
        f"{label(wide.optimizer)}, {wide.decades}."
    )


def _level(low: Row, able: list[Row]) -> str:
    """Those whose distance from the lowest is noise: less than two of its standard errors."""
    assert low.best is not None
    found = [
        label(row.optimizer)
        for row in able
        if row is not low and row.best and lead(low.best.cell, row.best.cell).noise
    ]
    return f", within noise of {' and '.join(found)}" if found else ""


def _others(results: Results) -> list[Any]:
    return [metric for metric in results.metrics if metric not in ("train_loss", BY)]


def _curves(results: Results, name: str) -> _Curves:
    grid, whole = sorted(results.sweep.lam), {}
    cells = [results.by_seed(name, lam, BY) for lam in grid]
    starts = results.starts(name, BY)
    for seed in results.sweep.seeds:
        if all(seed in found for found in cells) and starts.get(seed) is not None:
            whole[seed] = [found[seed] for found in cells]
    start = [starts[seed] for seed in whole]
    return _Curves(list(whole), np.array(list(whole.values())), np.array(start, float))


def _best_of_all(curves: dict[str, _Curves]) -> dict[int, float]:
    """For each seed the lowest loss that any optimizer reached."""
    found: dict[int, float] = {}
    for curve in curves.values():
        for seed, losses in zip(curve.seeds, curve.losses, strict=True):
            least = float(np.nanmin(np.append(losses, math.inf)))
            found[seed] = min(found.get(seed, math.inf), least)
    return found


def _row(results: Results, name: str, found: _Curves, floor: dict[int, float]) -> Row:
    lost, ran = results.diverged(name), sum(lane.optimizer == name for lane in results.done)
    best, failed = results.best(name, BY), sum(r.lane.optimizer == name for r in results.failed)
    if not found.seeds:
        return Row(name, best, None, None, None, lost, ran, failed)
    lam = sorted(results.sweep.lam)
    least = np.minimum([floor[seed] for seed in found.seeds], found.start)
    each = [
        lr_sensitivity(lam, losses, start)
        for losses, start in zip(found.losses, found.start, strict=True)
    ]
    usable = usable_range(lam, found.losses, found.start, best=least)
    decades = usable_decades(lam, found.losses, found.start, best=least)
    return Row(name, best, usable, Cell.of(BY, each, found.seeds), decades, lost, ran, failed)
