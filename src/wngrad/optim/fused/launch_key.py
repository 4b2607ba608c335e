"""The compile-time key of a launch, and where in memory lie the rows that it steps."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wngrad.optim.collect import Step, Unit
from wngrad.optim.directions import Adam
from wngrad.optim.fused.records import DECAYS, RULES, TENSORS, Decay, Rule, address, bits
from wngrad.optim.settings import Settings
from wngrad.optim.state import AVERAGE

_MOST_KEPT, _MOST_SUMMED = 2, 4  # dimensions a strided address can have


class LaunchKey(NamedTuple):
    """What a kernel is compiled for, or told once: units of one key step in one launch."""

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


def launch_key(unit: Unit) -> LaunchKey:
    """The key of parameters that can take the fused step."""
    step = unit[0]
    settings, direction = step.settings, step.direction
    return LaunchKey(
        device=step.p.device,
        dtype=step.p.dtype,
        native=runs_native(step.p, settings),
        rule=RULES[type(direction)],
        decay=decay(step),
        skip=settings.nonfinite == "skip",
        latch=settings.c is not None,
        rounds=settings.stochastic_rounding and step.p.dtype == torch.bfloat16,
        checks_first=settings.nonfinite == "raise",
        rated=direction.rate_in_rule,
        averages=settings.average is not None,
        relative=step.norm is not None,
        proposed=step.g.dtype if direction.orthogonalizes else None,
    )


def decay(step: Step) -> Decay | None:
    """Where weight decay comes in; None if no kernel knows."""
    if not step.settings.weight_decay:
        return Decay.NONE
    if not step.settings.decoupled_weight_decay:
        return Decay.COUPLED
    return DECAYS.get(type(step.direction.decay))


def runs_native(p: Tensor, settings: Settings) -> bool:
    """Whether it is for cpu.c to step a parameter, not for Triton."""
    return p.device.type == "cpu" and not (settings.fused and interpreted())


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, one element after another, as the tests do."""
    triton = sys.modules.get("triton")  # not imported for this: it takes a while
    knobs = getattr(triton, "knobs", None)  # since Triton 3.4: `eligibility.why_no_triton`
    return knobs is not None and bool(knobs.runtime.interpret)


# ------------------------------------------------------------------------ rows in memory


def tensors(step: Step) -> tuple[Tensor | None, ...]:
    """Those of the parameter's shape that kernels read, as in `records.TENSORS`; None: it has not.

    What an orthogonalized direction keeps is not among them: it belongs to `fused.matrices`.
    """
    names = () if step.direction.orthogonalizes else step.direction.buffers
    buffers = [step.buffers[name] for name in names]
    return step.p, step.g, *buffers, *[None] * (2 - len(buffers)), step.buffers.get(AVERAGE)


def places(step: Step) -> tuple[int, ...]:
    """Where a parameter and its state lie, and Adam's numbers, in the order of `records`."""
    p, _, *buffers = tensors(step)
    addresses = map(address, (p, step.b, *buffers, step.t, step.skipped, step.norm))
    adam, direction = (0.0,) * 4, step.direction
    if isinstance(direction, Adam):
        beta2 = direction.beta2
        log = math.log2(beta2) if beta2 > 0 else -math.inf
        adam = direction.scale, log, math.sqrt(beta2), math.sqrt(1 - beta2)
    return (*addresses, *map(bits, adam))


class _Dim(NamedTuple):
    size: int
    strides: tuple[int, ...]  # of each of `records.TENSORS`


@dataclass(frozen=True, slots=True)
class RowLayout:
    """`rows` blocks of `length` elements each."""

    rows: int
    length: int
    kept: tuple[_Dim, ...]  # across rows
    summed: tuple[_Dim, ...]  # within a row

    @property
    def dense(self) -> bool:
        """Whether rows follow one another without gaps, alike in all tensors."""
        across = all(set(d.strides) == {self.length} for d in self.kept)
        within = all(set(d.strides) == {1} for d in self.summed)
        return len(self.kept) <= 1 and len(self.summed) <= 1 and across and within

    @property
    def fits(self) -> bool:
        """Whether the strides are few enough for the kernels, and nothing would be written twice.

        The gradient alone, which is the second of the tensors, may be one number for all.
        """
        few = len(self.kept) <= _MOST_KEPT and len(self.summed) <= _MOST_SUMMED
        written = [(d.strides[0], *d.strides[2:]) for d in (*self.kept, *self.summed)]
        return few and all(0 not in strides for strides in written)

    def words(self) -> list[int]:
        """Sizes, then the strides of each tensor, as in `records.LAYOUT`."""
        one = _Dim(1, (0,) * len(TENSORS))
        kept = (one,) * (_MOST_KEPT - len(self.kept)) + self.kept
        summed = (one,) * (_MOST_SUMMED - len(self.summed)) + self.summed
        sizes = [kept[1].size, *(d.size for d in summed[1:])]
        return sizes + [d.strides[k] for k in range(len(TENSORS)) for d in (*kept, *summed)]


def layout(step: Step) -> RowLayout:
    """The rows of a parameter."""
    p, rows = step.p, step.b.numel()
    length = p.numel() // max(1, rows)
    if not rows * length:
        return RowLayout(rows, 0, (), ())
    strides = zip(*((p if t is None else t).stride() for t in tensors(step)), strict=True)
    kept: list[_Dim] = []
    summed: list[_Dim] = []
    for size, blocks, of_each in zip(p.shape, step.b.shape, strides, strict=True):
        if size != 1:
            (kept if blocks == size else summed).append(_Dim(size, of_each))
    # Within a row any order will do, so that of memory (channels last, say). Rows follow b.
    summed.sort(key=lambda d: d.strides, reverse=True)
    return RowLayout(rows, length, _merged(kept), _merged(summed))


def _merged(dims: list[_Dim]) -> tuple[_Dim, ...]:
    """Neighbours that are one run of memory, as one dimension."""
    out: list[_Dim] = []
    for d in dims:
        if out and out[-1].strides == tuple(d.size * s for s in d.strides):
            out[-1] = _Dim(out[-1].size * d.size, d.strides)
        else:
            out.append(d)
    return tuple(out)
