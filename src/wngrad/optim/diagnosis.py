"""What b and t tell about a run, in sentences.

b never decreases, and b² grows by at least 2‖u‖² in every step, where u is what the rule measures
(λg for WNGrad and WNAdam). From b and t alone it can be told how large gradients have been over the
whole run, and not when: a block whose gradients have stopped looks like one whose were small.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wngrad.optim import loss_trend, report, sharded
from wngrad.optim.state import holds, shares

# b whose median grew this many times more than under directions of norm 1 started too low.
_TOO_FAST = 100.0
# A block that grew this many times more than that, and than the median, is a runaway.
_RUNAWAY = 10.0
# b that moved by less than this in at least this many steps leaves plain SGD.
_STILL, _PATIENCE = 1e-3, 10
# Clauses about a run in which nothing looks wrong.
_USUAL = re.compile(
    r"no step taken yet|no b that moves|b lies between .*|b has grown [^-]+-fold in \d+ steps"
    r"|(loss: )?(falls .*|too few to judge.*|.*: it lies close to zero, .*)"
)


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of one parameter on this rank, or of all that share them."""

    label: str
    b: Tensor  # in one dimension, on the host
    steps: int
    skipped: Tensor  # blocks that have been skipped at least once

    def still(self, first: float) -> Tensor:
        """Blocks that have stepped, and whose b is what it was at the start, to the last bit."""
        unmoved = self.b == torch.tensor(first, dtype=self.b.dtype)
        return unmoved & ~self.skipped & (self.steps >= _PATIENCE)


def diagnose(opt: Optimizer, losses: Iterable[float | Tensor] | None) -> list[str]:
    lines = [
        f"group {i}{_name(group)}: {'; '.join(_findings(opt, group))}."
        for i, group in enumerate(opt.param_groups)
    ]
    return lines if losses is None else [_loss_verdict(opt, losses), *lines]


def troubles(opt: Optimizer, losses: Iterable[float | Tensor] | None) -> list[str]:
    """What `diagnose` says, without the clauses that are as they should be; empty if all are."""
    lines = [] if losses is None else [_loss_verdict(opt, losses).removesuffix(".")]
    lines = [line for line in lines if not _USUAL.fullmatch(line)]
    for i, group in enumerate(opt.param_groups):
        clauses = [each for each in _findings(opt, group) if not _USUAL.fullmatch(each)]
        lines += [f"group {i}{_name(group)}: {'; '.join(clauses)}"] if clauses else []
    return [f"{line}." for line in lines]


def _loss_verdict(opt: Optimizer, losses: Iterable[float | Tensor]) -> str:
    params = opt.param_groups[-1]["params"]
    classes = params[-1].shape[0] if params and params[-1].dim() else None
    return loss_trend.verdict(type(opt).__name__, losses, classes)


def is_still(opt: Optimizer, group: dict[str, Any], limit: float) -> bool:
    """Whether half of the b of a group that started from a number have grown less than so far."""
    params = _parameters(opt, group)
    if isinstance(group["b_init"], (str, tuple)) or not params:
        return False
    growth = torch.cat([each.b.double() for each in params]) / group["b_init"]
    return bool(growth.numel() > 0 and growth.nanmedian().item() < limit)


def _findings(opt: Optimizer, group: dict[str, Any]) -> list[str]:
    params = _parameters(opt, group)
    b = torch.cat([each.b.double() for each in params]) if params else torch.empty(0)
    steps = max((each.steps for each in params), default=0)
    if b.numel() == 0 and report.stepped(opt, group):
        return ["no b that moves"]  # all of it is held
    if steps == 0 or b.numel() == 0:
        return ["no step taken yet"]
    clauses = []
    if bad := int((~b.isfinite()).sum()):
        clauses.append(f"{bad} of {b.numel()} blocks are NaN: a gradient was not finite")
    if unset := int((b == 0).sum()):
        where = _most(params, [each.b == 0 for each in params])
        clauses.append(f"{unset} of {b.numel()} blocks have seen no gradient yet{where}")
    if skips := report.skips_of(opt, group):
        clauses.append(f"{skips} blocks with gradients that were not finite have been skipped")
    b = b[b.isfinite() & (b > 0)]
    if b.numel() and isinstance(group["b_init"], (str, tuple)):
        clauses.append(f"b lies between {b.min():.3g} and {b.max():.3g} after {steps} steps")
    elif b.numel():
        clauses += _growth(group, params, b / group["b_init"], steps)
    return clauses


