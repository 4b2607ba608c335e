"""Blocks of a pytree of JAX arrays: the entries that share one b, and the rule for it."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

from wngrad.guard import guarded_b
from wngrad.transforms.checks import checked, is_axes, parse_b_init
from wngrad.transforms.neurons import flax_neuron_axis
from wngrad.transforms.settings import BInit, NeuronAxis, Nonfinite, Per, PyTree, Rate


class Growth(NamedTuple):
    """The blocks of one update, as trees."""

    lam: Any
    before: PyTree  # of each leaf: the b that was stored
    b: PyTree  # to be stored
    divisor: PyTree  # of each leaf
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
            parts = [_norm(g, None).astype(b.dtype) for g in jax.tree.leaves(updates)]
            norms: PyTree = _norm(jnp.stack(parts), None) if parts else jnp.zeros_like(b)
        else:
            norms = jax.tree.map(lambda g, b: _norm(g, b.shape), updates, b)
        leaves, tree = jax.tree.flatten(b)
        pairs = zip(leaves, jax.tree.leaves(norms), strict=True)
        grown = [self._grow_leaf(b, norm, lam) for b, norm in pairs]
        columns = ([leaf[k] for leaf in grown] for k in range(3))
        new, divisor, live = (jax.tree.unflatten(tree, column) for column in columns)
        skipped = jnp.asarray(sum(leaf[3] for leaf in grown), jnp.int32)
        before, over, on = (self.spread(tree, updates) for tree in (b, divisor, live))
        return Growth(lam, before, new, over, on, live, skipped)

    def _grow_leaf(self, b: Array, norm: Array, lam: Any) -> tuple[Array, Array, Array, Any]:
        """Of one leaf's blocks the b to store, the divisor, who takes the step, how many not."""
        info: Any = jnp.finfo(b.dtype)  # type: ignore[no-untyped-call]
        floor = float(info.tiny) / float(info.eps)
        new, finite = guarded_b(
            jnp, b, None, lam, c=self.c, floor=floor, norm=norm, narrow=lambda w: w.astype(b.dtype)
        )
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


def _norm(g: Array, shape: tuple[int, ...] | None) -> Array:
    """‖g‖ of each block in float32 or wider, keeping dimensions; of all of it without a shape.

    Scaled by the largest entry, so that no square overflows or vanishes.
    """
    g = jnp.abs(wider(g))
    axes = tuple(i for i in range(g.ndim) if shape is None or shape[i] == 1)
    top = g.max(axes, keepdims=True, initial=0)
    top = jnp.where((top > 0) & jnp.isfinite(top), top, 1)
    sq = ((g / top) ** 2).sum(axes, keepdims=True)
    positive = sq > 0
    # √ has no slope at 0
    norm = top * jnp.where(positive, jnp.sqrt(jnp.where(positive, sq, 1)), sq)
    return norm if shape is not None else norm.reshape(())


def b_dtype(p: Array) -> Any:
    """The type of a parameter's b: real, and float32 or wider."""
    return jnp.promote_types(jnp.zeros((), p.dtype).real.dtype, jnp.float32)


def wider(g: Array) -> Array:
    return g.astype(jnp.promote_types(g.dtype, jnp.float32))
