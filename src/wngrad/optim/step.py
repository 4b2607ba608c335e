"""The plain step, the reference for every kernel: collect, propose, rule, move.

    collect    who has a gradient (`wngrad.optim.collect`)
    propose    u of every parameter, and ‖u‖² of its blocks
    rule       b_j ← b_{j-1} + λ²‖u‖²/b_{j-1}
    move       x ← decay·x − displacement, and what is stored

Whatever can fail, fails before the first parameter changes. The mathematics is elsewhere: the rule
in `wngrad.rule` and `wngrad.guard`, u and the displacement in `wngrad.optim.directions`, the decay
in `wngrad.optim.decays`. What is one expression for many parameters is a `Batch`: the rule is over
all their blocks, put end to end, and the move over lists.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any, cast

import torch
from torch import Tensor

from wngrad import rule as equations
from wngrad.guard import guarded_b
from wngrad.optim import blocks, checks, lists, memory, orthogonal_sharded, sharded, state
from wngrad.optim.collect import Step, Unit, share
from wngrad.optim.directions import Orthogonalized
from wngrad.optim.rounding import rounded

IN_PLACE = {torch.float32, torch.float64}  # types in which x is moved where it lies


class Batch:
    """Parameters for which the step is the same expressions, in lists of a tensor for each.

    What a direction reads: `g` and `buffers` in `propose`, in each parameter's own shape; `u`,
    `buffers`, `b`, `b_before`, `t`, `lam` and `rates` in `displace`, where tensors of a parameter
    broadcast against those of its blocks. All are in float32 or wider.
    """

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        self.settings, self.direction = steps[0].settings, steps[0].direction
        self.new: dict[str, list[Tensor]] = {}  # buffers that `propose` has made
        # What is stored: places to be written to.
        self._p: list[Tensor] = []
        self._b: list[Tensor] = []
        self._t: list[Tensor] = []
        self._buffers: dict[str, list[Tensor]] = {name: [] for name in steps[0].buffers}
        self._cut = self._narrow = False  # some views are of another shape; some types too narrow
        self._rates: list[Tensor] | None = None
        self.g: list[Tensor] = []
        for step in steps:
            self._p.append(step.p)
            self._b.append(step.b)
            self._t.append(step.t)
            self.g.append(_gradient(step))
            self._cut = self._cut or step.p.shape != step.shape
            self._narrow = self._narrow or step.p.dtype not in IN_PLACE
            for name, buffer in step.buffers.items():
                self._buffers[name].append(buffer)
                self._narrow = self._narrow or buffer.dtype not in IN_PLACE
        self.buffers = {name: self._buffers[name] for name in self.direction.buffers}
        if self._narrow:
            self.buffers = {name: list(map(working, b)) for name, b in self.buffers.items()}
        if self._cut:
            self.g = self._whole(self.g)
            self.buffers = {name: self._whole(buffers) for name, buffers in self.buffers.items()}

    # ------------------------------------------------------------------------- propose

    def measure(self, u: list[Tensor]) -> None:
        """Take over u of every parameter, and find ‖u‖² of its blocks."""
        if self._cut:
            u = self._views(u)
            self.new = {name: self._views(buffers) for name, buffers in self.new.items()}
        self.u = u
        entries: list[Step] = []  # whose every entry is a block: they are squared in one go
        values: list[Tensor] = []
        for step, x in zip(self.steps, u, strict=True):
            if x.shape == step.b.shape and not step.traced:
                entries.append(step)
                values.append(x)
            else:
                step.sq = blocks.sq_norm(x, step.b.shape, traced=step.traced)
        if entries:
            squares = lists.flatten(values).to(blocks.accumulator(values[0].device)).square()
            for step, sq in zip(entries, lists.unflatten(squares, values), strict=True):
                step.sq = sq

    def counts(self) -> list[Tensor]:
        """The steps before this one, such that they broadcast against g."""
        if not self._cut or not self.direction.counts_blocks:
            return self._t
        return [step.t.expand(step.p.shape).reshape(step.shape) for step in self.steps]

    def _whole(self, views: list[Tensor]) -> list[Tensor]:
        return [v.reshape(step.shape) for v, step in zip(views, self.steps, strict=True)]

    def _views(self, whole: list[Tensor]) -> list[Tensor]:
        return [x.reshape(step.p.shape) for x, step in zip(whole, self.steps, strict=True)]

    # ---------------------------------------------------------------------------- rule

    def grow(self) -> None:
        """The new b of all blocks, and which of them are finite."""
        settings, lam = self.settings, self.steps[0].lam
        starts, squares = [], []
        for step in self.steps:
            starts.append(step.start)
            squares.append(step.sq)
        old, sq = lists.flatten(starts), lists.flatten(squares)
        info = torch.finfo(old.dtype)
        new, finite = guarded_b(
            torch,
            old.to(sq.dtype, copy=settings.differentiable),
            sq,
            lam if self.direction.rate_in_rule else 1.0,
            c=settings.c,
            b1=settings.b_init,
            floor=info.tiny / info.eps,
            hold=self.steps[0].holds,
            narrow=partial(Tensor.to, dtype=old.dtype),
        )
        if isinstance(lam, Tensor):  # A step without rate changes nothing.
            new, finite = torch.where(lam != 0, new, old), finite | (lam == 0)
        self._new_b, self.finite = new, finite
        # Where there is no b yet nothing is written.
        b = new if settings.c is None else torch.where(new == 0, 1, new)
        self.b = b.to(blocks.accumulator(new.device))

    def split(self, vector: Tensor) -> list[Tensor]:
        """A tensor for each parameter, in b's shape and type, of one for all their blocks."""
        if vector.dtype.is_floating_point:
            vector = vector.to(self._new_b.dtype)
        return lists.unflatten(vector, self._b)

    @property
    def b_before(self) -> Tensor:
        """b as it is stored, which may be older than what others have reached."""
        return lists.flatten(self._b).to(self.b.dtype, copy=self.settings.differentiable)

    @property
    def lam(self) -> float | Tensor:
        """λ, or λ in units of each parameter's norm for every block."""
        lam = self.steps[0].lam
        if self.steps[0].norm is None:
            return lam
        norms = [cast(Tensor, s.norm).to(self.b.dtype).expand(s.b.shape) for s in self.steps]
        return lists.flatten(norms) * lam

    @property
    def rates(self) -> list[Tensor]:
        """λ/b of every block."""
        if self._rates is None:
            self._rates = self.split(1 / self.b * self.lam)
        return self._rates

    # ---------------------------------------------------------------------------- move

    def move(self) -> None:
        """x ← decay·x − displacement, in place where that is possible; and what is stored."""
        settings, direction, lam = self.settings, self.direction, self.steps[0].lam
        live = self._live()
        one = (lam != 0).float() if isinstance(lam, Tensor) else 1.0  # nothing without a rate
        copied = live is not None or settings.differentiable or self._narrow
        x, self.buffers = self._p, self._buffers
        if copied:
            x = [working(p, copy=True) for p in x]
            self.buffers = {
                name: [working(buffer, copy=True) for buffer in buffers]
                for name, buffers in self._buffers.items()
            }
        if direction.counts_blocks:
            t = lists.flatten(self._t)
            self.t = t + 1 if live is None else torch.where(live, t + 1, t)
        if direction.decay and settings.decoupled_weight_decay and settings.weight_decay:
            factor = direction.decay.kept(self)
            lists.mul_(x, [factor] * len(x) if isinstance(factor, Tensor) else factor)
        for name, new in self.new.items():
            lists.copy_(self.buffers[name], new)
        d, factors = direction.displace(self)
        if factors is None:
            lists.add_(x, d, alpha=-1)  # x ← x − d
        else:
            lists.addcmul_(x, d, factors, value=-1)  # x ← x − factor·d
        if direction.counts_blocks:
            counts = self.split(self.t)
        elif settings.average is not None or settings.stochastic_rounding:
            counts = [t + one for t in self._t]
        if settings.average is not None:
            k = [t.to(x[0].dtype) for t in counts]
            shares = [equations.polynomial_weight(settings.average, t) for t in k]
            lists.lerp_(self.buffers[state.AVERAGE], x, shares)  # x̄ ← x̄ + (η+1)/(k+η)·(x − x̄)
        if copied:
            if settings.stochastic_rounding and self._p[0].dtype == torch.bfloat16:
                x = [rounded(value, t) for value, t in zip(x, counts, strict=True)]
            masks = None if live is None else self.split(live)
            pairs = [(buffers, self.buffers[name]) for name, buffers in self._buffers.items()]
            for old, new in [(self._p, x), *pairs]:
                if masks is not None:
                    triples = zip(masks, new, old, strict=True)
                    new = [torch.where(on, value, before) for on, value, before in triples]
                lists.copy_(old, new)
        self._store_b()
        if direction.counts_blocks:
            lists.copy_(self._t, counts)
        else:
            lists.add_(self._t, [one] * len(x) if isinstance(one, Tensor) else one)
        for step in self.steps:
            if step.write_back is not None:
                step.write_back()

    def _live(self) -> Tensor | None:
        """The blocks that take this step, or None for all of them.

        Not those that are skipped, those that have no b yet, and none at all if λ is 0: a step
        without rate leaves buffers and counts alone, as a checkpoint loader's dummy step must.
        """
        lam = self.steps[0].lam
        masks = [lam != 0] if isinstance(lam, Tensor) else []
        if self.settings.nonfinite == "skip":
            masks.append(self.finite)
        if self.settings.c is not None:
            masks.append(self._new_b != 0)
        if not masks:
            return None
        live = reduce(torch.logical_and, masks, torch.ones_like(self.finite))
        on_host = live.device.type == "cpu" and not self.steps[0].traced  # where nothing waits
        return None if on_host and bool(live.all()) else live

    def _store_b(self) -> None:
        """Store b, where it has grown, and the count of skips."""
        lam, b = self.steps[0].lam, self._new_b
        skips = self.settings.nonfinite == "skip"
        if skips or isinstance(lam, Tensor):
            still = ~self.finite if skips else torch.zeros_like(self.finite)
            still = still | (lam == 0) if isinstance(lam, Tensor) else still
            b = torch.where(still, lists.flatten(self._b), b)
        if skips:
            for step, finite in zip(self.steps, self.split(self.finite), strict=True):
                cast(Tensor, step.skipped).add_(~finite)
        lists.copy_(self._b, self.split(b))


