"""Who steps now: the parameters that have a gradient, checked, and which of them share a b."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from wngrad.optim import blocks, checks, inputs, sharded, state
from wngrad.optim.checks import Settings
from wngrad.optim.directions import Direction
from wngrad.optim.state import Group
from wngrad.optim.views import SharedBlocks, view


class Due(NamedTuple):
    """A parameter that is about to step."""

    group: Group
    number: int  # of its group
    settings: Settings
    lam: float | Tensor
    p: Tensor
    direction: Direction
    shapes: dict[str, blocks.Shape]  # of the state it needs
    state: dict[str, Tensor]  # as it is

    @property
    def lacks_state(self) -> bool:
        return not self.shapes.keys() <= self.state.keys()


def parameters(opt: Any, settings: list[Settings]) -> list[Due]:
    """The parameters that have a gradient. Everything is checked before any state is made.

    Args:
        opt: a `BlockOptimizer`.
        settings: of its groups.
    """
    due = []
    groups = map(checks.numbers, opt.param_groups)
    for number, (group, its) in enumerate(zip(groups, settings, strict=True)):
        lam = _lam(opt, group)
        for i, p in enumerate(group["params"]):
            if p.grad is not None:
                direction = opt.direction(group, p)
                shapes = state.wanted(group, i, direction)
                due.append(Due(group, number, its, lam, p, direction, shapes, opt.state.get(p, {})))
    for each in due:
        _check(opt, each)
    return due


def units(opt: Any, params: list[Due]) -> list[SharedBlocks]:
    """Who steps together."""
    scale = getattr(opt, "grad_scale", None)
    every: list[SharedBlocks] = []
    together: dict[int, SharedBlocks] = {}
    for each in params:
        its, p = each.settings, each.p
        if not isinstance(each.lam, Tensor) and each.lam == 0:
            continue  # A step without rate changes nothing.
        hold = state.holds(each.group, p)
        shares = its.shares and not hold
        alone = not shares or len(each.group["params"]) == 1
        averages = its.average is not None
        relative = state.NORM in each.shapes
        member = view(p, opt.state[p], each.direction, alone, averages, relative)
        if shares and each.number in together:
            together[each.number].members.append(member)
            continue
        absent = _b_without_gradient(opt, each) if shares else []
        every.append(SharedBlocks(its, each.lam, [member], absent, hold, scale))
        if shares:
            together[each.number] = every[-1]
    return every


def _b_without_gradient(opt: Any, due: Due) -> list[Tensor]:
    """b of the parameters that share theirs with this one and have no gradient now."""
    return [
        sharded.local(opt.state[p]["b"])
        for p in due.group["params"]
        if p.grad is None and not state.holds(due.group, p) and "b" in opt.state.get(p, {})
    ]


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


def _check(opt: Any, due: Due) -> None:
    owner, p, settings = type(opt).__name__, due.p, due.settings
    dense = {
        "`momentum`": due.direction.touches_all,
        "`weight_decay`": settings.weight_decay != 0,
        "`average`": settings.average is not None,
    }
    reasons = [name for name, is_so in dense.items() if is_so]
    inputs.gradient(owner, p, cast(Tensor, p.grad), dense=reasons)
    if settings.differentiable and p.is_leaf and p.requires_grad:
        raise ValueError(
            f"{owner}: `differentiable` parameters must not be leaves that require a "
            f"gradient, got one of shape {tuple(p.shape)}; use a clone."
        )
    checks.representable(owner, settings.b_init, state.b_dtype(p))
    fixed = "the state (neither `per` nor a shape may change)"
    state.check(owner, fixed, p, due.state, due.shapes)
