"""WNGrad and WN-Adam as optax transformations: a direction over blocks, then the rate."""

# No annotations from __future__: optax's tools look for `ScalarOrSchedule` itself, not its name.

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from wngrad import rule
from wngrad.transforms.blocks import Blocks, Growth, wider
from wngrad.transforms.chains import add_decay, bias_correction, is_off, like, narrowed, zero
from wngrad.transforms.checks import checked
from wngrad.transforms.settings import BInit, NeuronAxis, Nonfinite, Number, Per, PyTree, Rate


class WNGradState(NamedTuple):
    """b of every leaf, or one for all of them with `per="model"`."""

    count: Any  # updates seen, for a schedule
    b: PyTree
    buf: PyTree | None  # μ·buf + g/b, with momentum
    skipped: jax.Array  # blocks left alone so far


class WNAdamState(NamedTuple):
    """As `WNGradState`, with the running mean and the number of gradients in it."""

    count: Any
    b: PyTree
    m: PyTree
    t: PyTree
    skipped: jax.Array


def wngrad(
    learning_rate: Rate = 1.0,
    *,
    momentum: Number | None = None,
    weight_decay: Number | None = None,
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
    blocks = Blocks("wngrad", learning_rate, b_init, per, neuron_axis, nonfinite)
    direction = _Momentum(blocks, momentum)
    return _descent(direction, learning_rate, weight_decay, decoupled_weight_decay)


def wn_adam(
    learning_rate: Rate = 1.0,
    *,
    beta: Number = 0.9,
    weight_decay: Number | None = None,
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
    blocks = Blocks("wn_adam", learning_rate, b_init, per, neuron_axis, nonfinite)
    direction = _RunningMean(blocks, beta)
    return _descent(direction, learning_rate, weight_decay, decoupled_weight_decay)


def scale_by_wngrad(
    learning_rate: Rate = 1.0,
    *,
    momentum: Number | None = None,
    b_init: BInit = 1.0,
    per: Per = "neuron",
    neuron_axis: NeuronAxis = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformation:
    """g ↦ g/b_j, or its momentum; arguments as for `wngrad`.

    λ enters b; `optax.scale_by_learning_rate` has to follow.
    """
    blocks = Blocks("scale_by_wngrad", learning_rate, b_init, per, neuron_axis, nonfinite)
    return narrowed(_scaling(_Momentum(blocks, momentum)))


def scale_by_wn_adam(
    learning_rate: Rate = 1.0,
    *,
    beta: Number = 0.9,
    b_init: BInit = 1.0,
    per: Per = "neuron",
    neuron_axis: NeuronAxis = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformation:
    """g ↦ ĝ_j/((1−βᵗ)·b_j) with b from the raw gradient; to be followed as `scale_by_wngrad`."""
    blocks = Blocks("scale_by_wn_adam", learning_rate, b_init, per, neuron_axis, nonfinite)
    return narrowed(_scaling(_RunningMean(blocks, beta)))


# ---------------------------------------------------------------- directions


class _Momentum:
    """The direction g/b_j, or its momentum."""

    def __init__(self, blocks: Blocks, momentum: Number | None) -> None:
        self.blocks = blocks
        self.mu = checked(blocks.owner, "momentum", momentum, below=1.0)
        self.buffered = not is_off(self.mu)

    def first(self, params: PyTree, b: PyTree) -> WNGradState:
        buf = jax.tree.map(jnp.zeros_like, params) if self.buffered else None
        return WNGradState(zero(), b, buf, zero())

    def next(self, g: PyTree, new: Growth, state: WNGradState) -> tuple[PyTree, dict[str, PyTree]]:
        """The direction, and the buffers to store."""
        if not self.buffered:
            return jax.tree.map(lambda g, b: wider(g) / b, g, new.divisor), {}
        buf = jax.tree.map(
            # buf ← μ·buf + g/b_j
            lambda g, b, on, old: jnp.where(on, rule.momentum(wider(old), g, b, self.mu), old),
            g, new.divisor, new.live, state.buf,
        )  # fmt: skip
        return buf, {"buf": like(buf, state.buf)}


class _RunningMean:
    """The direction ĝ_j/((1−βᵗ)·b_j)."""

    def __init__(self, blocks: Blocks, beta: Number) -> None:
        self.blocks = blocks
        self.beta = checked(blocks.owner, "beta", beta, below=1.0)

    def first(self, params: PyTree, b: PyTree) -> WNAdamState:
        m, t = (jax.tree.map(jnp.zeros_like, tree) for tree in (params, b))
        return WNAdamState(zero(), b, m, t, zero())

    def next(self, g: PyTree, new: Growth, state: WNAdamState) -> tuple[PyTree, dict[str, PyTree]]:
        """The direction, and the buffers to store."""
        t = jax.tree.map(lambda t, on: t + on, state.t, new.live_blocks)
        m = jax.tree.map(
            # ĝ_j ← β ĝ_{j-1} + (1−β) g
            lambda g, on, m: jnp.where(on, rule.running_mean(wider(m), wider(g), self.beta), m),
            g, new.live, state.m,
        )  # fmt: skip
        direction = jax.tree.map(
            # t = 0: no gradient yet, and ĝ is 0
            lambda m, b, t: m / bias_correction(self.beta, jnp.maximum(t, 1)) / b,
            m, new.divisor, self.blocks.spread(t, g),
        )  # fmt: skip
        return direction, {"m": like(m, state.m), "t": t}


# ---------------------------------------------------------------- parts of a chain


def _scaling(
    direction: _Momentum | _RunningMean, decay: Number | None = None
) -> optax.GradientTransformation:
    """A direction as a transformation, with decoupled decay in it, in float32 or wider."""
    blocks = direction.blocks

    def init(params: PyTree) -> Any:
        return direction.first(params, blocks.first(params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        new = blocks.grow(updates, state.b, state.count)
        out, buffers = direction.next(updates, new, state)
        if decay is not None:
            out = jax.tree.map(lambda d, p: d + decay * wider(p), out, params)
        # Exactly 0 where a block does not take the step.
        out = jax.tree.map(lambda d, on: jnp.where(on, d, 0), out, new.live)
        count, skipped = optax.safe_increment(state.count), state.skipped + new.skipped
        return out, state._replace(count=count, b=new.b, skipped=skipped, **buffers)

    return optax.GradientTransformation(init, update)


def _descent(
    direction: _Momentum | _RunningMean, learning_rate: Rate, weight_decay: Any, decoupled: bool
) -> optax.GradientTransformationExtraArgs:
    """Coupled decay where asked for, the direction, and the rate."""
    owner = direction.blocks.owner
    decay = checked(owner, "weight_decay", weight_decay)
    if not isinstance(decoupled, bool):
        raise TypeError(
            f"{owner}: `decoupled_weight_decay` must be True or False, got {decoupled!r}."
        )
    off = is_off(decay)
    parts = [_scaling(direction, None if off or not decoupled else decay)]
    if not off and not decoupled:
        parts.insert(0, add_decay(decay))
    chain = optax.chain(*parts, optax.scale_by_learning_rate(learning_rate))
    return narrowed(chain, None if off else owner)
