"""Whether a sequence of training losses falls, as a sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from wngrad.optim import checks

_FEWEST = 20  # losses from which a trend is read
_SURE = 3.0  # standard errors by which two medians differ for certain
_NEAR_ZERO = 0.2  # spread over level: minibatches of a loss close to zero differ by factors
_ZERO = 1e-3  # a loss that is next to zero even without any spread
_GUESS = 0.98, 1.1  # a network that guesses is at ln K, or above it if its steps are noisy


@dataclass(frozen=True, slots=True)
class Trend:
    """The medians of the first and the last quarter, and how far losses lie from them."""

    length: int
    first: float
    last: float
    spread: float  # a standard deviation, from the median distance: outliers do not matter
    near_zero: bool  # the last quarter

    @property
    def fall(self) -> float:
        return self.first - self.last

    @property
    def noise(self) -> float:
        """The standard error of the fall: a median of k normal numbers has √(π/2k)·σ."""
        return self.spread * math.sqrt(math.pi / (self.length // 4))

    def __str__(self) -> str:
        return (
            f"median {self.first:.4g} in the first quarter of {self.length} losses, "
            f"{self.last:.4g} in the last, spread {self.spread:.2g}"
        )


def numbers(owner: str, losses: Iterable[float | Tensor]) -> list[float]:
    """The losses as floats; waits for the device once, however many tensors there are."""
    values = list(losses)
    tensors = [x for x in values if isinstance(x, Tensor)]
    for x in tensors:
        if x.numel() != 1 or x.is_complex():
            raise ValueError(
                f"{owner}: `losses` must hold real numbers or tensors of one, got a tensor of "
                f"shape {tuple(x.shape)} and dtype {x.dtype}."
            )
    flat = [x.detach().reshape(()).to(tensors[0].device, torch.float64) for x in tensors]
    of_tensors = iter(torch.stack(flat).tolist() if flat else [])
    return [
        next(of_tensors) if isinstance(x, Tensor) else checks.real(owner, "losses", x)
        for x in values
    ]


def trend(losses: list[float]) -> Trend:
    """What the first and the last quarter of finite losses say; the middle is not read."""
    x = torch.tensor(losses, dtype=torch.float64)
    k = len(losses) // 4
    first, last = x[:k], x[-k:]
    away, away_last = first - _middle(first), last - _middle(last)
    level, deviation = _middle(last).item(), 1.4826 * _middle(away_last.abs()).item()
    near_zero = bool(last.min() >= 0) and (level <= _ZERO or deviation >= _NEAR_ZERO * level)
    spread = 1.4826 * _middle(torch.cat([away, away_last]).abs()).item()
    return Trend(len(losses), _middle(first).item(), level, spread, near_zero)


def verdict(owner: str, losses: Iterable[float | Tensor], classes: int | None) -> str:
    """A sentence on whether the losses fall, oldest first.

    Args:
        classes: how many rows the last parameter has: perhaps the number of classes.
    """
    given = numbers(owner, losses)
    finite = [x for x in given if math.isfinite(x)]
    clauses = []
    if bad := len(given) - len(finite):
        at = next(i for i, x in enumerate(given) if not math.isfinite(x))
        clauses.append(
            f'{bad} of {len(given)} are not finite, the first at index {at} (nonfinite="raise" '
            f"names the parameter)"
        )
    if len(finite) < _FEWEST:
        clauses.append(f"too few to judge: {len(finite)} finite ones of at least {_FEWEST}")
    else:
        clauses.append(_judged(trend(finite), classes))
    return f"loss: {'; '.join(clauses)}."


def _judged(t: Trend, classes: int | None) -> str:
    if t.fall > max(_SURE * t.noise, t.spread):
        return f"falls ({t})"
    if t.fall < -max(_SURE * t.noise, t.spread):
        said = f"rises ({t})"
    elif t.fall > _SURE * t.noise:
        said = f"hardly falls ({t})"
    else:
        said = f"does not fall ({t})"
    return f"{said}: {_context(t, classes)}"


def _context(t: Trend, classes: int | None) -> str:
    """What a loss that does not fall may mean. A fact is called a fact, a guess a guess."""
    if t.near_zero:
        return "it lies close to zero, as the loss of a run that has converged does"
    restart = "start again with a smaller lr or less momentum, or with normalization layers"
    if classes is not None and classes > 1:
        guess = math.log(classes)
        if _GUESS[0] * guess <= t.last <= _GUESS[1] * guess:
            return (
                f"the last parameter has {classes} rows, and ln {classes} = {guess:.4g} is the "
                f"loss of guessing among {classes} classes; if that is what they are, nothing has "
                f"been learned ({restart})"
            )
    return f"either this is as low as it gets, or the run is stuck (then {restart})"


def _middle(x: Tensor) -> Tensor:
    return torch.quantile(x, 0.5)
