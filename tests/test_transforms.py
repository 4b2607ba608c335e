"""The JAX twin: golden trajectories, optax's habits, and every way JAX users train."""

from __future__ import annotations

import dataclasses
import inspect
import math
import subprocess
import sys
from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import golden
from conftest import jax_in_float64
from wngrad import WNAdam, WNGrad, WNMuon
from wngrad import lipschitz_b_init as lipschitz_b_init_in_torch
from wngrad.transforms import (
    flax_neuron_axis,
    lipschitz_b_init,
    neuron_axis_of,
    scale_by_wn_adam,
    scale_by_wngrad,
    wn_adam,
    wngrad,
    wnmuon,
)
from wngrad.transforms.blocks import power_of_two
from wngrad.transforms.directions import bias_correction
from wngrad.transforms.settings import Settings

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


# Of every option one row: for what optax does around a transformation.
FEW = ("wngrad-momentum", "wngrad-model", "wn-adam-gradient", "wn-adam-model")


@pytest.fixture(params=TABLE)
def make(request):
    return TABLE[request.param]


@pytest.fixture(params=FEW)
def one_of_few(request):
    return TABLE[request.param]


@cache
def compiled(make):
    """A step as a program, compiled once for all tests: of λ, parameters, state and gradients."""
    return jax.jit(lambda lam, *rest: step(make.func(lam, **make.keywords), *rest))


@pytest.fixture
def x64():
    with jax_in_float64():
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


def small_tree(seed):
    return {name: leaf for name, leaf in tree(seed).items() if name in ("bias", "dense")}


def step(opt, params, state, grads):
    updates, state = opt.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def close(a, b, **tol):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tol), a, b)


