"""Algorithm 2: stochastic gradients, the averaged iterate, and the schedules it competes with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from wngrad import rule, values
from wngrad.batch import arrays
from wngrad.batch.certificate import Certificate, certify_stochastic
from wngrad.batch.iterates import UPDATES, Point, iterates
from wngrad.batch.minimizer import checked_b_init
from wngrad.batch.result import Status, raise_with
from wngrad.batch.schedules import Schedule

# (x, random generator) -> a gradient g with E g = ∇f(x)
Oracle = Callable[[Any, np.random.Generator], Any]
Method = Literal["wngrad", "adagrad-norm"]

_MESSAGES = {
    Status.CONVERGED: "f(x) ≤ ε was reached.",
    Status.STEP_LIMIT: "All steps were taken.",
    Status.NOT_FINITE: "A gradient or b was not finite at the next point; x is the last good one.",
    Status.RAISED: "The oracle or f raised; x is the last good point.",
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
        """Section 3's inequalities on this run.

        Args:
            f_star: f*.
            diameter: D, with E‖x_k − x*‖² ≤ D².
            distance: ‖x₁ − x*‖; D if not given.
            grad_bound: G, with E‖g_k‖² ≤ G²; the largest ‖g_k‖ of the run if not given.
            grad_floor: γ ≤ ‖g_k‖; the smallest ‖g_k‖ of the run if not given.
        """
        return certify_stochastic(self, **known)


def minimize_stochastic(
    oracle: Oracle,
    x0: Any,
    *,
    steps: int,
    seed: int = 0,
    b_init: values.BInit = "gradient",
    schedule: Schedule | None = None,
    method: Method = "wngrad",
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
        schedule: instead of learning the rate, use η_k of this function; see `schedules`. Not with
            `b_init` or `method`.
        method: "wngrad" or "adagrad-norm".
        f: the function, to stop by and to report.
        tol: ε: stop when f(x) ≤ ε.
        check_every: look at f once in so many steps.

    Returns:
        A `StochasticResult` with the last and the averaged iterate.

    Raises:
        EvaluationError: if `oracle` or `f` raises on the way; its `result` has the last good point.

    Example:
        >>> noisy = lambda x, rng: 2 * (x - 3 + rng.standard_normal(2))
        >>> res = minimize_stochastic(noisy, [0.0, 0.0], steps=20_000)
        >>> bool(abs(res.x_mean - 3).max() < 0.1)
        True
    """
    owner = "minimize_stochastic"
    values.count(owner, "steps", steps, least=0)
    values.count(owner, "check_every", check_every, least=1)
    if f is None and tol > -math.inf:
        raise ValueError(f"{owner}: `tol` must come with `f`, got {tol!r} without it.")
    if schedule is not None and not callable(schedule):
        raise TypeError(f"{owner}: `schedule` must be a function of k, got {schedule!r}.")
    if method not in get_args(Method):
        raise ValueError(f"{owner}: `method` must be 'wngrad' or 'adagrad-norm', got {method!r}.")
    word, number = checked_b_init(owner, b_init)
    if word == "lipschitz":
        raise ValueError(f"{owner}: `b_init` must be a number or 'gradient', got {b_init!r}.")
    for name, given, default in (("b_init", b_init, "gradient"), ("method", method, "wngrad")):
        if schedule is not None and given != default:
            raise ValueError(
                f"{owner}: `{name}` must not be given with `schedule`, which sets every b, "
                f"got {given!r}."
            )
    kind, x = arrays.start(owner, x0)
    rng = np.random.default_rng(seed)

    def draw(x: Any) -> Any:
        return oracle(kind.copy(x), rng)  # which may work on x in place

    def gradient(x: Any) -> tuple[None, Any]:
        return None, arrays.as_gradient(draw(x), kind, x)

    def value(x: Any) -> float:
        return arrays.scalar(owner, f(kind.copy(x)))  # type: ignore[misc]

    def scheduled(b: float, sq: float, k: int) -> float:
        rate = float(schedule(k))  # type: ignore[misc]
        if not 0 < rate < math.inf:
            raise ValueError(
                f"{owner}: `schedule` must give rates > 0 and finite, got {rate} at k = {k}."
            )
        return 1 / rate

    g = arrays.first_gradient(owner, "oracle", draw(x), kind, x)
    sq = kind.sq_norm(g)
    norm = math.sqrt(sq) if math.isfinite(sq) else math.nan
    next_b = UPDATES[method] if schedule is None else scheduled
    b_first: float = number if word == "number" else rule.first_b(norm, 1.0, number)
    if schedule is not None or method == "adagrad-norm":
        b_first = next_b(b_first, sq, 1)  # AdaGrad-Norm takes in ‖g₁‖² first, as its authors do
    if not 0 < b_first < math.inf:
        raise ValueError(
            f"{owner}: `oracle` must give a finite first gradient, not 0, and a finite b₁, "
            f"got {g!r} and {b_first}."
        )
    nit, b, mean, low, high = 0, b_first, x, norm, norm
    fun: float | None = None
    fun_mean: float | None = None

    def result(status: Status) -> StochasticResult:
        """The run up to its last good point."""
        return StochasticResult(
            x=x,
            x_mean=mean,
            fun=fun,
            fun_mean=fun_mean,
            nit=nit,
            status=status,
            message=_MESSAGES[status],
            b=b,
            b_first=b_first,
            grad_first=norm,
            grad_min=low,
            grad_max=high,
            method=method if schedule is None else "schedule",
        )

    points = iterates(Point(x, g, sq, None, b), gradient, kind.sq_norm, next_b, "oracle")
    try:
        for nit, (x, _, sq, _, b) in enumerate(points):  # noqa: B007, `result` reads b
            if nit:
                mean = mean + (x - mean) / (nit + 1)
                low, high = min(low, math.sqrt(sq)), max(high, math.sqrt(sq))
            if nit == steps:
                status = Status.STEP_LIMIT
                break
            if tol > -math.inf and nit % check_every == 0 and value(x) <= tol:
                status = Status.CONVERGED
                break
        else:
            status = Status.NOT_FINITE
        if f is not None:
            fun, fun_mean = value(x), value(mean)
            if status is Status.STEP_LIMIT and fun <= tol:
                status = Status.CONVERGED
    except (Exception, KeyboardInterrupt) as error:
        raise_with(error, owner, result(Status.RAISED))
    return result(status)
