"""The launches of a fused step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wngrad.optim import look, native
from wngrad.optim.glance import Glance
from wngrad.optim.pieces import Family, Piece
from wngrad.optim.state import Group
from wngrad.optim.tables import (
    DTYPES,
    LARGE,
    LONGEST,
    SMALL,
    SMALL_SET,
    Batch,
    Decay,
    Method,
    Refused,
    Rule,
    Settler,
    Table,
)

if TYPE_CHECKING:
    from wngrad.optim.base import BlockOptimizer


class Plan:
    """All launches of a step; `left` are the parameters that take the plain path, and why."""

    def __init__(
        self, opt: BlockOptimizer, families: list[Family], left: dict[Tensor, str], now: Glance
    ) -> None:
        self.left = left
        every = [p for group in opt.param_groups for p in group["params"]]
        self._params = every  # held, so that no other takes the place of one in a glance
        number = {id(group): i for i, group in enumerate(opt.param_groups)}
        order = {p: i for i, p in enumerate(p for p in every if p.grad is not None)}
        batches: dict[Method, list[tuple[Family, int]]] = {}
        small = sum(part.p.numel() for f in families for part in f.pieces) <= SMALL_SET
        for family in families:
            method = _method(opt, family, small)
            batches.setdefault(method, []).append((family, number[id(family.group)]))
        # A backward that needs what was there before the step must say so, not go wrong in silence.
        taken = (part.param for family in families for part in family.pieces)
        self._moved = [p for p in taken if not p.is_inference()]
        self._launches: list[_Launch | native.Launch] = []
        head = len(now.words) - len(order)
        for method, some in batches.items():
            spots = (head + order[part.param] for family, _ in some for part in family.pieces)
            index = [*range(head), *spots]
            if method.native:
                self._launches.append(native.Launch(method, some, opt._buffer, index, head))
            else:
                batch = Batch(method, some, opt._buffer)
                self._launches.append(_Launch(batch, now.words, index, head))
        self.look = look.noted(every, opt.state) if now.simple else None
        self._careful = [launch for launch in self._launches if launch.method.looks]

    def run(self, now: Glance, scale: Tensor | None, found: Tensor | None) -> Refused | None:
        """Take the step; or change nothing and say which parameter must not be stepped."""
        for launch in self._launches:
            launch.prepare(now.words, scale, found)
        for launch in self._careful:
            if (bad := launch.bad()) is not None:
                return bad
        for launch in self._launches:
            launch.step()
        torch.autograd.graph.increment_version(self._moved)
        return None


class _Launch:
    """The kernels of a batch."""

    def __init__(self, batch: Batch, words: list[int], index: list[int], head: int) -> None:
        import triton.language as tl

        from wngrad.optim import kernel

        self.batch, self.kernel, self.method = batch, kernel, batch.method
        self._index = None if index == list(range(len(words))) else index
        self._words = Table(self._mine(words), batch.method.device)
        self._settings, self._grads = self._words.tensor[:head], self._words.tensor[head:]
        self._scale = self._found = self._nothing = batch.coefs
        self._flags, self._scaled = {"SCALE": False, "FOUND": False}, False
        self._constants = {
            "DTYPE": getattr(tl, DTYPES[batch.method.dtype]),
            "METHOD": batch.method.rule.value,
            "DECAY": batch.method.decay.value,
            "SKIP": batch.method.skip,
            "LATCH": batch.method.latch,
            "ROUND": batch.method.rounds,
            "TILE": batch.method.tile,
            "STAGES": batch.method.stages,
            "KINDS": batch.kinds,
        }
        self._ready: dict[int, Callable[[], object]] = {}

    def _mine(self, words: list[int]) -> list[int]:
        """Those of the words that this batch reads."""
        return words if self._index is None else [words[i] for i in self._index]

    def prepare(self, words: list[int], scale: Tensor | None, found: Tensor | None) -> None:
        self._words.update(self._mine(words))
        if scale is found is None and not self._scaled:
            return
        device, nothing = self.method.device, self._nothing
        self._scale = nothing if scale is None else scale.to(device, non_blocking=True)
        self._found = nothing if found is None else found.to(device, non_blocking=True)
        self._flags = {"SCALE": scale is not None, "FOUND": found is not None}
        self._scaled = any(self._flags.values())

    def step(self) -> None:
        with _on(self.method.device):
            self._step()

    def _step(self) -> None:
        k, method = self.kernel, self.method
        if method.whole:
            if method.rounds and method.rule != Rule.ADAM:
                k.count_steps[(self._grads.numel(),)](
                    self.batch.records.tensor,
                    self._settings,
                    self._found,
                    FOUND=self._flags["FOUND"],
                )
            self._tiles(k.ALL)
            return
        if not method.looks:
            self._tiles(k.SUMS)
        for settler in self.batch.settlers:
            self._settle(settler, look=False)
        self._tiles(k.MOVES)

    def bad(self) -> Refused | None:
        """A parameter with rows that are not finite, if that is to be known. Then it waits."""
        with _on(self.method.device):
            self._tiles(self.kernel.SUMS)
            for settler in self.batch.settlers:
                self._settle(settler, look=True)
        for settler in self.batch.settlers:
            for param, count in zip(settler.owners, settler.bad.tolist(), strict=True):
                if count:
                    return Refused(param, count)
        return None

    def _tiles(self, mode: Any) -> None:
        if mode.value in self._ready and not self._scaled:
            self._ready[mode.value]()
            return
        batch = self.batch
        tensors = (
            batch.tiles,
            batch.records.tensor,
            self._grads,
            self._settings,
            batch.layouts.tensor,
            batch.sums,
            batch.coefs,
            self._scale,
            self._found,
        )
        constants = {**self._constants, **self._flags, "MODE": mode.value}
        grid = (batch.tiles.numel(), 1, 1)
        compiled = self.kernel.step_tiles[grid](*tensors, **constants, num_warps=batch.method.warps)
        if compiled is not None and not self._scaled:  # None from the interpreter
            names = [name for name in self.kernel.step_tiles.arg_names if name in constants]
            where = (t.data_ptr() for t in tensors)
            arguments = (*where, *(constants[name] for name in names))
            self._ready[mode.value] = _again(compiled, grid, arguments, batch.method.device)

    def _settle(self, settler: Settler, look: bool) -> None:
        method = self.method
        self.kernel.settle_rows[(settler.tiles.numel(),)](
            settler.tiles,
            settler.records.tensor,
            settler.runs.tensor,
            settler.members.tensor,
            self._settings,
            self.batch.sums,
            self.batch.coefs,
            self._found,
            settler.bad,
            METHOD=method.rule.value,
            SKIP=method.skip,
            LATCH=method.latch,
            FOUND=self._flags["FOUND"],
            LOOK=look,
            R=settler.rows,
            WIDTH=settler.span,
        )


def _again(
    compiled: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], device: torch.device
) -> Callable[[], object]:  # pragma: no cover, needs a GPU
    """The launch of a kernel that has been launched before.

    It need not be looked for, nor its arguments be sorted, nor the driver be asked what each of
    them is, nor hooks be called that are not there: more than half of a launch's time.
    """
    import triton

    hooks, ordinary = triton.knobs.runtime, compiled[grid]
    function, packed, index = compiled.function, compiled.packed_metadata, device.index

    def launch() -> None:
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # a profiler's
            ordinary(*arguments)
            return
        stream = torch._C._cuda_getCurrentRawStream(index)
        compiled.run(*grid, stream, function, packed, None, None, None, *arguments)

    # The call and the hooks are those of Triton 3.4 and later.
    known = triton.__version__.startswith("3.") and hasattr(hooks.launch_enter_hook, "calls")
    return launch if known else partial(ordinary, *arguments)


_HERE: AbstractContextManager[Any] = nullcontext()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    index = device.index  # None on a CPU, where Triton is interpreted
    here = index is None or index == torch.cuda.current_device()
    return _HERE if here else torch.cuda.device(device)


def interpreted() -> bool:
    """Whether Triton runs kernels on the CPU, one element after another, as the tests do."""
    triton = sys.modules.get("triton")  # not imported for this: it takes a while
    return triton is not None and bool(triton.knobs.runtime.interpret)


def natively(p: Tensor, group: Group) -> bool:
    """Whether it is for native.c to step a parameter, not for Triton."""
    return p.device.type == "cpu" and not (group["fused"] and interpreted())


def _method(opt: BlockOptimizer, family: Family, small: bool) -> Method:
    group, part = family.group, family.pieces[0]
    buffered = Rule.MOMENTUM if opt._buffer in part.state else Rule.PLAIN
    decay = Decay.DECOUPLED if group["decoupled_weight_decay"] else Decay.COUPLED
    looks = group["nonfinite"] == "raise"
    longest = max(_length(part) for part in family.pieces)
    alone = len(family.pieces) + len(family.absent) == 1
    whole = alone and not looks and longest <= LONGEST
    cut = SMALL if small and whole else LARGE[part.p.dtype]
    tile = next((n for n in cut.tiles if longest <= n), cut.tiles[-1]) if whole else cut.tiles[0]
    native = natively(part.p, group)
    return Method(
        part.p.device,
        part.p.dtype,
        native,
        Rule.ADAM if opt._counts_blocks else buffered,
        decay if group["weight_decay"] else Decay.NONE,
        group["nonfinite"] == "skip",
        isinstance(group["b_init"], tuple),
        group["stochastic_rounding"] and part.p.dtype == torch.bfloat16,
        *((0, 0, 0) if native else (tile, tile // cut.warp, cut.stages)),
        native or whole,
        looks,
    )


def _length(part: Piece) -> int:
    return part.p.numel() // max(1, part.state["b"].numel())
