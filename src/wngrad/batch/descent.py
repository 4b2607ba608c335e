"""The loop of Algorithm 1: from a first point to a result."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, cast

from wngrad import rule
from wngrad.batch import arrays
from wngrad.batch.arrays import Kind
from wngrad.batch.observer import Observer, Point
from wngrad.batch.result import F_NOT_FINITE, MESSAGES, EvaluationError, Result, Start, Status
from wngrad.batch.updates import UPDATES, Update

# Once in so many steps x is compared with its predecessor (once it has stopped it stays), and the
# gradient's shape is checked; the latter also before a run may call itself converged.
_RARELY = 64


class Limits(NamedTuple):
    """Where a run ends."""

    tol: float
    max_steps: int
    max_seconds: float


class StartError(ValueError):
    """f or its gradient is not finite at x₁."""

    def __init__(self, message: str, point: Point) -> None:
        super().__init__(message)
        self.point = point

    def __reduce__(self) -> tuple[Any, ...]:  # as of `EvaluationError`
        return type(self), (*self.args, self.point)


class Function:
    """The function of a run: how it and its gradient are evaluated, and how often they were."""

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], jac: Any, kind: Kind) -> None:
        self.f, self.args, self.kind = f, args, kind
        self.nfev = self.extra = 0
        # Finite differences evaluate f by themselves: those calls are counted, too.
        own = isinstance(jac, str)
        self.oracle = arrays.oracle(
            "minimize", self.evaluate if own else f, jac, kind, () if own else args
        )

    def first(self, x: Any) -> Point:
        """The first point, checked."""
        self.oracle, value, g = arrays.first("minimize", self.oracle, self.kind, x)
        value = self.value(x) if value is None else arrays.scalar("minimize", value)
        sq = self.kind.sq_norm(g)
        if not (math.isfinite(sq) and math.isfinite(value)):
            raise StartError(
                f"minimize: `f` and its gradient must be finite at `x0`, got f = {value}.",
                Point(x, g, sq, value),
            )
        if sq == 0 and self.kind.to_numpy(g).any():
            raise ValueError("minimize: `f` must be scaled up: its gradient's square underflows.")
        return Point(x, g, sq, value)

    def gradient(self, x: Any) -> Any:
        return self.oracle(x)[1]

    def evaluate(self, x: Any) -> Any:
        self.nfev += 1
        return self.f(self.kind.copy(x), *self.args)  # which it may work on in place

    def value(self, x: Any) -> float:
        return arrays.scalar("minimize", self.evaluate(x))

    def value_and_gradient(self, x: Any) -> tuple[Any, Any]:
        """f and ∇f, also where the gradient comes alone."""
        value, g = self.oracle(x)
        return (self.value(x) if value is None else value), g


@dataclass(slots=True)
class _Run:
    """The last good point of a run, and why it ended there."""

    point: Point
    b: float
    best: float  # the smallest ‖∇f‖²
    nit: int = 0
    tried: int = 1  # points evaluated
    status: Status = Status.CONVERGED


def descend(
    function: Function, method: str, first: Point, b: float, limits: Limits, observer: Any
) -> Result:
    """The result of a run from its first point and b₁, shown to an `Observer` or None."""
    run, error, message = _Run(first, b, first.sq), None, ""
    try:
        if observer is not None:
            observer.note(0, first, b)
        _loop(run, function, UPDATES[method], limits, observer)
        _check_shape(run.point.g, first.g.shape)
        if run.point.value is None:
            run.point = run.point._replace(value=function.value(run.point.x))
            if not math.isfinite(cast(float, run.point.value)):
                run.status, message = Status.NOT_FINITE, F_NOT_FINITE
    except (Exception, KeyboardInterrupt) as raised:
        run.status, error = Status.RAISED, raised
    finally:
        if observer is not None:
            observer.close()
    x, g, sq, value = run.point
    result = Result(
        x=x,
        fun=math.nan if value is None else float(value),
        jac=g,
        nit=run.nit,
        nfev=function.nfev or run.tried + function.extra,
        njev=run.tried + function.extra,
        status=run.status,
        message=message or MESSAGES[run.status],
        b=run.b,
        sq_norm=sq,
        best=run.best,
        tol=limits.tol,
        method=method,
        start=Start(b, first.sq, cast(float, first.value)),
        eps=arrays.epsilon(x),
        trace=None if observer is None else observer.trace,
    )
    if error is not None:
        raise_with(error, "minimize", result)
    return result


def _loop(
    run: _Run, function: Function, update: Update, limits: Limits, observer: Observer | None
) -> None:
    """Algorithm 1. Names are looked up once, and what nobody asked for costs nothing."""
    needs_f = observer is not None and observer.needs_f
    oracle = function.value_and_gradient if needs_f else function.oracle
    step, sq_norm, equal, inf = rule.step, function.kind.sq_norm, arrays.equal, math.inf
    (tol, max_steps, seconds), (x, g, sq, value) = limits, run.point
    deadline = time.monotonic() + seconds if seconds < inf else None
    b, best, nit, tried, shape, check, stalled = run.b, sq, 0, 1, g.shape, _RARELY, False
    try:
        while sq > tol and not stalled:
            new = step(x, g, b)  # x_j ← x_{j-1} − ∇f(x_{j-1})/b_{j-1}
            if nit >= max_steps or (deadline is not None and time.monotonic() > deadline):
                run.status = Status.STEP_LIMIT if nit >= max_steps else Status.TIME_LIMIT
                stalled = nit > 0 and equal(new, x)
                break
            new_value, new_g = oracle(new)
            new_sq = sq_norm(new_g)
            new_b = update(b, new_sq, 1.0)  # b_j ← b_{j-1} + ‖∇f(x_j)‖²/b_{j-1}
            if not (new_sq < inf and new_b < inf and (new_value is None or abs(new_value) < inf)):
                run.status, tried = Status.NOT_FINITE, 2
                break
            nit += 1
            if nit == check:
                check += _RARELY
                _check_shape(new_g, shape)
                stalled = new_sq > tol and equal(new, x)
            x, g, sq, value, b = new, new_g, new_sq, new_value, new_b
            if sq < best:
                best = sq
            if observer is not None and observer.note(nit, Point(x, g, sq, value), b):
                run.status, stalled = Status.STOPPED, False
                break
        run.status = Status.STALLED if stalled else run.status
    finally:
        run.point, run.b, run.best = Point(x, g, sq, value), b, best
        run.nit, run.tried = nit, nit + tried


def _check_shape(g: Any, shape: tuple[int, ...]) -> None:
    if g.shape != shape:
        raise ValueError(f"`jac` returned the shape {tuple(g.shape)}")


def raise_with(error: BaseException, owner: str, result: Any) -> NoReturn:
    """Pass on what f, its gradient or the callback raised, with the last good point."""
    if isinstance(error, KeyboardInterrupt):
        error.result = result  # type: ignore[attr-defined]
        raise error
    raise EvaluationError(
        f"{owner}: {type(error).__name__} after step {result.nit} ({error}); "
        f"the last good point is in this error's `result`.",
        result,
    ) from error
