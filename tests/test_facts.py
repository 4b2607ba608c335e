"""The method's properties, over drawn gradients (DESIGN: "Facts worth a property test")."""

from __future__ import annotations

from itertools import zip_longest

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wngrad import WNAdam, WNGrad, rule

seeds = st.integers(0, 2**31)
shapes = st.sampled_from([(1,), (5,), (4, 3), (2, 3, 2), (3, 2, 2, 2)])
rates = st.floats(1e-6, 1e6)
powers = st.integers(-12, 12).map(lambda k: 2.0**k)
pers = st.sampled_from(["neuron", "tensor", "slice", "model"])
b_inits = st.sampled_from([1.0, 1e-3, "gradient"])
rules = st.sampled_from([(WNGrad, {}), (WNGrad, {"momentum": 0.9}), (WNAdam, {})])


def gradients(seed: int, shape: tuple[int, ...], n: int, dtype=torch.float32, spread=3.0):
    """`n` gradients of widely different sizes, some of them zero."""
    draw = torch.Generator().manual_seed(seed)
    sizes = 10 ** (spread * torch.randn(n, generator=draw, dtype=torch.float64))
    sizes[torch.rand(n, generator=draw) < 0.1] = 0
    every = torch.randn(n, *shape, generator=draw, dtype=torch.float64)
    return (every * sizes.view(-1, *[1] * len(shape))).to(dtype)


def run(make, grads, schedule=(), **options):
    """All parameters and all b along the way; λ of each step from the schedule, if there is one."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, grads[0].numel()).view_as(grads[0]).to(grads[0]))
    opt = make([p], **options)
    xs, bs = [p.detach().clone()], []
    for g, lam in zip_longest(grads, schedule):
        p.grad = g.clone()
        if lam is not None:
            opt.param_groups[0]["lr"] = lam
        opt.step()
        xs.append(p.detach().clone())
        bs.append(opt.state[p]["b"].clone())
    return torch.stack(xs), torch.stack(bs)


@given(seeds, shapes, rates, pers, rules)
def test_b_never_decreases(seed, shape, lam, per, how):
    make, options = how
    _, b = run(make, gradients(seed, shape, 10), lr=lam, per=per, **options)
    assert (b[1:] >= b[:-1]).all()
    assert (b >= 1).all()


@given(seeds, shapes, rates, powers, pers, rules)
def test_only_the_ratio_of_lam_to_b1_matters(seed, shape, lam, power, per, how):
    """Bitwise, with a power of two: every operation scales exactly."""
    make, options = how
    grads = gradients(seed, shape, 10, spread=1.0)
    x, b = run(make, grads, lr=lam, b_init=1.0, per=per, **options)
    y, c = run(make, grads, lr=power * lam, b_init=power, per=per, **options)
    assert torch.equal(x, y)
    assert torch.equal(power * b, c)


@given(seeds, shapes, rates, st.floats(1e-3, 1e3), pers)
def test_no_block_moves_by_more_than_a_half(seed, shape, lam, b1, per):
    """b_new ≥ 2λ‖g‖, for any λ, g and b; a few roundings of slack on ½."""
    grads = gradients(seed, shape, 10, dtype=torch.float64)
    x, b = run(WNGrad, grads, lr=lam, b_init=b1, per=per)
    assert (_moved(x, b) <= 0.5 * (1 + 1e-12)).all()


@given(seeds, shapes, rates, pers, st.sampled_from([0.5, 0.9, 0.99]))
def test_with_momentum_at_most_a_half_over_one_minus_mu(seed, shape, lam, per, mu):
    grads = gradients(seed, shape, 20, dtype=torch.float64)
    x, b = run(WNGrad, grads, lr=lam, per=per, momentum=mu)
    assert (_moved(x, b) <= 0.5 / (1 - mu) * (1 + 1e-12)).all()


@given(seeds, shapes, rates, pers, st.sampled_from([0.0, 0.5, 0.9, 0.99]))
def test_wn_adam_moves_no_block_by_more_than_a_half(seed, shape, lam, per, beta):
    grads = gradients(seed, shape, 20, dtype=torch.float64)
    x, b = run(WNAdam, grads, lr=lam, per=per, beta=beta)
    assert (_moved(x, b) <= 0.5 * (1 + 1e-12)).all()


@given(seeds, shapes, st.lists(rates, min_size=20, max_size=20), pers, rules, b_inits)
def test_the_bound_on_a_step_holds_whatever_lam_does(seed, shape, schedule, per, how, b_init):
    """Each gradient is in the sum or mean with the λ of its own step, for which b was made."""
    make, options = how
    grads = gradients(seed, shape, 20, dtype=torch.float64)
    x, b = run(make, grads, schedule, per=per, b_init=b_init, **options)
    assert (_moved(x, b) <= 0.5 / (1 - options.get("momentum", 0.0)) * (1 + 1e-12)).all()


@pytest.mark.parametrize("how", [(WNGrad, {"momentum": 0.9}), (WNAdam, {})], ids=["sum", "mean"])
@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("tensor", [False, True])
def test_a_rate_that_rises_a_million_fold_takes_no_wild_step(how, fused, tensor):
    """Steps of 450,000 and 236,842 if buffers had no λ in them."""
    make, options = how
    schedule = [1e-6] * 20 + [1.0] * 20
    if tensor:
        schedule = list(map(torch.tensor, schedule))
    grads = torch.tensor([1e5] * 20 + [1e-3] * 20).view(-1, 1, 1).expand(-1, 2, 3)
    x, b = run(make, grads, schedule, fused=fused, **options)
    assert (_moved(x, b) <= 0.5 / (1 - options.get("momentum", 0.0)) * (1 + 1e-6)).all()


@given(seeds, shapes, rates, pers, b_inits)
def test_a_mean_kept_over_b_is_the_mean_of_the_scaled_gradients(seed, shape, lam, per, b_init):
    """v·b = Σ (1−β)·β^(j−i)·λ_i·g_i, which is Algorithm 4's λĝ if λ is constant."""
    grads = gradients(seed, shape, 12, dtype=torch.float64)
    schedule = [lam * 10.0 ** (k % 5 - 2) for k in range(12)]
    p = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    opt, mean = WNAdam([p], lr=lam, per=per, b_init=b_init), torch.zeros_like(p)
    for g, now in zip(grads, schedule, strict=True):
        p.grad, opt.param_groups[0]["lr"] = g.clone(), now
        opt.step()
        if opt.state[p]["b"].any():
            mean = rule.running_mean(mean, now * g, 0.9)
    ours = opt.state[p]["velocity"] * opt.state[p]["b"]
    torch.testing.assert_close(ours, mean, rtol=1e-9, atol=1e-12 * float(mean.abs().max()))


