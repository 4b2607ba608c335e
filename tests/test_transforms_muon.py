"""WNMuon for JAX: in lock-step with torch's, its promises, optax's habits, and the average."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

from conftest import jax_in_float64
from wngrad import WNMuon
from wngrad.optim import orthogonalize as orthogonalize_in_torch
from wngrad.optim.state import norm as norm_in_torch
from wngrad.polynomials import LARGEST
from wngrad.transforms import (
    MatrixAxes,
    WNMuonState,
    averaged_params,
    flax_layout,
    orthogonalize,
    polynomial_average,
    wnmuon,
)

SHAPES = {
    "Embed_0": {"embedding": (7, 4)},
    "Conv_0": {"kernel": (2, 2, 3, 5), "bias": (5,)},
    "LayerNorm_0": {"scale": (5,), "bias": (5,)},
    "Dense_0": {"kernel": (4, 3), "bias": (3,)},
}


def tree(seed=0, dtype=jnp.float32):
    """An embedding, a convolution, a normalization and a dense layer, and a None."""
    draw = np.random.default_rng(seed)

    def leaf(shape):
        return jnp.asarray(draw.standard_normal(shape), dtype)

    leaves = {
        layer: {name: leaf(shape) for name, shape in of.items()} for layer, of in SHAPES.items()
    }
    return {**leaves, "none": None}


def step(opt, params, state, grads):
    updates, state = opt.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@cache
def compiled(**options):
    """A step as a program, compiled once for all tests: of ρ, parameters, state and gradients."""
    return jax.jit(lambda rate, *rest: step(wnmuon(rate, **options), *rest))


def run(params, grads, rate=0.3, **options):
    state = wnmuon(rate, **options).init(params)
    for g in grads:
        params, state = compiled(**options)(rate, params, state, g)
    return params, state


def equal(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(x, y) for x, y in pairs)


def kinds(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def get(state, name):
    return optax.tree.get(state, name)


@pytest.fixture
def x64():
    with jax_in_float64():
        yield


# ---------------------------------------------------------------- in lock-step with torch


class Network(nn.Module):
    """Tokens, a convolution over them, a normalization and a linear layer."""

    def __init__(self, dtype):
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.conv = nn.Conv1d(4, 5, 3)
        self.norm = nn.LayerNorm(5)
        self.dense = nn.Linear(20, 3)
        self.to(dtype)

    def forward(self, tokens):
        x = self.conv(self.embed(tokens).mT).relu()
        return self.dense(self.norm(x.mT).flatten(1))

    def backward(self, seed):
        draw = torch.Generator().manual_seed(seed)
        tokens = torch.randint(9, (8, 6), generator=draw)  # two rows never have a gradient
        loss = nn.functional.cross_entropy(self(tokens), torch.randint(3, (8,), generator=draw))
        self.zero_grad()
        loss.backward()


def in_jax(model, values):
    """What belongs to each parameter of the torch model, in Flax's places and axes."""

    def leaf(p, order=None):
        value = values(p).detach().numpy().copy()
        return jnp.asarray(value if order is None else value.transpose(order))

    return {
        "Embed_0": {"embedding": leaf(model.embed.weight)},
        "Conv_0": {"kernel": leaf(model.conv.weight, (2, 1, 0)), "bias": leaf(model.conv.bias)},
        "LayerNorm_0": {"scale": leaf(model.norm.weight), "bias": leaf(model.norm.bias)},
        "Dense_0": {"kernel": leaf(model.dense.weight, (1, 0)), "bias": leaf(model.dense.bias)},
    }


def furthest(ours, theirs):
    errors = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), ours, theirs)
    return max(jax.tree.leaves(errors))


def lock_step(dtype, steps=20, **options):
    """How far x, b and x̄ are from torch's at most, over a run on the same gradients."""
    rate, model = options.pop("learning_rate", 0.3), Network(dtype)
    theirs = WNMuon(model, rate, **options)
    ours = optax.chain(wnmuon(rate, **options), polynomial_average())
    params = in_jax(model, lambda p: p)
    state, go, worst = ours.init(params), jax.jit(partial(step, ours)), [0.0, 0.0, 0.0]
    for seed in range(steps):
        model.backward(seed)
        grads = in_jax(model, lambda p: p.grad)
        theirs.step()
        params, state = go(params, state, grads)
        expected = [in_jax(model, lambda p: p)]
        expected += [in_jax(model, lambda p, k=k: theirs.state[p][k]) for k in ("b", "average")]
        triple = (params, get(state, "b"), averaged_params(state))
        worst = list(map(max, worst, map(furthest, triple, expected)))
    return worst


