"""The fused steps of an optimizer, cached by what they depend on.

Nothing here is state. Launches are made from the parameters, their state and the settings, and made
anew whenever one of them is another; a step like an earlier one only brings the addresses of the
gradients and the groups' numbers up to date. Parameters are known by id and address, and not held:
not even weakly, since torch swaps a tensor for another only if nothing refers to it weakly.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from wngrad.optim import checks
from wngrad.optim.collect import Unit
from wngrad.optim.fused import cpu, cuda, eligibility, matrices
from wngrad.optim.fused.eligibility import Stepper
from wngrad.optim.fused.matrices import Stage
from wngrad.optim.fused.method import Method, method
from wngrad.optim.fused.snapshot import Snapshot, Snapshots
from wngrad.optim.fused.tiling import SMALL, Tiling, tiling
from wngrad.optim.settings import Memo, Settings

Launch: TypeAlias = cpu.Launch | cuda.Launch
_MOST = 16  # launches kept at most, for models that train other parameters in every step


class Launches:
    """All launches of a step.

    `reasons` says of every parameter (by id) that takes the plain step why it does.
    """

    def __init__(
        self, params: list[Tensor], units: list[Unit], reasons: dict[int, str], now: Snapshot
    ) -> None:
        self.reasons = reasons
        moved = {id(view.param) for unit in units for view in unit}
        # A backward that needs what was there before the step must say so, not go wrong in silence.
        self._moved = [i for i, p in enumerate(params) if id(p) in moved and not p.is_inference()]
        self._whole = len(self._moved) == len(params)
        small = sum(view.p.numel() for unit in units for view in unit) <= SMALL
        make = partial(_launches, params, now.words, small)
        stages = matrices.stages(units, params, now.words)
        staged = {id(unit) for stage in stages for unit in stage.units}
        self._rounds: list[tuple[Stage | None, list[Launch]]] = [
            (stage, make(list(map(matrices.proposed, stage.units, stage.u)))) for stage in stages
        ]
        self._rounds.append((None, make([unit for unit in units if id(unit) not in staged])))
        self._launches = [launch for _, launches in self._rounds for launch in launches]
        self._checked = [each for each in self._launches if each.method.checks_first]

    def run(self, optimizer: Any, params: list[Tensor], words: list[int]) -> None:
        """Take the step; or change nothing, and raise."""
        scale = getattr(optimizer, "grad_scale", None)
        found_inf = getattr(optimizer, "found_inf", None)
        for launch in self._launches:
            launch.prepare(words, scale, found_inf)
        for launch in self._checked:
            if (bad := launch.bad()) is not None:
                p = next(p for p in params if id(p) == bad.param)
                checks.refuse_nonfinite(type(optimizer).__name__, p, bad.blocks)
        for stage, launches in self._rounds:
            if stage is not None:
                stage.run(optimizer, params, words, scale, found_inf)
            for launch in launches:
                launch.step()
        moved = params if self._whole else [params[i] for i in self._moved]
        torch.autograd.graph.increment_version(moved)


def _launches(
    params: list[Tensor], words: list[int], small: bool, units: list[Unit]
) -> list[Launch]:
    """The launches of units that step together, one for each method and tiling."""
    stepping = {id(p): i for i, p in enumerate(p for p in params if p.grad is not None)}
    head = len(words) - len(stepping)
    batches: dict[tuple[Method, Tiling | None], list[Unit]] = {}
    for unit in units:
        how = method(unit)
        cut = None if how.native else tiling(unit, small)
        batches.setdefault((how, cut), []).append(unit)
    made: list[Launch] = []
    for (how, cut), part in batches.items():
        views = [view for unit in part for view in unit]
        index, given = list(range(head)), []
        if how.proposed is None:
            index += [head + stepping[id(view.param)] for view in views]
        else:  # not the gradients, but what stands in their place
            given = [view.g.data_ptr() for view in views]
        if cut is None:
            made.append(cpu.Launch(how, part, index, given, head))
        else:
            made.append(cuda.Launch(how, cut, part, words, index, given, head))
    return made


class Engine:
    """Takes an optimizer's steps: by kernels where they can, and plainly where not."""

    def __init__(self) -> None:
        self._snapshots = Snapshots()
        self.memo: Memo = {}  # of settings that were checked
        self.steps = 0  # that were asked for
        self._launches: dict[Any, tuple[Launches, set[int]]] = {}  # with the ids of all parameters
        self._latest: tuple[Snapshot, Launches] | None = None  # if it may be taken again
        self.reasons: dict[int, str] = {}  # of the latest step, by the parameters' ids
        self._captured: list[Launches] = []  # graphs read their tables for as long as they live

    def forget(self) -> None:
        """There is other state now, which may lie where the old one lay."""
        self._launches.clear()
        self._latest, self.reasons = None, {}

    def of_part(self) -> Engine:
        """An engine for some of the parameters; graphs that it captures live as long as this."""
        part = Engine()
        part._captured = self._captured
        return part

    def repeat(self, optimizer: Stepper, settings: list[Settings]) -> bool:
        """Take the step if an earlier one was like it, all of it by kernels."""
        if self._latest is None or eligibility.in_dispatch_mode() or _capturing():
            return False
        params = _params(optimizer)
        now = self._snapshot(optimizer, settings, params)
        launches = self._earlier(now)
        if now is None or launches is None or launches.reasons:
            return False
        launches.run(optimizer, params, now.words)
        return True

    def take(
        self, optimizer: Stepper, settings: list[Settings], units: list[Unit]
    ) -> tuple[list[Unit], Callable[[], None]]:
        """The units that are left for the plain step, and what launches the kernels of the others.

        That may refuse the step, too, before it changes anything.
        """
        owner = type(optimizer).__name__
        if not eligibility.is_possible(optimizer, settings):
            self._latest = None
            return units, _nothing
        params = _params(optimizer)
        now = self._snapshot(optimizer, settings, params)
        if now is None:  # no kernel knows the direction, though one is insisted on
            steps = [unit[0] for unit in units]
            never = {
                id(s.param): eligibility.why_never(optimizer, s.param, s.settings) for s in steps
            }
            _insist(owner, units, never)
            return units, _nothing
        launches = None if _capturing() else self._earlier(now)
        if launches is None:
            launches = self._make(optimizer, params, units, now)
        _insist(owner, units, launches.reasons)
        left = [unit for unit in units if id(unit[0].param) in launches.reasons]
        return left, partial(launches.run, optimizer, params, now.words)

    def _snapshot(
        self, optimizer: Stepper, settings: list[Settings], params: list[Tensor]
    ) -> Snapshot | None:
        momentum = eligibility.momentum_setting(optimizer)
        if momentum is None:
            return None
        groups = optimizer.param_groups
        return self._snapshots.take(params, optimizer.state, groups, settings, momentum)

    def _earlier(self, now: Snapshot | None) -> Launches | None:
        """The launches of an earlier step like this one."""
        if now is None:
            return None
        if self._latest is not None and now.like(self._latest[0]):
            return self._latest[1]
        entry = self._launches.get(now.key)
        if entry is None:
            return None
        self._latest, self.reasons = (now, entry[0]), entry[0].reasons
        return entry[0]

    def _make(
        self,
        optimizer: Stepper,
        params: list[Tensor],
        units: list[Unit],
        now: Snapshot,
    ) -> Launches:
        """New launches. For a graph they are filled outside of it, so that replays only read."""
        captured = _capturing()
        with _outside_the_graph() if captured else nullcontext():
            fused, reasons = _sorted_out(optimizer, units)
            launches = Launches(params, fused, reasons, now)
        self.reasons = launches.reasons
        if captured:
            self._captured.append(launches)
            self._latest = None  # No other step may change its tables.
            return launches
        ids = set(map(id, params))  # launches for others will not come again, and keep memory
        kept = {key: entry for key, entry in self._launches.items() if entry[1] <= ids}
        self._launches = {} if len(kept) >= _MOST else kept
        self._launches[now.key] = launches, ids
        self._latest = now, launches
        return launches


def _params(optimizer: Stepper) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _nothing() -> None:
    """No kernel is launched."""


def _sorted_out(optimizer: Stepper, units: list[Unit]) -> tuple[list[Unit], dict[int, str]]:
    """The units that kernels step, and why the others' parameters are not among them."""
    overlaps = eligibility.overlapping(units)
    fused: list[Unit] = []
    reasons: dict[int, str] = {}
    for unit in units:
        lr = optimizer.param_groups[unit[0].group]["lr"]
        reason = eligibility.why_not_now(optimizer, unit, lr)
        if reason is None and any(id(view.param) in overlaps for view in unit):
            reason = "it lies on the memory of another"
        if reason is None:
            fused.append(unit)
        else:
            reasons |= {id(view.param): reason for view in unit}
    return fused, reasons


def _insist(owner: str, units: list[Unit], reasons: Any) -> None:
    """Refuse the step if `fused=True` was asked of a parameter that cannot take it."""
    for unit in units:
        p = unit[0].param
        if unit[0].settings.fused and reasons.get(id(p)) and not eligibility.is_quietly_plain(p):
            eligibility.refuse(owner, p, reasons[id(p)])


# ---------------------------------------------------------------------------- CUDA graphs


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