def kinds(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def equal(a, b):
    return all(map(np.array_equal, jax.tree.leaves(a), jax.tree.leaves(b)))


# ---------------------------------------------------------------- golden trajectories


def twin(rule, lam, **options):
    if rule == "adam":
        return wn_adam(lam, **options)
    return wngrad(lam, momentum=0.9 if rule == "momentum" else None, **options)


def bumpy(x):
    """`golden.gradient` for an array."""
    flat, i = x.ravel(), jnp.arange(x.size)
    slope = (1 + i % 3) * flat + 0.5 * jnp.sin(3 * jnp.roll(flat, -1)) - 0.1 * (i % 5)
    return slope.reshape(x.shape)


def trajectory(shape, rule, per, latches, decoupled, b, w):
    """All x and b of a hundred steps; b₁ (or C) and the decay may be traced."""
    b_init = ("gradient", b) if latches else b
    options = {"b_init": b_init, "weight_decay": w, "decoupled_weight_decay": decoupled}
    opt = twin(rule, golden.LAM, per=per, neuron_axis=0, **options)  # torch's axis
    x = jnp.array(golden.start(shape)).reshape(shape)

    def body(carry, _):
        x, state = step(opt, *carry, bumpy(carry[0]))
        return (x, state), (x.ravel(), optax.tree.get(state, "b").ravel())

    return jax.lax.scan(body, (x, opt.init(x)), length=max(golden.STEPS))[1]


@pytest.mark.parametrize("shape", golden.SHAPES)
def test_optax_follows_the_golden_trajectories(x64, shape):
    """The same file as torch and the paper: 100 steps in float64, to 1e-12; a program a shape.

    Of the kinds of runs every other one, so that all triples of options occur.
    """
    starts = {
        latches: [n for n, (_, c) in golden.B_INIT.items() if (c is not None) == latches]
        for latches in (False, True)
    }
    decays = {
        decoupled: [n for n, (_, d) in golden.DECAY.items() if d == decoupled]
        for decoupled in (False, True)
    }
    options = (golden.RULES, ("neuron", "tensor"), (False, True), (False, True))
    kinds_of_run = [
        tuple(values[i] for values, i in zip(options, at, strict=True))
        for at in product(*(range(len(values)) for values in options))
        if (sum(at) + golden.SHAPES.index(shape)) % 2 == 0
    ]

    @jax.jit
    def program():
        runs = {}
        for rule, per, latches, decoupled in kinds_of_run:
            b = jnp.array([golden.B_INIT[name][latches] for name in starts[latches]])
            w = jnp.array([golden.DECAY[name][0] for name in decays[decoupled]])
            run = partial(trajectory, shape, rule, per, latches, decoupled)
            over_decays = jax.vmap(run, (None, 0))
            runs[rule, per, latches, decoupled] = jax.vmap(over_decays, (0, None))(b, w)
        return runs

    runs, cases = program(), 0
    for (rule, of_shape, per, b_init, decay), after in golden.load():
        latches, decoupled = golden.B_INIT[b_init][1] is not None, golden.DECAY[decay][1]
        if of_shape != shape or (rule, per, latches, decoupled) not in runs:
            continue
        at = starts[latches].index(b_init), decays[decoupled].index(decay)
        x, b = runs[rule, per, latches, decoupled]
        for k, point in zip(golden.STEPS, after, strict=True):
            np.testing.assert_allclose(x[at][k - 1], point["x"], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(b[at][k - 1], point["b"], rtol=1e-12)
        cases += 1
    assert cases == 36


@pytest.fixture
def optimized():
    """Programs compiled as users have them: for tests that count units in the last place."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("rule", golden.RULES)
@pytest.mark.parametrize(("per", "b_init"), [("neuron", 1.0), ("tensor", "gradient")])
def test_torch_and_optax_agree_step_by_step_in_float32(rule, per, b_init):
    """The same gradients for both: b within 4 units in the last place, x within 16."""
    draw = np.random.default_rng(0)
    p = torch.nn.Parameter(torch.tensor(draw.standard_normal((4, 5)), dtype=torch.float32))
    options = {"per": per, "b_init": b_init}
    if rule == "adam":
        ours = WNAdam([p], lr=0.7, **options)
    else:
        ours = WNGrad([p], lr=0.7, momentum=0.9 if rule == "momentum" else 0.0, **options)
    theirs = twin(rule, 0.7, neuron_axis=0, **options)
    x = jnp.array(p.detach().numpy())
    state, go, ulp = theirs.init(x), jax.jit(partial(step, theirs)), float(np.finfo(np.float32).eps)
    for _ in range(100):
        g = draw.standard_normal((4, 5)).astype(np.float32)
        p.grad = torch.tensor(g)
        ours.step()
        x, state = go(x, state, jnp.array(g))
        b = np.asarray(optax.tree.get(state, "b"))
        np.testing.assert_allclose(b, ours.state[p]["b"].numpy(), rtol=4 * ulp)
        np.testing.assert_allclose(x, p.detach().numpy(), rtol=16 * ulp, atol=16 * ulp)


@pytest.mark.parametrize("b_init", [1.0, "gradient"])
@pytest.mark.parametrize("rule", ["wngrad", "momentum", "adam"])
def test_torch_and_optax_agree_where_the_rate_rises(rule, b_init):
    """So does a chain of one's own, whose λ comes after: steps are in the buffer with their own."""
    rates = np.array([1e-4, 1e-3, 0.1, 1.0, 0.3] * 4, np.float32)
    schedule = lambda count: jnp.asarray(rates)[count]  # noqa: E731
    draw = np.random.default_rng(0)
    p = torch.nn.Parameter(torch.tensor(draw.standard_normal((4, 5)), dtype=torch.float32))
    make = WNAdam if rule == "adam" else partial(WNGrad, momentum=0.9 * (rule == "momentum"))
    ours = make([p], b_init=b_init)
    options = {"neuron_axis": 0, "b_init": b_init}
    scale = scale_by_wn_adam if rule == "adam" else scale_by_wngrad
    its = {"momentum": 0.9} if rule == "momentum" else {}
    last = optax.scale_by_learning_rate(schedule)
    opts = [twin(rule, schedule, **options)]
    opts += [optax.chain(scale(schedule, **options, **its), last)]
    xs = [jnp.array(p.detach().numpy())] * 2
    states, go = [opt.init(xs[0]) for opt in opts], [jax.jit(partial(step, opt)) for opt in opts]
    for lam in rates:
        g = draw.standard_normal((4, 5)).astype(np.float32)
        p.grad, ours.param_groups[0]["lr"] = torch.tensor(g), float(lam)
        ours.step()
        for k in range(2):
            xs[k], states[k] = go[k](xs[k], states[k], jnp.array(g))
            np.testing.assert_allclose(xs[k], p.detach().numpy(), rtol=1e-5, atol=1e-5)


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
    pytest.importorskip("flax", minversion="0.11")
    import flax.linen as nn
    from flax import nnx

    class Net(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.Dense(3)(nn.Embed(7, 4)(tokens))

    net = Net()
    params = jax.eval_shape(net.init, jax.random.key(0), jnp.array([1, 2]))
    init = wngrad(neuron_axis=neuron_axis_of(net)).init
    b = optax.tree.get(jax.eval_shape(init, params), "b")["params"]
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
    before = np.asarray(model.dense.kernel[...])

    @nnx.jit
    def train(model, opt):
        grads = nnx.grad(lambda m: (m.dense(m.embed(jnp.array([1]))) ** 2).sum())(model)
        opt.update(model, grads)

    train(model, opt)
    assert not np.array_equal(before, np.asarray(model.dense.kernel[...]))


def test_equinox_models_keep_the_neuron_first():
    import equinox as eqx

    @eqx.filter_jit
    def network():
        conv = eqx.nn.Conv2d(2, 5, 3, key=jax.random.key(0))
        linear = eqx.nn.Linear(20, 3, key=jax.random.key(1))
        return eqx.nn.Sequential([conv, eqx.nn.Lambda(jnp.ravel), linear])

    model = network()
    params = eqx.filter(model, eqx.is_inexact_array)
    opt = wngrad(neuron_axis=neuron_axis_of(model))
    state = opt.init(params)
    shapes = [x.shape for x in jax.tree.leaves(optax.tree.get(state, "b"))]
    assert sorted(shapes) == sorted([(5, 1, 1, 1), (5, 1, 1), (3, 1), (3,)])

    @eqx.filter_jit
    def train(model, state):
        grads = eqx.filter_grad(lambda m: (m(jnp.ones((2, 4, 4))) ** 2).sum())(model)
        updates, _ = opt.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
        return eqx.apply_updates(model, updates)

    after = train(model, state)
    assert isinstance(after, eqx.nn.Sequential)
    assert not equal(eqx.filter(after, eqx.is_inexact_array), params)


def test_other_modules_are_refused_with_the_way_out():
    with pytest.raises(TypeError, match="`module` must be an Equinox or Flax module, got dict"):
        neuron_axis_of({})
    assert flax_neuron_axis((), (3, 2)) == -1
    assert flax_neuron_axis((), (3,)) is None


# ---------------------------------------------------------------- the rule's facts


def test_no_block_moves_by_more_than_a_half(make):
    if "decay" in str(make.keywords):
        return  # decay moves on its own account
    params = tree()
    state = make().init(params)
    mu = make.keywords.get("momentum", 0.0)
    for seed in range(10):
        before = params
        grads = jax.tree.map(lambda g: 10.0 ** (seed - 3) * g, tree(seed + 1))  # noqa: B023
        params, state = compiled(make)(1.0, params, state, grads)
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(initial=0), params, before)
        assert max(map(float, jax.tree.leaves(moved))) <= 0.5 / (1 - mu) * 1.0001


@pytest.mark.parametrize("func", [wngrad, wn_adam])
def test_the_scale_of_the_loss_cancels_bitwise(func):
    make, runs = partial(func, 1.0, b_init="gradient"), []
    for lam, scale in ((1.0, 1.0), (8.0, 2.0**10)):
        params = tree()
        state = make().init(params)
        for seed in range(5):
            grads = jax.tree.map(lambda g: scale * g, tree(seed + 1))  # noqa: B023
            params, state = compiled_scale(make.func)(lam, params, state, grads)
        runs.append(params)
    assert equal(*runs)


@cache
def compiled_scale(func):
    return compiled(partial(func, 1.0, b_init="gradient"))


def test_a_step_at_rate_zero_changes_nothing(make):
    params = tree()
    _, state = compiled(make)(1.0, params, make().init(params), tree(1))
    bad = jax.tree.map(lambda g: jnp.where(g > 0, jnp.nan, g), tree(2))
    after, new = compiled(make)(0.0, params, state, bad)
    assert equal(params, after)
    assert equal(optax.tree.get(state, "skipped"), optax.tree.get(new, "skipped"))
    for name in ("b", "velocity", "t"):
        assert equal(optax.tree.get(state, name, 0), optax.tree.get(new, name, 0))


def test_a_rate_of_zero_as_a_number_changes_nothing():
    still, params = wngrad(0.0, momentum=0.9), small_tree(0)
    after, state = jax.jit(partial(step, still))(params, still.init(params), small_tree(1))
    assert equal(params, after)
    assert all((b == 1).all() for b in jax.tree.leaves(optax.tree.get(state, "b")))


def test_skipped_blocks_stay_bit_identical_and_are_counted():
    for make in (partial(wngrad, momentum=0.9), wn_adam):
        opt, params = make(1.0, nonfinite="skip"), small_tree(0)
        go = jax.jit(partial(step, opt))
        params, state = go(params, opt.init(params), small_tree(1))
        grads = small_tree(2)
        grads["dense"] = grads["dense"].at[1, 2].set(jnp.nan)
        grads["bias"] = grads["bias"].at[0].set(jnp.inf)
        after, new = go(params, state, grads)
        assert np.array_equal(after["dense"][:, 2], params["dense"][:, 2])
        assert not np.array_equal(after["dense"][:, 1], params["dense"][:, 1])
        assert after["bias"][0] == params["bias"][0]
        for name in ("b", "velocity", "t"):
            old, now = (optax.tree.get(s, name) for s in (state, new))
            if old is not None:
                assert np.array_equal(old["dense"][:, 2], now["dense"][:, 2])
        assert int(optax.tree.get(new, "skipped")) == 2


def test_one_b_of_all_leaves_is_counted_and_skipped_once():
    opt, params = wn_adam(per="model", nonfinite="skip"), small_tree(0)
    go = jax.jit(partial(step, opt))
    params, state = go(params, opt.init(params), small_tree(1))
    assert float(optax.tree.get(state, "t")) == 1
    bad = {**small_tree(2), "bias": jnp.full(3, jnp.nan)}
    after, new = go(params, state, bad)
    assert int(optax.tree.get(new, "skipped")) == 1
    for name in ("b", "velocity", "t"):
        assert equal(optax.tree.get(new, name), optax.tree.get(state, name))
    assert equal(after, params)


def test_bad_gradients_show_by_default(make):
    if "nonfinite" in make.keywords:
        return
    params = tree()
    grads = {**tree(1), "bias": jnp.array([1.0, jnp.nan, 1.0])}
    after, _ = compiled(make)(1.0, params, make().init(params), grads)
    assert jnp.isnan(after["bias"][1])


def test_a_b_too_large_for_its_type_shows_instead_of_freezing():
    opt, params = wngrad(1.0), jnp.ones(2)
    after, _ = step(opt, params, opt.init(params), jnp.array([1e25, 1.0]))
    assert np.isnan(after).tolist() == [True, False]


# ---------------------------------------------------------------- optax's habits


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64])
def test_dtypes_and_shapes_are_stable_and_b_is_wide(make, dtype):
    opt, params = make(), tree(dtype=dtype)
    state = jax.eval_shape(opt.init, params)
    updates, new = jax.eval_shape(opt.update, tree(1, dtype), state, params)
    assert kinds(updates) == kinds(params)
    assert kinds(new) == kinds(state)
    assert all(b.dtype == jnp.float32 for b in jax.tree.leaves(optax.tree.get(state, "b")))


