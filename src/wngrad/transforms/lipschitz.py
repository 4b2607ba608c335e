"""b₁ from a sampled Lipschitz constant (Remark 2.2), the twin of `wngrad.optim.lipschitz`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from wngrad import slopes, values
from wngrad.transforms.blocks import arrays
from wngrad.transforms.settings import Number, PyTree, number


def lipschitz_b_init(
    loss: Callable[[PyTree], Any],
    params: PyTree,
    *,
    learning_rate: Number = 1.0,
    points: int = 2,
    radius: float = 1e-3,
    key: Array | None = None,
) -> float:
    """b₁ = λ·max ‖∇f(u_j) − ∇f(u_k)‖/‖u_j − u_k‖ over points near the start (Remark 2.2).

    An estimate of the gradient's Lipschitz constant from below. It is a number, so not to be
    called inside `jit`.

    Args:
        loss: f, of the parameters alone.
        params: the parameters at their start.
        learning_rate: the λ the optimizer will be given; b₁ is in proportion to it.
        points: R ≥ 2, the number of points and of gradients.
        radius: how far the points lie from the start, relative to the parameters' norm (or, if
            that is smaller, to 1).
        key: for the points; `jax.random.key(0)` if None.

    Returns:
        A number for `b_init`.

    Example:
        >>> import jax.numpy as jnp
        >>> from wngrad.transforms import lipschitz_b_init, wngrad
        >>> params = {"w": jnp.ones(3)}  # f = 2‖w‖², so L = 4
        >>> b1 = lipschitz_b_init(lambda p: 2 * (p["w"] ** 2).sum(), params)
        >>> opt = wngrad(b_init=b1)
        >>> round(b1, 3)
        4.0
    """
    owner = "lipschitz_b_init"
    lam = float(number(owner, "learning_rate", learning_rate, above=0.0))
    far = float(number(owner, "radius", radius, above=0.0))
    points = values.count(owner, "points", points, least=2)
    params = arrays(params)
    start, restore = ravel_pytree(params)
    if not start.size:
        raise ValueError(f"{owner}: `params` must have an entry, got {params!r}.")
    eps = max(float(jnp.finfo(p.dtype).eps) for p in jax.tree.leaves(params))  # type: ignore[no-untyped-call]
    size = slopes.radius(far, _norm(_exactly(start)), eps)
    near = []
    for seed in jax.random.split(jax.random.key(0) if key is None else key, points):
        away = jax.random.normal(seed, start.shape, start.dtype)
        point = restore((start + size * away / jnp.linalg.norm(away)).astype(start.dtype))
        reached, gradient = (ravel_pytree(tree)[0] for tree in (point, jax.grad(loss)(point)))
        near.append((_exactly(reached), _exactly(gradient)))  # after rounding to their types
    return lam * slopes.largest(owner, "loss", near, _norm)


def _exactly(x: Array) -> Any:
    """An array of NumPy in 64 bits."""
    return np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)


def _norm(x: Any) -> float:
    return float(np.linalg.norm(x))
