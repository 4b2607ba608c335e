"""Orthogonalization in JAX, the twin of `wngrad.optim.orthogonal`."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wngrad.polynomials import ABOVE, COEFFICIENTS, NOTHING, WIDE
from wngrad.transforms.blocks import power_of_two, times, wider


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
    x = x.mT if tall else x
    # Divided by the Frobenius norm, which neither overflows nor underflows.
    x = times(power_of_two(jnp.abs(x).max((-2, -1), keepdims=True)), x)
    sq = (x**2).sum((-2, -1), keepdims=True)
    x = x / jnp.sqrt(jnp.where(sq > 0, sq, 1))
    x = jnp.where(jnp.abs(x) < NOTHING, 0, x)
    exact = precision in ("highest", jax.lax.Precision.HIGHEST)
    by_gram = exact and x.shape[-1] > WIDE * x.shape[-2]
    x = (_by_gram if by_gram else _polynomials)(x, precision)
    return x.mT if tall else x


def _scale(square: Array) -> Array:
    """What brings all σ to 1 at most, from (XXᵀ)².

    (Σσ⁸)^⅛ is at least the largest σ, and at most rank^⅛ times as much.
    """
    sq = (square**2).sum((-2, -1), keepdims=True)
    return 1 / (ABOVE * jnp.sqrt(jnp.sqrt(jnp.sqrt(jnp.where(sq > 0, sq, 1)))))


def _by_gram(x: Array, precision: Any) -> Array:
    """P·X, where P is made from XXᵀ alone: fewer operations where a row is much longer."""
    matmul = partial(jnp.matmul, precision=precision)
    gram = matmul(x, x.mT)
    scale = _scale(matmul(gram, gram))
    gram, product = gram * scale**2, scale * jnp.eye(x.shape[-2], dtype=x.dtype)
    for k, (a, b, c) in enumerate(COEFFICIENTS, 1):
        factor = b * gram + c * matmul(gram, gram)
        product = a * product + matmul(factor, product)  # P ← (a + b·A + c·A²)·P
        if k < len(COEFFICIENTS):
            half = a * gram + matmul(factor, gram)
            gram = a * half + matmul(half, factor)  # A ← (a + b·A + c·A²)²·A
    return matmul(product, x)


def _polynomials(x: Array, precision: Any) -> Array:
    matmul = partial(jnp.matmul, precision=precision)
    (a, b, c), *rest = COEFFICIENTS
    gram = matmul(x, x.mT)
    square = matmul(gram, gram)
    scale = _scale(square)
    x = x * scale
    x = a * x + matmul((b * scale**2) * gram + (c * scale**4) * square, x)
    for a, b, c in rest:
        gram = matmul(x, x.mT)
        x = a * x + matmul(b * gram + c * matmul(gram, gram), x)  # a·X + (b·XXᵀ + c·(XXᵀ)²)·X
    return x
