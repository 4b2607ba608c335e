"""A zoo of problems with known gradients, minima and Lipschitz constants.

Shared by the tests, the docs and the command line. `ZOO` has one of each, with a standard start;
the functions make others.

>>> from wngrad.problems import ZOO
>>> booth = ZOO["booth"]()
>>> booth.f(booth.x_star), booth.lipschitz
(0.0, 18.0)
"""

# ruff: noqa: E731, a formula reads best as a lambda with a name
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = Any  # a NumPy array


@dataclass(frozen=True, slots=True)
class Problem:
    """A function to minimize, and what is known about it."""

    name: str
    f: Callable[[Array], float]
    grad: Callable[[Array], Array]
    x0: Array  # a standard start
    f_star: float | None = None  # a lower bound that f attains, or approaches
    x_star: Array | None = None  # a global minimizer
    lipschitz: float | None = None  # of the gradient, everywhere, where there is such a number
    convex: bool = False
    # (x, generator) -> a stochastic (sub)gradient, for sums
    sample: Callable[[Array, np.random.Generator], Array] | None = None


def quadratic(spectrum: Sequence[float], *, seed: int | None = None) -> Problem:
    """½ xᵀAx with A of this spectrum, diagonal or (with a seed) in a random basis; L = max."""
    s = np.asarray(spectrum, dtype=float)
    if not (s.size and ((s >= 0) & np.isfinite(s)).all()):
        raise ValueError(f"quadratic: `spectrum` must hold finite numbers >= 0, got {spectrum!r}.")
    n, a = s.size, np.diag(s)
    if seed is not None:
        q, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))
        a = q @ a @ q.T
    f = lambda x: float(x @ a @ x) / 2
    largest = float(s.max())
    return Problem("quadratic", f, lambda x: a @ x, np.ones(n), 0.0, np.zeros(n), largest, True)


# ---------------------------------------------------------------- means over rows of data


def _design(rows: int, columns: int, seed: int) -> tuple[Array, Array]:
    """A random matrix and a point for its solution."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, columns)), rng.standard_normal(columns)


def _mean_over_rows(
    name: str,
    a: Array,
    y: Array,
    mean: Callable[[Array], Any],
    slope: Callable[[Array], Array],
    curvature: float | None,
    **known: Any,
) -> Problem:
    """The mean of φ(r) over the residuals r = Ax − y, with φ' and max φ''; L = φ''·λ_max(AᵀA)/m."""
    rows = len(a)

    def sample(x: Array, rng: np.random.Generator) -> Array:
        i = int(rng.integers(rows))
        return slope(a[i] @ x - y[i]) * a[i]

    return Problem(
        name,
        f=lambda x: float(mean(a @ x - y)),
        grad=lambda x: a.T @ slope(a @ x - y) / rows,
        lipschitz=None if curvature is None else curvature * _largest(a) / rows,
        sample=sample,
        **known,
    )


def least_squares(rows: int = 40, columns: int = 10, *, seed: int = 0) -> Problem:
    """‖Ax − y‖²/(2m) with noise in y; L = λ_max(AᵀA)/m."""
    a, x = _design(rows, columns, seed)
    y = a @ x + np.random.default_rng(seed + 1).standard_normal(rows)
    best = np.linalg.lstsq(a, y, rcond=None)[0]
    mean: Callable[[Array], Any] = lambda r: r @ r / (2 * rows)
    known = {"x0": np.zeros(columns), "f_star": float(mean(a @ best - y)), "x_star": best}
    return _mean_over_rows("least-squares", a, y, mean, lambda r: r, 1.0, convex=True, **known)


def huber(rows: int = 40, columns: int = 10, *, delta: float = 1.0, seed: int = 0) -> Problem:
    """Mean Huber loss of Ax − y, where y is attained; L = λ_max(AᵀA)/m."""
    a, best = _design(rows, columns, seed)

    def mean(r: Array) -> Any:
        size = np.abs(r)
        return np.where(size <= delta, size**2 / 2, delta * (size - delta / 2)).mean()

    slope = lambda r: np.clip(r, -delta, delta)
    known = {"x0": best + 5.0, "f_star": 0.0, "x_star": best, "convex": True}
    return _mean_over_rows("huber", a, a @ best, mean, slope, 1.0, **known)


