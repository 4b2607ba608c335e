"""Sharded parameters (DTensor): each rank works on its own piece.

Where the blocks lie whole on a rank (dimension 0 sharded, one b per row) nothing is communicated;
where a block is cut, its squared norm is summed over the ranks that hold the pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from wngrad.optim.blocks import Shape


def is_sharded(t: Tensor) -> bool:
    return hasattr(t, "to_local")  # Told by its duck's quack: importing DTensor takes a while.


def local(t: Tensor) -> Tensor:
    """The part of `t` that lies on this rank, sharing its memory."""
    return cast(Tensor, cast(Any, t).to_local()) if is_sharded(t) else t


def filled(
    p: Tensor, blocks: Shape, value: float, dtype: torch.dtype, *, one: bool = False
) -> Tensor:
    """A new b for `p`, sharded like it along the dimensions that b keeps; whole if it is `one`."""
    if not is_sharded(p):
        return torch.full(blocks, value, dtype=dtype, device=p.device)
    from torch.distributed.tensor import Replicate, full

    kept = [
        place
        if place.is_replicate() or (blocks[place.dim] == p.shape[place.dim] and not one)
        else Replicate()
        for place in _placements(p)
    ]
    mesh = cast(Any, p).device_mesh
    return cast(Tensor, full(blocks, value, dtype=dtype, device_mesh=mesh, placements=kept))


def check(owner: str, p: Tensor, blocks: Shape) -> None:
    """Refuse a placement under which a block's entries could not be told apart."""
    if not is_sharded(p):
        return
    for place in _placements(p):
        cut = place.is_shard() and blocks[place.dim] not in (1, p.shape[place.dim])
        if cut or place.is_partial():
            raise ValueError(
                f"{owner}: `params` placed as {place} cannot be served with b of shape {blocks} "
                f"for a parameter of shape {tuple(p.shape)}; use `per` = 'neuron' or 'tensor'."
            )


def cuts(p: Tensor, b: Tensor) -> tuple[Any, ...]:
    """The process groups between whose ranks the blocks of `p` are cut; mostly none."""
    if not is_sharded(p):
        return ()
    mesh = cast(Any, p).device_mesh
    places = enumerate(zip(_placements(p), _placements(b), strict=True))
    return tuple(
        mesh.get_group(dim) for dim, (of_p, of_b) in places if of_p.is_shard() != of_b.is_shard()
    )


def sum_over_ranks(sq: Tensor, groups: tuple[Any, ...]) -> Tensor:
    """‖g‖² of blocks that are cut between ranks: one small sum for each group that cuts them."""
    for group in groups:
        sq = sq.contiguous()
        torch.distributed.all_reduce(sq, group=group)
    return sq


def _placements(p: Tensor) -> Sequence[Any]:
    return cast(Sequence[Any], cast(Any, p).placements)
