"""The rates and b of every layer over a training, kept while it runs, and drawn."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from wngrad.install import naming_the_extra
from wngrad.optim import report
from wngrad.optim.optimizer import BlockOptimizer
from wngrad.telemetry import wngrad_optimizer

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST = 400  # records; then every second one is dropped, and half as many are taken
_LEAP = 10.0  # times that a layer's b grows from one record to the next, later than its start
_FAR = 1000.0  # times that a layer's rate lies below the median layer's
_TAG = "wngrad/rates"

_NAMED = 10  # layers in the picture's legend; of more, some are picked evenly
_BANDS = 4  # layers up to which the spread of their blocks is drawn as well
_WIDTH = 138  # characters of a line of text


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
        self._opt = wngrad_optimizer("RateHistory", opt, every)
        self._every, self._step = every, 0
        self._layers = _layers(self._opt, model)
        self._records: list[tuple[int, Tensor]] = []
        self._handle = self._opt.register_step_post_hook(self._record)

    def remove(self) -> None:
        """Record no more."""
        self._handle.remove()

    def layers(self) -> list[Layer]:
        """What was recorded, in the order of the model. Waits for the device."""
        if not self._records:
            return []
        steps = [step for step, _ in self._records]
        numbers = torch.stack([values.cpu() for _, values in self._records], 1)
        layers = zip(self._layers, numbers[..., :3], numbers[..., 3:], strict=True)
        return [Layer(name, steps, rate, b) for name, rate, b in layers if b.isfinite().any()]

    def troubles(self, losses: Iterable[float | Tensor] | None = None) -> list[str]:
        """What looks wrong, in sentences: by `diagnose`, and by what only a history can tell.

        Args:
            losses: the training losses, oldest first, as for `diagnose`.
        """
        now, layers = report.diagnose(self._opt, losses, usual=False), self.layers()
        return [*now, *_troubles_over_time(layers)] if layers else now

    def figure(self, losses: Iterable[float | Tensor] | None = None) -> Figure:
        """The rates and b over training, a line a layer, with what looks wrong in words.

        Args:
            losses: the training losses, oldest first; they are drawn, too, and judged.

        Returns:
            A figure of matplotlib, which must be installed. No window opens.
        """
        layers = self.layers()
        if not layers:
            raise ValueError("RateHistory: a picture must have a step to show, got none so far.")
        owner = type(self._opt).__name__
        numbers = None if losses is None else report.floats(owner, losses)
        return _draw(layers, numbers, self.troubles(numbers), owner)

    def save(self, path: str | Path, losses: Iterable[float | Tensor] | None = None) -> None:
        """Write the picture to a file; its ending (.png, .svg, .pdf) says of which kind."""
        self.figure(losses).savefig(path)

    def image(self, losses: Iterable[float | Tensor] | None = None) -> np.ndarray[Any, Any]:
        """The picture as an array of bytes, height × width × 3, for loggers of images."""
        figure = self.figure(losses)  # which says so if matplotlib is not there
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas = FigureCanvasAgg(figure)
        canvas.draw()  # type: ignore[no-untyped-call]
        rgba = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
        return rgba[:, :, :3].copy()

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
        if (self._step > 1 and self._step % self._every) or report.is_capturing():
            return
        self._records.append((self._step, report.spreads(self._opt, list(self._layers.values()))))
        if len(self._records) > _MOST:
            del self._records[1::2]
            self._every *= 2


def _layers(opt: BlockOptimizer, model: nn.Module | None) -> dict[str, Tensor]:
    """Of each layer its largest parameter, by the layer's name."""
    params = [(group, i, p) for group in opt.param_groups for i, p in enumerate(group["params"])]
    names = {p: name for name, p in model.named_parameters()} if model is not None else {}
    order = {p: i for i, p in enumerate(names)}
    params.sort(key=lambda found: order.get(found[2], len(order)))
    layers: dict[str, Tensor] = {}
    for number, (group, i, p) in enumerate(params):
        given = group.get("param_names")
        name = names.get(p) or (given[i] if given else f"{number}: {tuple(p.shape)}")
        layer = name.rpartition(".")[0] or name
        if layer not in layers or p.numel() > layers[layer].numel():
            layers[layer] = p
    return layers