def test_complex_leaves_are_pairs_of_reals():
    opt = wngrad(1.0, neuron_axis=0)
    z = jnp.array([[1 + 2j, -1j], [0.5, 2]], jnp.complex64)
    pairs = jnp.stack([z.real, z.imag], -1)
    one, other, go = opt.init(z), opt.init(pairs), jax.jit(partial(step, opt))
    for k in range(3):
        g = (k + 1) * jnp.conj(z)
        z, one = go(z, one, g)
        pairs, other = go(pairs, other, jnp.stack([g.real, g.imag], -1))
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


def test_a_scan_of_a_thousand_scheduled_steps_compiles_once(one_of_few):
    traces = []
    schedule = optax.cosine_decay_schedule(1.0, 1000)
    opt = one_of_few.func(schedule, **one_of_few.keywords)

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
    ours, state = jax.jit(partial(step, opt))(params, state, tree(1))
    plain = TABLE["wngrad-momentum"]
    theirs, _ = compiled(plain)(0.25, params, plain().init(params), tree(1))
    close(ours, theirs, rtol=1e-6)
    scheduled = optax.inject_hyperparams(wn_adam)(optax.linear_schedule(1.0, 0.0, 10))
    state = jax.eval_shape(scheduled.init, params)
    assert kinds(jax.eval_shape(scheduled.update, tree(1), state, params)[1]) == kinds(state)


