"""`minimize` as a method of `scipy.optimize.minimize`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from numbers import Real
from typing import Any, cast

import numpy as np

from wngrad import values
from wngrad.batch.arrays import ROUNDING_UNITS, kind_of
from wngrad.batch.iterates import Point
from wngrad.batch.minimizer import StartError, minimize
from wngrad.batch.observer import BestPoint, Callback
from wngrad.batch.result import Result, Status

_OWNER = "scipy_method"
_STOPPED = 99  # SciPy's status of a run that its callback has ended
_WORSE = "The tolerance was reached at a point worse than x0; x is the best point seen."


def scipy_method(
    fun: Callable[..., Any], x0: Any, args: tuple[Any, ...] = (), **options: Any
) -> Any:
    """WNGrad for `scipy.optimize.minimize(f, x0, jac=grad, method=wngrad.scipy_method)`.

    Takes `tol` (ε, on the squared norm), `callback` and the options of `minimize`; scipy's
    `gtol` is √ε, `maxiter` is `max_steps`, and `disp` is `progress` and a message at the end, an
    OptimizeWarning where the run did not converge. f is evaluated at every point, and a run that
    ends short of the tolerance returns the best point it has seen.

    Without `jac` the gradient is taken by central differences, as for "3-point": scipy hands no
    name of a scheme to a method of this kind. Bounds and constraints are refused; second
    derivatives are not used.
    """
    from scipy.optimize import OptimizeResult, OptimizeWarning

    # scipy hands these to every method: what would change the answer is refused.
    for name in ("bounds", "constraints"):
        given = options.pop(name, None)
        if given is not None and not (isinstance(given, (tuple, list)) and len(given) == 0):
            raise ValueError(f"{_OWNER}: `{name}` must not be given, got {given!r}.")
    for name in ("hess", "hessp"):
        if options.pop(name, None) is not None:
            text = f"{_OWNER}: `{name}` is not used: WNGrad takes first derivatives only."
            warnings.warn(text, RuntimeWarning, stacklevel=3)
    disp = bool(options.get("disp"))
    chosen = _translated({key: value for key, value in options.items() if value is not None})
    kind = kind_of(x0)
    if kind.gradient_of is None:
        chosen.setdefault("jac", "3-point")
    callback = chosen.pop("callback", None)
    if callback is not None and not callable(callback):
        raise TypeError(f"{_OWNER}: `callback` must be a function, got {callback!r}.")
    watch = None if callback is None else Callback(callback, kind, OptimizeResult)
    best = BestPoint(watch)
    try:
        res = minimize(fun, x0, args=args, callback=cast(Any, best), **chosen)
    except StartError as start:
        x, g, sq, value, _ = start.point
        result = OptimizeResult(
            status=int(Status.NOT_FINITE), message=str(start), success=False, x=x, fun=value, jac=g,
            nit=0, nfev=1, njev=1, sq_norm=sq,
        )  # fmt: skip
    else:
        result = OptimizeResult(**_fields(res, cast(Point, best.point), watch))
    if disp:  # as scipy's methods: the message, or a warning, and what it took
        if result.success:
            print(result.message)
        else:
            warnings.warn(result.message, OptimizeWarning, stacklevel=3)
        print(f"         Current function value: {result.fun:f}")
        print(f"         Iterations: {result.nit}")
        print(f"         Function evaluations: {result.nfev}")
        print(f"         Gradient evaluations: {result.njev}")
    return result


def _translated(options: dict[str, Any]) -> dict[str, Any]:
    """scipy's options under the names of `minimize`, checked under their own."""
    if "gtol" in options:
        gtol = options["gtol"]
        if not (isinstance(gtol, Real) and float(gtol) >= 0):
            raise ValueError(f"{_OWNER}: `gtol` must be >= 0, got {gtol!r}.")
        options["gtol"] = float(gtol) ** 2
    if "maxiter" in options:
        most = options["maxiter"]
        whole = isinstance(most, (float, np.floating)) and float(most).is_integer()
        options["maxiter"] = values.count(_OWNER, "maxiter", int(most) if whole else most, least=0)
    for theirs, ours in (("gtol", "tol"), ("maxiter", "max_steps"), ("disp", "progress")):
        if theirs in options and ours in options:
            raise ValueError(f"{_OWNER}: give `{theirs}` or `{ours}`, not both.")
        if theirs in options:
            options[ours] = options.pop(theirs)
    if unknown := sorted(set(options) - set(inspect.signature(minimize).parameters)):
        raise TypeError(f"{_OWNER}: `options` must be those of minimize, got {unknown}.")
    return options


def _fields(res: Result, best: Point, callback: Callback | None) -> dict[str, Any]:
    """What scipy calls the parts of a result, at the point that is returned."""
    names = (
        "x",
        "fun",
        "jac",
        "nit",
        "nfev",
        "njev",
        "success",
        "message",
        "b",
        "trace",
        "sq_norm",
    )
    fields = {name: getattr(res, name) for name in names} | {"status": int(res.status)}
    if callback is not None and res.status is Status.STOPPED:
        fields["status"] = _STOPPED
        if callback.raised:
            fields["message"] = "`callback` raised `StopIteration`."
    slack = ROUNDING_UNITS * res.eps * max(1.0, abs(res.start.fun))
    worse = not res.fun <= res.start.fun + slack
    if (worse or not res.success) and best.value < res.fun:
        fields |= {"x": best.x, "fun": float(best.value), "jac": best.g, "sq_norm": best.sq}
        if res.success:
            fields |= {"success": False, "message": _WORSE}
    return fields
