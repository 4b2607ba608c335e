"""A parameter in one step: its tensors as plain real ones that broadcast against its b.

Whatever a parameter is (a shard, complex, given a sparse gradient, cut into odd blocks), a step
sees plain tensors here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from wngrad.optim import blocks, sharded, state
from wngrad.optim.directions import Direction
from wngrad.optim.settings import Settings

_LATER: Any = None  # what `open_views`, or a verb of the step, fills in


@dataclass(slots=True, eq=False)
class Step:
    """One parameter in one step, and what the step computes for it."""

    param: Tensor
    group: int  # its number
    settings: Settings
    lam: float | Tensor
    direction: Direction
    shapes: dict[str, blocks.Shape]  # of the state it needs
    holds: bool  # b stays at b₁
    scale: Tensor | None  # what a GradScaler has multiplied the gradient by
    traced: bool  # autograd or a compiler is to see the step
    untraceable: bool  # a trace would lose new state, and cannot see sparse gradients
    sharded: bool

    p: Tensor = _LATER
    g: Tensor = _LATER
    b: Tensor = _LATER
    t: Tensor = _LATER  # the steps before this one: of each block, or of the parameter
    skipped: Tensor | None = None
    norm: Tensor | None = None  # by which λ is multiplied
    buffers: dict[str, Tensor] = _LATER  # by name, in the shape of p
    shape: torch.Size = _LATER  # the parameter's own, on this rank, as real numbers
    ranks: tuple[Any, ...] = ()  # the process groups between whose ranks its blocks are cut
    absent: list[Tensor] = field(default_factory=list)  # b of those that share it, without gradient
    write_back: Callable[[], None] | None = None  # for what had to be copied out

    sq: Tensor = _LATER  # ‖u‖² of its blocks, and then of all that share its b
    start: Tensor = _LATER  # what b starts from

    @property
    def asks_ranks(self) -> bool:
        """Whether u may depend on other ranks."""
        return self.sharded and self.direction.orthogonalizes


def open_views(step: Step, kept: dict[str, Tensor], alone: bool) -> None:
    """Give a step its tensors.

    Args:
        kept: the parameter's state.
        alone: whether it shares its b with no other.
    """
    param = step.param
    names = step.direction.buffers
    if step.settings.average is not None:
        names = (*names, state.AVERAGE)
    p, g = param, cast(Tensor, param.grad)
    if step.sharded:
        step.ranks = sharded.cuts(param, kept["b"])
        kept = {name: sharded.local(value) for name, value in kept.items()}
        p, g = sharded.local(param), sharded.local_gradient(param)
    g = g.resolve_conj().resolve_neg()
    if g.is_sparse:
        b = kept["b"]
        if g.sparse_dim() == 1 and (alone or b.numel() == 1) and len(b) in (1, len(p)):
            p, g, kept, step.write_back = _rows(p, g.coalesce(), kept)
        else:
            g = g.to_dense()
    if state.NORM in step.shapes:
        step.norm = kept[state.NORM]
    step.shape = torch.view_as_real(p).shape if p.is_complex() else p.shape
    b_shape, cut = kept["b"].shape, p.is_complex()
    for n, d in zip(b_shape, p.shape, strict=True):
        cut = cut or n not in (1, d)
    if cut:
        small = {name: _small(p, kept[name]) for name in state.PER_BLOCK if name in kept}
        large = {name: _large(kept[name], b_shape) for name in names}
        p, g, kept = _large(p, b_shape), _large(g, b_shape), {**small, **large}
    step.p, step.g, step.b, step.t, step.skipped = p, g, kept["b"], kept["t"], kept.get("skipped")
    step.buffers = {}
    for name in names:
        step.buffers[name] = kept[name]


def _large(t: Tensor, shape: blocks.Shape) -> Tensor:
    split, _ = blocks.split(t, shape)
    return torch.view_as_real(split) if t.is_complex() else split


def _small(p: Tensor, v: Tensor) -> Tensor:
    if v.dim() == 0 and p.dim() > 0:
        return v  # one for the whole parameter
    _, shape = blocks.split(p, tuple(v.shape))
    return v.view(shape).unsqueeze(-1) if p.is_complex() else v.view(shape)


def _rows(p: Tensor, g: Tensor, kept: dict[str, Tensor]) -> tuple[Tensor, Tensor, Any, Any]:
    """The rows a sparse gradient touches, copied out, and how to put them back."""
    index = g.indices()[0]
    # A single row may be untouched, where its b must still be there for those that share it.
    many = p.shape[0] > 1
    per_row = {key for key, v in kept.items() if many and v.dim() and v.shape[0] == p.shape[0]}
    copies = {key: v.index_select(0, index) if key in per_row else v for key, v in kept.items()}
    p_rows = p.index_select(0, index)

    def write_back() -> None:
        p.index_copy_(0, index, p_rows)
        for key in per_row:
            kept[key].index_copy_(0, index, copies[key])

    return p_rows, g.values(), copies, write_back