def _growth(group: dict[str, Any], params: list[_Blocks], growth: Tensor, steps: int) -> list[str]:
    """How far b has come, for groups that say where it started."""
    middle = growth.median().item()
    barely = int((growth < 1 + _STILL).sum())
    if steps >= _PATIENCE and barely == growth.numel():
        return [
            f"b has not moved in {steps} steps: λ is so small that this is plain SGD, or the "
            f"gradients are next to zero"
        ]
    if middle > _TOO_FAST * _expected(group, steps):
        clause = (
            f"b has grown {_power(middle)}-fold in {steps} steps: the first steps were too large "
            f"(start from a larger b_init or a smaller lr)"
        )
    else:
        clause = f"b has grown {middle:.3g}-fold in {steps} steps"
    clauses = [clause, *_runaways(group, params, middle), *_still(group, params)]
    if steps >= _PATIENCE and 2 * barely > growth.numel():
        clauses.append(
            f"b of {barely} of {growth.numel()} blocks has grown by less than {_STILL:.1%}: hardly "
            f"any gradient reaches them (add normalization layers or change the initialization), "
            f"or λ is so small that this is plain SGD"
        )
    return clauses


def _runaways(group: dict[str, Any], params: list[_Blocks], middle: float) -> list[str]:
    """Blocks that have grown far more than directions of norm 1 explain, and than the median."""
    first = group["b_init"]
    masks, largest, explained = [], 0.0, 0.0
    for each in params:
        expected = _expected(group, each.steps)
        growth = each.b.double() / first
        mask = growth.isfinite() & (growth > _RUNAWAY * max(expected, middle))
        masks.append(mask)
        if mask.any() and (most := growth[mask].max().item()) > largest:
            largest, explained = most, expected
    if not largest:
        return []
    count, total = _counted(masks)
    return [
        f"the median hides {count} of {total} blocks whose b has grown far more, up to "
        f"{largest:.3g}-fold where directions of norm 1 explain {explained:.3g}-fold"
        f"{_most(params, masks)}: large gradients have lowered their rates for good (clip "
        f"gradients, scale the inputs, or start from a larger b_init or a smaller lr)"
    ]


def _still(group: dict[str, Any], params: list[_Blocks]) -> list[str]:
    """Blocks whose b has not changed by a bit."""
    masks = [each.still(group["b_init"]) for each in params]
    count, total = _counted(masks)
    if not count:
        return []
    steps = min(each.steps for each, mask in zip(params, masks, strict=True) if mask.any())
    return [
        f"b of {count} of {total} blocks has not moved in {steps} steps{_most(params, masks)}: "
        f"each gradient was zero or too small for b's precision (dead ReLUs want a smaller lr or "
        f"another activation; unused rows and biases before a normalization do no harm)"
    ]


def _expected(group: dict[str, Any], steps: int) -> float:
    """√(b₁² + 2t)/b₁, the growth under directions of norm 1; a λ above 1 may multiply them."""
    first: float = group["b_init"]
    unit = max(1.0, float(group.get("initial_lr", group["lr"])), float(group["lr"]))
    return math.hypot(1, math.sqrt(2 * steps) * unit / first)


def _most(params: list[_Blocks], masks: list[Tensor]) -> str:
    """The parameter that has most of these blocks, in parentheses."""
    counts = [int(mask.sum()) for mask in masks]
    i = counts.index(max(counts))
    which = "" if counts[i] == sum(counts) else "most of them "
    return f" ({which}in {params[i].label}: {counts[i]} of its {masks[i].numel()})"


def _counted(masks: list[Tensor]) -> tuple[int, int]:
    return sum(int(mask.sum()) for mask in masks), sum(mask.numel() for mask in masks)


def _power(x: float) -> str:
    digits = str(round(math.log10(x))).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"


def _parameters(opt: Optimizer, group: dict[str, Any]) -> list[_Blocks]:
    """The blocks of a group whose b moves; where parameters share theirs, those of one."""
    params = [
        _blocks(opt, group, i, p)
        for i, p in enumerate(group["params"])
        if "b" in opt.state.get(p, {}) and not holds(group, p)
    ]
    if params and shares(group):
        # b never decreases: of those that share it, the largest is the latest.
        latest = max(params, key=lambda each: float(each.b.sum()))
        steps = max(each.steps for each in params)
        return [_Blocks(latest.label, latest.b, steps, latest.skipped)]
    return params


def _blocks(opt: Optimizer, group: dict[str, Any], i: int, p: Tensor) -> _Blocks:
    state = {key: opt.state[p][key] for key in ("b", "t", "skipped") if key in opt.state[p]}
    local = {key: sharded.local(value).detach().flatten().cpu() for key, value in state.items()}
    b, t = local["b"], local.get("t")
    names = group.get("param_names")
    label = f"`{names[i]}`" if names else f"parameter {i} of shape {tuple(p.shape)}"
    skipped = local["skipped"] > 0 if "skipped" in local else torch.zeros_like(b, dtype=torch.bool)
    return _Blocks(label, b, int(t.max()) if t is not None and t.numel() else 0, skipped)


def _name(group: dict[str, Any]) -> str:
    return f" ({group['name']})" if "name" in group else ""
