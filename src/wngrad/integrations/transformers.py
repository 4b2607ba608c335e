"""Hugging Face Trainer: the rates in use, in everything it logs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wngrad.install import naming_the_extra

with naming_the_extra("wngrad.integrations.transformers"):
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )

from wngrad.optim.optimizer import BlockOptimizer
from wngrad.rate_history import RateHistory
from wngrad.telemetry import rate_metrics, unwrapped


class RateCallback(TrainerCallback):
    """Adds `rate_metrics` to the training logs: to `log_history`, and to every later callback.

    The Trainer puts its own reporters (TensorBoard, W&B, …) before the callbacks it is given, and
    those would not see what this one adds: `log_rates` puts it first.

    Args:
        prefix: comes before every name.
        reporters: callbacks of the Trainer's, of which TensorBoard's and W&B's get a picture of the
            rates when the training ends (`RateHistory`).
    """

    def __init__(
        self, prefix: str = "wngrad/", reporters: Sequence[TrainerCallback] | None = None
    ) -> None:
        self.prefix, self._reporters = prefix, reporters
        self._history: RateHistory | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        opt = unwrapped(kwargs["optimizer"])
        if self._reporters is not None and isinstance(opt, BlockOptimizer):
            self._history = RateHistory(opt, kwargs.get("model"))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._history is None:
            return
        self._history.remove()
        losses = [entry["loss"] for entry in state.log_history if "loss" in entry]
        for reporter in self._reporters or ():
            for name in ("tb_writer", "_wandb"):
                if (logger := getattr(reporter, name, None)) and self._history.layers():
                    self._history.log_image(logger, state.global_step, losses)
        self._history = None

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return  # an evaluation's log, or the summary at the end
        rates = rate_metrics(kwargs["optimizer"], self.prefix)
        logs.update(rates)
        state.log_history[-1].update(rates)


def log_rates(trainer: Trainer, prefix: str = "wngrad/", *, picture: bool = False) -> None:
    """Add the effective rates λ/b to whatever this trainer logs, and wherever it logs to.

    Args:
        trainer: a `Trainer` of any kind, before `train()`.
        prefix: comes before every name.
        picture: draw the rates when the training ends, as an image for TensorBoard and W&B.
    """
    callbacks = trainer.callback_handler.callbacks
    # First: before others close what they log to.
    callbacks.insert(0, RateCallback(prefix, callbacks if picture else None))
