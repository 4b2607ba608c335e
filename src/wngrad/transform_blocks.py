"""Who shares a b in a pytree of JAX arrays, and how it moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from wngrad import rule

Array = Any
PyTree = Any
Rate = float | Array | Callable[[Any], Any]
# An axis or several; None for one b per entry.
Axes = int | tuple[int, ...] | None
NeuronAxis = Axes | Callable[[tuple[Any, ...], tuple[int, ...]], Axes]
BInit = float | Array | Literal["gradient"] | tuple[Literal["gradient"], float]
Per = Literal["neuron", "tensor", "model"]
Nonfinite = Literal["propagate", "skip"]


def flax_neuron_axis(path: tuple[Any, ...], shape: tuple[int, ...]) -> Axes:
    """Flax's convention: a kernel's last axis, an embedding's first, each entry of a bias or scale.

    The kernel of an attention's query, key or value is (in, heads, dim): its neurons are the last
    two axes.
    """
    names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    if names[-1:] == ["value"]:  # an nnx variable wraps its content once more
        names.pop()
    name, layer = names[-1] if names else None, names[-2] if len(names) > 1 else None
    if len(shape) < 2 or name in ("bias", "scale"):
        return None
    if name == "embedding":
        return 0
    return (-2, -1) if layer in ("query", "key", "value") and len(shape) == 3 else -1


def neuron_axis_of(module: Any) -> Callable[[tuple[Any, ...], tuple[int, ...]], Axes]:
    """The `neuron_axis` of a model: Equinox keeps the neuron first, Flax last (embeddings first).

    Leaves that a transformation has stacked (`nn.scan`, `eqx.filter_vmap`) have one axis more, and
    need a function of yours.

    Args:
        module: an Equinox module, or a Flax one (linen or nnx).
    """
    origins = {base.__module__.split(".")[0] for base in type(module).__mro__}
    if "equinox" in origins:
        return lambda path, shape: 0 if len(shape) > 1 else None
    if "flax" in origins:
        return flax_neuron_axis
    raise TypeError(
        f"neuron_axis_of: `module` must be an Equinox or Flax module, got "
        f"{type(module).__name__}; give `neuron_axis` as a number or a function of path and shape."
    )


class New(NamedTuple):
    """What an update does to the blocks."""

    b: PyTree  # to be stored
    divisor: PyTree  # of each leaf
    live: PyTree  # of each leaf: whether the block takes this step
    live_blocks: PyTree  # the same in the shape of `b`
    skipped: Array


class Blocks:
    """Who shares a b, and how it moves."""

    def __init__(
        self,
        owner: str,
        learning_rate: Rate,
        b_init: BInit,
        per: Per,
        neuron_axis: NeuronAxis,
        nonfinite: Nonfinite,
    ) -> None:
        for name, value, allowed in (
            ("per", per, get_args(Per)),
            ("nonfinite", nonfinite, get_args(Nonfinite)),
        ):
            if value not in allowed:
                raise ValueError(f"{owner}: `{name}` must be one of {allowed}, got {value!r}.")
        if not (_is_axes(neuron_axis) or callable(neuron_axis)):
            raise TypeError(
                f"{owner}: `neuron_axis` must be an integer, several, or a function of path and "
                f"shape (static under inject_hyperparams), got {neuron_axis!r}."
            )
        self.owner, self.per, self.axis = owner, per, neuron_axis
        self.rate = (
            learning_rate
            if callable(learning_rate)
            else checked(owner, "learning_rate", learning_rate)
        )
        self.skip = nonfinite == "skip"
        self.number, self.c = _start(owner, b_init)

    def first(self, params: PyTree) -> PyTree:
        """b₁, made of the parameters so that it is sharded like them; 0 stands for "not yet"."""
        value = 0.0 if self.number is None else self.number
        if self.per == "model":
            zero = sum((jnp.zeros_like(p, b_dtype(p)).sum() for p in jax.tree.leaves(params)), 0.0)
            zero = jnp.asarray(zero, jnp.promote_types(jnp.asarray(zero).dtype, jnp.float32))
            return (zero + value).astype(zero.dtype)

        def leaf(path: tuple[Any, ...], p: Array) -> Array:
            axes = self._reduced(path, p.shape)
            zero = jnp.zeros_like(p, b_dtype(p)).sum(axes, keepdims=True)
            return (zero + value).astype(zero.dtype)

        return jax.tree_util.tree_map_with_path(leaf, params)

    def spread(self, blocks: PyTree, leaves: PyTree) -> PyTree:
        """A tree of blocks as one of the leaves' structure."""
        return jax.tree.map(lambda _: blocks, leaves) if self.per == "model" else blocks

    def next(self, updates: PyTree, b: PyTree, count: Array) -> New:
        """b_j ← b_{j-1} + λ²‖g‖²/b_{j-1}."""
        lam = _rate(self.rate(count) if callable(self.rate) else self.rate)
        if self.per == "model":
            parts = [_norm(g, None).astype(b.dtype) for g in jax.tree.leaves(updates)]
            norms: PyTree = _norm(jnp.stack(parts), None) if parts else jnp.zeros_like(b)
        else:
            norms = jax.tree.map(lambda g, b: _norm(g, b.shape), updates, b)
        new = jax.tree.map(lambda b, norm: self._grown(b, norm, lam), b, norms)
        finite = jax.tree.map(lambda n, norm: jnp.isfinite(n) & jnp.isfinite(norm), new, norms)
        live = jax.tree.map(lambda n, ok: self._live(n, ok, lam), new, finite)
        # An infinite b would freeze the block for ever, and in silence. NaN shows.
        shown = jax.tree.map(lambda n: jnp.where(jnp.isinf(n), jnp.nan, n), new)
        kept = jax.tree.map(jnp.where, finite, shown, b) if self.skip else shown
        divisor = jax.tree.map(lambda n: jnp.where(n == 0, 1, n), shown)
        bad = [(~ok).sum() for ok in jax.tree.leaves(finite)] if self.skip else []
        return New(
            kept,
            self.spread(divisor, updates),
            self.spread(live, updates),
            live,
            jnp.asarray(sum(bad), jnp.int32),
        )

    def _grown(self, b: Array, norm: Array, lam: Any) -> Array:
        if self.c is not None:
            b1 = rule.first_b(norm, lam, self.c)
            info: Any = jnp.finfo(b.dtype)  # type: ignore[no-untyped-call]
            floor = float(info.tiny) / float(info.eps)  # below it entries may be denormal
            b = jnp.where((b == 0) & (norm >= floor) & (b1 >= floor), b1, b).astype(b.dtype)
        unset = b == 0
        grown = rule.next_b_of_norm(jnp.where(unset, 1, b), norm, lam)
        return jnp.where(unset, 0 * norm, grown).astype(b.dtype)

    def _live(self, b: Array, finite: Array, lam: Any) -> Array:
        live = (b != 0) & (jnp.asarray(lam) != 0)
        return live & finite if self.skip else live

    def _reduced(self, path: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
        """The axes over which a block's norm is taken."""
        n = len(shape)
        if self.per == "tensor":
            return tuple(range(n))
        find = flax_neuron_axis if self.axis is None else self.axis
        axes = find(path, shape) if callable(find) else find if n > 1 else None
        if axes is None:
            return ()
        kept = axes if isinstance(axes, tuple) else (axes,)
        if not all(type(axis) is int and -n <= axis < n for axis in kept):
            raise ValueError(
                f"{self.owner}: `neuron_axis` must be an axis of every leaf, got {axes!r} for "
                f"{jax.tree_util.keystr(path)} of shape {shape}."
            )
        return tuple(i for i in range(n) if i not in {axis % n for axis in kept})


# ---------------------------------------------------------------- the door, and norms


def _start(owner: str, b_init: Any) -> tuple[Any, Any]:
    """(b₁, None), or (None, C) where the first gradient sets it."""
    if isinstance(b_init, str) and b_init == "gradient":
        return None, 1.0
    if isinstance(b_init, tuple) and len(b_init) == 2 and b_init[0] == "gradient":
        return None, checked(owner, "b_init", b_init[1], above=0.0)
    if b_init is None or isinstance(b_init, (str, tuple)):
        raise ValueError(
            f'{owner}: `b_init` must be a number > 0, "gradient" or ("gradient", C), '
            f"got {b_init!r}."
        )
    return checked(owner, "b_init", b_init, above=0.0), None


def checked(
    owner: str, name: str, value: Any, *, above: float | None = None, below: float = math.inf
) -> Any:
    """A number in range as a float, or an array as it is; a traced one cannot be looked at."""
    if value is None and name in ("momentum", "weight_decay"):
        return None
    if isinstance(value, jax.core.Tracer):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{owner}: `{name}` must be a number, got {value!r}.") from None
    low = number > above if above is not None else number >= 0
    if isinstance(value, bool) or not (low and number < below):
        least = f"> {above:g}" if above is not None else ">= 0"
        most = f"< {below:g}" if below < math.inf else "finite"
        raise ValueError(f"{owner}: `{name}` must be {least} and {most}, got {value!r}.")
    return value if isinstance(value, jax.Array) else number


def _is_axes(value: Any) -> bool:
    several = isinstance(value, tuple) and all(type(axis) is int for axis in value)
    return value is None or type(value) is int or several


def _rate(lam: Any) -> Any:
    """λ in float32 or wider: its square must not overflow a half-precision type."""
    return wider(lam) if isinstance(lam, jax.Array) else lam


def _norm(g: Array, shape: tuple[int, ...] | None) -> Array:
    """‖g‖ of each block in float32 or wider, keeping dimensions; of all of it without a shape.

    Scaled by the largest entry, so that no square overflows or vanishes.
    """
    g = jnp.abs(wider(g))
    axes = (
        tuple(range(g.ndim)) if shape is None else tuple(i for i, n in enumerate(shape) if n == 1)
    )
    top = g.max(axes, keepdims=True, initial=0)
    top = jnp.where((top > 0) & jnp.isfinite(top), top, 1)
    sq = ((g / top) ** 2).sum(axes, keepdims=True)
    some = sq > 0
    norm = top * jnp.where(some, jnp.sqrt(jnp.where(some, sq, 1)), sq)  # √ has no slope at 0
    return norm if shape is not None else norm.reshape(())


def _real(dtype: Any) -> Any:
    return jnp.zeros((), dtype).real.dtype


def b_dtype(p: Array) -> Any:
    return jnp.promote_types(_real(p.dtype), jnp.float32)


def wider(g: Array) -> Array:
    return g.astype(jnp.promote_types(g.dtype, jnp.float32))
