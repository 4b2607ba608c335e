"""A training from DataLoaders, for the lab's own loop."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn

from wngrad.lab.train.schedules import Schedule
from wngrad.lab.train.spec import Metric

Loaders: TypeAlias = tuple[Iterable[Any], Iterable[Any], Iterable[Any] | None]


@dataclass(frozen=True, slots=True)
class LoaderTask:
    """A model, DataLoaders and a loss: trained by a loop that can be stopped at any step.

    A batch is a tuple (inputs …, target), for which `model(*inputs)` and `loss(output, target)` are
    called; or a mapping, for which `model(**batch)` and `loss(output, batch)` are.

    Args:
        name: what reports call it, and the folder of its results.
        model: returns a fresh network, drawn from torch's generator. Parameters that do not
            require a gradient stay as they are.
        loaders: a function that returns (train, validation) or (train, validation, test):
            DataLoaders, or anything to iterate over batches again and again.
        loss: None if the model's output has the loss in it, as Hugging Face's have (`.loss`).
        metric: called like `loss`, and as the mean of what you care about over a batch.
        metric_name: what reports call it; "accuracy" is shown in per cent.
        higher_is_better: whether more of the metric is better.
        epochs: passes over the training data.
        steps: optimizer steps of an epoch, if not all; needed if `len(train)` is not known.
        schedule: of λ: "constant", "linear" or "cosine", down to 0 at the last step.
        warmup: the share of all steps in which λ rises to its value, before the schedule.
        accumulate: batches whose gradients are averaged for a step.
        clip: the norm that the gradient of all parameters is cut to.
        autocast: "bfloat16" to run the model under torch.autocast.
        patience: epochs without a lower validation loss after which a run is ended; its result is
            then that of its best epoch.
        weight_decay: given to every optimizer, if it is not 0.
    """

    name: str
    model: Callable[[], nn.Module]
    loaders: Callable[[], Any]
    _: KW_ONLY
    loss: Callable[[Any, Any], Tensor] | None = None
    metric: Callable[[Any, Any], Any] | None = None
    metric_name: str = "metric"
    higher_is_better: bool = True
    epochs: int = 10
    steps: int | None = None
    schedule: Schedule = "constant"
    warmup: float = 0.0
    accumulate: int = 1
    clip: float | None = None
    autocast: Literal["", "bfloat16"] = ""
    patience: int | None = None
    weight_decay: float = 0.0
    _made: list[Loaders] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ValueError(f"LoaderTask: `name` must be some text, got {self.name!r}.")
        check_model("LoaderTask", self.model)
        for each in ("model", "loaders"):
            if not callable(value := getattr(self, each)):
                raise ValueError(f"LoaderTask: `{each}` must be a function, got {value!r}.")
        for each in ("epochs", "steps", "accumulate", "patience"):
            if (value := getattr(self, each)) is not None and not value >= 1:
                raise ValueError(f"LoaderTask: `{each}` must be >= 1, got {value!r}.")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"LoaderTask: `clip` must be > 0, got {self.clip!r}.")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"LoaderTask: `warmup` must be in [0, 1), got {self.warmup!r}.")
        for name, among in (("schedule", get_args(Schedule)), ("autocast", ("", "bfloat16"))):
            if getattr(self, name) not in among:
                raise ValueError(
                    f"LoaderTask: `{name}` must be one of {among}, got {getattr(self, name)!r}."
                )

    def data(self) -> Loaders:
        """The loaders for training, validation and test; made when first asked for."""
        if not self._made:
            self._made.append(_loaders(self.loaders))
        return self._made[0]

    @property
    def metric_key(self) -> Metric | None:
        """What a record calls the metric on validation data."""
        if self.metric is None:
            return None
        if self.metric_name == "accuracy" and self.higher_is_better:
            return "valid_accuracy"
        return "valid_score" if self.higher_is_better else "valid_error"

    @property
    def epochs_fixed(self) -> bool:
        """True if more epochs would change the first ones."""
        return self.schedule != "constant" or self.warmup > 0 or self.patience is not None

    @property
    def fingerprint(self) -> str:
        """Of the data its sizes alone; the code of the file is looked at as well."""
        sizes = [_sizes(each) for each in self.data() if each is not None]
        return hashlib.sha256(repr(sizes).encode()).hexdigest()

    def steps_of(self, train: Iterable[Any]) -> int:
        """Optimizer steps of an epoch."""
        try:
            batches = len(train)  # type: ignore[arg-type]
        except TypeError as error:
            if self.steps is None:
                raise ValueError(
                    f"LoaderTask: `steps` must be given: {type(train).__name__} has no length."
                ) from error
            return self.steps
        every = -(-batches // self.accumulate)
        if not every:
            raise ValueError("LoaderTask: `loaders` must give some training batches, got none.")
        return min(every, self.steps or every)

    def output_and_target(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        """What the model says to a batch, and what the loss compares it with."""
        if isinstance(batch, Mapping):
            return model(**batch), batch
        if isinstance(batch, (tuple, list)) and len(batch) > 1:
            return model(*batch[:-1]), batch[-1]
        return model(batch), batch

    def loss_of(self, output: Any, target: Any) -> Tensor:
        """The loss of a batch."""
        if self.loss is not None:
            return self.loss(output, target)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise ValueError(
                f"LoaderTask: `loss` must be given: the model's {type(output).__name__} has none."
            )
        found: Tensor = loss
        return found


def check_model(owner: str, model: object) -> None:
    """Refuse a network in place of the function that makes one: it can be called, too."""
    if isinstance(model, nn.Module):
        raise ValueError(
            f"{owner}: `model` must be a function that returns a fresh network, got a "
            f"{type(model).__name__}, which every run would train further."
        )


def _loaders(function: Callable[[], Any]) -> Loaders:
    given = function()
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
        raise ValueError(
            "LoaderTask: `loaders` must return (train, validation) or (train, validation, test), "
            f"got {type(given).__name__}."
        )
    return (given[0], given[1], given[2] if len(given) == 3 else None)


def _sizes(loader: Any) -> list[Any]:
    """Batches, examples and examples in a batch, as far as a loader says so."""
    sizes: list[Any] = []
    for each in (loader, getattr(loader, "dataset", None)):
        try:
            sizes.append(len(each))  # type: ignore[arg-type]
        except TypeError:
            sizes.append(None)
    return [*sizes, getattr(loader, "batch_size", None)]
