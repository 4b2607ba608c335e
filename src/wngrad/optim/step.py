"""The plain step, over lists of parameters: the reference for every kernel.

First every new b, in a few operations for all blocks together; then every parameter. Whatever can
fail, fails before the first parameter changes. The mathematics is elsewhere: the rule for b in
`wngrad.rule` and `wngrad.guard`, the direction of a step in `wngrad.optim.directions`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wngrad import rule
from wngrad.guard import guarded_b
from wngrad.optim import blocks, checks, lists, sharded
from wngrad.optim.directions import Buffers, Direction
from wngrad.optim.rounding import rounded
from wngrad.optim.views import SharedBlocks, View, rows

IN_PLACE = (torch.float32, torch.float64)  # types in which x is moved where it lies

# Elements that are worked on at once, so that temporaries never grow with the parameters and a
# gradient is still in a CPU's cache when its parameter moves. Of 2^14 … 2^20 these were the fastest
# for 38 M float32 parameters on two cores, with temporaries and without; runs differ by half.
_WITH_COPIES, _WITHOUT = 2**18, 2**20
_FAR = 2**24  # not on a CPU: there few launches matter more than the cache


def plain_step(
    owner: str, units: list[SharedBlocks], before_moving: Callable[[], None] | None = None
) -> None:
    """b_j ← b_{j-1} + λ²‖u‖²/b_{j-1}, then x_j ← x_{j-1} − λ d/b_j, for all of them.

    Args:
        before_moving: called once, when nothing can be refused any more.
    """
    for batch in _batches(units):
        batch.measure()
        kinds = batch.kinds()
        _refuse_nonfinite(owner, kinds)
        if before_moving is not None:
            before_moving()
            before_moving = None
        for kind in kinds:
            kind.move()
    if before_moving is not None:
        before_moving()


# ------------------------------------------------------------------------------- batches


def _traced(unit: SharedBlocks) -> bool:
    """Whether autograd or a compiler is to see the step."""
    return unit.settings.differentiable or torch.compiler.is_compiling()


def _at_once(p: Tensor) -> int:
    """How many elements like those of `p` are worked on at once."""
    if p.device.type != "cpu":
        return _FAR
    return _WITHOUT if p.dtype in IN_PLACE else _WITH_COPIES


def _batches(units: list[SharedBlocks]) -> Iterator[_Batch]:
    """Units that go from norm to move together."""
    if not units:
        return
    if any(_traced(unit) for unit in units):
        # A compiler needs no help: nothing is put together, nothing is cut.
        raises = any(unit.settings.nonfinite == "raise" for unit in units)
        for part in [units] if raises else [[unit] for unit in units]:
            yield _Batch(part, bounded=True)
        return
    cut = [
        piece
        for unit in units
        for piece in (rows(unit, _at_once(unit.members[0].p)) if len(unit.members) == 1 else [unit])
    ]
    if any(unit.settings.nonfinite == "raise" or _between_ranks(unit) for unit in cut):
        # Every norm is asked for before anything moves, or ranks are asked once for all.
        yield _Batch(cut, bounded=False)
        return
    batch: list[SharedBlocks] = []
    room = 0.0  # the share of a batch that is full
    for unit in cut:
        share = sum(view.p.numel() / _at_once(view.p) for view in unit.members)
        if batch and room + share > 1:
            yield _Batch(batch, bounded=room <= 1)
            batch, room = [], 0.0
        batch.append(unit)
        room += share
    yield _Batch(batch, bounded=room <= 1)


def _between_ranks(unit: SharedBlocks) -> bool:
    return any(view.groups for view in unit.members)


class _Item(NamedTuple):
    """A view on its way through the step."""

    unit: SharedBlocks
    view: View
    u: Tensor | None  # what the rule measures, if it is kept for the move
    buffers: dict[str, Tensor]  # as `Direction.propose` has made them
    sq: Tensor  # ‖u‖² of its blocks; after `_Batch.kinds`, of those it shares them with, too
    b: Tensor  # what b starts from

    @property
    def kind(self) -> tuple[object, ...]:
        """What the rule and the move depend on."""
        unit, view = self.unit, self.view
        settings = (id(unit.settings), id(unit.lam), unit.hold, view.direction)
        return (*settings, view.p.dtype, view.b.dtype, view.b.device)


class _Batch:
    """Units that go from norm to move together.

    Args:
        bounded: whether they are so few that what is made for the norm can be kept for the move.
    """

    def __init__(self, units: list[SharedBlocks], bounded: bool) -> None:
        self.units, self._bounded = units, bounded
        self._items: list[list[_Item]] = []

    def measure(self) -> None:
        """u of every view, and its squared norms on this rank."""
        proposed = _propose([(unit, view) for unit in self.units for view in unit.members])
        for unit in self.units:
            items = []
            for view in unit.members:
                u, buffers = next(proposed)
                keep = self._bounded or type(view.direction).propose is not Direction.propose
                sq = blocks.sq_norm(u, tuple(view.b.shape), traced=_traced(unit))
                items.append(_Item(unit, view, u if keep else None, buffers, sq, view.b))
            self._items.append(items)

    def kinds(self) -> list[_Kind]:
        """Views for which the rule is one expression, with what they are about to do."""
        items: list[_Item] = []
        sums = _over_ranks(self._items)
        for unit, members, total in zip(self.units, self._items, sums, strict=True):
            if total is None:
                items += members
            else:
                b = _shared_b(unit)
                items += [
                    item._replace(sq=total.to(item.sq.device).view_as(item.sq), b=start)
                    for item, start in zip(members, b, strict=True)
                ]
        alike: dict[Any, list[_Item]] = {}
        for i, item in enumerate(items):
            alike.setdefault(i if _traced(item.unit) else item.kind, []).append(item)
        return [_Kind(part) for part in alike.values()]


def _propose(
    pairs: list[tuple[SharedBlocks, View]],
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """What each view's direction hands to the rule: u, and its buffers as they will be."""
    by_direction: dict[Direction, list[int]] = {}
    for i, (_, view) in enumerate(pairs):
        by_direction.setdefault(view.direction, []).append(i)
    u: dict[int, Tensor] = {}
    buffers: dict[int, dict[str, Tensor]] = {}
    for direction, members in by_direction.items():
        if type(direction).propose is Direction.propose:
            continue  # the gradient itself, made below when it is its turn
        g = [_gradient(*pairs[i]) for i in members]
        before = _listed([pairs[i][1] for i in members], direction)
        proposed, after = direction.propose(g, before)
        for k, i in enumerate(members):
            u[i], buffers[i] = proposed[k], {name: after[name][k] for name in after}
    for i, pair in enumerate(pairs):
        yield (u[i], buffers[i]) if i in u else (_gradient(*pair), {})


