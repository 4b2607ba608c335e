"""NumPy arrays, torch tensors and JAX arrays: what each kind needs from a minimizer."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = Any
# x -> (f(x) or None where it was not computed, ∇f(x))
Oracle = Callable[[Array], tuple[Any, Array]]

# What rounding may cost on the way to a number, in units of its last place and relative to the
# numbers that went in: 1e-12 in float64.
ROUNDING_UNITS = 4500

_JAC = (
    "`jac` must be a function, True if `f` returns (value, gradient), '2-point' or '3-point' for "
    "finite differences, or 'cs' for complex steps (NumPy alone); torch tensors and JAX arrays are "
    "differentiated by themselves"
)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of array."""

    array: type
    sq_norm: Callable[[Array], float]
    copy: Callable[[Array], Array]
    to_numpy: Callable[[Array], np.ndarray]
    cast: Callable[[Array, Array], Array]  # an array, or one of NumPy's, in the second one's type
    plain: Callable[[Callable[..., Any]], Callable[..., Any]]  # a function, without autograd
    gradient_of: Callable[[Callable[..., Any]], Oracle] | None  # its own autograd


def kind_of(x: object) -> Kind:
    """The kind of an array; a library that is not loaded has made none."""
    if (torch := sys.modules.get("torch")) is not None and isinstance(x, torch.Tensor):
        return _torch()
    if (jax := sys.modules.get("jax")) is not None and isinstance(x, jax.Array):
        return _jax()
    return _NUMPY


def start(owner: str, x0: Any) -> tuple[Kind, Array]:
    """The starting point as an array of its own, of float32 or float64, and its kind."""
    kind = kind_of(x0)
    x = x0
    if kind is _NUMPY:
        x = np.asarray(x0)
        x = x.astype(np.float64) if x.dtype.kind in "iub" else x
    if str(x.dtype).rpartition(".")[2] not in ("float32", "float64"):
        raise TypeError(f"{owner}: `x0` must hold float32 or float64 numbers, got {x0!r}.")
    x = kind.copy(x)
    if not np.isfinite(kind.to_numpy(x)).all():
        raise ValueError(f"{owner}: `x0` must be finite, got {x0!r}.")
    return kind, x


def epsilon(x: Array) -> float:
    """The rounding unit of an array's type."""
    return float(np.finfo(str(x.dtype).rpartition(".")[2]).eps)


def norm(kind: Kind, v: Array) -> float:
    """‖v‖, also where ‖v‖² is too large or too small for a float."""
    sq = kind.sq_norm(v)
    if 1e-280 < sq < math.inf:
        return math.sqrt(sq)
    wide = np.asarray(kind.to_numpy(v), np.float64)
    largest = float(np.abs(wide).max(initial=0.0))
    if not 0 < largest < math.inf:
        return largest
    return largest * float(np.linalg.norm(wide / largest))


def scalar(owner: str, value: Any) -> float:
    """f's value as a float; an array of one element will do, as for scipy."""
    try:
        return float(value.reshape(()) if getattr(value, "ndim", 0) else value)
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(f"{owner}: `f` must return one number, got {value!r}.") from None


# ---------------------------------------------------------------- gradients


def oracle(owner: str, f: Callable[..., Any], jac: Any, kind: Kind) -> Oracle:
    """x -> (value or None, gradient), from what the caller gave."""
    if jac is True:
        return kind.plain(lambda x: f(kind.copy(x)))  # a function may work on its x in place
    if callable(jac):
        gradient = kind.plain(lambda x: jac(kind.copy(x)))
        return lambda x: (None, gradient(x))
    if isinstance(jac, str) and jac in ("2-point", "3-point"):
        return _finite_differences(owner, kind.plain(f), central=jac == "3-point", kind=kind)
    if isinstance(jac, str) and jac == "cs" and kind is _NUMPY:
        return _complex_steps(owner, f)
    if jac is not None:
        raise ValueError(f"{owner}: {_JAC}; got {jac!r}.")
    if kind.gradient_of is None:
        raise ValueError(f"{owner}: {_JAC}; got None for a NumPy array.")
    return kind.gradient_of(f)


def as_gradient(gradient: Any, kind: Kind, x: Array) -> Array:
    """A gradient in memory of its own, which its function may use again, and of x's type.

    Of a narrower one, ‖g‖² would be rounded to that type: 200² is 64 in int8.
    """
    of_this_kind = isinstance(gradient, kind.array)
    if of_this_kind and gradient.dtype == x.dtype:
        return kind.copy(gradient)
    g = gradient if of_this_kind else np.asarray(gradient)
    if "complex" in str(g.dtype):
        raise TypeError(f"a gradient must hold real numbers, got {g.dtype}")
    if not of_this_kind:
        g = g.astype(np.float64)
        g = g.reshape(x.shape) if g.size == math.prod(x.shape) else g
    return kind.cast(g, x)


