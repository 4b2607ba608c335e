"""The plain step, the reference for every kernel: collect, propose, rule, move.

    collect    who has a gradient, checked; whose b is one
    propose    u of every parameter, and ‖u‖² of its blocks
    rule       b_j ← b_{j-1} + λ²‖u‖²/b_{j-1}
    move       x ← decay·x − displacement, and what is stored

Whatever can fail, fails before the first parameter changes. The mathematics is elsewhere: the rule
in `wngrad.rule` and `wngrad.guard`, u and the displacement in `wngrad.optim.directions`, the decay
in `wngrad.optim.decays`. What is one expression for many parameters is a `Batch`: the rule is over
all their blocks, put end to end, and the move over lists.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, cast

import torch
from torch import Tensor

from wngrad import rule as equations
from wngrad.guard import guarded_b
from wngrad.optim import blocks, checks, lists, memory, orthogonal_sharded, sharded, state
from wngrad.optim.directions import Direction, Orthogonalized
from wngrad.optim.rounding import rounded
from wngrad.optim.settings import Settings, numbers

IN_PLACE = {torch.float32, torch.float64}  # types in which x is moved where it lies
_NONE: Any = None  # of what a later verb fills in


@dataclass(slots=True, eq=False)
class Step:
    """One parameter in one step, from `views.open` on as plain tensors that broadcast against b."""

    param: Tensor
    group: int  # its number
    settings: Settings
    lam: float | Tensor
    direction: Direction
    shapes: dict[str, blocks.Shape]  # of the state it needs
    state: dict[str, Tensor]
    holds: bool = False  # b stays at b₁
    scale: Tensor | None = None  # what a GradScaler has multiplied the gradient by
    absent: list[Tensor] = field(default_factory=list)  # b of those that share it, without gradient

    p: Tensor = _NONE
    g: Tensor = _NONE
    b: Tensor = _NONE
    t: Tensor = _NONE  # the steps before this one: of each block, or of the parameter
    skipped: Tensor | None = None
    norm: Tensor | None = None  # by which λ is multiplied
    buffers: dict[str, Tensor] = _NONE  # by name, in the shape of p
    shape: torch.Size = _NONE  # the parameter's own, on this rank, as real numbers
    ranks: tuple[Any, ...] = ()  # the process groups between whose ranks its blocks are cut
    write_back: Any = None  # puts copied rows back

    sq: Tensor = _NONE  # ‖u‖² of its blocks, and of those that share its b
    start: Tensor = _NONE  # what b starts from

    @property
    def lacks_state(self) -> bool:
        return not self.shapes.keys() <= self.state.keys()

    @property
    def traced(self) -> bool:
        """Whether autograd or a compiler is to see the step."""
        return self.settings.differentiable or torch.compiler.is_compiling()

    @property
    def asks_ranks(self) -> bool:
        """Whether u may depend on other ranks."""
        return self.direction.orthogonalizes and sharded.is_sharded(self.param)


Unit = list[Step]  # parameters that share one b per block: mostly one alone


def alone(unit: Unit) -> bool:
    """Whether its blocks depend on no other parameter and on no other rank."""
    return len(unit) == 1 and not unit[0].absent and not unit[0].ranks


# --------------------------------------------------------------------------------- collect


def collect(opt: Any, settings: Sequence[Settings]) -> list[Step]:
    """The parameters that have a gradient. Everything is checked before any state is made.

    Args:
        opt: a `BlockOptimizer`.
        settings: of its groups.
    """
    steps = []
    scale = getattr(opt, "grad_scale", None)
    for number, (group, checked) in enumerate(zip(opt.param_groups, settings, strict=True)):
        group = numbers(group)
        lam = _lam(opt, group)
        for i, p in enumerate(group["params"]):
            if p.grad is not None:
                direction = opt.direction(group, p)
                shapes, kept = state.wanted(group, i, direction), opt.state.get(p, {})
                holds = state.holds(group, p)
                steps.append(Step(p, number, checked, lam, direction, shapes, kept, holds, scale))
    for step in steps:
        _check(type(opt).__name__, step)
    return steps


def _lam(opt: Any, group: dict[str, Any]) -> float | Tensor:
    lr = group["lr"]
    lam = checks.scalar(type(opt).__name__, lr) if isinstance(lr, Tensor) else cast(float, lr)
    found_inf: Tensor | None = getattr(opt, "found_inf", None)
    if isinstance(lam, Tensor):  # wide, since λ² is needed
        lam = lam.to(blocks.accumulator(lam.device))
    if found_inf is None or (not isinstance(lam, Tensor) and lam == 0):
        return lam
    # A scaler has found an inf: a step without rate changes nothing.
    wide = torch.as_tensor(lam, dtype=torch.float64, device=found_inf.device)
    return torch.where(found_inf.reshape(()) != 0, 0.0, wide)


def _check(owner: str, step: Step) -> None:
    p, settings = step.param, step.settings
    dense = {
        "`momentum`": step.direction.touches_all,
        "`weight_decay`": settings.weight_decay != 0,
        "`average`": settings.average is not None,
    }
    reasons = [name for name, is_so in dense.items() if is_so]
    checks.gradient(owner, p, cast(Tensor, p.grad), dense=reasons)
    if settings.differentiable and p.is_leaf and p.requires_grad:
        raise ValueError(
            f"{owner}: `differentiable` parameters must not be leaves that require a "
            f"gradient, got one of shape {tuple(p.shape)}; use a clone."
        )
    if settings.differentiable and step.asks_ranks:
        layout = cast(Orthogonalized, step.direction).layout
        if orthogonal_sharded.is_cut(p, layout):
            raise ValueError(
                f"{owner}: `differentiable` must be False for matrices that are cut between "
                f"ranks, got True for a parameter of shape {tuple(p.shape)}."
            )
    checks.representable(owner, settings.b_init, state.b_dtype(p))
    fixed = "the state (neither `per` nor a shape may change)"
    state.check(owner, fixed, p, step.state, step.shapes)


def units(opt: Any, steps: Iterable[Step]) -> list[Unit]:
    """Who steps together, with views of every tensor. A step without rate changes nothing."""
    every: list[Unit] = []
    together: dict[int, Unit] = {}  # by the number of the group
    for step in steps:
        if not isinstance(step.lam, Tensor) and step.lam == 0:
            continue
        params = opt.param_groups[step.group]["params"]
        shares = step.settings.shares and not step.holds
        step.state = opt.state[step.param]
        open_views(step, not shares or len(params) == 1)
        if shares and step.group in together:
            together[step.group].append(step)
            continue
        every.append([step])
        if shares:
            together[step.group] = every[-1]
            step.absent = [
                sharded.local(opt.state[p]["b"])
                for p in params
                if p.grad is None
                and not state.holds(opt.param_groups[step.group], p)
                and "b" in opt.state.get(p, {})
            ]
    return every


def open_views(step: Step, alone: bool) -> None:
    """Give a step its tensors: plain real ones, whatever its parameter is.

    Args:
        alone: whether it shares its b with no other.
    """
    param, kept = step.param, step.state
    names = step.direction.buffers
    if step.settings.average is not None:
        names = (*names, state.AVERAGE)
    p, g = param, cast(Tensor, param.grad)
    if sharded.is_sharded(param):
        step.ranks = sharded.cuts(param, kept["b"])
        kept = {name: sharded.local(value) for name, value in kept.items()}
        p, g = sharded.local(param), sharded.local_gradient(param)
    g = g.resolve_conj().resolve_neg()
    if g.is_sparse:
        b = kept["b"]
        by_rows = g.sparse_dim() == 1 and (alone or b.numel() == 1) and len(b) in (1, len(p))
        if by_rows:
            p, g, kept, step.write_back = _rows(p, g.coalesce(), kept)
        else:
            g = g.to_dense()
    shape = kept["b"].shape
    step.norm = kept.get(state.NORM) if state.NORM in step.shapes else None
    step.shape = torch.view_as_real(p).shape if p.is_complex() else p.shape
    if p.is_complex() or any(n != 1 != d != n for n, d in zip(shape, p.shape, strict=True)):
        small = {name: _small(p, kept[name]) for name in state.PER_BLOCK if name in kept}
        large = {name: _large(kept[name], shape) for name in names}
        p, g, kept = _large(p, shape), _large(g, shape), {**small, **large}
    step.p, step.g, step.b, step.t, step.skipped = p, g, kept["b"], kept["t"], kept.get("skipped")
    step.buffers = {name: kept[name] for name in names}


def _large(t: Tensor, shape: blocks.Shape) -> Tensor:
    split, _ = blocks.split(t, shape)
    return torch.view_as_real(split) if t.is_complex() else split


def _small(p: Tensor, v: Tensor) -> Tensor:
    if v.dim() == 0 and p.dim() > 0:
        return v  # one for the whole parameter
    _, shape = blocks.split(p, tuple(v.shape))
    return v.view(shape).unsqueeze(-1) if p.is_complex() else v.view(shape)


def _rows(p: Tensor, g: Tensor, kept: dict[str, Tensor]) -> tuple[Tensor, Tensor, Any, Any]:
    """The rows a sparse gradient touches, copied out, and how to put them back."""
    index = g.indices()[0]
    # A single row may be untouched, where its b must still be there for those that share it.
    many = p.shape[0] > 1
    per_row = {key for key, v in kept.items() if many and v.dim() and v.shape[0] == p.shape[0]}
    copies = {key: v.index_select(0, index) if key in per_row else v for key, v in kept.items()}
    p_rows = p.index_select(0, index)

    def write_back() -> None:
        p.index_copy_(0, index, p_rows)
        for key in per_row:
            kept[key].index_copy_(0, index, copies[key])

    return p_rows, g.values(), copies, write_back


# ----------------------------------------------------------------------------------- batch


class Batch:
    """Parameters for which the step is the same expressions, in lists of a tensor for each.

    What a direction reads: `g` and `buffers` in `propose`, in each parameter's own shape; `u`,
    `buffers`, `b`, `b_before`, `t`, `lam` and `rates` in `displace`, where tensors of a parameter
    broadcast against those of its blocks. All are in float32 or wider.
    """

    def __init__(self, steps: list[Step]) -> None:
        self.steps = steps
        self.settings, self.direction = steps[0].settings, steps[0].direction
        self.traced = steps[0].traced
        self._cut = any(step.p.shape != step.shape for step in steps)  # views are of another shape
        self.new: dict[str, list[Tensor]] = {}  # buffers that `propose` has made
        self._rates: list[Tensor] | None = None

    # ------------------------------------------------------------------------- propose

    def measure(self) -> None:
        """u and the buffers that it is made from, and ‖u‖² of every block."""
        steps, direction = self.steps, self.direction
        self.g = self.whole([_gradient(step) for step in steps])
        self.buffers = {
            name: self.whole([working(step.buffers[name]) for step in steps])
            for name in direction.buffers
        }
        if steps[0].asks_ranks:
            return  # see `propose`
        self.take_proposal(direction.propose(self))

    def take_proposal(self, u: list[Tensor]) -> None:
        """u of every parameter, and ‖u‖² of its blocks."""
        self.u = self._as_views(u)
        self.new = {name: self._as_views(new) for name, new in self.new.items()}
        entries = []  # parameters whose every entry is a block: squared all in one go
        for step, x in zip(self.steps, self.u, strict=True):
            if x.shape == step.b.shape and not self.traced:
                entries.append((step, x))
            else:
                step.sq = blocks.sq_norm(x, step.b.shape, traced=self.traced)
        if entries:
            values = [x for _, x in entries]
            squares = lists.flatten(values).to(blocks.accumulator(values[0].device)).square()
            for (step, _), sq in zip(entries, lists.unflatten(squares, values), strict=True):
                step.sq = sq

    def whole(self, views: list[Tensor]) -> list[Tensor]:
        """Views in the parameters' own shapes."""
        if not self._cut:
            return views
        return [v.reshape(step.shape) for v, step in zip(views, self.steps, strict=True)]

    def counts(self) -> list[Tensor]:
        """The steps before this one, such that they broadcast against g."""
        if not self._cut or not self.direction.counts_blocks:
            return [step.t for step in self.steps]
        return [step.t.expand(step.p.shape).reshape(step.shape) for step in self.steps]

    def _as_views(self, tensors: list[Tensor]) -> list[Tensor]:
        if not self._cut:
            return tensors
        return [x.reshape(step.p.shape) for x, step in zip(tensors, self.steps, strict=True)]

    # ---------------------------------------------------------------------------- rule

    def grow(self) -> None:
        """The new b of all blocks, and which of them are finite."""
        settings, lam = self.settings, self.steps[0].lam
        old = lists.flatten([step.start for step in self.steps])
        sq = lists.flatten([step.sq for step in self.steps])
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
            narrow=lambda wide: wide.to(old.dtype),
        )
        if isinstance(lam, Tensor):  # A step without rate changes nothing.
            new, finite = torch.where(lam != 0, new, old), finite | (lam == 0)
        self._new_b, self.finite = new, finite

    def split(self, vector: Tensor) -> list[Tensor]:
        """A tensor for each parameter, in b's shape and type, of one for all their blocks."""
        return lists.unflatten(vector.to(self._new_b.dtype), [step.b for step in self.steps])

    def _per_block(self, masks: Tensor) -> list[Tensor]:
        return lists.unflatten(masks, [step.b for step in self.steps])

    @property
    def lam(self) -> float | Tensor:
        """λ, or λ in units of each parameter's norm for every block."""
        lam, norms = self.steps[0].lam, [(step.norm, step.b) for step in self.steps]
        if norms[0][0] is None:
            return lam
        wide = blocks.accumulator(norms[0][1].device)
        spread = [cast(Tensor, norm).to(wide).expand(b.shape) for norm, b in norms]
        return lists.flatten(spread) * lam

    @property
    def rates(self) -> list[Tensor]:
        """λ/b of every block."""
        if self._rates is None:
            self._rates = self.split(1 / self.b * self.lam)
        return self._rates

    # ---------------------------------------------------------------------------- move

    def move(self) -> None:
        """x ← decay·x − displacement, in place where that is possible; and what is stored."""
        steps, settings, direction = self.steps, self.settings, self.direction
        wide = blocks.accumulator(self._new_b.device)
        # Where there is no b yet nothing is written.
        b = self._new_b if settings.c is None else torch.where(self._new_b == 0, 1, self._new_b)
        self.b = b.to(wide)
        before = lists.flatten([step.b for step in steps])  # that may be older than it starts from
        self.b_before = before.to(wide, copy=settings.differentiable)
        live, one = self._live(), _one(steps[0].lam)
        t = None
        if direction.counts_blocks:
            counted = lists.flatten([step.t for step in steps])
            self.t = counted + 1 if live is None else torch.where(live, counted + 1, counted)
            t = self._per_block(self.t)
        copied = settings.differentiable or live is not None or not self._types <= IN_PLACE
        x = [working(step.p, copy=copied) for step in steps]
        self.buffers = {
            name: [working(step.buffers[name], copy=copied) for step in steps]
            for name in steps[0].buffers
        }
        if settings.decoupled_weight_decay and settings.weight_decay and direction.decay:
            kept = direction.decay(self)
            lists.mul_(x, [kept] * len(x) if isinstance(kept, Tensor) else kept)
        for name, new in self.new.items():
            lists.copy_(self.buffers[name], new)
        d, factors = direction.displace(self)
        if factors is None:
            lists.add_(x, d, alpha=-1)  # x ← x − d
        else:
            lists.addcmul_(x, d, factors, value=-1)  # x ← x − factor·d
        counts = t or [step.t + one for step in steps]  # with this step
        if settings.average is not None:
            k = [count.to(x[0].dtype) for count in counts]
            shares = [equations.polynomial_weight(settings.average, count) for count in k]
            lists.lerp_(self.buffers[state.AVERAGE], x, shares)  # x̄ ← x̄ + (η+1)/(k+η)·(x − x̄)
        if copied:
            self._write(x, counts, live)
        self._store(t, one)

    @property
    def _types(self) -> set[torch.dtype]:
        buffers = (buffer.dtype for step in self.steps for buffer in step.buffers.values())
        return {self.steps[0].p.dtype, *buffers}

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
        on_host = live.device.type == "cpu" and not self.traced  # where nothing waits for it
        return None if on_host and bool(live.all()) else live

    def _write(self, x: list[Tensor], counts: list[Tensor], live: Tensor | None) -> None:
        """Store copies, rounded as asked, where the blocks take this step."""
        if self.settings.stochastic_rounding and self.steps[0].p.dtype == torch.bfloat16:
            x = [rounded(value, t) for value, t in zip(x, counts, strict=True)]
        targets = {"": [step.p for step in self.steps]}
        targets |= {name: [step.buffers[name] for step in self.steps] for name in self.buffers}
        masks = None if live is None else self._per_block(live)
        for name, new in {"": x, **self.buffers}.items():
            if masks is not None:
                triples = zip(masks, new, targets[name], strict=True)
                new = [torch.where(on, value, old) for on, value, old in triples]
            lists.copy_(targets[name], new)

    def _store(self, t: list[Tensor] | None, one: float | Tensor) -> None:
        """Store b, t and the count of skips."""
        steps, lam, b = self.steps, self.steps[0].lam, self._new_b
        skips = self.settings.nonfinite == "skip"
        if skips or isinstance(lam, Tensor):
            still = ~self.finite if skips else torch.zeros_like(self.finite)
            still = still | (lam == 0) if isinstance(lam, Tensor) else still
            # Each keeps its own, which may be older than what the others have reached.
            b = torch.where(still, lists.flatten([step.b for step in steps]), b)
        if skips:
            for step, finite in zip(steps, self._per_block(self.finite), strict=True):
                cast(Tensor, step.skipped).add_(~finite)
        lists.copy_([step.b for step in steps], self._per_block(b))
        counts = [step.t for step in steps]
        if t is None:
            lists.add_(counts, [one] * len(counts) if isinstance(one, Tensor) else one)
        else:
            lists.copy_(counts, t)
        for step in steps:
            if step.write_back is not None:
                step.write_back()


