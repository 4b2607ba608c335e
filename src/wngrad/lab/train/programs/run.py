"""The interface of whatever trains the lanes of a pack: what a session asks of it."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from wngrad.lab.train.spec import Pack, Sweep
from wngrad.optim.report import SmallRateWarning


class Run(ABC):
    """Lanes in training; results have one number per lane, as `pack.lanes`."""

    sweep: Sweep
    pack: Pack
    epoch: int = 0  # finished
    step: int = 0  # of the next epoch, done
    steps: int = 1  # of an epoch
    curves: dict[str, list[list[float]]]
    start: dict[str, list[float]]  # what was tested before the first step
    ended: str = ""  # why it is whole, though it has fewer epochs than others
    steps_reported: list[int]  # of a user's function, which says so itself
    keeps_checkpoint: bool = True  # it could go on, if more epochs were asked for
    step_seconds: float | None = None  # of one lane's training step; None: not known
    state_bytes: int | None = None  # of one lane's optimizer
    peak_bytes: int | None = None  # of one lane's training step on CUDA

    def __init__(self, sweep: Sweep, pack: Pack) -> None:
        self.sweep, self.pack = sweep, pack
        warnings.filterwarnings("ignore", category=SmallRateWarning)  # A sweep has small λ, too.
        self.curves, self.start, self.steps_reported = {}, {}, []
        # Called by a run whose `advance` is long, wherever it can be saved: it may raise.
        self.between: Callable[[], None] = lambda: None

    @abstractmethod
    def advance(self, steps: int) -> None:
        """Train for `steps` steps, or to the end of the epoch if that comes first."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Everything, as containers of tensors and numbers."""

    @abstractmethod
    def load(self, state: dict[str, Any]) -> None:
        """Go on from a `state`."""

    @property
    def finished(self) -> bool:
        return bool(self.ended) or self.epoch >= self.sweep.epochs

    @property
    def diverged(self) -> list[int | None]:
        """For each lane the first epoch, from 1, whose training loss was not finite."""
        firsts: list[int | None] = [None] * len(self.pack.lanes)
        for name in ("train_loss", self.sweep.best_by):
            for epoch, losses in reversed(list(enumerate(self.curves.get(name, ()), 1))):
                pairs = zip(firsts, losses, strict=True)
                firsts = [f if math.isfinite(v) else epoch for f, v in pairs]
            if name in self.curves:
                break  # where there is a training loss, that alone decides
        return firsts