# Measured: 9.5e-6 in x and 7.9e-5 in b ≥ 10. The orthogonalization magnifies the rounding of
# directions that hardly occur in a gradient up to a thousand times, of long rows that of squares.
FLOAT32 = {"x": 3e-5, "b": 2e-4, "average": 3e-5}
FLOAT64 = {"x": 1e-12, "b": 1e-12, "average": 1e-12}


@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.5, "weight_decay": 0.0, "learning_rate": 0.1}, {"finetune": True}],
    ids=["defaults", "others", "finetune"],
)
def test_torch_and_optax_agree_step_by_step(options, x64):
    assert np.less(lock_step(torch.float64, **options), list(FLOAT64.values())).all()


def test_torch_and_optax_agree_step_by_step_in_float32():
    assert np.less(lock_step(torch.float32), list(FLOAT32.values())).all()


def test_a_b_from_the_first_direction_agrees_with_torchs(x64):
    x, b, _ = lock_step(torch.float64, b_init=("gradient", 2.0))
    assert (x, b) < (FLOAT64["x"], FLOAT64["b"])


def test_norms_of_finetuned_weights_are_taken_once_and_never_nearly_zero(x64):
    params = {"kernel": jnp.full((4, 3), 2.0), "bias": jnp.zeros(3), "small": jnp.full(5, 1e-3)}
    state = wnmuon(finetune=True).init(params)
    norm = {"kernel": 4.0, "bias": 1 / math.sqrt(3), "small": 0.1}
    assert {k: float(v) for k, v in get(state, "norm").items()} == pytest.approx(norm, rel=1e-7)
    after, later = run(params, [params] * 2, finetune=True)
    assert equal(get(later, "norm"), get(state, "norm"))
    assert not equal(after, params)


@pytest.mark.parametrize("size", [1e-36, 1e-25, 1e-3, 1.0, 1e20, 8e37, 1e38, 3.4e38])
def test_norms_of_finetuned_weights_agree_with_torchs_at_any_size(size):
    """No square overflows or vanishes, nor does the norm of many neurons where that of one fits."""
    weight = np.full((3, 2), size, np.float32)
    weight[0, 0] = 0
    for leaf, layout in ((weight, "matrix"), (weight[:, 0], "vector")):
        opt = wnmuon(finetune=True, layout=layout)
        expected = norm_in_torch(torch.tensor(leaf), 2 if layout == "matrix" else 3)
        for init in (opt.init, jax.jit(opt.init)):
            norm = get(init(jnp.asarray(leaf)), "norm")
            np.testing.assert_allclose(norm, float(expected), rtol=1e-6)


def test_finetune_is_a_flag():
    with pytest.raises(TypeError, match="wnmuon: `finetune` must be True or False, got 1"):
        wnmuon(finetune=1)


@pytest.mark.parametrize(
    ("shape", "label", "order", "layout"),
    [
        ((3, 5, 4), MatrixAxes(-2, -1), (0, 2, 1), ("stack", 1)),  # a scan over layers
        ((2, 3, 5, 4), MatrixAxes(3, 2), (0, 1, 2, 3), ("stack", 1)),
        ((6, 4), MatrixAxes(1, 0), (0, 1), ("rows", 1)),  # Equinox
        ((4, 6), "matrix", (0, 1), ("transposed", 1)),
    ],
)
def test_stacks_and_other_axes_agree_with_torchs_layouts(x64, shape, label, order, layout):
    weight = torch.randn(shape, dtype=torch.float64)
    p = nn.Parameter(weight)
    theirs = WNMuon([{"params": [p], "layout": layout}])
    ours = wnmuon(layout=label)
    x = jnp.array(weight.numpy().transpose(order))  # a copy: torch writes to its own
    state, go = ours.init(x), jax.jit(partial(step, ours))
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        p.grad = torch.randn(shape, generator=draw, dtype=torch.float64)
        theirs.step()
        x, state = go(x, state, jnp.asarray(p.grad.numpy().transpose(order)))
    np.testing.assert_allclose(x, p.detach().numpy().transpose(order), rtol=0, atol=1e-12)


def test_a_depthwise_convolution_is_a_matrix_for_each_channel(x64):
    layer = nn.Conv2d(4, 4, 3, groups=4, bias=False, dtype=torch.float64)
    theirs, order = WNMuon(layer), (2, 3, 1, 0)
    ours, x = wnmuon(layout=MatrixAxes((0, 1), 2)), layer.weight.detach().numpy().transpose(order)
    layer.weight.grad = torch.randn_like(layer.weight)
    after, _ = step(ours, x, ours.init(x), jnp.asarray(layer.weight.grad.numpy().transpose(order)))
    theirs.step()
    np.testing.assert_allclose(after, layer.weight.detach().numpy().transpose(order), atol=1e-13)