def _one(lam: float | Tensor) -> float | Tensor:
    """What a step adds to the counts: nothing if it has no rate."""
    return (lam != 0).float() if isinstance(lam, Tensor) else 1.0


def working(t: Tensor, *, copy: bool = False) -> Tensor:
    """`t` in float32 or wider; a copy where what was there before the step is still wanted."""
    if t.dtype in IN_PLACE and not copy:
        return t
    return t.to(torch.promote_types(t.dtype, torch.float32), copy=copy)


def _gradient(step: Step) -> Tensor:
    """The gradient the rule sees: unscaled, of −f if maximizing, with coupled decay in it."""
    settings, g = step.settings, working(step.g)
    if step.scale is not None:
        g = g / step.scale.to(g.device).reshape(())
    if settings.maximize:
        g = -g
    if settings.weight_decay and not settings.decoupled_weight_decay:
        g = g + settings.weight_decay * working(step.p, copy=settings.differentiable)
    return g


# ---------------------------------------------------------------------- propose, rule, move


def propose(units: list[Unit]) -> list[Batch]:
    """u of every parameter, and ‖u‖² of its blocks on this rank."""
    steps = [step for unit in units for step in unit]
    # What lies on the memory of another reads what that one has written. A compiler needs no help.
    apart = any(s.traced for s in steps) or memory.any_overlap([s.p for s in steps])
    alike: dict[Any, list[Step]] = {}
    for i, s in enumerate(steps):
        alike.setdefault(i if apart else _kind(s), []).append(s)
    batches = [Batch(part) for part in alike.values()]
    for batch in batches:
        batch.measure()
    _propose_between_ranks([batch for batch in batches if batch.steps[0].asks_ranks])
    return batches


