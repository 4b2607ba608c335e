"""What an optimizer can say of itself: the rates it uses, and what b tells about the run."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from wngrad.optim import sharded

# b that grew this many times more than √(2t+1), its growth under unit gradients, started too low.
_TOO_FAST = 100.0
# b that moved by less than this in at least this many steps leaves plain SGD.
_STILL, _PATIENCE = 1e-3, 10


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
    return {p: _rate(group, opt.state[p]["b"]) for group in groups for p in _seen(opt, group)}


def summarize(opt: Optimizer) -> list[RateSummary]:
    out = []
    for group in opt.param_groups:
        seen = [sharded.local(opt.state[p]["b"]) for p in _seen(opt, group)]
        every = [_rate(group, b).flatten() for b in seen]
        flat = torch.cat([r.to(every[0].device) for r in every]) if every else torch.empty(0)
        flat = flat if flat.numel() else flat.new_full((1,), torch.nan)
        low, high = flat.nan_to_num(torch.inf).amin(), flat.nan_to_num(-torch.inf).amax()
        nan = torch.where(flat.isnan().all(), torch.nan, 0.0)
        out.append(RateSummary(low + nan, flat.nanmedian(), high + nan))
    return out


def skipped(opt: Optimizer) -> int:
    return sum(_skips(opt, group) for group in opt.param_groups)


def diagnose(opt: Optimizer) -> list[str]:
    return [
        f"group {i}{_name(group)}: {'; '.join(_findings(opt, group))}."
        for i, group in enumerate(opt.param_groups)
    ]


def _findings(opt: Optimizer, group: dict[str, Any]) -> list[str]:
    every = [b.flatten().double().cpu() for b in _of(opt, group, "b")]
    steps = max((int(t.max()) for t in _of(opt, group, "t") if t.numel()), default=0)
    b = torch.cat(every) if every else torch.empty(0)
    if b.numel() == 0 and _seen(opt, group):
        return ["no b that moves"]  # all of it is held
    if steps == 0 or b.numel() == 0:
        return ["no step taken yet"]
    found = []
    if bad := int((~b.isfinite()).sum()):
        found.append(f"{bad} of {b.numel()} blocks are NaN: a gradient was not finite")
    if unset := int((b == 0).sum()):
        found.append(f"{unset} of {b.numel()} blocks have seen no gradient yet")
    if skips := _skips(opt, group):
        found.append(f"{skips} blocks with gradients that were not finite have been skipped")
    b = b[b.isfinite() & (b > 0)]
    if b.numel() and not isinstance(group["b_init"], tuple):
        found.append(_growth(b / group["b_init"], steps))
    elif b.numel():
        found.append(f"b lies between {b.min():.3g} and {b.max():.3g} after {steps} steps")
    return found


def _growth(growth: Tensor, steps: int) -> str:
    middle = growth.median().item()
    if middle > _TOO_FAST * math.sqrt(2 * steps + 1):
        return (
            f"b has grown {_power(middle)}-fold in {steps} steps: the first steps were too large "
            f"(start from a larger b_init or a smaller lr)"
        )
    if steps >= _PATIENCE and growth.max().item() < 1 + _STILL:
        return f"b has not moved in {steps} steps: λ is so small that this is plain SGD"
    return f"b has grown {middle:.3g}-fold in {steps} steps"


def _power(x: float) -> str:
    digits = str(round(math.log10(x))).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"


def _rate(group: dict[str, Any], b: Tensor) -> Tensor:
    lam = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
    return lam / torch.where(b == 0, torch.nan, b)


def _seen(opt: Optimizer, group: dict[str, Any]) -> list[Tensor]:
    return [p for p in group["params"] if "b" in opt.state.get(p, {})]


def _of(opt: Optimizer, group: dict[str, Any], key: str) -> list[Tensor]:
    """This state of a group's parameters, on this rank; where they share their blocks, of one."""
    params = _seen(opt, group)
    if group["hold_1d"]:
        params = [p for p in params if p.dim() != 1]
    found = [sharded.local(opt.state[p][key]) for p in params if key in opt.state[p]]
    joint = group["joint"] or group["per"] == "model"
    return [max(found, key=lambda t: float(t.sum()))] if joint and found else found


def skips(opt: Optimizer, group: dict[str, Any]) -> list[Tensor]:
    """Counts of skipped blocks. What shares its blocks counts once: as often as the one most so."""
    joint = group["joint"] or group["per"] == "model"
    own: list[Tensor] = []
    shared: list[Tensor] = []
    for p in group["params"]:
        if "skipped" in (mine := opt.state.get(p, {})):
            held = group["hold_1d"] and p.dim() == 1
            (shared if joint and not held else own).append(sharded.local(mine["skipped"]).sum())
    if shared:
        own.append(torch.stack([n.to(shared[0].device) for n in shared]).amax())
    return own


def _skips(opt: Optimizer, group: dict[str, Any]) -> int:
    return sum(int(n) for n in skips(opt, group))


def _name(group: dict[str, Any]) -> str:
    return f" ({group['name']})" if "name" in group else ""
