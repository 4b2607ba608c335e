"""The JAX twin: WNGrad, WN-Adam and WNMuon as optax transformations.

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

from wngrad.install import naming_the_extra

with naming_the_extra("wngrad.transforms", "jax", "optax"):
    from wngrad.transforms.average import (
        PolynomialAverageState,
        averaged_params,
        polynomial_average,
    )
    from wngrad.transforms.layouts import MatrixAxes, flax_layout, flax_neuron_axis, neuron_axis_of
    from wngrad.transforms.lipschitz import lipschitz_b_init
    from wngrad.transforms.optimizers import (
        WNAdamState,
        WNGradState,
        WNMuonState,
        scale_by_wn_adam,
        scale_by_wngrad,
        wn_adam,
        wngrad,
        wnmuon,
    )
    from wngrad.transforms.orthogonal import orthogonalize

__all__ = [
    "MatrixAxes",
    "PolynomialAverageState",
    "WNAdamState",
    "WNGradState",
    "WNMuonState",
    "averaged_params",
    "flax_layout",
    "flax_neuron_axis",
    "lipschitz_b_init",
    "neuron_axis_of",
    "orthogonalize",
    "polynomial_average",
    "scale_by_wn_adam",
    "scale_by_wngrad",
    "wn_adam",
    "wngrad",
    "wnmuon",
]
