"""The rates and b of every layer over a training, kept while it runs, and drawn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wngrad.optim.diagnosis import troubles
from wngrad.optim.optimizer import BlockOptimizer
from wngrad.optim.report import spreads
from wngrad.telemetry import unwrapped

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

_MOST = 400  # records; then every second one is dropped, and half as many are taken
_LEAP = 10.0  # times that a layer's b grows from one record to the next, later than its start
_FAR = 1000.0  # times that a layer's rate lies below the median layer's
_TAG = "wngrad/rates"


@dataclass(frozen=True, slots=True)
class Layer:
    """What was recorded of one layer, a number a record."""

    name: str
    steps: list[int]
    rate: Tensor  # (records, 3): the smallest, the median and the largest of its blocks
    b: Tensor  # the same of b


def takes_images(logger: Any) -> bool:
    """Whether this is TensorBoard's `SummaryWriter`, or W&B: its module, or a run of it."""
    module = getattr(logger, "__name__", type(logger).__module__)
    return hasattr(logger, "add_image") or module.partition(".")[0] == "wandb"


class RateHistory:
    """Records the rates λ/b and b of each layer while a training runs, and draws them.

    It is a hook of the optimizer: make it before the training, and nothing else changes. It keeps
    six numbers a parameter at every `every`-th step, at most 400 times: when there are more, it
    drops every second one and records half as often. Nothing waits for a device before the numbers
    are drawn. A layer is shown by its largest parameter; of sharded ones, by this rank's part.

    Args:
        opt: WNGrad, WNAdam or WNMuon, or what Accelerate or Lightning wrapped around it.
        model: gives the layers their names; without it, parameters have those that the optimizer
            was given (`named_parameters()`), or their shapes.
        every: how many steps lie between two records.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        >>> opt = WNGrad(model.parameters())
        >>> history = RateHistory(opt, model, every=1)
        >>> for _ in range(3):
        ...     opt.zero_grad()
        ...     model(torch.ones(1, 3)).square().sum().backward()
        ...     opt.step()
        >>> [layer.name for layer in history.layers()], history.layers()[0].steps
        (['0', '1'], [1, 2, 3])
        >>> figure = history.figure()  # history.save("rates.png") writes it to a file
    """

    def __init__(self, opt: Any, model: nn.Module | None = None, *, every: int = 10) -> None:
        opt = unwrapped(opt, "RateHistory")
        if not isinstance(opt, BlockOptimizer):
            raise TypeError(
                f"RateHistory: `opt` must be one of wngrad's, got {type(opt).__name__}."
            )
        if type(every) is not int or every < 1:
            raise ValueError(f"RateHistory: `every` must be an int >= 1, got {every!r}.")
        self._opt, self._every, self._step = opt, every, 0
        self._layers = _layers(opt, model)
        self._records: list[tuple[int, Tensor]] = []
        self._handle = opt.register_step_post_hook(self._record)

    def remove(self) -> None:
        """Record no more."""
        self._handle.remove()

    def layers(self) -> list[Layer]:
        """What was recorded, in the order of the model. Waits for the device."""
        if not self._records:
            return []
        steps = [step for step, _ in self._records]
        numbers = torch.stack([values.cpu() for _, values in self._records])
        every = (
            Layer(name, steps, numbers[:, i, :3], numbers[:, i, 3:])
            for i, name in enumerate(self._layers)
        )
        return [layer for layer in every if layer.b.isfinite().any()]

    def troubles(self, losses: Iterable[float | Tensor] | None = None) -> list[str]:
        """What looks wrong, in sentences: by `diagnose`, and by what only a history can tell.

        Args:
            losses: the training losses, oldest first, as for `diagnose`.
        """
        layers = self.layers()
        return [*troubles(self._opt, losses), *_leaps(layers), *_left_behind(layers)]

    def figure(self, losses: Iterable[float | Tensor] | None = None) -> Figure:
        """The rates and b over training, a line a layer, with what looks wrong in words.

        Args:
            losses: the training losses, oldest first; they are drawn, too, and judged.

        Returns:
            A figure of matplotlib, which must be installed. No window opens.
        """
        from wngrad.rate_picture import draw

        layers = self.layers()
        if not layers:
            raise ValueError("RateHistory: a picture must have a step to show, got none so far.")
        given = None if losses is None else [float(torch.as_tensor(x).detach()) for x in losses]
        return draw(layers, given, self.troubles(given), type(self._opt).__name__)

    def save(self, path: str | Path, losses: Iterable[float | Tensor] | None = None) -> None:
        """Write the picture to a file; its ending (.png, .svg, .pdf) says of which kind."""
        self.figure(losses).savefig(path)

    def image(self, losses: Iterable[float | Tensor] | None = None) -> np.ndarray[Any, Any]:
        """The picture as an array of bytes, height × width × 3, for loggers of images."""
        from wngrad.rate_picture import pixels

        return pixels(self.figure(losses))

    def log_image(
        self, logger: Any, step: int | None = None, losses: Iterable[float | Tensor] | None = None
    ) -> None:
        """Log the picture as an image called `wngrad/rates`.

        Args:
            logger: TensorBoard's `SummaryWriter`, or a run of W&B.
            step: the step that it is logged at; by default the last one recorded.
            losses: the training losses, oldest first.
        """
        step = self._records[-1][0] if step is None and self._records else step
        if not takes_images(logger):
            raise TypeError(
                f"RateHistory: `logger` must be a SummaryWriter or a run of W&B, "
                f"got {type(logger).__name__}."
            )
        if hasattr(logger, "add_image"):
            logger.add_image(_TAG, self.image(losses), step, dataformats="HWC")
        else:
            image = import_module("wandb").Image
            # W&B counts its own steps, and refuses to go back: ours is logged beside the image.
            logger.log({_TAG: image(self.image(losses)), f"{_TAG}_step": step})

    def _record(self, *_: Any) -> None:
        self._step += 1
        first = self._step == 1
        if not first and self._step % self._every:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return
        self._records.append((self._step, spreads(self._opt, list(self._layers.values()))))
        if len(self._records) > _MOST:
            del self._records[1::2]
            self._every *= 2


