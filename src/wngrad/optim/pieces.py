"""One parameter's part in a step: its tensors as views that broadcast against b.

Whatever a parameter is (a shard, complex, given a sparse gradient, cut into odd blocks), the step
sees plain real tensors here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wngrad.optim import blocks, sharded
from wngrad.optim.state import SMALL


@dataclass(slots=True)
class Piece:
    """A parameter, its gradient and its state, as the step sees them."""

    param: Tensor
    p: Tensor
    g: Tensor
    state: dict[str, Tensor]  # b, t and, where they are kept, the buffer and the skips
    cuts: tuple[Any, ...]  # the process groups between whose ranks its blocks are cut
    write_back: Callable[[], None] | None = None  # for what had to be copied out


@dataclass(slots=True)
class Family:
    """Parameters that share one b per block (mostly one alone), and their group's settings."""

    group: dict[str, Any]
    lam: float | Tensor
    pieces: list[Piece]
    absent: list[Tensor]  # the b of relatives without a gradient in this step
    hold: bool  # b stays at b₁
    scale: Tensor | None = None  # what a GradScaler has multiplied the gradient by

    @property
    def traced(self) -> bool:
        """Whether autograd or a compiler is to see the step: then it is one expression."""
        return bool(self.group["differentiable"]) or torch.compiler.is_compiling()


class Proposal(NamedTuple):
    """What a step is about to do to a piece."""

    family: Family
    piece: Piece
    b: Tensor  # the new b; 0 where no gradient has set one yet, NaN where it would be infinite
    finite: Tensor  # blocks whose gradient and b are finite
    live: Tensor | None  # blocks that take this step; None for all of them
    divisor: Tensor  # b, and 1 where there is none


def piece(param: Tensor, state: dict[str, Tensor], buffer: str, alone: bool) -> Piece:
    """The views of one parameter; `alone` if it shares its b with no other."""
    p, g = sharded.local(param), sharded.local_gradient(param).resolve_conj().resolve_neg()
    cuts = sharded.cuts(param, state["b"])
    state = {k: sharded.local(v) for k, v in state.items() if k in (*SMALL, buffer)}
    write_back = None
    if g.is_sparse:
        if _by_rows(p, g, state["b"], alone):
            p, g, state, write_back = _rows(p, g.coalesce(), state)
        else:
            g = g.to_dense()
    shape = tuple(state["b"].shape)
    views = {key: _small(p, v) if key in SMALL else _large(v, shape) for key, v in state.items()}
    return Piece(param, _large(p, shape), _large(g, shape), views, cuts, write_back)


def _large(t: Tensor, shape: blocks.Shape) -> Tensor:
    view, _ = blocks.split(t, shape)
    return torch.view_as_real(view) if t.is_complex() else view


def _small(p: Tensor, v: Tensor) -> Tensor:
    if v.dim() == 0 and p.dim() > 0:
        return v  # one for the whole parameter
    _, shape = blocks.split(p, tuple(v.shape))
    return v.view(shape).unsqueeze(-1) if p.is_complex() else v.view(shape)


def _by_rows(p: Tensor, g: Tensor, b: Tensor, alone: bool) -> bool:
    """Whether a sparse gradient can be taken row by row; else it is made dense."""
    return g.sparse_dim() == 1 and (alone or b.numel() == 1) and b.shape[0] in (1, p.shape[0])


def _rows(
    p: Tensor, g: Tensor, state: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor], Callable[[], None]]:
    """The rows a sparse gradient touches, copied out, and how to put them back."""
    index = g.indices()[0]
    # A single row may be untouched, where its b must still be there for its relatives.
    many = p.shape[0] > 1
    per_row = {key for key, v in state.items() if many and v.dim() and v.shape[0] == p.shape[0]}
    rows = {key: v.index_select(0, index) if key in per_row else v for key, v in state.items()}
    p_rows = p.index_select(0, index)

    def write_back() -> None:
        p.index_copy_(0, index, p_rows)
        for key in per_row:
            state[key].index_copy_(0, index, rows[key])

    return p_rows, g.values(), rows, write_back