def _troubles_over_time(layers: list[Layer]) -> Iterator[str]:
    """What only a history can tell: layers whose b leapt, and whose rate has fallen behind."""
    steps, b = layers[0].steps, torch.stack([layer.b[:, 1] for layer in layers], 1)
    late = max(2, len(b) // 10)  # after the first records
    growth = (b[1:] / b[:-1])[late - 1 :].nan_to_num(0.0, 0.0)
    if leapt := int((growth > _LEAP).any(0).sum()):
        i, layer = divmod(int(growth.argmax()), len(layers))
        before, after = steps[late - 1 + i : late + 1 + i]
        others = f", and that of {leapt - 1} more layers leapt, too" if leapt > 1 else ""
        yield (
            f"b of `{layers[layer].name}` grew {growth[i, layer]:.3g}-fold between steps {before} "
            f"and {after}{others}: a spike of the gradient has lowered the rate for good (clip "
            f"gradients, or look at that batch)."
        )
    rate = torch.stack([layer.rate[-1, 1] for layer in layers])
    low = [layers[i].name for i in (rate * _FAR < rate.nanmedian()).nonzero()]
    if low and len(layers) > 2:
        names = ", ".join(f"`{name}`" for name in low[:3]) + (", …" if len(low) > 3 else "")
        yield (
            f"the rate of {names} ({len(low)} of {len(layers)} layers) has ended more than "
            f"{_FAR:.0f} times below the median layer's: such layers hardly move any more."
        )


def _draw(
    layers: list[Layer], losses: list[float] | None, troubles: list[str], owner: str
) -> Figure:
    """The figure, made without pyplot: the user's backend stays as it is."""
    with naming_the_extra("a picture of the rates"):
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    lines = [textwrap.fill(f"• {line}", _WIDTH, subsequent_indent="   ") for line in troubles]
    text = "\n".join(lines) or "Nothing looks wrong."
    words = 0.19 * (text.count("\n") + 1) + 0.1
    figure = Figure(figsize=(10, 4.6 + words), dpi=120, layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[4.6, words])
    upper, lower = parts
    lower.text(0.02, 0.95, text, va="top", fontsize=9, color="#b3261e" if lines else "#1b6e3a")
    count = len(layers)
    shaded = "; shaded: all of them" if count <= _BANDS else ""
    upper.suptitle(f"{owner}: the median of each layer's blocks{shaded}", fontsize=11)
    rates, b, *rest = upper.subplots(1, 2 if losses is None else 3, squeeze=False)[0]
    for i, layer in enumerate(layers):
        style: dict[str, Any] = {
            "color": colormaps["viridis"](0.92 * i / max(1, count - 1)),
            "marker": "o" if len(layer.steps) == 1 else None,
            "linewidth": 3.5 - 2.2 * i / count,  # Lines that coincide show as nested ones.
        }
        for axes, values in ((rates, layer.rate), (b, layer.b)):
            axes.plot(layer.steps, values[:, 1], **style)
            if count <= _BANDS:
                band = {"color": style["color"], "alpha": 0.15, "linewidth": 0}
                axes.fill_between(layer.steps, values[:, 0], values[:, 2], **band)
    _label(rates, "step", "effective rate λ/b", log=True)
    _label(b, "step", "b", log=True)
    if losses is not None:
        rest[0].plot(range(1, len(losses) + 1), losses, color="0.35", linewidth=0.9)
        finite = sorted(x for x in losses if math.isfinite(x)) or [0.0]
        wide = finite[0] > 0 and finite[-1] > 20 * finite[len(finite) // 2]
        _label(rest[0], "loss number", "training loss", log=wide)
    every = -(-count // _NAMED)
    picked = [i for i in range(count) if i % every == 0 or i == count - 1]
    few = "" if len(picked) == count else f" (some of {count})"
    upper.legend(
        [rates.get_lines()[i] for i in picked],
        [textwrap.shorten(layers[i].name, 40, placeholder="…") for i in picked],
        title=f"layers{few}, from first to last",
        title_fontsize=8,
        loc="outside lower center",
        ncol=6,
        fontsize=8,
        frameon=False,
    )
    return figure


def _label(axes: Axes, below: str, title: str, *, log: bool) -> None:
    if log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:.3g}" if high < 10 * low else "")
    axes.set_xlabel(below)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
