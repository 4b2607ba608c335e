"""The polynomial average of the parameters, which is evaluated and never trained on.

    x̄ ← x̄ + (η+1)/(k+η)·(x − x̄)   after the k-th step

weighs the j-th of k iterates by about (j/k)^η (Shamir, Zhang 2013): at η = 8 the last fifth of a
run counts most, however long the run is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from wngrad import rule
from wngrad.transforms.blocks import arrays, b_dtype, wider
from wngrad.transforms.settings import Number, PyTree, number


class PolynomialAverageState(NamedTuple):
    """The average in float32 or wider, and the number of steps in it."""

    count: Any
    average: PyTree


def polynomial_average(eta: Number = 8.0) -> optax.GradientTransformation:
    """The average of the parameters, kept as the last part of a chain; updates pass unchanged.

    `averaged_params` reads it. A step that moves nothing (ρ = 0, or one of `optax.MultiSteps` that
    only accumulates) does not count.

    Args:
        eta: η: 0 is the mean of all iterates; the larger, the more the last ones count.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from wngrad.transforms import averaged_params, polynomial_average
        >>> opt, x = optax.chain(optax.sgd(1.0), polynomial_average(eta=1.0)), jnp.zeros(1)
        >>> state = opt.init(x)
        >>> for g in (-1.0, -3.0):  # x is 1, then 4
        ...     updates, state = opt.update(jnp.full(1, g), state, x)
        ...     x = optax.apply_updates(x, updates)
        >>> averaged_params(state)  # 2/(2+1) of the way from 1 to 4
        Array([3.], dtype=float32)
    """
    eta = number("polynomial_average", "eta", eta)

    def init(params: PyTree) -> PolynomialAverageState:
        # A copy, so that parameters and state may both be donated.
        average = jax.tree.map(lambda p: jnp.copy(wider(p)), arrays(params))
        return PolynomialAverageState(jnp.zeros((), jnp.int32), average)

    def update(
        updates: PyTree, state: PolynomialAverageState, params: PyTree | None = None
    ) -> tuple[PyTree, PolynomialAverageState]:
        if params is None:
            raise ValueError(
                "polynomial_average: `params` must be given to `update`, since it averages them, "
                "got None."
            )
        params, moved = arrays(params), arrays(updates)
        moves = [(u != 0).any() for u in jax.tree.leaves(moved)]
        counts = jnp.stack(moves or [jnp.asarray(False)]).any()
        k = jnp.where(counts, optax.safe_increment(state.count), state.count)

        def leaf(mean: Array, p: Array, u: Array) -> Array:
            weight = rule.polynomial_weight(eta, jnp.maximum(k, 1).astype(b_dtype(p)))
            x = wider(p) + wider(u)
            # Of two ways to write x̄ + w·(x − x̄), the one that is x at w = 1, or x̄ at w = 0.
            near_mean, near_x = mean + weight * (x - mean), x - (1 - weight) * (x - mean)
            new = jnp.where(weight < 0.5, near_mean, near_x)
            return jnp.where(counts, new, mean).astype(mean.dtype)

        average = jax.tree.map(leaf, state.average, params, moved)
        return updates, PolynomialAverageState(k, average)

    return optax.GradientTransformation(init, update)


def averaged_params(state: Any, params: PyTree | None = None) -> PyTree:
    """The averaged parameters, for evaluation.

    Args:
        state: of an optimizer with one `polynomial_average` in it, however deep.
        params: the parameters; if given, the averages have their types, and what was masked out of
            the average is theirs.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from wngrad.transforms import averaged_params, polynomial_average
        >>> opt, params = optax.chain(optax.sgd(1.0), polynomial_average()), jnp.ones(2)
        >>> averaged_params(opt.init(params), params)
        Array([1., 1.], dtype=float32)
    """

    def is_ours(part: Any) -> bool:
        return isinstance(part, PolynomialAverageState)

    states = [part for part in jax.tree.leaves(state, is_leaf=is_ours) if is_ours(part)]
    if len(states) != 1:
        raise ValueError(
            f"averaged_params: `state` must be of an optimizer with one `polynomial_average` in "
            f"it, got one with {len(states)}."
        )

    def leaf(mean: Any, p: Any) -> Any:
        return p if isinstance(mean, optax.MaskedNode) else mean.astype(jnp.result_type(p))

    average = states[0].average
    if params is None:
        return average
    return jax.tree.map(leaf, average, params, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