def _kind(s: Step) -> tuple[Any, ...]:
    """What the expressions of a step depend on."""
    lam = id(s.lam) if isinstance(s.lam, Tensor) else s.lam
    how = id(s.settings), lam, s.holds, s.direction, s.norm is None, s.asks_ranks
    return (*how, s.p.dtype, s.b.dtype, s.b.device)


def _propose_between_ranks(batches: list[Batch]) -> None:
    """The proposals of sharded parameters whose matrices may be cut, all of them at once."""
    shards = []
    for batch in batches:
        direction = cast(Orthogonalized, batch.direction)
        for step, g, ahead in zip(batch.steps, batch.g, direction.look_ahead(batch), strict=True):
            shards.append(orthogonal_sharded.Shard(step.param, direction, g, ahead))
    proposed = iter(orthogonal_sharded.propose(shards) if shards else ())
    for batch in batches:
        batch.take_proposal([next(proposed) for _ in batch.steps])


def rule(owner: str, units: list[Unit], batches: list[Batch]) -> None:
    """b_j ← b_{j-1} + λ²‖u‖²/b_{j-1} for all blocks; refused if one is not finite and may not."""
    for unit, total in zip(units, _over_ranks(units), strict=True):
        for step, start in zip(unit, _starts(unit), strict=True):
            step.start = start
            if total is not None:
                step.sq = total.to(step.sq.device).view_as(step.sq)
    for batch in batches:
        batch.grow()
    asked = [batch for batch in batches if batch.settings.nonfinite == "raise"]
    if asked:
        params = [step.param for batch in asked for step in batch.steps]
        bad = [(~finite).sum() for batch in asked for finite in batch._per_block(batch.finite)]
        for count, p in zip(sharded.over_ranks(bad, params), params, strict=True):
            if count:
                checks.refuse_nonfinite(owner, p, count)


def _over_ranks(units: list[Unit]) -> list[Tensor | None]:
    """‖u‖² of each unit's blocks, over all its members and ranks; None where one has it all.

    One small sum for each set of ranks between which anything is cut.
    """
    sums: list[dict[Any, Tensor]] = []  # of each unit by the ranks between which it is cut
    for unit in units:
        by_ranks: dict[Any, Tensor] = {}
        for step in () if alone(unit) else unit:
            flat, key = step.sq.flatten().to(unit[0].sq.device), step.ranks
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


def _starts(unit: Unit) -> list[Tensor]:
    """The b each member starts from.

    b never decreases, so among the members the largest is the latest: a parameter that was frozen
    for a while takes over what the others have reached.
    """
    starts = [step.b for step in unit]
    distinct = {id(b): b for b in [*starts, *unit[0].absent]}
    if len(distinct) == 1:
        return starts
    every = torch.stack([b.flatten().to(starts[0].device) for b in distinct.values()])
    return [every.amax(0).to(b.device).view_as(b) for b in starts]


def move(batches: list[Batch]) -> None:
    """x ← decay·x − displacement, for all of them; nothing can be refused any more."""
    for batch in batches:
        batch.move()
