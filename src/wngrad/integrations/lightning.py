"""Lightning: its learning-rate monitor, showing the rates in use."""

from __future__ import annotations

from typing import Any, Literal

from wngrad.install import naming_the_extra

with naming_the_extra("wngrad.integrations.lightning"):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import LearningRateMonitor
    from torch.optim import Optimizer

from wngrad.optim.optimizer import BlockOptimizer
from wngrad.rate_history import RateHistory, takes_images
from wngrad.telemetry import by_group

_ENDINGS = {"rate_median": "", "rate_min": "-min", "rate_max": "-max", "skipped": "-skipped"}


class RateMonitor(LearningRateMonitor):
    """Lightning's `LearningRateMonitor`, with the effective rate λ/b where λ would stand.

    `lr-WNGrad` is the median of λ/b, which is what `lr-SGD` means for SGD, and `lr-WNGrad-min` and
    `-max` its spread; `lr-WNGrad-lambda` is λ, as the scheduler sets it, and `lr-WNGrad-skipped`
    what `nonfinite="skip"` has left alone. Several groups are called as Lightning calls them
    (`lr-WNGrad/pg1`, or by name). Other optimizers are shown as ever.

    Like its parent it logs just before a step, in every `log_every_n_steps`-th one.

    Args:
        logging_interval: "step" or "epoch". λ/b moves in every step, whatever a scheduler does, so
            None, which follows the scheduler, is not the default.
        log_momentum: as in `LearningRateMonitor`.
        log_weight_decay: as in `LearningRateMonitor`.
        picture: log a `RateHistory`'s picture as an image when the training ends, to TensorBoard
            and W&B; other loggers get none.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[RateMonitor()], log_every_n_steps=50)
    """

    def __init__(
        self,
        logging_interval: Literal["step", "epoch"] | None = "step",
        log_momentum: bool = False,
        log_weight_decay: bool = False,
        picture: bool = False,
    ) -> None:
        super().__init__(logging_interval, log_momentum, log_weight_decay)
        self._picture = picture
        self._histories: list[RateHistory] = []

    def on_train_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        super().on_train_start(trainer, *args, **kwargs)
        if self._picture:
            ours = [opt for opt in trainer.optimizers if isinstance(opt, BlockOptimizer)]
            self._histories = [RateHistory(opt, trainer.lightning_module) for opt in ours]

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        experiments = [logger.experiment for logger in trainer.loggers]
        for history in self._histories:
            history.remove()
            for each in experiments:
                if history.layers() and takes_images(each):
                    history.log_image(each, trainer.global_step)
        self._histories = []

    def _get_optimizer_stats(self, optimizer: Optimizer, names: list[str]) -> dict[str, Any]:
        stats: dict[str, Any] = super()._get_optimizer_stats(optimizer, names)
        if not isinstance(optimizer, BlockOptimizer):
            return stats
        for name, group in zip(names, by_group(optimizer), strict=True):
            stats[f"{name}-lambda"] = stats.pop(name)
            stats |= {name + _ENDINGS[key]: value for key, value in group.items()}
            # The parent keeps a list of all rates, and has put λ at its end.
            self.lrs[name][-1:] = [stats[name]] if name in stats else []
        return stats
