"""`minimize` as a method of `scipy.optimize.minimize`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from wngrad.batch.minimizer import minimize


def scipy_method(
    fun: Callable[..., Any], x0: Any, args: tuple[Any, ...] = (), **options: Any
) -> Any:
    """For `scipy.optimize.minimize(f, x0, jac=grad, method=wngrad.scipy_method)`.

    Takes `tol` (ε, on the squared norm), `callback` and the options of `minimize`; scipy's
    `gtol` is √ε, `maxiter` is `max_steps` and `disp` is `progress`. Bounds, constraints and
    second derivatives are refused, and finite differences too: scipy does not pass them on.
    """
    from scipy.optimize import OptimizeResult

    owner = "scipy_method"
    for name in ("bounds", "constraints", "hess", "hessp"):
        given = options.pop(name, None)
        if given is not None and not (isinstance(given, (tuple, list)) and len(given) == 0):
            raise ValueError(f"{owner}: `{name}` must not be given, got {given!r}.")
    chosen = {key: value for key, value in options.items() if value is not None}
    if "jac" not in chosen:
        raise ValueError(
            f"{owner}: `jac` must be a function or True, got None; for finite differences call "
            f"wngrad.minimize(..., jac='3-point')."
        )
    if "gtol" in chosen:
        chosen["gtol"] = chosen["gtol"] ** 2
    for theirs, ours in (("gtol", "tol"), ("maxiter", "max_steps"), ("disp", "progress")):
        if theirs in chosen and ours in chosen:
            raise ValueError(f"{owner}: give `{theirs}` or `{ours}`, not both.")
        if theirs in chosen:
            chosen[ours] = chosen.pop(theirs)
    known = inspect.signature(minimize).parameters
    if unknown := sorted(set(chosen) - set(known)):
        raise TypeError(f"{owner}: `options` must be those of minimize, got {unknown}.")
    res = minimize(fun, x0, args=args, **chosen)
    fields = ("x", "fun", "jac", "nit", "nfev", "njev", "success", "message", "b", "sq_norm")
    return OptimizeResult(
        status=int(res.status), trace=res.trace, **{name: getattr(res, name) for name in fields}
    )
