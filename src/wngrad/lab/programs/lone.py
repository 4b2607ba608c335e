"""The real optimizer classes, one network after another, as anyone would train them.

The reference for the other programs, and the way for an optimizer that cannot be stacked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from wngrad.lab import models
from wngrad.lab.data import Data
from wngrad.lab.programs.base import Program
from wngrad.lab.spec import Lane, Pack, Sweep
from wngrad.lab.update import RULES


class Lone(Program):
    """One network after another with the real classes, as anyone would train them."""

    def __init__(self, sweep: Sweep, pack: Pack, data: Data, device: str | torch.device) -> None:
        super().__init__(sweep, pack, data, device)
        self.models = [
            models.build(sweep.model, self.shape, self.classes, lane.seed).to(
                self.device, self.dtype
            )
            for lane in pack.lanes
        ]
        self.optimizers = [
            optimizer(lane, list(model.parameters()), sweep.weight_decay)
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
        model.train()
        opt.zero_grad()
        loss = F.cross_entropy(self._logits(model, self.train_x[index]), self.train_y[index])
        loss.backward()  # type: ignore[no-untyped-call]
        opt.step()
        self.total[k] += loss.detach()

    @torch.no_grad()
    def _test(self) -> tuple[Tensor, Tensor]:
        loss, right = torch.zeros_like(self.total), torch.zeros_like(self.total)
        for k, model in enumerate(self.models):
            model.eval()
            for x, y in self.test_chunks():
                logits = self._logits(model, x)
                loss[k] += F.cross_entropy(logits, y, reduction="sum")
                right[k] += (logits.argmax(1) == y).sum()
        return loss / len(self.test_y), right / len(self.test_y)

    def _logits(self, model: nn.Module, x: Tensor) -> Tensor:
        half = self.device.type == "cuda" and self.sweep.precision == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=half):
            logits: Tensor = model(x)
        return logits.to(self.dtype)

    def _lanes_state(self) -> Any:
        both = zip(self.models, self.optimizers, strict=True)
        return [(model.state_dict(), opt.state_dict()) for model, opt in both]

    def _load_lanes(self, state: Any) -> None:
        for model, opt, mine in zip(self.models, self.optimizers, state, strict=True):
            model.load_state_dict(mine[0])
            opt.load_state_dict(mine[1])


def optimizer(lane: Lane, params: list[nn.Parameter], decay: float) -> torch.optim.Optimizer:
    """The real class behind a lane's name."""
    from wngrad.optim import WNAdam, WNGrad

    factories: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": torch.optim.SGD,
        "sgd-momentum": lambda p, **kw: torch.optim.SGD(p, momentum=0.9, **kw),
        "adam": torch.optim.Adam,
        "wngrad": WNGrad,
        "wngrad-momentum": lambda p, **kw: WNGrad(p, momentum=0.9, **kw),
        "wnadam": WNAdam,
        "wngrad-gradient": lambda p, **kw: WNGrad(p, b_init="gradient", **kw),
    }
    make = factories.get(lane.optimizer) or models.imported(lane.optimizer, "optimizer", RULES)
    options = {"weight_decay": decay} if decay else {}
    return cast(torch.optim.Optimizer, make(params, lr=lane.lam, **options))