def test_accumulation_is_one_step_on_the_mean(one_of_few):
    params, grads = small_tree(0), [small_tree(1), small_tree(2)]
    multi = optax.MultiSteps(one_of_few(), every_k_schedule=2)
    state, ours, go = multi.init(params), params, jax.jit(partial(step, multi))
    for g in grads:
        ours, state = go(ours, state, g)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
    theirs, _ = compiled(one_of_few)(1.0, params, one_of_few().init(params), mean)
    close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_apply_if_finite_wraps_it(one_of_few):
    opt = optax.apply_if_finite(one_of_few(nonfinite="propagate"), max_consecutive_errors=3)
    params = small_tree(0)
    bad = {**small_tree(1), "bias": jnp.full(3, jnp.nan)}
    after, state = jax.jit(partial(step, opt))(params, opt.init(params), bad)
    assert equal(after, params)
    assert int(state.total_notfinite) == 1


def test_multi_transform_gives_each_group_its_own():
    params = {"body": jnp.ones((2, 3)), "head": jnp.ones((3, 2))}
    opt = optax.multi_transform({"a": wngrad(1.0), "b": wn_adam(0.5)}, {"body": "a", "head": "b"})
    after, _ = jax.jit(partial(step, opt))(params, opt.init(params), params)
    for name, alone in (("body", wngrad(1.0)), ("head", wn_adam(0.5))):
        theirs, _ = jax.jit(partial(step, alone))(
            params[name], alone.init(params[name]), params[name]
        )
        np.testing.assert_array_equal(after[name], theirs)


def test_the_parts_chain_with_others():
    params = small_tree(0)
    for part in (scale_by_wngrad(0.5), scale_by_wn_adam(0.5)):
        opt = optax.chain(optax.clip_by_global_norm(1.0), part, optax.scale_by_learning_rate(0.5))
        after, _ = jax.jit(partial(step, opt))(params, opt.init(params), small_tree(1))
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

    table = jax.jit(jax.vmap(jax.vmap(train, (None, 0)), (0, None)))(lams, seeds)
    assert table.shape == (4, 3)
    np.testing.assert_allclose(table[2, 1], jax.jit(train)(1.0, 1), rtol=1e-5)
    assert (table[2] < table[0]).all()  # λ = 1 beats λ = 0.01 for every seed


SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from wngrad.transforms import wngrad, wn_adam
mesh = Mesh(np.array(jax.devices()), ("d",))
explicit = jax.make_mesh((4,), ("x",))  # its axes are part of the type
x = jax.random.normal(jax.random.key(0), (8, 4))
columns = NamedSharding(mesh, P(None, "d"))

def training(opt, slope=lambda x: 2 * x + 1):
    def body(carry, _):
        x, state = carry
        updates, state = opt.update(slope(x), state, x)
        return (optax.apply_updates(x, updates), state), None
    return lambda x: jax.lax.scan(body, (x, opt.init(x)), length=3)[0][0]

