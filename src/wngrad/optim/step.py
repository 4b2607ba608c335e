"""The plain step, over lists of parameters: the reference for every kernel.

First every norm, here; then every new b, in a few operations for all blocks together, and every
parameter, in `move`. Whatever can fail, fails before the first parameter changes. The mathematics
is elsewhere: the rule for b in `wngrad.rule` and `wngrad.guard`, the direction of a step in
`wngrad.optim.directions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from operator import add
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from wngrad.optim import blocks, checks, lists, move, orthogonal_sharded, sharded
from wngrad.optim.directions import Direction
from wngrad.optim.move import Item, RuleBatch, gradient, traced, working
from wngrad.optim.orthogonal_sharded import Shard, is_cut
from wngrad.optim.views import SharedBlocks, View, rows


def plain_step(
    owner: str, units: list[SharedBlocks], before_moving: Callable[[], None] | None = None
) -> None:
    """b_j ← b_{j-1} + λ²‖u‖²/b_{j-1}, then x_j ← x_{j-1} − λ d/b_j, for all of them.

    Args:
        before_moving: called once, when nothing can be refused any more.
    """
    _refuse_differentiable_cuts(owner, units)
    for batch in _batches(units):
        batch.measure()
        parts = batch.rule_batches()
        _refuse_nonfinite(owner, parts)
        if before_moving is not None:
            before_moving()
            before_moving = None
        for part in parts:
            part.move()
    if before_moving is not None:
        before_moving()


# ------------------------------------------------------------------------------- batches


def _batches(units: list[SharedBlocks]) -> Iterable[_Batch]:
    """Units that go from norm to move together."""
    if not units:
        return []
    if any(traced(unit) for unit in units):
        return _traced_batches(units)
    if sum(view.p.numel() for unit in units for view in unit.members) <= move.SMALL:
        return [_Batch(units, bounded=True)]
    sizes = _sizes(units)
    if any(size > 1 for size in sizes):
        units = [piece for unit in units for piece in _pieces(unit)]
        sizes = _sizes(units)
    if any(unit.settings.nonfinite == "raise" or _between_ranks(unit) for unit in units):
        # Every norm is asked for before anything moves, or ranks are asked once for all.
        return [_Batch(units, bounded=False)]
    return _full_batches(units, sizes)


def _traced_batches(units: list[SharedBlocks]) -> list[_Batch]:
    """A compiler needs no help: nothing is put together, nothing is cut."""
    raises = any(unit.settings.nonfinite == "raise" for unit in units)
    return [_Batch(part, bounded=True) for part in ([units] if raises else ([u] for u in units))]


def _full_batches(units: list[SharedBlocks], sizes: list[float]) -> Iterator[_Batch]:
    """As many units as fill a batch; a larger one is a batch by itself."""
    batch: list[SharedBlocks] = []
    room = 0.0  # the share of a batch that is full
    for unit, share in zip(units, sizes, strict=True):
        if batch and room + share > 1:
            yield _Batch(batch, bounded=room <= 1)
            batch, room = [], 0.0
        batch.append(unit)
        room += share
    yield _Batch(batch, bounded=room <= 1)


def _sizes(units: list[SharedBlocks]) -> list[float]:
    """How much of a batch each of them fills."""
    each = iter(move.shares([view.p for unit in units for view in unit.members]))
    return [sum(next(each) for _ in unit.members) for unit in units]


def _pieces(unit: SharedBlocks) -> Iterable[SharedBlocks]:
    """Some rows of a large parameter at a time, if its direction can be made from them alone."""
    first = unit.members[0]
    if len(unit.members) > 1 or not first.direction.measures_gradient:
        return [unit]
    return rows(unit, move.at_once(first.p.device, first.p.dtype))


def _between_ranks(unit: SharedBlocks) -> bool:
    return any(view.groups or _asks_ranks(view) for view in unit.members)


def _asks_ranks(view: View) -> bool:
    """Whether its direction may depend on other ranks."""
    return view.direction.orthogonalizes and sharded.is_sharded(view.param)


class _Batch:
    """Units that go from norm to move together.

    Args:
        bounded: whether they are so few that what is made for the norm can be kept for the move.
    """

    def __init__(self, units: list[SharedBlocks], bounded: bool) -> None:
        self.units, self._bounded = units, bounded
        self._traced = any(traced(unit) for unit in units)
        self._items: list[list[Item]] = []

    def measure(self) -> None:
        """u of every view, and its squared norms on this rank."""
        proposed = _propose([(unit, view) for unit in self.units for view in unit.members])
        entries: dict[Any, list[Item]] = {}  # views whose every entry is a block
        for unit in self.units:
            items = []
            for view in unit.members:
                u, buffers = next(proposed)
                keep = self._bounded or not view.direction.measures_gradient
                item = Item(unit, view, u if keep else None, buffers, u, view.b)
                items.append(item)
                if self._bounded and not self._traced and u.shape == view.b.shape:
                    entries.setdefault((u.device, u.dtype), []).append(item)
                else:
                    item.sq = blocks.sq_norm(u, view.b.shape, traced=self._traced)
            self._items.append(items)
        for part in entries.values():
            _square(part)

    def rule_batches(self) -> list[RuleBatch]:
        """Views for which the rule is one expression, with what they are about to do."""
        items: list[Item] = []
        sums = _over_ranks(self._items)
        for unit, members, total in zip(self.units, self._items, sums, strict=True):
            items += members
            if total is not None:
                for item, b in zip(members, _shared_b(unit), strict=True):
                    item.sq, item.b = total.to(item.sq.device).view_as(item.sq), b
        alike: dict[Any, list[Item]] = {}
        for i, item in enumerate(items):
            alike.setdefault(i if self._traced else item.kind, []).append(item)
        return [RuleBatch(part, self._bounded) for part in alike.values()]


def _square(items: list[Item]) -> None:
    """Square the entries of items of one type and device, all of them in one go."""
    u = [item.sq for item in items]
    squares = lists.flatten(u).to(blocks.accumulator(u[0].device)).square()
    for item, sq in zip(items, lists.unflatten(squares, u), strict=True):
        item.sq = sq


def _propose(
    pairs: list[tuple[SharedBlocks, View]],
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """What each view's direction hands to the rule: u, and its buffers as they will be."""
    by_direction: dict[Direction, list[int]] = {}
    between_ranks: list[int] = []
    for i, (_, view) in enumerate(pairs):
        if _asks_ranks(view):
            between_ranks.append(i)
        elif not view.direction.measures_gradient:  # else it is made below when it is its turn
            by_direction.setdefault(view.direction, []).append(i)
    made: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
    for direction, members in by_direction.items():
        inputs = [_Inputs.of(*pairs[i]) for i in members]
        g, t = [each.g for each in inputs], [each.t for each in inputs]
        before = {name: [each.buffers[name] for each in inputs] for name in direction.buffers}
        proposed, after = direction.propose(g, before, t)
        for k, i in enumerate(members):
            made[i] = proposed[k], {name: after[name][k] for name in after}
    if between_ranks:
        made.update(_propose_between_ranks(pairs, between_ranks))
    for i, pair in enumerate(pairs):
        yield made[i] if i in made else (gradient(*pair), {})


