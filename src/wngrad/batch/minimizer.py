"""Algorithm 1: gradient descent that finds its step size, and stops on ‖∇f‖²."""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from wngrad import rule
from wngrad.batch import arrays, starts
from wngrad.batch.result import MESSAGES, EvaluationError, Result, Start, Status, Trace

Method = Literal["wngrad", "adagrad-norm", "constant"]

# How b takes in λ²‖∇f(x_j)‖², here with λ = 1. A constant b is gradient descent at the rate 1/b.
UPDATES: dict[str, Callable[[float, float, float], float]] = {
    "wngrad": rule.next_b,
    "adagrad-norm": rule.adagrad_norm,
    "constant": lambda b, sq, lam: b,
}

# x is compared with its predecessor once in so many steps: once it has stopped it stays.
_STALL_CHECK = 64


class Intermediate(NamedTuple):
    """What a callback with a parameter `intermediate_result` is given."""

    x: Any
    fun: float
    nit: int
    b: float
    sq_norm: float


def minimize(
    f: Callable[..., Any],
    x0: Any,
    *,
    jac: Any = None,
    args: tuple[Any, ...] = (),
    b_init: starts.BInit = "gradient",
    method: Method = "wngrad",
    tol: float = 1e-10,
    max_steps: int = 100_000,
    max_seconds: float = math.inf,
    callback: Callable[..., Any] | None = None,
    trace: bool = False,
    progress: bool = False,
    seed: int = 0,
) -> Result:
    """Minimize f without a step size (Alg. 1).

    x_j ← x_{j-1} − ∇f(x_{j-1})/b_{j-1},  b_j ← b_{j-1} + ‖∇f(x_j)‖²/b_{j-1},  until ‖∇f‖² ≤ ε.

    Args:
        f: the function; of a NumPy array, a torch tensor or a JAX array, like `x0`.
        x0: x₁.
        jac: the gradient as a function; True if `f` returns (value, gradient); "2-point" or
            "3-point" for finite differences. Not needed for torch and JAX.
        args: further arguments of `f` and `jac`.
        b_init: b₁. A number; "gradient" for ‖∇f(x₁)‖, which the theorems ask for, or
            ("gradient", C); "lipschitz" for the sampled Lipschitz estimate, or ("lipschitz", R).
        method: the comparators "adagrad-norm" and "constant" (the rate 1/b₁) go through the same
            loop.
        tol: ε, a bound on ‖∇f‖², the *squared* norm.
        max_steps: a limit on steps.
        max_seconds: a limit on time.
        callback: called after each step with x, or with an `intermediate_result` if it has a
            parameter of that name; stops the run by raising StopIteration or returning True.
        trace: keep b_k, ‖∇f(x_k)‖², f(x_k) and the slopes of the gradient for every k.
        progress: a line on standard error, about once a second.
        seed: for "lipschitz".

    Returns:
        A `Result`; how the run ended is in `status` and `message`, and never raised.

    Raises:
        EvaluationError: if `f`, `jac` or `callback` raises; its `result` has the last good point.

    Example:
        >>> res = minimize(lambda x: x @ x, [3.0, -4.0], jac=lambda x: 2 * x)
        >>> res.message
        'The tolerance was reached.'
        >>> bool(abs(res.x).max() < 1e-5)
        True
    """
    _check(method, b_init, tol, max_steps, max_seconds)
    kind, x = arrays.start("minimize", x0)
    run = _Run(f, args, arrays.oracle("minimize", f, jac, kind, args), kind)
    run.watch(callback, trace, progress)
    value, g = run.oracle(x)
    value = run.value(x) if value is None else float(value)
    if tuple(g.shape) != tuple(x.shape):
        raise ValueError(
            f"minimize: `jac` must return an array of the shape of `x0`, {tuple(x.shape)}, "
            f"got {tuple(g.shape)}."
        )
    sq = kind.sq_norm(g)
    if not (math.isfinite(sq) and math.isfinite(value)):
        raise ValueError(f"minimize: `f` and its gradient must be finite at `x0`, got f = {value}.")
    b = 1.0  # a start where the gradient is zero needs none
    if sq:
        b, run.extra = starts.first_b("minimize", b_init, x, sq, run.gradient, kind, seed)
    limits = _Limits(tol, max_steps, max_seconds)
    return _descend(run, method, _Point(x, g, sq, value), b, limits)


