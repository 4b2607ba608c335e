"""The JAX twin: golden trajectories, optax's habits, and every way JAX users train."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import golden
from wngrad import WNAdam, WNGrad
from wngrad.transforms import (
    flax_neuron_axis,
    neuron_axis_of,
    scale_by_wn_adam,
    scale_by_wngrad,
    wn_adam,
    wngrad,
)

TABLE = {
    "wngrad": partial(wngrad, 1.0),
    "wngrad-momentum": partial(wngrad, 1.0, momentum=0.9),
    "wngrad-gradient": partial(wngrad, 1.0, b_init="gradient"),
    "wngrad-tensor": partial(wngrad, 1.0, per="tensor", weight_decay=0.01),
    "wngrad-model": partial(wngrad, 1.0, per="model", nonfinite="skip"),
    "wn-adam": partial(wn_adam, 1.0),
    "wn-adam-gradient": partial(wn_adam, 1.0, b_init=("gradient", 2.0), nonfinite="skip"),
    "wn-adam-model": partial(
        wn_adam, 1.0, per="model", weight_decay=0.1, decoupled_weight_decay=True
    ),
}


@pytest.fixture(params=TABLE)
def make(request):
    return TABLE[request.param]


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def tree(seed=0, dtype=jnp.float32):
    """Leaves of 0, 1, 2 and 4 dimensions, an empty one and none at all."""
    keys = jax.random.split(jax.random.key(seed), 4)
    shapes = {"scalar": (), "bias": (3,), "dense": (4, 3), "conv": (2, 2, 3, 5)}
    leaves = {
        name: jax.random.normal(key, shape, jnp.float32).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    return {**leaves, "empty": jnp.zeros((0, 3), dtype), "none": None}


def step(opt, params, state, grads):
    updates, state = opt.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def close(a, b, **tol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tol), a, b)


def equal(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


# ---------------------------------------------------------------- golden trajectories


def optax_twin(rule, shape, per, b_init, decay):
    (b1, c), (w, decoupled) = golden.B_INIT[b_init], golden.DECAY[decay]
    options = {
        "per": per,
        "neuron_axis": 0,  # torch's convention, which the file has
        "b_init": b1 if c is None else ("gradient", c),
        "weight_decay": w,
        "decoupled_weight_decay": decoupled,
    }
    if rule == "adam":
        return wn_adam(golden.LAM, **options)
    return wngrad(golden.LAM, momentum=0.9 if rule == "momentum" else None, **options)


@pytest.mark.parametrize(("case", "after"), golden.load())
def test_optax_follows_the_golden_trajectories(x64, case, after):
    """The same file as torch and the paper: 100 steps in float64, to 1e-12."""
    opt, shape = optax_twin(*case), case[1]
    x = jnp.array(golden.start(shape), jnp.float64).reshape(shape)
    state, go = opt.init(x), jax.jit(partial(step, opt))
    for k in range(1, max(golden.STEPS) + 1):
        g = jnp.array(golden.gradient(np.ravel(x).tolist())).reshape(shape)
        x, state = go(x, state, g)
        if k in golden.STEPS:
            point = after[golden.STEPS.index(k)]
            np.testing.assert_allclose(np.ravel(x), point["x"], rtol=1e-12, atol=1e-12)
            b = np.ravel(optax.tree.get(state, "b"))
            np.testing.assert_allclose(b, point["b"], rtol=1e-12)


@pytest.mark.parametrize("rule", golden.RULES)
@pytest.mark.parametrize("per", ["neuron", "tensor"])
@pytest.mark.parametrize("b_init", [1.0, "gradient"])
def test_torch_and_optax_agree_step_by_step_in_float32(rule, per, b_init):
    """The same gradients for both: b within 4 units in the last place, x within 16."""
    draw = np.random.default_rng(0)
    p = torch.nn.Parameter(torch.tensor(draw.standard_normal((4, 5)), dtype=torch.float32))
    options = {"per": per, "b_init": b_init}
    if rule == "adam":
        ours, twin = WNAdam([p], lr=0.7, **options), wn_adam(0.7, neuron_axis=0, **options)
    else:
        mu = 0.9 if rule == "momentum" else 0.0
        ours = WNGrad([p], lr=0.7, momentum=mu, **options)
        twin = wngrad(0.7, momentum=mu, neuron_axis=0, **options)
    x = jnp.array(p.detach().numpy())
    state, go, ulp = twin.init(x), jax.jit(partial(step, twin)), float(np.finfo(np.float32).eps)
    for _ in range(100):
        g = draw.standard_normal((4, 5)).astype(np.float32)
        p.grad = torch.tensor(g)
        ours.step()
        x, state = go(x, state, jnp.array(g))
        b = np.asarray(optax.tree.get(state, "b"))
        np.testing.assert_allclose(b, ours.state[p]["b"].numpy(), rtol=4 * ulp)
        np.testing.assert_allclose(x, p.detach().numpy(), rtol=16 * ulp, atol=16 * ulp)


# ---------------------------------------------------------------- granularity


def test_a_kernels_neuron_is_its_last_axis_and_an_embeddings_its_first():
    params = {
        "Dense_0": {"kernel": jnp.ones((4, 3)), "bias": jnp.ones(3)},
        "Conv_0": {"kernel": jnp.ones((3, 3, 2, 5))},
        "Embed_0": {"embedding": jnp.ones((7, 2))},
    }
    b = optax.tree.get(wngrad().init(params), "b")
    assert jax.tree.map(jnp.shape, b) == {
        "Dense_0": {"kernel": (1, 3), "bias": (3,)},
        "Conv_0": {"kernel": (1, 1, 1, 5)},
        "Embed_0": {"embedding": (7, 1)},
    }
    by_tensor = optax.tree.get(wngrad(per="tensor").init(params), "b")
    assert all(b.size == 1 for b in jax.tree.leaves(by_tensor))
    assert optax.tree.get(wngrad(per="model").init(params), "b").shape == ()


def test_the_axis_may_be_a_number_or_a_function_of_path_and_shape():
    params = {"rows": jnp.ones((4, 3)), "each": jnp.ones((4, 3)), "bias": jnp.ones(2)}
    assert optax.tree.get(wngrad(neuron_axis=0).init(params), "b")["rows"].shape == (4, 1)

    def axis(path, shape):
        return {"rows": 0, "each": None}.get(path[0].key, -1)

    b = optax.tree.get(wngrad(neuron_axis=axis).init(params), "b")
    assert (b["rows"].shape, b["each"].shape) == ((4, 1), (4, 3))


def test_flax_models_are_read_in_both_of_its_dialects():
    import flax.linen as nn
    from flax import nnx

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.Dense(3)(nn.Embed(7, 4)(tokens))

    net = Net()
    params = net.init(jax.random.key(0), jnp.array([1, 2]))
    b = optax.tree.get(wngrad(neuron_axis=neuron_axis_of(net)).init(params), "b")["params"]
    assert b["Embed_0"]["embedding"].shape == (7, 1)
    assert b["Dense_0"]["kernel"].shape == (1, 3)
    assert b["Dense_0"]["bias"].shape == (3,)

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.dense = nnx.Embed(7, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    model = Block(nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    shapes = [
        x.shape
        for x in jax.tree.leaves(
            optax.tree.get(wngrad(neuron_axis=neuron_axis_of(model)).init(state), "b")
        )
    ]
    assert sorted(shapes) == sorted([(3,), (1, 3), (7, 1)])
    opt = nnx.Optimizer(model, wngrad(), wrt=nnx.Param)
    grads = nnx.grad(lambda m: (m.dense(m.embed(jnp.array([1]))) ** 2).sum())(model)
    before = np.asarray(model.dense.kernel[...])
    opt.update(model, grads)
    assert not np.array_equal(before, np.asarray(model.dense.kernel[...]))


def test_equinox_models_keep_the_neuron_first():
    import equinox as eqx

    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(2, 5, 3, key=jax.random.key(0)),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(20, 3, key=jax.random.key(1)),
        ]
    )
    params = eqx.filter(model, eqx.is_inexact_array)
    opt = wngrad(neuron_axis=neuron_axis_of(model))
    state = opt.init(params)
    shapes = [x.shape for x in jax.tree.leaves(optax.tree.get(state, "b"))]
    assert sorted(shapes) == sorted([(5, 1, 1, 1), (5, 1, 1), (3, 1), (3,)])
    grads = eqx.filter_grad(lambda m: (m(jnp.ones((2, 4, 4))) ** 2).sum())(model)
    updates, _ = opt.update(grads, state, params)
    assert isinstance(eqx.apply_updates(model, updates), eqx.nn.Sequential)


def test_other_modules_are_refused_with_the_way_out():
    with pytest.raises(TypeError, match="`module` must be an Equinox or Flax module, got dict"):
        neuron_axis_of({})
    assert flax_neuron_axis((), (3, 2)) == -1
    assert flax_neuron_axis((), (3,)) is None


# ---------------------------------------------------------------- the rule's facts


def test_no_block_moves_by_more_than_a_half(make):
    opt = make()
    if "decay" in str(make.keywords):
        return  # decay moves on its own account
    params = tree()
    state = opt.init(params)
    mu = make.keywords.get("momentum", 0.0)
    for seed in range(10):
        before = params
        size = 10.0 ** (seed - 3)
        grads = jax.tree.map(lambda g: size * g, tree(seed + 1))  # noqa: B023
        params, state = step(opt, params, state, grads)
        moved = jax.tree.map(lambda a, b: jnp.abs(a - b).max(initial=0), params, before)
        assert max(map(float, jax.tree.leaves(moved))) <= 0.5 / (1 - mu) * 1.0001


def test_the_scale_of_the_loss_cancels_bitwise():
    for make in (wngrad, wn_adam):
        runs = []
        for lam, scale in ((1.0, 1.0), (8.0, 2.0**10)):
            opt, params = make(lam, b_init="gradient"), tree()
            state = opt.init(params)
            for seed in range(5):
                grads = jax.tree.map(lambda g: scale * g, tree(seed + 1))  # noqa: B023
                params, state = step(opt, params, state, grads)
            runs.append(params)
        assert equal(*runs)


def test_a_step_at_rate_zero_changes_nothing(make):
    opt = make()
    if "decay" in str(make.keywords):
        opt = make(weight_decay=None)
    params = tree()
    _, state = step(opt, params, opt.init(params), tree(1))
    still = type(opt)(*(make.func(0.0, **{**make.keywords, "weight_decay": None})))
    after, new = step(still, params, state, tree(2))
    assert equal(params, after)
    for name in ("b", "buf", "m", "t"):
        assert equal(optax.tree.get(state, name, 0), optax.tree.get(new, name, 0))


def test_skipped_blocks_stay_bit_identical_and_are_counted():
    for make in (partial(wngrad, momentum=0.9), wn_adam):
        opt, params = make(1.0, nonfinite="skip"), tree()
        params, state = step(opt, params, opt.init(params), tree(1))
        grads = tree(2)
        grads["dense"] = grads["dense"].at[1, 2].set(jnp.nan)
        grads["bias"] = grads["bias"].at[0].set(jnp.inf)
        after, new = step(opt, params, state, grads)
        assert np.array_equal(after["dense"][:, 2], params["dense"][:, 2])
        assert not np.array_equal(after["dense"][:, 1], params["dense"][:, 1])
        assert after["bias"][0] == params["bias"][0]
        for name in ("b", "buf", "m", "t"):
            old, now = (optax.tree.get(s, name) for s in (state, new))
            if old is not None:
                assert np.array_equal(old["dense"][:, 2], now["dense"][:, 2])
        assert int(optax.tree.get(new, "skipped")) == 2


def test_bad_gradients_show_by_default(make):
    opt = make(nonfinite="propagate")
    params = tree()
    grads = {**tree(1), "bias": jnp.array([1.0, jnp.nan, 1.0])}
    after, _ = step(opt, params, opt.init(params), grads)
    assert jnp.isnan(after["bias"][1])


def test_a_b_too_large_for_its_type_shows_instead_of_freezing():
    opt, params = wngrad(1.0), jnp.ones(2)
    after, _ = step(opt, params, opt.init(params), jnp.array([1e25, 1.0]))
    assert np.isnan(after).tolist() == [True, False]


# ---------------------------------------------------------------- optax's habits


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
def test_dtypes_and_shapes_are_stable_and_b_is_wide(make, dtype):
    opt, params = make(), tree(dtype=dtype)
    state = opt.init(params)
    updates, new = opt.update(tree(1, dtype), state, params)
    kinds = lambda t: jax.tree.map(lambda x: (x.shape, x.dtype), t)  # noqa: E731
    assert kinds(updates) == kinds(params)
    assert kinds(new) == kinds(state)
    assert all(b.dtype == jnp.float32 for b in jax.tree.leaves(optax.tree.get(state, "b")))


def test_complex_leaves_are_pairs_of_reals():
    opt = wngrad(1.0, neuron_axis=0)
    z = jnp.array([[1 + 2j, -1j], [0.5, 2]], jnp.complex64)
    pairs = jnp.stack([z.real, z.imag], -1)
    one, other = opt.init(z), opt.init(pairs)
    for k in range(3):
        g = (k + 1) * jnp.conj(z)
        z, one = step(opt, z, one, g)
        pairs, other = step(opt, pairs, other, jnp.stack([g.real, g.imag], -1))
    np.testing.assert_allclose(jnp.stack([z.real, z.imag], -1), pairs, rtol=1e-6)


@pytest.mark.parametrize("target", ["parabola", "rosenbrock"])
def test_optaxs_small_targets_are_reached(target):
    """As optax tests its own: the parabola to 1e-2, Rosenbrock well into its valley."""
    best = jnp.array([1.0, -1.0, 1.0])
    f = {
        "parabola": lambda x: jnp.sum((x - best) ** 2),
        "rosenbrock": lambda x: jnp.sum(100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2),
    }[target]
    for opt in (wngrad(1.0), wngrad(1.0, momentum=0.9), wn_adam(1.0)):
        x = jnp.array([-1.0, 10.0, 1.0]) if target == "parabola" else jnp.zeros(3)
        state, begin = opt.init(x), f(x)

        def body(carry, _, opt=opt):
            return step(opt, *carry, jax.grad(f)(carry[0])), None

        (x, _), _ = jax.lax.scan(body, (x, state), length=4000)
        if target == "parabola":
            np.testing.assert_allclose(x, best, atol=1e-2)
        else:
            assert f(x) < 0.2 * begin


def test_a_scan_of_a_thousand_scheduled_steps_compiles_once(make):
    traces = []
    opt = make.func(optax.cosine_decay_schedule(1.0, 1000), **make.keywords)

    @jax.jit
    def train(params, state):
        traces.append(1)

        def body(carry, seed):
            params, state = carry
            grads = jax.tree.map(lambda p: p + 0.1 * seed, params)
            return step(opt, params, state, grads), None

        return jax.lax.scan(body, (params, state), jnp.arange(1000) / 1000)[0]

    params = tree()
    first, state = train(params, opt.init(params))
    train(first, state)
    assert len(traces) == 1
    assert not equal(first, params)


def test_lam_may_change_without_a_retrace():
    traces = []

    @jax.jit
    def go(lam, params, grads):
        traces.append(1)
        opt = wngrad(lam)
        return step(opt, params, opt.init(params), grads)[0]

    params, grads = jnp.ones((2, 3)), jnp.ones((2, 3))
    outs = [go(jnp.float32(lam), params, grads) for lam in (0.1, 0.5, 1.0)]
    assert len(traces) == 1
    for lam, out in zip((0.1, 0.5, 1.0), outs, strict=True):
        expected = 1 - lam / (1 + lam**2 * 2)
        np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_inject_hyperparams_makes_lam_a_state():
    opt = optax.inject_hyperparams(wngrad)(learning_rate=0.5, momentum=0.9)
    params = tree()
    state = opt.init(params)
    assert float(state.hyperparams["learning_rate"]) == 0.5
    state.hyperparams["learning_rate"] = jnp.float32(0.25)
    ours, state = step(opt, params, state, tree(1))
    plain = wngrad(0.25, momentum=0.9)
    theirs, _ = step(plain, params, plain.init(params), tree(1))
    close(ours, theirs, rtol=1e-6)
    scheduled = optax.inject_hyperparams(wn_adam)(optax.linear_schedule(1.0, 0.0, 10))
    step(scheduled, params, scheduled.init(params), tree(1))


def test_accumulation_is_one_step_on_the_mean(make):
    params, grads = tree(), [tree(1), tree(2)]
    opt = make()
    multi = optax.MultiSteps(make(), every_k_schedule=2)
    state, ours = multi.init(params), params
    for g in grads:
        ours, state = step(multi, ours, state, g)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
    theirs, _ = step(opt, params, opt.init(params), mean)
    close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_apply_if_finite_wraps_it(make):
    opt = optax.apply_if_finite(make(nonfinite="propagate"), max_consecutive_errors=3)
    params = tree()
    state = opt.init(params)
    bad = {**tree(1), "scalar": jnp.float32(jnp.nan)}
    after, state = step(opt, params, state, bad)
    assert equal(after, params)
    assert int(state.total_notfinite) == 1


def test_multi_transform_gives_each_group_its_own():
    params = {"body": jnp.ones((2, 3)), "head": jnp.ones((3, 2))}
    opt = optax.multi_transform({"a": wngrad(1.0), "b": wn_adam(0.5)}, {"body": "a", "head": "b"})
    after, _ = step(opt, params, opt.init(params), params)
    for name, alone in (("body", wngrad(1.0)), ("head", wn_adam(0.5))):
        theirs, _ = step(alone, params[name], alone.init(params[name]), params[name])
        np.testing.assert_array_equal(after[name], theirs)


def test_the_parts_chain_with_others():
    params = tree()
    for part in (scale_by_wngrad(0.5), scale_by_wn_adam(0.5)):
        opt = optax.chain(optax.clip_by_global_norm(1.0), part, optax.scale_by_learning_rate(0.5))
        after, _ = step(opt, params, opt.init(params), tree(1))
        assert not equal(after, params)


def test_vmap_over_lam_and_seeds_is_a_sweep_in_one_call():
    lams, seeds = jnp.array([0.01, 0.1, 1.0, 10.0]), jnp.arange(3)

    def train(lam, seed):
        opt = wngrad(lam)
        x = jax.random.normal(jax.random.key(seed), (3, 2))

        def body(carry, _):
            x, state = carry
            return step(opt, x, state, 2 * x), None

        (x, _), _ = jax.lax.scan(body, (x, opt.init(x)), length=50)
        return (x**2).sum()

    table = jax.vmap(jax.vmap(train, (None, 0)), (0, None))(lams, seeds)
    assert table.shape == (4, 3)
    np.testing.assert_allclose(table[2, 1], train(1.0, 1), rtol=1e-5)
    assert (table[2] < table[0]).all()  # λ = 1 beats λ = 0.01 for every seed


SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np, optax
from functools import partial
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from wngrad.transforms import wngrad, wn_adam
mesh = Mesh(np.array(jax.devices()), ("d",))
for opt in (wngrad(1.0), wngrad(1.0, per="tensor", momentum=0.9), wn_adam(1.0, per="model")):
    x = jax.random.normal(jax.random.key(0), (8, 4))
    def train(x):
        state = opt.init(x)
        for _ in range(5):
            updates, state = opt.update(2 * x + 1, state, x)
            x = optax.apply_updates(x, updates)
        return x
    plain = train(x)
    for spec in (P("d"), P(None, "d")):
        out = jax.jit(train)(jax.device_put(x, NamedSharding(mesh, spec)))
        np.testing.assert_allclose(out, plain, rtol=1e-5, atol=1e-6)
opt = wngrad(1.0)
def local(x):  # one b per column: rows stay whole on a device when columns are cut
    updates, _ = opt.update(2 * x, opt.init(x), x)
    return x + updates
x = jax.random.normal(jax.random.key(0), (8, 4))
out = jax.shard_map(local, mesh=mesh, in_specs=P(None, "d"), out_specs=P(None, "d"))(x)
np.testing.assert_allclose(out, local(x), rtol=1e-6)
stacked = jnp.stack([x] * 4)
np.testing.assert_allclose(jax.pmap(local)(stacked)[2], local(x), rtol=1e-6)
explicit = jax.make_mesh((4,), ("x",))  # its axes are part of the type
with jax.set_mesh(explicit):
    for opt in (wngrad(1.0), wngrad(1.0, momentum=0.9, b_init="gradient"), wn_adam(1.0)):
        whole = jax.random.normal(jax.random.key(0), (8, 4))
        x = jax.device_put(whole, NamedSharding(explicit, P(None, "x")))
        state = jax.jit(opt.init)(x)
        updates, _ = jax.jit(opt.update)(2 * x, state, x)
        plain = opt.update(2 * np.asarray(x), opt.init(np.asarray(x)))[0]
        np.testing.assert_allclose(updates, plain, rtol=1e-5)
def scanned(x):
    def body(carry, _):
        x, state = carry
        updates, state = opt.update(2 * x, state, x)
        return (x + updates, state), None
    return jax.lax.scan(body, (x, opt.init(x)), length=3)[0][0]
for opt in (wngrad(1.0), wngrad(1.0, momentum=0.9), wn_adam(1.0)):
    x = jax.random.normal(jax.random.key(0), (8, 4))
    out = jax.shard_map(scanned, mesh=mesh, in_specs=P(None, "d"), out_specs=P(None, "d"))(x)
    np.testing.assert_allclose(out, scanned(x), rtol=1e-5)
print("sharded", len(jax.devices()))
"""


