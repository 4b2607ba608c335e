"""The losses and metrics that the lab's programs minimize and measure.

A program asks for means while it trains, and for sums while it tests, a part of the test set at a
time: of one network, or of all lanes at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor
from torch.func import vmap
from torch.nn import functional as F  # noqa: N812

from wngrad.lab.train.spec import Metric

Measure = Callable[[Tensor, Tensor], Tensor]  # (output, target) -> a mean over the examples
Sums = tuple[Tensor, ...]  # over the examples: the loss, and the metric if there is one


class Classification:
    """Cross-entropy and accuracy: the paper's objective."""

    def measured(self, part: str) -> tuple[Metric, ...]:
        """What a record calls the sums over a part of the data, "valid" or "test"."""
        return (f"{part}_loss", f"{part}_accuracy")

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        """The loss of a network on a batch."""
        return F.cross_entropy(output, target)

    def sums(self, output: Tensor, target: Tensor) -> Sums:
        right = (output.argmax(1) == target).sum()
        return F.cross_entropy(output, target, reduction="sum"), right

    def lanes_mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of every lane; outputs (lanes, channels, batch, …), targets (seeds, batch, …)."""
        labels = _for_lanes(outputs, targets)
        return F.cross_entropy(outputs, labels, reduction="none").mean(1)

    def lanes_sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        labels = _for_lanes(outputs, targets)
        losses = F.cross_entropy(outputs, labels, reduction="none")
        return losses.sum(1), (outputs.argmax(1) == labels).sum(1)


@dataclass(frozen=True, slots=True)
class CustomObjective:
    """A user's own loss and metric, each a mean over the examples it is given."""

    loss: Measure
    metric: Measure | None = None
    metric_key: Metric = "test_score"  # the metric's name in a record

    def measured(self, part: str) -> tuple[Metric, ...]:
        key = self.metric_key.partition("_")[2]
        return (f"{part}_loss", *((f"{part}_{key}",) if self.metric else ()))

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        return self.loss(output, target)

    def sums(self, output: Tensor, target: Tensor) -> Sums:
        return tuple(len(target) * measure(output, target) for measure in self._measures())

    def lanes_mean(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return _per_lane(self.loss, outputs, targets)

    def lanes_sums(self, outputs: Tensor, targets: Tensor) -> Sums:
        n = targets.shape[1]
        return tuple(n * _per_lane(measure, outputs, targets) for measure in self._measures())

    def _measures(self) -> tuple[Measure, ...]:
        return (self.loss, self.metric) if self.metric else (self.loss,)


def _for_lanes(outputs: Tensor, targets: Tensor) -> Tensor:
    """The targets of a seed, for each of its lanes."""
    return targets.repeat_interleave(len(outputs) // len(targets), 0)


def _per_lane(measure: Measure, outputs: Tensor, targets: Tensor) -> Tensor:
    values: Tensor = vmap(measure)(outputs.movedim(2, 1), _for_lanes(outputs, targets))
    return values


Objective = Classification | CustomObjective
CLASSIFICATION = Classification()