def test_complex_leaves_agree_with_torchs(x64):
    z = torch.randn(4, dtype=torch.complex128)
    p = nn.Parameter(z.clone())
    theirs, ours = WNMuon([p]), wnmuon()
    x = jnp.asarray(z.numpy())
    state = ours.init(x)
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        p.grad = torch.randn(4, generator=draw, dtype=torch.complex128)
        theirs.step()
        x, state = step(ours, x, state, jnp.asarray(p.grad.numpy()))
    np.testing.assert_allclose(x, p.detach().numpy(), rtol=1e-12)
    assert get(state, "b").dtype == jnp.float64


@pytest.mark.parametrize("shape", [(5, 8), (8, 5), (3, 6, 6), (1, 7), (7, 1), (0, 3)])
def test_the_orthogonalization_is_torchs(x64, shape):
    x = np.random.default_rng(0).standard_normal(shape)
    theirs = orthogonalize_in_torch(torch.tensor(x)).numpy()
    np.testing.assert_allclose(orthogonalize(jnp.asarray(x)), theirs, rtol=0, atol=1e-12)


def test_no_singular_value_is_too_large_and_zero_stays_zero():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((9, 6)), jnp.float32)
    x = x.at[2].set(0).at[:, 3].set(0)
    x = x / jnp.abs(x).max()
    for scale in (1e-30, 1.0, 1e30, 8e37, 9e37, 1e38, float(np.finfo(np.float32).max)):
        u = np.asarray(orthogonalize(scale * x))
        singular = np.linalg.svd(u, compute_uv=False)
        assert singular[0] <= LARGEST
        assert singular[4] >= 0.85
        assert not u[2].any()
        assert not u[:, 3].any()
    assert not orthogonalize(jnp.zeros((3, 2))).any()
    assert np.isnan(orthogonalize(x.at[0, 0].set(jnp.nan))).all()
    assert np.isnan(orthogonalize(x.at[0, 0].set(jnp.inf))).all()


@pytest.mark.parametrize("shape", [(3, 3), (4, 3), (2, 5, 4), (3, 40), (1, 3), (3, 1)])
def test_the_size_of_a_matrix_changes_nothing(shape):
    """Not a bit where it is a power of two, up to the largest number and down to normal ones."""
    x = np.random.default_rng(0).uniform(0.5, 1, shape).astype(np.float32)
    x *= np.random.default_rng(1).choice([-1, 1], shape)
    one = orthogonalize(jnp.asarray(x))
    for power in (-125, -100, -1, 1, 100, 126, 127, 128):
        assert equal(orthogonalize(jnp.asarray(np.ldexp(x, power))), one)
    np.testing.assert_allclose(orthogonalize(jnp.asarray(3.4e38 * x)), one, rtol=0, atol=1e-4)


@pytest.mark.parametrize("finetune", [False, True])
def test_the_largest_gradients_are_steps_like_others(finetune):
    params, grads = tree(), tree(1)
    state = wnmuon(finetune=finetune).init(params)
    largest = max(float(np.abs(g).max()) for g in jax.tree.leaves(grads))
    for power in (100, math.floor(128 - math.log2(largest))):
        scaled = jax.tree.map(lambda g: np.ldexp(g, power), grads)  # noqa: B023
        ours = compiled(finetune=finetune)(0.3, params, state, scaled)[0]
        assert equal(ours, compiled(finetune=finetune)(0.3, params, state, grads)[0])


@pytest.mark.parametrize("least", [1.0, 1e-3, 1e-6])
def test_products_of_bfloat16_do_not_lead_out_of_bounds(least, monkeypatch):
    """As `precision="default"` may have them on an accelerator: factors rounded, sums wide."""
    matmul = jnp.matmul

    def rough(*factors, precision):
        return matmul(*(x.astype(jnp.bfloat16).astype(x.dtype) for x in factors))

    draw = np.random.default_rng(0)
    u, v = (np.linalg.qr(draw.standard_normal((n, 64)))[0] for n in (64, 128))
    x = jnp.asarray((u * np.geomspace(1, least, 64)) @ v.T, jnp.float32)
    monkeypatch.setattr(jnp, "matmul", rough)
    rounded = np.asarray(orthogonalize.__wrapped__(x))
    monkeypatch.undo()
    assert np.abs(rounded - orthogonalize(x)).max() > 1e-4
    assert np.linalg.svd(rounded, compute_uv=False)[0] <= LARGEST


