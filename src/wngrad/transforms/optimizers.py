"""WNGrad and WN-Adam as optax transformations: a direction over blocks, then the rate."""

# No annotations from __future__: optax's tools look for `ScalarOrSchedule` itself, not its name.

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from wngrad import rule
from wngrad.transforms.blocks import Blocks, Growth, times, wider
from wngrad.transforms.chains import add_decay, bias_correction, is_off, like, narrowed, zero
from wngrad.transforms.checks import checked
from wngrad.transforms.settings import BInit, NeuronAxis, Nonfinite, Number, Per, PyTree, Rate


class WNGradState(NamedTuple):
    """b of every leaf, or one for all of them with `per="model"`."""

    count: Any  # updates seen, for a schedule
    b: PyTree
    velocity: PyTree | None  # μ·velocity + λ g/b, with momentum
    skipped: jax.Array  # blocks left alone so far


class WNAdamState(NamedTuple):
    """As `WNGradState`; the velocity is a mean of λg over b, t the number of gradients in it."""

    count: Any
    b: PyTree
    velocity: PyTree
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
) -> optax.GradientTransformationExtraArgs:
    """WNGrad (Alg. 3): b_j ← b_{j-1} + λ²‖g‖²/b_{j-1}, then x_j ← x_{j-1} − λ g/b_j.

    No block ever moves by more than ½ in one step, whatever λ does; with momentum by ½/(1−μ).

    Args:
        learning_rate: λ: a number, an array or a schedule. A step at λ = 0 changes nothing.
        momentum: μ of v ← μ·v + λ g/b_j, x ← x − v. Start from λ = 0.01 to 0.1 then.
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
    return _descent(direction, weight_decay, decoupled_weight_decay)


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
) -> optax.GradientTransformationExtraArgs:
    """WN-Adam (Alg. 4): Adam's running mean ĝ under WNGrad's b; x ← x − (λ/b_j)·ĝ_j/(1−βᵗ).

    Where λ changes, the mean is that of λg: no block moves by more than ½ in one step.

    Args:
        learning_rate: as for `wngrad`, and so are all arguments but `beta`.
        beta: β of the running mean.
    """
    blocks = Blocks("wn_adam", learning_rate, b_init, per, neuron_axis, nonfinite)
    direction = _RunningMean(blocks, beta)
    return _descent(direction, weight_decay, decoupled_weight_decay)


def scale_by_wngrad(
    learning_rate: Rate = 1.0,
    *,
    momentum: Number | None = None,
    b_init: BInit = 1.0,
    per: Per = "neuron",
    neuron_axis: NeuronAxis = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """g ↦ g/b_j, or v/λ with momentum; arguments as for `wngrad`.

    λ enters b; `optax.scale_by_learning_rate` has to follow, with the same λ.
    """
    blocks = Blocks("scale_by_wngrad", learning_rate, b_init, per, neuron_axis, nonfinite)
    return narrowed(_scaling(_Momentum(blocks, momentum), rated=False))


def scale_by_wn_adam(
    learning_rate: Rate = 1.0,
    *,
    beta: Number = 0.9,
    b_init: BInit = 1.0,
    per: Per = "neuron",
    neuron_axis: NeuronAxis = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """g ↦ ĝ_j/((1−βᵗ)·b_j) with b from the raw gradient; to be followed as `scale_by_wngrad`.

    Where λ changes, λĝ is the mean of λg.
    """
    blocks = Blocks("scale_by_wn_adam", learning_rate, b_init, per, neuron_axis, nonfinite)
    return narrowed(_scaling(_RunningMean(blocks, beta), rated=False))


# ---------------------------------------------------------------- directions


class _Momentum:
    """The direction g/b_j; or momentum, which has λ in it: μ·v + λ g/b_j."""

    def __init__(self, blocks: Blocks, momentum: Number | None) -> None:
        self.blocks = blocks
        self.mu = checked(blocks.owner, "momentum", momentum, below=1.0)
        self.has_rate = not is_off(self.mu)

    def first(self, params: PyTree, b: PyTree) -> WNGradState:
        velocity = jax.tree.map(jnp.zeros_like, params) if self.has_rate else None
        return WNGradState(zero(), b, velocity, zero())

    def next(self, g: PyTree, new: Growth, state: WNGradState) -> tuple[PyTree, dict[str, PyTree]]:
        """The direction, and the buffers to store; g is scaled as b is."""
        if not self.has_rate:
            return jax.tree.map(jnp.divide, g, new.divisor), {}

        def leaf(g: jax.Array, b: jax.Array, on: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.where(on, rule.momentum(wider(v), g, b, self.mu, new.lam), v)

        v = jax.tree.map(leaf, g, new.divisor, new.live, state.velocity)
        return v, {"velocity": like(v, state.velocity)}


class _RunningMean:
    """Algorithm 4's mean, which has λ in it: (λ/b_j)·ĝ_j/(1−βᵗ) for a constant one."""

    has_rate = True

    def __init__(self, blocks: Blocks, beta: Number) -> None:
        self.blocks = blocks
        self.beta = checked(blocks.owner, "beta", beta, below=1.0)

    def first(self, params: PyTree, b: PyTree) -> WNAdamState:
        velocity, t = (jax.tree.map(jnp.zeros_like, tree) for tree in (params, b))
        return WNAdamState(zero(), b, velocity, t, zero())

    def next(self, g: PyTree, new: Growth, state: WNAdamState) -> tuple[PyTree, dict[str, PyTree]]:
        """The direction, and the buffers to store; g is scaled as b is."""
        t = jax.tree.map(lambda t, on: t + on, state.t, new.live_blocks)

        def leaf(
            g: jax.Array, before: jax.Array, b: jax.Array, on: jax.Array, v: jax.Array
        ) -> jax.Array:
            after = rule.mean_step(wider(v), g, before, b, self.beta, new.lam)
            return jnp.where(on, after, v)

        v = jax.tree.map(leaf, g, new.before, new.divisor, new.live, state.velocity)
        direction = jax.tree.map(
            # t = 0: no gradient yet, and v is 0
            lambda v, t: v / bias_correction(self.beta, jnp.maximum(t, 1)),
            v, self.blocks.spread(t, g),
        )  # fmt: skip
        return direction, {"velocity": like(v, state.velocity), "t": t}


