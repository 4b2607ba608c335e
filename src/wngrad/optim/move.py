"""The rule and the move: views whose norms are known get their new b, and step.

Views for which the rule and the move are the same expressions are a `RuleBatch`. The rule is one
expression for all their blocks, put end to end; the move one operation over a list.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from typing import cast

import torch
from torch import Tensor

from wngrad import rule
from wngrad.guard import guarded_b
from wngrad.optim import average, blocks, lists, memory
from wngrad.optim.directions import Buffers, Velocity
from wngrad.optim.rounding import rounded
from wngrad.optim.views import SharedBlocks, View

IN_PLACE = {torch.float32, torch.float64}  # types in which x is moved where it lies

# Elements that are worked on at once, so that temporaries never grow with the parameters and a
# gradient is still in a CPU's cache when its parameter moves. Of 2^14 … 2^20 these were the fastest
# for 38 M float32 parameters on two cores, with temporaries and without; runs differ by half.
_WITH_COPIES, _WITHOUT = 2**18, 2**20
_FAR = 2**24  # not on a CPU: there few launches matter more than the cache
SMALL = _WITH_COPIES  # elements of a set of parameters that is one batch anywhere


def traced(unit: SharedBlocks) -> bool:
    """Whether autograd or a compiler is to see the step."""
    return unit.settings.differentiable or torch.compiler.is_compiling()


def at_once(device: torch.device, dtype: torch.dtype) -> int:
    """How many elements are worked on at once."""
    if device.type != "cpu":
        return _FAR
    return _WITHOUT if dtype in IN_PLACE else _WITH_COPIES


@dataclass(slots=True)
class Item:
    """A view on its way through the step."""

    unit: SharedBlocks
    view: View
    u: Tensor | None  # what the rule measures, if it is kept for the move
    buffers: dict[str, Tensor]  # as `Direction.propose` has made them
    sq: Tensor  # ‖u‖² of its blocks; after `_Batch.rule_batches`, of those it shares them with, too
    b: Tensor  # what b starts from

    @property
    def kind(self) -> tuple[object, ...]:
        """What the rule and the move depend on."""
        unit, view, b = self.unit, self.view, self.view.b
        how = view.direction, view.norm is None, view.p.dtype, b.dtype, b.device
        return id(unit.settings), id(unit.lam), unit.hold, how


@dataclass(slots=True)
class _Move:
    """What some of the views of a kind are about to do, a tensor for each."""

    items: list[Item]
    b: list[Tensor]  # the new b, and 1 where there is none yet
    rates: list[Tensor] | None  # λ times the direction's factor (see `_rates`); None for λ itself
    kept: list[Tensor] | float  # of a `Velocity`: what v is multiplied by,
    gains: list[Tensor] | None  # and λ·entering, by which u enters it
    live: list[Tensor] | None  # blocks that take this step; None for all of them
    t: list[Tensor] | None  # the new t, where blocks are counted

    def part(self, start: int, stop: int) -> _Move:
        lists = (self.items, self.b, self.rates, self.kept, self.gains, self.live, self.t)
        parts = (each[start:stop] if isinstance(each, list) else each for each in lists)
        return _Move(*parts)  # type: ignore[arg-type]


class RuleBatch:
    """Views that one vectorized call of the rule updates, and that move by the same operations."""

    def __init__(self, items: list[Item], bounded: bool) -> None:
        first, self._bounded = items[0], bounded
        self._items, self.params = items, [item.view.param for item in items]
        self.settings, self._lam = first.unit.settings, first.unit.lam
        self._direction, self._traced = first.view.direction, traced(first.unit)
        self._b = [item.b for item in items]  # what each starts from
        self._old = lists.flatten(self._b)
        sq = lists.flatten([item.sq for item in items])
        self._new, self.finite = self._next_b(sq, first.unit.hold)

    def bad(self) -> list[Tensor]:
        """How many blocks of each view are not finite."""
        return [(~finite).sum() for finite in self._split(self.finite)]

    def move(self) -> None:
        """Move the parameters, and store b, t and the count of skips."""
        live, t = self._live(), self._block_counts()
        b = self._new
        if self.settings.c is not None:  # where there is no b yet nothing is written
            b = torch.where(b == 0, 1, b)
        if t is not None:
            t = t + 1 if live is None else torch.where(live, t + 1, t)
        split_b = self._split(b)
        each = _Move(
            self._items,
            split_b,
            *self._rates(b, t),
            None if live is None else self._split(live),
            None if t is None else self._split(t),
        )
        for part in self._in_turn(each):
            self._move(part)
        self._store(split_b if b is self._new else self._split(self._new), each.t)
        for item in self._items:
            if item.view.write_back is not None:
                item.view.write_back()

    # ------------------------------------------------------------------ in one expression

    @property
    def _wide(self) -> torch.dtype:
        return blocks.accumulator(self._old.device)

    def _split(self, vector: Tensor) -> list[Tensor]:
        """A tensor for each view, of what was put end to end."""
        return lists.unflatten(vector, self._b)

    def _rate(self) -> float | Tensor:
        """λ, or λ in units of each parameter's norm, for every block."""
        norms = [(item.view.norm, item.b) for item in self._items]
        if norms[0][0] is None:
            return self._lam
        each = [cast(Tensor, norm).to(self._wide).expand(b.shape) for norm, b in norms]
        return lists.flatten(each) * self._lam

    def _next_b(self, sq: Tensor, hold: bool) -> tuple[Tensor, Tensor]:
        """The new b of all blocks, and which of them are finite."""
        old, lam = self._old, self._lam
        info = torch.finfo(old.dtype)
        measured = lam if self._direction.rate_in_rule else 1.0
        new, finite = guarded_b(
            torch,
            old.to(sq.dtype, copy=self.settings.differentiable),
            sq,
            measured,
            c=self.settings.c,
            b1=self.settings.b_init,
            floor=info.tiny / info.eps,
            hold=hold,
            narrow=lambda wide: wide.to(old.dtype),
        )
        if isinstance(lam, Tensor):  # A step without rate changes nothing.
            new, finite = torch.where(lam != 0, new, old), finite | (lam == 0)
        return new, finite

    def _rates(
        self, b: Tensor, t: Tensor | None
    ) -> tuple[list[Tensor] | None, list[Tensor] | float, list[Tensor] | None]:
        """`rates`, `kept` and `gains` of the move; λ is in the gains, if there are any."""
        direction, wide = self._direction, b.to(self._wide)
        factor = direction.factor(wide, self._new if t is None else t)
        if not isinstance(direction, Velocity):
            return self._narrow(factor, b, self._rate()), 0.0, None
        # What a view has stored, which may be older than what others have reached it starts from.
        before = lists.flatten([item.view.b for item in self._items])
        before = before.to(self._wide, copy=self.settings.differentiable)
        kept = direction.kept(before, wide)
        each = self._narrow(kept, b) if isinstance(kept, Tensor) else kept
        assert each is not None
        return (
            self._narrow(factor, b),
            each,
            self._narrow(direction.entering(wide), b, self._rate()),
        )

    def _narrow(
        self, wide: Tensor | None, like: Tensor, lam: float | Tensor | None = None
    ) -> list[Tensor] | None:
        """A tensor for each view, times λ where that is given, in b's type."""
        if wide is None:
            return None
        return self._split((wide if lam is None else wide * lam).to(like.dtype))

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

    def _keep(self) -> Tensor | None:
        """The blocks whose b stays as it was, or None for none of them."""
        skipped = ~self.finite if self.settings.nonfinite == "skip" else None
        if not isinstance(self._lam, Tensor):
            return skipped
        still = torch.zeros_like(self.finite) | (self._lam == 0)
        return still if skipped is None else still | skipped

    def _block_counts(self) -> Tensor | None:
        """t of every block, where blocks are counted."""
        if not self._direction.counts_blocks:
            return None
        return lists.flatten([item.view.t for item in self._items])

    @property
    def _one(self) -> float | Tensor:
        """What this step adds to the counts: nothing if it has no rate."""
        return (self._lam != 0).float() if isinstance(self._lam, Tensor) else 1.0

    # ------------------------------------------------------------------------ over lists

    def _in_turn(self, move: _Move) -> Iterable[_Move]:
        """Parts of the move, each of which reads what those before it have written."""
        # One launch moves all of them on a GPU, and copies are stored after all are made.
        at_once = self._old.device.type != "cpu" or self._copies(move)
        apart = not self._traced and len(move.items) > 1 and at_once
        if apart and memory.any_overlap([item.view.p for item in move.items]):
            return (move.part(k, k + 1) for k in range(len(move.items)))
        return [move] if self._bounded else _parts(move)

    def _copies(self, move: _Move) -> bool:
        """Whether the new values are made apart, and then stored."""
        views = [item.view for item in move.items]
        dtypes = {views[0].p.dtype, *(each.dtype for v in views for each in v.buffers.values())}
        return self.settings.differentiable or move.live is not None or not dtypes <= IN_PLACE

    def _move(self, move: _Move) -> None:
        """x_j ← x_{j-1} − λ·factor·d, in place where that is possible."""
        settings, lam, views = self.settings, self._lam, [item.view for item in move.items]
        names, copied = tuple(views[0].buffers), self._copies(move)
        x = [working(view.p, copy=copied) for view in views]
        buffers = {n: [working(view.buffers[n], copy=copied) for view in views] for n in names}
        u = [gradient(item.unit, item.view) if item.u is None else item.u for item in move.items]
        self._decay(x, move.rates)
        for name in move.items[0].buffers:
            lists.copy_(buffers[name], [item.buffers[name] for item in move.items])
        if move.gains is None:
            d = self._direction.advance(u, move.b, buffers)
        else:
            d, lam = buffers["velocity"], 1.0
            lists.mul_(d, move.kept)
            lists.addcmul_(d, u, move.gains)  # v ← kept·v + λ·entering·u
        if move.rates is not None:
            lists.addcmul_(x, d, move.rates, value=-1)  # x_j ← x_{j-1} − (λ/b_j) d
        elif isinstance(lam, Tensor):
            lists.addcmul_(x, d, [lam.to(x[0].device, x[0].dtype)] * len(x), value=-1)
        else:
            lists.add_(x, d, alpha=-lam)  # x_j ← x_{j-1} − λ d
        if settings.average is not None:
            t = move.t or [view.t + self._one for view in views]
            weights = [average.weight(settings.average, t.to(x[0].dtype)) for t in t]
            lists.lerp_(buffers["average"], x, weights)  # x̄ ← x̄ + (η+1)/(k+η)·(x − x̄)
        if copied:
            self._write(move, views, x, buffers)

    def _decay(self, x: list[Tensor], rates: list[Tensor] | None) -> None:
        """Decoupled weight decay: x ← x·(1 − w·λ), or x ← x·(1 − w·λ/b)."""
        settings, by = self.settings, self._direction.decays_by
        if not settings.decoupled_weight_decay or not settings.weight_decay or by is None:
            return
        if by == "rate" and rates is not None:
            lists.mul_(x, [rule.decay(1.0, rate, settings.weight_decay) for rate in rates])
            return
        keep = rule.decay(1.0, self._lam, settings.weight_decay)
        lists.mul_(x, [keep] * len(x) if isinstance(keep, Tensor) else keep)

    def _write(self, move: _Move, views: list[View], x: list[Tensor], buffers: Buffers) -> None:
        """Store copies, rounded as asked, where the blocks take this step."""
        if self.settings.stochastic_rounding and views[0].p.dtype == torch.bfloat16:
            t = move.t or [view.t + self._one for view in views]
            x = [rounded(x, t, v.first) for x, t, v in zip(x, t, views, strict=True)]
        targets = {"": [view.p for view in views]}
        targets |= {name: [view.buffers[name] for view in views] for name in buffers}
        for name, new in {"": x, **buffers}.items():
            if move.live is not None:
                triples = zip(move.live, new, targets[name], strict=True)
                new = [torch.where(on, value, old) for on, value, old in triples]
            lists.copy_(targets[name], new)

    def _store(self, b: list[Tensor], t: list[Tensor] | None) -> None:
        keep = self._keep()
        if keep is not None:  # each its own, which may be older than what the others have reached
            own = lists.flatten([item.view.b for item in self._items])
            b = self._split(torch.where(keep, own, self._new))
        if self.settings.nonfinite == "skip":
            for view, finite in self._storing(self._split(self.finite)):
                assert view.skipped is not None  # made by `state.make`
                view.skipped.add_(~finite)
        pairs = self._storing(b)
        lists.copy_([view.b for view, _ in pairs], [b for _, b in pairs])
        if t is None:
            counts = [item.view.t for item in self._items if item.view.counts]
            one = self._one
            lists.add_(counts, [one] * len(counts) if isinstance(one, Tensor) else one)
        else:
            pairs = self._storing(t)
            lists.copy_([view.t for view, _ in pairs], [t for _, t in pairs])

    def _storing(self, values: list[Tensor]) -> list[tuple[View, Tensor]]:
        """The views that store their blocks' state, each with its value."""
        pairs = zip(self._items, values, strict=True)
        return [(item.view, value) for item, value in pairs if item.view.stores]


