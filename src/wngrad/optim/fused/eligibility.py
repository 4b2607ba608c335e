"""Who takes the fused step, and why a parameter does not."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NoReturn, Protocol, cast

import torch
from torch import Tensor

from wngrad.optim import memory, sharded
from wngrad.optim.collect import Step, Unit, alone
from wngrad.optim.directions import Direction, Orthogonalized
from wngrad.optim.fused import cpu, matrices
from wngrad.optim.fused.layout import fits
from wngrad.optim.fused.method import decay, runs_native
from wngrad.optim.fused.records import DTYPES, RULES
from wngrad.optim.fused.snapshot import UNKNOWN_KIND, rate
from wngrad.optim.settings import Settings
from wngrad.optim.state import AVERAGE


class Stepper(Protocol):
    """What the fused step reads of an optimizer."""

    param_groups: list[dict[str, Any]]
    state: Any

    def direction(self, group: dict[str, Any], p: Tensor) -> Direction: ...


def momentum_setting(optimizer: Stepper) -> str | None:
    """The setting that holds the directions' μ or β; None if no kernel knows any of them."""
    return getattr(type(optimizer).direction, "momentum_setting", None)


@cache
def why_no_triton() -> str | None:
    """Why no kernel of Triton's can be used; None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    import triton

    # Triton 3.4 is the oldest that the kernels are run with; torch 2.8 brings it.
    return None if hasattr(triton, "knobs") else f"Triton {triton.__version__} is older than 3.4"


def in_dispatch_mode() -> bool:
    """True under a TorchDispatchMode, which must see every op; our kernels are invisible to it."""
    depth = getattr(torch._C, "_len_torch_dispatch_stack", None)
    return True if depth is None else bool(depth())


def is_possible(optimizer: Stepper, settings: list[Settings]) -> bool:
    """Whether any parameter may take the fused step; if none may there is no more to ask."""
    known = momentum_setting(optimizer) is not None
    for group, checked in zip(optimizer.param_groups, settings, strict=True):
        if checked.fused or (checked.fused is None and known and any(map(_may, group["params"]))):
            return not in_dispatch_mode()
    return False


def _may(p: Tensor) -> bool:
    native = p.device.type == "cpu" and p.dtype in cpu.DTYPES and cpu.why_not() is None
    return (p.is_cuda or native) and not _is_fake(p)


def _is_fake(p: Tensor) -> bool:
    """Whether it only says what shape it has, to tools that count memory."""
    return hasattr(p, "fake_mode")


def why_never(optimizer: Stepper, p: Tensor, settings: Settings) -> str | None:
    """Why a parameter can never take the fused step under these settings."""
    if settings.fused is False:
        return "`fused` is False"
    if momentum_setting(optimizer) is None:
        return f"no kernel knows the direction of `{type(optimizer).__name__}`"
    if settings.differentiable:
        return "`differentiable` is True"
    if _is_fake(p):
        return "it is fake, without memory"
    if runs_native(p, settings):
        if settings.stochastic_rounding and p.dtype == torch.bfloat16:
            return "`stochastic_rounding` is True, on a CPU"
        return cpu.why_not() if p.dtype in cpu.DTYPES else f"its type is {p.dtype}"
    if p.device.type not in ("cuda", "cpu"):
        return f"it is on {p.device.type}"
    if (reason := why_no_triton()) is not None:
        return reason
    return None if p.dtype in DTYPES else f"its type is {p.dtype}"


def is_quietly_plain(p: Tensor) -> bool:
    """Whether even `fused=True` means the plain step: torch's fused steps take it on a CPU.

    So a trainer whose default that is trains float64 and float16 parameters, too.
    """
    return p.device.type == "cpu" and p.dtype in (torch.float64, torch.float16)


def why_not_now(optimizer: Stepper, unit: Unit, lr: Any) -> str | None:
    """Why parameters that share their b do not take the fused step; None if they do."""
    members, absent, device = unit, unit[0].absent, unit[0].p.device
    for view in members:
        if (reason := why_never(optimizer, view.param, view.settings)) is not None:
            return reason
    if len({(view.p.device, view.p.dtype) for view in members}) > 1:
        return "others that share its b differ in device or type"
    if len({b.numel() for b in (*(view.b for view in members), *absent)}) > 1:
        return "others that share its b differ in the number of blocks"  # plainly refused
    if len({view.direction for view in members}) > 1:
        return "others that share its b differ in direction"
    if type(members[0].direction) not in RULES:
        return f"no kernel knows the direction `{type(members[0].direction).__name__}`"
    if decay(members[0]) is None:
        return "no kernel knows its decay"
    word = rate(lr)
    if word is None or word[1] == UNKNOWN_KIND:
        return f"`lr` is a tensor of type {lr.dtype}"
    if word[1] and lr.device != device:
        return f"`lr` is on {lr.device}"
    if not all(_is_solid(b) and _readable(b, torch.float32, device) for b in absent):
        return "the b of another that shares it is of another type or on another device"
    return next((reason for view in members if (reason := _why_not(view, unit))), None)


def _why_not(view: Step, unit: Unit) -> str | None:
    g, buffers = cast(Tensor, view.param.grad), list(view.buffers.values())
    numbers = [t for t in (view.b, view.t, view.norm) if t is not None]
    small = numbers if view.skipped is None else [*numbers, view.skipped]
    if view.ranks:
        return "its blocks are cut between ranks"
    if g.layout != torch.strided:
        return "its gradient is sparse"
    if view.g.dtype != view.p.dtype:
        return f"its gradient is of type {view.g.dtype}"
    if not all(map(_is_solid, (view.p, view.g, *small, *buffers))):
        return "it is of a class of its own, without memory to write to"
    if view.p.is_neg() or sharded.local(g).data_ptr() != view.g.data_ptr():
        return "its gradient must be worked out first"
    if memory.overlap(view.p, view.g):
        return "its gradient lies on its memory"
    if view.settings.nonfinite == "raise" and sharded.is_sharded(view.param):
        return "`nonfinite` is 'raise', on which its ranks must agree"
    device, counts = view.p.device, {torch.int32: view.skipped}
    per_block = all(_readable(t, torch.float32, device) for t in numbers)
    skips = all(t is None or _readable(t, dtype, device) for dtype, t in counts.items())
    large = all(
        t.dtype == (torch.float32 if name == AVERAGE else view.p.dtype) and t.device == device
        for name, t in view.buffers.items()
    )
    if not (per_block and skips and large) or any(t.is_neg() for t in (*small, *buffers)):
        return "its state is of another type, on another device or not contiguous"
    orthogonalized = isinstance(view.direction, Orthogonalized)
    if orthogonalized and (reason := _why_not_orthogonalized(view, unit)) is not None:
        return reason
    if not fits(view):
        return f"its strides are {view.p.stride()}, its gradient's {view.g.stride()}"
    return None


def _why_not_orthogonalized(view: Step, unit: Unit) -> str | None:
    settings = view.settings
    if sharded.is_sharded(view.param):
        return "it is orthogonalized, and sharded"
    if not alone(unit):
        return "it is orthogonalized, and shares its b"
    if settings.nonfinite == "raise":
        return "it is orthogonalized, and `nonfinite` is 'raise'"
    if settings.weight_decay and not settings.decoupled_weight_decay:
        return "it is orthogonalized, and weight decay is in its gradient"
    if settings.c is not None:  # then rows without a b must keep their momentum
        return "it is orthogonalized, and `b_init` is from its gradient"
    return None if matrices.has_views(view) else "its matrices are no view of it"


def overlapping(units: list[Unit]) -> set[int]:
    """The parameters (by id) that lie on memory of others: kernels would race for it."""
    spans = sorted(
        (view.p.data_ptr(), view.p.data_ptr() + memory.extent(view.p), id(view.param))
        for unit in units
        for view in unit
        if view.p.numel()
    )
    ids: set[int] = set()
    end, owner = 0, 0
    for start, stop, p in spans:
        if start < end:
            ids |= {owner, p}
        if stop > end:
            end, owner = stop, p
    return ids


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


def insist(optimizer: Stepper, p: Tensor, settings: Settings) -> None:
    """Refuse `fused=True` for a parameter that can never take the fused step."""
    if (reason := why_never(optimizer, p, settings)) is not None:
        refuse(type(optimizer).__name__, p, reason)


def refuse(owner: str, p: Tensor, reason: str) -> NoReturn:
    """`fused=True` insists on what cannot be had."""
    raise ValueError(
        f"{owner}: `fused` is True, but a parameter of shape {tuple(p.shape)} cannot take the "
        f"fused step: {reason}."
    )
