"""The fused step: who takes it, and the plans of an optimizer's steps.

Nothing here is state. A plan is made from the parameters, their state and the settings, and made
anew whenever one of them is another; a step like an earlier one only brings the addresses of the
gradients and the groups' numbers up to date.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from wngrad.optim import launch, native, sharded
from wngrad.optim.glance import Glance, rate
from wngrad.optim.launch import Plan
from wngrad.optim.layout import layout
from wngrad.optim.pieces import Family, Piece
from wngrad.optim.state import SMALL, Group
from wngrad.optim.tables import DTYPES

if TYPE_CHECKING:
    from wngrad.optim.base import BlockOptimizer

_PLANS = 16  # kept at most, for models that train other parameters in every step

# ---------------------------------------------------------------------- who takes it


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


def watched() -> bool:
    """Whether a mode is to see or to change every operation, as only torch's own show."""
    return bool(torch._C._len_torch_dispatch_stack())


def possible(opt: BlockOptimizer) -> bool:
    """Whether any parameter may take the fused step; if none may there is no more to look at."""
    return not watched() and any(
        group["fused"] or any(map(_may, group["params"])) for group in opt.param_groups
    )


def _may(p: Tensor) -> bool:
    here = p.device.type == "cpu" and p.dtype in native.DTYPES and native.why_not() is None
    return (p.is_cuda or here) and not _fake(p)


def _fake(p: Tensor) -> bool:
    """Whether it only says what shape it has, to tools that count memory."""
    return hasattr(p, "fake_mode")


def why_not_at_all(p: Tensor, group: Group) -> str | None:
    """Why a parameter can never take the fused step."""
    if group["differentiable"]:
        return "`differentiable` is True"
    if _fake(p):
        return "it is fake, without memory"
    if launch.natively(p, group):
        if group["stochastic_rounding"] and p.dtype == torch.bfloat16:
            return "`stochastic_rounding` is True, on a CPU"
        return native.why_not() if p.dtype in native.DTYPES else f"its type is {p.dtype}"
    if p.device.type not in ("cuda", "cpu"):
        return f"it is on {p.device.type}"
    if not _triton():
        return "Triton is not installed"
    return None if p.dtype in DTYPES else f"its type is {p.dtype}"


def why_not(family: Family, buffer: str) -> str | None:
    """Why parameters that share their b do not take the fused step; None if they do."""
    if (reason := why_plain(family.pieces[0].param, family.group, None)) is not None:
        return reason
    if len({(part.p.device, part.p.dtype) for part in family.pieces}) > 1:
        return "its relatives differ in device or type"
    if len({b.numel() for b in (*(part.state["b"] for part in family.pieces), *family.absent)}) > 1:
        return "its relatives differ in the number of their blocks"  # the plain path refuses that
    if len({buffer in part.state for part in family.pieces}) > 1:
        return "only some of its relatives have a buffer"
    lr, device = family.group["lr"], family.pieces[0].p.device
    if (found := rate(lr)) is None or found[1] < 0:
        return f"`lr` is a tensor of type {lr.dtype}"
    if found[1] and lr.device != device:
        return f"`lr` is on {lr.device}"
    if not all(_solid(b) and _readable(b, torch.float32, device) for b in family.absent):
        return "a relative's b is of another type or on another device"
    reasons = (_why_not(part, family.group, buffer) for part in family.pieces)
    return next((reason for reason in reasons if reason), None)


def why_plain(p: Tensor, group: Group, plan: Plan | None) -> str | None:
    """Why a parameter does not take the fused step, as far as can be said now."""
    if group["fused"] is False:
        return "`fused` is False"
    return (plan.left.get(p) if plan else None) or why_not_at_all(p, group)