def first_gradient(owner: str, name: str, gradient: Any, kind: Kind, x: Array) -> Array:
    """The first gradient, checked."""
    try:
        g = as_gradient(gradient, kind, x)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{owner}: `{name}` must return an array of real numbers, got {gradient!r}."
        ) from error
    if tuple(g.shape) != tuple(x.shape):
        raise ValueError(
            f"{owner}: `{name}` must return an array of the shape of `x0`, {tuple(x.shape)}, "
            f"got {tuple(g.shape)}."
        )
    return g


def _complex_steps(owner: str, f: Callable[..., Any]) -> Oracle:
    """∂f/∂x_i = Im f(x + ih·e_i)/h: nothing is subtracted, so h may be tiny; f must be analytic."""

    def value_and_gradient(x: Array) -> tuple[Any, Array]:
        gradient, h = np.empty(x.size), 1e-20
        for i in range(x.size):
            z = np.array(x, np.complex128)  # of a 0-d x `astype` may make a scalar
            z.flat[i] += 1j * h
            value = f(z)
            if not (np.iscomplexobj(value) and np.size(value) == 1):
                raise ValueError(
                    f"{owner}: `f` must return one complex number at complex x for jac='cs', "
                    f"got {value!r}."
                )
            gradient[i] = float(np.reshape(np.imag(value), ())) / h
        return scalar(owner, f(x)), gradient.reshape(x.shape)

    return value_and_gradient


def _finite_differences(owner: str, f: Callable[..., Any], central: bool, kind: Kind) -> Oracle:
    def value_and_gradient(x: Array) -> tuple[Any, Array]:
        flat = kind.to_numpy(x).astype(np.float64).ravel()
        # The step that balances truncation against rounding: ε^(1/2), or ε^(1/3) if central.
        h = epsilon(x) ** (1 / 3 if central else 1 / 2)

        def moved(i: int, d: float) -> float:
            new = flat.copy()
            new[i] += d
            return scalar(owner, f(kind.cast(new.reshape(x.shape), x)))

        value, gradient = scalar(owner, f(x)), np.empty_like(flat)
        for i in range(flat.size):
            d = h * max(1.0, abs(flat[i]))
            ahead, behind = moved(i, d), moved(i, -d) if central else value
            gradient[i] = (ahead - behind) / ((1 + central) * d)
        return value, kind.cast(gradient.reshape(x.shape), x)

    return value_and_gradient


def finite_difference_gradient(f: Callable[..., Any]) -> Callable[[Array], Array]:
    """The central-difference gradient of a function of a NumPy array."""
    oracle = _finite_differences("finite_difference_gradient", f, central=True, kind=_NUMPY)
    return lambda x: oracle(x)[1]


# ---------------------------------------------------------------- the three kinds


def _numpy_sq_norm(g: Array, vdot: Callable[..., Any] = np.vdot) -> float:
    wide = np.asarray(g, np.float64)
    return float(vdot(wide, wide))


_NUMPY = Kind(
    array=np.ndarray,
    sq_norm=_numpy_sq_norm,
    copy=np.array,
    to_numpy=np.asarray,
    cast=lambda a, like: a.astype(like.dtype),
    plain=lambda f: f,
    gradient_of=None,
)


def _torch() -> Kind:
    import torch

    def gradient_of(f: Callable[..., Any]) -> Oracle:
        def value_and_gradient(x: Array) -> tuple[Any, Array]:
            with torch.inference_mode(False), torch.enable_grad():
                x = x.detach().clone().requires_grad_()
                value = f(x)
                (gradient,) = torch.autograd.grad(value, x)
            return value.detach(), gradient

        return value_and_gradient

    def sq_norm(g: Array) -> float:
        flat = g.detach().flatten()
        flat = flat if flat.device.type == "mps" else flat.double()  # which has no float64
        return float(torch.dot(flat, flat))

    return Kind(
        array=torch.Tensor,
        sq_norm=sq_norm,
        copy=lambda x: x.detach().clone(),
        to_numpy=lambda x: x.detach().cpu().numpy(),
        cast=lambda a, like: torch.as_tensor(a).detach().to(like),
        plain=lambda f: torch.no_grad()(f),
        gradient_of=gradient_of,
    )


def _jax() -> Kind:
    import jax
    import jax.numpy as jnp

    def gradient_of(f: Callable[..., Any]) -> Oracle:
        def value(x: Array) -> Any:
            y = f(x)
            return y.reshape(()) if getattr(y, "size", 0) == 1 else y

        oracle: Oracle = jax.value_and_grad(value)
        return oracle

    return Kind(
        array=jax.Array,
        sq_norm=_numpy_sq_norm,  # in float64, which JAX may not have
        copy=lambda x: x,  # they never change
        to_numpy=np.asarray,
        cast=lambda a, like: jnp.asarray(a, like.dtype),
        plain=lambda f: f,
        gradient_of=gradient_of,
    )
