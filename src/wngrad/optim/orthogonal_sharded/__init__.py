"""Orthogonalization of matrices that are cut between ranks, with few bytes and few messages.

For all matrices of a step together:

1. Gram (`by_gram`). Of a matrix that is cut between its m rows, with n columns,

       XᵀX = Σ over ranks of XᵣᵀXᵣ,    Uᵣ = Xᵣ·P(XᵀX)        (P: `orthogonal.gram_factor`)

   One all-reduce of the n(n+1)/2 numbers of a symmetric matrix; the rest is local. X is scaled
   before, to ‖X‖ = 1, which needs the largest entry and the norm of the whole: one all-gather of
   these two numbers of each part, a maximum and a sum in one message. A matrix that is cut between
   its columns is the same, transposed.
2. Owners (`Exchange`). Every other matrix goes to one rank, which orthogonalizes it and sends their
   parts back to all. Matrices are dealt out by their work, the largest first, to the rank that has
   the least. One all-to-all there, one back. On CUDA they travel in float16, and are scaled before.

Bytes decide between the two. On R ranks, in numbers that all of them together send,

    Gram     (R−1)·n·(n+1) + 2·R·(R−1)    (a ring's all-reduce sends every number 2·(R−1) times)
    owners   2·(R−1)/R·m·n                (gathered by every rank, g and m: 2·(R−1)·m·n)

so the Gram matrix is taken where R·(n+1) ≤ 2m, of matrices much taller than wide such as an
embedding. All ranks then make the same P, so it costs operations, too: where it moves more bytes an
owner is faster in both. Matrices that lie whole on a rank, such as those of a stack of experts that
is cut between experts, cost nothing; a dimension of the mesh that replicates takes no part. Where
two dimensions of a mesh cut a matrix there is a sum over each in step 1, and step 2 undoes the last
of them first and goes on with what is left.

The number of messages does not depend on the number of matrices: four at most where one dimension
of a mesh cuts them, twice as many where two do, and one more for embeddings that are cut between
columns (which rows have a gradient). What is not finite anywhere makes its whole matrix NaN on
every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from wngrad.optim import sharded
from wngrad.optim.directions import Orthogonalized
from wngrad.optim.lists import alike, joined
from wngrad.optim.modules import Layout
from wngrad.optim.orthogonal import orthogonalize_all
from wngrad.optim.orthogonal_sharded.messages import Exchange, by_gram, scaled
from wngrad.optim.orthogonal_sharded.placement import Slice, is_cut, parts

__all__ = ["Shard", "is_cut", "orthogonalize_sharded", "propose"]


class Shard(NamedTuple):
    """A sharded parameter, and what this rank has for its step, in its part's shape."""

    p: Tensor
    direction: Orthogonalized
    g: Tensor
    ahead: Tensor  # what is to be orthogonalized: μ·m + (1−μ)·g


def propose(shards: Sequence[Shard]) -> list[Tensor]:
    """u of sharded parameters, orthogonalized and scaled: this rank's part."""
    layouts = [shard.direction.layout for shard in shards]
    ahead = [shard.ahead for shard in shards]
    params = [shard.p for shard in shards]
    triples = zip(params, layouts, orthogonalize_sharded(params, layouts, ahead), strict=True)
    u = [layout.scale(p.shape) * polar for p, layout, polar in triples]
    apart = [i for i, shard in enumerate(shards) if shard.direction.rows_apart]
    for i, rows in zip(apart, _moving_rows([shards[i] for i in apart]), strict=True):
        u[i] = u[i] * rows
    return u


def _moving_rows(shards: Sequence[Shard]) -> list[Tensor]:
    """Which indices of dimension 0 have a gradient on any rank, in a shape to multiply u by."""
    ranks = []
    for p, direction, *_ in shards:
        cuts = sharded.cut_by(p) if is_cut(p, direction.layout) else []
        ranks.append(sharded.groups(p, [dim for dim, place in cuts if place.dim > 0]))
    rows = [direction.moving_rows(g) for _, direction, g, _ in shards]
    flags = [moves.flatten().to(torch.uint8) for moves in rows]
    moved = sharded.in_messages(sharded.max_over_ranks, flags, ranks)
    return [x.bool().view_as(moves) for x, moves in zip(moved, rows, strict=True)]


def orthogonalize_sharded(
    params: Sequence[Tensor], layouts: Sequence[Layout], tensors: Sequence[Tensor]
) -> list[Tensor]:
    """`orthogonalize` of every matrix of tensors that are sharded like `params`.

    Args:
        tensors: this rank's part of each, in the parameter's shape.

    Returns:
        This rank's part of each result.
    """
    slices: list[Slice] = []
    places: list[list[tuple[Layout, Tensor, int]]] = []  # where results go, from how many slices
    for p, layout, t in zip(params, layouts, tensors, strict=True):
        places.append([])
        for part in parts(p, layout):
            local = t[part.start : part.stop]
            groups = sharded.groups(p, [cut.mesh_dim for cut in part.cuts])
            stack = part.layout.matrices(local)
            found = [Slice(stack, part.rows, part.columns, part.cuts, groups)]
            if found[0].moves:  # one matrix at a time, so that they can be spread over owners
                found = [replace(found[0], x=x) for x in torch.split(stack, 1)]
            slices += found
            places[-1].append((part.layout, local, len(found)))
    narrow = [i for i, s in enumerate(slices) if s.moves and s.wire_type != s.x.dtype]
    for i, x in zip(narrow, scaled([slices[i] for i in narrow]), strict=True):
        slices[i] = replace(slices[i], x=x)
    results = iter(_orthogonalized(slices))
    return [
        joined(
            [
                layout.restore(joined([next(results) for _ in range(count)]), local)
                for layout, local, count in of_p
            ]
        )
        for of_p in places
    ]


def _orthogonalized(slices: list[Slice]) -> list[Tensor]:
    """The orthogonalized x of every slice."""
    ways = alike(s.route if s.moves else "gram" if s.cuts else "whole" for s in slices)
    summed, whole = ways.pop("gram", []), ways.pop("whole", [])
    out = dict(zip(summed, by_gram([slices[i] for i in summed]), strict=True))
    exchanges = [Exchange([slices[i] for i in members]) for members in ways.values()]
    owned = [exchange.gather() for exchange in exchanges]
    rest = [slices[i] for i in whole] + [s for part in owned for s in part]
    results = iter(_orthogonalized(rest) if ways else orthogonalize_all([s.x for s in rest]))
    out.update([(i, next(results)) for i in whole])
    for members, exchange, part in zip(ways.values(), exchanges, owned, strict=True):
        out.update(zip(members, exchange.scatter([next(results) for _ in part]), strict=True))
    return [out[i] for i in range(len(slices))]
