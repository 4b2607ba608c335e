"""Decoupled weight decays: what pulls x back before a step, outside of the norm.

A decay is a function of a `Batch` that returns what x is multiplied by: a number, a tensor of one
element, or a tensor for every parameter that broadcasts against it. A direction names its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from wngrad import rule

if TYPE_CHECKING:
    from wngrad.optim.step import Batch

Decay: TypeAlias = "Callable[[Batch], float | Tensor | list[Tensor]]"


def by_lr(batch: Batch) -> float | Tensor:
    """x ← x·(1 − w·λ)."""
    kept: float | Tensor = rule.decay(1.0, batch.lam, batch.settings.weight_decay)
    return kept


def by_rate(batch: Batch) -> list[Tensor]:
    """x ← x·(1 − w·λ/b), in proportion to the step."""
    return [rule.decay(1.0, rate, batch.settings.weight_decay) for rate in batch.rates]
