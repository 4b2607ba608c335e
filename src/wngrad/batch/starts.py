"""b₁, the two ways of Remark 2.2 and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any, Literal, cast

import numpy as np

from wngrad import rule
from wngrad.batch.arrays import Array, Kind

Name = Literal["number", "gradient", "lipschitz"]
BInit = float | Literal["gradient", "lipschitz"] | tuple[Literal["gradient", "lipschitz"], float]

_RULE = (
    '`b_init` must be a number > 0, "gradient" or "lipschitz", or ("gradient", C > 0) or '
    '("lipschitz", R >= 2)'
)


def parse(owner: str, value: Any) -> tuple[Name, float]:
    """What `b_init` asks for, and its number."""
    if isinstance(value, str) and value in ("gradient", "lipschitz"):
        value = (value, 2 if value == "lipschitz" else 1.0)
    name, number = value if isinstance(value, tuple) and len(value) == 2 else ("number", value)
    known = isinstance(name, str) and name in ("number", "gradient", "lipschitz")
    real = isinstance(number, (int, float, np.floating)) and not isinstance(number, bool)
    if not (known and real and math.isfinite(number) and number > 0):
        raise ValueError(f"{owner}: {_RULE}, got {value!r}.")
    if name == "lipschitz" and number < 2:
        raise ValueError(f"{owner}: {_RULE}, got {value!r}.")
    return cast(Name, name), float(number)


def first_b(
    owner: str,
    value: Any,
    x: Array,
    sq_norm: float,
    gradient: Callable[[Array], Array],
    kind: Kind,
    seed: int,
) -> tuple[float, int]:
    """b₁, and how many gradients it took."""
    name, number = parse(owner, value)
    if name == "number":
        return float(number), 0
    if name == "gradient":
        return rule.first_b(math.sqrt(sq_norm), 1.0, number), 0
    points = int(number)
    return sampled_lipschitz(owner, gradient, x, kind, points=points, seed=seed), points


def sampled_lipschitz(
    owner: str,
    gradient: Callable[[Array], Array],
    x: Array,
    kind: Kind,
    *,
    points: int = 2,
    radius: float = 1e-3,
    seed: int = 0,
) -> float:
    """max ‖∇f(u_j) − ∇f(u_k)‖/‖u_j − u_k‖ over points near x₁: at most L (Remark 2.2)."""
    rng = np.random.default_rng(seed)
    far = radius * max(1.0, math.sqrt(kind.sq_norm(x)))
    near = []
    for _ in range(points):
        d = rng.standard_normal(tuple(x.shape))
        u = x + kind.from_numpy(far / np.linalg.norm(d) * d, x)
        near.append((u, gradient(u)))
    slopes = [
        math.sqrt(kind.sq_norm(g - h) / kind.sq_norm(u - v))
        for (u, g), (v, h) in combinations(near, 2)
    ]
    largest = max(slopes)
    if not (math.isfinite(largest) and largest > 0):
        raise ValueError(
            f"{owner}: `b_init` 'lipschitz' needs a gradient that changes near `x0`, got a slope "
            f"of {largest!r}; give `b_init` as a number."
        )
    return largest
