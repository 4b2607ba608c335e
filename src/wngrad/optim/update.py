"""The step itself: first every new b, then every parameter.

`propose` changes nothing, so whatever can fail, fails there; `commit` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from wngrad import rule
from wngrad.optim import blocks, sharded
from wngrad.optim.pieces import Family, Piece, Proposal
from wngrad.optim.rounding import rounded

Cuts = tuple[Any, ...]  # process groups


class Algorithm(Protocol):
    """What tells one optimizer's step from another's."""

    _buffer: str
    _counts_blocks: bool

    def _move(
        self, x: Tensor, g: Tensor, b: Tensor, buf: Tensor | None, t: Tensor, family: Family
    ) -> tuple[Tensor, Tensor | None]: ...

    def _move_in_place(
        self, p: Tensor, g: Tensor, b: Tensor, buf: Tensor | None, t: Tensor, family: Family
    ) -> None: ...


def propose(families: list[Family]) -> list[Proposal]:
    """The new b of every piece: b_j ← b_{j-1} + λ²‖g‖²/b_{j-1}."""
    norms = _over_ranks([_norms(family) for family in families])
    alike: dict[Any, list[_Blocks]] = {}
    for family, squares in zip(families, norms, strict=True):
        for part, sq, b in zip(family.pieces, squares, _shared_b(family), strict=True):
            some = _Blocks(family, part, sq, b)
            # A compiler needs no help: there nothing is put together.
            alike.setdefault(len(alike) if family.traced else some.kind, []).append(some)
    return [proposal for some in alike.values() for proposal in _propose(some)]


class _Blocks(NamedTuple):
    """The blocks of a piece: ‖g‖² and b of each."""

    family: Family
    piece: Piece
    sq: Tensor
    b: Tensor

    @property
    def kind(self) -> Any:
        """What the rule of b depends on."""
        return id(self.family.group), self.family.hold, self.b.device, self.b.dtype


def _propose(alike: list[_Blocks]) -> list[Proposal]:
    """What pieces of one kind are to do, in a few operations for all their blocks."""
    family = alike[0].family
    sq, b = _flat([some.sq for some in alike]), _flat([some.b for some in alike])
    new, finite = _next_b(family, sq, b)
    live = _live(family, new, finite)
    divisor = torch.where(new == 0, 1, new)  # where there is no b yet nothing is written
    of_each = zip(*(_cut(t, alike) for t in (new, finite, live, divisor)), strict=True)
    return [
        Proposal(some.family, some.piece, *found)
        for some, found in zip(alike, of_each, strict=True)
    ]


def _flat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])


def _cut(flat: Tensor | None, alike: list[_Blocks]) -> Sequence[Any]:
    """What `_flat` has put together, in its parts again."""
    if flat is None or len(alike) == 1:
        return [flat] * len(alike)
    parts = torch.split(flat, [some.b.numel() for some in alike])
    return [part.view_as(some.b) for part, some in zip(parts, alike, strict=True)]


def _next_b(family: Family, sq: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The new b of blocks, and which of them are finite."""
    group, lam = family.group, family.lam
    wide = b.to(sq.dtype, copy=group["differentiable"])
    if isinstance(group["b_init"], tuple):
        wide = _latched(wide, sq, lam, group["b_init"][1], torch.finfo(b.dtype))
    if not family.hold:
        # What has no b yet keeps none; 0·‖g‖² lets a NaN show all the same.
        unset = wide == 0
        wide = torch.where(unset, 0 * sq, rule.next_b(torch.where(unset, 1, wide), sq, lam))
    new = wide.to(b.dtype)
    finite = torch.isfinite(new) & torch.isfinite(sq)
    # An infinite b would freeze the block for ever, and in silence. NaN shows.
    new = torch.where(torch.isinf(new), torch.nan, new)
    if isinstance(lam, Tensor):  # A step without rate changes nothing.
        new, finite = torch.where(lam != 0, new, b), finite | (lam == 0)
    return new, finite


