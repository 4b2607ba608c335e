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
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor

from wngrad.optim import checks
from wngrad.optim.collect import Unit
from wngrad.optim.fused import cpu, eligibility, matrices
from wngrad.optim.fused.launch_key import LaunchKey, launch_key
from wngrad.optim.fused.matrices import Stage
from wngrad.optim.fused.snapshot import Scope, Snapshot, Snapshots
from wngrad.optim.fused.tiling import SMALL, Tiling, tiling

if TYPE_CHECKING:
    from wngrad.optim.fused import cuda

    Launch: TypeAlias = cpu.Launch | cuda.Launch

_MOST = 16  # launches kept at most, for models that train other parameters in every step


class Launches:
    """All launches of a step.

    Args:
        units: what they step.
        reasons: of every parameter (by id) that takes the plain step, why it does.
        now: the step that is due.
    """

    def __init__(
        self, scope: Scope, units: list[Unit], reasons: dict[int, str], now: Snapshot
    ) -> None:
        self.reasons = reasons
        steps, params = [step for unit in units for step in unit], scope.params
        moved = {id(step.param) for step in steps}
        # A backward that needs what was there before the step must say so, not go wrong in silence.
        self._moved = [i for i, p in enumerate(params) if id(p) in moved and not p.is_inference()]
        self._whole = len(self._moved) == len(params)
        small = sum(step.p.numel() for step in steps) <= SMALL
        make = partial(_launches, params, now.words, small)
        staged: set[int] = set()
        self._rounds: list[tuple[Stage | None, list[Launch]]] = []
        for stage in matrices.stages(units, scope, now.words):
            staged |= set(map(id, stage.units))
            self._rounds.append((stage, make(list(map(matrices.proposed, stage.units, stage.u)))))
        self._rounds.append((None, make([unit for unit in units if id(unit) not in staged])))
        self._launches = [launch for _, launches in self._rounds for launch in launches]
        self._checked = [launch for launch in self._launches if launch.key.checks_first]

    def run(self, scope: Scope, words: list[int]) -> None:
        """Take the step; or change nothing, and raise."""
        scale = getattr(scope.optimizer, "grad_scale", None)
        found_inf = getattr(scope.optimizer, "found_inf", None)
        for launch in self._launches:
            launch.prepare(words, scale, found_inf)
        for launch in self._checked:
            if (bad := launch.bad()) is not None:
                p = next(p for p in scope.params if id(p) == bad.param)
                checks.refuse_nonfinite(type(scope.optimizer).__name__, p, bad.blocks)
        for stage, launches in self._rounds:
            if stage is not None:
                stage.run(scope, words, scale, found_inf)
            for launch in launches:
                launch.step()
        moved = scope.params if self._whole else [scope.params[i] for i in self._moved]
        torch.autograd.graph.increment_version(moved)


def _launches(
    params: list[Tensor], words: list[int], small: bool, units: list[Unit]
) -> list[Launch]:
    """The launches of units that step together, one for each key and tiling."""
    stepping = {id(p): i for i, p in enumerate(p for p in params if p.grad is not None)}
    head = len(words) - len(stepping)
    alike: dict[tuple[LaunchKey, Tiling | None], list[Unit]] = {}
    for unit in units:
        key = launch_key(unit)
        alike.setdefault((key, None if key.native else tiling(unit, small)), []).append(unit)
    made: list[Launch] = []
    for (key, tiles), part in alike.items():
        steps = [step for unit in part for step in unit]
        index, given = list(range(head)), []
        if key.proposed is None:
            index += [head + stepping[id(step.param)] for step in steps]
        else:  # not the gradients, but what stands in their place
            given = [step.g.data_ptr() for step in steps]
        if tiles is None:
            made.append(cpu.Launch(key, part, index, given, head))
        else:
            from wngrad.optim.fused import cuda  # Triton's, for those who have it

            made.append(cuda.Launch(key, tiles, part, words, index, given, head))
    return made


