"""Algorithm 2: stochastic gradients, the averaged iterate, and the schedules it competes with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from wngrad import rule
from wngrad.batch import arrays, starts
from wngrad.batch.certificate import Certificate, certify_stochastic
from wngrad.batch.minimizer import UPDATES
from wngrad.batch.result import Status

# (x, random generator) -> a gradient g with E g = ∇f(x)
Oracle = Callable[[Any, np.random.Generator], Any]
# k = 1, 2, … -> η_k
Schedule = Callable[[int], float]

_MESSAGES = {
    Status.CONVERGED: "f(x) ≤ ε was reached.",
    Status.STEP_LIMIT: "All steps were taken.",
    Status.NOT_FINITE: "A gradient was not finite at the next point; x is the last good one.",
}


@dataclass(frozen=True, slots=True)
class StochasticResult:
    """A finished stochastic run."""

    x: Any  # the last iterate
    x_mean: Any  # x̄_k, the mean of x₁ … x_k
    fun: float | None  # f at x, if f was given
    fun_mean: float | None  # f at x̄_k
    nit: int
    status: Status
    message: str
    b: float
    b_first: float
    grad_first: float  # ‖g₁‖
    grad_min: float
    grad_max: float
    method: str

    @property
    def success(self) -> bool:
        return self.status is Status.CONVERGED

    def certify(self, **known: float) -> Certificate:
        """Section 3's inequalities; see `wngrad.batch.certificate.certify_stochastic`."""
        return certify_stochastic(self, **known)


def minimize_stochastic(
    oracle: Oracle,
    x0: Any,
    *,
    steps: int,
    seed: int = 0,
    b_init: starts.BInit = "gradient",
    schedule: Schedule | None = None,
    method: str = "wngrad",
    f: Callable[[Any], Any] | None = None,
    tol: float = -math.inf,
    check_every: int = 1,
) -> StochasticResult:
    """Stochastic WNGrad (Alg. 2): the batch rule, fed with noisy gradients.

    Args:
        oracle: takes x and a NumPy random generator, returns a stochastic gradient.
        x0: x₁: a NumPy array, a torch tensor or a JAX array.
        steps: how many.
        seed: of the generator.
        b_init: b₁, a number or "gradient" for ‖g₁‖.
        schedule: instead of learning the rate, use η_k of this function; see `schedules`.
        method: "wngrad" or "adagrad-norm".
        f: the function, to stop by and to report.
        tol: ε: stop when f(x) ≤ ε.
        check_every: look at f once in so many steps.

    Returns:
        A `StochasticResult` with the last and the averaged iterate.

    Example:
        >>> noisy = lambda x, rng: 2 * (x - 3 + rng.standard_normal(2))
        >>> res = minimize_stochastic(noisy, [0.0, 0.0], steps=20_000)
        >>> bool(abs(res.x_mean - 3).max() < 0.1)
        True
    """
    owner = "minimize_stochastic"
    _check(owner, steps, schedule, method, b_init, check_every)
    kind, x = arrays.start(owner, x0)
    rng = np.random.default_rng(seed)
    update = UPDATES[method]
    g = oracle(x, rng)
    if tuple(g.shape) != tuple(x.shape):
        raise ValueError(
            f"{owner}: `oracle` must return an array of the shape of `x0`, {tuple(x.shape)}, "
            f"got {tuple(g.shape)}."
        )
    sq = kind.sq_norm(g)
    first = math.sqrt(sq)
    if schedule is not None:
        b = 1 / schedule(1)
    else:
        name, number = starts.parse(owner, b_init)
        b = number if name == "number" else rule.first_b(first, 1.0, number)
    if not (math.isfinite(sq) and b > 0):
        raise ValueError(f"{owner}: `oracle` must give a finite first gradient, not 0, got {g!r}.")
    begin, low, high, mean, nit = b, first, first, x, 0
    status = Status.STEP_LIMIT
    while nit < steps:
        if f is not None and nit % check_every == 0 and float(f(x)) <= tol:
            status = Status.CONVERGED
            break
        new = rule.step(x, g, b)  # x_j ← x_{j-1} − g_{j-1}/b_{j-1}
        new_g = oracle(new, rng)
        new_sq = kind.sq_norm(new_g)
        if not math.isfinite(new_sq):
            status = Status.NOT_FINITE
            break
        nit += 1
        # b_j ← b_{j-1} + ‖g_j‖²/b_{j-1}, or the schedule's 1/η_j
        b = update(b, new_sq, 1.0) if schedule is None else 1 / schedule(nit + 1)
        x, g = new, new_g
        mean = mean + (x - mean) / (nit + 1)  # x̄_k
        low, high = min(low, math.sqrt(new_sq)), max(high, math.sqrt(new_sq))
    fun = None if f is None else float(f(x))
    if status is Status.STEP_LIMIT and fun is not None and fun <= tol:
        status = Status.CONVERGED
    return StochasticResult(
        x=x,
        x_mean=mean,
        fun=fun,
        fun_mean=None if f is None else float(f(mean)),
        nit=nit,
        status=status,
        message=_MESSAGES[status],
        b=b,
        b_first=begin,
        grad_first=first,
        grad_min=low,
        grad_max=high,
        method=method if schedule is None else "schedule",
    )


def _check(
    owner: str, steps: int, schedule: Any, method: str, b_init: Any, check_every: int
) -> None:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"{owner}: `steps` must be an integer >= 0, got {steps!r}.")
    if not isinstance(check_every, int) or check_every < 1:
        raise ValueError(f"{owner}: `check_every` must be an integer >= 1, got {check_every!r}.")
    if schedule is not None and not callable(schedule):
        raise TypeError(f"{owner}: `schedule` must be a function of k, got {schedule!r}.")
    if method not in ("wngrad", "adagrad-norm"):
        raise ValueError(f"{owner}: `method` must be 'wngrad' or 'adagrad-norm', got {method!r}.")
    if starts.parse(owner, b_init)[0] == "lipschitz":
        raise ValueError(f"{owner}: `b_init` must be a number or 'gradient', got {b_init!r}.")