def commit(proposal: Proposal, algorithm: Algorithm) -> None:
    """Move the parameter, and store what the step proposes."""
    family, part, b, finite, live, divisor = proposal
    group, state = family.group, part.state
    t = state["t"] + _as_count(family.lam)
    if algorithm._counts_blocks and live is not None:
        t = torch.where(live, state["t"] + 1, state["t"])
    buffer = state.get(algorithm._buffer)
    move = _move_in_place if _in_place(proposal) else _move
    move(family, part, divisor, buffer, t, live, algorithm)
    if group["nonfinite"] == "skip":
        b = torch.where(finite, b, state["b"])
        state["skipped"].add_(~finite)
    state["b"].copy_(b)
    state["t"].copy_(t)
    if part.write_back is not None:
        part.write_back()


def _move(
    family: Family,
    part: Piece,
    b: Tensor,
    buffer: Tensor | None,
    t: Tensor,
    live: Tensor | None,
    algorithm: Algorithm,
) -> None:
    group, done = family.group, 0
    for p, g, b_, t_, on, buf in _chunks(family, part.p, part.g, b, t, live, buffer):
        x = _working(p, copy=group["differentiable"])
        m = None if buf is None else _working(buf, copy=group["differentiable"])
        g_ = _gradient(p, g, family)
        if group["decoupled_weight_decay"] and group["weight_decay"]:
            x = rule.decay(x, family.lam, group["weight_decay"])
        x, m = algorithm._move(x, g_, b_, m, t_, family)
        if buf is not None:
            buf.copy_(m if on is None else torch.where(on, cast(Tensor, m), buf))
        if group["stochastic_rounding"] and p.dtype == torch.bfloat16:
            x = rounded(x, t_, done)
        p.copy_(x if on is None else torch.where(on, x, p))
        done += p.numel()


def _in_place(proposal: Proposal) -> bool:
    """Whether a parameter is moved without temporaries. Nothing waits for a GPU because of it."""
    family, p = proposal.family, proposal.piece.p
    if family.traced or p.dtype not in blocks.IN_PLACE:
        return False
    known = proposal.live is None and not isinstance(family.lam, Tensor)
    return p.device.type == "cpu" or (p.is_cuda and known)


def _move_in_place(
    family: Family,
    part: Piece,
    b: Tensor,
    buffer: Tensor | None,
    t: Tensor,
    live: Tensor | None,
    algorithm: Algorithm,
) -> None:
    group = family.group
    still = live is not None and not bool(live.all())  # some blocks stay: they are put back
    for p, g, b_, t_, on, buf in _chunks(family, part.p, part.g, b, t, live, buffer):
        before = [(x, x.clone()) for x in (p, buf) if still and x is not None]
        g_ = _gradient(p, g, family)
        if group["decoupled_weight_decay"] and group["weight_decay"]:
            p.mul_(1 - float(family.lam) * group["weight_decay"])  # rule.decay
        algorithm._move_in_place(p, g_, b_, buf, t_, family)
        for x, old in before:
            x.copy_(torch.where(on, x, old))


def _live(family: Family, b: Tensor, finite: Tensor) -> Tensor | None:
    """The blocks that take this step, or None for all of them.

    Not those that are skipped, those that have no b yet, and none at all if λ is 0: a step without
    rate leaves buffers and counts alone, as a checkpoint loader's dummy step must.
    """
    group, lam = family.group, family.lam
    masks = [lam != 0] if isinstance(lam, Tensor) else []
    if group["nonfinite"] == "skip":
        masks.append(finite)
    if isinstance(group["b_init"], tuple):
        masks.append(b != 0)
    if not masks:
        return None
    live = torch.ones_like(finite)
    for mask in masks:
        live = live & mask
    return live


def _as_count(lam: float | Tensor) -> float | Tensor:
    return (lam != 0) if isinstance(lam, Tensor) else 1.0


def _working(t: Tensor, *, copy: bool = False) -> Tensor:
    """`t` in float32 or wider; a copy where autograd will want the value from before the step."""
    return t.to(torch.promote_types(t.dtype, torch.float32), copy=copy)


