"""Pictures of runs: b_k and ‖∇f‖² with the paper's bounds drawn in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wngrad.batch import bounds
from wngrad.batch.certificate import settling

if TYPE_CHECKING:
    from wngrad.batch.result import Result
    from wngrad.batch.study import Row

COLORS = ("#0b6e99", "#d1495b", "#e0a100", "#3a7d44", "#7b5ea7", "#8c8c8c")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def runs(
    named: Sequence[tuple[str, Result]],
    title: str,
    lipschitz: float | None,
    f_star: float | None,
    path: Path,
) -> None:
    """b_k on the left, ‖∇f(x_k)‖² on the right, one colour for each b₁."""
    plt = _pyplot()
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for (name, res), color in zip(named, COLORS * len(named), strict=False):
        trace = res.trace
        assert trace is not None
        k = np.arange(1, len(trace) + 1)
        left.plot(k, trace.b, color=color, label=f"b₁ = {name}")
        right.plot(k, np.maximum(trace.sq_norm, 1e-300), color=color, linewidth=1)
        if lipschitz is not None and f_star is not None:
            _bounds(left, right, res, k, lipschitz, f_star, color)
    marks = [(right, named[0][1].tol, "ε"), *([(left, lipschitz, "L")] if lipschitz else [])]
    for ax, height, text in marks:
        ax.axhline(height, color="black", linewidth=1)
        at = ax.get_yaxis_transform()  # x as a fraction of the panel
        ax.annotate(text, (0.98, height), xycoords=at, xytext=(0, 3), textcoords="offset points")
    left.set(xscale="log", yscale="log", xlabel="k", ylabel="b_k")
    left.set_title("b; dashed, Lemma 2.5's limit")
    right.set(xscale="log", yscale="log", xlabel="k", ylabel="‖∇f(x_k)‖²")
    right.set_title("gradient; dashed, Theorem 2.3's limit")
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    left.legend(frameon=False, fontsize=8)
    fig.suptitle(title)
    fig.savefig(path, dpi=130)
    plt.close(fig)


def _bounds(
    left: Any, right: Any, res: Result, k: Any, lipschitz: float, f_star: float, color: str
) -> None:
    trace, norm = res.trace, math.sqrt(res.start.sq_norm)
    assert trace is not None
    settled = settling(trace, lipschitz, f_star)
    if settled is not None:
        k0, limit = settled
        left.hlines(limit, k[k0], k[-1] + 1, color=color, linestyle="--", linewidth=1)
    if res.start.b < lipschitz and not bounds.well_started(res.start.b, norm):
        return  # Theorem 2.3 does not speak of such a start.
    limits = [
        bounds.theorem_2_3_sq_norm(
            lipschitz=lipschitz,
            gap=max(0.0, res.start.fun - f_star),
            b1=res.start.b,
            grad_norm=norm,
            points=int(n),
        )
        for n in k
    ]
    right.plot(k, limits, color=color, linestyle="--", linewidth=1)


LABELS = {"wngrad": "WNGrad", "adagrad-norm": "AdaGrad-Norm", "constant": "constant step, b = 1/η"}


def study(rows: Sequence[Row], max_steps: int, path: Path) -> None:
    """Steps to tolerance against the starting divisor, a panel for each problem."""
    plt = _pyplot()
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
        mine = [r for r in rows if r.method == method]
        # A constant step η is drawn at b/L = 1/(ηL), so that all methods share an axis.
        at = sorted(
            (1 / r.value if method == "constant" else r.value, r.status, r.steps) for r in mine
        )
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