for opt, specs in (
    (wngrad(1.0), [P("d"), P(None, "d")]),
    (wngrad(1.0, per="tensor", momentum=0.9), [P("d")]),
    (wn_adam(1.0, per="model"), [P(None, "d")]),
):
    plain = jax.jit(training(opt))(x)
    for spec in specs:
        out = jax.jit(training(opt))(jax.device_put(x, NamedSharding(mesh, spec)))
        np.testing.assert_allclose(out, plain, rtol=1e-5, atol=1e-6)

# One b per column: a column stays whole on a device.
for opt in (wngrad(1.0, momentum=0.9, b_init="gradient"), wn_adam(1.0)):
    plain = jax.jit(training(opt))(x)
    cut = jax.shard_map(training(opt), mesh=mesh, in_specs=P(None, "d"), out_specs=P(None, "d"))
    np.testing.assert_allclose(jax.jit(cut)(x), plain, rtol=1e-5, atol=1e-6)
    with jax.set_mesh(explicit):
        placed = jax.device_put(x, NamedSharding(explicit, P(None, "x")))
        out = jax.jit(training(opt))(placed)
    np.testing.assert_allclose(out, plain, rtol=1e-5, atol=1e-6)
out = jax.pmap(training(opt))(jnp.stack([x] * 4))[2]
np.testing.assert_allclose(out, plain, rtol=1e-5, atol=1e-6)
print("sharded", len(jax.devices()))
"""


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="this JAX has no explicit axes")
def test_sharded_parameters_train_like_whole_ones():
    """Four devices in a process of its own: jit with shardings, shard_map and pmap."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARDED], capture_output=True, text=True
    )
    assert done.stdout.strip() == "sharded 4", done.stderr[-2000:]


@pytest.mark.parametrize("name", ["wngrad-momentum", "wn-adam-model"])
def test_orbax_brings_the_state_back_bit_for_bit(name, tmp_path):
    import orbax.checkpoint as ocp

    opt, params, grads = TABLE[name](), small_tree(0), small_tree(1)
    go = jax.jit(partial(step, opt))
    params, state = go(params, opt.init(params), grads)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        again = saver.restore(tmp_path / "state", opt.init(params))
    assert equal(state, again)
    assert equal(go(params, state, grads), go(params, again, grads))


# ---------------------------------------------------------------- a b₁ from sampled slopes


def bowl(x, *a):
    """½ xᵀ diag(a) x, whose gradient has the Lipschitz constant max a."""
    return (jnp.array(a) * x**2).sum() / 2


@pytest.mark.parametrize("points", [2, 3, 8])
def test_the_lipschitz_constant_is_estimated_from_below(points):
    loss = lambda x: bowl(x, 1.0, 3.0, 10.0)  # noqa: E731
    key = jax.random.key(points)
    assert 1 <= lipschitz_b_init(loss, jnp.ones(3), points=points, key=key) <= 10 * (1 + 1e-3)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.complex64])
def test_that_of_a_round_bowl_is_found_in_any_type(dtype):
    """f = 3‖x‖² over leaves of two types, one of them Python's: L = 6, up to rounding."""
    params = {"w": jnp.ones((3, 2), dtype), "b": [2.0]}
    loss = lambda p: 3 * sum((jnp.abs(x) ** 2).sum() for x in map(wide, jax.tree.leaves(p)))  # noqa: E731
    wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))  # noqa: E731
    assert lipschitz_b_init(loss, params) == pytest.approx(6, rel=0.02)


def test_the_start_from_slopes_is_torchs(x64):
    """The same number for the same quadratic, in proportion to λ and to the loss."""
    p = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    theirs = lipschitz_b_init_in_torch(p, lambda: 2 * p.weight.square().sum(), lr=8.0)
    x = jnp.asarray(p.weight.detach().numpy())
    assert lipschitz_b_init(lambda x: 2 * (x**2).sum(), x, learning_rate=8.0) == pytest.approx(
        theirs
    )
    assert lipschitz_b_init(lambda x: 16 * (x**2).sum(), x) == pytest.approx(theirs)


def test_the_start_from_slopes_is_the_stable_rate():
    """b₁ = λL: the rate is 1/L, and the bowl's minimum one step away, less what b grows."""
    loss, x = lambda x: bowl(x, 7.0, 7.0), jnp.ones(2)
    opt = wngrad(3.0, b_init=lipschitz_b_init(loss, x, learning_rate=3.0), per="tensor")
    state, losses = opt.init(x), [loss(x)]
    for _ in range(20):
        x, state = step(opt, x, state, jax.grad(loss)(x))
        losses.append(loss(x))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-2 * losses[0]


def test_the_key_decides_where_the_points_lie():
    loss = lambda x: bowl(x, 1.0, 5.0)  # noqa: E731
    one, same, other = (
        lipschitz_b_init(loss, jnp.ones(2), key=jax.random.key(k)) for k in (1, 1, 2)
    )
    assert one == same != other


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"points": 1}, "`points` must be an integer >= 2, got 1"),
        ({"points": 2.0}, "`points`.*got 2.0"),
        ({"radius": 0.0}, "`radius`.*got 0.0"),
        ({"learning_rate": -1.0}, "`learning_rate`.*got -1.0"),
    ],
)
def test_bad_arguments_of_the_start_from_slopes_are_named(options, match):
    with pytest.raises(ValueError, match=f"lipschitz_b_init: {match}"):
        lipschitz_b_init(jnp.sum, jnp.ones(2), **options)


