"""Directions: how an optimizer makes its step from the gradient, and what it keeps for that.

A step of any optimizer here is

    u ← propose                     whose norm the rule sees
    b ← b + λ²‖u‖²/b                `wngrad.rule`, one b for each block
    x ← decay·x − displace          the move

A `Direction` fills in the first and the third line. The base class is the gradient itself
(Algorithm 3). To add one, override `propose` (for a direction that the rule is to measure, such as
a sign or an orthogonalized matrix) or `displace` (for what the rule does not see); see
`docs/new-optimizer.md`. Both are handed a `Batch` of parameters, in lists of one tensor for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor

from wngrad import rule
from wngrad.muon_numbers import BETA2
from wngrad.optim import blocks, lists
from wngrad.optim.decays import BY_LR, Decay
from wngrad.optim.modules import Layout
from wngrad.optim.orthogonal import orthogonalize_all

if TYPE_CHECKING:
    from wngrad.optim.step import Batch

_Method = TypeVar("_Method", bound=Callable[..., Any])
# What x moves by, a tensor for each parameter, and what that is multiplied by, in b's shape.
Displacement = tuple[list[Tensor], list[Tensor] | None]


@dataclass(frozen=True, slots=True)
class Direction:
    """The gradient itself: x_j ← x_{j-1} − λ g/b_j  (Alg. 3)."""

    buffers: ClassVar[tuple[str, ...]] = ()  # state of the parameter's shape and type
    counts_blocks: ClassVar[bool] = False  # t is kept for every block, not once a parameter
    touches_all: ClassVar[bool] = False  # moves entries without a gradient, so no sparse ones
    orthogonalizes: ClassVar[bool] = False  # an `Orthogonalized`: u of a shard asks other ranks
    rate_in_rule: ClassVar[bool] = True  # b ← b + λ²‖u‖²/b; else b ← b + ‖u‖²/b
    decay: ClassVar[Decay | None] = BY_LR  # decoupled; None for none

    def propose(self, batch: Batch) -> list[Tensor]:
        """u, which the rule measures; new buffers go to `batch.new`. Must not write."""
        return batch.g

    def displace(self, batch: Batch) -> Displacement:
        """What x moves by, and what that is multiplied by; may write to `batch.buffers`."""
        return batch.u, batch.rates

    def neurons(self, shape: blocks.Shape) -> int:
        """How many parts of a parameter have a u of about unit norm each: its entries."""
        return math.prod(shape)


@dataclass(frozen=True, slots=True)
class Momentum(Direction):
    """v ← μ·v + λ g/b_j,  x_j ← x_{j-1} − v  (`rule.momentum`).

    Every u is in the sum with the λ of its own step: a λ that rises later does not make it longer,
    and what bounds single steps bounds their sum.
    """

    mu: float
    buffers: ClassVar[tuple[str, ...]] = ("velocity",)
    touches_all: ClassVar[bool] = True

    def displace(self, batch: Batch) -> Displacement:
        v = batch.buffers["velocity"]
        lists.mul_(v, self.mu)
        lists.addcmul_(v, batch.u, batch.rates)
        return v, None


@dataclass(frozen=True, slots=True)
class RunningMean(Direction):
    """v ← β·(b_{j-1}/b_j)·v + (1−β)·λ g/b_j,  x_j ← x_{j-1} − v/(1−βᵗ)  (`rule.mean_step`)."""

    beta: float
    buffers: ClassVar[tuple[str, ...]] = ("velocity",)
    counts_blocks: ClassVar[bool] = True
    touches_all: ClassVar[bool] = True

    def displace(self, batch: Batch) -> Displacement:
        v, b, t = batch.buffers["velocity"], batch.b, batch.t
        lists.mul_(v, batch.split(rule.kept(self.beta, batch.b_before, b)))
        lists.addcmul_(v, batch.u, batch.split((1 - self.beta) / b * batch.lam))
        # At t = 0 no block has moved yet, and v is 0.
        return v, batch.split(rule.unbiased(1.0, self.beta, torch.clamp(t.to(b.dtype), min=1)))


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
    decay: ClassVar[Decay | None] = None

    def propose(self, batch: Batch) -> list[Tensor]:
        m = lists.lerp(batch.buffers["m"], batch.g, 1 - self.beta)  # m ← β₁·m + (1−β₁)·g
        old, new = math.sqrt(self.beta2), math.sqrt(1 - self.beta2)
        pairs = zip(batch.buffers["rms"], batch.g, strict=True)
        rms = [torch.hypot(old * r, new * g) for r, g in pairs]  # v ← β₂·v + (1−β₂)·g²
        batch.new = {"m": m, "rms": rms}
        return [self._ratio(*parts) for parts in zip(m, rms, batch.counts(), strict=True)]

    def _ratio(self, m: Tensor, rms: Tensor, t: Tensor) -> Tensor:
        t = t.to(blocks.accumulator(t.device)) + 1
        unbiased = (1 - self.beta2**t).sqrt() / (1 - self.beta**t)
        return (self.scale * unbiased).to(m.dtype) * torch.where(rms == 0, m, m / rms)


@dataclass(frozen=True, slots=True)
class Orthogonalized(Direction):
    """m ← μ·m + (1−μ)·g,  u = orthogonalize(μ·m + (1−μ)·g)·max(1, √(out/in)).

    Every singular value of a matrix counts the same (Muon; Jordan et al. 2024), and a neuron's row
    of u has a norm of about 1, however wide the layer is and however large the gradient. The rows
    of an embedding that have no gradient in this step do not move.

    Args:
        layout: how the parameter is a stack of matrices.
        decay: what pulls x back; None for nothing.
        rows_apart: whether it is an embedding.
    """

    mu: float
    layout: Layout
    decay: Decay | None = field(default=None, kw_only=True)  # type: ignore[misc]
    rows_apart: bool = False
    buffers: ClassVar[tuple[str, ...]] = ("m",)
    touches_all: ClassVar[bool] = True
    orthogonalizes: ClassVar[bool] = True
    rate_in_rule: ClassVar[bool] = False

    def propose(self, batch: Batch) -> list[Tensor]:
        ahead = self.look_ahead(batch)
        layout, u = self.layout, []
        stacks = orthogonalize_all([a if layout.is_one(a) else layout.matrices(a) for a in ahead])
        for stack, a in zip(stacks, ahead, strict=True):
            x = stack if layout.is_one(a) and stack.dim() == 2 else layout.restore(stack, a)
            scale = layout.scale(a.shape)
            u.append(x if scale == 1 else scale * x)
        if self.rows_apart:
            u = [x * self.moving_rows(g) for x, g in zip(u, batch.g, strict=True)]
        return u

    def look_ahead(self, batch: Batch) -> list[Tensor]:
        """μ·m + (1−μ)·g, which is to be orthogonalized: entry by entry."""
        m = lists.lerp(batch.buffers["m"], batch.g, 1 - self.mu)
        batch.new = {"m": m}
        return lists.lerp(batch.g, m, self.mu)

    def moving_rows(self, g: Tensor) -> Tensor:
        """Which indices of an embedding's dimension 0 have a gradient."""
        return (g != 0).flatten(1).any(1).view(-1, *[1] * (g.dim() - 1))

    def neurons(self, shape: blocks.Shape) -> int:
        """The rows of all its matrices."""
        count, out, _ = self.layout.sizes(shape)
        return count * out


GRADIENT = Direction()


def known_to_kernels(momentum: str) -> Callable[[_Method], _Method]:
    """Marks an optimizer's `direction` method as one that the fused kernels stand in for.

    A subclass that overrides the method loses the mark, and with it the kernels: what it returns
    then is what is stepped with.

    Args:
        momentum: the name of the setting that holds μ or β.
    """

    def mark(method: _Method) -> _Method:
        method.momentum_setting = momentum  # type: ignore[attr-defined]
        return method

    return mark
