"""What an optimizer can say of itself in numbers: the rates it uses, and what it skipped."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from wngrad.optim import sharded
from wngrad.optim.state import NORM, holds, shares


class RateSummary(NamedTuple):
    """The spread of the effective rates λ/b within one group."""

    min: Tensor
    median: Tensor
    max: Tensor

    def floats(self) -> tuple[float, float, float]:
        """The three numbers. Waits for the device."""
        return self.min.item(), self.median.item(), self.max.item()


def rates(opt: Optimizer) -> dict[Tensor, Tensor]:
    groups = opt.param_groups
    return {p: _rate(group, opt.state[p]) for group in groups for p in stepped(opt, group)}


def summarize(opt: Optimizer) -> list[RateSummary]:
    out = []
    for group in opt.param_groups:
        every = [sharded.local(_rate(group, opt.state[p])).flatten() for p in stepped(opt, group)]
        flat = torch.cat([r.to(every[0].device) for r in every]) if every else torch.empty(0)
        flat = flat if flat.numel() else flat.new_full((1,), torch.nan)
        out.append(RateSummary(*_spread(flat)))
    return out


def spreads(opt: Optimizer, params: list[Tensor]) -> Tensor:
    """Of each parameter: smallest, median and largest rate, then those of b; NaN if unknown.

    One tensor of shape (parameters, 6), on the device of the first: nothing waits for it. Of
    sharded parameters, this rank's.
    """
    groups = {id(p): group for group in opt.param_groups for p in group["params"]}
    rows = []
    for p in params:
        state = opt.state.get(p, {})
        if id(p) not in groups or "b" not in state or not sharded.local(state["b"]).numel():
            rows.append(torch.full((6,), torch.nan))
            continue
        rate = sharded.local(_rate(groups[id(p)], state)).detach().flatten().float()
        b = sharded.local(state["b"]).detach().flatten().float()
        b = torch.where(b == 0, torch.nan, b)
        rows.append(torch.stack([*_spread(rate), *_spread(b)]))
    device = next((row.device for row in rows if row.is_cuda), None)
    return torch.stack([row.to(device, non_blocking=True) for row in rows])


def _spread(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    low, high = values.nan_to_num(torch.inf).amin(), values.nan_to_num(-torch.inf).amax()
    nan = torch.where(values.isnan().all(), torch.nan, 0.0)
    return low + nan, values.nanmedian(), high + nan


def units(opt: Optimizer, group: dict[str, Any]) -> Tensor:
    """The median of a group's effective rates without λ; NaN where none is known."""
    every = [
        sharded.local(_rate({**group, "lr": 1.0}, opt.state[p])).flatten()
        for p in stepped(opt, group)
    ]
    if not every:
        return torch.tensor(torch.nan)
    return torch.cat([rate.to(every[0].device) for rate in every]).float().nanmedian()


def skipped(opt: Optimizer) -> int:
    return sum(skips_of(opt, group) for group in opt.param_groups)


def _rate(group: dict[str, Any], state: dict[str, Tensor]) -> Tensor:
    lam = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
    if group.get("finetune") and NORM in state:
        lam = lam * state[NORM]
    return lam / torch.where(state["b"] == 0, torch.nan, state["b"])


def stepped(opt: Optimizer, group: dict[str, Any]) -> list[Tensor]:
    """The parameters of a group that have stepped."""
    return [p for p in group["params"] if "b" in opt.state.get(p, {})]


def skips(opt: Optimizer, group: dict[str, Any]) -> list[Tensor]:
    """Counts of skipped blocks. What shares its blocks counts once: as often as the one most so."""
    own: list[Tensor] = []
    shared: list[Tensor] = []
    for p in group["params"]:
        if "skipped" in (mine := opt.state.get(p, {})):
            (shared if shares(group) and not holds(group, p) else own).append(
                sharded.local(mine["skipped"]).sum()
            )
    if shared:
        own.append(torch.stack([n.to(shared[0].device) for n in shared]).amax())
    return own


def skips_of(opt: Optimizer, group: dict[str, Any]) -> int:
    return sum(int(n) for n in skips(opt, group))
