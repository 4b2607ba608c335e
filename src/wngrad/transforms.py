"""The JAX twin: WNGrad and WN-Adam as optax transformations.

>>> import jax.numpy as jnp, optax
>>> from wngrad.transforms import wngrad
>>> params = {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}
>>> opt = wngrad(learning_rate=1.0)
>>> state = opt.init(params)
>>> grads = {"kernel": jnp.ones((3, 2)), "bias": jnp.ones(2)}
>>> updates, state = opt.update(grads, state, params)
>>> params = optax.apply_updates(params, updates)
>>> optax.tree.get(state, "b")["kernel"].shape  # one b per neuron, the kernel's last axis
(1, 2)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
import optax

from wngrad import rule

Array = Any
PyTree = Any
Rate = float | Array | Callable[[Any], Any]
# An axis; or a function of a leaf's path and shape that gives one, or None for one b per entry.
NeuronAxis = int | Callable[[tuple[Any, ...], tuple[int, ...]], int | None] | None
BInit = float | Array | Literal["gradient"] | tuple[Literal["gradient"], float]
Per = Literal["neuron", "tensor", "model"]
Nonfinite = Literal["propagate", "skip"]


class WNGradState(NamedTuple):
    """b of every leaf, or one for all of them with `per="model"`."""

    count: Array  # updates seen, for a schedule
    b: PyTree
    buf: PyTree | None  # μ·buf + g/b, with momentum
    skipped: Array  # blocks left alone so far


class WNAdamState(NamedTuple):
    """As `WNGradState`, with the running mean and the number of gradients in it."""

    count: Array
    b: PyTree
    m: PyTree
    t: PyTree
    skipped: Array


def wngrad(
    learning_rate: Rate = 1.0,
    *,
    momentum: float | Array | None = None,
    weight_decay: float | Array | None = None,
    decoupled_weight_decay: bool = False,
    b_init: BInit = 1.0,
    per: Per = "neuron",
    neuron_axis: NeuronAxis = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformation:
    """WNGrad (Alg. 3): b_j ← b_{j-1} + λ²‖g‖²/b_{j-1}, then x_j ← x_{j-1} − λ g/b_j.

    Args:
        learning_rate: λ: a number, an array or a schedule. A step at λ = 0 changes nothing.
        momentum: μ of buf ← μ·buf + g/b_j, x ← x − λ·buf.
        weight_decay: added to the gradient before the norm is taken.
        decoupled_weight_decay: shrink x by λ·weight_decay·x instead, outside the norm.
        b_init: b₁: a number, or "gradient" (or ("gradient", C)) for C·λ·‖g₁‖ of each block, set by
            its first gradient that is neither zero nor denormal.
        per: what shares one b: "neuron", "tensor" or "model".
        neuron_axis: the axis that counts neurons, for all leaves of two dimensions or more; or a
            function of a leaf's path and shape. By default Flax's convention, `flax_neuron_axis`.
        nonfinite: "propagate", or "skip" to leave a block with a gradient that is not finite as it
            was (but for decoupled decay) and count it.
    """
    core = scale_by_wngrad(
        learning_rate,
        momentum=momentum,
        b_init=b_init,
        per=per,
        neuron_axis=neuron_axis,
        nonfinite=nonfinite,
    )
    return _chain("wngrad", core, learning_rate, weight_decay, decoupled_weight_decay)


def wn_adam(
    learning_rate: Rate = 1.0,
    *,
    beta: float | Array = 0.9,
    weight_decay: float | Array | None = None,
    decoupled_weight_decay: bool = False,
    b_init: BInit = 1.0,
    per: Per = "neuron",
    neuron_axis: NeuronAxis = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformation:
    """WN-Adam (Alg. 4): Adam's running mean ĝ under WNGrad's b; x ← x − (λ/b_j)·ĝ_j/(1−βᵗ).

    Args:
        learning_rate: as for `wngrad`, and so are all arguments but `beta`.
        beta: β of the running mean.
    """
    core = scale_by_wn_adam(
        learning_rate,
        beta=beta,
        b_init=b_init,
        per=per,
        neuron_axis=neuron_axis,
        nonfinite=nonfinite,
    )
    return _chain("wn_adam", core, learning_rate, weight_decay, decoupled_weight_decay)


def scale_by_wngrad(
    learning_rate: Rate = 1.0,
    *,
    momentum: float | Array | None = None,
    b_init: BInit = 1.0,
    per: Per = "neuron",
    neuron_axis: NeuronAxis = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformation:
    """g ↦ g/b_j, or its momentum. λ enters b; `optax.scale_by_learning_rate` has to follow.

    Args:
        learning_rate: as for `wngrad`, and so are the others.
    """
    blocks = _Blocks("scale_by_wngrad", learning_rate, b_init, per, neuron_axis, nonfinite)
    _fraction("scale_by_wngrad", "momentum", momentum)
    buffered = not (momentum is None or (isinstance(momentum, (int, float)) and momentum == 0))

    def init(params: PyTree) -> WNGradState:
        buf = jax.tree.map(jnp.zeros_like, params) if buffered else None
        return WNGradState(_zero(), blocks.first(params), buf, _zero())

    def update(
        updates: PyTree, state: WNGradState, params: PyTree | None = None
    ) -> tuple[PyTree, WNGradState]:
        del params
        new = blocks.next(updates, state.b, state.count)
        if buffered:
            buf = jax.tree.map(
                # buf ← μ·buf + g/b_j
                lambda g, b, on, old: jnp.where(on, rule.momentum(_wide(old), g, b, momentum), old),
                updates, new.divisor, new.live, state.buf,
            )  # fmt: skip
            direction = buf
        else:
            buf = None
            direction = jax.tree.map(lambda g, b: _wide(g) / b, updates, new.divisor)
        return _masked(direction, new.live, updates), WNGradState(
            optax.safe_increment(state.count),
            new.b,
            None if buf is None else _like(buf, updates),
            state.skipped + new.skipped,
        )

    return optax.GradientTransformation(init, update)


def scale_by_wn_adam(
    learning_rate: Rate = 1.0,
    *,
    beta: float | Array = 0.9,
    b_init: BInit = 1.0,
    per: Per = "neuron",
    neuron_axis: NeuronAxis = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformation:
    """g ↦ ĝ_j/((1−βᵗ)·b_j), with b from the raw gradient; `optax.scale_by_learning_rate` follows.

    Args:
        learning_rate: as for `wn_adam`, and so are the others.
    """
    blocks = _Blocks("scale_by_wn_adam", learning_rate, b_init, per, neuron_axis, nonfinite)
    _fraction("scale_by_wn_adam", "beta", beta)

    def init(params: PyTree) -> WNAdamState:
        b, m = blocks.first(params), jax.tree.map(jnp.zeros_like, params)
        return WNAdamState(_zero(), b, m, jax.tree.map(jnp.zeros_like, b), _zero())

    def update(
        updates: PyTree, state: WNAdamState, params: PyTree | None = None
    ) -> tuple[PyTree, WNAdamState]:
        del params
        new = blocks.next(updates, state.b, state.count)
        t = jax.tree.map(lambda t, on: t + on, state.t, new.live_blocks)
        m = jax.tree.map(
            # ĝ_j ← β ĝ_{j-1} + (1−β) g
            lambda g, on, old: jnp.where(on, rule.running_mean(_wide(old), g, beta), old),
            updates, new.live, state.m,
        )  # fmt: skip
        direction = jax.tree.map(
            # t = 0: nothing seen, and ĝ is 0
            lambda m, b, t: rule.unbiased(m, beta, jnp.maximum(t, 1)) / b,
            m, new.divisor, blocks.spread(t, updates),
        )  # fmt: skip
        return _masked(direction, new.live, updates), WNAdamState(
            optax.safe_increment(state.count),
            new.b,
            _like(m, updates),
            t,
            state.skipped + new.skipped,
        )

    return optax.GradientTransformation(init, update)


# ---------------------------------------------------------------- granularity


def flax_neuron_axis(path: tuple[Any, ...], shape: tuple[int, ...]) -> int | None:
    """Flax's convention: a kernel's last axis, an embedding's first, each entry of a vector."""
    if len(shape) < 2:
        return None
    names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    return 0 if "embedding" in names[-2:] else -1  # nnx wraps the name once more


