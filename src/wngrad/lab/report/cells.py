"""One number of a report: a mean over the seeds with its spread, and one set against another."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from wngrad.lab.optimizers import NAMED, OPTIMIZERS
from wngrad.lab.train.spec import Metric

ACCURACY: Metric = "test_accuracy"
LOSSES: tuple[Metric, ...] = ("train_loss", "test_loss")
LESS = re.compile(  # whole words of a name, which underscores part: "wer", not "answer"
    r"(?:^|_)(?:\w*loss(?:es)?|\w*errors?|perplexity|ppl|n?r?mse|mae|mape|wer|cer|nll|fid|regret"
    r"|distance|(?:run|wall)?time|steps)(?:_|$)",
    re.IGNORECASE,
)
LABELS = {
    **{row.name: row.label for row in OPTIMIZERS.values()},
    **{name: row.label for name, row in NAMED.items()},
    "train_loss": "train loss",
    "test_loss": "test loss",
    "test_accuracy": "test accuracy",
    "digits": "scikit-learn's digits",
    "mnist": "MNIST",
    "cifar10": "CIFAR-10",
    "mlp": "two-layer network",
    "cnn": "convolutional network",
    "resnet18": "ResNet-18",
}


def label(name: str) -> str:
    """How a report writes the name of an optimizer, metric, dataset or model."""
    home, parenthesis, settings = name.partition("(")
    return LABELS.get(home, home.rpartition(".py:")[2]) + parenthesis + settings


def more_is_better(metric: Metric) -> bool:
    """Judged by its name: of a loss or an error less is better, of all else more."""
    return in_percent(metric) or LESS.search(metric) is None


def in_percent(metric: Metric) -> bool:
    return metric.endswith("_accuracy")


def lam_text(lam: float | None) -> str:
    """A λ as a report writes it; a dash for none."""
    return "–" if lam is None else f"{lam:.3g}"


@dataclass(frozen=True, slots=True)
class Cell:
    """A metric of one optimizer at one λ and epoch: mean and spread over the seeds."""

    metric: Metric
    mean: float | None  # over the seeds that did not diverge
    sd: float | None  # the sample standard deviation; None for fewer than two seeds
    n: int  # seeds that did not diverge
    diverged: int  # seeds that did
    by_seed: tuple[tuple[int, float], ...] = ()  # the values, to be paired with another cell's

    @classmethod
    def of(cls, metric: Metric, values: Sequence[float], seeds: Sequence[int] = ()) -> Cell:
        """From one value per seed, nan where it diverged."""
        good = [v for v in values if math.isfinite(v)]
        n, lost = len(good), len(values) - len(good)
        if not good:
            return cls(metric, None, None, 0, lost)
        mean = sum(v / n for v in good)  # divided first: a sum of huge losses would overflow
        sd = math.hypot(*(v - mean for v in good)) / math.sqrt(n - 1) if n > 1 else None
        return cls(metric, mean, sd, n, lost, tuple(zip(seeds, values, strict=False)))

    @property
    def lanes(self) -> int:
        return self.n + self.diverged

    @property
    def cost(self) -> float:
        """For ranking, lower is better: infinite as soon as one seed diverged."""
        if self.mean is None or self.diverged:
            return math.inf
        return -self.mean if more_is_better(self.metric) else self.mean

    def __str__(self) -> str:
        return self._text(lambda mean: amount(self.metric, mean, self.sd))

    @property
    def brief(self) -> str:
        """Without its spread, for where that of a difference says more."""
        return self._text(lambda mean: amount(self.metric, mean, None))

    def _text(self, write: Callable[[float], str]) -> str:
        if not self.lanes:
            return "–"
        if self.mean is None:
            return f"diverged ({self.diverged} of {self.lanes})"
        lost = f"; {self.diverged} of {self.lanes} diverged" if self.diverged else ""
        return f"{write(self.mean)} (n = {self.n}{lost})"


def amount(metric: Metric, value: float, spread: float | None) -> str:
    """`0.0123 ± 0.0004`, or `71.20 ± 0.35 %`; a single value has no spread."""
    if in_percent(metric):
        return f"{100 * value:.2f} {'' if spread is None else f'± {100 * spread:.2f} '}%"
    three_digits = f"{value:#.3g}".rstrip(".")  # zeros at the end too
    return f"{three_digits}{'' if spread is None else f' ± {spread:.2g}'}"


@dataclass(frozen=True, slots=True)
class Lead:
    """By how much one cell is ahead of another; infinite where one of them diverged."""

    metric: Metric
    by: float
    error: float | None  # one standard error of `by`

    @property
    def noise(self) -> str:
        small = self.error is not None and abs(self.by) < 2 * self.error
        return ", within noise" if small else ""

    def __str__(self) -> str:
        side = "ahead" if self.by > 0 else "behind"
        if math.isinf(self.by):
            return f"{side}, by divergence"
        by = amount(self.metric, abs(self.by), self.error)
        return f"{side} by {by} ({'n = 1' if self.error is None else 'standard error'}){self.noise}"


def lead(first: Cell, second: Cell) -> Lead:
    """How far the first is ahead of the second; behind, if both diverged.

    The standard error is that of the mean difference, seed by seed: lanes of one seed share their
    first weights and the order of the data, so that most of the spread over the seeds is common to
    both cells and cancels. Where one cell has seeds that the other lacks, only those of both count.
    """
    if math.inf in (first.cost, second.cost):
        return Lead(first.metric, math.inf if first.cost < second.cost else -math.inf, None)
    values, others = dict(first.by_seed), dict(second.by_seed)
    common = [seed for seed in values if seed in others]
    apart = Cell.of(first.metric, [values[seed] - others[seed] for seed in common])
    error = None if apart.sd is None else apart.sd / math.sqrt(apart.n)
    by = second.cost - first.cost
    if values.keys() != others.keys() and apart.mean is not None:
        by = apart.mean if more_is_better(first.metric) else -apart.mean
    return Lead(first.metric, by, error)
