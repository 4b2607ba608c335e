"""The paper's lemmas and theorems as numbers one can evaluate.

Each function checks the hypotheses it can see and raises ValueError if one fails. What it cannot
see, that f has an L-Lipschitz gradient and is bounded below by f*, is the caller's word.

The letters: `lipschitz` L, `gap` f(x₁) − f*, `b1` b₁, `grad_norm` ‖∇f(x₁)‖, `tol` ε,
`grad_bound` G, `grad_floor` γ, `diameter` D.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import ParamSpec

import numpy as np

_P = ParamSpec("_P")

# b₁ may be rounded: as b₁ a norm may come out short of itself, and so may 1/(1/L).
_GRACE = 1e-15


def _infinite_beyond_floats(bound: Callable[_P, float]) -> Callable[_P, float]:
    """∞ for a bound too large for a float: Python raises where a power overflows, or a product of
    two positive numbers is 0 and divides."""

    @functools.wraps(bound)
    def within(*args: _P.args, **kwargs: _P.kwargs) -> float:
        try:
            return bound(*args, **kwargs)
        except (OverflowError, ZeroDivisionError):
            return math.inf

    return within


@_infinite_beyond_floats
def lemma_2_1_steps(*, lipschitz: float, gap: float, delta: float, tol: float) -> float:
    """Constant steps η = δ/L, δ ≤ 1: ‖∇f‖² ≤ ε after T = 2L(f(x₁) − f*)/(δε) points (Lemma 2.1)."""
    _positive("lemma_2_1_steps", lipschitz=lipschitz, delta=delta, tol=tol)
    _nonnegative("lemma_2_1_steps", gap=gap)
    if delta > 1:
        raise ValueError(f"lemma_2_1_steps: `delta` must be <= 1, got {delta!r}.")
    return 2 * lipschitz * gap / (delta * tol)


@_infinite_beyond_floats
def theorem_2_3_steps(
    *, lipschitz: float, gap: float, b1: float, grad_norm: float, tol: float
) -> float:
    """‖∇f(x_k)‖² ≤ ε for some k ≤ ⌈T⌉ (Theorem 2.3).

    Case 1, b₁ ≥ L:      T = 2(f(x₁) − f*)(b₁ + 8(f(x₁) − f*))/ε.
    Case 2, b₁ = δL < L: T = 1 + L²(1−δ)/ε + 16(f(x₁) − f* + (3/16 + 5/(8δ))L)²/ε.

    Case 2 needs b₁ ≥ ‖∇f(x₁)‖; case 1 does not use it.
    """
    _positive("theorem_2_3_steps", tol=tol)
    offset, constant = _theorem_2_3(lipschitz, gap, b1, grad_norm)
    return offset + constant / tol


@_infinite_beyond_floats
def theorem_2_3_sq_norm(
    *, lipschitz: float, gap: float, b1: float, grad_norm: float, points: int
) -> float:
    """Theorem 2.3 solved for ε: a bound on min ‖∇f(x_k)‖² over the first `points` points."""
    offset, constant = _theorem_2_3(lipschitz, gap, b1, grad_norm)
    return constant / (points - offset) if points > offset else math.inf


def _theorem_2_3(lipschitz: float, gap: float, b1: float, grad_norm: float) -> tuple[float, float]:
    """(offset, constant) of T = offset + constant/ε."""
    _positive("theorem_2_3", lipschitz=lipschitz, b1=b1)
    _nonnegative("theorem_2_3", gap=gap, grad_norm=grad_norm)
    if b1 >= lipschitz:
        return 0.0, 2 * gap * (b1 + 8 * gap)
    _start("theorem_2_3", b1, grad_norm)
    delta = b1 / lipschitz
    reach = gap + (3 / 16 + 5 / (8 * delta)) * lipschitz
    return 1.0, lipschitz**2 * (1 - delta) + 16 * reach**2


@_infinite_beyond_floats
def lemma_2_4_points(*, lipschitz: float, b1: float, tol: float) -> float:
    """By N = max(1, ⌈L(L − b₁)/ε⌉ + 1), some ‖∇f(x_k)‖² ≤ ε or b_N ≥ L (Lemma 2.4)."""
    _positive("lemma_2_4_points", lipschitz=lipschitz, b1=b1, tol=tol)
    return max(1.0, float(np.ceil(lipschitz * (lipschitz - b1) / tol)) + 1)


@_infinite_beyond_floats
def lemma_2_5_b(*, b_k0: float, gap_k0: float) -> float:
    """b_k ≤ b_{k0} + 8(f(x_{k0}) − f*) for all k ≥ k0, the first with b_{k0} ≥ L (Lemma 2.5)."""
    _positive("lemma_2_5_b", b_k0=b_k0)
    _nonnegative("lemma_2_5_b", gap_k0=gap_k0)
    return b_k0 + 8 * gap_k0


@_infinite_beyond_floats
def lemma_2_5_f(*, f1: float, lipschitz: float, b1: float, grad_norm: float) -> float:
    """f(x_{k0}) ≤ f(x₁) + L²/(2b₁) if k0 > 1 (Lemma 2.5)."""
    _positive("lemma_2_5_f", lipschitz=lipschitz, b1=b1)
    _start("lemma_2_5_f", b1, grad_norm)
    return f1 + lipschitz**2 / (2 * b1)


@_infinite_beyond_floats
def lemma_2_6_b(*, lipschitz: float, b1: float, grad_norm: float) -> float:
    """b_{k0} ≤ 3L + 2L²/b₁ if k0 > 1 (Lemma 2.6; the paper leaves b₁ ≥ ‖∇f(x₁)‖ unsaid)."""
    _positive("lemma_2_6_b", lipschitz=lipschitz, b1=b1)
    _start("lemma_2_6_b", b1, grad_norm)
    return 3 * lipschitz + 2 * lipschitz**2 / b1


def lemma_3_3_b(*, grad_floor: float, k: int) -> float:
    """b_k ≥ γ√k, if b₁ ≥ ‖g₁‖ and all ‖g_k‖ ≥ γ: what the proof of Theorem 3.1 uses.

    Note:
        The lemma as printed, √(2ak) ≤ t_k, is false at k = 1.
    """
    _nonnegative("lemma_3_3_b", grad_floor=grad_floor)
    _positive("lemma_3_3_b", k=k)
    return grad_floor * math.sqrt(k)


@_infinite_beyond_floats
def theorem_3_1_gap(
    *, grad_bound: float, grad_floor: float, diameter: float, b1: float, distance: float, k: int
) -> float:
    """f(x̄_k) − f* ≤ G²(D² + 2)/(γ√k) + b₁‖x₁ − x*‖²/(2k), in expectation (Theorem 3.1).

    For convex f with E‖g‖² ≤ G², ‖g_k‖ ≥ γ, E‖x_k − x*‖² ≤ D² and b₁ ≥ ‖g₁‖.
    """
    _positive("theorem_3_1_gap", grad_floor=grad_floor, b1=b1, k=k)
    _nonnegative("theorem_3_1_gap", grad_bound=grad_bound, diameter=diameter, distance=distance)
    if grad_floor > grad_bound:
        raise ValueError(
            f"theorem_3_1_gap: `grad_floor` must be <= `grad_bound`, got {grad_floor!r} > "
            f"{grad_bound!r}."
        )
    noise = grad_bound**2 * (diameter**2 + 2) / (grad_floor * math.sqrt(k))
    return noise + b1 * distance**2 / (2 * k)


def at_least(b: float, bound: float) -> bool:
    """b ≥ ‖∇f(x₁)‖, or b ≥ L, with a rounding's grace."""
    return b >= bound * (1 - _GRACE)


def _positive(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not value > 0:  # also catches nan
            raise ValueError(f"{owner}: `{name}` must be > 0, got {value!r}.")


def _nonnegative(owner: str, **values: float) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{owner}: `{name}` must be >= 0, got {value!r}.")


def _start(owner: str, b1: float, grad_norm: float) -> None:
    if not at_least(b1, grad_norm):
        raise ValueError(f"{owner}: `b1` must be >= ‖∇f(x₁)‖ = {grad_norm!r}, got {b1!r}.")