class Engine:
    """Takes the steps of an optimizer, or of a part of it, by kernels where they can.

    Args:
        whole: of what it is a part. Graphs that it captures live as long as that.
    """

    def __init__(self, whole: Engine | None = None) -> None:
        self.reasons: dict[int, str] = {}  # of the latest step, by the parameters' ids
        self._snapshots = Snapshots()
        self._launches: dict[Any, tuple[Launches, set[int]]] = {}  # with the ids of all parameters
        self._latest: tuple[Snapshot, Launches] | None = None  # if it may be taken again
        self._is_part, self._parts = whole is not None, WeakSet[Engine]()
        # Graphs read their tables for as long as they live.
        self._captured: list[Launches] = [] if whole is None else whole._captured

    def forget(self) -> None:
        """Drop cached launches: state was replaced, and may reuse old addresses."""
        self._launches.clear()
        self._latest, self.reasons = None, {}
        for part in self._parts:
            part.forget()

    def of_part(self) -> Engine:
        """An engine for some of the parameters, which forgets when this one does."""
        part = Engine(self)
        self._parts.add(part)
        return part

    def repeat(self, scope: Scope) -> bool:
        """Take the step if an earlier one was like it, all of it by kernels."""
        if self._latest is None or _in_dispatch_mode() or _capturing():
            return False
        now = self._snapshot(scope)
        launches = self._earlier(now)
        if now is None or launches is None or launches.reasons:
            return False
        launches.run(scope, now.words)
        return True

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def take(self, scope: Scope, units: list[Unit]) -> tuple[list[Unit], Callable[[], None] | None]:
        """The units that are left for the plain step, and what launches the kernels of the others.

        That may refuse the step, too, before it changes anything.
        """
        if _in_dispatch_mode() or not eligibility.any_may(scope):
            self._latest = None
            return units, None
        now = self._snapshot(scope)
        if now is None:  # no kernel knows the direction, though one may be insisted on
            _insist(scope, units, _sorted_out(scope, units)[1])
            return units, None
        launches = None if _capturing() else self._earlier(now)
        if launches is None:
            launches = self._make(scope, units, now)
        _insist(scope, units, launches.reasons)
        left = [unit for unit in units if id(unit[0].param) in launches.reasons]
        return left, partial(launches.run, scope, now.words)

    def _snapshot(self, scope: Scope) -> Snapshot | None:
        state = scope.optimizer.state
        if self._is_part:
            state = {p: state[p] for p in scope.params if p in state}
        return self._snapshots.take(scope, state)

    def _earlier(self, now: Snapshot | None) -> Launches | None:
        """The launches of an earlier step like this one."""
        if now is None:
            return None
        if self._latest is not None and self._latest[0][:2] == now[:2]:
            return self._latest[1]
        entry = self._launches.get(now[:2])
        if entry is None:
            return None
        self._latest, self.reasons = (now, entry[0]), entry[0].reasons
        return entry[0]

    def _make(self, scope: Scope, units: list[Unit], now: Snapshot) -> Launches:
        """New launches. For a graph they are filled outside of it, so that replays only read."""
        captured = _capturing()
        with _outside_the_graph() if captured else nullcontext():
            launches = Launches(scope, *_sorted_out(scope, units), now)
        self.reasons = launches.reasons
        if captured:
            self._captured.append(launches)
            self._latest = None  # No other step may change its tables.
            return launches
        ids = set(map(id, scope.params))  # launches for others will not come again, and keep memory
        kept = {key: entry for key, entry in self._launches.items() if entry[1] <= ids}
        self._launches = {} if len(kept) >= _MOST else kept
        self._launches[now[:2]] = launches, ids
        self._latest = now, launches
        return launches


def _sorted_out(scope: Scope, units: list[Unit]) -> tuple[list[Unit], dict[int, str]]:
    """The units that kernels step, and why the others' parameters are not among them."""
    overlaps = eligibility.overlapping(units)
    fused: list[Unit] = []
    reasons: dict[int, str] = {}
    for unit in units:
        reason = eligibility.why_not_now(scope, unit)
        if reason is None and any(id(step.param) in overlaps for step in unit):
            reason = "it lies on the memory of another"
        if reason is None:
            fused.append(unit)
        else:
            reasons |= {id(step.param): reason for step in unit}
    return fused, reasons


def _insist(scope: Scope, units: list[Unit], reasons: dict[int, str]) -> None:
    """Refuse the step if `fused=True` was asked of a parameter that cannot take it."""
    for unit in units:
        p, owner = unit[0].param, type(scope.optimizer).__name__
        eligibility.insist(owner, p, unit[0].settings, reasons.get(id(p)))


def _in_dispatch_mode() -> bool:
    """True under a TorchDispatchMode, which must see every op; our kernels are invisible to it."""
    depth = getattr(torch._C, "_len_torch_dispatch_stack", None)
    return True if depth is None else bool(depth())


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
