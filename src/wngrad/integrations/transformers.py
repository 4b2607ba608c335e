"""Hugging Face Trainer: the rates in use, in everything it logs."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from wngrad.telemetry import rate_metrics


class RateCallback(TrainerCallback):
    """Adds `rate_metrics` to the training logs: to `log_history`, and to every later callback.

    The Trainer puts its own reporters (TensorBoard, W&B, …) before the callbacks it is given, and
    those would not see what this one adds: `log_rates` puts it first.

    Args:
        prefix: comes before every name.
    """

    def __init__(self, prefix: str = "wngrad/") -> None:
        self.prefix = prefix

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


def log_rates(trainer: Trainer, prefix: str = "wngrad/") -> None:
    """Add the effective rates λ/b to whatever this trainer logs, and wherever it logs to.

    Args:
        trainer: a `Trainer` of any kind, before `train()`.
        prefix: comes before every name.
    """
    trainer.callback_handler.callbacks.insert(0, RateCallback(prefix))
