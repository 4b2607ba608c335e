"""The fused step: who takes it, the plan of a step, and its launches.

Nothing here is state. A `Plan` is made from the parameters, their state and the settings, and made
anew whenever one of them is another; a step like the last one only brings the addresses of the
gradients and λ up to date.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from wngrad.optim import sharded
from wngrad.optim.layout import layout
from wngrad.optim.pieces import Family, Piece
from wngrad.optim.state import SMALL, Group
from wngrad.optim.tables import (
    DTYPES,
    ELEMENTS,
    LONGEST,
    TILES,
    Batch,
    Method,
    Settler,
    Table,
    bits,
)

if TYPE_CHECKING:
    from wngrad.optim.base import BlockOptimizer

_PLANS = 16  # kept at most, for models that train other parameters in every step

# ---------------------------------------------------------------------- who takes it


@cache
def _triton() -> bool:
    return find_spec("triton") is not None


def _interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, one element after another, as the tests do."""
    triton = sys.modules.get("triton")  # not imported for this: it takes a while
    return triton is not None and bool(triton.knobs.runtime.interpret)


def possible(opt: BlockOptimizer) -> bool:
    """Whether any parameter may take the fused step; on a CPU there is no more to look at."""
    return any(
        group["fused"] or any(p.is_cuda for p in group["params"]) for group in opt.param_groups
    )


def why_not_at_all(p: Tensor, group: Group) -> str | None:
    """Why a parameter can never take the fused step."""
    if group["differentiable"]:
        return "`differentiable` is True"
    if not _triton():
        return "Triton is not installed"
    if p.device.type != "cuda" and not (group["fused"] and _interpreted()):
        return f"it is on {p.device.type}, not on CUDA"
    return None if p.dtype in DTYPES else f"its type is {p.dtype}"


def why_not(family: Family, buffer: str) -> str | None:
    """Why parameters that share their b do not take the fused step; None if they do."""
    if (reason := why_plain(family.pieces[0].param, family.group, None)) is not None:
        return reason
    if len({(part.p.device, part.p.dtype) for part in family.pieces}) > 1:
        return "its relatives differ in device or type"
    lam = family.lam
    if isinstance(lam, Tensor) and lam.device.type != "cpu" and _rate(lam)[1] == 0:
        return f"`lr` is a tensor of type {lam.dtype}"
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
    if sharded.local(g).data_ptr() != part.g.data_ptr():
        return "its gradient is partial"
    if not all(part.state[k].is_contiguous() for k in SMALL if k in part.state):
        return "its state is not contiguous"
    if any(v.device != part.p.device for v in part.state.values()):
        return "its state is on another device"
    if layout(part, part.state.get(buffer)) is None:
        return f"its strides are {part.p.stride()}, its gradient's {part.g.stride()}"
    return None


# ------------------------------------------------------------------------ what changes

# Settings a plan depends on. λ, μ or β, the decay and C are numbers in a table.
_CHOICES = (
    "decoupled_weight_decay",
    "hold_1d",
    "joint",
    "nonfinite",
    "maximize",
    "differentiable",
    "fused",
    "stochastic_rounding",
)
_PLAIN = (nn.Parameter, Tensor)


class Look(NamedTuple):
    """A step at a glance: what its plan depends on, and what may differ within one plan."""

    key: tuple[Any, ...]
    grads: list[int]
    settings: list[int]


def look(opt: BlockOptimizer) -> Look | None:
    """The step that is due, or None if something has to be made or put right first.

    This is all a step costs the host besides its launches, so it is written for speed.
    """
    key: list[Any] = []
    grads: list[int] = []
    settings: list[int] = []
    for group in opt.param_groups:
        lr, per, start = group["lr"], group["per"], group["b_init"]
        if type(start) is str or (isinstance(lr, Tensor) and lr.numel() != 1):
            return None
        key += [group[name] for name in _CHOICES]
        key += (per if type(per) is str else tuple(per), type(start), group["weight_decay"] != 0)
        key.append(None if isinstance(lr, Tensor) else lr == 0)
        settings += _settings(opt, group)
        for p in group["params"]:
            g, mine = p.grad, opt.state.get(p)
            if g is None:
                key.append(None if not mine else mine["b"].data_ptr())
                continue
            if not mine:
                return None
            if g.layout is not torch.strided:
                key.append("sparse")
                grads.append(0)
                continue
            if type(p) not in _PLAIN:
                key.append((type(p), tuple(getattr(g, "placements", ()))))
                p, g = sharded.local(p), sharded.local(g)
                mine = {name: sharded.local(v) for name, v in mine.items()}
            address = g.data_ptr()
            grads.append(address)
            key += (p.data_ptr(), p.numel(), p.stride(), g.stride(), address % 16, g.dtype)
            key += [v.data_ptr() for v in mine.values()]
    return Look(tuple(key), grads, settings)


