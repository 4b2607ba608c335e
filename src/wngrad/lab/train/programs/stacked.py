"""All lanes in the same tensors: a layer is one product for every network."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from wngrad.lab.train import models, stack
from wngrad.lab.train.data import Data
from wngrad.lab.train.programs.base import TEST_CHUNK, Fused, copy_into, move
from wngrad.lab.train.spec import Pack, Sweep
from wngrad.lab.train.update import Update


class Stacked(Fused):
    """A pack of small networks in one stack: each parameter is one tensor for all lanes."""

    def __init__(self, sweep: Sweep, pack: Pack, data: Data, device: str | torch.device) -> None:
        super().__init__(sweep, pack, data, device)
        built = [models.network(sweep.model, data, seed) for seed in pack.seeds]
        why = stack.why_not(built[0]) or models.why_not_together(built[0])
        if why is not None:
            raise ValueError(f"lab: `model` {sweep.model!r} cannot be stacked: {why}.")
        self.stack = stack.Stack(cast(nn.Sequential, built[0]), self.compiled)
        params = [
            torch.stack([p.detach() for p in same])
            .unsqueeze(1)
            .repeat(1, len(pack.settings), *[1] * same[0].ndim)
            .to(self.device, self.dtype)
            for same in zip(*(m.parameters() for m in built), strict=True)
        ]
        self.update = Update(params, pack.settings, sweep.weight_decay)
        self.params = [p.detach().requires_grad_() for p in params]  # the same memory
        self._loss = self.compiled(self.objective.lanes_mean)
        self._move = self.compiled(move)

    def _one_step(self) -> None:
        index = self.order.index_select(1, self.at)
        logits = self.stack(self.params, self.train_x[index])
        losses = self._loss(logits, self.train_y[index])
        # Lanes share no weight: the gradient of the sum is every lane's own.
        self._move(self.update, torch.autograd.grad(losses.sum(), self.params))
        self.total += losses.detach()
        self.at += self.sweep.batch

    @torch.no_grad()
    def _evaluate(self) -> list[Tensor]:
        seeds, totals = len(self.pack.seeds), self._totals()
        for x, y, its in self.test_chunks(totals, self._test_size):
            batch = x.expand(seeds, *x.shape)
            if self.compiles:  # alike in memory to a batch of training, as in everything else
                batch = batch.contiguous()
            with torch.set_grad_enabled(self.compiles):
                logits = self.stack(self.params, batch).detach()
            sums = self.objective.lanes_sums(logits, y.expand(seeds, *y.shape))
            for total, value in zip(its, sums, strict=True):
                total += value
        return totals

    @property
    def _test_size(self) -> int:
        """Examples at a time: what was compiled for the batches of training serves again."""
        return self.sweep.batch if self.compiles else TEST_CHUNK

    def _lanes_state(self) -> Any:
        return self.update.tensors()

    def _load_lanes(self, state: Any) -> None:
        copy_into(self.update.tensors(), state)
