"""The iterates of Algorithms 1 and 2, of their comparators and of schedules."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, NamedTuple

from wngrad import rule

Update = Callable[[float, float, int], float]  # (b_{j-1}, ‖g_j‖², j) -> b_j
Evaluate = Callable[[Any], tuple[Any, Any]]  # x -> (f(x) or None where it is not needed, g)

# How b takes in λ²‖g_j‖², here with λ = 1.
UPDATES: dict[str, Update] = {
    "wngrad": lambda b, sq, j: rule.next_b(b, sq, 1.0),
    "adagrad-norm": lambda b, sq, j: rule.adagrad_norm(b, sq, 1.0),
    "constant": lambda b, sq, j: b,  # gradient descent at the rate 1/b
}


class Point(NamedTuple):
    """A point of a run."""

    x: Any
    g: Any  # ∇f(x), or a stochastic gradient
    sq: float  # ‖g‖²
    value: Any = None  # f(x), where it came with the gradient or somebody needs it
    b: float = math.nan  # which divides the step from here


def iterates(
    start: Point, evaluate: Evaluate, sq_norm: Callable[[Any], float], next_b: Update, name: str
) -> Iterator[tuple[Any, Any, float, Any, float]]:
    """x₁, x₂, … and what belongs to them; ends before a point that is not finite.

    Each comes as a plain tuple of a `Point`'s five parts, which takes less time to make.

    Args:
        start: x₁, with b₁.
        evaluate: f and its gradient, or one that stands in for it.
        sq_norm: ‖g‖² of a gradient.
        next_b: how b takes it in.
        name: the function that gives the gradient, for the error where its shape changes.
    """
    x, g, sq, value, b = start
    shape = g.shape
    yield x, g, sq, value, b
    for j in count(2):
        x = rule.step(x, g, b)  # x_j ← x_{j-1} − g_{j-1}/b_{j-1}
        value, g = evaluate(x)
        if g.shape != shape:
            raise ValueError(f"`{name}` returned the shape {tuple(g.shape)}")
        sq = sq_norm(g)
        b = next_b(b, sq, j)  # b_j ← b_{j-1} + ‖g_j‖²/b_{j-1}
        if not (sq < math.inf and b < math.inf and (value is None or abs(value) < math.inf)):
            return
        yield x, g, sq, value, b