def test_sharded_parameters_train_like_whole_ones():
    """Four devices in a process of its own: jit with shardings, shard_map and pmap."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARDED], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "sharded 4", done.stderr[-2000:]


def test_orbax_brings_the_state_back_bit_for_bit(make, tmp_path):
    import orbax.checkpoint as ocp

    opt, params = make(), {k: v for k, v in tree().items() if k not in ("empty", "none")}
    grads = {k: v for k, v in tree(1).items() if k in params}
    params, state = step(opt, params, opt.init(params), grads)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        again = saver.restore(tmp_path / "state", opt.init(params))
    assert equal(state, again)
    assert equal(step(opt, params, state, grads), step(opt, params, again, grads))


# ---------------------------------------------------------------- the door


@pytest.mark.parametrize("make", [wngrad, wn_adam])
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"learning_rate": -1.0}, ValueError, "`learning_rate` must be >= 0.*got -1.0"),
        ({"learning_rate": math.nan}, ValueError, "`learning_rate`.*got nan"),
        ({"b_init": 0.0}, ValueError, "`b_init` must be > 0.*got 0.0"),
        ({"b_init": ("gradient", -1.0)}, ValueError, "`b_init`.*-1.0"),
        ({"b_init": "grad"}, ValueError, "`b_init`.*got 'grad'"),
        ({"b_init": None}, ValueError, "`b_init`.*got None"),
        ({"per": "slice"}, ValueError, "`per` must be one of.*got 'slice'"),
        ({"nonfinite": "raise"}, ValueError, "`nonfinite` must be one of.*got 'raise'"),
        ({"neuron_axis": 0.5}, TypeError, "`neuron_axis` must be an integer.*got 0.5"),
        ({"weight_decay": -0.1}, ValueError, "`weight_decay` must be >= 0.*got -0.1"),
        ({"decoupled_weight_decay": 1}, TypeError, "`decoupled_weight_decay`.*got 1"),
    ],
)
def test_bad_arguments_are_named(make, options, error, match):
    with pytest.raises(error, match=match):
        make(**options)


def test_what_only_shows_later_is_named_then():
    with pytest.raises(ValueError, match=r"`neuron_axis`.*got 2 for \['w'\] of shape \(3, 2\)"):
        wngrad(neuron_axis=2).init({"w": jnp.ones((3, 2))})
    opt = wngrad(weight_decay=0.1)
    with pytest.raises(ValueError, match="`params` must be given to `update`"):
        opt.update(jnp.ones(2), opt.init(jnp.ones(2)))
    with pytest.raises(ValueError, match=r"`momentum` must be >= 0 and < 1, got 1.0"):
        wngrad(momentum=1.0)
    with pytest.raises(ValueError, match=r"`beta` must be >= 0 and < 1, got 1.5"):
        wn_adam(beta=1.5)


def test_a_jax_user_never_loads_torch():
    code = "import wngrad.transforms, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False"


# ---------------------------------------------------------------- what review found


@pytest.mark.parametrize(
    ("of_params", "of_grads"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_the_states_types_are_its_own(make, of_params, of_grads):
    """Gradients of another type than the parameters: a scan carries the state all the same."""
    opt, params = make(), tree(dtype=of_params)
    state = opt.init(params)
    _, new = opt.update(tree(1, of_grads), state, params)
    kinds = lambda t: jax.tree.map(lambda x: (x.shape, x.dtype), t)  # noqa: E731
    assert kinds(new) == kinds(state)


def test_a_module_named_embedding_is_no_embedding():
    params = {"embedding": {"kernel": jnp.ones((2, 2, 3, 5)), "bias": jnp.ones((1, 5))}}
    b = optax.tree.get(wngrad().init(params), "b")["embedding"]
    assert (b["kernel"].shape, b["bias"].shape) == ((1, 1, 1, 5), (1, 5))


def test_attention_kernels_have_a_neuron_for_every_head_and_dimension():
    import flax.linen as nn

    layer = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=6)
    params = layer.init(jax.random.key(0), jnp.ones((1, 3, 4)))["params"]
    b = optax.tree.get(wngrad(neuron_axis=neuron_axis_of(layer)).init(params), "b")
    assert b["query"]["kernel"].shape == (1, 2, 3)
    assert b["query"]["bias"].shape == (2, 3)
    assert b["out"]["kernel"].shape == (1, 1, 4)


@pytest.mark.parametrize("options", [{"nonfinite": "skip"}, {"b_init": "gradient"}])
def test_decoupled_decay_leaves_alone_what_takes_no_step(options):
    """As in torch: a skipped block, or one without a gradient yet, is not shrunk."""
    g = np.array([np.nan if "nonfinite" in options else 0.0, 1.0], np.float32)
    opt = wngrad(0.5, weight_decay=0.1, decoupled_weight_decay=True, **options)
    x, _ = step(opt, jnp.ones(2), opt.init(jnp.ones(2)), jnp.array(g))
    p = torch.nn.Parameter(torch.ones(2))
    p.grad = torch.tensor(g)
    WNGrad([p], lr=0.5, weight_decay=0.1, decoupled_weight_decay=True, **options).step()
    np.testing.assert_allclose(x, p.detach().numpy(), rtol=1e-6)
    assert x[0] == 1


@pytest.mark.parametrize("lam", [1e-6, 1.0, 1e9])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_lam_cancels_in_half_precision_too(lam, dtype):
    """g/b is of the size of 1/λ, which float16 cannot hold: it is rounded after λ is in."""
    opt, x = wngrad(lam, b_init="gradient", neuron_axis=0), jnp.ones((1, 2), dtype)
    after, _ = step(opt, x, opt.init(x), jnp.full((1, 2), 1000, dtype))
    np.testing.assert_allclose(after, 1 - 0.5 / math.sqrt(2), rtol=2e-3)


def test_an_injected_half_precision_lam_is_squared_in_float32():
    opt = optax.inject_hyperparams(wngrad)(learning_rate=300.0)
    x = jnp.ones(2, jnp.float16)
    after, state = step(opt, x, opt.init(x), jnp.ones(2, jnp.float16))
    assert jnp.isfinite(after).all()
    np.testing.assert_allclose(optax.tree.get(state, "b"), 90001, rtol=1e-3)


@pytest.mark.parametrize("size", [1e-25, 1e-20, 1.0, 1e20, 1e30])
@pytest.mark.parametrize("per", ["neuron", "model"])
def test_no_square_overflows_or_vanishes(size, per):
    """b₁ from the gradient: whatever its size, the first step is ½ long, as in torch."""
    opt, x = wngrad(1.0, b_init="gradient", per=per, neuron_axis=0), jnp.zeros((1, 4))
    after, _ = step(opt, x, opt.init(x), jnp.full((1, 4), size))
    np.testing.assert_allclose(after, -0.25, rtol=1e-5)


def test_the_axis_is_static_under_inject_hyperparams():
    opt = optax.inject_hyperparams(wngrad, static_args=("neuron_axis",))(0.5, neuron_axis=0)
    state = opt.init(jnp.ones((3, 2)))
    assert optax.tree.get(state, "b").shape == (3, 1)


def test_concrete_arrays_are_looked_at_like_numbers():
    for bad in (np.float32(0), jnp.float32(-1), math.inf):
        with pytest.raises(ValueError, match="`b_init` must be > 0"):
            wngrad(b_init=bad)
        with pytest.raises(ValueError, match="`learning_rate`"):
            wngrad(learning_rate=-abs(bad) - 1)
    assert wngrad(np.float32(0.5), b_init=np.float32(2)).init(jnp.ones(2))[0].b.tolist() == [2, 2]
    for name, value in (("learning_rate", None), ("learning_rate", "x"), ("momentum", "a")):
        with pytest.raises(TypeError, match=f"`{name}` must be a number"):
            wngrad(**{name: value})


def test_extra_arguments_are_let_through(make):
    opt, params = make(), tree()
    opt.update(tree(1), opt.init(params), params, value=1.0)
