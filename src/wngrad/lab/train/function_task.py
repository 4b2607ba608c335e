"""A user's own `train(trial)` as a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from wngrad.lab.train.loader import refused
from wngrad.lab.train.trial import Trial

EPOCHS = 10  # what `trial.epochs` says if nobody has said otherwise


@dataclass(frozen=True, slots=True)
class FunctionTask:
    """A training of your own, called with a `Trial` for every optimizer, λ and seed.

    A bare function called `train` does as well: it is then called by its file's name.

    Args:
        train: asks the trial for its optimizer, reports to it, and returns.
        name: what reports call it, and the folder of its results.
        epochs: what `trial.epochs` says, unless `--epochs` says otherwise.

    >>> def train(trial):
    ...     model = torch.nn.Linear(2, 1)
    ...     opt = trial.optimizer(model)
    ...     for step in range(trial.epochs):
    ...         loss = (model(torch.ones(1, 2)) - 1).square().sum()
    ...         opt.zero_grad()
    ...         loss.backward()
    ...         opt.step()
    ...         trial.report(step + 1, loss=loss)
    >>> task = FunctionTask(train, name="one")
    """

    train: Callable[[Trial], Any]
    _: KW_ONLY
    name: str = ""
    epochs: int = EPOCHS

    fingerprint = ""  # of its data nothing is known; its file's code is looked at
    metric_name = ""

    def __post_init__(self) -> None:
        if not callable(self.train):
            raise ValueError(f"FunctionTask: `train` must be callable, got {self.train!r}.")
        if said := refused(self.train, None):
            raise ValueError(
                f"FunctionTask: `train` must take a trial and nothing else, got {said}."
            )
        if not self.epochs >= 1:
            raise ValueError(f"FunctionTask: `epochs` must be >= 1, got {self.epochs!r}.")
