"""A user's own training, which says by itself how far it is."""

from __future__ import annotations

from typing import Any

import torch

from wngrad.lab.train import seeding
from wngrad.lab.train.evaluation import state_bytes
from wngrad.lab.train.function_task import FunctionTask
from wngrad.lab.train.programs.run import Run
from wngrad.lab.train.spec import Pack, Sweep
from wngrad.lab.train.trial import Trial

RETURNED = "its function returned"


class FunctionRun(Run):
    """One call of `train(trial)`; whoever runs it is asked after every report whether to go on."""

    keeps_checkpoint = False

    def __init__(
        self, sweep: Sweep, pack: Pack, task: FunctionTask, device: str | torch.device
    ) -> None:
        super().__init__(sweep, pack)
        (lane,) = pack.lanes
        self.task, self.trial = task, Trial(lane, sweep.epochs, device)
        self.trial.after_report = self._reported

    def advance(self, steps: int) -> None:
        """All of it: how many steps there are, only the function knows."""
        seeding.seed_all(self.trial.seed)
        self.trial.memory.begin()
        self.task.train(self.trial)
        self._copy()
        if not self.trial.steps:
            raise ValueError("train must call trial.report(step, loss=…) with a step > 0")
        self.ended = RETURNED

    def state(self) -> dict[str, Any]:
        return self.trial.state()

    def load(self, state: dict[str, Any]) -> None:
        self.trial.load(state)

    def _reported(self) -> None:
        self._copy()
        self.between()

    def _copy(self) -> None:
        """What the trial has been told, in the words of a run."""
        trial = self.trial
        self.epoch = min(len(trial.steps), self.sweep.epochs)
        self.steps_reported = trial.steps
        self.curves = {name: [[v] for v in values] for name, values in trial.curves.items()}
        self.start = {name: [value] for name, value in trial.start.items()}
        self.step_seconds = trial.step_seconds
        self.state_bytes, self.peak_bytes = state_bytes(trial.optimizers), trial.memory.peak
