"""Orthogonalized directions: Muon's, for matrices and for embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from wngrad.optim import lists
from wngrad.optim.blocks import Shape
from wngrad.optim.directions import Buffers, Direction
from wngrad.optim.modules import Layout
from wngrad.optim.orthogonal import orthogonalize_all


@dataclass(frozen=True, slots=True)
class Orthogonalized(Direction):
    """m ← μ·m + (1−μ)·g,  u = orthogonalize(μ·m + (1−μ)·g)·max(1, √(out/in)).

    Every singular value of a matrix counts the same (Muon; Jordan et al. 2024), and a neuron's row
    of u has a norm of about 1, however wide the layer is and however large the gradient.
    """

    mu: float
    layout: Layout
    buffers: ClassVar[tuple[str, ...]] = ("m",)
    touches_all: ClassVar[bool] = True
    orthogonalizes: ClassVar[bool] = True
    rows_apart: ClassVar[bool] = False  # rows without a gradient do not move
    rate_in_rule: ClassVar[bool] = False
    decays_by: ClassVar[Literal["lr", "rate"] | None] = "rate"

    def propose(
        self, g: list[Tensor], buffers: Buffers, t: list[Tensor]
    ) -> tuple[list[Tensor], Buffers]:
        ahead, after = self.look_ahead(g, buffers)
        stacks = orthogonalize_all([self.layout.matrices(each) for each in ahead])
        pairs = zip(stacks, g, strict=True)
        u = [self.layout.scale(g.shape) * self.layout.restore(stack, g) for stack, g in pairs]
        return u, after

    def look_ahead(self, g: list[Tensor], buffers: Buffers) -> tuple[list[Tensor], Buffers]:
        """μ·m + (1−μ)·g, which is to be orthogonalized, and the new m: entry by entry."""
        m = lists.lerp(buffers["m"], g, 1 - self.mu)
        return lists.lerp(g, m, self.mu), {"m": m}

    def neurons(self, shape: Shape) -> int:
        """The rows of all its matrices."""
        count, out, _ = self.layout.sizes(shape)
        return count * out


@dataclass(frozen=True, slots=True)
class OrthogonalizedRows(Orthogonalized):
    """The same for an embedding: rows without a gradient in this step do not move or decay."""

    decays_by: ClassVar[Literal["lr", "rate"] | None] = None
    rows_apart: ClassVar[bool] = True

    def propose(
        self, g: list[Tensor], buffers: Buffers, t: list[Tensor]
    ) -> tuple[list[Tensor], Buffers]:
        u, after = Orthogonalized.propose(self, g, buffers, t)
        rows = [(x != 0).flatten(1).any(1).view(-1, *[1] * (x.dim() - 1)) for x in g]
        return [u * rows for u, rows in zip(u, rows, strict=True)], after
