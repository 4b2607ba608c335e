"""Algorithm 2: stochastic gradients, the averaged iterate, and the schedules it competes with."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import numpy as np

from wngrad import rule
from wngrad.batch import arrays, bounds
from wngrad.batch.certificate import Certificate, Draft
from wngrad.batch.descent import raise_with
from wngrad.batch.first_b import parse_b_init
from wngrad.batch.minimizer import check_count
from wngrad.batch.result import Status
from wngrad.batch.schedules import Schedule
from wngrad.batch.updates import UPDATES

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
        """Section 3's inequalities; see `certify_stochastic`."""
        return certify_stochastic(self, **known)


def minimize_stochastic(
    oracle: Oracle,
    x0: Any,
    *,
    steps: int,
    seed: int = 0,
    b_init: float | Literal["gradient"] | tuple[Literal["gradient"], float] = "gradient",
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
    _check(owner, steps, schedule, method, b_init, f, tol, check_every)
    kind, x = arrays.start(owner, x0)
    rng = np.random.default_rng(seed)

    def draw(x: Any) -> Any:
        return oracle(kind.copy(x), rng)  # which may work on x in place

    g = arrays.first_gradient(owner, "oracle", draw(x), kind, x)
    sq = kind.sq_norm(g)
    norm = math.sqrt(sq) if math.isfinite(sq) else math.nan
    b = _first_b(owner, method, schedule, b_init, norm, sq)
    if not 0 < b < math.inf:
        raise ValueError(
            f"{owner}: `oracle` must give a finite first gradient, not 0, and a finite b₁, "
            f"got {g!r} and {b}."
        )
    run, error = _Run(x, x, g, b, norm, norm), None

    def value(x: Any) -> float:
        return arrays.scalar(owner, cast(Any, f)(kind.copy(x)))

    def stop(nit: int, x: Any) -> bool:
        return tol > -math.inf and nit % check_every == 0 and value(x) <= tol

    try:
        next_b = _next_b(owner, method, schedule)
        gradient = lambda x: arrays.own_gradient(draw(x), kind, x)  # noqa: E731
        _loop(run, gradient, kind.sq_norm, next_b, steps, stop)
        if f is not None:
            run.fun, run.fun_mean = value(run.x), value(run.mean)
            if run.status is Status.STEP_LIMIT and run.fun <= tol:
                run.status = Status.CONVERGED
    except (Exception, KeyboardInterrupt) as raised:
        run.status, error = Status.RAISED, raised
    result = run.result(b, norm, method if schedule is None else "schedule")
    if error is not None:
        raise_with(error, owner, result)
    return result


@dataclass(slots=True)
class _Run:
    """The last good point of a run, and what it has seen."""

    x: Any
    mean: Any  # x̄_k
    g: Any
    b: float
    low: float  # the smallest ‖g‖
    high: float
    nit: int = 0
    status: Status = Status.STEP_LIMIT
    fun: float | None = None
    fun_mean: float | None = None

    def result(self, b_first: float, grad_first: float, method: str) -> StochasticResult:
        return StochasticResult(
            x=self.x,
            x_mean=self.mean,
            fun=self.fun,
            fun_mean=self.fun_mean,
            nit=self.nit,
            status=self.status,
            message=_MESSAGES[self.status],
            b=self.b,
            b_first=b_first,
            grad_first=grad_first,
            grad_min=self.low,
            grad_max=self.high,
            method=method,
        )


def _loop(
    run: _Run,
    gradient: Callable[[Any], Any],
    sq_norm: Callable[[Any], float],
    next_b: Callable[[float, float, int], float],
    steps: int,
    stop: Callable[[int, Any], bool],
) -> None:
    """Algorithm 2."""
    while run.nit < steps:
        if stop(run.nit, run.x):
            run.status = Status.CONVERGED
            return
        x = rule.step(run.x, run.g, run.b)  # x_j ← x_{j-1} − g_{j-1}/b_{j-1}
        g = gradient(x)
        if g.shape != run.g.shape:
            raise ValueError(f"`oracle` returned the shape {tuple(g.shape)}")
        sq = sq_norm(g)
        b = next_b(run.b, sq, run.nit + 2)  # b_j ← b_{j-1} + ‖g_j‖²/b_{j-1}
        if not (math.isfinite(sq) and math.isfinite(b)):
            run.status = Status.NOT_FINITE
            return
        run.x, run.g, run.b, run.nit = x, g, b, run.nit + 1
        run.mean = run.mean + (x - run.mean) / (run.nit + 1)
        run.low, run.high = min(run.low, math.sqrt(sq)), max(run.high, math.sqrt(sq))


def _first_b(
    owner: str, method: str, schedule: Schedule | None, b_init: Any, norm: float, sq: float
) -> float:
    if schedule is not None:
        return 1 / _rate(owner, schedule, 1)
    name, number = parse_b_init(owner, b_init)
    b: float = number if name == "number" else rule.first_b(norm, 1.0, number)
    if method == "adagrad-norm":
        return cast(float, rule.adagrad_norm(b, sq, 1.0))  # as its authors do: b first
    return b


def _next_b(
    owner: str, method: str, schedule: Schedule | None
) -> Callable[[float, float, int], float]:
    """(b, ‖g_k‖², k) -> b_k: the method's, or the schedule's 1/η_k."""
    if schedule is not None:
        return lambda b, sq, k: 1 / _rate(owner, schedule, k)
    update = UPDATES[method]
    return lambda b, sq, k: update(b, sq, 1.0)


def _rate(owner: str, schedule: Schedule, k: int) -> float:
    rate = float(schedule(k))
    if not 0 < rate < math.inf:
        raise ValueError(
            f"{owner}: `schedule` must give rates > 0 and finite, got {rate} at k = {k}."
        )
    return rate


def _check(
    owner: str, steps: int, schedule: Any, method: str, b_init: Any, f: Any, tol: float, every: int
) -> None:
    check_count(owner, "steps", steps, least=0)
    check_count(owner, "check_every", every, least=1)
    if f is None and tol > -math.inf:
        raise ValueError(f"{owner}: `tol` must come with `f`, got {tol!r} without it.")
    if schedule is not None and not callable(schedule):
        raise TypeError(f"{owner}: `schedule` must be a function of k, got {schedule!r}.")
    if method not in get_args(Method):
        raise ValueError(f"{owner}: `method` must be 'wngrad' or 'adagrad-norm', got {method!r}.")
    if parse_b_init(owner, b_init)[0] == "lipschitz":
        raise ValueError(f"{owner}: `b_init` must be a number or 'gradient', got {b_init!r}.")
    for name, value, default in (("b_init", b_init, "gradient"), ("method", method, "wngrad")):
        if schedule is not None and value != default:
            raise ValueError(
                f"{owner}: `{name}` must not be given with `schedule`, which sets every b, "
                f"got {value!r}."
            )


def certify_stochastic(
    run: StochasticResult,
    *,
    f_star: float | None = None,
    diameter: float | None = None,
    distance: float | None = None,
    grad_bound: float | None = None,
    grad_floor: float | None = None,
) -> Certificate:
    """Section 3's inequalities on a run of `minimize_stochastic`.

    Args:
        run: a finished run.
        f_star: f*.
        diameter: D, with E‖x_k − x*‖² ≤ D².
        distance: ‖x₁ − x*‖; D if not given.
        grad_bound: G, with E‖g_k‖² ≤ G²; the largest ‖g_k‖ of the run if not given.
        grad_floor: γ ≤ ‖g_k‖; the smallest ‖g_k‖ of the run if not given.
    """
    known = {"diameter": diameter, "distance": distance}
    known |= {"grad_bound": grad_bound, "grad_floor": grad_floor}
    _check_known({"f_star": f_star, **known}, signed="f_star")
    draft = Draft(arrays.ROUNDING_UNITS * arrays.epsilon(run.x))
    if run.method != "wngrad":
        draft.not_claimed.append("Theorem 3.1 is about WNGrad")
        return draft.finish()
    ends = (run.b, run.b_first, run.grad_first, run.grad_min, run.grad_max)
    if not np.isfinite(ends).all():
        draft.refuted.append("b and every ‖g_k‖ are finite")
        return draft.finish()
    _f_star(draft, run, f_star)
    grace = 1 + draft.rounding  # for the caller's arithmetic
    near = diameter is None or distance is None or draft.check(
        f"‖x₁ − x*‖ = {distance:g} ≤ D = {diameter:g}", distance <= diameter * grace
    )  # fmt: skip
    floor = run.grad_min if grad_floor is None else grad_floor
    bound = run.grad_max if grad_bound is None else grad_bound
    bounded = _gradients(draft, run, floor, bound, trusted=grad_bound is not None)
    if not _growth(draft, run, floor):
        return draft.finish()
    if run.fun_mean is None or f_star is None or diameter is None or floor <= 0:
        draft.not_claimed.append("Theorem 3.1: needs f, f_star, diameter and γ > 0")
        return draft.finish()
    if not (near and bounded):
        draft.not_claimed.append("Theorem 3.1: the run contradicts D or G")
        return draft.finish()
    numbers = {"grad_bound": bound, "grad_floor": min(floor, bound)}
    numbers |= {"diameter": diameter, "b1": run.b_first}
    far, k = diameter if distance is None else distance, run.nit + 1
    limit = bounds.theorem_3_1_gap(**numbers, distance=far, k=k)
    draft.assumed += [
        "f is convex",
        f"f* = {f_star:g}",
        f"E‖x_k − x*‖² ≤ D² with D = {diameter:g}",
        "the theorem bounds the mean over runs; this is one of them",
    ]
    given = (f"f_star={f_star:g}", f"diameter={diameter:g}", f"grad_bound={bound:g}")
    draft.claim(f"Theorem 3.1: f(x̄_k) − f* at k = {k}", run.fun_mean - f_star, limit, given)
    return draft.finish()


def _check_known(known: dict[str, float | None], *, signed: str) -> None:
    for name, value in known.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"certify: `{name}` must be finite, got {value!r}.")
        if value is not None and name != signed and value < 0:
            raise ValueError(f"certify: `{name}` must be >= 0, got {value!r}.")


