"""The picture of a `RateHistory`: rates, b and losses over training, and what looks wrong."""

from __future__ import annotations

import math
import textwrap
from typing import TYPE_CHECKING, Any

from wngrad.install import naming_the_extra

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wngrad.rate_history import Layer

_NAMED = 10  # layers in the legend; of more, some are picked evenly
_BANDS = 4  # layers up to which the spread of their blocks is drawn as well
_WIDTH = 138  # characters of a line of text


def draw(
    layers: list[Layer], losses: list[float] | None, troubles: list[str], owner: str
) -> Figure:
    """The figure, made without pyplot: the user's backend is left alone."""
    with naming_the_extra("a picture of the rates"):
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    text = _text(troubles)
    words = 0.19 * (text.count("\n") + 1) + 0.1
    figure = Figure(figsize=(10, 4.6 + words), dpi=120, layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[4.6, words])
    upper, lower = parts
    axes = upper.subplots(1, 2 if losses is None else 3, squeeze=False)[0]
    colors = [colormaps["viridis"](0.92 * i / max(1, len(layers) - 1)) for i in range(len(layers))]
    _lines(axes[0], layers, colors, "rate", "effective rate λ/b")
    _lines(axes[1], layers, colors, "b", "b")
    if losses is not None:
        _losses(axes[2], losses)
    shaded = "; shaded: all of them" if len(layers) <= _BANDS else ""
    upper.suptitle(f"{owner}: the median of each layer's blocks{shaded}", fontsize=11)
    _legend(upper, axes[0], layers)
    color = "#b3261e" if troubles else "#1b6e3a"
    lower.text(0.02, 0.95, text, va="top", fontsize=9, color=color)
    return figure


def pixels(figure: Figure) -> np.ndarray[Any, Any]:
    """A figure as bytes, height × width × 3."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    rgba = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    return rgba[:, :, :3].copy()


def _lines(axes: Axes, layers: list[Layer], colors: list[Any], what: str, label: str) -> None:
    for i, (layer, color) in enumerate(zip(layers, colors, strict=True)):
        values = getattr(layer, what)
        marker = "o" if len(layer.steps) == 1 else None
        width = 3.5 - 2.2 * i / len(layers)  # Lines that coincide show as nested ones.
        axes.plot(layer.steps, values[:, 1], color=color, marker=marker, linewidth=width)
        if len(layers) <= _BANDS:
            band = {"color": color, "alpha": 0.15, "linewidth": 0}
            axes.fill_between(layer.steps, values[:, 0], values[:, 2], **band)
    _log_scale(axes)
    _tidy(axes, "step", label)


def _losses(axes: Axes, losses: list[float]) -> None:
    axes.plot(range(1, len(losses) + 1), losses, color="0.35", linewidth=0.9)
    finite = sorted(x for x in losses if math.isfinite(x))
    if finite and finite[0] > 0 and finite[-1] > 20 * finite[len(finite) // 2]:
        _log_scale(axes)
    _tidy(axes, "loss number", "training loss")


def _log_scale(axes: Axes) -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:.3g}" if high < 10 * low else "")


def _tidy(axes: Axes, below: str, title: str) -> None:
    axes.set_xlabel(below)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(figure: Any, axes: Axes, layers: list[Layer]) -> None:
    every = -(-len(layers) // _NAMED)
    lines = axes.get_lines()
    picked = [i for i in range(len(layers)) if i % every == 0 or i == len(layers) - 1]
    names = [textwrap.shorten(layers[i].name, 40, placeholder="…") for i in picked]
    few = "" if len(picked) == len(layers) else f" (some of {len(layers)})"
    figure.legend(
        [lines[i] for i in picked],
        names,
        title=f"layers{few}, from first to last",
        title_fontsize=8,
        loc="outside lower center",
        ncol=6,
        fontsize=8,
        frameon=False,
    )


def _text(troubles: list[str]) -> str:
    if not troubles:
        return "Nothing looks wrong."
    lines = (textwrap.fill(f"• {each}", _WIDTH, subsequent_indent="   ") for each in troubles)
    return "\n".join(lines)