def _layers(opt: BlockOptimizer, model: nn.Module | None) -> dict[str, Tensor]:
    """Of each layer its largest parameter, by the layer's name."""
    params = [(group, i, p) for group in opt.param_groups for i, p in enumerate(group["params"])]
    own = {id(p): name for name, p in model.named_parameters()} if model is not None else {}
    order = {key: i for i, key in enumerate(own)}
    params.sort(key=lambda each: order.get(id(each[2]), len(order)))
    layers: dict[str, Tensor] = {}
    for number, (group, i, p) in enumerate(params):
        named = group.get("param_names")
        name = own.get(id(p)) or (named[i] if named else f"{number}: {tuple(p.shape)}")
        layer = name.rpartition(".")[0] or name
        if layer not in layers or p.numel() > layers[layer].numel():
            layers[layer] = p
    return layers


def _leaps(layers: list[Layer]) -> list[str]:
    """When the median b of a layer has leapt, after the first records."""
    worst: tuple[float, str, int, int] | None = None
    count = 0
    for layer in layers:
        middle = layer.b[:, 1]
        late = max(2, len(middle) // 10)
        growth = (middle[1:] / middle[:-1])[late - 1 :]
        leaps = growth.isfinite() & (growth > _LEAP)
        count += bool(leaps.any())
        if leaps.any():
            i = int(growth.nan_to_num(0.0, 0.0).argmax())
            before, after = layer.steps[late - 1 + i : late + 1 + i]
            leap = growth[i].item(), layer.name, before, after
            worst = max(worst or leap, leap)
    if worst is None:
        return []
    factor, name, before, after = worst
    others = f", and that of {count - 1} more layers leapt, too" if count > 1 else ""
    return [
        f"b of `{name}` grew {factor:.3g}-fold between steps {before} and {after}{others}: a spike "
        f"of the gradient has lowered the rate for good (clip gradients, or look at that batch)."
    ]


def _left_behind(layers: list[Layer]) -> list[str]:
    """Layers whose rate has ended far below the others'."""
    last = torch.stack([layer.rate[-1, 1] for layer in layers]) if layers else torch.empty(0)
    middle = last.nanmedian().item() if len(layers) > 2 else 0.0
    low = [layer.name for layer, rate in zip(layers, last, strict=True) if rate * _FAR < middle]
    if not low:
        return []
    names = ", ".join(f"`{name}`" for name in low[:3]) + (", …" if len(low) > 3 else "")
    return [
        f"the rate of {names} ({len(low)} of {len(layers)} layers) has ended more than "
        f"{_FAR:.0f} times below the median layer's: such layers hardly move any more."
    ]