def neuron_axis_of(module: Any) -> Callable[[tuple[Any, ...], tuple[int, ...]], int | None]:
    """The `neuron_axis` of a model: Equinox keeps the neuron first, Flax last (embeddings first).

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


class _New(NamedTuple):
    """What an update does to the blocks."""

    b: PyTree  # to be stored
    divisor: PyTree  # of each leaf
    live: PyTree  # of each leaf: whether the block takes this step
    live_blocks: PyTree  # the same in the shape of `b`
    skipped: Array


class _Blocks:
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
        if isinstance(learning_rate, (int, float)) and not 0 <= learning_rate < math.inf:
            raise ValueError(
                f"{owner}: `learning_rate` must be >= 0 and finite, got {learning_rate!r}."
            )
        if not (neuron_axis is None or type(neuron_axis) is int or callable(neuron_axis)):
            raise TypeError(
                f"{owner}: `neuron_axis` must be an integer or a function of path and shape, got "
                f"{neuron_axis!r}."
            )
        self.owner, self.rate, self.per, self.axis = owner, learning_rate, per, neuron_axis
        self.skip = nonfinite == "skip"
        self.number, self.c = _start(owner, b_init)

    def first(self, params: PyTree) -> PyTree:
        """b₁; 0 stands for "not yet"."""
        value = 0.0 if self.number is None else self.number
        if self.per == "model":
            leaves = jax.tree.leaves(params)
            dtype = jnp.result_type(jnp.float32, *(_real(leaf.dtype) for leaf in leaves))
            return jnp.full((), value, dtype)
        return jax.tree_util.tree_map_with_path(
            lambda path, p: jnp.full(self._shape(path, p.shape), value, _b_dtype(p)), params
        )

    def spread(self, blocks: PyTree, leaves: PyTree) -> PyTree:
        """A tree of blocks as one of the leaves' structure."""
        return jax.tree.map(lambda _: blocks, leaves) if self.per == "model" else blocks

    def next(self, updates: PyTree, b: PyTree, count: Array) -> _New:
        """b_j ← b_{j-1} + λ²‖g‖²/b_{j-1}."""
        lam = self.rate(count) if callable(self.rate) else self.rate
        if self.per == "model":
            total = sum(_sq_norm(g, None).astype(b.dtype) for g in jax.tree.leaves(updates))
            squares: PyTree = jnp.asarray(total, b.dtype)
        else:
            squares = jax.tree.map(lambda g, b: _sq_norm(g, b.shape), updates, b)
        new = jax.tree.map(lambda b, sq: self._grown(b, sq, lam), b, squares)
        finite = jax.tree.map(lambda n, sq: jnp.isfinite(n) & jnp.isfinite(sq), new, squares)
        live = jax.tree.map(lambda n, ok: self._live(n, ok, lam), new, finite)
        # An infinite b would freeze the block for ever, and in silence. NaN shows.
        shown = jax.tree.map(lambda n: jnp.where(jnp.isinf(n), jnp.nan, n), new)
        kept = jax.tree.map(jnp.where, finite, shown, b) if self.skip else shown
        divisor = jax.tree.map(lambda n: jnp.where(n == 0, 1, n), shown)
        bad = [(~ok).sum() for ok in jax.tree.leaves(finite)] if self.skip else []
        return _New(
            kept,
            self.spread(divisor, updates),
            self.spread(live, updates),
            live,
            jnp.asarray(sum(bad), jnp.int32),
        )

    def _grown(self, b: Array, sq: Array, lam: Any) -> Array:
        if self.c is not None:
            some = sq > 0
            norm = jnp.where(some, jnp.sqrt(jnp.where(some, sq, 1)), 0)
            b1 = rule.first_b(norm, lam, self.c)
            info: Any = jnp.finfo(b.dtype)  # type: ignore[no-untyped-call]
            floor = float(info.tiny) / float(info.eps)  # below it entries may be denormal
            b = jnp.where((b == 0) & (norm >= floor) & (b1 >= floor), b1, b).astype(b.dtype)
        unset = b == 0
        return jnp.where(unset, 0 * sq, rule.next_b(jnp.where(unset, 1, b), sq, lam)).astype(
            b.dtype
        )

    def _live(self, b: Array, finite: Array, lam: Any) -> Array:
        live = (b != 0) & (jnp.asarray(lam) != 0)
        return live & finite if self.skip else live

    def _shape(self, path: tuple[Any, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.per == "tensor":
            return (1,) * len(shape)
        find = flax_neuron_axis if self.axis is None else self.axis
        axis = find(path, shape) if callable(find) else find if len(shape) > 1 else None
        if axis is None:
            return shape
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"{self.owner}: `neuron_axis` must be an axis of every leaf, got {axis!r} for "
                f"{jax.tree_util.keystr(path)} of shape {shape}."
            )
        return tuple(n if i == axis % len(shape) else 1 for i, n in enumerate(shape))


# ---------------------------------------------------------------- parts


def _chain(
    owner: str,
    core: optax.GradientTransformation,
    learning_rate: Rate,
    weight_decay: float | Array | None,
    decoupled: bool,
) -> optax.GradientTransformation:
    known = isinstance(weight_decay, (int, float))
    if known and not 0 <= weight_decay < math.inf:  # type: ignore[operator]
        raise ValueError(f"{owner}: `weight_decay` must be >= 0 and finite, got {weight_decay!r}.")
    if not isinstance(decoupled, bool):
        raise TypeError(
            f"{owner}: `decoupled_weight_decay` must be True or False, got {decoupled!r}."
        )
    last = optax.scale_by_learning_rate(learning_rate)
    if weight_decay is None or (known and weight_decay == 0):
        return optax.chain(core, last)
    decay = optax.add_decayed_weights(weight_decay)
    parts = (core, decay, last) if decoupled else (decay, core, last)
    chained = optax.chain(*parts)

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        if params is None:
            raise ValueError(
                f"{owner}: `params` must be given to `update`, since `weight_decay` needs them, "
                f"got None."
            )
        return cast("tuple[PyTree, Any]", chained.update(updates, state, params))

    return optax.GradientTransformation(chained.init, update)


def _start(owner: str, b_init: Any) -> tuple[Any, float | None]:
    """(b₁, None), or (None, C) where the first gradient sets it."""
    if isinstance(b_init, str) and b_init == "gradient":
        return None, 1.0
    number, c = b_init, None
    if isinstance(b_init, tuple) and len(b_init) == 2 and b_init[0] == "gradient":
        number, c = None, b_init[1]
    value = number if c is None else c
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf:
        return number, c
    if isinstance(value, jax.Array):  # injected or traced: cannot be looked at
        return number, c
    raise ValueError(
        f'{owner}: `b_init` must be > 0 and finite, "gradient" or ("gradient", C), got {b_init!r}.'
    )


def _fraction(owner: str, name: str, value: Any) -> None:
    if isinstance(value, (int, float)) and not 0 <= value < 1:
        raise ValueError(f"{owner}: `{name}` must be in [0, 1), got {value!r}.")


def _sq_norm(g: Array, shape: tuple[int, ...] | None) -> Array:
    """‖g‖² of each block in float32 or wider, keeping dimensions; of all without a shape."""
    g = _wide(g)
    sq = jnp.real(g) ** 2 + jnp.imag(g) ** 2 if jnp.iscomplexobj(g) else g**2
    axes = (
        tuple(range(g.ndim)) if shape is None else tuple(i for i, n in enumerate(shape) if n == 1)
    )
    return sq.sum(axes, keepdims=shape is not None)


def _real(dtype: Any) -> Any:
    return jnp.zeros((), dtype).real.dtype


def _b_dtype(p: Array) -> Any:
    return jnp.promote_types(_real(p.dtype), jnp.float32)


def _wide(g: Array) -> Array:
    return g.astype(jnp.promote_types(g.dtype, jnp.float32))


def _masked(direction: PyTree, live: PyTree, updates: PyTree) -> PyTree:
    """The direction where a block takes the step, and exactly 0 elsewhere."""
    return _like(jax.tree.map(lambda d, on: jnp.where(on, d, 0), direction, live), updates)


def _like(tree: PyTree, leaves: PyTree) -> PyTree:
    return jax.tree.map(lambda new, old: new.astype(old.dtype), tree, leaves)


def _zero() -> Array:
    return jnp.zeros((), jnp.int32)
