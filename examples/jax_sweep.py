"""Loss against λ on scikit-learn's digits, every λ and seed in one `jax.vmap`.

Writes `out/jax_sweep.png`. No download. Run it: `python examples/jax_sweep.py`.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_digits

from wngrad.transforms import wn_adam, wngrad

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LAMBDAS = 10 ** jnp.linspace(-4, 2, 13)
SEEDS, EPOCHS, BATCH = jnp.arange(3), 15, 100
MAKE = {"SGD": optax.sgd, "WNGrad": wngrad, "WN-Adam": wn_adam}
COLORS = {"SGD": "#8c8c8c", "WNGrad": "#0b6e99", "WN-Adam": "#d1495b"}


def digits() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Training and test images, normalized by the training set's mean and deviation, and labels."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.data))
    train, test = order[:1400], order[1400:]
    x = (data.data - data.data[train].mean()) / data.data[train].std()
    x, y = jnp.asarray(x, jnp.float32), jnp.asarray(data.target)
    return x[train], y[train], x[test], y[test]


def loss(params: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    logits = jax.nn.relu(x @ params["in"]) @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def final_loss(name: str, lam: jax.Array, seed: jax.Array) -> jax.Array:
    """Train one 64-100-10 network by one scan; the test loss at the end."""
    x, y, x_test, y_test = digits()
    start, order = jax.random.split(jax.random.key(seed))
    into, out = jax.random.split(start)
    params = {
        "in": jax.random.uniform(into, (64, 100), minval=-1 / 8, maxval=1 / 8),
        "out": jax.random.uniform(out, (100, 10), minval=-1 / 10, maxval=1 / 10),
    }
    opt = MAKE[name](lam)

    def step(carry, batch):
        params, state = carry
        grads = jax.grad(loss)(params, x[batch], y[batch])
        updates, state = opt.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(order, EPOCHS)
    batches = jax.vmap(lambda key: jax.random.permutation(key, len(x)))(keys)
    (params, _), _ = jax.lax.scan(step, (params, opt.init(params)), batches.reshape(-1, BATCH))
    return loss(params, x_test, y_test)


def main() -> None:
    fig, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name in MAKE:
        begin = time.perf_counter()
        over_seeds = jax.vmap(partial(final_loss, name), (None, 0))
        table = np.asarray(jax.jit(jax.vmap(over_seeds, (0, None)))(LAMBDAS, SEEDS))
        table = np.nan_to_num(table, nan=100.0, posinf=100.0).clip(max=100)
        took = time.perf_counter() - begin
        ax.plot(LAMBDAS, table.mean(1), "o-", color=COLORS[name], label=name, ms=4)
        ax.fill_between(LAMBDAS, table.min(1), table.max(1), color=COLORS[name], alpha=0.15)
        best = int(table.mean(1).argmin())
        print(
            f"{name:<8} {table.size} networks at once in {took:.1f} s; best test loss "
            f"{table.mean(1)[best]:.3f} at λ = {LAMBDAS[best]:.2g}"
        )
    ax.set(xscale="log", yscale="log", xlabel="λ", ylabel=f"test loss after {EPOCHS} epochs")
    ax.set_title(f"Digits, 64-100-10 network in JAX, {len(SEEDS)} seeds: mean, lowest and highest")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    path = Path("out/jax_sweep.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)
    print(f"Wrote {path}: open it.")


if __name__ == "__main__":
    main()
