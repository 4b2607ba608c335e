"""A training task of your own, in a few lines: what `wngrad sweep` needs to know of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wngrad.lab.train import loader
from wngrad.lab.train.data import Data
from wngrad.lab.train.function_task import FunctionTask
from wngrad.lab.train.loader_task import LoaderTask, check_model
from wngrad.lab.train.objective import CustomObjective, Measure
from wngrad.lab.train.spec import Metric, Precision

Pair: TypeAlias = tuple[Tensor, Tensor]  # inputs and targets; the first dimension is the examples


@dataclass(frozen=True, slots=True)
class Task:
    """A model factory, data, a loss and a metric.

    Args:
        name: what reports call it, and the folder of its results.
        model: returns a fresh network; the lab seeds torch's generator before it calls it.
        train: inputs and targets, the first dimension being the examples. Inputs and targets of
            floating point are cast to the precision of the run, integers are left as they are.
            Or a function without arguments that returns (train, test) or (train, test,
            validation): data that loads when asked.
        test: as `train`; None if `train` is a function.
        validation: as `train`: what λ is chosen on. Without it λ is chosen on the test set, whose
            loss at the best λ is then a little too good; the report says so.
        loss: (output, target) -> the mean loss over a batch: one number, with a gradient.
        metric: (output, target) -> the mean of what you care about over a batch. The test set is
            measured 1,000 examples at a time and the parts are averaged by their size.
        metric_name: what reports call it; "accuracy" is shown in per cent.
        higher_is_better: whether more of the metric is better.
        epochs: passes over the training data; an incomplete last batch is left out.
        batch: examples in a step.
        weight_decay: given to every optimizer, if it is not 0.
        precision: on CUDA; elsewhere float32, unless this is float64.

    >>> x = torch.linspace(-1, 1, 200)[:, None]
    >>> line = Task(
    ...     name="line",
    ...     model=lambda: nn.Linear(1, 1),
    ...     train=(x, 2 * x),
    ...     test=(x, 2 * x),
    ...     loss=nn.functional.mse_loss,
    ... )
    >>> line.data().shape
    (1,)
    """

    name: str
    model: Callable[[], nn.Module]
    train: Pair | Callable[[], tuple[Pair, Pair]]
    _: KW_ONLY
    loss: Measure
    test: Pair | None = None
    validation: Pair | None = None
    metric: Measure | None = None
    metric_name: str = "metric"
    higher_is_better: bool = True
    epochs: int = 10
    batch: int = 100
    weight_decay: float = 0.0
    precision: Precision = "float32"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"Task: `name` must be some text, got {self.name!r}.")
        check_model("Task", self.model)
        measures = ("model", "loss", *(("metric",) if self.metric is not None else ()))
        for each in measures:
            if not callable(getattr(self, each)):
                raise ValueError(f"Task: `{each}` must be callable, got {getattr(self, each)!r}.")
        for each in ("epochs", "batch"):
            if not getattr(self, each) >= 1:
                raise ValueError(f"Task: `{each}` must be >= 1, got {getattr(self, each)!r}.")
        if callable(self.train) == (self.test is not None):
            raise ValueError(
                "Task: `test` must be inputs and targets, or None if `train` is a function that "
                f"returns (train, test), got {type(self.test).__name__}."
            )

    @property
    def metric_key(self) -> Metric | None:
        """What a record calls the metric: it says which way is better."""
        if self.metric is None:
            return None
        if self.metric_name == "accuracy" and self.higher_is_better:
            return "test_accuracy"
        return "test_score" if self.higher_is_better else "test_error"

    def data(self) -> Data:
        """What a program trains on, with all that the task brings.

        Raises:
            ValueError: the data is not two pairs of tensors that fit; the message says which.
        """
        given = (self.train, self.test, self.validation)
        train, test, chosen_on = self._loaded() if callable(self.train) else given
        tensors = (*_pair("train", train), *_pair("test", test))
        validation = None if chosen_on is None else _pair("validation", chosen_on)
        objective = CustomObjective(self.loss, self.metric, self.metric_key or "test_score")
        return Data(
            self.name,
            *tensors,
            0,
            _fingerprint((*tensors, *(validation or ()))),
            objective=objective,
            model=self.model,
            validation=validation,
        )

    def _loaded(self) -> Any:
        assert callable(self.train)
        pairs: Any = self.train()
        if not isinstance(pairs, (tuple, list)) or len(pairs) not in (2, 3):
            got = type(pairs).__name__
            raise ValueError(
                f"Task: `train` must return (train, test) or (train, test, validation), got {got}."
            )
        return (*pairs, self.validation) if len(pairs) == 2 else pairs


AnyTask: TypeAlias = Task | LoaderTask | FunctionTask


def find(address: str) -> AnyTask:
    """The task that "file.py", "file.py:name" or "module:name" leads to.

    In a file without a name it is its `task`, or its function `train`.

    Raises:
        ValueError: there is none, in one line.
    """
    where = f"{address}:{_named_in(address)}" if loader.is_file(address) else address
    task = loader.load(where, "task")
    if isinstance(task, (Task, LoaderTask)):
        return task
    if isinstance(task, FunctionTask):
        return task if task.name else replace(task, name=_function_name(where))
    if callable(task) and not isinstance(task, type):
        return FunctionTask(task, name=_function_name(where))
    raise ValueError(
        f"lab: `task` {where!r} must be a wngrad.Task, a wngrad.LoaderTask or a function "
        f"train(trial), got {task!r}."
    )


def _named_in(file: str) -> str:
    try:
        names = vars(loader.load_file(file))
    except Exception:  # said by whoever loads it next
        return "task"
    if "task" in names:
        return "task"
    if not callable(names.get("train")):
        kinds = (Task, LoaderTask, FunctionTask)
        others = [f"{file}:{name}" for name, value in names.items() if isinstance(value, kinds)]
        close = f". Did you mean {others[0]}?" if others else "."
        raise ValueError(
            f"lab: `task` {file!r} has no attribute 'task' and no function 'train'{close}"
        )
    return "train"


def _function_name(where: str) -> str:
    """What a function's sweep is called: by its file, unless it has a name that says more."""
    home, _, name = where.rpartition(":")
    return Path(home).stem if name in ("train", "task") else name


def task_data(address: str) -> Data | LoaderTask | FunctionTask:
    """The data of the task at `address`, or the task itself if it reads its own.

    Whatever it raises is a ValueError of one line.
    """
    task = find(address)
    try:
        if isinstance(task, Task):
            return task.data()
        if isinstance(task, LoaderTask):
            task.data()
        return task
    except Exception as error:
        raise ValueError(
            f"{address}: its data cannot be had: {loader.error_text(error)}."
        ) from error


def _pair(name: str, value: Any) -> Pair:
    try:
        x, y = (torch.as_tensor(part) for part in value)
    except Exception as error:
        what = type(value).__name__
        raise ValueError(
            f"Task: `{name}` must be a pair of tensors, inputs and targets, got {what} "
            f"({loader.error_text(error)})."
        ) from error
    if not x.ndim or not y.ndim or len(x) != len(y) or not len(x):
        raise ValueError(
            f"Task: `{name}` must have as many inputs as targets, and some, got shapes "
            f"{tuple(x.shape)} and {tuple(y.shape)}."
        )
    return x.detach(), y.detach()


def _fingerprint(tensors: tuple[Tensor, ...]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
