"""The launches of a fused step."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from wngrad.optim.glance import Glance
from wngrad.optim.pieces import Family, Piece
from wngrad.optim.tables import DTYPES, ELEMENTS, LONGEST, TILES, Batch, Method, Settler, Table

if TYPE_CHECKING:
    from wngrad.optim.base import BlockOptimizer


class Refused(NamedTuple):
    """A parameter with blocks that are not finite."""

    param: Tensor
    blocks: int


class Plan:
    """All launches of a step; `left` are the parameters that take the plain path, and why."""

    def __init__(
        self, opt: BlockOptimizer, families: list[Family], left: dict[Tensor, str], now: Glance
    ) -> None:
        self.left, self.params = left, [p for g in opt.param_groups for p in g["params"]]
        number = {id(group): i for i, group in enumerate(opt.param_groups)}
        order = {p: i for i, p in enumerate(p for p in self.params if p.grad is not None)}
        batches: dict[Method, list[tuple[Family, int]]] = {}
        for family in families:
            method = _method(opt, family)
            batches.setdefault(method, []).append((family, number[id(family.group)]))
        self._settings = {method.device: Table(now.settings, method.device) for method in batches}
        self._launches = []
        for method, some in batches.items():
            index = [order[part.param] for family, _ in some for part in family.pieces]
            batch = Batch(method, some, opt._buffer)
            self._launches.append(_Launch(batch, index, now.grads, self._settings[method.device]))

    def run(self, now: Glance, scale: Tensor | None, found: Tensor | None) -> Refused | None:
        """Take the step; or change nothing and say which parameter must not be stepped."""
        for table in self._settings.values():
            table.update(now.settings)
        for launch in self._launches:
            launch.prepare(now.grads, scale, found)
        for launch in self._launches:
            if launch.method.looks and (bad := launch.bad()) is not None:
                return bad
        for launch in self._launches:
            with launch.on_its_device():
                launch.step()
        return None


class _Launch:
    """The kernels of a batch."""

    def __init__(self, batch: Batch, index: list[int], grads: list[int], settings: Table) -> None:
        import triton.language as tl

        from wngrad.optim import kernel

        self.batch, self.kernel, self.method = batch, kernel, batch.method
        self._index, self._settings = index, settings.tensor
        self._everyone = index == list(range(len(grads)))
        self._grads = Table([grads[i] for i in index], batch.method.device)
        self._scale = self._found = self._nothing = batch.coefs
        self._flags = {"SCALE": False, "FOUND": False}
        self._constants = {
            "DTYPE": getattr(tl, DTYPES[batch.method.dtype]),
            "METHOD": batch.method.rule,
            "DECAY": batch.method.decay,
            "SKIP": batch.method.skip,
            "LATCH": batch.method.latch,
            "ROUND": batch.method.rounds,
            "TILE": TILES[batch.method.dtype],
            "KINDS": batch.kinds,
        }
        self._warps = TILES[batch.method.dtype] // ELEMENTS[batch.method.dtype]
        self._compiled: dict[int, Any] = {}

    def on_its_device(self) -> AbstractContextManager[Any]:
        device = self.method.device
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return nullcontext()
        return torch.cuda.device(device)

    def prepare(self, grads: list[int], scale: Tensor | None, found: Tensor | None) -> None:
        self._grads.update(grads if self._everyone else [grads[i] for i in self._index])
        device, nothing = self.method.device, self._nothing
        self._scale = nothing if scale is None else scale.to(device, non_blocking=True)
        self._found = nothing if found is None else found.to(device, non_blocking=True)
        self._flags = {"SCALE": scale is not None, "FOUND": found is not None}

    def step(self) -> None:
        k, method = self.kernel, self.method
        if method.whole:
            if method.rounds and method.rule != k.ADAM.value:
                k.count_steps[(len(self._index),)](
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
        """A parameter with rows that are not finite. Waits for the device."""
        with self.on_its_device():
            self._tiles(self.kernel.SUMS)
            for settler in self.batch.settlers:
                self._settle(settler, look=True)
        for settler in self.batch.settlers:
            for param, count in zip(settler.owners, settler.bad.tolist(), strict=True):
                if count:
                    return Refused(param, count)
        return None

    def _tiles(self, mode: Any) -> None:
        batch = self.batch
        tensors = (
            batch.tiles,
            batch.records.tensor,
            self._grads.tensor,
            self._settings,
            batch.layouts.tensor,
            batch.sums,
            batch.coefs,
            self._scale,
            self._found,
        )
        constants = {**self._constants, **self._flags, "MODE": mode.value}
        scaled = self._scale is not self._nothing or self._found is not self._nothing
        grid = (batch.tiles.numel(), 1, 1)
        if not scaled and mode.value in self._compiled:
            self._compiled[mode.value][grid](*tensors, *self._ordered(constants))
            return
        made = self.kernel.step_tiles[grid](*tensors, **constants, num_warps=self._warps)
        if made is not None and not scaled:  # None from the interpreter
            self._compiled[mode.value] = made

    def _ordered(self, constants: dict[str, Any]) -> list[Any]:
        """As a compiled kernel takes them, which saves Triton's looking for it: half the launch."""
        return [constants[name] for name in self.kernel.step_tiles.arg_names if name in constants]

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
            METHOD=method.rule,
            SKIP=method.skip,
            LATCH=method.latch,
            FOUND=self._flags["FOUND"],
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
        whole,
        looks,
    )


def _length(part: Piece) -> int:
    return part.p.numel() // max(1, part.state["b"].numel())
