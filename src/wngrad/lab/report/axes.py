"""How a metric is drawn: on which scale, and from where on it is only marked on the edge."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wngrad.lab.report import sweep_table
from wngrad.lab.report.cells import ACCURACY, HIGHER, LOSSES, Cell
from wngrad.lab.report.results import Results
from wngrad.lab.train.spec import Metric

# No classifier with a larger loss is worth telling from another: it is marked on the edge.
CEILING = 10.0
FLOOR = 1e-6  # A loss of zero has no place on a log axis: it is drawn here.
BEYOND = 3.0  # times the loss at the start: as far as a task's losses are drawn


@dataclass(frozen=True, slots=True)
class Axis:
    """Of one metric, on paper and on the page."""

    metric: Metric
    worst: float  # what is worse is marked on the edge
    log: bool
    usable: float | None = None  # up to where a task's loss is usable

    @property
    def percent(self) -> bool:
        return self.metric == ACCURACY

    @property
    def higher(self) -> bool:
        """Whether more is better; what is bad is marked at the other end."""
        return self.metric in HIGHER

    def height(self, cell: Cell) -> float | None:
        """Where a mean is drawn: accuracy in per cent, a loss within reach of a log axis."""
        if cell.mean is None:
            return None
        if self.percent:
            return 100 * cell.mean
        return min(max(cell.mean, FLOOR), 1e3 * self.worst) if self.log else cell.mean

    def bar(self, cell: Cell) -> float:
        """The standard deviation, as it is drawn."""
        return (cell.sd or 0) * (100 if self.percent else 1)

    def beyond(self, cell: Cell) -> bool:
        """Whether a mean is too bad to be drawn to scale."""
        if cell.mean is None:
            return False
        return cell.mean < self.worst if self.higher else cell.mean > self.worst


def axis(results: Results, metric: Metric) -> Axis:
    """The axis of a metric in this report."""
    if metric == ACCURACY:
        return Axis(metric, -math.inf, False)
    if not results.sweep.task:
        return Axis(metric, CEILING, True)
    every = [cell.mean for cell in results.cells(metric) if cell.mean is not None]
    start = results.start("test_loss" if metric == "train_loss" else metric)
    log = metric in LOSSES and all(mean >= 0 for mean in every) and (start or 0) > 0
    if start is None or not every:
        return Axis(metric, -math.inf if metric in HIGHER else math.inf, log)
    usable = sweep_table.limit(results) if metric == sweep_table.BY else None
    if log:
        return Axis(metric, BEYOND * start, True, usable)
    best = max(every) if metric in HIGHER else min(every)
    return Axis(metric, start - (best - start), False, usable)


def marks(results: Results) -> str:
    """What the marks on the edge of the panels mean."""
    axes = [axis(results, metric) for metric in results.sweep.metrics]
    far = f"a mean loss above {CEILING:g}"
    if results.sweep.task:
        told = [a for a in axes if math.isfinite(a.worst)]
        worse = [f"{results.label(a.metric)} {'below' if a.higher else 'above'}" for a in told]
        both = zip(worse, told, strict=True)
        far = "a mean " + " or ".join(f"{text} {a.worst:.3g}" for text, a in both)
    drawn = f", and a loss below {FLOOR:g} is drawn there" if any(a.log for a in axes) else ""
    return (
        "×: a seed diverged, and a hollow marker is the mean of the others; a hollow marker "
        f"beyond the dotted line: {far}. A bar that would reach below zero has no foot{drawn}."
        + (" Dashed: below it a λ is usable." if any(a.usable is not None for a in axes) else "")
    )