def _propose_between_ranks(
    pairs: list[tuple[SharedBlocks, View]], members: list[int]
) -> Iterator[tuple[int, tuple[Tensor, dict[str, Tensor]]]]:
    """The same for sharded parameters whose matrices may be cut, all of them at once."""
    shards, after = [], []
    for i in members:
        view = pairs[i][1]
        shape = sharded.local(view.param).shape  # of which blocks may have cut dimensions
        g, buffers, _ = _Inputs.of(*pairs[i])
        buffers = {name: buffer.reshape(shape) for name, buffer in buffers.items()}
        direction = cast(Any, view.direction)
        g = g.reshape(shape)
        (ahead,), new = direction.look_ahead([g], {name: [t] for name, t in buffers.items()})
        shards.append(Shard(view.param, direction, g, ahead))
        after.append({name: t[0].reshape(view.p.shape) for name, t in new.items()})
    for i, u, new in zip(members, orthogonal_sharded.propose(shards), after, strict=True):
        yield i, (u.reshape(pairs[i][1].p.shape), new)


class _Inputs(NamedTuple):
    """What a direction is made from, in the type of the arithmetic."""

    g: Tensor
    buffers: dict[str, Tensor]
    t: Tensor

    @staticmethod
    def of(unit: SharedBlocks, view: View) -> _Inputs:
        buffers = {name: working(view.buffers[name]) for name in view.direction.buffers}
        return _Inputs(gradient(unit, view), buffers, view.t)


# -------------------------------------------------------------------- squared norms, shared b


def _over_ranks(units: list[list[Item]]) -> list[Tensor | None]:
    """‖u‖² of each unit's blocks, over all its members and ranks; None where one view has it all.

    One small sum for the whole batch, for each set of ranks between which anything is cut.
    """
    sums: list[dict[Any, Tensor]] = []  # of each unit by the ranks between which it is cut
    for items in units:
        by_ranks: dict[Any, Tensor] = {}
        for item in items if not items[0].unit.alone else ():
            flat, key = item.sq.flatten().to(items[0].sq.device), item.view.groups
            by_ranks[key] = by_ranks[key] + flat if key in by_ranks else flat
        sums.append(by_ranks)
    for key in dict.fromkeys(key for by_ranks in sums for key in by_ranks if key):
        holders = [by_ranks for by_ranks in sums if key in by_ranks]
        parts = [by_ranks[key] for by_ranks in holders]
        total = torch.cat([part.to(parts[0].device) for part in parts])
        split = torch.split(sharded.sum_over_ranks(total, key), [p.numel() for p in parts])
        for by_ranks, part in zip(holders, split, strict=True):
            by_ranks[key] = part.to(by_ranks[key].device)
    return [reduce(add, by_ranks.values()) if by_ranks else None for by_ranks in sums]


def _shared_b(unit: SharedBlocks) -> list[Tensor]:
    """The b each member starts from.

    b never decreases, so among the members the largest is the latest: a parameter that was frozen
    for a while takes over what the others have reached.
    """
    each = [view.b for view in unit.members]
    distinct = {id(b): b for b in [*each, *unit.members_without_gradient]}
    if len(distinct) == 1:
        return each
    every = torch.stack([b.flatten().to(each[0].device) for b in distinct.values()])
    return [every.amax(0).to(b.device).view_as(b) for b in each]


def _refuse_differentiable_cuts(owner: str, units: list[SharedBlocks]) -> None:
    for unit in units:
        for view in unit.members if unit.settings.differentiable else ():
            if _asks_ranks(view) and is_cut(view.param, cast(Any, view.direction).layout):
                raise ValueError(
                    f"{owner}: `differentiable` must be False for matrices that are cut between "
                    f"ranks, got True for a parameter of shape {tuple(view.param.shape)}."
                )


def _refuse_nonfinite(owner: str, parts: Iterable[RuleBatch]) -> None:
    asked = [part for part in parts if part.settings.nonfinite == "raise"]
    if not asked:
        return
    params = [p for part in asked for p in part.params]
    counts = sharded.over_ranks([bad for part in asked for bad in part.bad()], params)
    for count, p in zip(counts, params, strict=True):
        if count:
            checks.refuse_nonfinite(owner, p, count)