def _settings(opt: BlockOptimizer, group: Group) -> list[int]:
    """A group's numbers, as the kernel reads them."""
    lr, mu, start = group["lr"], group[opt._fraction], group["b_init"]
    lam, kind = (bits(lr), 0) if type(lr) is float else _rate(lr)
    start = start[1] if isinstance(start, tuple) else start
    log_mu = math.log2(mu) if mu > 0 else -math.inf
    sign = -1.0 if group["maximize"] else 1.0
    return [lam, kind, *map(bits, (mu, log_mu, group["weight_decay"], start, sign))]


def _rate(lr: float | Tensor) -> tuple[int, int]:
    """λ as a number, or where it lies as a float32 or float64."""
    if not isinstance(lr, Tensor) or (lr.device.type == "cpu" and not _interpreted()):
        return bits(float(lr)), 0
    kinds = {torch.float32: 1, torch.float64: 2}
    return (lr.data_ptr(), kinds[lr.dtype]) if lr.dtype in kinds else (0, 0)


# ------------------------------------------------------------------------------ plans


class Refused(NamedTuple):
    """A parameter with blocks that are not finite."""

    param: Tensor
    blocks: int


class Plan:
    """All launches of a step."""

    def __init__(self, opt: BlockOptimizer, families: list[Family], glance: Look) -> None:
        number = {id(group): i for i, group in enumerate(opt.param_groups)}
        order = {p: i for i, p in enumerate(_live(opt))}
        batches: dict[Method, list[tuple[Family, int]]] = {}
        self.left: dict[Tensor, str] = {}  # who takes the plain path, and why
        for family in families:
            if (reason := why_not(family, opt._buffer)) is not None:
                self.left |= {part.param: reason for part in family.pieces}
            else:
                method = _method(opt, family)
                batches.setdefault(method, []).append((family, number[id(family.group)]))
        self.batches = [
            Batch(method, some, opt._buffer, [order[q.param] for f, _ in some for q in f.pieces])
            for method, some in batches.items()
        ]
        devices = {batch.method.device for batch in self.batches}
        self.settings = {device: Table(glance.settings, device) for device in devices}
        self.grads = [Table(_at(batch, glance), batch.method.device) for batch in self.batches]

    def run(self, glance: Look, scale: Tensor | None, found: Tensor | None) -> Refused | None:
        """Take the step; or change nothing and say which parameter must not be stepped."""
        for table in self.settings.values():
            table.update(glance.settings)
        launches = []
        for batch, grads in zip(self.batches, self.grads, strict=True):
            grads.update(_at(batch, glance))
            launches.append(_Launch(batch, grads, self.settings[batch.method.device], scale, found))
        for launch in launches:
            if launch.batch.method.looks and (bad := launch.bad()) is not None:
                return bad
        for launch in launches:
            launch.step()
        return None


