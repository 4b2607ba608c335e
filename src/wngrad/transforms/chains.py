"""Parts of an optax chain that the optimizers here share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from wngrad.transforms.blocks import arrays, wider
from wngrad.transforms.settings import PyTree


def narrowed(
    wide: optax.GradientTransformation, needs_params: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """Updates in the gradients' type, rounded once, at the end; leaves may be Python's numbers.

    Args:
        wide: gives its updates in float32 or wider.
        needs_params: the owner of a `weight_decay`, which must be given the parameters.
    """
    inner = optax.with_extra_args_support(wide)

    def init(params: PyTree) -> Any:
        return inner.init(arrays(params))

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        if needs_params is not None and params is None:
            raise ValueError(
                f"{needs_params}: `params` must be given to `update`, since `weight_decay` needs "
                f"them, got None."
            )
        updates, params = arrays(updates), arrays(params)
        new, state = inner.update(updates, state, params, **extra)
        return like(new, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def add_decay(decay: Any) -> optax.GradientTransformation:
    """g + w·x in float32 or wider: in bfloat16 a w·x below g/256 would vanish whole."""
    return optax.stateless(
        lambda g, x: jax.tree.map(lambda g, x: wider(g) + decay * wider(x), g, x)
    )


def bias_correction(beta: Any, t: jax.Array) -> jax.Array:
    """1 − βᵗ for t >= 1, to the last digits: βᵗ is near 1, and its rounding all of the rest."""
    if isinstance(beta, jax.Array):
        log: Any = jnp.log1p(beta - 1)
    else:
        log = math.log(beta) if beta > 0 else -math.inf
    return -jnp.expm1(t * log)


def is_off(setting: Any) -> bool:
    """Whether μ or a decay is known to be 0; a traced one is not."""
    return setting is None or (isinstance(setting, float) and setting == 0)


def like(tree: PyTree, leaves: PyTree) -> PyTree:
    """A tree in the types of another."""
    return jax.tree.map(lambda new, old: new.astype(old.dtype), tree, leaves)


def zero() -> jax.Array:
    """A count at its start."""
    return jnp.zeros((), jnp.int32)


def placed_by_compiler(f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """f(x), placed as x is, where products of matrices must not ask how to place their results.

    Under a mesh with explicit axes they do; older versions of JAX have no such meshes.
    """
    sharding = jax.typeof(x).sharding if hasattr(jax, "typeof") else None
    if sharding is None or not sharding.mesh.explicit_axes:
        return f(x)
    placed: jax.Array = jax.sharding.auto_axes(f, out_sharding=sharding)(x)
    return placed