# ---------------------------------------------------------------- what each leaf is


class Key:
    """A key of a path, as JAX has them."""

    def __init__(self, key):
        self.key = key


@pytest.mark.parametrize(
    ("names", "shape", "label"),
    [
        ("Dense_0.kernel", (4, 3), "matrix"),
        ("Conv_0.kernel", (1, 1, 1, 3), "matrix"),
        ("Dense_0.bias", (3,), "vector"),
        ("bias", (1, 5), "vector"),
        ("LayerNorm_0.scale", (2, 3), "vector"),
        ("Embed_0.embedding", (7, 2), "embedding"),
        ("embedding.kernel", (7, 2), "matrix"),
        ("query.kernel", (4, 2, 3), MatrixAxes(0, (-2, -1))),
        ("out.kernel", (2, 3, 4), "matrix"),
        ("token", (1, 1, 6), "vector"),
        ("places", (1, 4, 6), "matrix"),
        ("kernel.value", (1, 3), "matrix"),  # an nnx variable
        ("temperature", (), "vector"),
        ("w", (3, 4), "matrix"),
    ],
)
def test_flaxs_names_say_what_a_leaf_is(names, shape, label):
    assert flax_layout(tuple(map(Key, names.split("."))), shape) == label


def test_every_neuron_row_and_entry_has_a_b():
    b = get(jax.eval_shape(wnmuon().init, tree()), "b")
    assert jax.tree.map(jnp.shape, b) == {
        "Embed_0": {"embedding": (7, 1)},
        "Conv_0": {"kernel": (1, 1, 1, 5), "bias": (5,)},
        "LayerNorm_0": {"scale": (5,), "bias": (5,)},
        "Dense_0": {"kernel": (1, 3), "bias": (3,)},
        "none": None,
    }
    stacked = wnmuon(layout=MatrixAxes(1, 2)).init(jnp.ones((6, 4, 3)))
    assert get(stacked, "b").shape == (6, 1, 3)


@pytest.mark.skipif(
    not hasattr(optax.contrib, "MuonDimensionNumbers"), reason="optax 0.2.6 or later"
)
def test_labels_are_a_tree_a_part_of_one_or_optaxs_own():
    numbers = optax.contrib.MuonDimensionNumbers
    params = {"layers": [jnp.ones((2, 4, 3)), jnp.ones((2, 3, 5))], "table": jnp.ones((7, 2)),
              "gain": jnp.ones((3, 2))}  # fmt: skip
    layout = {"layers": numbers(1, 2), "table": "embedding", "gain": None}
    state = wnmuon(layout=layout).init(params)
    assert jax.tree.map(jnp.shape, get(state, "b")) == {
        "layers": [(2, 1, 3), (2, 1, 5)],
        "table": (7, 1),
        "gain": (3, 2),
    }
    for name in ("rms", "t"):  # of the vector alone
        assert [leaf.shape for leaf in jax.tree.leaves(get(state, name))] == [(3, 2)]
    full = {**layout, "layers": [MatrixAxes(1, 2), MatrixAxes(-2, -1)]}
    assert kinds(wnmuon(layout=full).init(params)) == kinds(state)


