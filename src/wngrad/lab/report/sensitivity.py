"""How much a training result depends on the learning rate, in numbers.

All functions take a grid of λ and the final losses over it: one value per λ, or (seeds, grid) with
the loss at the start of each seed. A loss that is not finite, or above the loss at the start,
counts as the loss at the start: training has done nothing good there, and how bad does not matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # anything NumPy can read as numbers

WITHIN = 0.05  # of the way from the best loss to the loss at the start
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Range:
    """The λ from `low` to `high`, which may go on beyond the grid."""

    low: float
    high: float
    open_low: bool  # the grid ends here, not the range
    open_high: bool

    @property
    def decades(self) -> float:
        return math.log10(self.high / self.low)

    @property
    def middle(self) -> float:
        """The geometric mean of both ends."""
        return math.sqrt(self.low) * math.sqrt(self.high)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over the seeds, with the interval that covers its expectation at the stated rate."""

    value: float
    low: float | None  # None for a single seed
    high: float | None
    n: int
    level: float
    at_least: bool = False  # some seed's range reaches an end of the grid

    def __str__(self) -> str:
        ends = "–" if self.low is None else f"{self.low:.2f}, {self.high:.2f}"
        return f"{'≥ ' if self.at_least else ''}{self.value:.2f} [{ends}]"


def lr_sensitivity(lam: Array, losses: Array, start: Array, *, best: Array | None = None) -> float:
    """Learning-rate sensitivity: the mean over the grid of min(loss, loss at start) − best loss.

    After Wortsman et al. (2023), *Small-scale proxies for large-scale Transformer training
    instabilities*: the expectation over a log-uniform λ of min(ℓ(λ), ℓ₀) − ℓ*. 0: any λ of the
    grid will do. It is a property of the method *and the grid*, and is measured from the method's
    own best: compare on one grid only, and read the best loss beside it, or give a common `best`.

    Args:
        lam: the grid, > 0 and each λ once; evenly spaced in log λ, or the mean is another one.
        losses: the final loss at each λ, or (seeds, grid); nan or inf where it diverged.
        start: the loss before training, or one for each seed.
        best: ℓ*, or one for each seed; the least of `losses` if not given.

    Returns:
        The sensitivity, in units of the loss; of several seeds the mean of theirs.

    >>> lr_sensitivity([0.01, 0.1, 1], [0.5, 0.25, float("nan")], start=1.0)  # (¼ + 0 + ¾)/3
    0.3333333333333333
    """
    _, capped, least, _ = _read("lr_sensitivity", lam, losses, start, best)
    return float(np.mean(capped - least[:, None]))


def best_lam(lam: Array, losses: Array) -> float:
    """The λ with the lowest loss; of several seeds the lowest mean, and never where one diverged.

    Raises:
        ValueError: some seed diverged at every λ.

    >>> best_lam([0.01, 0.1, 1], [[0.3, 0.2, 0.1], [0.3, 0.2, float("inf")]])
    0.1
    """
    grid, curves = _curves("best_lam", lam, losses)
    mean = np.where(np.isfinite(curves), curves, np.inf).mean(0)
    if not np.isfinite(mean).any():
        raise ValueError("best_lam: `losses` must be finite at some λ for every seed, got none.")
    return float(grid[int(np.argmin(mean))])


def usable_range(
    lam: Array, losses: Array, start: Array, *, within: float = WITHIN, best: Array | None = None
) -> Range | None:
    """The λ around the best that end near enough to it.

    Near enough: loss ≤ best + within × (start − best), so that all but a share `within` of what
    training can gain is gained; neither the unit nor the zero of the loss matters. Between two λ
    of the grid the loss is taken to be linear in log λ. Of several seeds the mean curve is read.

    Args:
        lam, losses, start: as in `lr_sensitivity`.
        within: the stated distance, as a share from 0 to 1.
        best: the loss to measure from, for instance the best of all optimizers.

    Returns:
        The connected range with the lowest loss in it; None if no λ of the grid is near enough.
    """
    _share("usable_range", "within", within)
    grid, capped, least, first = _read("usable_range", lam, losses, start, best)
    limit = np.mean(least + within * (first - least))
    return _range(np.log10(grid), capped.mean(0), limit)


def usable_decades(
    lam: Array,
    losses: Array,
    start: Array,
    *,
    within: float = WITHIN,
    best: Array | None = None,
    level: float = LEVEL,
) -> Estimate:
    """How many decades of λ are usable (`usable_range`), with an interval from the seeds.

    Each seed has a curve, and so a number of decades of its own. The estimate is their mean, the
    interval Student's: mean ± t · s/√n with n − 1 degrees of freedom, exact if the decades of the
    seeds are normally distributed. The spread is that of the seeds alone, not of the data.

    Args:
        lam, losses, start, within, best: as in `usable_range`; a `best` for each seed where it is
            the best of several optimizers, which share the noise of a seed.
        level: the rate at which the interval covers the expectation over seeds.

    Returns:
        The estimate; `at_least` is True where the range of some seed reaches an end of the grid.

    >>> lam = [0.001, 0.01, 0.1, 1, 10]
    >>> print(usable_decades(lam, [[1, 0, 0, 0, 1], [1, 0, 0, 1, 1]], start=[1, 1]))
    1.60 [0.00, 4.00]
    """
    _share("usable_decades", "within", within)
    _share("usable_decades", "level", level)
    ranges = ranges_by_seed(lam, losses, start, within=within, best=best)
    decades = np.array([0.0 if each is None else each.decades for each in ranges])
    edge = any(each is not None and (each.open_low or each.open_high) for each in ranges)
    value, n = float(decades.mean()), len(decades)
    if n == 1:
        return Estimate(value, None, None, n, level, edge)
    half = t_quantile(level, n - 1) * float(decades.std(ddof=1)) / math.sqrt(n)
    most = math.log10(max(lam) / min(lam))  # no seed can show more
    return Estimate(value, max(value - half, 0.0), min(value + half, most), n, level, edge)


