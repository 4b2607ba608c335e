"""Units: parameters that share one b per block, mostly one alone, and what they share."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor

from wngrad.optim import sharded, state
from wngrad.optim.views import Step, open_views

Unit = list[Step]


def alone(unit: Unit) -> bool:
    """Whether its blocks depend on no other parameter and on no other rank."""
    return len(unit) == 1 and not unit[0].absent and not unit[0].ranks


def units(opt: Any, steps: Iterable[Step]) -> list[Unit]:
    """Who steps together, with views of every tensor. A step without rate changes nothing."""
    every: list[Unit] = []
    together: dict[int, Unit] = {}  # by the number of the group
    for step in steps:
        if not isinstance(step.lam, Tensor) and step.lam == 0:
            continue
        group = opt.param_groups[step.group]
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
