"""Sharded parameters (DTensor): each rank works on its own piece.

Where the blocks lie whole on a rank (dimension 0 sharded, one b per row) nothing is communicated;
where a block is cut, its squared norm is summed over the ranks that hold the pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from wngrad.optim import lists
from wngrad.optim.blocks import Shape


def is_sharded(t: Tensor) -> bool:
    return hasattr(t, "to_local")  # Duck-typed: importing DTensor is slow.


def local(t: Tensor) -> Tensor:
    """The part of `t` that lies on this rank, sharing its memory."""
    return cast(Tensor, cast(Any, t).to_local()) if is_sharded(t) else t


def local_gradient(p: Tensor) -> Tensor:
    """This rank's part of the gradient of `p`, summed over the ranks first if it is partial."""
    g: Any = p.grad
    if is_sharded(g) and _placements(g) != _placements(p):
        g = g.redistribute(placements=_placements(p))
    return local(g)


def filled(
    p: Tensor, blocks: Shape, value: float, dtype: torch.dtype, *, one: bool = False
) -> Tensor:
    """A new b for `p`, sharded like it along the dimensions that b keeps; whole if it is `one`."""
    if not is_sharded(p):
        return torch.full(blocks, value, dtype=dtype, device=p.device)
    from torch.distributed.tensor import Replicate, full

    def keeps(place: Any) -> bool:
        return not _cut(place) or (blocks[place.dim] == p.shape[place.dim] and not one)

    placements = [place if keeps(place) else Replicate() for place in _placements(p)]
    mesh = cast(Any, p).device_mesh
    return cast(Tensor, full(blocks, value, dtype=dtype, device_mesh=mesh, placements=placements))


def check(owner: str, p: Tensor, blocks: Shape) -> None:
    """Refuse a placement under which a block's entries could not be told apart."""
    for place in _placements(p):
        odd = _cut(place) and blocks[place.dim] not in (1, p.shape[place.dim])
        if odd or place.is_partial():
            raise ValueError(
                f"{owner}: `params` placed as {place} cannot be served with b of shape {blocks} "
                f"for a parameter of shape {tuple(p.shape)}; use `per` = 'neuron' or 'tensor'."
            )


def check_joint(owner: str, params: Sequence[Tensor], shapes: Sequence[Shape]) -> None:
    """Refuse parameters that share b if their blocks do not match, or lie on different ranks."""
    counts = {torch.Size(shape).numel() for shape in shapes}
    if len(counts) > 1:
        raise ValueError(
            f"{owner}: `joint` parameters must have as many blocks each, got {list(shapes)}."
        )
    cut = {
        any(_cut(a) and n[a.dim] == p.shape[a.dim] for a in _placements(p))
        for p, n in zip(params, shapes, strict=True)
        if is_sharded(p)
    }
    if len(cut) > 1:
        raise ValueError(
            f"{owner}: `joint` parameters must be sharded alike, got placements "
            f"{[_placements(p) for p in params]} for b of shapes {list(shapes)}; put the "
            f"layer into a group of its own with `joint` = False."
        )


def cuts(p: Tensor, b: Tensor) -> tuple[Any, ...]:
    """The process groups between whose ranks the blocks of `p` are cut; mostly none."""
    places = enumerate(zip(_placements(p), _placements(b), strict=True))
    return groups(p, [dim for dim, (of_p, of_b) in places if _cut(of_p) != _cut(of_b)])


def cut_by(p: Tensor) -> list[tuple[int, Any]]:
    """The dimensions of the mesh that cut a sharded `p`, with how each places it."""
    return [(dim, place) for dim, place in enumerate(_placements(p)) if _cut(place)]


def groups(p: Tensor, dims: Iterable[int]) -> tuple[Any, ...]:
    """The process groups along these dimensions of a sharded parameter's mesh."""
    return tuple(cast(Any, p).device_mesh.get_group(dim) for dim in dims)


def is_cut(p: Tensor, blocks: Shape) -> bool:
    """Whether blocks of a sharded `p` lie on several ranks, said before there is a b."""
    return any(_cut(a) and blocks[a.dim] != p.shape[a.dim] for a in _placements(p))


def sum_over_ranks(sq: Tensor, groups: tuple[Any, ...]) -> Tensor:
    """‖g‖² of blocks that are cut between ranks: one small sum for each group that cuts them."""
    for group in groups:
        sq = sq.contiguous()
        torch.distributed.all_reduce(sq, group=group)
    return sq


def in_messages(
    send: Callable[[Tensor, tuple[Any, ...]], Tensor],
    tensors: list[Tensor],
    ranks: list[tuple[Any, ...]],
) -> list[Tensor]:
    """send(x, groups) of each tensor and the groups of its ranks: one message for all alike."""
    keys = [(groups, x.dtype, x.device) for x, groups in zip(tensors, ranks, strict=True)]
    return lists.together(lambda key, x: send(x, key[0]), keys, tensors)


def max_over_ranks(x: Tensor, groups: tuple[Any, ...]) -> Tensor:
    """The largest x of any rank in these groups, in its place."""
    for group in groups:
        torch.distributed.all_reduce(x, op=torch.distributed.ReduceOp.MAX, group=group)
    return x


def over_ranks(counts: list[Tensor], params: list[Tensor]) -> list[int]:
    """The largest count of any rank, for each parameter. Waits for the device.

    One small reduction for each set of ranks, however many parameters there are.
    """
    ranks = [groups(p, range(len(_placements(p)))) for p in params]
    largest = in_messages(max_over_ranks, [count.view(1) for count in counts], ranks)
    numbers: list[int] = lists.stacked(largest).flatten().tolist()
    return numbers


def _cut(place: Any) -> bool:
    return not place.is_replicate() and not place.is_partial()  # a strided shard is one, too


def _placements(p: Tensor) -> tuple[Any, ...]:
    """How the dimensions of its mesh place `p`; () if it is not sharded."""
    return tuple(cast(Any, p).placements) if is_sharded(p) else ()