def ranges_by_seed(
    lam: Array, losses: Array, start: Array, *, within: float = WITHIN, best: Array | None = None
) -> list[Range | None]:
    """The usable range of each seed's own curve; None for a seed that has none."""
    grid, capped, least, first = _read("usable_decades", lam, losses, start, best)
    limits = least + within * (first - least)
    return [_range(np.log10(grid), *pair) for pair in zip(capped, limits, strict=True)]


def recommended_lam(
    lam: Array, losses: Array, start: Array, *, within: float = WITHIN, best: Array | None = None
) -> float | None:
    """The geometric middle of the usable range: the λ furthest from both cliffs.

    The best λ often stands at a cliff's edge. None if no λ is usable.

    >>> lam = [0.001, 0.01, 0.1, 1, 10]
    >>> round(recommended_lam(lam, [1, 0.02, 0.01, 0, 1], start=1), 3)  # between 0.00934 and 1.12
    0.102
    """
    usable = usable_range(lam, losses, start, within=within, best=best)
    return None if usable is None else usable.middle


@lru_cache
def t_quantile(level: float, freedom: int) -> float:
    """The t that Student's |T| stays below with probability `level` (Abramowitz, Stegun 26.7.3)."""
    low, high = 0.0, math.pi / 2  # of θ = atan(t/√ν)
    for _ in range(100):
        theta = (low + high) / 2
        low, high = (theta, high) if _t_inside(theta, freedom) < level else (low, theta)
    return math.tan(low) * math.sqrt(freedom)


def _t_inside(theta: float, freedom: int) -> float:
    """P(|T| < √ν tan θ): a finite sum of odd powers of cos θ if ν is odd, of even ones if not."""
    odd, total = freedom % 2, 0.0
    term = math.sin(theta) * math.cos(theta) ** odd
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(theta) ** 2 * (power + 1) / (power + 2)
    return 2 / math.pi * (theta + total) if odd else total


def _range(at: Any, curve: Any, limit: float) -> Range | None:
    """Around the lowest point, out to where the curve crosses the limit."""
    lowest = int(np.argmin(curve))
    if not curve[lowest] <= limit:
        return None
    low, open_low = _edge(at[lowest::-1], curve[lowest::-1], limit)
    high, open_high = _edge(at[lowest:], curve[lowest:], limit)
    return Range(10**low, 10**high, open_low, open_high)


def _edge(at: Any, curve: Any, limit: float) -> tuple[float, bool]:
    """Where a curve that starts below the limit first leaves it; or the end of the grid."""
    out = np.flatnonzero(curve > limit)
    if not len(out):
        return float(at[-1]), True
    k = int(out[0])
    share = (limit - curve[k - 1]) / (curve[k] - curve[k - 1])
    return float(at[k - 1] + share * (at[k] - at[k - 1])), False


def _read(
    owner: str, lam: Array, losses: Array, start: Array, best: Array | None
) -> tuple[Any, Any, Any, Any]:
    """The grid, and for each seed its capped curve, its best loss and its loss at the start."""
    grid, curves = _curves(owner, lam, losses)
    first = _per_seed(owner, "start", start, len(curves))
    capped = np.minimum(np.where(np.isfinite(curves), curves, np.inf), first[:, None])
    least = capped.min(1) if best is None else _per_seed(owner, "best", best, len(curves))
    return grid, capped, np.minimum(least, first), first


def _curves(owner: str, lam: Array, losses: Array) -> tuple[Any, Any]:
    """The grid in order, and the losses as (seeds, grid)."""
    grid, curves = np.asarray(lam, float), np.atleast_2d(np.asarray(losses, float))
    plain = grid.ndim == 1 and grid.size and np.isfinite(grid).all() and (grid > 0).all()
    if not plain or len(set(grid.tolist())) < grid.size:
        raise ValueError(f"{owner}: `lam` must be numbers > 0, each once, got {lam!r}.")
    if curves.ndim != 2 or curves.shape[1] != grid.size:
        raise ValueError(
            f"{owner}: `losses` must have one value for each of the {grid.size} λ, or (seeds, "
            f"{grid.size}), got the shape {np.shape(losses)}."
        )
    order = np.argsort(grid)
    return grid[order], curves[:, order]


def _per_seed(owner: str, name: str, value: Array, seeds: int) -> Any:
    values = np.atleast_1d(np.asarray(value, float))
    if values.shape not in ((1,), (seeds,)) or not np.isfinite(values).all():
        raise ValueError(
            f"{owner}: `{name}` must be a finite number, or one for each of the {seeds} seeds, got "
            f"{value!r}."
        )
    return np.broadcast_to(values, (seeds,))


def _share(owner: str, name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{owner}: `{name}` must be between 0 and 1, got {value!r}.")
