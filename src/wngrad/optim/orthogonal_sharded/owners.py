"""Step 3: matrices that go to one rank each, and come back orthogonalized."""

from __future__ import annotations

import heapq
from dataclasses import replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from wngrad.optim.orthogonal_sharded.slices import Slice, alike, in_order, wire_type


class Exchange:
    """The way of some matrices to their owners, along the last of their cuts, and back."""

    def __init__(self, slices: list[Slice]) -> None:
        self._slices, self._group = slices, slices[0].groups[-1]
        self._ranks = range(dist.get_world_size(self._group))
        self._by_owner = _by_owner(slices, len(self._ranks))
        self._own = [slices[i] for i in self._by_owner[dist.get_rank(self._group)]]

    def gather(self) -> list[Slice]:
        """The matrices that this rank owns, with the last of their cuts undone."""
        sent = [[self._slices[i].x for i in members] for members in self._by_owner]
        shapes = [[_shape(each, rank) for each in self._own] for rank in self._ranks]
        received = zip(*self._all_to_all(sent, shapes), strict=True)
        return [
            replace(
                each,
                x=torch.cat(pieces, each.cuts[-1].axis),
                cuts=each.cuts[:-1],
                groups=each.groups[:-1],
            )
            for each, pieces in zip(self._own, received, strict=True)
        ]

    def scatter(self, results: list[Tensor]) -> list[Tensor]:
        """This rank's part of every result, where it has those of the matrices that it owns."""
        cuts = [each.cuts[-1] for each in self._own]
        split = [
            torch.split(u, list(cut.sizes), cut.axis) for u, cut in zip(results, cuts, strict=True)
        ]
        sent = [[pieces[rank] for pieces in split] for rank in self._ranks]
        shapes = [[self._slices[i].x.shape for i in members] for members in self._by_owner]
        out: dict[int, Tensor] = {}
        for members, part in zip(self._by_owner, self._all_to_all(sent, shapes), strict=True):
            out.update(zip(members, part, strict=True))
        return in_order(out)

    def _all_to_all(
        self, sent: list[list[Tensor]], shapes: list[list[torch.Size]]
    ) -> list[list[Tensor]]:
        """What every rank sends to this one, in these shapes, where it sends these tensors."""
        like, wire = self._slices[0].x, wire_type(self._slices[0].x)
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


def _shape(each: Slice, rank: int) -> torch.Size:
    """The shape of another rank's part along the last cut."""
    cut, shape = each.cuts[-1], list(each.x.shape)
    shape[cut.axis] = cut.sizes[rank]
    return torch.Size(shape)


def _by_owner(slices: list[Slice], ranks: int) -> list[list[int]]:
    """The numbers of the slices that go to each rank.

    Those that are still cut along other dimensions of the mesh must find the same owners there,
    where the rest may be others: so they are dealt out first and for themselves.
    """
    work = [each.rows * each.columns * min(each.rows, each.columns) for each in slices]
    kinds = alike(each.groups[:-1] for each in slices)
    kinds.sort(key=lambda members: len(slices[members[0]].groups), reverse=True)
    owned: list[list[int]] = [[] for _ in range(ranks)]
    for members in kinds:
        alone = len(slices[members[0]].groups) == 1
        loads = [sum(work[i] for i in part) if alone else 0 for part in owned]
        hands = dealt(tuple(work[i] for i in members), tuple(loads))
        for part, hand in zip(owned, hands, strict=True):
            part += [members[k] for k in hand]
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
