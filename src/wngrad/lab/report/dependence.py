"""How much each optimizer of a sweep depends on λ, measured from the records alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from wngrad.lab.report.cells import Cell
from wngrad.lab.report.results import Best, Results
from wngrad.lab.report.sensitivity import (
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
    """One optimizer; None stands for what its lanes do not suffice to measure."""

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
class Dependence:
    """The rows of all optimizers, and up to where a mean loss is usable (None: no whole seed)."""

    rows: list[Row]
    limit: float | None


@dataclass(frozen=True, slots=True)
class _Curves:
    """The seeds of an optimizer that have a loss at every λ, or have diverged there."""

    seeds: list[int]
    losses: Any  # (seeds, grid)
    start: Any  # (seeds,)


def measure(results: Results) -> Dependence:
    """The dependence on λ; usable is measured from the best of all optimizers, seed by seed."""
    curves = {name: _curves(results, name) for name in results.sweep.optimizers}
    lowest = _best_of_all(curves)
    rows = [_row(results, name, curves[name], lowest) for name in results.sweep.optimizers]
    starts = {s: b for c in curves.values() for s, b in zip(c.seeds, c.start, strict=True)}
    limits = [low + WITHIN * (starts[s] - low) for s, low in lowest.items() if low < starts[s]]
    return Dependence(rows, float(np.mean(limits)) if limits else None)


def _curves(results: Results, name: str) -> _Curves:
    cells = [results.by_seed(name, lam, BY) for lam in sorted(results.sweep.lam)]
    starts = results.starts(name, BY)
    losses = {
        seed: [by_seed[seed] for by_seed in cells]
        for seed in results.sweep.seeds
        if starts.get(seed) is not None and all(seed in by_seed for by_seed in cells)
    }
    start = np.array([starts[seed] for seed in losses], float)
    return _Curves(list(losses), np.array(list(losses.values())), start)


def _best_of_all(curves: dict[str, _Curves]) -> dict[int, float]:
    """For each seed the lowest loss that any optimizer reached."""
    lowest: dict[int, float] = {}
    for curve in curves.values():
        for seed, losses in zip(curve.seeds, curve.losses, strict=True):
            least = float(np.nanmin(np.append(losses, math.inf)))
            lowest[seed] = min(lowest.get(seed, math.inf), least)
    return lowest


def _row(results: Results, name: str, curves: _Curves, lowest: dict[int, float]) -> Row:
    best, lam = results.best(name, BY), sorted(results.sweep.lam)
    failed = sum(record.lane.optimizer == name for record in results.failed)
    counts = (results.diverged(name), results.finished(name), failed)
    if not curves.seeds:
        return Row(name, best, None, None, None, *counts)
    least = np.minimum([lowest[seed] for seed in curves.seeds], curves.start)
    usable = usable_range(lam, curves.losses, curves.start, best=least)
    decades = usable_decades(lam, curves.losses, curves.start, best=least)
    pairs = zip(curves.losses, curves.start, strict=True)
    sensitivity = Cell.of(BY, [lr_sensitivity(lam, *pair) for pair in pairs], curves.seeds)
    return Row(name, best, usable, sensitivity, decades, *counts)