def gradient_descent(f: Callable[..., Any], x0: Any, *, step: float, **options: Any) -> Result:
    """Gradient descent with a constant step: converges up to 1/L, may not from 2/L (Lemma 2.2).

    Args:
        f: as for `minimize`, and so are all other options.
        x0: x₁.
        step: η.
    """
    if not (isinstance(step, (int, float)) and step > 0 and math.isfinite(step)):
        raise ValueError(f"gradient_descent: `step` must be > 0 and finite, got {step!r}.")
    return minimize(f, x0, b_init=1 / step, method="constant", **options)


def scipy_method(
    fun: Callable[..., Any], x0: Any, args: tuple[Any, ...] = (), **options: Any
) -> Any:
    """For `scipy.optimize.minimize(f, x0, jac=grad, method=wngrad.scipy_method)`.

    Takes `tol`, `callback` and the options of `minimize`; `maxiter` is `max_steps` and `disp`
    is `progress`. Bounds, constraints and second derivatives are refused.
    """
    from scipy.optimize import OptimizeResult

    names = {"maxiter": "max_steps", "disp": "progress", "gtol": "tol"}
    for name in ("bounds", "constraints", "hess", "hessp"):
        given = options.pop(name, None)
        if given is not None and not (isinstance(given, (tuple, list)) and len(given) == 0):
            raise ValueError(f"scipy_method: `{name}` must not be given, got {given!r}.")
    options = {names.get(key, key): value for key, value in options.items() if value is not None}
    res = minimize(fun, x0, args=args, **options)
    return OptimizeResult(
        x=res.x, fun=res.fun, jac=res.jac, nit=res.nit, nfev=res.nfev, njev=res.njev,
        status=int(res.status), success=res.success, message=res.message,
    )  # fmt: skip


class _Limits(NamedTuple):
    tol: float
    max_steps: int
    max_seconds: float


class _Point(NamedTuple):
    """A point of the run."""

    x: Any
    g: Any
    sq: float
    value: float | None  # f, where the gradient came with it or somebody asked


class _Run:
    """A function under way: how to evaluate it, and who watches."""

    def __init__(
        self, f: Callable[..., Any], args: tuple[Any, ...], oracle: arrays.Oracle, kind: arrays.Kind
    ) -> None:
        self.f, self.args, self.oracle, self.kind = f, args, oracle, kind
        self.nfev = self.extra = 0

    def watch(self, callback: Callable[..., Any] | None, trace: bool, progress: bool) -> None:
        self.tell = _teller(callback)
        self.rows: list[tuple[float, float, float, float]] | None = [] if trace else None
        self.line = _Line() if progress else None
        self.wants_f = trace or callback is not None
        self.watched = self.wants_f or progress

    def gradient(self, x: Any) -> Any:
        return self.oracle(x)[1]

    def value(self, x: Any) -> float:
        self.nfev += 1
        return float(self.f(x, *self.args))

    def note(self, nit: int, old: _Point | None, old_b: float, new: _Point, b: float) -> bool:
        """Tell whoever watches about a new point; true if the callback wants to stop."""
        if self.line is not None:
            self.line.show(nit, new.sq, b)
        if self.rows is not None:
            moved = math.sqrt(old.sq) / old_b if old is not None else 0.0
            change = self.kind.sq_norm(new.g - old.g) if old is not None else 0.0
            slope = math.sqrt(change) / moved if moved else math.nan
            self.rows.append((b, new.sq, float(new.value or 0.0), slope))
        if self.tell is None or old is None:
            return False
        return self.tell(Intermediate(new.x, float(new.value or 0.0), nit, b, new.sq))


