"""Orthogonalization in JAX, the twin of `wngrad.optim.orthogonal`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wngrad.polynomials import ABOVE, COEFFICIENTS, NOTHING
from wngrad.transforms.blocks import wider


@partial(jax.jit, static_argnames=("precision",))  # traced once for all leaves of one shape
def orthogonalize(matrices: Array, precision: Any = "highest") -> Array:
    """U Vᵀ, nearly, of every matrix U Σ Vᵀ: singular values near 1, singular vectors kept.

    What `wngrad.optim.orthogonalize` promises for torch holds here.

    Args:
        matrices: of shape (…, rows, columns), real.
        precision: of the products, as `jnp.matmul` takes it.

    Returns:
        An array of the same shape, in float32 or wider.

    Example:
        >>> import jax.numpy as jnp
        >>> from wngrad.transforms import orthogonalize
        >>> u = orthogonalize(jnp.diag(jnp.array([3.0, 2.0, 0.5])))
        >>> bool(jnp.allclose(u, jnp.eye(3), atol=0.15))
        True
    """
    x = wider(matrices)
    if x.size == 0:
        return x
    tall = x.shape[-2] > x.shape[-1]
    x = _polynomials(_scaled(x.mT if tall else x), precision)
    return x.mT if tall else x


def _scaled(x: Array) -> Array:
    """Every matrix divided by its Frobenius norm, which neither overflows nor underflows."""
    top = jnp.abs(x).max((-2, -1), keepdims=True)
    x = x / jnp.where(top > 0, top, 1)
    sq = (x**2).sum((-2, -1), keepdims=True)
    x = x / jnp.sqrt(jnp.where(sq > 0, sq, 1))
    return jnp.where(jnp.abs(x) < NOTHING, 0, x)


def _polynomials(x: Array, precision: Any) -> Array:
    matmul = partial(jnp.matmul, precision=precision)
    (a, b, c), *rest = COEFFICIENTS
    gram = matmul(x, x.mT)
    square = matmul(gram, gram)
    # (Σσ⁸)^⅛ is at least the largest σ, and at most rank^⅛ times as much.
    sq = (square**2).sum((-2, -1), keepdims=True)
    scale = 1 / (ABOVE * jnp.sqrt(jnp.sqrt(jnp.sqrt(jnp.where(sq > 0, sq, 1)))))
    x = x * scale
    x = a * x + matmul((b * scale**2) * gram + (c * scale**4) * square, x)
    for a, b, c in rest:
        gram = matmul(x, x.mT)
        x = a * x + matmul(b * gram + c * matmul(gram, gram), x)  # a·X + (b·XXᵀ + c·(XXᵀ)²)·X
    return x
