"""What the engines are handed: parameters that share their b, and how they are to step."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

from wngrad.optim.checks import Settings
from wngrad.optim.fused.records import RULES, Decay, Rule, address
from wngrad.optim.views import SharedBlocks, View


class Unit(NamedTuple):
    """Parameters that share their b, and the number of their group."""

    shared: SharedBlocks
    group: int

    def places(self, view: View) -> tuple[int, ...]:
        """Where a parameter and its state lie, in the order of `records`."""
        buffer = next(iter(view.buffers.values()), None)
        return tuple(map(address, (view.p, view.b, buffer, view.t, view.skipped)))


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


def method(unit: SharedBlocks) -> Method:
    """The method of parameters that can take the fused step."""
    settings, view = unit.settings, unit.members[0]
    decay = Decay.DECOUPLED if settings.decoupled_weight_decay else Decay.COUPLED
    return Method(
        view.p.device,
        view.p.dtype,
        runs_native(view.p, settings),
        RULES[type(view.direction)],
        decay if settings.weight_decay else Decay.NONE,
        settings.nonfinite == "skip",
        settings.c is not None,
        settings.stochastic_rounding and view.p.dtype == torch.bfloat16,
        settings.nonfinite == "raise",
    )


def runs_native(p: Tensor, settings: Settings) -> bool:
    """Whether it is for cpu.c to step a parameter, not for Triton."""
    return p.device.type == "cpu" and not (settings.fused and interpreted())


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, one element after another, as the tests do."""
    triton = sys.modules.get("triton")  # not imported for this: it takes a while
    return triton is not None and bool(triton.knobs.runtime.interpret)