# ---------------------------------------------------------------- parts of a chain


def _scaling(
    direction: _Momentum | _RunningMean, decay: Number | None = None, *, rated: bool = True
) -> optax.GradientTransformation:
    """A direction as a transformation, with decoupled decay in it, in float32 or wider.

    Args:
        rated: multiply by λ; else it is for the caller to do.
    """
    blocks = direction.blocks

    def init(params: PyTree) -> Any:
        return direction.first(params, blocks.first(params))

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        new = blocks.grow(updates, state.b, state.count)
        g = jax.tree.map(lambda scale, g: times(scale, wider(g)), new.scale, updates)
        out, buffers = direction.next(g, new, state)
        if rated and not direction.has_rate:
            out = jax.tree.map(lambda d: new.lam * d, out)
        elif direction.has_rate and not rated:
            out = jax.tree.map(lambda d: d / jnp.where(new.lam == 0, 1, new.lam), out)
        if decay is not None:
            out = jax.tree.map(lambda d, p: d + new.lam * decay * wider(p), out, params)
        # Exactly 0 where a block does not take the step.
        out = jax.tree.map(lambda d, on: jnp.where(on, d, 0), out, new.live)
        count, skipped = optax.safe_increment(state.count), state.skipped + new.skipped
        return out, state._replace(count=count, b=new.b, skipped=skipped, **buffers)

    return optax.GradientTransformation(init, update)


def _descent(
    direction: _Momentum | _RunningMean, weight_decay: Any, decoupled: bool
) -> optax.GradientTransformationExtraArgs:
    """Coupled decay where asked for, then the direction with the rate, downwards."""
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
    chain = optax.chain(*parts, optax.scale(-1.0))
    return narrowed(chain, None if off else owner)
