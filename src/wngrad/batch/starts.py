"""b₁, the two ways of Remark 2.2 and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from numbers import Integral, Real
from typing import Any, Literal, cast

import numpy as np

from wngrad import rule, slopes
from wngrad.batch import arrays
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
        return ("gradient", 1.0) if value == "gradient" else ("lipschitz", 2)
    name, number = "number", value
    if isinstance(value, tuple) and len(value) == 2 and value[0] in ("gradient", "lipschitz"):
        name, number = value
    real = isinstance(number, Real) and not isinstance(number, bool)
    few = name == "lipschitz" and not (isinstance(number, Integral) and int(number) >= 2)
    if not real or few or not (math.isfinite(number) and number > 0):
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
        return number, 0
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
    relative: float = 1e-3,
    seed: int = 0,
) -> float:
    """max ‖∇f(u_j) − ∇f(u_k)‖/‖u_j − u_k‖ over points near x₁: at most L (Remark 2.2)."""
    rng = np.random.default_rng(seed)
    far = slopes.radius(relative, math.sqrt(kind.sq_norm(x)), arrays.epsilon(x))
    near = []
    for _ in range(points):
        d = rng.standard_normal(tuple(x.shape))
        # At different distances: on a line, points of one distance would coincide.
        d *= far * rng.uniform(0.5, 1.0) / np.linalg.norm(d)
        u = x + kind.from_numpy(d, x)
        near.append((u, kind.copy(gradient(u))))
    pairs = (
        (math.sqrt(kind.sq_norm(u - v)), math.sqrt(kind.sq_norm(g - h)))
        for (u, g), (v, h) in combinations(near, 2)
    )
    return slopes.largest(owner, "b_init", pairs)