def _moved(x, b):
    """How far each block went in each step; the starting point's own rounding taken off."""
    dims = [i for i in range(1, b.dim()) if b.shape[i] == 1]
    step = x[1:] - x[:-1]
    size = torch.linalg.vector_norm(step, dim=dims, keepdim=True) if dims else step.abs()
    return size - 1e-15 * x.abs().amax()


@given(seeds, shapes, powers, powers, pers, rules)
def test_starting_from_the_gradient_cancels_lam_and_the_scale_of_the_loss(
    seed, shape, lam, scale, per, how
):
    """b₁ = C·λ·‖g₁‖: bitwise for powers of two."""
    make, options = how
    grads = gradients(seed, shape, 10, spread=1.0)
    x, _ = run(make, grads, b_init="gradient", per=per, **options)
    y, _ = run(make, scale * grads, lr=lam, b_init="gradient", per=per, **options)
    assert torch.equal(x, y)


@given(seeds, shapes, rates, st.floats(0.1, 10))
def test_the_first_displacement_from_the_gradient_is_known(seed, shape, lam, c):
    """1/(C + 1/C), whatever λ and the gradient."""
    g = gradients(seed, shape, 1, dtype=torch.float64)[0] + 1e-3
    x, b = run(WNGrad, [g], lr=lam, b_init=("gradient", c))
    step = _moved(x, b)
    torch.testing.assert_close(step, torch.full_like(step, 1 / (c + 1 / c)), rtol=1e-9, atol=1e-9)


