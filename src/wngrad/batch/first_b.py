"""The first b: by hand, or in the two ways of Remark 2.2."""

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
from wngrad.batch.observer import Point

Name = Literal["number", "gradient", "lipschitz"]
BInit = float | Literal["gradient", "lipschitz"] | tuple[Literal["gradient", "lipschitz"], float]

Gradient = Callable[[Array], Array]

_RULE = (
    '`b_init` must be a number > 0, "gradient" or "lipschitz", or ("gradient", C > 0) or '
    '("lipschitz", R >= 2)'
)


def parse_b_init(owner: str, value: Any) -> tuple[Name, float]:
    """The name of the way to b₁, and its number: b₁ itself, C or R."""
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
    owner: str, b_init: Any, first: Point, gradient: Gradient, kind: Kind, seed: int
) -> tuple[float, int]:
    """b₁, and how many gradients it took."""
    name, number = parse_b_init(owner, b_init)
    if name == "number":
        return number, 0
    if not first.sq:
        return 1.0, 0  # the run ends here: any b will do
    if name == "gradient":
        return rule.first_b(math.sqrt(first.sq), 1.0, number), 0
    return sampled_lipschitz(owner, gradient, first.x, kind, int(number), seed), int(number)


def sampled_lipschitz(
    owner: str, gradient: Gradient, x: Array, kind: Kind, points: int, seed: int
) -> float:
    """max ‖∇f(u_j) − ∇f(u_k)‖/‖u_j − u_k‖ over points near x₁: at most L (Remark 2.2)."""
    rng = np.random.default_rng(seed)
    far = slopes.radius(1e-3, math.sqrt(kind.sq_norm(x)), arrays.epsilon(x))
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