def working(t: Tensor, *, copy: bool = False) -> Tensor:
    """`t` in float32 or wider; a copy where what was there before the step is still wanted."""
    if t.dtype in IN_PLACE and not copy:
        return t
    return t.to(torch.promote_types(t.dtype, torch.float32), copy=copy)


def _gradient(step: Step) -> Tensor:
    """The gradient the rule sees: unscaled, of −f if maximizing, with coupled decay in it."""
    settings = step.settings
    g = step.g if step.g.dtype in IN_PLACE else working(step.g)
    if step.scale is not None:
        g = g / step.scale.to(g.device).reshape(())
    if settings.maximize:
        g = -g
    if settings.weight_decay and not settings.decoupled_weight_decay:
        g = g + settings.weight_decay * working(step.p, copy=settings.differentiable)
    return g


def propose(units: list[Unit]) -> list[Batch]:
    """u of every parameter, and ‖u‖² of its blocks on this rank."""
    steps, places, apart = [], [], False
    for unit in units:
        for step in unit:
            steps.append(step)
            places.append(step.p)
            apart = apart or step.traced  # a compiler puts together what it likes
    # What lies on the memory of another reads what that one has written.
    apart = apart or memory.any_overlap(places)
    alike: dict[Any, list[Step]] = {}
    for i, step in enumerate(steps):
        kind: Any = i
        if not apart:
            lam = id(step.lam) if isinstance(step.lam, Tensor) else step.lam
            how = id(step.settings), lam, step.holds, step.direction, step.norm is None
            kind = (*how, step.sharded, step.p.dtype, step.b.dtype, step.b.device)
        alike.setdefault(kind, []).append(step)
    batches, between_ranks = [], []
    for part in alike.values():
        batches.append(batch := Batch(part))
        if part[0].asks_ranks:
            between_ranks.append(batch)
        else:
            batch.measure(batch.direction.propose(batch))
    if between_ranks:
        _propose_between_ranks(between_ranks)
    return batches


