"""The learning-rate schedules of the paper's introduction, for `minimize_stochastic`."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]


def inverse_sqrt(c: float) -> Schedule:
    """η_k = c/√k  (Remark 3.2)."""
    return lambda k: c / math.sqrt(k)


def inverse(c: float) -> Schedule:
    """η_k = c/k, for strongly convex functions."""
    return lambda k: c / k


def hyperbolic(eta0: float, tau: float) -> Schedule:
    """η_k = η₀/(1 + k/τ)."""
    return lambda k: eta0 / (1 + k / tau)


def sqrt_hyperbolic(eta0: float, tau: float) -> Schedule:
    """η_k = η₀/(1 + √k/τ)."""
    return lambda k: eta0 / (1 + math.sqrt(k) / tau)