def _listed(views: list[View], direction: Direction) -> Buffers:
    """The buffers of the views, in the type of the arithmetic."""
    names = direction.buffers
    return {name: [_working(view.buffers[name]) for view in views] for name in names}


# -------------------------------------------------------------------- squared norms, shared b


def _over_ranks(units: list[list[_Item]]) -> list[Tensor | None]:
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


# ---------------------------------------------------------------------- the rule and the move


@dataclass(slots=True)
class _Move:
    """What some of the views of a kind are about to do, a tensor for each."""

    items: list[_Item]
    b: list[Tensor]  # the new b, and 1 where there is none yet
    rates: list[Tensor] | None  # λ times the direction's factor; None for λ itself
    t: list[Tensor]
    live: list[Tensor] | None  # blocks that take this step; None for all of them


class _Kind:
    """Views whose blocks the rule settles at once, and that move by the same operations."""

    def __init__(self, items: list[_Item]) -> None:
        first = items[0]
        self._items, self.params = items, [item.view.param for item in items]
        self.settings, self._lam = first.unit.settings, first.unit.lam
        self._direction, self._traced = first.view.direction, _traced(first.unit)
        self._old = self._flat([item.b for item in items])
        sq = self._flat([item.sq for item in items])
        self._new, self.finite = self._next_b(sq, first.unit.hold)

    def bad(self) -> list[Tensor]:
        """How many blocks of each view are not finite."""
        return [(~finite).sum() for finite in self._split(self.finite)]

    def move(self) -> None:
        """Move the parameters, and store b, t and the count of skips."""
        live, t = self._live(), self._counts()
        if live is not None and self._direction.counts_blocks:
            t = torch.where(live, t, t - 1)
        b = torch.where(self._new == 0, 1, self._new)  # where there is no b nothing is written
        factor = self._direction.factor(b.to(self._wide), t)
        rates = None if factor is None else (factor * self._lam).to(b.dtype)
        each = _Move(
            self._items,
            self._split(b),
            None if rates is None else self._split(rates),
            self._split(t) if self._direction.counts_blocks else self._each_count(),
            None if live is None else self._split(live),
        )
        for part in _parts(each):
            self._move(part)
        self._store(each.t)
        for item in self._items:
            if item.view.write_back is not None:
                item.view.write_back()

    # ------------------------------------------------------------------ in one expression

    @property
    def _wide(self) -> torch.dtype:
        return blocks.accumulator(self._old.device)

    def _flat(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else torch.cat([part.flatten() for part in parts])

    def _split(self, flat: Tensor) -> list[Tensor]:
        """What `_flat` has put together, in its parts again."""
        if len(self._items) == 1:
            return [flat]
        parts = torch.split(flat, [item.b.numel() for item in self._items])
        return [part.view_as(item.b) for part, item in zip(parts, self._items, strict=True)]

    def _next_b(self, sq: Tensor, hold: bool) -> tuple[Tensor, Tensor]:
        """The new b of all blocks, and which of them are finite."""
        old, lam = self._old, self._lam
        info = torch.finfo(old.dtype)
        new, finite = guarded_b(
            torch,
            old.to(sq.dtype, copy=self.settings.differentiable),
            sq,
            lam,
            c=self.settings.c,
            floor=info.tiny / info.eps,
            hold=hold,
            narrow=lambda wide: wide.to(old.dtype),
        )
        if isinstance(lam, Tensor):  # A step without rate changes nothing.
            new, finite = torch.where(lam != 0, new, old), finite | (lam == 0)
        return new, finite

    def _live(self) -> Tensor | None:
        """The blocks that take this step, or None for all of them.

        Not those that are skipped, those that have no b yet, and none at all if λ is 0: a step
        without rate leaves buffers and counts alone, as a checkpoint loader's dummy step must.
        """
        masks = [self._lam != 0] if isinstance(self._lam, Tensor) else []
        if self.settings.nonfinite == "skip":
            masks.append(self.finite)
        if self.settings.c is not None:
            masks.append(self._new != 0)
        if not masks:
            return None
        live = reduce(torch.logical_and, masks, torch.ones_like(self.finite))
        on_host = live.device.type == "cpu" and not self._traced  # where nothing waits for it
        return None if on_host and bool(live.all()) else live

    def _counts(self) -> Tensor:
        """t of every block after this step; where it is one number, of any parameter."""
        if not self._direction.counts_blocks:
            return self._items[0].view.t
        return self._flat([item.view.t for item in self._items]) + 1

    def _each_count(self) -> list[Tensor]:
        """t of every parameter after this step."""
        one = (self._lam != 0) if isinstance(self._lam, Tensor) else 1
        return [item.view.t + one for item in self._items]

    # ------------------------------------------------------------------------ over lists

    def _move(self, move: _Move) -> None:
        """x_j ← x_{j-1} − λ·factor·d, in place where that is possible."""
        settings, lam, views = self.settings, self._lam, [item.view for item in move.items]
        copied = settings.differentiable or move.live is not None or not _in_place(views[0].p)
        x = [_working(view.p, copy=copied) for view in views]
        names = self._direction.buffers
        buffers = {n: [_working(view.buffers[n], copy=copied) for view in views] for n in names}
        u = [_gradient(item.unit, item.view) if item.u is None else item.u for item in move.items]
        if settings.decoupled_weight_decay and settings.weight_decay:
            keep = rule.decay(1.0, lam, settings.weight_decay)
            lists.mul_(x, [keep] * len(x) if isinstance(keep, Tensor) else keep)
        for name in move.items[0].buffers:
            lists.copy_(buffers[name], [item.buffers[name] for item in move.items])
        d = self._direction.advance(u, move.b, buffers)
        if move.rates is not None:
            lists.addcmul_(x, d, move.rates, value=-1)  # x_j ← x_{j-1} − (λ/b_j) d
        elif isinstance(lam, Tensor):
            lists.addcmul_(x, d, [lam.to(x[0].device, x[0].dtype)] * len(x), value=-1)
        else:
            lists.add_(x, d, alpha=-lam)  # x_j ← x_{j-1} − λ d
        if copied:
            self._write(move, views, x, buffers)

    def _write(self, move: _Move, views: list[View], x: list[Tensor], buffers: Buffers) -> None:
        """Store copies, rounded as asked, where the blocks take this step."""
        if self.settings.stochastic_rounding and views[0].p.dtype == torch.bfloat16:
            x = [rounded(x, t, v.first) for x, t, v in zip(x, move.t, views, strict=True)]
        targets = {"": [view.p for view in views]}
        targets |= {name: [view.buffers[name] for view in views] for name in buffers}
        for name, new in {"": x, **buffers}.items():
            if move.live is not None:
                triples = zip(move.live, new, targets[name], strict=True)
                new = [torch.where(on, value, old) for on, value, old in triples]
            lists.copy_(targets[name], new)

    def _store(self, t: list[Tensor]) -> None:
        new = self._new
        if self.settings.nonfinite == "skip":
            new = torch.where(self.finite, new, self._old)
            for view, finite in self._storing(self._split(self.finite)):
                assert view.skipped is not None  # made by `state.make`
                view.skipped.add_(~finite)
        pairs = self._storing(self._split(new))
        lists.copy_([view.b for view, _ in pairs], [b for _, b in pairs])
        if self._direction.counts_blocks:
            pairs = self._storing(t)
        else:
            views = (item.view for item in self._items)
            pairs = [(view, t) for view, t in zip(views, t, strict=True) if view.counts]
        lists.copy_([view.t for view, _ in pairs], [t for _, t in pairs])

    def _storing(self, values: list[Tensor]) -> list[tuple[View, Tensor]]:
        """The views that store their blocks' state, each with its value."""
        pairs = zip(self._items, values, strict=True)
        return [(item.view, value) for item, value in pairs if item.view.stores]


def _parts(move: _Move) -> Iterator[_Move]:
    """The same move, as many views at a time as fit beside their temporaries."""
    sizes = [item.view.p.numel() / _at_once(item.view.p) for item in move.items]
    if sum(sizes) <= 1 or len(sizes) == 1:
        yield move
        return
    start, room = 0, 0.0
    for stop, size in enumerate([*sizes, 2.0]):
        if stop > start and room + size > 1:
            part = slice(start, stop)
            yield _Move(
                move.items[part],
                move.b[part],
                None if move.rates is None else move.rates[part],
                move.t[part],
                None if move.live is None else move.live[part],
            )
            start, room = stop, 0.0
        room += size


def _refuse_nonfinite(owner: str, kinds: Iterable[_Kind]) -> None:
    asked = [kind for kind in kinds if kind.settings.nonfinite == "raise"]
    if not asked:
        return
    params = [p for kind in asked for p in kind.params]
    counts = sharded.over_ranks([bad for kind in asked for bad in kind.bad()], params)
    for count, p in zip(counts, params, strict=True):
        if count:
            checks.refuse_nonfinite(owner, p, count)


def _in_place(p: Tensor) -> bool:
    return p.dtype in IN_PLACE


def _working(t: Tensor, *, copy: bool = False) -> Tensor:
    """`t` in float32 or wider; a copy where what was there before the step is still wanted."""
    wide = torch.promote_types(t.dtype, torch.float32)
    return t if wide == t.dtype and not copy else t.to(wide, copy=copy)


def _gradient(unit: SharedBlocks, view: View) -> Tensor:
    """The gradient the rule sees: unscaled, of −f if maximizing, with coupled decay in it."""
    settings, g = unit.settings, _working(view.g)
    if unit.grad_scale is not None:
        g = g / unit.grad_scale.to(g.device).reshape(())
    if settings.maximize:
        g = -g
    if settings.weight_decay and not settings.decoupled_weight_decay:
        g = g + settings.weight_decay * _working(view.p, copy=settings.differentiable)
    return g