def _propose_between_ranks(batches: list[Batch]) -> None:
    """The proposals of sharded parameters whose matrices may be cut, all of them at once."""
    shards = []
    for batch in batches:
        direction = cast(Orthogonalized, batch.direction)
        for step, g, ahead in zip(batch.steps, batch.g, direction.look_ahead(batch), strict=True):
            shards.append(orthogonal_sharded.Shard(step.param, direction, g, ahead))
    proposed = iter(orthogonal_sharded.propose(shards))
    for batch in batches:
        batch.measure([next(proposed) for _ in batch.steps])


def rule(owner: str, units: list[Unit], batches: list[Batch]) -> None:
    """b_j ← b_{j-1} + λ²‖u‖²/b_{j-1} for all blocks; refused if one is not finite and may not."""
    share(units)
    asked = []
    for batch in batches:
        batch.grow()
        if batch.settings.nonfinite == "raise":
            asked.append(batch)
    if asked:
        params = [step.param for batch in asked for step in batch.steps]
        bad = [(~finite).sum() for batch in asked for finite in batch.split(batch.finite)]
        for count, p in zip(sharded.over_ranks(bad, params), params, strict=True):
            if count:
                checks.refuse_nonfinite(owner, p, count)


def move(batches: list[Batch]) -> None:
    """x ← decay·x − displacement, for all of them; nothing can be refused any more."""
    for batch in batches:
        batch.move()
