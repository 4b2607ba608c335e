"""The real optimizer classes, one network after another, as anyone would train them.

The reference for the other programs, and the way for an optimizer that cannot be stacked.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from wngrad.lab.train.data import Data
from wngrad.lab.train.evaluation import has_test_weights, keeps_average
from wngrad.lab.train.naming import parse
from wngrad.lab.train.programs.base import Program
from wngrad.lab.train.spec import Lane, Pack, Sweep
from wngrad.optim.average import batch_norms, batch_statistics

STATISTICS = 50  # batches to take batch statistics from


class Lone(Program):
    """One network after another with the real classes, as anyone would train them."""

    def __init__(self, sweep: Sweep, pack: Pack, data: Data, device: str | torch.device) -> None:
        super().__init__(sweep, pack, data, device)
        self.models = [self.network(lane.seed) for lane in pack.lanes]
        self.optimizers = [
            optimizer(lane, model, sweep.weight_decay)
            for lane, model in zip(pack.lanes, self.models, strict=True)
        ]

    def _train(self, steps: int) -> None:
        with torch.random.fork_rng(devices=[]):
            for step in range(self.step, self.step + steps):
                for k in range(len(self.models)):
                    self._step_alone(k, step)

    def _step_alone(self, k: int, step: int) -> None:
        model, opt, seed = self.models[k], self.optimizers[k], self.pack.lanes[k].seed
        drawn = np.random.SeedSequence([seed, self.epoch, step]).generate_state(1, np.uint64)
        torch.manual_seed(int(drawn[0]))  # for what a network draws itself, as dropout does
        batch = self.sweep.batch
        index = self.order[k // len(self.pack.settings), step * batch : (step + 1) * batch]
        x, y = self.train_x[index], self.train_y[index]
        _switch(model, opt, "train")
        opt.zero_grad()
        loss = self.objective.mean(self._output(model, x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        first = loss.detach()
        ready = [first]

        def closure() -> Tensor:
            """The loss, for those who need it; taken anew if asked again, as by LBFGS."""
            if ready:
                return ready.pop()
            opt.zero_grad()
            again = self.objective.mean(self._output(model, x), y)
            again.backward()  # type: ignore[no-untyped-call]
            return again.detach()

        opt.step(closure)  # type: ignore[arg-type]
        self.total[k] += first

    @torch.no_grad()
    def _test(self) -> list[Tensor]:
        totals = self._totals()
        for k, (model, opt) in enumerate(zip(self.models, self.optimizers, strict=True)):
            _switch(model, opt, "eval")
            with cast(Any, opt).averaged() if keeps_average(opt) else nullcontext():
                if has_test_weights(opt):
                    self._recompute_statistics(k)
                for x, y, its in self.test_chunks(totals):
                    sums = self.objective.sums(self._output(model, x), y)
                    for total, value in zip(its, sums, strict=True):
                        total[k] += value
            _switch(model, opt, "train")
        return totals

    def _recompute_statistics(self, k: int) -> None:
        """Take batch statistics of the weights to be tested, where these are not the trained ones.

        As the README of schedule-free asks: some batches of training data, in training mode.
        """
        model, row = self.models[k], self.order[k // len(self.pack.settings)]
        if not batch_norms(model):
            return
        with batch_statistics(model), torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.pack.lanes[k].seed)  # as in a step: for what a network draws
            for index in torch.split(row, self.sweep.batch)[:STATISTICS]:
                self._output(model, self.train_x[index])

    def _output(self, model: nn.Module, x: Tensor) -> Tensor:
        half = self.device.type == "cuda" and self.sweep.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            output: Tensor = model(x)
        return output.to(self.dtype)

    def _lanes_state(self) -> Any:
        pairs = zip(self.models, self.optimizers, strict=True)
        return [(model.state_dict(), opt.state_dict()) for model, opt in pairs]

    def _load_lanes(self, state: Any) -> None:
        for model, opt, saved in zip(self.models, self.optimizers, state, strict=True):
            model.load_state_dict(saved[0])
            opt.load_state_dict(saved[1])


def _switch(model: nn.Module, opt: Any, mode: str) -> None:
    """To "train" or to "eval": some optimizers, as schedule-free ones, have both modes, too."""
    for each in (model, opt):
        if change := getattr(each, mode, None):
            change()


def optimizer(lane: Lane, params: Any, decay: float) -> torch.optim.Optimizer:
    """The real class behind a lane's name, for a model or for parameters."""
    options = {"weight_decay": decay} if decay else {}
    return cast(torch.optim.Optimizer, parse(lane.optimizer).build(params, lane.lam, **options))
