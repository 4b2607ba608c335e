"""Decoupled weight decays: what pulls x back before a step, outside of the norm.

A decay is an object that says what x is multiplied by, of a `Batch` of parameters: a number, a
tensor of one element, or a tensor for each parameter that broadcasts against it. A direction names
its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from wngrad import rule

if TYPE_CHECKING:
    from wngrad.optim.step import Batch


@dataclass(frozen=True, slots=True)
class Decay:
    """What pulls x back."""

    def kept(self, batch: Batch) -> float | Tensor | list[Tensor]:
        """What x is multiplied by."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ByLr(Decay):
    """x ← x·(1 − w·λ)."""

    def kept(self, batch: Batch) -> float | Tensor | list[Tensor]:
        kept: float | Tensor = rule.decay(1.0, batch.steps[0].lam, batch.settings.weight_decay)
        return kept


@dataclass(frozen=True, slots=True)
class ByRate(Decay):
    """x ← x·(1 − w·λ/b): in proportion to the step."""

    def kept(self, batch: Batch) -> float | Tensor | list[Tensor]:
        return [rule.decay(1.0, rate, batch.settings.weight_decay) for rate in batch.rates]


# One object for each: a compiler does not make them anew.
BY_LR, BY_RATE = ByLr(), ByRate()
