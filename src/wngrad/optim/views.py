"""What a step works on: every parameter's tensors as views that broadcast against its b.

Whatever a parameter is (a shard, complex, given a sparse gradient, cut into odd blocks), the step
sees plain real tensors here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from wngrad.optim import blocks, sharded
from wngrad.optim.checks import Settings
from wngrad.optim.directions import Direction
from wngrad.optim.state import AVERAGE, NORM, PER_BLOCK


@dataclass(slots=True)
class View:
    """A parameter, its gradient and its state, or some rows of them."""

    param: Tensor
    direction: Direction
    p: Tensor
    g: Tensor
    b: Tensor
    t: Tensor
    skipped: Tensor | None
    buffers: dict[str, Tensor]  # by name, of the parameter's shape
    groups: tuple[Any, ...]  # the process groups between whose ranks its blocks are cut
    norm: Tensor | None = None  # by which λ is multiplied
    write_back: Callable[[], None] | None = None  # for what had to be copied out
    first: int = 0  # the number of its first element in the parameter
    counts: bool = True  # stores t where that is one number: once for all rows of a parameter
    stores: bool = True  # stores b, t and skips of blocks: once where rows share them


@dataclass(slots=True)
class SharedBlocks:
    """Parameters that share one b per block (mostly one alone), and what their group says."""

    settings: Settings
    lam: float | Tensor
    members: list[View]
    members_without_gradient: list[Tensor] = field(default_factory=list)  # the b of each
    hold: bool = False  # b stays at b₁
    grad_scale: Tensor | None = None  # what a GradScaler has multiplied the gradient by

    @property
    def alone(self) -> bool:
        """Whether its blocks depend on no other parameter and on no other rank."""
        return (
            len(self.members) + len(self.members_without_gradient) == 1
            and not self.members[0].groups
        )


def view(
    param: Tensor,
    state: dict[str, Tensor],
    direction: Direction,
    alone: bool,
    averages: bool,
    relative: bool,
) -> View:
    """The views of one parameter; `alone` if it shares its b with no other."""
    names = (*direction.buffers, AVERAGE) if averages else direction.buffers
    p, groups, write_back = param, (), None
    if sharded.is_sharded(param):
        groups = sharded.cuts(param, state["b"])
        state = {name: sharded.local(value) for name, value in state.items()}
        p, g = sharded.local(param), sharded.local_gradient(param)
    else:
        g = cast(Tensor, param.grad)
    g = g.resolve_conj().resolve_neg()
    if g.is_sparse:
        if _by_rows(p, g, state["b"], alone):
            p, g, state, write_back = _rows(p, g.coalesce(), state)
        else:
            g = g.to_dense()
    shape = state["b"].shape
    if p.is_complex() or any(n != 1 != d != n for n, d in zip(shape, p.shape, strict=True)):
        small = {name: _small(p, state[name]) for name in PER_BLOCK if name in state}
        large = {name: _large(state[name], shape) for name in names}
        p, g, state = _large(p, shape), _large(g, shape), {**small, **large}
    buffers = {name: state[name] for name in names}
    skipped = state.get("skipped")
    norm = state.get(NORM) if relative else None
    return View(param, direction, p, g, state["b"], state["t"], skipped, buffers, groups, norm,
                write_back)  # fmt: skip


def rows(unit: SharedBlocks, most: int) -> Iterator[SharedBlocks]:
    """The same blocks, some rows of the parameter at a time: no more than `most` elements.

    Rows with a b each are as independent as parameters are; rows that share one b stay together,
    as members of one unit.
    """
    (whole,) = unit.members
    n = whole.p.shape[:1].numel()
    if n <= 1 or whole.p.numel() <= most or whole.write_back is not None:
        yield unit
        return
    step = max(1, most * n // whole.p.numel())
    pieces = [_some_rows(whole, i, min(i + step, n), n) for i in range(0, n, step)]
    if whole.b.shape[0] == n:
        for piece in pieces:
            yield replace(unit, members=[piece])
    else:
        yield replace(unit, members=pieces)


def _some_rows(whole: View, start: int, stop: int, n: int) -> View:
    def cut(t: Any) -> Any:
        return t[start:stop] if t is not None and t.dim() and t.shape[0] == n else t

    return replace(
        whole,
        p=whole.p[start:stop],
        g=whole.g[start:stop],
        b=cut(whole.b),
        t=cut(whole.t),
        skipped=cut(whole.skipped),
        buffers={name: cut(buffer) for name, buffer in whole.buffers.items()},
        first=start * (whole.p.numel() // n),
        counts=stop == n,
        stores=stop == n or whole.b.shape[0] == n,
    )


def _large(t: Tensor, shape: blocks.Shape) -> Tensor:
    split, _ = blocks.split(t, shape)
    return torch.view_as_real(split) if t.is_complex() else split


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
    # A single row may be untouched, where its b must still be there for the other members.
    many = p.shape[0] > 1
    per_row = {key for key, v in state.items() if many and v.dim() and v.shape[0] == p.shape[0]}
    copies = {key: v.index_select(0, index) if key in per_row else v for key, v in state.items()}
    p_rows = p.index_select(0, index)

    def write_back() -> None:
        p.index_copy_(0, index, p_rows)
        for key in per_row:
            state[key].index_copy_(0, index, copies[key])

    return p_rows, g.values(), copies, write_back