def test_flax_models_are_read_in_both_of_its_dialects():
    pytest.importorskip("flax", minversion="0.11")
    import flax.linen as linen
    from flax import nnx

    class Net(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            return linen.Dense(3)(linen.Embed(7, 4)(tokens))

    params = jax.eval_shape(Net().init, jax.random.key(0), jnp.array([1, 2]))
    state = jax.eval_shape(wnmuon().init, params)
    assert get(state, "b")["params"]["Embed_0"]["embedding"].shape == (7, 1)

    class Block(nnx.Module):
        def __init__(self, rngs):
            self.embed, self.dense = nnx.Embed(7, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    model = Block(nnx.Rngs(0))
    opt = nnx.Optimizer(model, optax.chain(wnmuon(), polynomial_average()), wrt=nnx.Param)
    before = np.asarray(model.embed.embedding[...])

    @nnx.jit
    def train(model, opt):
        grads = nnx.grad(lambda m: (m.dense(m.embed(jnp.array([1]))) ** 2).sum())(model)
        opt.update(model, grads)

    train(model, opt)
    moved = (before != np.asarray(model.embed.embedding[...])).any(1)
    assert moved.tolist() == [False, True, False, False, False, False, False]


# ---------------------------------------------------------------- its promises


def test_no_row_moves_by_more_than_its_docstring_says():
    params, state = tree(), wnmuon().init(tree())
    options = {"weight_decay": 0.0}
    for seed in range(5):
        grads = jax.tree.map(lambda g: 10.0 ** (3 * seed - 6) * g, tree(seed + 1))  # noqa: B023
        after, state = compiled(**options)(0.3, params, state, grads)
        moved = jax.tree.map(lambda a, b: np.asarray(a - b), after, params)
        dense, conv = moved["Dense_0"]["kernel"], moved["Conv_0"]["kernel"]
        assert np.linalg.norm(dense, axis=0).max() <= 1.15 * 0.03
        assert np.linalg.norm(conv.reshape(-1, 5), axis=0).max() <= 1.15 * 0.03
        rows = np.linalg.norm(moved["Embed_0"]["embedding"], axis=1)
        assert rows.max() <= 1.15 * math.sqrt(7 / 4) * 0.03
        assert np.abs(moved["LayerNorm_0"]["scale"]).max() <= 0.71 * 0.03
        params = after


def test_a_power_of_two_on_the_loss_changes_no_bit():
    grads = [tree(seed) for seed in range(1, 5)]
    scaled = [jax.tree.map(lambda g: 2.0**20 * g, g) for g in grads]
    (one, a), (other, b) = run(tree(), grads), run(tree(), scaled)
    assert equal(one, other)
    assert equal(get(a, "b"), get(b, "b"))


@pytest.mark.parametrize("rate", [0.0, jnp.float32(0.0), lambda count: 0.0 * count])
def test_a_step_at_rate_zero_changes_nothing(rate):
    params, before = run(tree(), [tree(1)])
    opt = wnmuon(rate)
    state = (before[0], *opt.init(params)[1:])  # The last part counts, if the rate is a schedule.
    bad = jax.tree.map(lambda g: g.at[..., 0].set(jnp.nan), tree(2))
    after, new = jax.jit(partial(step, opt))(params, state, bad)
    assert equal(params, after)
    for name in ("b", "m", "rms", "t", "skipped"):
        assert equal(get(before, name), get(new, name))


def test_a_schedule_is_followed_and_its_zeros_change_nothing():
    rates = [0.0, 0.1, 0.0, 0.3]
    opt = wnmuon(lambda count: jnp.asarray(rates)[count])
    params = ours = tree()
    state, go = opt.init(params), jax.jit(partial(step, opt))
    for seed in range(4):
        ours, state = go(ours, state, tree(seed + 1))
    theirs, other = run(params, [])
    for seed in (1, 3):
        theirs, other = compiled()(rates[seed], theirs, other, tree(seed + 1))
    assert furthest(ours, theirs) < 1e-6
    assert furthest(get(state, "b"), get(other, "b")) < 1e-5


def test_zero_rows_stay_zero_and_rows_without_a_gradient_stay():
    params = tree()
    params["Dense_0"]["kernel"] = params["Dense_0"]["kernel"].at[:, 1].set(0)
    grads = [tree(seed) for seed in range(1, 5)]
    for g in grads:
        g["Dense_0"]["kernel"] = g["Dense_0"]["kernel"].at[:, 1].set(0)
    for g in grads[1:]:
        g["Embed_0"]["embedding"] = g["Embed_0"]["embedding"].at[3].set(0)
    after, state = run(params, grads)
    assert not after["Dense_0"]["kernel"][:, 1].any()
    first, begun = run(params, grads[:1])
    row = lambda tree: tree["Embed_0"]["embedding"][3]  # noqa: E731
    assert np.array_equal(row(after), row(first))
    assert np.array_equal(row(get(state, "b")), row(get(begun, "b")))
    assert (row(first) != row(params)).all()


def test_decay_is_in_units_of_the_step_and_for_matrices_alone():
    params, grads = tree(), jax.tree.map(jnp.zeros_like, tree())
    after, _ = run(params, [grads])
    kernel, before = after["Dense_0"]["kernel"], params["Dense_0"]["kernel"]
    np.testing.assert_allclose(kernel, before * (1 - 0.1 * 0.3 / 10), rtol=1e-6)
    for part in ("Embed_0", "LayerNorm_0"):
        assert equal(after[part], params[part])


def test_skipped_blocks_stay_bit_identical_and_are_counted():
    options = {"nonfinite": "skip"}
    params, state = run(tree(), [tree(1)], **options)
    bad = tree(2)
    bad["Dense_0"]["kernel"] = bad["Dense_0"]["kernel"].at[1, 2].set(jnp.nan)
    bad["Dense_0"]["bias"] = bad["Dense_0"]["bias"].at[0].set(jnp.inf)
    after, new = compiled(**options)(0.3, params, state, bad)
    assert equal(after["Dense_0"]["kernel"], params["Dense_0"]["kernel"])
    changed = np.asarray(after["Dense_0"]["bias"] != params["Dense_0"]["bias"])
    assert changed.tolist() == [False, True, True]
    for name in ("b", "m"):
        assert equal(get(new, name)["Dense_0"]["kernel"], get(state, name)["Dense_0"]["kernel"])
    assert get(new, "t")["Dense_0"]["bias"].tolist() == [1, 2, 2]
    assert int(get(new, "skipped")) == 3 + 1  # all neurons of the matrix, an entry of the bias


def test_bad_gradients_show_by_default():
    bad = tree(1)
    bad["Dense_0"]["kernel"] = bad["Dense_0"]["kernel"].at[1, 2].set(jnp.nan)
    after, _ = run(tree(), [bad])
    assert np.isnan(after["Dense_0"]["kernel"]).all()
    assert np.isfinite(after["Conv_0"]["kernel"]).all()


# ---------------------------------------------------------------- optax's habits


@pytest.mark.parametrize("of_params", ["float32", "bfloat16", "float16", "complex64"])
@pytest.mark.parametrize("of_grads", ["float32", "bfloat16"])
def test_dtypes_and_shapes_are_stable_and_b_is_wide(of_params, of_grads):
    of_grads = of_params if of_params == "complex64" else of_grads
    opt, params, grads = wnmuon(), tree(dtype=of_params), tree(1, of_grads)
    state = jax.eval_shape(opt.init, params)
    updates, new = jax.eval_shape(opt.update, grads, state, params)
    assert kinds(updates) == kinds(grads)
    assert kinds(new) == kinds(state)
    assert all(b.dtype == jnp.float32 for b in jax.tree.leaves(get(state, "b")))


def test_a_scan_of_scheduled_steps_is_the_loop():
    opt = optax.chain(wnmuon(optax.cosine_decay_schedule(0.3, 10)), polynomial_average())
    params = tree()["Dense_0"]

    def body(carry, _):
        return step(opt, *carry, jax.tree.map(jnp.sin, carry[0])), None

    @jax.jit
    def train(params):
        return jax.lax.scan(body, (params, opt.init(params)), length=5)[0]

    scanned, state = train(params)
    looped, carry, go = params, opt.init(params), jax.jit(lambda *carry: body(carry, None)[0])
    for _ in range(5):
        looped, carry = go(looped, carry)
    assert furthest(scanned, looped) < 1e-6
    assert furthest(averaged_params(state), averaged_params(carry)) < 1e-6


def test_it_chains_masks_and_shares_a_tree_with_others():
    params, grads = tree(), tree(1)
    alone, _ = run(params, [grads])
    chained = optax.chain(optax.scale(4.0), wnmuon(), polynomial_average())
    mask = {layer: layer == "Dense_0" for layer in params}
    masked = optax.masked(wnmuon(), mask)
    labels = {layer: "muon" if on else "sgd" for layer, on in mask.items()}
    mixed = optax.multi_transform({"muon": wnmuon(), "sgd": optax.sgd(1.0)}, labels)
    after = {
        name: jax.jit(partial(step, opt))(params, opt.init(params), grads)[0]
        for name, opt in {"chained": chained, "masked": masked, "mixed": mixed}.items()
    }
    assert furthest(after["chained"], alone) < 1e-6
    for name in ("masked", "mixed"):
        assert furthest(after[name]["Dense_0"], alone["Dense_0"]) < 1e-7
    plain = optax.apply_updates(params["Conv_0"], jax.tree.map(jnp.negative, grads["Conv_0"]))
    assert equal(after["mixed"]["Conv_0"], plain)


def test_inject_hyperparams_makes_the_rate_a_state():
    make = optax.inject_hyperparams(wnmuon, static_args=("layout", "precision"))
    opt, params = make(learning_rate=0.3, layout={"kernel": "matrix", "bias": None}), tree()
    params, grads = params["Dense_0"], tree(1)["Dense_0"]
    state = opt.init(params)
    state.hyperparams["learning_rate"] = jnp.float32(0.1)
    ours, _ = jax.jit(partial(step, opt))(params, state, grads)
    theirs, _ = run(params, [grads], rate=0.1)
    assert furthest(ours, theirs) < 1e-6


def test_a_layout_as_a_function_is_static_under_inject_hyperparams():
    make = optax.inject_hyperparams(wnmuon, static_args=("layout",))
    opt = make(learning_rate=0.3, layout=lambda path, shape: MatrixAxes(1, 0))
    assert get(opt.init(jnp.ones((3, 2))), "b").shape == (3, 1)


@pytest.mark.parametrize("finetune", [False, True])
def test_pythons_numbers_are_leaves_like_arrays(finetune):
    opt = optax.chain(wnmuon(finetune=finetune), polynomial_average())
    numbers, grads = {"a": 1.0, "b": [2.0]}, {"a": 0.5, "b": [-3.0]}
    arrays = jax.tree.map(jnp.float32, numbers)
    state, theirs = opt.init(numbers), opt.init(arrays)
    assert kinds(state) == kinds(theirs)
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))
    for _ in range(2):
        numbers, state = step(opt, numbers, state, grads)
        arrays, theirs = step(opt, arrays, theirs, jax.tree.map(jnp.float32, grads))
    assert equal((numbers, state), (arrays, theirs))
    read = averaged_params(state, {"a": 1.0, "b": [2.0]})
    assert equal(read, averaged_params(theirs, arrays))


