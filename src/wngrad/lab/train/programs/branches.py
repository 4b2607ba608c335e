"""Networks too large to gain from stacking: on CUDA, parallel branches of one graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from wngrad.lab.train import models
from wngrad.lab.train.data import Data
from wngrad.lab.train.norm import has_kernels, use_kernels
from wngrad.lab.train.objective import Sums
from wngrad.lab.train.programs.base import Fused, copy_into, move
from wngrad.lab.train.spec import Lane, Pack, Setting, Sweep
from wngrad.lab.train.update import Update


class Branches(Fused):
    """Each lane its own tensors: on CUDA, parallel branches of one graph.

    There a network is compiled, or runs as it is, with batch normalization by our kernels, if it
    has layers that can: that is as fast, and starts sooner.
    """

    network_by: Literal["compiler", "kernels"] | None = None  # None: as suits the network

    def __init__(self, sweep: Sweep, pack: Pack, data: Data, device: str | torch.device) -> None:
        super().__init__(sweep, pack, data, device)
        self.half = self.device.type == "cuda" and sweep.precision == "bfloat16"
        self.lanes = [_Branch(self, lane) for lane in pack.lanes]
        layout = torch.channels_last if len(data.shape) == 3 else torch.contiguous_format
        self.train_x, self.test_x = (
            x.to(memory_format=layout) for x in (self.train_x, self.test_x)
        )
        # One network, and one compilation of it, serves every lane: its weights are arguments.
        self._loss, self._sums_of = self._training_loss, self._test_sums
        model = self.lanes[0].model
        by = self.network_by or ("kernels" if has_kernels(model) else "compiler")
        if by == "kernels":
            use_kernels(model)
        else:
            self._loss, self._sums_of = self.compiled(self._loss), self.compiled(self._sums_of)
        self._move = self.compiled(move)
        if self.device.type == "cuda":
            self.streams = [torch.cuda.Stream() for _ in self.lanes]  # type: ignore[no-untyped-call]

    def _one_step(self) -> None:
        index = self.order.index_select(1, self.at)
        for k, lane in self._in_parallel():
            batch = index[k // len(self.pack.settings)]
            x, y = self.train_x[batch], self.train_y[batch]
            weights = lane.weights(self.half)
            loss = self._loss(weights, lane.buffers, x, y)
            grads = torch.autograd.grad(loss, list(weights.values()))
            self._move(lane.update, [g[None, None] for g in lane.rows(grads)])
            self.total[k] += loss.detach()
        self.at += self.sweep.batch

    @torch.no_grad()
    def _evaluate(self) -> list[Tensor]:
        totals = self._totals()
        for k, lane in self._in_parallel():
            weights = lane.weights(self.half)
            for x, y, its in self.test_chunks(totals):
                sums = self._sums_of(weights, lane.buffers, x, y)
                for total, value in zip(its, sums, strict=True):
                    total[k] += value
        return totals

    def _in_parallel(self) -> Iterator[tuple[int, _Branch]]:
        """The lanes; on CUDA each on a stream of its own, which starts and ends with ours."""
        if self.device.type != "cuda":
            yield from enumerate(self.lanes)
            return
        main = torch.cuda.current_stream()
        for k, (lane, stream) in enumerate(zip(self.lanes, self.streams, strict=True)):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                yield k, lane
        for stream in self.streams:
            main.wait_stream(stream)

    def _training_loss(self, params: Any, buffers: Any, x: Tensor, y: Tensor) -> Tensor:
        return self.objective.mean(self._output(params, buffers, x, training=True), y)

    def _test_sums(self, params: Any, buffers: Any, x: Tensor, y: Tensor) -> Sums:
        return self.objective.sums(self._output(params, buffers, x, training=False), y)

    def _output(self, params: Any, buffers: Any, x: Tensor, *, training: bool) -> Tensor:
        model = self.lanes[0].model.train(training)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            output: Tensor = functional_call(model, (params, buffers), (x,))
        return output.to(self.dtype)

    def _lanes_state(self) -> Any:
        return [lane.tensors() for lane in self.lanes]

    def _load_lanes(self, state: Any) -> None:
        for lane, saved in zip(self.lanes, state, strict=True):
            copy_into(lane.tensors(), saved)


class _Branch:
    """One network with its optimizer, in `Update`'s terms a pack of one lane.

    Rows of equal length lie side by side in one tensor, whatever layer they belong to: ResNet-18's
    62 parameters become ten, and a step needs a sixth of the kernels.
    """

    def __init__(self, program: Branches, lane: Lane) -> None:
        model = models.network(program.sweep.model, program.data, lane.seed)
        if why := models.why_not_together(model):
            raise ValueError(
                f"lab: `model` {program.sweep.model!r} cannot train in branches: {why}; use "
                "`program` = 'lone'."
            )
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d) and layer.momentum is not None:
                layer.num_batches_tracked = None  # counted only for a mean that is not used here
        self.model = model.to(program.device, program.dtype)
        self.buffers = dict(self.model.named_buffers())
        named = dict(self.model.named_parameters())
        self.lengths = [p.numel() // len(p) for p in named.values()]
        tables = self.rows([p.detach() for p in named.values()])
        self.params = dict(zip(named, self._views(list(named.values()), tables), strict=True))
        setting = Setting(lane.optimizer, lane.lam)
        self.update = Update([t[None, None] for t in tables], [setting], program.sweep.weight_decay)

    def weights(self, half: bool) -> dict[str, nn.Parameter]:
        """The parameters as a step computes with them: matrices in bfloat16, if so asked.

        As autocast would have them, but a table at a time, and their gradients stay half as long.
        """
        if not half:
            return self.params
        tables = [t.detach()[0, 0] for t in self.update.params]
        halves = [t.bfloat16() if t.shape[1] > 1 else t for t in tables]
        every = list(self.params.values())
        return dict(zip(self.params, self._views(every, halves), strict=True))

    def rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One table (rows, length) for each length, in the order of first appearance."""
        return [
            torch.cat(
                [_table(t) for t, n in zip(tensors, self.lengths, strict=True) if n == length]
            )
            for length in dict.fromkeys(self.lengths)
        ]

    def _views(self, like: Sequence[Tensor], tables: Sequence[Tensor]) -> list[nn.Parameter]:
        """The parameters, as parts of the tables."""
        left = dict(zip(dict.fromkeys(self.lengths), tables, strict=True))
        views = []
        for p, length in zip(like, self.lengths, strict=True):
            part, left[length] = left[length][: len(p)], left[length][len(p) :]
            if p.ndim == 4:
                view = part.view(len(p), *p.shape[2:], p.shape[1]).permute(0, 3, 1, 2)
            else:
                view = part.view(p.shape)
            views.append(nn.Parameter(view))
        return views

    def tensors(self) -> dict[str, Tensor]:
        return self.update.tensors() | {f"buffer.{k}": v for k, v in self.buffers.items()}


def _table(t: Tensor) -> Tensor:
    """(rows, length): a convolution's weights with the channels last, as cuDNN likes them."""
    return (t.permute(0, 2, 3, 1) if t.ndim == 4 else t).reshape(len(t), -1)
