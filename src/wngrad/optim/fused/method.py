"""What the engines are handed: parameters that share their b, and how they are to step."""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

import torch
from torch import Tensor

from wngrad.optim.checks import Settings
from wngrad.optim.directions import Adam
from wngrad.optim.fused.layout import tensors
from wngrad.optim.fused.records import RULES, Decay, Rule, address, bits
from wngrad.optim.views import SharedBlocks, View


class Unit(NamedTuple):
    """Parameters that share their b, and the number of their group."""

    shared: SharedBlocks
    group: int

    def places(self, view: View) -> tuple[int, ...]:
        """Where a parameter and its state lie, and Adam's numbers, in the order of `records`."""
        p, _, *buffers = tensors(view)
        places = map(address, (p, view.b, *buffers, view.t, view.skipped, view.norm))
        return (*places, *map(bits, _adam(view)))


def _adam(view: View) -> tuple[float, ...]:
    direction = view.direction
    if not isinstance(direction, Adam):
        return (0.0,) * 4
    scale, beta2 = direction.scale, direction.beta2
    log = math.log2(beta2) if beta2 > 0 else -math.inf
    return scale, log, math.sqrt(beta2), math.sqrt(1 - beta2)


class Method(NamedTuple):
    """What a kernel is compiled for, or told once: units of one method step in one launch."""

    device: torch.device
    dtype: torch.dtype
    native: bool  # by cpu.c, not by Triton
    rule: Rule
    decay: Decay
    skip: bool  # nonfinite="skip"
    latch: bool  # b₁ = C·λ·‖g₁‖
    rounds: bool  # stochastically
    checks_first: bool  # nonfinite="raise": all gradients are inspected before anything is written
    rated: bool  # λ is in the rule: b ← b + λ²‖u‖²/b
    averages: bool
    relative: bool  # λ is in units of each parameter's norm
    proposed: torch.dtype | None  # of u in the gradient's place, which `fused.matrices` makes


def method(unit: SharedBlocks) -> Method:
    """The method of parameters that can take the fused step."""
    settings, view = unit.settings, unit.members[0]
    direction = view.direction
    return Method(
        view.p.device,
        view.p.dtype,
        runs_native(view.p, settings),
        RULES[type(direction)],
        _decay(unit),
        settings.nonfinite == "skip",
        settings.c is not None,
        settings.stochastic_rounding and view.p.dtype == torch.bfloat16,
        settings.nonfinite == "raise",
        direction.rate_in_rule,
        settings.average is not None,
        view.norm is not None,
        view.g.dtype if direction.orthogonalizes else None,
    )


def _decay(unit: SharedBlocks) -> Decay:
    settings, by = unit.settings, unit.members[0].direction.decays_by
    if not settings.weight_decay:
        return Decay.NONE
    if not settings.decoupled_weight_decay:
        return Decay.COUPLED
    return {"lr": Decay.DECOUPLED, "rate": Decay.BY_RATE, None: Decay.NONE}[by]


def runs_native(p: Tensor, settings: Settings) -> bool:
    """Whether it is for cpu.c to step a parameter, not for Triton."""
    return p.device.type == "cpu" and not (settings.fused and interpreted())


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, one element after another, as the tests do."""
    triton = sys.modules.get("triton")  # not imported for this: it takes a while
    knobs = getattr(triton, "knobs", None)  # since Triton 3.4: `eligibility.why_no_triton`
    return knobs is not None and bool(knobs.runtime.interpret)
