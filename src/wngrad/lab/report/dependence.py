"""How much each optimizer of a sweep depends on λ, measured from the records alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

from wngrad.lab.report import sensitivity
from wngrad.lab.report.cells import Cell
from wngrad.lab.report.results import Best, Results
from wngrad.lab.report.sensitivity import WITHIN, Estimate, Range
from wngrad.lab.train.spec import Metric


@dataclass(frozen=True)
class Curves:
    """The final losses of an optimizer over the grid, of every seed that has them all."""

    lam: Sequence[float]
    seeds: Sequence[int]
    losses: Sequence[Sequence[float]]  # (seeds, grid), nan where it diverged
    start: Sequence[float]  # the loss before training, of each seed
    best: Sequence[float]  # the least loss of all optimizers, of each seed
    by: Metric = field(default="test_loss", kw_only=True)

    @property
    def has_range(self) -> bool:
        """Whether there is something to depend on: an optimizer may be run at one λ alone."""
        return len(self.lam) > 1

    @cached_property
    def sensitivity(self) -> Cell:
        """From the optimizer's own best; one value for each seed."""
        pairs = zip(self.losses, self.start, strict=True)
        values = [sensitivity.lr_sensitivity(self.lam, *pair) for pair in pairs]
        return Cell.of(self.by, values, self.seeds)

    @cached_property
    def usable(self) -> Range | None:
        """The λ that end near enough to the best of all optimizers."""
        return sensitivity.usable_range(self.lam, self.losses, self.start, best=self.best)

    @cached_property
    def decades(self) -> Estimate:
        """The number of decades that are usable."""
        return sensitivity.usable_decades(self.lam, self.losses, self.start, best=self.best)

    @cached_property
    def decades_by_seed(self) -> Cell:
        """The usable decades of each seed, to be paired with those of another optimizer."""
        ranges = sensitivity.ranges_by_seed(self.lam, self.losses, self.start, best=self.best)
        values = [each.decades if each else 0.0 for each in ranges]
        return Cell.of("usable_decades", values, self.seeds)

    @property
    def recommended(self) -> float | None:
        return self.usable.middle if self.usable else None


@dataclass(frozen=True, slots=True)
class Row:
    """One optimizer of a sweep."""

    optimizer: str
    default: Best | None  # at the λ of its signature
    best: Best | None
    curves: Curves | None  # None if no seed has them
    diverged: int
    lanes: int  # that have a result
    failed: int

    @property
    def lowest(self) -> Best | None:
        """The better of its best λ and of its default, which may be off the grid."""
        best, default = self.best, self.default
        if default is None or (best is not None and default.cell.lanes < best.cell.lanes):
            return best
        better = default.cell.cost < (math.inf if best is None else best.cell.cost)
        return default if better else best


@dataclass(frozen=True, slots=True)
class Dependence:
    """The rows of all optimizers, and up to where a mean loss is usable (None: no whole seed)."""

    rows: list[Row]
    limit: float | None


def measure(results: Results) -> Dependence:
    """The dependence on λ; usable is measured from the best of all results, seed by seed."""
    every = {name: _losses(results, name) for name in results.sweep.optimizers}
    start = {seed: first for each in every.values() for seed, (first, _) in each.items()}
    lowest = dict.fromkeys(start, math.inf)
    for name, each in every.items():
        at_default = _losses_at_default(results, name)
        for seed, (_, losses) in each.items():
            own = [*losses, at_default.get(seed, math.nan)]
            lowest[seed] = min([lowest[seed], *filter(math.isfinite, own)])
    limits = [low + WITHIN * (start[s] - low) for s, low in lowest.items() if low < start[s]]
    rows = [_row(results, name, each, lowest) for name, each in every.items()]
    return Dependence(rows, fmean(limits) if limits else None)


def _losses(results: Results, name: str) -> dict[int, tuple[float, list[float]]]:
    """The loss at the start and the final losses over the grid, of each seed that has them all."""
    by = results.sweep.best_by
    cells = [results.by_seed(name, lam, by) for lam in _grid(results, name)]
    starts = results.starts(name, by)
    return {
        seed: (start, [by_seed[seed] for by_seed in cells])
        for seed in (results.sweep.seeds if cells else ())
        if (start := starts.get(seed)) is not None and all(seed in by_seed for by_seed in cells)
    }


def _losses_at_default(results: Results, name: str) -> dict[int, float]:
    """The final loss of each seed at the λ of the optimizer's signature, on the grid or not."""
    lam = results.sweep.default_lam(name)
    return {} if lam is None else results.by_seed(name, lam, results.sweep.best_by)


def _grid(results: Results, name: str) -> list[float]:
    """The λ of an optimizer that have a logarithm: 0, where nothing is trained, has none."""
    return [lam for lam in results.sweep.grid(name) if lam > 0]


def _row(
    results: Results,
    name: str,
    losses: dict[int, tuple[float, list[float]]],
    lowest: dict[int, float],
) -> Row:
    curves = None
    if losses:
        start, table = zip(*losses.values(), strict=True)
        best = [min(lowest[seed], first) for seed, first in zip(losses, start, strict=True)]
        curves = Curves(
            _grid(results, name), list(losses), table, start, best, by=results.sweep.best_by
        )
    failed = sum(record.lane.optimizer == name for record in results.failed)
    counts = (results.diverged(name), results.finished(name), failed)
    return Row(name, results.at_default(name), results.best(name), curves, *counts)