class _Launch:
    """The kernels of a batch."""

    def __init__(
        self,
        batch: Batch,
        grads: Table,
        settings: Table,
        scale: Tensor | None,
        found: Tensor | None,
    ) -> None:
        from wngrad.optim import kernel

        self.batch, self.kernel, self.method = batch, kernel, batch.method
        device, nothing = batch.method.device, batch.coefs
        self.settings = settings.tensor
        self.scale = nothing if scale is None else scale.to(device, non_blocking=True)
        self.found = nothing if found is None else found.to(device, non_blocking=True)
        self.flags = {"SCALE": scale is not None, "FOUND": found is not None}
        self.grads = grads.tensor

    def step(self) -> None:
        k, method = self.kernel, self.method
        if not method.whole:
            if not method.looks:
                self._tiles(k.SUMS)
            self._settle(look=False)
            self._tiles(k.MOVES)
            return
        if method.rounds and method.rule != k.ADAM.value:
            with _on(method.device):
                k.count_steps[(len(self.batch.index),)](
                    self.batch.records.tensor, self.settings, self.found, FOUND=self.flags["FOUND"]
                )
        self._tiles(k.ALL)

    def bad(self) -> Refused | None:
        """A parameter with rows that are not finite. Waits for the device."""
        self._tiles(self.kernel.SUMS)
        self._settle(look=True)
        for settler in self.batch.settlers:
            for i, count in enumerate(settler.bad.tolist()):
                if count:
                    return Refused(settler.owner[i].pieces[0].param, count)
        return None

    def _tiles(self, mode: Any) -> None:
        import triton.language

        batch, method = self.batch, self.method
        with _on(method.device):
            self.kernel.step_tiles[(batch.tiles.numel(),)](
                batch.tiles,
                batch.records.tensor,
                self.grads,
                self.settings,
                batch.layouts.tensor,
                batch.sums,
                batch.coefs,
                self.scale,
                self.found,
                DTYPE=getattr(triton.language, DTYPES[method.dtype]),
                METHOD=method.rule,
                DECAY=method.decay,
                MODE=mode.value,
                SKIP=method.skip,
                LATCH=method.latch,
                ROUND=method.rounds,
                TILE=method.tile,
                KINDS=batch.kinds,
                num_warps=method.tile // ELEMENTS[method.dtype],
                **self.flags,
            )

    def _settle(self, look: bool) -> None:
        for settler in self.batch.settlers:
            with _on(self.method.device):
                self._settle_some(settler, look)

    def _settle_some(self, settler: Settler, look: bool) -> None:
        method = self.method
        self.kernel.settle_rows[(settler.tiles.numel(),)](
            settler.tiles,
            settler.records.tensor,
            settler.runs.tensor,
            settler.members.tensor,
            self.settings,
            self.batch.sums,
            self.batch.coefs,
            self.found,
            settler.bad,
            METHOD=method.rule,
            SKIP=method.skip,
            LATCH=method.latch,
            FOUND=self.flags["FOUND"],
            LOOK=look,
            R=settler.rows,
            WIDTH=settler.span,
        )


def _method(opt: BlockOptimizer, family: Family) -> Method:
    from wngrad.optim import kernel as k

    group, part = family.group, family.pieces[0]
    rule = k.ADAM if opt._counts_blocks else k.MOMENTUM if opt._buffer in part.state else k.PLAIN
    decay = k.DECOUPLED if group["decoupled_weight_decay"] else k.COUPLED
    looks = group["nonfinite"] == "raise"
    longest = max(_length(part) for part in family.pieces)
    alone = len(family.pieces) + len(family.absent) == 1
    whole = alone and not looks and longest <= LONGEST
    return Method(
        part.p.device,
        part.p.dtype,
        rule.value,
        decay.value if group["weight_decay"] else k.NONE.value,
        group["nonfinite"] == "skip",
        isinstance(group["b_init"], tuple),
        group["stochastic_rounding"] and part.p.dtype == torch.bfloat16,
        TILES[part.p.dtype][whole and longest > TILES[part.p.dtype][0]],
        whole,
        looks,
    )


def _length(part: Piece) -> int:
    return part.p.numel() // max(1, part.state["b"].numel())


def _at(batch: Batch, glance: Look) -> list[int]:
    return [glance.grads[i] for i in batch.index]


def _live(opt: BlockOptimizer) -> Iterator[Tensor]:
    return (p for group in opt.param_groups for p in group["params"] if p.grad is not None)


@contextmanager
def _on(device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        yield


# ---------------------------------------------------------------------------- the engine


class Engine:
    """The plans of an optimizer's steps."""

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self.latest: Plan | None = None
        self._captured: list[Plan] = []  # graphs read their tables for as long as they live

    def earlier(self, glance: Look | None) -> Plan | None:
        """The plan of an earlier step like this one, unless a graph is being captured."""
        if glance is None or _capturing():
            return None
        self.latest = self._plans.get(glance.key)
        return self.latest

    def plan(self, opt: BlockOptimizer, families: list[Family], glance: Look) -> Plan:
        """A new plan. For a graph it is filled outside of it, so that replays only read."""
        if _capturing():
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            with torch.cuda.stream(side):
                plan = Plan(opt, families, glance)
            side.synchronize()
            self._captured.append(plan)
        else:
            if len(self._plans) >= _PLANS:
                self._plans.clear()
            self._plans[glance.key] = plan = Plan(opt, families, glance)
        self.latest = plan
        return plan


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
