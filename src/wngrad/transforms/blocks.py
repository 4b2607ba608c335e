"""Blocks of a pytree of JAX arrays: the entries that share one b, and the rule for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from wngrad.guard import guarded_b
from wngrad.transforms.layouts import Path, Shape, flax_neuron_axis, from_0
from wngrad.transforms.settings import PyTree, Settings


class Blocks(NamedTuple):
    """The blocks of one leaf after the rule; with per="model" the one block of all leaves.

    XLA divides a leaf by its b by multiplying with 1/b, which would be denormal, and so 0, for the
    largest b. So a power of two takes b close to 1, and what it divides with it.
    """

    b: Array  # to be stored
    live: Array  # whether a block takes this step
    skipped: Any  # how many were left alone
    scale: Array  # that power
    before: Array  # the b that was stored, times `scale`
    divisor: Array  # the new b, times `scale`

    def over(self, u: Array) -> Array:
        """u/b_j"""
        return times(self.scale, u) / self.divisor


def first_b(settings: Settings, params: PyTree) -> PyTree:
    """b₁, made of the parameters so that it is sharded like them; 0 where there is none yet."""

    def zero(path: Path, p: Array) -> Array:
        axes = _reduced_axes(settings, path, p.shape)
        return jnp.zeros_like(p, b_dtype(p)).sum(axes, keepdims=settings.per != "model")

    zeros = jax.tree_util.tree_map_with_path(zero, params)
    if settings.per == "model":
        zeros = sum(jax.tree.leaves(zeros), jnp.zeros((), jnp.float32))
    b1 = settings.b_init if settings.c is None else 0.0
    return jax.tree.map(lambda zero: (zero + b1).astype(zero.dtype), zeros)


def _reduced_axes(settings: Settings, path: Path, shape: Shape) -> tuple[int, ...]:
    """The axes over which a block's norm is taken."""
    n = len(shape)
    if settings.per != "neuron":
        return tuple(range(n))
    axis = flax_neuron_axis if settings.neuron_axis is None else settings.neuron_axis
    axes = axis(path, shape) if callable(axis) else axis if n > 1 else None
    if axes is None:
        return ()
    neurons = from_0(axes, n)
    if neurons is None:
        raise ValueError(
            f"{settings.owner}: `neuron_axis` must be an axis of every leaf, got {axes!r} for "
            f"{jax.tree_util.keystr(path)} of shape {shape}."
        )
    return tuple(i for i in range(n) if i not in neurons)


def grown(settings: Settings, lam: Any, b: Array, u: Array) -> Blocks:
    """b_j ← b_{j-1} + λ²‖u‖²/b_{j-1}, for all blocks of a leaf."""
    norm = norm_of(u, b.shape)
    info: Any = jnp.finfo(b.dtype)  # type: ignore[no-untyped-call]
    # Not to be known as constants, whose squares XLA would take by themselves: see `times`.
    before, rate = (jnp.where(jnp.isnan(norm), norm, x).astype(b.dtype) for x in (b, lam))
    new, finite = guarded_b(
        jnp, before, None, rate, c=settings.c, floor=float(info.tiny) / float(info.eps),
        norm=norm, narrow=lambda w: w.astype(b.dtype),
    )  # fmt: skip
    still = jnp.asarray(lam) == 0  # A step without rate changes nothing, whatever the gradient.
    new, finite = jnp.where(still, b, new), finite | still
    live = (new != 0) & ~still
    divisor = jnp.where(new == 0, 1, new)
    skipped: Any = 0
    if settings.nonfinite == "skip":
        new, live, skipped = jnp.where(finite, new, b), live & finite, (~finite).sum()
    scale = power_of_two(divisor)
    return Blocks(new, live, skipped, scale, scale * b, scale * divisor)


# ---------------------------------------------------------------- norms and types


def norm_of(g: Array, shape: Shape = ()) -> Array:
    """‖g‖ of every block in float32 or wider, as an array of this shape; of all of it by default.

    Its largest entry is brought close to 1, so that no square overflows or vanishes.
    """
    g = jnp.abs(wider(g))
    axes = tuple(i for i in range(g.ndim) if not shape or shape[i] == 1)
    scale = power_of_two(g.max(axes, keepdims=True, initial=0))
    sq = (times(scale, g) ** 2).sum(axes, keepdims=True)
    positive = sq > 0
    # √ has no slope at 0
    norm = jnp.where(positive, jnp.sqrt(jnp.where(positive, sq, 1)), sq) / scale
    return norm.reshape(shape)


def power_of_two(x: Array) -> Array:
    """s = 2⁻ᵏ with 1 <= s·x < 4, for every normal x; 1 for one that is not finite.

    Neither s nor 1/s is denormal, and s·x is exact. s is made of the bits of x, as `exp2` and `**`
    are not exact on every device.
    """
    info: Any = jnp.finfo(x.dtype)  # type: ignore[no-untyped-call]
    least = float(info.tiny)
    x = jnp.where(jnp.isfinite(x), jnp.clip(jax.lax.stop_gradient(x), least, 1 / least), 1)
    integer = np.dtype(f"uint{info.bits}")
    one, exponent = (np.asarray(value, info.dtype).view(integer) for value in (1, np.inf))
    bits = 2 * one - (jax.lax.bitcast_convert_type(x, integer) & exponent)
    return jax.lax.bitcast_convert_type(bits, info.dtype)


def times(scale: Array, x: Array) -> Array:
    """s·x, and NaN where it is not finite.

    XLA moves constant factors about: (s·c)² may become s²·c², and s·(c·x) be taken as c·(s·x),
    which overflow or vanish. It moves none past a choice.
    """
    scaled = scale * jnp.where(jnp.isfinite(x), x, jnp.nan)
    return jnp.where(jnp.isfinite(scaled), scaled, jnp.nan)


def b_dtype(p: Array) -> Any:
    """The type of a parameter's b: real, and float32 or wider."""
    return jnp.promote_types(jnp.zeros((), p.dtype).real.dtype, jnp.float32)


def arrays(tree: PyTree) -> PyTree:
    """A tree with arrays in the place of Python's numbers."""

    def leaf(x: Any) -> Any:  # With a type, the array is not a weakly typed one.
        is_number = isinstance(x, (int, float, complex))
        return jnp.asarray(x, jnp.result_type(x)) if is_number else x

    return jax.tree.map(leaf, tree)


def wider(g: Array) -> Array:
    return g.astype(jnp.promote_types(g.dtype, jnp.float32))