def test_accumulation_is_one_step_on_the_mean():
    params, grads = tree()["Dense_0"], [tree(1)["Dense_0"], tree(2)["Dense_0"]]
    multi = optax.chain(optax.MultiSteps(wnmuon(), 2).gradient_transformation(),
                        polynomial_average())  # fmt: skip
    state, ours, go = multi.init(params), params, jax.jit(partial(step, multi))
    for g in grads:
        ours, state = go(ours, state, g)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *grads)
    theirs, _ = run(params, [mean])
    assert furthest(ours, theirs) < 1e-6
    assert int(state[1].count) == 1
    assert equal(averaged_params(state), ours)


SHARDED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from wngrad.transforms import averaged_params, polynomial_average, wnmuon
opt = optax.chain(wnmuon(), polynomial_average())
x = {"kernel": jax.random.normal(jax.random.key(0), (8, 4)), "bias": jnp.ones(4)}

@jax.jit
def train(x):
    def body(carry, _):
        x, state = carry
        updates, state = opt.update(jax.tree.map(lambda x: 2 * x + 1, x), state, x)
        return (optax.apply_updates(x, updates), state), None
    x, state = jax.lax.scan(body, (x, opt.init(x)), length=3)[0]
    return x, averaged_params(state)

plain = jax.tree.leaves(train(x))
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
    for spec in (P("d"), P(None, "d")):
        with jax.set_mesh(mesh):
            kernel = jax.device_put(x["kernel"], NamedSharding(mesh, spec))
            out = train({**x, "kernel": kernel})
        assert out[0]["kernel"].sharding.is_equivalent_to(kernel.sharding, 2), out[0]
        for a, b in zip(jax.tree.leaves(out), plain, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
print("sharded", len(jax.devices()))
"""


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="this JAX has no explicit axes")
def test_sharded_parameters_train_like_whole_ones():
    """Four devices in a process of its own, with automatic and explicit axes."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SHARDED], capture_output=True, text=True
    )
    assert done.stdout.strip() == "sharded 4", done.stderr[-2000:]


