"""What ranks send each other: norms, sums of Gram matrices, and matrices to their owners."""

from __future__ import annotations

import heapq
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wngrad.optim import sharded
from wngrad.optim.lists import alike, in_batches
from wngrad.optim.orthogonal import gram_factor
from wngrad.optim.orthogonal_sharded.placement import Slice
from wngrad.polynomials import NOTHING

# ------------------------------------------------------------------------------- norms


def scaled(slices: list[Slice]) -> list[Tensor]:
    """x/‖X‖, with the Frobenius norm of the whole matrix, as `orthogonalize` does it."""
    x = [s.x for s in slices]
    norms = sharded.in_messages(_of_wholes, in_batches(_norms, x), [s.groups for s in slices])
    return in_batches(_divided, x, norms)


def _norms(x: Tensor) -> Tensor:
    """(largest entry, norm in units of it) of each matrix."""
    top = x.abs().amax((1, 2)) if x.numel() else x.new_zeros(len(x))
    norm = torch.linalg.vector_norm(x / _or_one(top)[:, None, None], dim=(1, 2))
    return torch.stack([top, norm], 1)


def _of_wholes(pairs: Tensor, groups: tuple[Any, ...]) -> Tensor:
    """The same of whole matrices, from that of this rank's parts."""
    for group in groups:
        every = [torch.empty_like(pairs) for _ in range(dist.get_world_size(group))]
        dist.all_gather(every, pairs, group=group)
        tops, norms = torch.stack(every).unbind(-1)
        top = tops.amax(0)
        norm = torch.linalg.vector_norm(norms * (tops / _or_one(top)), dim=0)
        pairs = torch.stack([top, norm], -1)
    return pairs


def _divided(x: Tensor, norms: Tensor) -> Tensor:
    top, norm = (_or_one(size)[:, None, None] for size in norms.unbind(-1))
    x = (x / top).div_(norm)  # NaN everywhere if any part of the matrix is not finite
    return torch.nn.functional.hardshrink(x, NOTHING)  # 0 up to there


def _or_one(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1, x)


# ----------------------------------------------------------------------- Gram matrices


def by_gram(slices: list[Slice]) -> list[Tensor]:
    """The orthogonalized x: P·X, with P from Σ over ranks of XᵣXᵣᵀ."""
    pairs = zip(scaled(slices), slices, strict=True)
    x = [_exact(x.mT if s.flips else x) for x, s in pairs]
    halves = in_batches(lambda x: packed(x @ x.mT), x)
    flat = [half.flatten().to(s.x.dtype) for half, s in zip(halves, slices, strict=True)]
    flat = sharded.in_messages(sharded.sum_over_ranks, flat, [s.groups for s in slices])
    sums = [t.to(half.dtype).view_as(half) for t, half in zip(flat, halves, strict=True)]
    factors = in_batches(lambda half: gram_factor(unpacked(half)), sums)
    results = zip(in_batches(torch.matmul, factors, x), slices, strict=True)
    return [(u.mT if s.flips else u).to(s.x.dtype) for u, s in results]


def _exact(x: Tensor) -> Tensor:
    """In float64 where float32 products are rounded to TF32, too coarse for squares of σ."""
    tf32 = x.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return x.double() if tf32 and x.dtype == torch.float32 else x


def packed(symmetric: Tensor) -> Tensor:
    """The n(n+1)/2 numbers of symmetric matrices [[A, B], [Bᵀ, C]], as rectangles.

    The triangle below A's diagonal fits under the one above C's, if there is a row more; B is put
    below them. No indices are made, which would take more memory than the matrix.
    """
    h = symmetric.shape[-1] // 2
    a, b, c = symmetric[..., :h, :h], symmetric[..., :h, h:], symmetric[..., h:, h:]
    triangles = symmetric.new_zeros(*symmetric.shape[:-2], h + 1, c.shape[-1])
    triangles[..., : c.shape[-1], :] += c.triu()
    triangles[..., 1:, :h] += a.tril()
    return torch.cat([triangles, b], -2)


def unpacked(rectangles: Tensor) -> Tensor:
    """The inverse of `packed`."""
    size, h = rectangles.shape[-1], rectangles.shape[-2] // 2
    triangles, b = rectangles[..., : h + 1, :], rectangles[..., h + 1 :, :]
    a, c = triangles[..., 1:, :h].tril(), triangles[..., :size, :].triu()
    a, c = a + a.tril(-1).mT, c + c.triu(1).mT
    return torch.cat([torch.cat([a, b], -1), torch.cat([b.mT, c], -1)], -2)