def test_a_loss_without_slopes_has_no_such_start():
    with pytest.raises(ValueError, match=r"lipschitz_b_init: `loss` needs.*`b_init` as a number"):
        lipschitz_b_init(jnp.sum, jnp.ones(2))
    with pytest.raises(ValueError, match=r"lipschitz_b_init: `params` must have an entry"):
        lipschitz_b_init(jnp.sum, {})


# ---------------------------------------------------------------- checks


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


IN_TORCH = {"learning_rate": "lr", "beta": "momentum"}
IN_JAX_ALONE = {"neuron_axis", "precision"}


@pytest.mark.parametrize(
    ("func", "optimizer"), [(wngrad, WNGrad), (wn_adam, WNAdam), (wnmuon, WNMuon)]
)
def test_settings_have_torchs_names_and_defaults(func, optimizer):
    theirs = optimizer([torch.nn.Parameter(torch.ones(2))]).defaults
    ours = inspect.signature(func).parameters
    for name in ours.keys() - IN_JAX_ALONE:
        default = theirs[IN_TORCH.get(name, name)]
        assert ours[name].default == default or (ours[name].default, default) == (None, 0.0)


def test_the_table_of_settings_says_what_signatures_and_docstrings_say():
    """Of an argument that several functions take: what `wngrad` says, then `wn_adam`."""
    table = {row.name: row for row in dataclasses.fields(Settings)}
    del table["owner"]
    said = {}
    for func in (wnmuon, wn_adam, wngrad):
        doc = " ".join(func.__doc__.split())
        said |= {name: (p.default, doc) for name, p in inspect.signature(func).parameters.items()}
    assert said.keys() == table.keys()
    for name, (default, doc) in said.items():
        assert f" {name}: {table[name].metadata['doc']}" in doc
        assert default == table[name].default or (default, table[name].default) == (None, 0.0)


def test_a_jax_user_never_loads_torch():
    code = "import wngrad.transforms, sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "False"


# ---------------------------------------------------------------- what review found