def test_the_state_goes_through_a_checkpoint_bit_for_bit(tmp_path):
    import flax.serialization
    import orbax.checkpoint as ocp

    opt = optax.chain(wnmuon(), polynomial_average())
    params, grads = tree()["Dense_0"], tree(1)["Dense_0"]
    go = jax.jit(partial(step, opt))
    params, state = go(params, opt.init(params), grads)
    leaves, _ = jax.tree.flatten(state)
    again = [jax.tree.unflatten(jax.tree.structure(opt.init(params)), leaves)]
    again += [flax.serialization.from_bytes(opt.init(params), flax.serialization.to_bytes(state))]
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()
        again.append(saver.restore(tmp_path / "state", opt.init(params)))
    for restored in again:
        assert equal(state, restored)
        assert equal(go(params, state, grads), go(params, restored, grads))
    reset = optax.tree_utils.tree_set(state, skipped=jnp.int32(3))
    assert int(optax.tree_utils.tree_get(reset, "skipped")) == 3
    assert isinstance(state[0][0], WNMuonState)


# ---------------------------------------------------------------- the average


@pytest.mark.parametrize("eta", [0.0, 1.0, 8.0])
def test_the_average_is_the_recursion_for_any_optimizer(eta):
    opt = optax.chain(optax.sgd(0.1), polynomial_average(eta))
    x, mean = jnp.array([1.0, -2.0]), np.array([1.0, -2.0])
    state = opt.init(x)
    assert averaged_params(state).tolist() == [1.0, -2.0]
    for k in range(1, 9):
        x, state = step(opt, x, state, jnp.cos(k * x))
        mean = mean + (eta + 1) / (k + eta) * (np.asarray(x) - mean)
        np.testing.assert_allclose(averaged_params(state), mean, rtol=1e-5, atol=1e-6)
        assert k > 1 or equal(averaged_params(state), x)


