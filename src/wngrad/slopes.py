"""Remark 2.2's sampled Lipschitz constant: what every backend's version of it shares."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any


def radius(relative: float, norm: float, eps: float) -> float:
    """How far from the start the points lie: in proportion to it, and not lost in rounding."""
    return max(relative, 8 * eps) * max(1.0, norm)


def largest(
    owner: str, argument: str, near: Sequence[tuple[Any, Any]], norm: Callable[[Any], float]
) -> float:
    """max ‖∇f(u_j) − ∇f(u_k)‖/‖u_j − u_k‖ ≤ L, from points and the gradients there."""
    slopes = [
        norm(g - h) / apart
        for (u, g), (v, h) in combinations(near, 2)
        if (apart := norm(u - v)) > 0
    ]
    if not slopes or not all(map(math.isfinite, slopes)) or max(slopes) == 0:
        raise ValueError(
            f"{owner}: `{argument}` needs a finite gradient that changes near the start, got "
            f"slopes of {slopes!r}; give `b_init` as a number."
        )
    return max(slopes)