def _why_not(part: Piece, group: Group, buffer: str) -> str | None:
    if (reason := why_not_at_all(part.param, group)) is not None:
        return reason
    if part.cuts:
        return "its blocks are cut between ranks"
    g = cast(Tensor, part.param.grad)
    if g.layout != torch.strided:
        return "its gradient is sparse"
    if part.g.dtype != part.p.dtype:
        return f"its gradient is of type {part.g.dtype}"
    if not all(map(_solid, (part.p, part.g, *part.state.values()))):
        return "it is of a class of its own, without memory to write to"
    if sharded.local(g).data_ptr() != part.g.data_ptr():
        return "its gradient must be worked out first"
    if group["nonfinite"] == "raise" and sharded.is_sharded(part.param):
        return "`nonfinite` is 'raise', on which its ranks must agree"
    types = {"b": torch.float32, "t": torch.float32, "skipped": torch.int32, buffer: part.p.dtype}
    if not all(_readable(v, types[k], part.p.device, k in SMALL) for k, v in part.state.items()):
        return "its state is of another type, on another device or not contiguous"
    if layout(part, part.state.get(buffer)) is None:
        return f"its strides are {part.p.stride()}, its gradient's {part.g.stride()}"
    return None


def _solid(t: Tensor) -> bool:
    """Whether it is nothing but memory: no wrapper of other tensors, and none of torch.func's."""
    if type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__:
        return False
    try:
        return bool(t.data_ptr()) or not t.numel()
    except RuntimeError:
        return False


def _readable(t: Tensor, dtype: torch.dtype, device: torch.device, dense: bool = True) -> bool:
    return t.dtype == dtype and t.device == device and (t.is_contiguous() or not dense)


# ---------------------------------------------------------------------------- the engine


class Engine:
    """The plans of an optimizer's steps."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self.latest: Plan | None = None
        self.before: Glance | None = None  # the latest step, if its plan may be used again
        self._captured: list[Plan] = []  # graphs read their tables for as long as they live

    def earlier(self, now: Glance | None) -> Plan | None:
        """The plan of an earlier step like this one, unless a graph is being captured."""
        if now is None or _capturing():
            return None
        if self.before is not None and now.like(self.before):
            found = self.latest
        else:
            found = self._plans.get(now.frozen())
        if found is not None:
            self.latest, self.before = found, now
        return found

    def forget(self) -> None:
        """There is other state now, which may lie where the old one lay."""
        self._plans.clear()
        self.latest = self.before = None

    def plan(self, opt: BlockOptimizer, families: list[Family], now: Glance) -> Plan:
        """A new plan. For a graph it is filled outside of it, so that replays only read."""
        if _capturing():
            with _outside_the_graph():
                plan = _plan(opt, families, now)
            self._captured.append(plan)
            self.latest, self.before = plan, None  # No other step may change its tables.
        else:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[now.frozen()] = plan = _plan(opt, families, now)
            self.latest, self.before = plan, now
        return plan


def _plan(opt: BlockOptimizer, families: list[Family], now: Glance) -> Plan:
    reasons = [why_not(family, opt._buffer) for family in families]
    both = list(zip(families, reasons, strict=True))
    left = {part.param: why for family, why in both if why for part in family.pieces}
    return Plan(opt, [family for family, why in both if not why], left, now)


def _side() -> torch.cuda.Stream:  # pragma: no cover, needs a GPU
    """A stream that captures nothing. torch hands out the same 32 again and again."""
    while True:
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(side):
            if not torch.cuda.is_current_stream_capturing():
                return side


@contextmanager
def _outside_the_graph() -> Iterator[None]:  # pragma: no cover, needs a GPU
    """Work at once, though a graph is being captured: what is written is there for all replays."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # Not NVIDIA's. Then every replay writes its tables first.
        yield
        return
    # Waiting for a stream is forbidden in the mode graphs are captured in.
    relaxed = ctypes.c_int(2)
    driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
    try:
        side = _side()
        with torch.cuda.stream(side):
            yield
        side.synchronize()
    finally:
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]