def test_a_step_that_moves_nothing_does_not_count():
    opt = optax.chain(optax.sgd(1.0), polynomial_average())
    x, state = step(opt, jnp.ones(2), opt.init(jnp.ones(2)), jnp.ones(2))
    x, state = step(opt, x, state, jnp.array([2.0, 1.0]))
    for _ in range(3):
        same, after = step(opt, x, state, jnp.zeros(2))
        assert equal(same, x)
        assert equal(after, state)


def test_averages_of_half_precision_are_wide_and_come_back_in_its_type():
    opt = optax.masked(optax.chain(wnmuon(), polynomial_average()), {"w": True, "frozen": False})
    params = {"w": jnp.ones((3, 2), jnp.bfloat16), "frozen": jnp.ones(2)}
    after, state = step(opt, params, opt.init(params), params)
    assert averaged_params(state)["w"].dtype == jnp.float32
    read = averaged_params(state, after)
    assert kinds(read) == kinds(params)
    assert equal(read["frozen"], after["frozen"])


def test_parameters_and_state_may_both_be_donated():
    opt, params = optax.chain(wnmuon(), polynomial_average()), {"w": jnp.ones((3, 2))}
    go = jax.jit(partial(step, opt), donate_argnums=(0, 1))
    after, _ = go(params, opt.init(params), {"w": jnp.ones((3, 2))})
    assert np.isfinite(after["w"]).all()


# ---------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"learning_rate": -1.0}, ValueError, "wnmuon: `learning_rate` must be >= 0.*got -1.0"),
        ({"momentum": 1.0}, ValueError, "wnmuon: `momentum` must be >= 0 and < 1, got 1.0"),
        ({"b_init": 0.0}, ValueError, "wnmuon: `b_init` must be > 0.*got 0.0"),
        ({"weight_decay": -0.1}, ValueError, "wnmuon: `weight_decay` must be >= 0.*got -0.1"),
        ({"nonfinite": "raise"}, ValueError, "wnmuon: `nonfinite` must be one of.*got 'raise'"),
    ],
)
def test_bad_arguments_are_named(options, error, match):
    with pytest.raises(error, match=match):
        wnmuon(**options)


@pytest.mark.parametrize(
    ("layout", "match"),
    [
        ({"w": "rows"}, r"`layout` must be one of .* got 'rows' for \['w'\] of shape \(3, 2\)"),
        ({"v": "matrix"}, r"`layout` must have a label for every leaf, got 'none' for \['w'\]"),
        (MatrixAxes(0, 2), r"`layout` must name different axes of the leaf, got MatrixAxes"),
        (MatrixAxes(0, -2), "`layout` must name different axes of the leaf"),
        (MatrixAxes((), 1), "`layout` must name different axes of the leaf"),
        (lambda path, shape: 1, "`layout` must be one of .* got 1 for"),
    ],
)
def test_a_bad_layout_is_named_with_its_leaf(layout, match):
    with pytest.raises(ValueError, match=f"wnmuon: {match}"):
        wnmuon(layout=layout).init({"w": jnp.ones((3, 2))})


def test_a_vector_cannot_be_a_matrix():
    with pytest.raises(ValueError, match=r"`layout` must be 'vector' for fewer than 2 dimensions"):
        wnmuon(layout="matrix").init(jnp.ones(3))


def test_what_needs_the_parameters_says_so():
    x = jnp.ones((3, 2))
    for opt, owner in ((wnmuon(), "wnmuon"), (polynomial_average(), "polynomial_average")):
        with pytest.raises(ValueError, match=f"{owner}: `params` must be given to `update`"):
            opt.update(x, opt.init(x))
    opt = wnmuon(weight_decay=None)
    opt.update(x, opt.init(x))


def test_a_state_without_one_average_is_refused():
    with pytest.raises(ValueError, match=r"averaged_params: `state` must be .* got one with 0"):
        averaged_params(wnmuon().init(jnp.ones(2)))
    twice = optax.chain(polynomial_average(), polynomial_average())
    with pytest.raises(ValueError, match="got one with 2"):
        averaged_params(twice.init(jnp.ones(2)))
    with pytest.raises(ValueError, match=r"polynomial_average: `eta` must be >= 0.*got -1"):
        polynomial_average(-1.0)