# ------------------------------------------------------------------------------ owners


class Exchange:
    """The way of some matrices to their owners, along the last of their cuts, and back."""

    def __init__(self, slices: list[Slice]) -> None:
        self._slices, self._group = slices, slices[0].groups[-1]
        self._ranks = range(dist.get_world_size(self._group))
        self._by_owner = _by_owner(slices, len(self._ranks))
        self._owned = [slices[i] for i in self._by_owner[dist.get_rank(self._group)]]

    def gather(self) -> list[Slice]:
        """The matrices that this rank owns, with the last of their cuts undone."""
        sent = [[self._slices[i].x for i in members] for members in self._by_owner]
        shapes = [[_shape(s, rank) for s in self._owned] for rank in self._ranks]
        received = zip(*self._all_to_all(sent, shapes), strict=True)
        return [
            replace(
                s,
                x=torch.cat(pieces, s.cuts[-1].axis),
                cuts=s.cuts[:-1],
                groups=s.groups[:-1],
            )
            for s, pieces in zip(self._owned, received, strict=True)
        ]

    def scatter(self, results: list[Tensor]) -> list[Tensor]:
        """This rank's part of every result, where it has those of the matrices that it owns."""
        pairs = zip(results, (s.cuts[-1] for s in self._owned), strict=True)
        split = [torch.split(u, list(cut.sizes), cut.axis) for u, cut in pairs]
        sent = [[pieces[rank] for pieces in split] for rank in self._ranks]
        shapes = [[self._slices[i].x.shape for i in members] for members in self._by_owner]
        out: dict[int, Tensor] = {}
        for members, part in zip(self._by_owner, self._all_to_all(sent, shapes), strict=True):
            out.update(zip(members, part, strict=True))
        return [out[i] for i in range(len(out))]

    def _all_to_all(
        self, sent: list[list[Tensor]], shapes: list[list[torch.Size]]
    ) -> list[list[Tensor]]:
        """What every rank sends to this one, in these shapes, where it sends these tensors."""
        like, wire = self._slices[0].x, self._slices[0].wire_type
        flat = [t.flatten().to(wire) for part in sent for t in part]
        sizes = [[shape.numel() for shape in part] for part in shapes]
        buffer = like.new_empty(sum(map(sum, sizes)), dtype=wire)
        dist.all_to_all_single(
            buffer,
            torch.cat(flat) if flat else buffer.new_empty(0),  # of one that owns nothing
            [sum(part) for part in sizes],
            [sum(t.numel() for t in part) for part in sent],
            group=self._group,
        )
        tensors = iter(torch.split(buffer.to(like.dtype), [n for part in sizes for n in part]))
        return [[next(tensors).view(shape) for shape in part] for part in shapes]


def _shape(s: Slice, rank: int) -> torch.Size:
    """The shape of another rank's part along the last cut."""
    cut, shape = s.cuts[-1], list(s.x.shape)
    shape[cut.axis] = cut.sizes[rank]
    return torch.Size(shape)


def _by_owner(slices: list[Slice], ranks: int) -> list[list[int]]:
    """The numbers of the slices that go to each rank.

    Those that are still cut along other dimensions of the mesh must find the same owners there,
    where the rest may be others: so they are dealt out first and for themselves.
    """
    work = [s.rows * s.columns * min(s.rows, s.columns) for s in slices]
    owned: list[list[int]] = [[] for _ in range(ranks)]
    kinds = alike(s.groups[:-1] for s in slices)
    for others in sorted(kinds, key=len, reverse=True):
        loads = [0 if others else sum(work[i] for i in part) for part in owned]
        hands = dealt(tuple(work[i] for i in kinds[others]), tuple(loads))
        for part, hand in zip(owned, hands, strict=True):
            part += [kinds[others][k] for k in hand]
    return [sorted(part) for part in owned]


@lru_cache(maxsize=64)
def dealt(work: tuple[int, ...], loads: tuple[int, ...]) -> list[list[int]]:
    """The numbers of those that each rank is given: the largest first, to the least loaded rank."""
    hands: list[list[int]] = [[] for _ in loads]
    heap = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(heap)
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        load, rank = heapq.heappop(heap)
        hands[rank].append(i)
        heapq.heappush(heap, (load + work[i], rank))
    return hands