def geman_mcclure(rows: int = 40, columns: int = 10, *, seed: int = 0) -> Problem:
    """Mean of r²/(1 + r²), r = Ax − y, where y is attained: not convex; L = 2·λ_max(AᵀA)/m."""
    a, best = _design(rows, columns, seed)
    mean = lambda r: (r**2 / (1 + r**2)).mean()
    slope = lambda r: 2 * r / (1 + r**2) ** 2
    known = {"x0": best + 0.3, "f_star": 0.0, "x_star": best}
    return _mean_over_rows("geman-mcclure", a, a @ best, mean, slope, 2.0, **known)


def softplus(rows: int = 40, columns: int = 10, *, seed: int = 0) -> Problem:
    """Mean of log(1 + exp(aᵀx)) + log(1 + exp(−aᵀx)): least at 0; L = λ_max(AᵀA)/(2m)."""
    a, _ = _design(rows, columns, seed)
    mean = lambda z: (np.logaddexp(0, z) + np.logaddexp(0, -z)).mean()
    slope = lambda z: _sigmoid(z) - _sigmoid(-z)
    known = {"x0": np.full(columns, 3.0), "f_star": 2 * float(np.log(2)), "convex": True}
    known["x_star"] = np.zeros(columns)
    return _mean_over_rows("softplus", a, np.zeros(rows), mean, slope, 0.5, **known)


def absolute(rows: int = 40, columns: int = 10, *, seed: int = 0) -> Problem:
    """Mean |Ax − y|, where y is attained: convex and not smooth, for Theorem 3.1.

    A stochastic subgradient is a row of A with a sign, so its norm is never below the smallest
    row's: the theorem's γ.
    """
    a, best = _design(rows, columns, seed)
    mean = lambda r: np.abs(r).mean()
    sign = lambda r: np.where(r >= 0, 1.0, -1.0)  # never 0: a kink has two sides
    known = {"x0": np.zeros(columns), "f_star": 0.0, "x_star": best, "convex": True}
    return _mean_over_rows("absolute", a, a @ best, mean, sign, None, **known)


def logistic(rows: int = 60, columns: int = 5, *, l2: float = 0.0, seed: int = 0) -> Problem:
    """Logistic regression, mean log(1 + exp(−y·aᵀx)) + l2‖x‖²/2; L = λ_max(AᵀA)/(4m) + l2."""
    a, x = _design(rows, columns, seed)
    noise = 2 * np.random.default_rng(seed + 1).standard_normal(rows)
    ya = np.where(a @ x + noise > 0, 1.0, -1.0)[:, None] * a

    def f(x: Array) -> float:
        return float(np.logaddexp(0, -(ya @ x)).mean() + l2 * (x @ x) / 2)

    def grad(x: Array) -> Array:
        return -ya.T @ _sigmoid(-(ya @ x)) / rows + l2 * x

    def hessian(x: Array) -> Array:
        s = _sigmoid(ya @ x)
        return (ya.T * (s * (1 - s))) @ ya / rows + l2 * np.eye(columns)

    best = _newton(grad, hessian, np.zeros(columns)) if l2 else None
    lowest = 0.0 if best is None else f(best)  # without l2 only the bound is known
    name, lipschitz = "logistic-l2" if l2 else "logistic", _largest(a) / (4 * rows) + l2
    return Problem(name, f, grad, np.zeros(columns), lowest, best, lipschitz, convex=True)


# ---------------------------------------------------------------- classic functions