def _parts(move: _Move) -> Iterator[_Move]:
    """The same move, as many views at a time as fit beside their temporaries."""
    sizes = shares([item.view.p for item in move.items])
    if sum(sizes) <= 1 or len(sizes) == 1:
        yield move
        return
    start, room = 0, 0.0
    for stop, size in enumerate([*sizes, 2.0]):
        if stop > start and room + size > 1:
            yield move.part(start, stop)
            start, room = stop, 0.0
        room += size


def shares(tensors: list[Tensor]) -> list[float]:
    """How much of a batch each of them fills."""
    most = {kind: at_once(*kind) for kind in {(t.device, t.dtype) for t in tensors}}
    return [t.numel() / most[t.device, t.dtype] for t in tensors]


def working(t: Tensor, *, copy: bool = False) -> Tensor:
    """`t` in float32 or wider; a copy where what was there before the step is still wanted."""
    if t.dtype in IN_PLACE and not copy:
        return t
    return t.to(torch.promote_types(t.dtype, torch.float32), copy=copy)


def gradient(unit: SharedBlocks, view: View) -> Tensor:
    """The gradient the rule sees: unscaled, of −f if maximizing, with coupled decay in it."""
    settings, g = unit.settings, working(view.g)
    if unit.grad_scale is not None:
        g = g / unit.grad_scale.to(g.device).reshape(())
    if settings.maximize:
        g = -g
    if settings.weight_decay and not settings.decoupled_weight_decay:
        g = g + settings.weight_decay * working(view.p, copy=settings.differentiable)
    return g
