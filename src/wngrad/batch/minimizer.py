"""Algorithm 1: gradient descent that finds its step size, and stops on ‖∇f‖²."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, Literal

from wngrad import rule
from wngrad.batch import arrays
from wngrad.batch.descent import Function, Limits, descend
from wngrad.batch.first_b import BInit, first_b, parse_b_init
from wngrad.batch.observer import Observer
from wngrad.batch.result import Result
from wngrad.batch.updates import UPDATES

Method = Literal["wngrad", "adagrad-norm", "constant"]


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
    _check(method, b_init, tol, max_steps, max_seconds)
    kind, x = arrays.start("minimize", x0)
    function = Function(f, args if isinstance(args, tuple) else (args,), jac, kind)
    observed = callback is not None or trace or progress
    observer = Observer(kind, callback, trace, progress) if observed else None
    first = function.first(x)
    b, function.extra = first_b("minimize", b_init, first, function.gradient, kind, int(seed))
    if method == "adagrad-norm":
        b = rule.adagrad_norm(b, first.sq, 1.0)
    limits = Limits(float(tol), int(max_steps), float(max_seconds))
    return descend(function, method, first, b, limits, observer)


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


def _check(method: Any, b_init: Any, tol: Any, max_steps: Any, max_seconds: Any) -> None:
    owner = "minimize"
    if method not in UPDATES:
        raise ValueError(f"{owner}: `method` must be one of {list(UPDATES)}, got {method!r}.")
    parse_b_init(owner, b_init)
    if not (isinstance(tol, Real) and float(tol) >= 0):
        raise ValueError(f"{owner}: `tol` must be >= 0, got {tol!r}.")
    check_count(owner, "max_steps", max_steps, least=0)
    if not (isinstance(max_seconds, Real) and float(max_seconds) >= 0):
        raise ValueError(f"{owner}: `max_seconds` must be >= 0, got {max_seconds!r}.")


def check_count(owner: str, name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{owner}: `{name}` must be an integer >= {least}, got {value!r}.")