def _descend(run: _Run, method: str, first: _Point, b: float, limits: _Limits) -> Result:
    """The loop of Algorithm 1. What nobody asked for costs nothing in it."""
    oracle, sq_norm, equal, update = run.oracle, run.kind.sq_norm, run.kind.equal, UPDATES[method]
    tol, max_steps, max_seconds = limits
    deadline = time.monotonic() + max_seconds if max_seconds < math.inf else None
    x, g, sq, value = first
    begin, best, nit, error = Start(b, sq, float(value or 0.0)), sq, 0, None
    try:
        if run.watched:
            run.note(0, None, b, first, b)
        while True:
            if sq <= tol:
                status = Status.CONVERGED
                break
            if nit >= max_steps:
                status = Status.STEP_LIMIT
                break
            if deadline is not None and time.monotonic() > deadline:
                status = Status.TIME_LIMIT
                break
            new = rule.step(x, g, b)  # x_j ← x_{j-1} − ∇f(x_{j-1})/b_{j-1}
            new_value, new_g = oracle(new)
            new_sq = sq_norm(new_g)
            if run.wants_f and new_value is None:
                new_value = run.value(new)
            if not new_sq < math.inf or (new_value is not None and not abs(new_value) < math.inf):
                status = Status.NOT_FINITE
                break
            nit += 1
            new_b = update(b, new_sq, 1.0)  # b_j ← b_{j-1} + ‖∇f(x_j)‖²/b_{j-1}
            stalled = nit % _STALL_CHECK == 0 and new_sq > tol and equal(new, x)
            # The old point is dropped at once unless somebody looks at it: its memory is reused.
            old = _Point(x, g, sq, value) if run.watched else None
            x, g, sq, value, old_b, b = new, new_g, new_sq, new_value, b, new_b
            if sq < best:
                best = sq
            if old is not None and run.note(nit, old, old_b, _Point(x, g, sq, value), b):
                status = Status.STOPPED
                break
            if stalled:
                status = Status.STALLED
                break
    except Exception as raised:
        status, error = Status.RAISED, raised
    finally:
        if run.line is not None:
            run.line.close()
    if value is None and error is None:
        value = run.value(x)
    result = Result(
        x=x,
        fun=math.nan if value is None else float(value),
        jac=g,
        nit=nit,
        nfev=run.nfev or nit + 1 + run.extra,
        njev=nit + 1 + run.extra,
        status=status,
        message=MESSAGES[status],
        b=b,
        sq_norm=sq,
        best=best,
        tol=tol,
        method=method,
        start=begin,
        trace=None if run.rows is None else Trace(*map(np.array, zip(*run.rows, strict=True))),
    )
    if error is not None:
        raise EvaluationError(
            f"minimize: {type(error).__name__} after step {nit} ({error}); "
            f"the last good point is in this error's `result`.",
            result,
        ) from error
    return result


def _teller(callback: Callable[..., Any] | None) -> Callable[[Intermediate], bool] | None:
    """The callback by scipy's convention: true if it wants to stop."""
    if callback is None:
        return None
    named = "intermediate_result" in inspect.signature(callback).parameters

    def tell(now: Intermediate) -> bool:
        try:
            return (callback(intermediate_result=now) if named else callback(now.x)) is True
        except StopIteration:
            return True

    return tell


class _Line:
    """A line of progress on standard error, about once a second."""

    def __init__(self) -> None:
        self.since = self.last = time.monotonic()
        self.end = "\r" if sys.stderr.isatty() else "\n"

    def show(self, nit: int, sq: float, b: float) -> None:
        now = time.monotonic()
        if now - self.last >= 1.0:
            self.last = now
            took = now - self.since
            text = f"minimize: step {nit:,}  ‖∇f‖² {sq:.3e}  b {b:.3e}  {took:.0f} s"
            print(text, end=self.end, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.end == "\r" and self.last > self.since:
            print(file=sys.stderr)


def _check(method: str, b_init: Any, tol: float, max_steps: int, max_seconds: float) -> None:
    owner = "minimize"
    if method not in UPDATES:
        raise ValueError(f"{owner}: `method` must be one of {list(UPDATES)}, got {method!r}.")
    starts.parse(owner, b_init)
    if not (isinstance(tol, (int, float)) and tol >= 0):
        raise ValueError(f"{owner}: `tol` must be >= 0, got {tol!r}.")
    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 0:
        raise ValueError(f"{owner}: `max_steps` must be an integer >= 0, got {max_steps!r}.")
    if not (isinstance(max_seconds, (int, float)) and max_seconds >= 0):
        raise ValueError(f"{owner}: `max_seconds` must be >= 0, got {max_seconds!r}.")
