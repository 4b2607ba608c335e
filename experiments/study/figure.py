"""The study's figure: steps to tolerance over the starting b."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.study.study import Row

COLORS = ("#0b6e99", "#d1495b", "#e0a100")
LABELS = {"wngrad": "WNGrad", "adagrad-norm": "AdaGrad-Norm", "constant": "constant step, b = 1/η"}


def draw(rows: Sequence[Row], max_steps: int, path: Path) -> None:
    """Steps to tolerance against the starting divisor, a panel for each problem."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row.problem for row in rows))
    columns = math.ceil(len(names) / 2)
    fig, axes = plt.subplots(2, columns, figsize=(12, 6.2), layout="constrained", sharey=True)
    for ax, name in zip(axes.flat, names, strict=False):
        _panel(ax, [r for r in rows if r.problem == name], max_steps)
        ax.set(xscale="log", yscale="log", title=name)
        ax.axvline(1, color="#bbbbbb", linewidth=1, linestyle=":")
        ax.spines[["top", "right"]].set_visible(False)
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    for ax in axes[-1]:
        ax.set_xlabel("starting b over L")
    for ax in axes[:, 0]:
        ax.set_ylabel("steps to tolerance")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    title = "× diverged   ▲ not within the limit   dotted: b = L"
    fig.legend(handles, labels, title=title, loc="outside lower center", ncols=5, frameon=False)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def _panel(ax: Any, rows: Sequence[Row], max_steps: int) -> None:
    for i, ((method, label), color) in enumerate(zip(LABELS.items(), COLORS, strict=False)):
        above = max_steps * 1.35 ** (i + 1)  # each method's own line for what did not arrive
        runs = [r for r in rows if r.method == method]
        # A constant step η is drawn at b/L = 1/(ηL), so that all methods share an axis.
        power = -1 if method == "constant" else 1
        at = sorted((r.value**power, r.status, r.steps) for r in runs)
        done = [(v, max(steps, 1)) for v, status, steps in at if status == "converged"]
        lost = [v for v, status, _ in at if status == "diverged"]
        late = [v for v, status, _ in at if status not in ("converged", "diverged")]
        ax.plot([v for v, _ in done], [n for _, n in done], "o-", color=color, label=label, ms=3)
        ax.plot(lost, [above] * len(lost), "x", color=color, ms=5)
        ax.plot(late, [above] * len(late), "^", color=color, ms=4)
    starts = [r for r in rows if r.method.startswith("wngrad, ")]
    for row, marker, text in zip(starts, "*D", ("‖∇f(x₁)‖", "sampled slopes"), strict=False):
        high = row.steps if row.status == "converged" else max_steps * 1.35
        ax.plot([row.value], [high], marker, color="black", ms=7, label=f"WNGrad, b₁ = {text}")
