"""JAX: the same optimizer as an optax transformation, in a compiled step.

    python FILE

It needs the extra `jax`; torch is not loaded.
"""

import jax
import jax.numpy as jnp
import optax

from wngrad.transforms import averaged_params, polynomial_average, wnmuon


def network(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    return hidden @ params["out"]


def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    target = jnp.sin(3 * x).sum(1, keepdims=True)
    return jnp.mean((network(params, x) - target) ** 2)


def main() -> None:
    first, second, data = jax.random.split(jax.random.key(0), 3)
    params = {
        "in": jax.random.normal(first, (4, 64)) / 2,
        "bias": jnp.zeros(64),
        "out": jax.random.normal(second, (64, 1)) / 8,
    }
    opt = optax.chain(wnmuon(), polynomial_average())
    state = opt.init(params)

    @jax.jit
    def step(params, state, key):
        grads = jax.grad(loss)(params, jax.random.uniform(key, (128, 4), minval=-1.0))
        updates, state = opt.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    x_test = jax.random.uniform(data, (1000, 4), minval=-1.0)
    print(f"before: loss {loss(params, x_test):.4f}")
    for key in jax.random.split(data, 500):
        params, state = step(params, state, key)
    print(f"after: loss {loss(averaged_params(state, params), x_test):.4f}")


if __name__ == "__main__":
    main()
