"""The figure of `wngrad certify`: b_k and ‖∇f‖² with the paper's bounds drawn in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wngrad.batch import bounds
from wngrad.batch.lemmas import settling

if TYPE_CHECKING:
    from wngrad.batch.result import Result

COLORS = ("#0b6e99", "#d1495b", "#e0a100", "#3a7d44", "#7b5ea7", "#8c8c8c")


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def draw(
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
    for ax, height, text in ((right, named[0][1].tol, "ε"), (left, lipschitz, "L")):
        if not height:  # ε = 0 has no place on a logarithmic axis
            continue
        ax.axhline(height, color="black", linewidth=1)
        beside = {"xycoords": ax.get_yaxis_transform(), "textcoords": "offset points"}
        ax.annotate(text, (1, height), xytext=(4, 0), va="center", **beside)
    left.set(xscale="log", yscale="log", xlabel="k", ylabel="b_k")
    left.set_title("b; dashed, Lemma 2.5's limit")
    right.set(xscale="log", yscale="log", xlabel="k", ylabel="‖∇f(x_k)‖²")
    right.set_title("gradient; dashed, Theorem 2.3's limit")
    for ax in (left, right):
        ax.spines[["top", "right"]].set_visible(False)
    handles, _ = left.get_legend_handles_labels()
    below = {"loc": "outside lower center", "ncols": 5, "frameon": False, "fontsize": 8}
    fig.legend(handles=handles, **below)
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
    if res.start.b < lipschitz and not bounds.at_least(res.start.b, norm):
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
