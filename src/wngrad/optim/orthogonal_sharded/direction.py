"""What a direction that orthogonalizes makes of sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from wngrad.optim import sharded
from wngrad.optim.modules import Layout
from wngrad.optim.orthogonal import orthogonalize_all
from wngrad.optim.orthogonal_sharded.gram import by_gram, scaled
from wngrad.optim.orthogonal_sharded.owners import Exchange
from wngrad.optim.orthogonal_sharded.placement import is_cut, parts
from wngrad.optim.orthogonal_sharded.slices import Slice, alike, in_order, wire_type


class Shard(NamedTuple):
    """A sharded parameter, and this rank's part of its gradient and of what is orthogonalized."""

    p: Tensor
    direction: Any  # an `Orthogonalized`
    g: Tensor
    ahead: Tensor


def propose(shards: Sequence[Shard]) -> list[Tensor]:
    """`Direction.propose` for sharded parameters: this rank's part of u."""
    layouts = [shard.direction.layout for shard in shards]
    ahead = [shard.ahead for shard in shards]
    u = orthogonalize_sharded([shard.p for shard in shards], layouts, ahead)
    for i, (shard, layout) in enumerate(zip(shards, layouts, strict=True)):
        u[i] = layout.scale(shard.p.shape) * u[i]
    for i, rows in _moving_rows(shards).items():
        u[i] = u[i] * rows
    return u


def orthogonalize_sharded(
    params: Sequence[Tensor], layouts: Sequence[Layout], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """`orthogonalize` of every matrix of tensors that are sharded like `params`.

    Args:
        tensors: this rank's part of each, in the parameter's shape.

    Returns:
        This rank's part of each result.
    """
    locals_: list[Tensor] = []
    slices: list[Slice] = []
    every = [parts(p, layout) for p, layout in zip(params, layouts, strict=True)]
    for p, t, each in zip(params, tensors, every, strict=True):
        for part in each:
            groups = sharded.groups(p, [cut.mesh_dim for cut in part.cuts])
            locals_.append(t[part.start : part.stop])
            x = part.layout.matrices(locals_[-1])
            slices.append(Slice(x, part.rows, part.columns, part.cuts, groups))
    pairs = iter(zip(_orthogonalized(slices), locals_, strict=True))
    restored = [[part.layout.restore(*next(pairs)) for part in each] for each in every]
    return [torch.cat(pieces) if len(pieces) > 1 else pieces[0] for pieces in restored]


def _orthogonalized(slices: list[Slice]) -> list[Tensor]:
    """The orthogonalized x of every slice."""
    narrow = [
        i for i, each in enumerate(slices) if each.moves and wire_type(each.x) != each.x.dtype
    ]
    for i, x in zip(narrow, scaled([slices[i] for i in narrow]), strict=True):
        slices[i] = replace(slices[i], x=x)
    singles = [  # each matrix that goes to an owner for itself, so that they can be spread
        [replace(each, x=x.unsqueeze(0)) for x in each.x] if each.moves and len(each.x) else [each]
        for each in slices
    ]
    results = iter(_of_singles([single for each in singles for single in each]))
    lists = [[next(results) for _ in each] for each in singles]
    return [torch.cat(each) if len(each) > 1 else each[0] for each in lists]


def _of_singles(slices: list[Slice]) -> list[Tensor]:
    small = [i for i, each in enumerate(slices) if each.takes_gram]
    out = dict(zip(small, by_gram([slices[i] for i in small]), strict=True))
    whole = [i for i, each in enumerate(slices) if not each.cuts]
    moving = [i for i, each in enumerate(slices) if each.moves]
    if not moving:
        results = orthogonalize_all([slices[i].x for i in whole])
        return in_order(out | dict(zip(whole, results, strict=True)))
    kinds = alike((slices[i].groups[-1], slices[i].x.dtype, slices[i].x.device) for i in moving)
    members = [[moving[k] for k in kind] for kind in kinds]
    exchanges = [Exchange([slices[i] for i in kind]) for kind in members]
    owned = [exchange.gather() for exchange in exchanges]
    left = [slices[i] for i in whole] + [each for part in owned for each in part]
    rest = iter(_of_singles(left))
    out.update([(i, next(rest)) for i in whole])
    for kind, exchange, part in zip(members, exchanges, owned, strict=True):
        out.update(zip(kind, exchange.scatter([next(rest) for _ in part]), strict=True))
    return in_order(out)


def _moving_rows(shards: Sequence[Shard]) -> dict[int, Tensor]:
    """Which rows move, where not all do: those with a gradient on any rank that has a part."""
    masks: dict[int, Tensor] = {}
    groups: dict[int, tuple[Any, ...]] = {}
    for i, (p, direction, g, _) in enumerate(shards):
        if direction.rows_apart:
            rows = direction.moving_rows(g)
            cuts = sharded.cut_by(p) if is_cut(p, direction.layout) else []
            masks[i], groups[i] = rows, sharded.groups(p, [dim for dim, at in cuts if at.dim > 0])
    order = [i for i in masks if groups[i]]
    for kind in alike((groups[i], masks[i].device) for i in order):
        members = [order[k] for k in kind]
        flags = torch.cat([masks[i].flatten() for i in members]).to(torch.uint8)
        for group in groups[members[0]]:
            dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        split = torch.split(flags.bool(), [masks[i].numel() for i in members])
        for i, part in zip(members, split, strict=True):
            masks[i] = part.view_as(masks[i])
    return masks
