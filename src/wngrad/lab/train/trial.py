"""A trial: one run of a user's own `train(trial)`, with the optimizer, the λ and the seed it has.

def train(trial):
    model = Net().to(trial.device)
    opt = trial.optimizer(model)
    for epoch in range(trial.resume(model=model, opt=opt), trial.epochs):
        ...
        with trial.evaluating(model):
            loss = ...
        trial.report(epoch + 1, loss=loss)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import torch
from torch import nn

from wngrad.lab.train import seeding
from wngrad.lab.train.cuda_stats import StepMemory, synchronize
from wngrad.lab.train.evaluation import evaluation, has_test_weights, to_train
from wngrad.lab.train.naming import parse
from wngrad.lab.train.spec import Lane
from wngrad.optim.average import batch_norms


class Trial:
    """What `train(trial)` is given.

    Attributes:
        lam: λ, which `optimizer` has been given already.
        seed: torch, NumPy and Python's `random` are seeded with it before `train` is called.
        epochs: as many as the sweep asks for; a function may mean by it what it likes.
        device: where to train.
        name: the optimizer's name, as on the command line.
    """

    def __init__(self, lane: Lane, epochs: int, device: str | torch.device = "cpu") -> None:
        self.name, self.lam, self.seed = lane.optimizer, lane.lam, lane.seed
        self.epochs, self.device = epochs, torch.device(device)
        self.optimizers: list[Any] = []
        self.steps: list[int] = []  # of the reports
        self.curves: dict[str, list[float]] = {}
        self.start: dict[str, float] = {}
        self.step_seconds: float | None = None
        self.memory = StepMemory(self.device)
        self.after_report: Callable[[], None] = lambda: None
        self._objects: dict[str, Any] = {}
        self._saved: dict[str, Any] | None = None
        self._since, self._testing = time.perf_counter(), 0.0
        self._test_began: float | None = None  # while it is tested
        self._told = True  # whether the last report has been noticed

    def optimizer(self, params: Any, **options: Any) -> Any:
        """The optimizer of this trial, at its λ.

        Args:
            params: a model (frozen parameters are left out), parameters, or groups of them. A
                model is best: WNMuon and Muon ask it what each parameter is.
            options: settings for every optimizer, as `weight_decay=0.1`; what the command line
                says in parentheses comes before them.
        """
        opt = to_train(parse(self.name).build(params, self.lam, **options))
        self.optimizers.append(opt)
        return opt

    def report(
        self, step: int, *, loss: float | torch.Tensor, **metrics: float | torch.Tensor
    ) -> None:
        """Say how far the training is. The last report is the result.

        Args:
            step: how many steps (or epochs, as you like) are done; more with every report. 0 says
                what held before training, which sensitivity and usable decades are measured from.
            loss: on validation data; λ is chosen by it. NaN: the run has diverged.
            metrics: others on validation data (`accuracy=`, from 0 to 1); `train_loss=`; and
                `test_loss=`, `test_accuracy=`, … on test data, by which nothing is chosen. More is
                better, unless a word of the name says otherwise, as `error=` or `word_error_rate=`.

        Raises:
            ValueError: `step` does not grow, a value is no number, or a metric is not always there.
        """
        values = {_key(name): _number(name, v) for name, v in {"loss": loss, **metrics}.items()}
        last = self.steps[-1] if self.steps else -1
        if isinstance(step, bool) or not isinstance(step, Integral) or step <= last:
            raise ValueError(f"report: `step` must be an integer > {last}, got {step!r}.")
        if self.steps and values.keys() != self.curves.keys():
            raise ValueError(
                f"report: the metrics must be the same every time, {sorted(self.curves)}, got "
                f"{sorted(values)}."
            )
        if step == 0:
            self.start = values
        else:
            self._time(step, max(last, 0))
            self.steps.append(int(step))
            for name, value in values.items():
                self.curves.setdefault(name, []).append(value)
        self._told = False
        if self._test_began is None:
            self._tell()

    def _tell(self) -> None:
        """Have what was reported noticed, and the run saved: never while other weights are in."""
        self._told = True
        self.after_report()
        self._since, self._testing = time.perf_counter(), 0.0

    def resume(self, **objects: Any) -> int:
        """Have these saved with every report, and go on from there if the run was interrupted.

        Args:
            objects: whatever has `state_dict` and `load_state_dict`: the model, the optimizer, a
                schedule, a GradScaler. All that the rest of the training depends on; torch's,
                NumPy's and Python's generators are saved as well.

        Returns:
            The step of the last report that was saved, or 0.
        """
        for name, each in objects.items():
            if not hasattr(each, "state_dict") or not hasattr(each, "load_state_dict"):
                raise ValueError(
                    f"resume: `{name}` must have state_dict and load_state_dict, got {each!r}."
                )
        self._objects = objects
        saved, self._saved = self._saved, None
        if saved is None or saved["objects"].keys() != objects.keys():
            return 0
        for name, each in objects.items():
            each.load_state_dict(saved["objects"][name])
        seeding.load(saved["generators"])
        self.steps, self.start = list(saved["steps"]), dict(saved["start"])
        self.curves = {name: list(values) for name, values in saved["curves"].items()}
        return self.steps[-1] if self.steps else 0

    @contextmanager
    def evaluating(
        self, model: nn.Module | None = None, batches: Iterable[Any] | None = None
    ) -> Iterator[None]:
        """Test inside: at the weights that the optimizer wants tested, without gradients.

        Schedule-free optimizers are switched to `eval` and back; WNMuon's average (and that of any
        `average=η`) is in the weights' place; the model is in evaluation mode.

        Args:
            model: to be switched to `eval` and back.
            batches: inputs from the training data, for which `model(batch)` works: where the
                tested weights are not the trained ones, they give batch normalization's statistics.

        Raises:
            ValueError: there are no `batches`, and such statistics would be of other weights.
        """
        many = None if batches is None else list(batches)
        self._check_statistics(model, many)
        synchronize(self.device)  # training that is still queued is not the test's
        self.memory.end()
        self._test_began = time.perf_counter()

        def recompute() -> None:
            assert model is not None
            for batch in many or ():
                model(batch)

        try:
            with evaluation(model, self.optimizers, recompute if many else None):
                yield
        finally:
            synchronize(self.device)
            self._testing += self._test_time()
            self._test_began = None
            self.memory.begin()
        if not self._told:
            self._tell()

    def _check_statistics(self, model: nn.Module | None, batches: list[Any] | None) -> None:
        if batches or model is None or not batch_norms(model):
            return
        if any(map(has_test_weights, self.optimizers)):
            raise ValueError(
                f"evaluating: `batches` must be some training data for a model with batch "
                f"normalization, as its statistics belong to the weights that are trained and "
                f"{self.name} tests others, got {'None' if batches is None else 'none'}: "
                f"trial.evaluating(model, batches)."
            )

    def _test_time(self) -> float:
        """Of the test that is going on; 0 if there is none."""
        return 0.0 if self._test_began is None else time.perf_counter() - self._test_began

    def _time(self, step: int, last: int) -> None:
        """Seconds of a step between two reports, the tests apart: the least, as others disturb."""
        synchronize(self.device)
        if self._test_began is None:
            self.memory.end()
        testing = self._testing + self._test_time()
        spent = max(time.perf_counter() - self._since - testing, 0.0) / (step - last)
        self.step_seconds = min(spent, self.step_seconds or math.inf)

    def state(self) -> dict[str, Any]:
        """All that `resume` needs; nothing to go on from if it was never called."""
        return {
            "objects": {name: each.state_dict() for name, each in self._objects.items()},
            "generators": seeding.state(),
            "steps": self.steps,
            "curves": self.curves,
            "start": self.start,
        }

    def load(self, state: dict[str, Any]) -> None:
        self._saved = state if state["objects"] else None


def _key(name: str) -> str:
    """What a record calls a metric: that of validation data, unless the name says otherwise."""
    return name if name == "train_loss" or name.startswith("test_") else f"valid_{name}"


def _number(name: str, value: Any) -> float:
    try:
        number = float(value.detach() if isinstance(value, torch.Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"report: `{name}` must be a number, got {value!r}.") from error
    if name.endswith("accuracy") and not (math.isnan(number) or 0 <= number <= 1):
        raise ValueError(f"report: `{name}` must be from 0 to 1, got {number!r}.")
    return number
