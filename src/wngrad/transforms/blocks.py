"""Blocks of a pytree of JAX arrays: the entries that share one b, and the rule for it."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from wngrad.guard import guarded_b
from wngrad.transforms.checks import checked, is_axes, parse_b_init
from wngrad.transforms.neurons import flax_neuron_axis
from wngrad.transforms.settings import BInit, NeuronAxis, Nonfinite, Per, PyTree, Rate


class Growth(NamedTuple):
    """The blocks of one update, as trees.

    XLA divides a leaf by its b by multiplying with 1/b, which would be denormal, and so 0, for the
    largest b. So a power of two takes b close to 1, and what it divides with it.
    """

    lam: Any
    b: PyTree  # to be stored
    scale: PyTree  # of each leaf: that power
    before: PyTree  # of each leaf: the b that was stored, times `scale`
    divisor: PyTree  # of each leaf: the new b, times `scale`
    live: PyTree  # of each leaf: whether the block takes this step
    live_blocks: PyTree  # the same in the shape of `b`
    skipped: Array  # how many were left alone


class Blocks:
    """The blocks that share a b, and the b of each."""

    def __init__(
        self,
        owner: str,
        learning_rate: Rate,
        b_init: BInit,
        per: Per,
        neuron_axis: NeuronAxis,
        nonfinite: Nonfinite,
    ) -> None:
        choices = {"per": (per, Per), "nonfinite": (nonfinite, Nonfinite)}
        for name, (value, options) in choices.items():
            if value not in get_args(options):
                raise ValueError(
                    f"{owner}: `{name}` must be one of {get_args(options)}, got {value!r}."
                )
        if not (is_axes(neuron_axis) or callable(neuron_axis)):
            raise TypeError(
                f"{owner}: `neuron_axis` must be an integer, several, or a function of path and "
                f"shape (static under inject_hyperparams), got {neuron_axis!r}."
            )
        self.owner, self.per, self.axis, self.rate = owner, per, neuron_axis, learning_rate
        if not callable(learning_rate):
            self.rate = checked(owner, "learning_rate", learning_rate)
        self.skip = nonfinite == "skip"
        self.b1, self.c = parse_b_init(owner, b_init)

    def first(self, params: PyTree) -> PyTree:
        """b₁, made of the parameters so that it is sharded like them; 0 where there is none yet."""
        value = 0.0 if self.b1 is None else self.b1
        if self.per == "model":
            zero = sum((jnp.zeros_like(p, b_dtype(p)).sum() for p in jax.tree.leaves(params)), 0.0)
            zero = jnp.asarray(zero, jnp.promote_types(jnp.asarray(zero).dtype, jnp.float32))
            return (zero + value).astype(zero.dtype)

        def leaf(path: tuple[Any, ...], p: Array) -> Array:
            zero = jnp.zeros_like(p, b_dtype(p)).sum(self._reduced(path, p.shape), keepdims=True)
            return (zero + value).astype(zero.dtype)

        return jax.tree_util.tree_map_with_path(leaf, params)

    def spread(self, blocks: PyTree, leaves: PyTree) -> PyTree:
        """A tree of blocks as one of the leaves' structure."""
        return jax.tree.map(lambda _: blocks, leaves) if self.per == "model" else blocks

    def grow(self, updates: PyTree, b: PyTree, count: Array) -> Growth:
        """b_j ← b_{j-1} + λ²‖g‖²/b_{j-1}, for every block."""
        lam = self.rate(count) if callable(self.rate) else self.rate
        # Its square must not overflow a half-precision type.
        lam = wider(lam) if isinstance(lam, jax.Array) else lam
        if self.per == "model":
            parts = [norm_of(g, None).astype(b.dtype) for g in jax.tree.leaves(updates)]
            norms: PyTree = norm_of(jnp.stack(parts), None) if parts else jnp.zeros_like(b)
        else:
            norms = jax.tree.map(lambda g, b: norm_of(g, b.shape), updates, b)
        leaves, tree = jax.tree.flatten(b)
        pairs = zip(leaves, jax.tree.leaves(norms), strict=True)
        grown = [self._grow_leaf(b, norm, lam) for b, norm in pairs]
        columns = ([leaf[k] for leaf in grown] for k in range(3))
        new, divisor, live = (jax.tree.unflatten(tree, column) for column in columns)
        skipped = jnp.asarray(sum(leaf[3] for leaf in grown), jnp.int32)
        scale = jax.tree.map(power_of_two, divisor)
        trees = (scale, *(jax.tree.map(jnp.multiply, scale, each) for each in (b, divisor)), live)
        power, before, over, on = (self.spread(each, updates) for each in trees)
        return Growth(lam, new, power, before, over, on, live, skipped)

    def _grow_leaf(self, b: Array, norm: Array, lam: Any) -> tuple[Array, Array, Array, Any]:
        """The b to store, the divisor, a mask of the blocks that step, and the number skipped."""
        info: Any = jnp.finfo(b.dtype)  # type: ignore[no-untyped-call]
        floor = float(info.tiny) / float(info.eps)
        # Not to be known as constants, whose squares XLA would take by themselves: see `times`.
        before, rate = (jnp.where(jnp.isnan(norm), norm, each).astype(b.dtype) for each in (b, lam))
        new, finite = guarded_b(
            jnp, before, None, rate,
            c=self.c, floor=floor, norm=norm, narrow=lambda w: w.astype(b.dtype),
        )  # fmt: skip
        still = jnp.asarray(lam) == 0  # A step without rate changes nothing, whatever the gradient.
        new, finite = jnp.where(still, b, new), finite | still
        live = (new != 0) & ~still
        divisor = jnp.where(new == 0, 1, new)
        if self.skip:
            return jnp.where(finite, new, b), divisor, live & finite, (~finite).sum()
        return new, divisor, live, 0

    def _reduced(self, path: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
        """The axes over which a block's norm is taken."""
        n = len(shape)
        if self.per == "tensor":
            return tuple(range(n))
        axis = flax_neuron_axis if self.axis is None else self.axis
        axes = axis(path, shape) if callable(axis) else axis if n > 1 else None
        if axes is None:
            return ()
        neurons = axes if isinstance(axes, tuple) else (axes,)
        if not all(type(axis) is int and -n <= axis < n for axis in neurons):
            raise ValueError(
                f"{self.owner}: `neuron_axis` must be an axis of every leaf, got {axes!r} for "
                f"{jax.tree_util.keystr(path)} of shape {shape}."
            )
        return tuple(i for i in range(n) if i not in {axis % n for axis in neurons})


# ---------------------------------------------------------------- norms and types


def norm_of(g: Array, shape: tuple[int, ...] | None) -> Array:
    """‖g‖ of each block in float32 or wider, keeping dimensions; of all of it without a shape.

    Its largest entry is brought close to 1, so that no square overflows or vanishes.
    """
    g = jnp.abs(wider(g))
    axes = tuple(i for i in range(g.ndim) if shape is None or shape[i] == 1)
    scale = power_of_two(g.max(axes, keepdims=True, initial=0))
    sq = (times(scale, g) ** 2).sum(axes, keepdims=True)
    positive = sq > 0
    # √ has no slope at 0
    norm = jnp.where(positive, jnp.sqrt(jnp.where(positive, sq, 1)), sq) / scale
    return norm if shape is not None else norm.reshape(())


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

    def chosen(x: Array) -> Array:
        return jnp.where(jnp.isfinite(x), x, jnp.nan)

    return chosen(scale * chosen(x))


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