def rosenbrock() -> Problem:
    """(1 − x)² + 100(y − x²)²: a curved valley."""

    def f(x: Array) -> float:
        return float((1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2)

    def grad(x: Array) -> Array:
        across = x[1] - x[0] ** 2
        return np.array([-2 * (1 - x[0]) - 400 * x[0] * across, 200 * across])

    return Problem("rosenbrock", f, grad, np.array([-1.2, 1.0]), 0.0, np.ones(2))


def styblinski_tang(n: int = 2) -> Problem:
    """½ Σ(x⁴ − 16x² + 5x): four basins in the plane, one of them deepest."""
    best = -2.903534027771177
    f = lambda x: float((x**4 - 16 * x**2 + 5 * x).sum()) / 2
    grad = lambda x: (4 * x**3 - 32 * x + 5) / 2
    lowest = n * (best**4 - 16 * best**2 + 5 * best) / 2
    return Problem("styblinski-tang", f, grad, np.full(n, -5.0), lowest, np.full(n, best))


def beale() -> Problem:
    """Σ (c_i − x(1 − yⁱ))² with c = 1.5, 2.25, 2.625."""
    c, power = np.array([1.5, 2.25, 2.625]), np.array([1, 2, 3])

    def residual(x: Array) -> Array:
        return c - x[0] * (1 - x[1] ** power)

    def grad(x: Array) -> Array:
        r = residual(x)
        return 2 * np.array(
            [-(r * (1 - x[1] ** power)).sum(), (r * x[0] * power * x[1] ** (power - 1)).sum()]
        )

    f = lambda x: float((residual(x) ** 2).sum())
    return Problem("beale", f, grad, np.ones(2), 0.0, np.array([3.0, 0.5]))


def booth() -> Problem:
    """(x + 2y − 7)² + (2x + y − 5)²: a quadratic with eigenvalues 2 and 18."""
    f = lambda x: float((x[0] + 2 * x[1] - 7) ** 2 + (2 * x[0] + x[1] - 5) ** 2)
    grad = lambda x: np.array([10 * x[0] + 8 * x[1] - 34, 8 * x[0] + 10 * x[1] - 38])
    return Problem("booth", f, grad, np.zeros(2), 0.0, np.array([1.0, 3.0]), 18.0, convex=True)


def mccormick() -> Problem:
    """sin(x + y) + (x − y)² − 1.5x + 2.5y + 1: L = 4, and no lower bound on the whole plane.

    The usual minimum, −1.9133 at (−0.547, −1.547), is the least within [−1.5, 4] × [−3, 4] only.
    """

    def f(x: Array) -> float:
        return float(np.sin(x[0] + x[1]) + (x[0] - x[1]) ** 2 - 1.5 * x[0] + 2.5 * x[1] + 1)

    def grad(x: Array) -> Array:
        wave, pull = np.cos(x[0] + x[1]), 2 * (x[0] - x[1])
        return np.array([wave + pull - 1.5, wave - pull + 2.5])

    return Problem("mccormick", f, grad, np.zeros(2), lipschitz=4.0)


def himmelblau() -> Problem:
    """(x² + y − 11)² + (x + y² − 7)²: four minima, all at 0."""

    def residuals(x: Array) -> tuple[Any, Any]:
        return x[0] ** 2 + x[1] - 11, x[0] + x[1] ** 2 - 7

    def grad(x: Array) -> Array:
        u, v = residuals(x)
        return np.array([4 * x[0] * u + 2 * v, 2 * u + 4 * x[1] * v])

    f = lambda x: float(sum(r**2 for r in residuals(x)))
    return Problem("himmelblau", f, grad, np.zeros(2), 0.0, np.array([3.0, 2.0]))


ZOO: dict[str, Callable[[], Problem]] = {
    "quadratic": partial(quadratic, (1.0, 3.0, 10.0, 100.0)),
    "least-squares": least_squares,
    "logistic": logistic,
    "logistic-l2": partial(logistic, l2=0.1),
    "huber": huber,
    "softplus": softplus,
    "geman-mcclure": geman_mcclure,
    "absolute": absolute,
    "rosenbrock": rosenbrock,
    "styblinski-tang": styblinski_tang,
    "beale": beale,
    "booth": booth,
    "mccormick": mccormick,
    "himmelblau": himmelblau,
}


def _largest(a: Array) -> float:
    """λ_max(AᵀA)."""
    return float(np.linalg.norm(a, 2) ** 2)


def _sigmoid(z: Array) -> Array:
    return np.exp(-np.logaddexp(0, -z))


def _newton(grad: Callable[[Array], Array], hessian: Callable[[Array], Array], x: Array) -> Array:
    """The minimizer of a strongly convex function, to rounding."""
    for _ in range(50):
        x = x - np.linalg.solve(hessian(x), grad(x))
    return x
