"""Algorithm 1: gradient descent that finds its step size, and stops on ‖∇f‖²."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from numbers import Real
from typing import Any, Literal

import numpy as np

from wngrad import rule, slopes, values
from wngrad.batch import arrays
from wngrad.batch.arrays import Array, Kind
from wngrad.batch.iterates import UPDATES, Point, iterates
from wngrad.batch.observer import BestPoint, Callback, Progress, Recorder, Watcher
from wngrad.batch.result import MESSAGES, Result, Start, Status, raise_with

BInit = values.BInit | Literal["lipschitz"] | tuple[Literal["lipschitz"], float]
Method = Literal["wngrad", "adagrad-norm", "constant"]

_B_INIT = (
    '`b_init` must be a number > 0, "gradient" or "lipschitz", or ("gradient", C > 0) or '
    '("lipschitz", R >= 2)'
)
# Once in so many steps x is compared with its predecessor: once it has stopped it stays.
_RARELY = 64


def minimize(
    f: Callable[..., Any],
    x0: Any,
    *,
    jac: Any = None,
    args: tuple[Any, ...] = (),
    b_init: BInit = "gradient",
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
            "3-point" for finite differences, "cs" for complex steps (NumPy, analytic `f`). Not
            needed for torch and JAX.
        args: further arguments of `f` and `jac`.
        b_init: b₁. A number; "gradient" for ‖∇f(x₁)‖, which the theorems ask for, or
            ("gradient", C); "lipschitz" for the sampled Lipschitz estimate, or ("lipschitz", R).
            A number is safe where it is not below L or ‖∇f(x₁)‖: the first step has the length
            ‖∇f(x₁)‖/b₁. Of 65 starts on `wngrad.problems`, five at each smooth one, 2,000 steps
            take f to within 1e-3 of its fall from 59 with "gradient", 55 with ("lipschitz", 10)
            and 30 with 1.0; "lipschitz" needs a gradient that changes near x₁.
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
    if method not in UPDATES:
        raise ValueError(f"{owner}: `method` must be one of {list(UPDATES)}, got {method!r}.")
    way = checked_b_init(owner, b_init)
    if not (isinstance(tol, Real) and float(tol) >= 0):
        raise ValueError(f"{owner}: `tol` must be >= 0, got {tol!r}.")
    max_steps = values.count(owner, "max_steps", max_steps, least=0)
    if not (isinstance(max_seconds, Real) and float(max_seconds) >= 0):
        raise ValueError(f"{owner}: `max_seconds` must be >= 0, got {max_seconds!r}.")
    tol, max_seconds = float(tol), float(max_seconds)
    kind, x = arrays.start(owner, x0)
    function = Function(f, jac, args if isinstance(args, tuple) else (args,), kind)
    line, recorder = Progress() if progress else None, Recorder(kind) if trace else None
    watch: Watcher | None = None
    if callback is not None:
        watch = callback if isinstance(callback, BestPoint) else Callback(callback, kind)
    watchers = [watcher for watcher in (line, recorder, watch) if watcher is not None]
    first = function.first(x)
    b = _first_b(way, first, function, int(seed))
    if method == "adagrad-norm":
        b = UPDATES[method](b, first.sq, 1)
    function.everywhere = trace or callback is not None
    points = iterates(first._replace(b=b), function, kind.sq_norm, UPDATES[method], "jac")
    x, g, sq, value = first[:4]
    nit, best, start, before = 0, sq, Start(b, sq, value), None
    deadline = time.monotonic() + max_seconds if max_seconds < math.inf else None

    def result(status: Status, message: str = "") -> Result:
        """The run up to its last good point."""
        evaluated = nit + 1 + function.extra
        return Result(
            x=x,
            fun=math.nan if value is None else float(value),
            jac=g,
            nit=nit,
            nfev=function.nfev or evaluated,
            njev=evaluated,
            status=status,
            message=message or MESSAGES[status],
            b=b,
            sq_norm=sq,
            best=best,
            tol=tol,
            method=method,
            start=start,
            eps=arrays.epsilon(x),
            trace=None if recorder is None else recorder.trace,
        )

    try:  # What nobody asked for costs nothing in this loop.
        for nit, (x, g, sq, value, b) in enumerate(points):
            best = sq if sq < best else best
            if watchers:
                point = Point(x, g, sq, value, b)
                if True in [watch(nit, point) for watch in watchers]:
                    status = Status.STOPPED
                    break
            if sq <= tol:
                status = Status.CONVERGED
                break
            if nit and nit % _RARELY == 0 and (x == before).all():
                status = Status.STALLED
                break
            if nit >= max_steps or (deadline is not None and time.monotonic() > deadline):
                status = Status.STEP_LIMIT if nit >= max_steps else Status.TIME_LIMIT
                if nit and (rule.step(x, g, b) == x).all():
                    status = Status.STALLED
                break
            if (nit + 1) % _RARELY == 0:
                before = x
        else:
            status = Status.NOT_FINITE
            function.extra += 1  # the point that is not finite
        if value is None:
            value = function.value(x)
            if not math.isfinite(value):
                # Evaluated at the ends alone, it leaves nobody who knows the last good point.
                return result(Status.NOT_FINITE, "f is not finite at x, though ∇f and b are.")
    except (Exception, KeyboardInterrupt) as error:
        raise_with(error, owner, result(Status.RAISED))
    finally:
        if line is not None:
            line.close()
    return result(status)


class Function:
    """The function of a run: how it and its gradient are evaluated, and how often they were."""

    everywhere = False  # whether f is needed at every point, or at the ends alone

    def __init__(self, f: Callable[..., Any], jac: Any, args: tuple[Any, ...], kind: Kind) -> None:
        if not callable(f):
            raise TypeError(f"minimize: `f` must be a function, got {f!r}.")
        self.kind = kind
        self.nfev = 0  # calls of f alone
        self.extra = 0  # gradients that are no point's of the run
        self.f: Callable[..., Any] = (lambda x: f(x, *args)) if args else f
        if args and callable(jac):
            slope = jac
            jac = lambda x: slope(x, *args)  # noqa: E731
        # Finite differences evaluate f by themselves: those calls are counted, too.
        counted = self.evaluate if isinstance(jac, str) else self.f
        self.oracle = arrays.oracle("minimize", counted, jac, kind)

    def first(self, x: Array) -> Point:
        """The first point, checked."""
        pair = self.oracle(x)
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise ValueError(
                f"minimize: `f` must return (value, gradient) for jac=True, got {pair!r}."
            )
        value, gradient = pair
        g = arrays.first_gradient("minimize", "jac", gradient, self.kind, x)
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

    def __call__(self, x: Array) -> tuple[Any, Array]:
        value, gradient = self.oracle(x)
        g = arrays.as_gradient(gradient, self.kind, x)
        return (self.value(x) if value is None and self.everywhere else value), g

    def evaluate(self, x: Array) -> Any:
        self.nfev += 1
        return self.f(self.kind.copy(x))  # which it may work on in place

    def value(self, x: Array) -> float:
        return arrays.scalar("minimize", self.evaluate(x))


class StartError(ValueError):
    """f or its gradient is not finite at x₁."""

    def __init__(self, message: str, point: Point) -> None:
        super().__init__(message)
        self.point = point

    def __reduce__(self) -> tuple[Any, ...]:  # as of `EvaluationError`
        return type(self), (*self.args, self.point)


def _first_b(way: tuple[str, float], first: Point, function: Function, seed: int) -> float:
    """b₁: by hand, or in one of the two ways of Remark 2.2."""
    word, number = way
    if word == "number":
        return number
    if not first.sq:
        return 1.0  # the run ends here: any b will do
    if word == "gradient":
        b1: float = rule.first_b(math.sqrt(first.sq), 1.0, number)
        return b1
    # max ‖∇f(u_j) − ∇f(u_k)‖/‖u_j − u_k‖ over points near x₁: at most L.
    function.extra = int(number)
    kind, x, rng = function.kind, first.x, np.random.default_rng(seed)
    far = slopes.radius(1e-3, math.sqrt(kind.sq_norm(x)), arrays.epsilon(x))
    near = []
    for _ in range(int(number)):
        d = rng.standard_normal(tuple(x.shape))
        # At different distances: on a line, points of one distance would coincide.
        d *= far * rng.uniform(0.5, 1.0) / np.linalg.norm(d)
        u = x + kind.cast(np.asarray(d), x)
        near.append((u, function(u)[1]))
    return slopes.largest("minimize", "b_init", near, lambda v: math.sqrt(kind.sq_norm(v)))


def gradient_descent(f: Callable[..., Any], x0: Any, *, step: float, **options: Any) -> Result:
    """Gradient descent with a constant step: converges up to 1/L, may not from 2/L (Lemma 2.1).

    Args:
        f: as for `minimize`, and so are all other options.
        x0: x₁.
        step: η.
    """
    owner = "gradient_descent"
    for name in ("b_init", "method"):
        if name in options:
            given = options[name]
            raise TypeError(f"{owner}: `{name}` must not be given, got {given!r}: use `step`.")
    if not (isinstance(step, Real) and 0 < step < math.inf and 1 / step < math.inf):
        raise ValueError(f"{owner}: `step` and 1/`step` must be > 0 and finite, got {step!r}.")
    return minimize(f, x0, b_init=float(1 / step), method="constant", **options)


def checked_b_init(owner: str, value: Any) -> tuple[str, float]:
    """The way to b₁ and its number: b₁ itself, C or R."""
    try:
        return values.parse_b_init(owner, value, _B_INIT, words=("gradient", "lipschitz"))
    except (TypeError, ValueError):
        raise ValueError(f"{owner}: {_B_INIT}, got {value!r}.") from None
