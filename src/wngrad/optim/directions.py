"""Directions: how an optimizer makes its step from the gradient, and what it keeps for that.

A step of any optimizer here is

    u ← propose(g, t)                  whose norm the rule sees
    b ← b + λ²‖u‖²/b                   `wngrad.rule`, one b for each block
    d ← advance(u, b)                  the direction of the step
    x ← x − λ·factor(b, t)·d           the move

A `Direction` fills in the first, third and fourth line. The base class is the gradient itself
(Algorithm 3). To add one, override `propose` (for a direction that the rule is to measure, such as
a sign or an orthogonalized matrix) or `advance` (for one that the rule does not see); see
`docs/new-optimizer.md`. Lists hold one tensor for each parameter.

A `Velocity` keeps a sum of earlier steps. The last two lines then are

    v ← kept·v + λ·entering·u
    x ← x − factor(b, t)·v

so that every u is in the sum with the λ of its own step: a λ that rises later does not make it
longer, and what bounds single steps bounds their sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from wngrad import rule
from wngrad.muon_numbers import BETA2
from wngrad.optim import blocks, lists

_Method = TypeVar("_Method", bound=Callable[..., Any])
Buffers = dict[str, list[Tensor]]  # by name, one tensor of the parameter's shape for each parameter


@dataclass(frozen=True, slots=True)
class Direction:
    """The gradient itself: x_j ← x_{j-1} − λ g/b_j  (Alg. 3)."""

    buffers: ClassVar[tuple[str, ...]] = ()  # state of the parameter's shape and type
    counts_blocks: ClassVar[bool] = False  # t is kept for every block, not once a parameter
    touches_all: ClassVar[bool] = False  # moves entries without a gradient, so no sparse ones
    orthogonalizes: ClassVar[bool] = False  # an `Orthogonalizing`: u of a shard asks other ranks
    rate_in_rule: ClassVar[bool] = True  # b ← b + λ²‖u‖²/b; else b ← b + ‖u‖²/b
    # What decoupled weight decay is in proportion to: λ, the block's own rate, or there is none.
    decays_by: ClassVar[Literal["lr", "rate"] | None] = "lr"

    @property
    def measures_gradient(self) -> bool:
        """Whether the rule measures g itself. What else it measures may need whole parameters."""
        return type(self).propose is Direction.propose

    def propose(
        self, g: list[Tensor], buffers: Buffers, t: list[Tensor]
    ) -> tuple[list[Tensor], Buffers]:
        """What the rule measures, and the buffers as they will be. Must not write.

        Args:
            t: the steps before this one: of each block if `counts_blocks`, else one number.
        """
        return g, {}

    def advance(self, u: list[Tensor], b: list[Tensor], buffers: Buffers) -> list[Tensor]:
        """The direction of the step; may write to `buffers`. b broadcasts against u."""
        return u

    def factor(self, b: Tensor, t: Tensor) -> Tensor | None:
        """What λ·d is multiplied by, for any number of blocks at once; None for 1."""
        return 1 / b

    def neurons(self, shape: blocks.Shape) -> int:
        """How many parts of a parameter have a u of about unit norm each: its entries."""
        return math.prod(shape)


@dataclass(frozen=True, slots=True)
class Velocity(Direction):
    """v ← kept·v + λ·entering·u,  x_j ← x_{j-1} − factor·v: a sum of steps, each with its own λ."""

    buffers: ClassVar[tuple[str, ...]] = ("velocity",)
    touches_all: ClassVar[bool] = True

    def kept(self, b_before: Tensor, b: Tensor) -> float | Tensor:
        """What v is multiplied by, for any number of blocks at once."""
        raise NotImplementedError

    def entering(self, b: Tensor) -> Tensor:
        """What λ·u is multiplied by."""
        return 1 / b

    def factor(self, b: Tensor, t: Tensor) -> Tensor | None:
        return None


@dataclass(frozen=True, slots=True)
class Momentum(Velocity):
    """v ← μ·v + λ g/b_j,  x_j ← x_{j-1} − v  (`rule.momentum`)."""

    mu: float

    def kept(self, b_before: Tensor, b: Tensor) -> float | Tensor:
        return self.mu


@dataclass(frozen=True, slots=True)
class RunningMean(Velocity):
    """v ← β·(b_{j-1}/b_j)·v + (1−β)·λ g/b_j,  x_j ← x_{j-1} − v/(1−βᵗ)  (`rule.mean_step`)."""

    beta: float
    counts_blocks: ClassVar[bool] = True

    def kept(self, b_before: Tensor, b: Tensor) -> float | Tensor:
        kept: Tensor = rule.kept(self.beta, b_before, b)
        return kept

    def entering(self, b: Tensor) -> Tensor:
        return (1 - self.beta) / b

    def factor(self, b: Tensor, t: Tensor) -> Tensor | None:
        # At t = 0 no block has moved yet, and v is 0.
        factor: Tensor = rule.unbiased(1.0, self.beta, torch.clamp(t.to(b.dtype), min=1))
        return factor


@dataclass(frozen=True, slots=True)
class Adam(Direction):
    """u = scale·m̂/√v̂, Adam's direction, measured by the rule: b ← b + ‖u‖²/b.

    `rms` is √v, which neither overflows nor underflows where g does not. No entry of u is larger
    than 2.35·scale at β ≥ 0.9, whatever the gradients.
    """

    scale: float
    beta: float
    beta2: float = BETA2
    buffers: ClassVar[tuple[str, ...]] = ("m", "rms")
    counts_blocks: ClassVar[bool] = True
    touches_all: ClassVar[bool] = True
    rate_in_rule: ClassVar[bool] = False
    decays_by: ClassVar[Literal["lr", "rate"] | None] = None

    def propose(
        self, g: list[Tensor], buffers: Buffers, t: list[Tensor]
    ) -> tuple[list[Tensor], Buffers]:
        m = lists.lerp(buffers["m"], g, 1 - self.beta)  # m ← β₁·m + (1−β₁)·g
        old, new = math.sqrt(self.beta2), math.sqrt(1 - self.beta2)
        pairs = zip(buffers["rms"], g, strict=True)
        rms = [torch.hypot(old * r, new * g) for r, g in pairs]  # v ← β₂·v + (1−β₂)·g²
        u = [self._ratio(*each) for each in zip(m, rms, t, strict=True)]
        return u, {"m": m, "rms": rms}

    def _ratio(self, m: Tensor, rms: Tensor, t: Tensor) -> Tensor:
        t = t.to(blocks.accumulator(t.device)) + 1
        unbiased = (1 - self.beta2**t).sqrt() / (1 - self.beta**t)
        return (self.scale * unbiased).to(m.dtype) * torch.where(rms == 0, m, m / rms)


GRADIENT = Direction()


def known_to_kernels(setting: str, *others: str) -> Callable[[_Method], _Method]:
    """Marks an optimizer's `direction` method as one that the fused kernels stand in for.

    A subclass that overrides the method loses the mark, and with it the kernels: what it returns
    then is what is stepped with.

    Args:
        setting: the group's setting that holds μ or β.
        others: settings of the group that the kind of direction depends on.
    """

    def mark(method: _Method) -> _Method:
        method.kernel_settings = (setting, *others)  # type: ignore[attr-defined]
        return method

    return mark
