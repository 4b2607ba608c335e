"""Weight normalization as gradient descent in polar coordinates, where WNGrad comes from.

On the sphere ‖v‖² grows as WNGrad's b does: with P the projection onto v's complement,
‖v_{k+1}‖² = ‖v_k‖² + (η²/‖v_k‖²)‖P∇f‖² is `rule.next_b(‖v_k‖², ‖P∇f‖², η)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Array: TypeAlias = Any  # a NumPy array
Gradient = Callable[[Array], Array]


class Polar(NamedTuple):
    """A point x = r·v/‖v‖."""

    v: Array
    r: float

    @property
    def x(self) -> Array:
        return self.r / np.linalg.norm(self.v) * self.v


def projected(g: Array, v: Array) -> Array:
    """P_{v⊥}(g): g without its part along v."""
    return g - (g @ v) / (v @ v) * v


def polar_step(point: Polar, gradient: Gradient, eta: float) -> Polar:
    """One step in v and r (Eq. 3)."""
    v, r = point
    size, g = float(np.linalg.norm(v)), gradient(point.x)
    return Polar(
        v - eta * r / size * projected(g, v),  # v_{k+1} = v_k − η (r_k/‖v_k‖) P∇f
        float(r - eta * (g @ v) / size),  # r_{k+1} = r_k − η ⟨∇f, v_k/‖v_k‖⟩
    )


def sphere_step(v: Array, gradient: Gradient, eta: float) -> Array:
    """One step on the unit sphere, r = 1 (Eq. 4)."""
    size = np.linalg.norm(v)
    return v - eta / size * projected(gradient(v / size), v)


def iterate(step: Callable[..., Any], point: Any, gradient: Gradient, eta: float) -> Iterator[Any]:
    """The points of either descent, from the first."""
    while True:
        yield point
        point = step(point, gradient, eta)
