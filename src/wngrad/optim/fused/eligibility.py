"""Who takes the fused step, and why a parameter does not.

What may stand in the way is a list of (whether it does, the reason), read from the top until one
does: a line may rely on those above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from wngrad.optim import memory, sharded
from wngrad.optim.collect import Step, Unit, alone
from wngrad.optim.directions import Orthogonalized
from wngrad.optim.fused import cpu, matrices
from wngrad.optim.fused.launch_key import decay, layout, runs_native
from wngrad.optim.fused.records import DTYPES, NUMBER, RULES
from wngrad.optim.fused.snapshot import UNKNOWN_KIND, Scope, momentum_setting, rate
from wngrad.optim.settings import Settings
from wngrad.optim.state import AVERAGE

_Obstacles: TypeAlias = Iterator[tuple[bool, str]]


def why_never(optimizer: Any, p: Tensor, settings: Settings) -> str | None:
    """Why a parameter can never take the fused step under these settings."""
    return next((reason for stands, reason in _always(optimizer, p, settings) if stands), None)


def why_not_now(scope: Scope, unit: Unit) -> str | None:
    """Why parameters that share their b do not take the fused step; None if they do."""
    return next((reason for stands, reason in _in_this_step(scope, unit) if stands), None)


def _always(optimizer: Any, p: Tensor, settings: Settings) -> _Obstacles:
    """What depends on the parameter and its settings alone."""
    name = type(optimizer).__name__
    yield settings.fused is False, "`fused` is False"
    yield momentum_setting(optimizer) is None, f"no kernel knows the direction of `{name}`"
    yield settings.differentiable, "`differentiable` is True"
    yield _is_fake(p), "it is fake, without memory"
    native = runs_native(p, settings)
    rounds = settings.stochastic_rounding and p.dtype == torch.bfloat16
    yield native and rounds, "`stochastic_rounding` is True, on a CPU"
    yield native and p.dtype not in cpu.DTYPES, f"its type is {p.dtype}"
    yield p.device.type not in ("cuda", "cpu"), f"it is on {p.device.type}"
    missing = cpu.why_not() if native else why_no_triton()
    yield missing is not None, str(missing)
    yield p.dtype not in DTYPES, f"its type is {p.dtype}"


def _in_this_step(scope: Scope, unit: Unit) -> _Obstacles:
    """What depends on all that share a b, their gradients and their state."""
    for step in unit:
        yield from _always(scope.optimizer, step.param, step.settings)
    direction, device, absent = unit[0].direction, unit[0].p.device, unit[0].absent
    kinds = {(step.p.device, step.p.dtype) for step in unit}
    yield len(kinds) > 1, "others that share its b differ in device or type"
    sizes = {b.numel() for b in (*(step.b for step in unit), *absent)}
    yield len(sizes) > 1, "others that share its b differ in the number of blocks"  # refused, later
    directions = {step.direction for step in unit}
    yield len(directions) > 1, "others that share its b differ in direction"
    kind = type(direction)
    yield kind not in RULES, f"no kernel knows the direction `{kind.__name__}`"
    yield decay(unit[0]) is None, "no kernel knows its decay"
    lr = scope.groups[unit[0].group]["lr"]
    if isinstance(lr, Tensor):
        _, lr_kind = rate(lr) or (0, UNKNOWN_KIND)
        yield lr_kind == UNKNOWN_KIND, f"`lr` is a tensor of type {lr.dtype}"
        yield lr_kind != NUMBER and lr.device != device, f"`lr` is on {lr.device}"
    solid = all(_is_solid(b) and _readable(b, torch.float32, device) for b in absent)
    yield not solid, "the b of another that shares it is of another type or on another device"
    for step in unit:
        yield from _of_one(step)
        if isinstance(direction, Orthogonalized):
            yield from _orthogonalized(step, direction, unit)
        p, g = step.p.stride(), step.g.stride()
        yield not layout(step).fits, f"its strides are {p}, its gradient's {g}"


def _of_one(step: Step) -> _Obstacles:
    g, device, buffers = cast(Tensor, step.param.grad), step.p.device, list(step.buffers.values())
    numbers = [t for t in (step.b, step.t, step.norm) if t is not None]
    counts = [] if step.skipped is None else [step.skipped]
    state = [*numbers, *counts, *buffers]
    yield bool(step.ranks), "its blocks are cut between ranks"
    yield g.layout != torch.strided, "its gradient is sparse"
    yield step.g.dtype != step.p.dtype, f"its gradient is of type {step.g.dtype}"
    solid = all(map(_is_solid, (step.p, step.g, *state)))
    yield not solid, "it is of a class of its own, without memory to write to"
    later = step.p.is_neg() or sharded.local(g).data_ptr() != step.g.data_ptr()
    yield later, "its gradient must be worked out first"
    yield memory.overlap(step.p, step.g), "its gradient lies on its memory"
    agree = step.settings.nonfinite == "raise" and sharded.is_sharded(step.param)
    yield agree, "`nonfinite` is 'raise', on which its ranks must agree"
    readable = all(_readable(t, torch.float32, device) for t in numbers)
    readable = readable and all(_readable(t, torch.int32, device) for t in counts)
    for name, t in step.buffers.items():
        dtype = torch.float32 if name == AVERAGE else step.p.dtype
        readable = readable and t.dtype == dtype and t.device == device
    readable = readable and not any(map(Tensor.is_neg, state))
    yield not readable, "its state is of another type, on another device or not contiguous"


def _orthogonalized(step: Step, direction: Orthogonalized, unit: Unit) -> _Obstacles:
    settings = step.settings
    coupled = settings.weight_decay and not settings.decoupled_weight_decay
    yield sharded.is_sharded(step.param), "it is orthogonalized, and sharded"
    yield not alone(unit), "it is orthogonalized, and shares its b"
    yield settings.nonfinite == "raise", "it is orthogonalized, and `nonfinite` is 'raise'"
    yield bool(coupled), "it is orthogonalized, and weight decay is in its gradient"
    # Rows without a b would have to keep their momentum.
    yield settings.c is not None, "it is orthogonalized, and `b_init` is from its gradient"
    yield not matrices.has_views(step, direction.layout), "its matrices are no view of it"


# --------------------------------------------------------------------------- insisting


def any_may(scope: Scope) -> bool:
    """Whether any parameter may take the fused step; if none may there is no more to ask."""
    known = momentum_setting(scope.optimizer) is not None
    for group, settings in zip(scope.groups, scope.settings, strict=True):
        if settings.fused or (settings.fused is None and known and any(map(_may, group["params"]))):
            return True
    return False


def _may(p: Tensor) -> bool:
    native = p.device.type == "cpu" and p.dtype in cpu.DTYPES and cpu.why_not() is None
    return (p.is_cuda or native) and not _is_fake(p)


def insist(owner: str, p: Tensor, settings: Settings, reason: str | None) -> None:
    """Refuse `fused=True` for a parameter that cannot take the fused step.

    Even so float64 and float16 take the plain step on a CPU, in silence: torch's fused steps take
    them there, and a trainer whose default `fused=True` is trains such parameters, too.
    """
    quiet = p.device.type == "cpu" and p.dtype in (torch.float64, torch.float16)
    if settings.fused and reason is not None and not quiet:
        raise ValueError(
            f"{owner}: `fused` is True, but a parameter of shape {tuple(p.shape)} cannot take the "
            f"fused step: {reason}."
        )


# ------------------------------------------------------------------------- memory, Triton


def overlapping(units: list[Unit]) -> set[int]:
    """The parameters (by id) that lie on memory of others: kernels would race for it."""
    spans = sorted(
        (step.p.data_ptr(), step.p.data_ptr() + memory.extent(step.p), id(step.param))
        for unit in units
        for step in unit
        if step.p.numel()
    )
    ids: set[int] = set()
    end, owner = 0, 0
    for start, stop, p in spans:
        if start < end:
            ids |= {owner, p}
        if stop > end:
            end, owner = stop, p
    return ids


def _is_fake(p: Tensor) -> bool:
    """Whether it only says what shape it has, to tools that count memory."""
    return hasattr(p, "fake_mode")


def _is_solid(t: Tensor) -> bool:
    """Whether it is nothing but memory: no wrapper of other tensors, and none of torch.func's."""
    if type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    try:
        return bool(t.data_ptr()) or not t.numel()
    except RuntimeError:
        return False


def _readable(t: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    return t.dtype == dtype and t.device == device and t.is_contiguous()


@cache
def why_no_triton() -> str | None:
    """Why no kernel of Triton's can be used; None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    # Triton 3.4 is the oldest that the kernels are run with; torch 2.8 brings it.
    return None if hasattr(triton, "knobs") else f"Triton {triton.__version__} is older than 3.4"
