"""Algorithm 1: gradient descent that finds its step size, and stops on ‖∇f‖²."""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, NoReturn

import numpy as np

from wngrad import rule
from wngrad.batch import arrays, starts
from wngrad.batch.arrays import Kind
from wngrad.batch.result import MESSAGES, EvaluationError, Result, Start, Status, Trace
from wngrad.batch.updates import UPDATES

Method = Literal["wngrad", "adagrad-norm", "constant"]

# Once in so many steps x is compared with its predecessor (once it has stopped it stays), and the
# gradient's shape is looked at; the latter also before a run may call itself converged.
_RARELY = 64


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
        method: the comparators go through the same loop: "constant" (the rate 1/b₁), and
            "adagrad-norm", whose b takes in ‖∇f(x₁)‖² before the first step, as its authors do.
        tol: ε, a bound on ‖∇f‖², the *squared* norm.
        max_steps: a limit on steps.
        max_seconds: a limit on time.
        callback: called after each step with a copy of x, or with an `intermediate_result` if it
            has a parameter of that name; stops the run by raising StopIteration or returning True.
        trace: keep b_k, ‖∇f(x_k)‖², f(x_k) and the slopes of the gradient for every k.
        progress: a line on standard error, about once a second.
        seed: for "lipschitz".

    Returns:
        A `Result`; how the run ended is in `status` and `message`.

    Raises:
        EvaluationError: if `f`, `jac` or `callback` raises on the way; its `result` has the last
            good point. What they raise at `x0` comes through as it is, and a KeyboardInterrupt is
            given the `result`.

    Example:
        >>> res = minimize(lambda x: x @ x, [3.0, -4.0], jac=lambda x: 2 * x)
        >>> res.message
        'The tolerance was reached.'
        >>> bool(abs(res.x).max() < 1e-5)
        True
    """
    owner = "minimize"
    _check(method, b_init, tol, max_steps, max_seconds)
    args = args if isinstance(args, tuple) else (args,)
    kind, x = arrays.start(owner, x0)
    run = _Run(f, args, jac, kind)
    run.watch(callback, trace, progress)
    given, value, g = arrays.first(owner, run.oracle, kind, x)
    if given is run.oracle and callable(jac) and not args:
        run.gradient_alone = kind.plain(jac)
    run.oracle = given
    value = run.value(x) if value is None else arrays.scalar(owner, value)
    sq = kind.sq_norm(g)
    if not (math.isfinite(sq) and math.isfinite(value)):
        raise ValueError(f"{owner}: `f` and its gradient must be finite at `x0`, got f = {value}.")
    if sq == 0 and kind.to_numpy(g).any():
        raise ValueError(f"{owner}: `f` must be scaled up: its gradient's square underflows.")
    b = 1.0  # a start where the gradient is zero needs none
    if sq:
        b, run.extra = starts.first_b(owner, b_init, x, sq, run.gradient, kind, int(seed))
    if method == "adagrad-norm":
        b = rule.adagrad_norm(b, sq, 1.0)
    limits = _Limits(float(tol), int(max_steps), float(max_seconds))
    return _descend(run, method, _Point(x, g, sq, value), b, limits)


def gradient_descent(f: Callable[..., Any], x0: Any, *, step: float, **options: Any) -> Result:
    """Gradient descent with a constant step: converges up to 1/L, may not from 2/L (Lemma 2.1).

    Args:
        f: as for `minimize`, and so are all other options.
        x0: x₁.
        step: η.
    """
    if not (isinstance(step, Real) and 0 < step < math.inf):
        raise ValueError(f"gradient_descent: `step` must be > 0 and finite, got {step!r}.")
    return minimize(f, x0, b_init=float(1 / step), method="constant", **options)


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

    def __init__(self, f: Callable[..., Any], args: tuple[Any, ...], jac: Any, kind: Kind) -> None:
        self.f, self.args, self.kind = f, args, kind
        self.nfev = self.extra = 0
        self.gradient_alone: Callable[[Any], Any] | None = None  # where it comes without f
        # Finite differences evaluate f behind our back: those calls are counted, too.
        known = self.value if isinstance(jac, str) else f
        self.oracle = arrays.oracle(
            "minimize", known, jac, kind, () if isinstance(jac, str) else args
        )

    def watch(self, callback: Callable[..., Any] | None, trace: bool, progress: bool) -> None:
        self.tell = _teller(callback, self.kind.copy)
        self.rows: list[tuple[float, float, float, float]] | None = [] if trace else None
        self.line = _Line() if progress else None
        self.wants_f = trace or callback is not None
        self.watched = self.wants_f or progress

    def gradient(self, x: Any) -> Any:
        return self.oracle(x)[1]

    def value(self, x: Any) -> float:
        self.nfev += 1
        return arrays.scalar("minimize", self.f(x, *self.args))

    def remember(self, x: Any, g: Any, sq: float, value: Any) -> _Point:
        """A point to look back at; for a slope with a gradient of its own, which may be reused."""
        return _Point(x, g if self.rows is None else self.kind.copy(g), sq, value)

    def note(self, nit: int, old: _Point | None, new: _Point, b: float) -> bool:
        """Tell whoever watches about a new point; true if the callback wants to stop."""
        value = math.nan if new.value is None else float(new.value)
        if self.line is not None:
            self.line.show(nit, new.sq, b)
        if self.rows is not None:
            slope = math.nan if old is None else self._slope(old, new)
            self.rows.append((b, new.sq, value, slope))
        if self.tell is None or old is None:
            return False
        return self.tell(Intermediate(new.x, value, nit, b, new.sq))

    def _slope(self, old: _Point, new: _Point) -> float:
        moved = self.kind.sq_norm(new.x - old.x)
        return math.sqrt(self.kind.sq_norm(new.g - old.g) / moved) if moved else math.nan


def _check_shape(g: Any, shape: tuple[int, ...]) -> None:
    if g.shape != shape:
        raise ValueError(f"`jac` returned the shape {tuple(g.shape)}")


class _End(NamedTuple):
    """Where a run ended, and why."""

    status: Status
    point: _Point
    b: float
    best: float
    nit: int
    tried: int  # points evaluated
    error: BaseException | None


def _descend(run: _Run, method: str, first: _Point, b: float, limits: _Limits) -> Result:
    """Run to the end, and say how it went."""
    try:
        end = _loop(run, method, first, b, limits)
    finally:
        if run.line is not None:
            run.line.close()
    x, g, sq, value = end.point
    assert first.value is not None
    result = Result(
        x=x,
        fun=math.nan if value is None else float(value),
        jac=g,
        nit=end.nit,
        nfev=run.nfev or end.tried + run.extra,
        njev=end.tried + run.extra,
        status=end.status,
        message=MESSAGES[end.status],
        b=end.b,
        sq_norm=sq,
        best=end.best,
        tol=limits.tol,
        method=method,
        start=Start(b, first.sq, first.value),
        eps=arrays.epsilon(x),
        trace=None if run.rows is None else Trace(*map(np.array, zip(*run.rows, strict=True))),
    )
    if end.error is not None:
        raise_with(end.error, "minimize", result)
    return result


def _loop(run: _Run, method: str, first: _Point, b: float, limits: _Limits) -> _End:
    """Algorithm 1. What nobody asked for costs nothing here; so does looking up names."""
    oracle, gradient, update = run.oracle, run.gradient_alone, UPDATES[method]
    sq_norm, equal = run.kind.sq_norm, run.kind.equal
    step, watched, inf = rule.step, run.watched, math.inf
    tol, max_steps, max_seconds = limits
    deadline = time.monotonic() + max_seconds if max_seconds < inf else None
    x, g, sq, value = first
    shape, best, nit, tried = g.shape, sq, 0, 1
    pause, stalled = _RARELY, False
    status, error = Status.CONVERGED, None
    try:
        if watched:
            run.note(0, None, first, b)
        while sq > tol:
            new = step(x, g, b)  # x_j ← x_{j-1} − ∇f(x_{j-1})/b_{j-1}
            if nit >= max_steps or (deadline is not None and time.monotonic() > deadline):
                status = Status.STEP_LIMIT if nit >= max_steps else Status.TIME_LIMIT
                status = Status.STALLED if nit and equal(new, x) else status
                break
            old = run.remember(x, g, sq, value) if watched else None
            if gradient is None:
                new_value, new_g = oracle(new)
            else:
                new_value, new_g = None, gradient(new)
            if watched and new_value is None and run.wants_f:
                new_value = run.value(new)
            new_sq = sq_norm(new_g)
            new_b = update(b, new_sq, 1.0)  # b_j ← b_{j-1} + ‖∇f(x_j)‖²/b_{j-1}
            if not (new_sq < inf and new_b < inf and (new_value is None or abs(new_value) < inf)):
                status, tried = Status.NOT_FINITE, 2
                break
            nit += 1
            if nit == pause:
                pause += _RARELY
                _check_shape(new_g, shape)
                stalled = new_sq > tol and equal(new, x)
            x, g, sq, value, b = new, new_g, new_sq, new_value, new_b
            if sq < best:
                best = sq
            if old is not None and run.note(nit, old, _Point(x, g, sq, value), b):
                status = Status.STOPPED
                break
            if stalled:
                status = Status.STALLED
                break
        _check_shape(g, shape)
        if value is None:
            value = run.value(x)
            status = status if math.isfinite(value) else Status.NOT_FINITE
    except (Exception, KeyboardInterrupt) as raised:
        status, error = Status.RAISED, raised
    return _End(status, _Point(x, g, sq, value), b, best, nit, nit + tried, error)


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


def _teller(
    callback: Callable[..., Any] | None, copy: Callable[[Any], Any]
) -> Callable[[Intermediate], bool] | None:
    """The callback by scipy's convention: true if it wants to stop."""
    if callback is None:
        return None
    if not callable(callback):
        raise TypeError(f"minimize: `callback` must be a function, got {callback!r}.")
    try:
        named = "intermediate_result" in inspect.signature(callback).parameters
    except ValueError:  # a built-in without a signature
        named = False

    def tell(now: Intermediate) -> bool:
        mine = now._replace(x=copy(now.x))
        try:
            answer = callback(intermediate_result=mine) if named else callback(mine.x)
        except StopIteration:
            return True
        return isinstance(answer, (bool, np.bool_)) and bool(answer)

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


def _check(method: Any, b_init: Any, tol: Any, max_steps: Any, max_seconds: Any) -> None:
    owner = "minimize"
    if method not in UPDATES:
        raise ValueError(f"{owner}: `method` must be one of {list(UPDATES)}, got {method!r}.")
    starts.parse(owner, b_init)
    if not (isinstance(tol, Real) and float(tol) >= 0):
        raise ValueError(f"{owner}: `tol` must be >= 0, got {tol!r}.")
    check_count(owner, "max_steps", max_steps, least=0)
    if not (isinstance(max_seconds, Real) and float(max_seconds) >= 0):
        raise ValueError(f"{owner}: `max_seconds` must be >= 0, got {max_seconds!r}.")


def check_count(owner: str, name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{owner}: `{name}` must be an integer >= {least}, got {value!r}.")