@given(seeds, shapes, rates, pers)
def test_the_first_wn_adam_step_is_the_first_wngrad_step(seed, shape, lam, per):
    """To a few roundings: ĝ₁/(1−β) is (1−β)g/(1−β)."""
    g = gradients(seed, shape, 1, dtype=torch.float64)
    (x, b), (y, c) = run(WNGrad, g, lr=lam, per=per), run(WNAdam, g, lr=lam, per=per)
    assert torch.equal(b, c)
    torch.testing.assert_close(x, y, rtol=1e-14, atol=1e-14)


@given(seeds, shapes, rates)
def test_momentum_zero_is_plain_wngrad(seed, shape, lam):
    """A μ too small to be seen in float32 takes the buffered path to the same result."""
    grads = gradients(seed, shape, 10)
    tiny = run(WNGrad, grads, lr=lam, momentum=1e-30)[0]
    torch.testing.assert_close(run(WNGrad, grads, lr=lam)[0], tiny, rtol=1e-6, atol=1e-6)


@given(seeds, st.sampled_from([(5,), (4, 3), (3, 2, 2, 2)]), rates, rules)
def test_permuting_neurons_permutes_the_result(seed, shape, lam, how):
    make, options = how
    grads = gradients(seed, shape, 10)
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(seed))
    p = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    a, b = torch.nn.Parameter(p.clone()), torch.nn.Parameter(p[order].clone())
    one, other = make([a], lr=lam, **options), make([b], lr=lam, **options)
    for g in grads:
        a.grad, b.grad = g.clone(), g[order].clone()
        one.step()
        other.step()
    assert torch.equal(a[order], b)


@given(seeds, rates, st.sampled_from(["neuron", "tensor", "model"]))
@settings(max_examples=60)
def test_sparse_rows_give_exactly_the_dense_result(seed, lam, per):
    draw = torch.Generator().manual_seed(seed)
    start = torch.randn(7, 3, generator=draw)
    dense, sparse = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    one, other = WNGrad([dense], lr=lam, per=per), WNGrad([sparse], lr=lam, per=per)
    for _ in range(5):
        rows = torch.randint(7, (4,), generator=draw)  # with repetitions
        values = torch.randn(4, 3, generator=draw)
        with torch.sparse.check_sparse_tensor_invariants():
            sparse.grad = torch.sparse_coo_tensor(rows[None], values, (7, 3))
        dense.grad = sparse.grad.to_dense()
        one.step()
        other.step()
    assert torch.equal(dense, sparse)
    assert torch.equal(one.state[dense]["b"], other.state[sparse]["b"])


@given(seeds, shapes, st.sampled_from([0.0, 0.9]))
def test_a_tiny_lam_is_sgd(seed, shape, mu):
    """λ = 1e-9 and gradients of size one: b stays within 1e-15 of 1, and λ/b is λ."""
    grads = gradients(seed, shape, 20, dtype=torch.float64, spread=0.1)
    x, _ = run(WNGrad, grads, lr=1e-9, momentum=mu)
    p = torch.nn.Parameter(x[0].clone())
    sgd = torch.optim.SGD([p], lr=1e-9, momentum=mu)
    for g in grads:
        p.grad = g.clone()
        sgd.step()
    torch.testing.assert_close(x[-1] - x[0], p.detach() - x[0], rtol=1e-6, atol=1e-14)


@given(st.floats(1e-3, 1e3), st.floats(0, 1e3), st.floats(1e-3, 1e3))
def test_next_b_is_at_least_twice_lam_times_the_norm(b, norm, lam):
    new = rule.next_b(b, norm**2, lam)
    assert new >= 2 * lam * norm * (1 - 1e-15)
    assert new >= b


def test_growth_under_unit_gradients_is_the_root_of_twice_the_steps():
    """The paper's "√k/G" is inverted: G√(2k), 141.44 after 10⁴ unit gradients."""
    b = 1.0
    for _ in range(10_000):
        b = rule.next_b(b, 1.0, 1.0)
    assert b == pytest.approx(141.44, abs=0.005)
