"""How b takes in λ²‖∇f(x_j)‖², here with λ = 1: WNGrad and its comparators."""

from __future__ import annotations

from collections.abc import Callable

from wngrad import rule

Update = Callable[[float, float, float], float]  # (b, ‖∇f‖², λ) -> the next b

UPDATES: dict[str, Update] = {
    "wngrad": rule.next_b,
    "adagrad-norm": rule.adagrad_norm,
    "constant": lambda b, sq, lam: b,  # gradient descent at the rate 1/b
}