def _f_star(draft: Draft, run: StochasticResult, f_star: float | None) -> None:
    """Is f below f* at the last or the averaged iterate?"""
    if f_star is None or run.fun is None or run.fun_mean is None:
        return
    values = [run.fun, run.fun_mean]
    slack = draft.rounding * max(abs(f_star), *map(abs, values))
    lowest = float(np.min(values))
    text = f"neither f(x_k) nor f(x̄_k) lies below f* = {f_star:g} (lowest {lowest:.6g})"
    draft.check(text, lowest >= f_star - slack)


def _gradients(
    draft: Draft, run: StochasticResult, floor: float, bound: float, *, trusted: bool
) -> bool:
    """γ and G beside the gradients that were seen; true unless every one of them is above G."""
    text = f"every ‖g_k‖ ≥ γ = {floor:.6g} (smallest {run.grad_min:.6g})"
    draft.check(text, run.grad_min >= floor)
    if not trusted:
        text = f"every ‖g_k‖ ≤ G = {bound:.6g}, the largest seen"
        return draft.check(text, run.grad_max <= bound)
    draft.assumed.append(f"E‖g_k‖² ≤ G² with G = {bound:g} (largest ‖g_k‖ {run.grad_max:.6g})")
    text = f"some ‖g_k‖ ≤ G = {bound:.6g} (smallest {run.grad_min:.6g})"
    return draft.check(text, run.grad_min <= bound * (1 + draft.rounding))


def _growth(draft: Draft, run: StochasticResult, floor: float) -> bool:
    """b_k ≥ γ√k, where its hypotheses hold."""
    text = f"b₁ = {run.b_first:.6g} ≥ ‖g₁‖ = {run.grad_first:.6g}"
    if not (bounds.well_started(run.b_first, run.grad_first) and run.grad_min >= floor):
        draft.not_claimed.append(f"b_k ≥ γ√k and Theorem 3.1: need {text} and ‖g_k‖ ≥ γ")
        return False
    draft.verified.append(text)
    least = bounds.lemma_3_3_b(grad_floor=floor, k=run.nit + 1)
    # b is summed in float64, whatever the type of x.
    draft.claim(f"γ√k ≤ b_k at k = {run.nit + 1}", least, run.b, rounding=1e-12 * run.b)
    return True