@pytest.mark.parametrize(
    ("of_params", "of_grads"), [("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_the_states_types_are_its_own(make, of_params, of_grads):
    """Gradients of another type than the parameters: a scan carries the state all the same."""
    opt, params = make(), tree(dtype=of_params)
    state = jax.eval_shape(opt.init, params)
    _, new = jax.eval_shape(opt.update, tree(1, of_grads), state, params)
    assert kinds(new) == kinds(state)


def test_a_module_named_embedding_is_no_embedding():
    params = {"embedding": {"kernel": jnp.ones((2, 2, 3, 5)), "bias": jnp.ones((1, 5))}}
    b = optax.tree.get(wngrad().init(params), "b")["embedding"]
    assert (b["kernel"].shape, b["bias"].shape) == ((1, 1, 1, 5), (1, 5))


def test_attention_kernels_have_a_neuron_for_every_head_and_dimension():
    import flax.linen as nn

    layer = nn.MultiHeadDotProductAttention(num_heads=2, qkv_features=6)
    params = jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((1, 3, 4)))["params"]
    init = wngrad(neuron_axis=neuron_axis_of(layer)).init
    b = optax.tree.get(jax.eval_shape(init, params), "b")
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


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_lam_cancels_in_half_precision_too(dtype):
    """g/b is of the size of 1/λ, which float16 cannot hold: it is rounded after λ is in."""
    make, x = partial(wngrad, 1.0, b_init="gradient", neuron_axis=0), jnp.ones((1, 2), dtype)
    go = compiled(make)
    for lam in (1e-6, 1.0, 1e9):
        after, _ = go(lam, x, make().init(x), jnp.full((1, 2), 1000, dtype))
        np.testing.assert_allclose(after, 1 - 0.5 / math.sqrt(2), rtol=2e-3)


def test_an_injected_half_precision_lam_is_squared_in_float32():
    opt = optax.inject_hyperparams(wngrad)(learning_rate=300.0)
    x = jnp.ones(2, jnp.float16)
    after, state = step(opt, x, opt.init(x), jnp.ones(2, jnp.float16))
    assert jnp.isfinite(after).all()
    np.testing.assert_allclose(optax.tree.get(state, "b"), 90001, rtol=1e-3)


LARGEST = float(np.finfo(np.float32).max)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("per", ["neuron", "tensor", "model"])
def test_no_square_overflows_or_vanishes(per):
    """b₁ from the gradient: whatever its size, the first step is ½ long, as in torch."""
    opt, x = wngrad(1.0, b_init="gradient", per=per, neuron_axis=0), jnp.zeros((1, 4))
    for go in (partial(step, opt), jax.jit(partial(step, opt))):
        for size in (1e-31, 1e-25, 1e-20, 1.0, 1e20, 1e30, 1e37, 8e37):  # b is four times that
            after, _ = go(x, opt.init(x), jnp.full((1, 4), size))
            np.testing.assert_allclose(after, -0.25, rtol=1e-5)


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("make", [wngrad, partial(wngrad, momentum=0.9), wn_adam])
@pytest.mark.parametrize("size", [1e-31, 1e30, 8e37, 9e37, 1e38, LARGEST])
def test_the_first_step_is_a_half_at_the_ends_of_the_range(make, size):
    """λ = 2⁻²⁰: b fits its type, however large a finite gradient is."""
    x, g = jnp.zeros((2, 3)), jnp.zeros((2, 3)).at[0].set(size)
    opt = make(2.0**-20, b_init="gradient")
    tiny = size < 1 and 2.0**-20 * size < 1e-31  # too small to set a b: nothing moves
    for go in (partial(step, opt), jax.jit(partial(step, opt))):
        after, _ = go(x, opt.init(x), g)
        np.testing.assert_allclose(after[0], 0 if tiny else -0.5, rtol=1e-5)
        assert not after[1].any()


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("size", [1e-32, 1e30, 1e37, 9e37, 1e38, 1.6e38])
def test_torch_and_optax_agree_on_the_largest_and_least_gradients(size):
    """b₁ = 1 and a λ that brings λ‖g‖ to about 10: entries of all sizes below the largest."""
    draw = np.random.default_rng(0)
    g = (size * draw.uniform(-1, 1, (3, 4))).astype(np.float32)
    p, lam = torch.nn.Parameter(torch.zeros(3, 4)), 10 / size
    p.grad = torch.tensor(g)
    ours = WNGrad([p], lr=lam)
    opt = wngrad(lam, neuron_axis=0)
    ours.step()
    for go in (partial(step, opt), jax.jit(partial(step, opt))):
        x, state = go(jnp.zeros((3, 4)), opt.init(jnp.zeros((3, 4))), jnp.array(g))
        b = optax.tree.get(state, "b")
        np.testing.assert_allclose(b, ours.state[p]["b"].numpy(), rtol=1e-6)
        np.testing.assert_allclose(x, p.detach().numpy(), rtol=1e-5)


@pytest.mark.usefixtures("optimized")
def test_a_large_gradient_is_never_taken_for_none():
    """Where b or the norm is too large for its type, the step is NaN, or skipped and counted."""
    x = {"w": jnp.zeros((3, 2))}
    for size in (1e37, 1e38, LARGEST):
        g = {"w": jnp.full((3, 2), size)}
        opt, skipping = wngrad(), wngrad(nonfinite="skip")
        for wrap in (lambda f: f, jax.jit):
            after, _ = wrap(partial(step, opt))(x, opt.init(x), g)
            assert np.isnan(after["w"]).all()
            after, state = wrap(partial(step, skipping))(x, skipping.init(x), g)
            assert not after["w"].any()
            assert int(optax.tree.get(state, "skipped")) == 2


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("make", [wngrad, partial(wngrad, b_init="gradient"), wn_adam, wnmuon])
@pytest.mark.parametrize("size", [1e-30, 1e-25, 1.0, 1e30, 1e38])
def test_what_the_compiler_knows_changes_nothing(make, size):
    """XLA moves constants about: the gradient, a factor in it, λ and b₁ may all be ones."""
    x = jnp.array([[0.0], [0.5], [1], [1]])
    opt, g = make(0.3 if make is wnmuon else max(10 / size, 1e-20)), size * x

    def first(g, state=None):
        updates, state = opt.update(g, opt.init(g) if state is None else state, g)
        return updates, optax.tree.get(state, "b")

    programs = (
        (lambda: first(g), ()),
        (first, (g,)),
        (first, (g, opt.init(g))),
        (lambda x: first(x * size), (x,)),
        (lambda x: first(x * size, opt.init(g)), (x,)),
    )
    updates, b = first(g)
    assert jnp.isfinite(b).all()
    assert updates[1:].all()
    for program, arguments in programs:
        close(jax.jit(program)(*arguments), (updates, b), rtol=1e-4)


@pytest.mark.usefixtures("optimized")
def test_a_constant_gradient_of_zero_is_no_step():
    x = jnp.array([1.0, 2.0, 3.0])
    opt = wngrad()
    after, state = jax.jit(lambda: step(opt, x, opt.init(x), jnp.array([0.0, 1.0, 0.0])))()
    assert after.tolist() == [1, 1.5, 3]
    assert optax.tree.get(state, "b").tolist() == [1, 2, 1]


@pytest.mark.usefixtures("optimized")
def test_float64_has_its_own_range(x64):
    for size in (1e-280, 1e300, 5e307, 1e308):
        x, g = jnp.zeros((4, 1)), jnp.zeros((4, 1)).at[:2].set(size / 2)
        opt = wngrad(0.25, b_init="gradient")
        for go in (partial(step, opt), jax.jit(partial(step, opt))):
            after, _ = go(x, opt.init(x), g)
            np.testing.assert_allclose(after.ravel(), [-(0.5**1.5)] * 2 + [0] * 2, rtol=1e-12)


@pytest.mark.usefixtures("optimized")
def test_a_power_of_two_brings_any_number_between_1_and_4():
    rising = np.float32(2.0) ** np.arange(-126, 128, dtype=np.float32)
    x = np.concatenate([rising, 1.999999 * rising]).astype(np.float32)
    scale = np.asarray(jax.jit(power_of_two)(jnp.array(x)))
    assert (np.frexp(scale)[0] == 0.5).all()
    assert (scale >= np.finfo(np.float32).tiny).all()
    assert ((scale * x >= 1) & (scale * x < 4)).all()
    odd = jnp.array([math.nan, math.inf])
    assert power_of_two(odd).tolist() == [1, 1]


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


def test_extra_arguments_are_let_through_and_change_nothing(make):
    opt, params = make(), small_tree(0)
    state, grads = opt.init(params), small_tree(1)
    plain, update = jax.jit(opt.update), jax.jit(partial(opt.update, value=1.0))
    without = plain(grads, state, params)
    assert all(u.any() for u in jax.tree.leaves(without[0]))
    assert equal(update(grads, state, params), without)


@pytest.mark.parametrize("func", [wngrad, wn_adam, scale_by_wngrad, scale_by_wn_adam, wnmuon])
def test_the_annotation_says_that_extra_arguments_are_taken(func):
    kind = optax.GradientTransformationExtraArgs
    assert inspect.signature(func).return_annotation is kind
    assert isinstance(func(), kind)


def test_pythons_numbers_are_leaves_like_arrays(make):
    """As optax takes them; the state is that of arrays, so that a scan may carry it."""
    numbers, grads = {"a": 1.0, "b": [2.0]}, {"a": 0.5, "b": [-3.0]}
    arrays = jax.tree.map(jnp.float32, numbers)
    state, theirs = make().init(numbers), make().init(arrays)
    assert kinds(state) == kinds(theirs)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
    for _ in range(2):
        numbers, state = step(make(), numbers, state, grads)
        arrays, theirs = step(make(), arrays, theirs, jax.tree.map(jnp.float32, grads))
    assert equal((numbers, state), (arrays, theirs))


@pytest.mark.parametrize("make", [wngrad, wn_adam, wnmuon])
def test_a_b_init_read_from_json_is_taken(make):
    """JSON has lists in the place of tuples; torch takes them, too."""
    x = jnp.ones((3, 2))
    listed, paired = (make(b_init=kind(("gradient", 2.0))) for kind in (list, tuple))
    assert equal(step(listed, x, listed.init(x), x), step(paired, x, paired.init(x), x))
    with pytest.raises(ValueError, match=r"`b_init` must be a number > 0, .* got \['x', 2.0\]"):
        make(b_init=["x", 2.0])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("func", [wngrad, wn_adam])
def test_coupled_decay_is_added_in_float32(func, dtype):
    """w·x = 1e-3 beside g = 1 is less than half a digit of bfloat16: b must take it in."""
    opt = func(1.0, weight_decay=1e-3, neuron_axis=0)
    x, g = jnp.ones((1, 4), dtype), jnp.ones((1, 4), dtype)
    _, state = step(opt, x, opt.init(x), g)
    np.testing.assert_allclose(optax.tree.get(state, "b"), 1 + 4 * 1.001**2, rtol=1e-6)
    assert opt.update(g, state, x)[0].dtype == dtype


@pytest.mark.parametrize("beta", [0.0, 0.9, 0.999, 0.99999])
@pytest.mark.parametrize("traced", [False, True])
def test_the_first_running_mean_is_the_gradient_itself(beta, traced):
    """ĝ₁/(1 − β) = g₁: 1 − βᵗ in float32 is off by 1.4e-3 at β = 0.99999."""
    beta = jnp.float32(beta) if traced else beta
    direction = lambda beta: scale_by_wn_adam(beta=beta).update(  # noqa: E731
        jnp.full(2, 3.0), scale_by_wn_adam(beta=beta).init(jnp.ones(2))
    )[0]
    out = jax.jit(direction)(beta) if traced else direction(beta)
    np.testing.assert_allclose(out, 3 / 10, rtol=3e-7)


def test_the_correction_is_right_after_many_steps():
    for beta, t in ((0.9, 3), (0.999, 40), (0.99999, 70), (0.99999, 10**6)):
        exact = -math.expm1(t * math.log(beta))
        np.testing.assert_allclose(bias_correction(beta, jnp.float32(t)), exact, rtol=3e-7)


@pytest.mark.parametrize("func", [wngrad, wn_adam, scale_by_wngrad, scale_by_wn_adam, wnmuon])
def test_the_rates_annotation_says_that_schedules_are_taken(func):
    """As an object: optax's own tests compare it with that of its optimizers."""
    annotation = inspect.signature(func).parameters["learning_rate"].annotation
    assert annotation == optax.ScalarOrSchedule
    assert annotation == inspect.signature(optax.sgd).parameters["learning_rate"].annotation
