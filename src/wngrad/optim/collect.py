"""Who steps now: the parameters that have a gradient, checked, and those that share their b.

Whatever a parameter is (a shard, complex, given a sparse gradient, cut into odd blocks), a step
sees plain real tensors here, which broadcast against its b.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, cast

import torch
from torch import Tensor

from wngrad.optim import blocks, checks, orthogonal_sharded, sharded, state
from wngrad.optim.directions import Direction
from wngrad.optim.settings import Group, Settings, numbers

_LATER: Any = None  # what `open_views`, or a verb of the step, fills in


@dataclass(slots=True, eq=False)
class Step:
    """One parameter in one step, and what the step computes for it."""

    param: Tensor
    group: int  # its number among those that step
    settings: Settings
    lam: float | Tensor
    direction: Direction
    shapes: dict[str, blocks.Shape]  # of the state it needs
    holds: bool = False  # b stays at b₁
    scale: Tensor | None = None  # what a GradScaler has multiplied the gradient by
    traced: bool = False  # autograd or a compiler is to see the step
    untraceable: bool = False  # a trace would lose new state, and cannot see sparse gradients
    sharded: bool = False

    p: Tensor = _LATER
    g: Tensor = _LATER
    b: Tensor = _LATER
    t: Tensor = _LATER  # the steps before this one: of each block, or of the parameter
    skipped: Tensor | None = None
    norm: Tensor | None = None  # by which λ is multiplied
    buffers: dict[str, Tensor] = _LATER  # by name, in the shape of p
    shape: torch.Size = _LATER  # the parameter's own, on this rank, as real numbers
    ranks: tuple[Any, ...] = ()  # the process groups between whose ranks its blocks are cut
    absent: list[Tensor] = field(default_factory=list)  # b of those that share it, without gradient
    write_back: Callable[[], None] | None = None  # for what had to be copied out

    sq: Tensor = _LATER  # ‖u‖² of its blocks, and then of all that share its b
    start: Tensor = _LATER  # what b starts from

    @property
    def asks_ranks(self) -> bool:
        """Whether u may depend on other ranks."""
        return self.sharded and self.direction.orthogonalizes


def collect(
    opt: Any,
    groups: Sequence[Group],
    settings: Sequence[Settings],
    places: Sequence[int] | None = None,
) -> list[Step]:
    """The parameters that have a gradient. Everything is checked before any state is made.

    Args:
        opt: a `BlockOptimizer`.
        groups: those that step.
        settings: of the groups.
        places: which of a group's parameters step; None for all.
    """
    steps = []
    scale, compiled = getattr(opt, "grad_scale", None), torch.compiler.is_compiling()
    for number, (group, checked) in enumerate(zip(groups, settings, strict=True)):
        group = numbers(opt.Settings, group)
        lam = _lam(opt, group)
        traced = compiled or checked.differentiable
        for i in range(len(group["params"])) if places is None else places:
            p = group["params"][i]
            if p.grad is not None:
                direction = opt.direction(group, p)
                shapes, kept = state.wanted(group, i, direction), opt.state.get(p, {})
                facts = direction, shapes, state.holds(group, p), scale, traced
                untraceable = not shapes.keys() <= kept.keys() or p.grad.is_sparse
                is_shard = hasattr(p, "to_local")
                step = Step(p, number, checked, lam, *facts, untraceable, is_shard)
                _check(type(opt).__name__, step, kept)
                steps.append(step)
    return steps


def _lam(opt: Any, group: Group) -> float | Tensor:
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


def _check(owner: str, step: Step, kept: dict[str, Tensor]) -> None:
    p, settings = step.param, step.settings
    dense = {
        "`momentum`": step.direction.touches_all,
        "`weight_decay`": settings.weight_decay != 0,
        "`average`": settings.average is not None,
    }
    checks.gradient(owner, p, cast(Tensor, p.grad), dense=dense)
    if settings.differentiable:
        if p.is_leaf and p.requires_grad:
            raise ValueError(
                f"{owner}: `differentiable` parameters must not be leaves that require a "
                f"gradient, got one of shape {tuple(p.shape)}; use a clone."
            )
        layout: Any = getattr(step.direction, "layout", None)
        if step.asks_ranks and orthogonal_sharded.is_cut(p, layout):
            raise ValueError(
                f"{owner}: `differentiable` must be False for matrices that are cut between "
                f"ranks, got True for a parameter of shape {tuple(p.shape)}."
            )
    fixed = "the state (neither `per` nor a shape may change)"
    state.check(owner, fixed, p, kept, step.shapes)


# ------------------------------------------------------------------- plain tensors of a step


def open_views(step: Step, kept: dict[str, Tensor], alone: bool) -> None:
    """Give a step its tensors.

    Args:
        kept: the parameter's state.
        alone: whether it shares its b with no other.
    """
    param = step.param
    names = step.direction.buffers
    if step.settings.average is not None:
        names = (*names, state.AVERAGE)
    p, g = param, cast(Tensor, param.grad)
    if step.sharded:
        step.ranks = sharded.cuts(param, kept["b"])
        kept = {name: sharded.local(value) for name, value in kept.items()}
        p, g = sharded.local(param), sharded.local_gradient(param)
    g = g.resolve_conj().resolve_neg()
    if g.is_sparse:
        b = kept["b"]
        if g.sparse_dim() == 1 and (alone or b.numel() == 1) and len(b) in (1, len(p)):
            p, g, kept, step.write_back = _rows(p, g.coalesce(), kept)
        else:
            g = g.to_dense()
    if state.NORM in step.shapes:
        step.norm = kept[state.NORM]
    step.shape = torch.view_as_real(p).shape if p.is_complex() else p.shape
    b_shape, cut = kept["b"].shape, p.is_complex()
    for n, d in zip(b_shape, p.shape, strict=True):
        cut = cut or n not in (1, d)
    if cut:
        small = {name: _small(p, kept[name]) for name in state.PER_BLOCK if name in kept}
        large = {name: _large(kept[name], b_shape) for name in names}
        p, g, kept = _large(p, b_shape), _large(g, b_shape), {**small, **large}
    step.p, step.g, step.b, step.t, step.skipped = p, g, kept["b"], kept["t"], kept.get("skipped")
    step.buffers = {}
    for name in names:
        step.buffers[name] = kept[name]


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


# --------------------------------------------------------------------------- who shares a b


Unit = list[Step]


def alone(unit: Unit) -> bool:
    """Whether its blocks depend on no other parameter and on no other rank."""
    return len(unit) == 1 and not unit[0].absent and not unit[0].ranks


def units(opt: Any, groups: Sequence[Group], steps: Iterable[Step]) -> list[Unit]:
    """Who steps together, with views of every tensor. A step without rate changes nothing."""
    every: list[Unit] = []
    together: dict[int, Unit] = {}  # by the number of the group
    for step in steps:
        if not isinstance(step.lam, Tensor) and step.lam == 0:
            continue
        group = groups[step.group]
        shares = step.settings.shares and not step.holds
        open_views(step, opt.state[step.param], not shares or len(group["params"]) == 1)
        if shares and step.group in together:
            together[step.group].append(step)
            continue
        every.append([step])
        if shares:
            together[step.group] = every[-1]
            step.absent = [
                sharded.local(opt.state[p]["b"])
                for p in group["params"]
                if p.grad is None and not state.holds(group, p) and "b" in opt.state.get(p, {})
            ]
    return every


def share(units: list[Unit]) -> None:
    """Give every step ‖u‖² of all that share its b, over all ranks, and what that b starts from.

    One small sum for each set of ranks between which anything is cut.
    """
    sums: list[dict[Any, Tensor]] = []  # of each unit by the ranks between which it is cut
    together = []
    for unit in units:
        if alone(unit):
            unit[0].start = unit[0].b
            continue
        by_ranks: dict[Any, Tensor] = {}
        for step in unit:
            flat, key = step.sq.flatten().to(unit[0].sq.device), step.ranks
            by_ranks[key] = by_ranks[key] + flat if key in by_ranks else flat
        sums.append(by_ranks)
        together.append(unit)
    for key in dict.fromkeys(key for by_ranks in sums for key in by_ranks if key):
        holders = [by_ranks for by_ranks in sums if key in by_ranks]
        parts = [by_ranks[key] for by_ranks in holders]
        total = torch.cat([part.to(parts[0].device) for part in parts])
        split = torch.split(sharded.sum_over_ranks(total, key), [p.numel() for p in parts])
        for by_ranks, part in zip(holders, split, strict=True):
            by_ranks[key] = part.to(by_ranks[key].device)
    for unit, by_ranks in zip(together, sums, strict=True):
        sq = reduce(add, by_ranks.values())
        for step, start in zip(unit, _starts(unit), strict=True):
            step.start, step.sq = start, sq.to(step.sq.device).view_as(step.sq)


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
