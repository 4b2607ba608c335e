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

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from wngrad import rule
from wngrad.transform_blocks import (
    Array,
    BInit,
    Blocks,
    NeuronAxis,
    Nonfinite,
    Per,
    PyTree,
    Rate,
    checked,
    flax_neuron_axis,
    neuron_axis_of,
    wider,
)

__all__ = [
    "WNAdamState",
    "WNGradState",
    "flax_neuron_axis",
    "neuron_axis_of",
    "scale_by_wn_adam",
    "scale_by_wngrad",
    "wn_adam",
    "wngrad",
]


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
        neuron_axis: the axis (or axes) that count neurons, for all leaves of two dimensions or
            more; or a function of a leaf's path and shape. By default Flax's convention,
            `flax_neuron_axis`.
        nonfinite: "propagate", or "skip" to leave a block with a gradient that is not finite as it
            was and count it.
    """
    core = partial(_wngrad, "wngrad", learning_rate, momentum, b_init, per, neuron_axis, nonfinite)
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
    core = partial(_wn_adam, "wn_adam", learning_rate, beta, b_init, per, neuron_axis, nonfinite)
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
    owner = "scale_by_wngrad"
    core = _wngrad(owner, learning_rate, momentum, b_init, per, neuron_axis, nonfinite, None)
    return _narrowed(core)


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
    owner = "scale_by_wn_adam"
    core = _wn_adam(owner, learning_rate, beta, b_init, per, neuron_axis, nonfinite, None)
    return _narrowed(core)


def _wngrad(
    owner: str,
    learning_rate: Rate,
    momentum: float | Array | None,
    b_init: BInit,
    per: Per,
    neuron_axis: NeuronAxis,
    nonfinite: Nonfinite,
    decay: float | Array | None,
) -> optax.GradientTransformation:
    """The direction g/b_j or its momentum, with decoupled decay in it, in float32 or wider."""
    blocks = Blocks(owner, learning_rate, b_init, per, neuron_axis, nonfinite)
    mu = checked(owner, "momentum", momentum, below=1.0)
    buffered = not (mu is None or (isinstance(mu, float) and mu == 0))

    def init(params: PyTree) -> WNGradState:
        buf = jax.tree.map(jnp.zeros_like, params) if buffered else None
        return WNGradState(_zero(), blocks.first(params), buf, _zero())

    def update(
        updates: PyTree, state: WNGradState, params: PyTree | None = None
    ) -> tuple[PyTree, WNGradState]:
        new = blocks.next(updates, state.b, state.count)
        if buffered:
            buf = jax.tree.map(
                # buf ← μ·buf + g/b_j
                lambda g, b, on, old: jnp.where(on, rule.momentum(wider(old), g, b, mu), old),
                updates, new.divisor, new.live, state.buf,
            )  # fmt: skip
            direction = buf
        else:
            buf = None
            direction = jax.tree.map(lambda g, b: wider(g) / b, updates, new.divisor)
        return _masked(direction, new.live, params, decay), WNGradState(
            optax.safe_increment(state.count),
            new.b,
            None if buf is None else _like(buf, state.buf),
            state.skipped + new.skipped,
        )

    return optax.GradientTransformation(init, update)


def _wn_adam(
    owner: str,
    learning_rate: Rate,
    beta: float | Array,
    b_init: BInit,
    per: Per,
    neuron_axis: NeuronAxis,
    nonfinite: Nonfinite,
    decay: float | Array | None,
) -> optax.GradientTransformation:
    """The direction ĝ_j/((1−βᵗ)·b_j), with decoupled decay in it, in float32 or wider."""
    blocks = Blocks(owner, learning_rate, b_init, per, neuron_axis, nonfinite)
    mean = checked(owner, "beta", beta, below=1.0)

    def init(params: PyTree) -> WNAdamState:
        b, m = blocks.first(params), jax.tree.map(jnp.zeros_like, params)
        return WNAdamState(_zero(), b, m, jax.tree.map(jnp.zeros_like, b), _zero())

    def update(
        updates: PyTree, state: WNAdamState, params: PyTree | None = None
    ) -> tuple[PyTree, WNAdamState]:
        new = blocks.next(updates, state.b, state.count)
        t = jax.tree.map(lambda t, on: t + on, state.t, new.live_blocks)
        m = jax.tree.map(
            # ĝ_j ← β ĝ_{j-1} + (1−β) g
            lambda g, on, old: jnp.where(on, rule.running_mean(wider(old), wider(g), mean), old),
            updates, new.live, state.m,
        )  # fmt: skip
        direction = jax.tree.map(
            # t = 0: nothing seen, and ĝ is 0
            lambda m, b, t: rule.unbiased(m, mean, jnp.maximum(t, 1)) / b,
            m, new.divisor, blocks.spread(t, updates),
        )  # fmt: skip
        return _masked(direction, new.live, params, decay), WNAdamState(
            optax.safe_increment(state.count),
            new.b,
            _like(m, state.m),
            t,
            state.skipped + new.skipped,
        )

    return optax.GradientTransformation(init, update)


# ---------------------------------------------------------------- parts


def _chain(
    owner: str,
    core: Callable[[Any], optax.GradientTransformation],
    learning_rate: Rate,
    weight_decay: float | Array | None,
    decoupled: bool,
) -> optax.GradientTransformationExtraArgs:
    decay = checked(owner, "weight_decay", weight_decay)
    if not isinstance(decoupled, bool):
        raise TypeError(
            f"{owner}: `decoupled_weight_decay` must be True or False, got {decoupled!r}."
        )
    off = decay is None or (isinstance(decay, float) and decay == 0)
    parts = [core(None if off or not decoupled else decay)]
    if not off and not decoupled:
        parts.insert(0, optax.add_decayed_weights(decay))
    return _narrowed(
        optax.chain(*parts, optax.scale_by_learning_rate(learning_rate)), None if off else owner
    )


def _narrowed(
    wide: optax.GradientTransformation, needs_params: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """Updates in the gradients' type, rounded once, at the end."""
    inner = optax.with_extra_args_support(wide)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        if needs_params is not None and params is None:
            raise ValueError(
                f"{needs_params}: `params` must be given to `update`, since `weight_decay` needs "
                f"them, got None."
            )
        new, state = inner.update(updates, state, params, **extra)
        return _like(new, updates), state

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _masked(
    direction: PyTree, live: PyTree, params: PyTree | None, decay: float | Array | None
) -> PyTree:
    """The direction (and the decay) where a block takes the step, and exactly 0 elsewhere."""
    if decay is not None:
        direction = jax.tree.map(lambda d, p: d + decay * wider(p), direction, params)
    return jax.tree.map(lambda d, on: jnp.where(on, d, 0), direction, live)


def _like(tree: PyTree, leaves: PyTree) -> PyTree:
    return jax.tree.map(lambda new, old: new.astype(old.dtype), tree, leaves)


def _zero() -> Array:
    return jnp.zeros((), jnp.int32)