def _gradient(p: Tensor, g: Tensor, family: Family) -> Tensor:
    """The gradient the rule sees: unscaled, of −f if maximizing, with coupled decay in it."""
    g, group = _working(g), family.group
    if family.scale is not None:
        g = g / family.scale.to(g.device).reshape(())
    if group["maximize"]:
        g = -g
    if group["weight_decay"] and not group["decoupled_weight_decay"]:
        g = g + group["weight_decay"] * _working(p, copy=group["differentiable"])
    return g


def _chunks(family: Family, *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    return blocks.chunks(family.traced, *cast(tuple[Tensor, ...], tensors))


def _sq_norm(part: Piece, family: Family) -> Tensor:
    """‖g‖² of each block of a piece, on this rank."""
    shape = tuple(part.state["b"].shape)
    pairs = _chunks(family, part.p, part.g)
    sums = [blocks.sq_norm(_gradient(p, g, family), shape, traced=family.traced) for p, g in pairs]
    if len(sums) == 1:
        return sums[0]
    return torch.stack(sums).sum(0) if shape[0] == 1 else torch.cat(sums)


class _Norms(NamedTuple):
    """‖g‖² of a family's blocks on this rank, summed over its parameters."""

    like: list[Tensor]  # one for each piece: its shape and device
    sums: dict[Cuts, Tensor]  # flat, by the ranks between which the blocks are cut


def _norms(family: Family) -> _Norms:
    like = [_sq_norm(part, family) for part in family.pieces]
    sums: dict[Cuts, Tensor] = {}  # what the same ranks share is summed up first
    for part, sq in zip(family.pieces, like, strict=True):
        flat = sq.flatten().to(like[0].device)
        sums[part.cuts] = sums[part.cuts] + flat if part.cuts in sums else flat
    return _Norms(like, sums)


def _over_ranks(norms: list[_Norms]) -> list[list[Tensor]]:
    """For each family, ‖g‖² for each piece, over all ranks that hold a part of its blocks.

    One small sum for the whole step, for each set of ranks between which anything is cut.
    """
    if len(norms) == 1 and len(norms[0].like) == 1 and () in norms[0].sums:
        return [norms[0].like]
    for cuts in dict.fromkeys(cuts for family in norms for cuts in family.sums if cuts):
        mine = [family.sums for family in norms if cuts in family.sums]
        parts = [sums[cuts] for sums in mine]
        total = torch.cat([part.to(parts[0].device) for part in parts])
        total = sharded.sum_over_ranks(total, cuts)
        for sums, part in zip(mine, torch.split(total, [p.numel() for p in parts]), strict=True):
            sums[cuts] = part.to(sums[cuts].device)
    return [
        [reduce(add, family.sums.values()).to(sq.device).view_as(sq) for sq in family.like]
        for family in norms
    ]


def _shared_b(family: Family) -> list[Tensor]:
    """The b each piece starts from.

    b never decreases, so among relatives the largest is the latest: a parameter that was frozen
    for a while takes over what the others have reached.
    """
    mine = [part.state["b"] for part in family.pieces]
    if len(mine) + len(family.absent) == 1:
        return mine
    every = torch.stack([b.flatten().to(mine[0].device) for b in [*mine, *family.absent]])
    return [every.amax(0).to(b.device).view_as(b) for b in mine]


def _latched(b: Tensor, sq: Tensor, lam: Any, c: float, info: torch.finfo) -> Tensor:
    """b, or b₁ = C·λ·‖g₁‖ where a block meets its first gradient that is neither 0 nor denormal."""
    some = sq > 0
    norm = torch.where(some, torch.where(some, sq, 1).sqrt(), 0)  # √ has no slope at 0
    b1 = rule.first_b(norm, lam, c)
    # Below this a gradient's entries may be denormal, with too few digits to start from.
    floor = info.tiny / info.eps
    return torch.where((b == 0) & (norm >= floor) & (b1 >= floor), b1, b)
