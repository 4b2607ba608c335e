"""The fused step on CUDA: the launches of the Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wngrad.optim.collect import Unit
from wngrad.optim.fused.launch_key import LaunchKey
from wngrad.optim.fused.records import DTYPES, Refused
from wngrad.optim.fused.tables import LaunchBatch, SplitStep, Table
from wngrad.optim.fused.tiling import Tiling


class Launch:
    """The kernels of parameters that step together.

    Args:
        index: which of a snapshot's words they read: the settings, `head` words, and gradients.
        given: addresses that stand for those of gradients.
    """

    def __init__(
        self,
        key: LaunchKey,
        tiling: Tiling,
        units: list[Unit],
        words: list[int],
        index: list[int],
        given: list[int],
        head: int,
    ) -> None:
        import triton.language as tl

        from wngrad.optim.fused import kernel, kernel_split

        self.batch = batch = LaunchBatch(key, tiling, units)
        self.kernel, self.split, self.key, self.tiling = kernel, kernel_split, key, tiling
        self._index = None if index == list(range(len(words))) else index
        self._given = given
        self._words = Table(self._own(words), key.device)
        self._settings, self._grads = self._words.tensor[:head], self._words.tensor[head:]
        self._scale = self._found_inf = self._nothing = batch.coefs
        self._flags, self._scaled = {"SCALE": False, "FOUND": False}, False
        self._constants = {
            "DTYPE": getattr(tl, DTYPES[key.dtype]),
            "GDTYPE": getattr(tl, DTYPES[key.proposed or key.dtype]),
            "METHOD": key.rule.value,
            "DECAY": key.decay.value,
            "SKIP": key.skip,
            "LATCH": key.latch,
            "ROUND": key.rounds,
            "RATED": key.rated,
            "AVERAGES": key.averages,
            "RELATIVE": key.relative,
            "PROPOSED": key.proposed is not None,
            "TILE": tiling.tile,
            "STAGES": tiling.stages,
            "KINDS": batch.kinds,
        }
        self._ready: dict[int, Callable[[], object]] = {}

    def _own(self, words: list[int]) -> list[int]:
        """Those of the words that these kernels read."""
        return words if self._index is None else [words[i] for i in self._index] + self._given

    def prepare(self, words: list[int], scale: Tensor | None, found_inf: Tensor | None) -> None:
        self._words.update(self._own(words))
        if scale is found_inf is None and not self._scaled:
            return
        device, nothing = self.key.device, self._nothing
        self._scale = nothing if scale is None else scale.to(device, non_blocking=True)
        self._found_inf = nothing if found_inf is None else found_inf.to(device, non_blocking=True)
        scaled = scale is not None and self.key.proposed is None
        self._flags = {"SCALE": scaled, "FOUND": found_inf is not None}
        self._scaled = any(self._flags.values())

    def step(self) -> None:
        with on(self.key.device):
            self._step()

    def _step(self) -> None:
        k, key = self.kernel, self.key
        if self.tiling.whole:
            if (key.rounds or key.averages) and not key.rule.counts_blocks:
                k.count_steps[(self._grads.numel(),)](
                    self.batch.records.tensor,
                    self._settings,
                    self._found_inf,
                    FOUND=self._flags["FOUND"],
                )
            self._tiles(k.ALL)
            return
        if not key.checks_first:
            self._tiles(k.SUMS)
        for split in self.batch.splits:
            self._find_b(split, check=False)
        self._tiles(k.MOVES)

    def bad(self) -> Refused | None:
        """A parameter with rows that are not finite, if that is to be known. Then it waits."""
        with on(self.key.device):
            self._tiles(self.kernel.SUMS)
            for split in self.batch.splits:
                self._find_b(split, check=True)
        for split in self.batch.splits:
            for param, count in zip(split.owners, split.bad.tolist(), strict=True):
                if count:
                    return Refused(param, count)
        return None

    def _tiles(self, mode: Any) -> None:
        if mode.value in self._ready and not self._scaled:
            self._ready[mode.value]()
            return
        batch, jit = self.batch, self.kernel.step_tiles
        tensors = (
            batch.tiles,
            batch.records.tensor,
            self._grads,
            self._settings,
            batch.layouts.tensor,
            batch.sums,
            batch.coefs,
            self._scale,
            self._found_inf,
        )
        constants = {**self._constants, **self._flags, "MODE": mode.value}
        grid = (batch.tiles.numel(), 1, 1)
        compiled = jit[grid](*tensors, **constants, num_warps=self.tiling.warps)
        if compiled is not None and not self._scaled:  # None from the interpreter
            names = [name for name in jit.arg_names if name in constants]
            where = (t.data_ptr() for t in tensors)
            arguments = (*where, *(constants[name] for name in names))
            self._ready[mode.value] = again(compiled, grid, arguments, self.key.device)

    def _find_b(self, split: SplitStep, check: bool) -> None:
        key = self.key
        self.split.find_b[(split.tiles.numel(),)](
            split.tiles,
            split.records.tensor,
            split.runs.tensor,
            split.members.tensor,
            self._settings,
            self.batch.sums,
            self.batch.coefs,
            self._found_inf,
            split.bad,
            METHOD=key.rule.value,
            SKIP=key.skip,
            LATCH=key.latch,
            RATED=key.rated,
            RELATIVE=key.relative,
            FOUND=self._flags["FOUND"],
            CHECK=check,
            R=split.rows,
            WIDTH=split.span,
        )


def again(
    compiled: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], device: torch.device
) -> Callable[[], object]:  # pragma: no cover, needs a GPU
    """The launch of a kernel that has been launched before.

    Triton's public launch looks the kernel up, sorts its arguments, asks the driver what each of
    them is and calls hooks that are not there: more than half of a launch's time. What is used
    instead is private, and known for the versions below.
    """
    import triton

    public = compiled[grid]
    hooks = getattr(triton.knobs.runtime, "launch_enter_hook", None)
    raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if not ((3, 4) <= version < (4, 0) and hasattr(hooks, "calls") and raw_stream is not None):
        return partial(public, *arguments)
    runtime = triton.knobs.runtime
    function, packed, index = compiled.function, compiled.packed_metadata, device.index

    def launch() -> None:
        if runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls:  # a profiler's
            public(*arguments)
            return
        compiled.run(*grid, raw_stream(index), function, packed, None, None, None, *arguments)

    return launch


_HERE: AbstractContextManager[Any] = nullcontext()


def on(device: torch.device) -> AbstractContextManager[Any]:
    """The device that kernels are launched on."""
    index = device.index  # None on a CPU, where Triton is interpreted
    here = index is None or index == torch.cuda.current_device()
    return _HERE if here else torch.cuda.device(device)
