"""The axis of a metric: its scale, and from where on a value is only marked on the edge."""

from __future__ import annotations

from dataclasses import dataclass

from wngrad.lab.report.cells import ACCURACY, HIGHER, Cell
from wngrad.lab.train.spec import Metric

FLOOR = 1e-6  # A loss of zero has no place on a log axis: it is drawn here.


@dataclass(frozen=True, slots=True)
class Axis:
    """The axis of one metric, on paper and on the page."""

    metric: Metric
    worst: float  # what is worse is marked on the edge
    log: bool
    usable: float | None = None  # up to where a task's loss is usable

    @property
    def percent(self) -> bool:
        return self.metric == ACCURACY

    @property
    def higher(self) -> bool:
        """True if more is better; what is bad is marked at the other end."""
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
        """True if a mean is too bad to be drawn to scale."""
        if cell.mean is None:
            return False
        return cell.mean < self.worst if self.higher else cell.mean > self.worst
