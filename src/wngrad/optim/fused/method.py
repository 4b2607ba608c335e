"""The compile-time key of a launch, and where what it steps lies."""

from __future__ import annotations

import math
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wngrad.optim.collect import Step, Unit
from wngrad.optim.directions import Adam
from wngrad.optim.fused.layout import tensors
from wngrad.optim.fused.records import DECAYS, RULES, Decay, Rule, address, bits
from wngrad.optim.settings import Settings


def places(view: Step) -> tuple[int, ...]:
    """Where a parameter and its state lie, and Adam's numbers, in the order of `records`."""
    p, _, *buffers = tensors(view)
    addresses = map(address, (p, view.b, *buffers, view.t, view.skipped, view.norm))
    adam, direction = (0.0,) * 4, view.direction
    if isinstance(direction, Adam):
        beta2 = direction.beta2
        log = math.log2(beta2) if beta2 > 0 else -math.inf
        adam = direction.scale, log, math.sqrt(beta2), math.sqrt(1 - beta2)
    return (*addresses, *map(bits, adam))


class Method(NamedTuple):
    """What a kernel is compiled for, or told once: units of one method step in one launch."""

    device: torch.device
    dtype: torch.dtype
    native: bool  # by cpu.c, not by Triton
    rule: Rule
    decay: Any  # a `Decay`
    skip: bool  # nonfinite="skip"
    latch: bool  # b₁ = C·λ·‖g₁‖
    rounds: bool  # stochastically
    checks_first: bool  # nonfinite="raise": all gradients are inspected before anything is written
    rated: bool  # λ is in the rule: b ← b + λ²‖u‖²/b
    averages: bool
    relative: bool  # λ is in units of each parameter's norm
    proposed: torch.dtype | None  # of u in the gradient's place, which `fused.matrices` makes


def method(unit: Unit) -> Method:
    """The method of parameters that can take the fused step."""
    view = unit[0]
    settings, direction = view.settings, view.direction
    return Method(
        view.p.device,
        view.p.dtype,
        runs_native(view.p, settings),
        RULES[type(direction)],
        decay(view),
        settings.nonfinite == "skip",
        settings.c is not None,
        settings.stochastic_rounding and view.p.dtype == torch.bfloat16,
        settings.nonfinite == "raise",
        direction.rate_in_rule,
        settings.average is not None,
        view.norm is not None,
        view.g.dtype if direction.orthogonalizes else None,
    )


def decay(view: Step) -> Decay | None:
    """Where weight decay comes in; None if no kernel knows."""
    if not view.settings.weight_decay:
        return Decay.NONE
    if not view.settings.decoupled_weight_decay:
        return Decay.COUPLED
    return DECAYS.get(type(view.direction.decay))


def runs_native(p: Tensor, settings: Settings) -> bool:
    """Whether it is for cpu.c to step a parameter, not for Triton."""
    return p.device.type == "cpu" and not (settings.fused and interpreted())


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, one element after another, as the tests do."""
    triton = sys.modules.get("triton")  # not imported for this: it takes a while
    knobs = getattr(triton, "knobs", None)  # since Triton 3.4: `eligibility.why_no_triton`
    return knobs is not None and bool(knobs.runtime.interpret)
