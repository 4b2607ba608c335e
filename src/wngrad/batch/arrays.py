"""NumPy arrays, torch tensors and JAX arrays: what each kind needs from a minimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
# x -> (f(x) or None where it was not computed, ∇f(x))
Oracle = Callable[[Array], tuple[Any, Array]]

_JAC = (
    "`jac` must be a function, True if `f` returns (value, gradient), or '2-point' or '3-point' "
    "for finite differences; torch tensors and JAX arrays are differentiated by themselves"
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of array."""

    name: str
    sq_norm: Callable[[Array], float]
    equal: Callable[[Array, Array], bool]
    gradient_of: Callable[[Callable[..., Any]], Oracle] | None  # its own autograd
    from_numpy: Callable[[np.ndarray, Array], Array]  # an array like the second one


def _loaded(module: str, name: str, x: object) -> bool:
    """Whether `x` is an instance of a class of a module; if it is, the module is loaded."""
    return module in sys.modules and isinstance(x, getattr(sys.modules[module], name))


def kind_of(x: object) -> Kind:
    if _loaded("torch", "Tensor", x):
        return _torch()
    if _loaded("jax", "Array", x):
        return _jax()
    return _NUMPY


def start(owner: str, x0: object) -> tuple[Kind, Array]:
    """The starting point as an array of floating-point numbers, and its kind."""
    kind = kind_of(x0)
    x: Any = np.asarray(x0) if kind is _NUMPY else x0
    if kind is _NUMPY and x.dtype.kind in "iub":
        x = x.astype(np.float64)
    floating = x.is_floating_point() if kind.name == "torch" else np.dtype(x.dtype).kind == "f"
    if not floating:
        raise TypeError(f"{owner}: `x0` must hold real numbers, got {x0!r}.")
    if kind.name == "torch":
        x = x.detach()
    if not np.isfinite(kind.sq_norm(x)):
        raise ValueError(f"{owner}: `x0` must be finite, got {x0!r}.")
    return kind, x


def oracle(
    owner: str, f: Callable[..., Any], jac: Any, kind: Kind, args: tuple[Any, ...]
) -> Oracle:
    """x -> (value or None, gradient), from what the caller gave."""
    if not callable(f):
        raise TypeError(f"{owner}: `f` must be a function, got {f!r}.")
    g = (lambda x: f(x, *args)) if args else f
    if jac is True:
        return g
    if callable(jac):
        return (lambda x: (None, jac(x, *args))) if args else (lambda x: (None, jac(x)))
    if isinstance(jac, str) and jac in ("2-point", "3-point"):
        return _finite_differences(g, central=jac == "3-point", kind=kind)
    if jac is not None:
        raise ValueError(f"{owner}: {_JAC}; got {jac!r}.")
    if kind.gradient_of is None:
        raise ValueError(f"{owner}: {_JAC}; got None for a NumPy array.")
    return kind.gradient_of(g)


def _finite_differences(f: Callable[..., Any], central: bool, kind: Kind) -> Oracle:
    def value_and_gradient(x: Array) -> tuple[Any, Array]:
        flat = np.asarray(x, dtype=np.float64).ravel()
        # The step that balances truncation against rounding: ε^(1/2), or ε^(1/3) if central.
        h = np.finfo(np.asarray(x).dtype).eps ** (1 / 3 if central else 1 / 2)
        value = f(x)
        gradient = np.empty_like(flat)
        for i in range(flat.size):
            d = h * max(1.0, abs(flat[i]))
            ahead = f(kind.from_numpy(_moved(flat, i, d), x))
            behind = f(kind.from_numpy(_moved(flat, i, -d), x)) if central else value
            gradient[i] = (float(ahead) - float(behind)) / ((1 + central) * d)
        return value, kind.from_numpy(gradient, x)

    return value_and_gradient


def finite_difference_gradient(f: Callable[..., Any]) -> Callable[[Array], Array]:
    """The central-difference gradient of a function of a NumPy array."""
    both = _finite_differences(f, central=True, kind=_NUMPY)
    return lambda x: both(x)[1]


def _moved(flat: np.ndarray, i: int, d: float) -> np.ndarray:
    new = flat.copy()
    new[i] += d
    return new


_NUMPY = Kind(
    name="numpy",
    sq_norm=lambda g: float(np.vdot(g, g)),
    equal=lambda x, y: bool(np.array_equal(x, y)),
    gradient_of=None,
    from_numpy=lambda a, like: a.reshape(np.shape(like)).astype(np.asarray(like).dtype),
)


def _torch() -> Kind:
    import torch

    def gradient_of(f: Callable[..., Any]) -> Oracle:
        def value_and_gradient(x: Array) -> tuple[Any, Array]:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                value = f(x)
                (gradient,) = torch.autograd.grad(value, x)
            return value.detach(), gradient

        return value_and_gradient

    def sq_norm(g: Array) -> float:
        flat = g.detach().flatten()
        return float(torch.dot(flat, flat))

    return Kind(
        name="torch",
        sq_norm=sq_norm,
        equal=torch.equal,
        gradient_of=gradient_of,
        from_numpy=lambda a, like: torch.as_tensor(a).to(like).view_as(like),
    )


def _jax() -> Kind:
    import jax
    import jax.numpy as jnp

    return Kind(
        name="jax",
        sq_norm=lambda g: float(jnp.vdot(g, g)),
        equal=lambda x, y: bool(jnp.array_equal(x, y)),
        gradient_of=jax.value_and_grad,
        from_numpy=lambda a, like: jnp.asarray(a, like.dtype).reshape(like.shape),
    )
