"""WNMuon against an independent account of it on NumPy, and the promises of its docstring."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conftest import backward, network, same, train
from wngrad import WNMuon, matrix_groups, step_in_backward
from wngrad.optim.directions import Adam
from wngrad.polynomials import COEFFICIENTS, LARGEST

RHO, C, ETA, MU, DECAY = 0.3, 10.0, 8.0, 0.9, 0.1


def polar(x):
    """U p(Σ) Vᵀ by the singular value decomposition: what five products come to."""
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / (1.02 * (s**8).sum() ** 0.125)
    for a, b, c in COEFFICIENTS:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v


def account(x, gradients):
    """x, b and x̄ of one parameter after each step, on NumPy: a matrix, or a vector."""
    m, v, mean = np.zeros_like(x), np.zeros_like(x), x
    b = np.full((len(x), 1) if x.ndim == 2 else x.shape, C)
    for k, g in enumerate(gradients, 1):
        m = MU * m + (1 - MU) * g
        if x.ndim == 2:
            u = polar(MU * m + (1 - MU) * g) * max(1, (x.shape[0] / x.shape[1]) ** 0.5)
            b = b + (u**2).sum(1, keepdims=True) / b
            x = x * (1 - DECAY * RHO / b) - RHO * u / b
        else:
            v = 0.99 * v + 0.01 * g**2
            u = 0.3 * (m / (1 - MU**k)) / np.sqrt(v / (1 - 0.99**k))
            b = b + u**2 / b
            x = x - RHO * u / b
        mean = mean + (ETA + 1) / (k + ETA) * (x - mean)
        yield x, b, mean


@pytest.mark.parametrize("shape", [(4, 6), (6, 4), (1, 5), (5, 1), (3, 3), (5,)], ids=str)
def test_twenty_steps_match_the_equations(shape):
    x = torch.randn(shape, dtype=torch.float64)
    gradients = torch.randn(20, *shape, dtype=torch.float64)
    p = nn.Parameter(x.clone())
    opt = WNMuon([p])
    for g, (ours, b, mean) in zip(gradients, account(x.numpy(), gradients.numpy()), strict=True):
        p.grad = g
        opt.step()
        assert np.allclose(p.detach(), ours, rtol=0, atol=1e-9)
        assert np.allclose(opt.state[p]["b"], b, rtol=1e-9)
        assert np.allclose(opt.state[p]["average"], mean, rtol=0, atol=1e-9)


def test_b_of_unit_rows_is_the_decay_that_nobody_chose():
    """b = √(C² + 2k) for ‖u‖ = 1; the rows of a wide matrix are within 15 % of that."""
    p = nn.Parameter(torch.randn(8, 32))
    opt = WNMuon([p])
    for k in range(1, 201):
        p.grad = torch.randn(8, 32)
        opt.step()
        low, high = ((C**2 + 2 * k * norm**2) ** 0.5 for norm in (0.85, 1.15))
        assert ((opt.state[p]["b"] > low * 0.999) & (opt.state[p]["b"] < high * 1.02)).all()


@given(
    st.sampled_from([(4, 6), (6, 2), (1, 5), (5, 1), (7,), (2, 3, 2, 2)]),
    st.integers(0, 10**6),
    st.floats(-30, 30),
    st.floats(0.01, 3),
    st.floats(0.5, 100),
)
@settings(max_examples=60)
def test_no_row_moves_further_than_promised(shape, seed, decades, rho, c):
    """1.15·max(1, √(out/in))·ρ/C a row, 0.71·ρ/C an entry of a vector; never more than ρ/2."""
    generator = torch.Generator().manual_seed(seed)
    p = nn.Parameter(torch.randn(shape, generator=generator))
    opt = WNMuon([p], lr=rho, b_init=c, weight_decay=0.0)
    multiple = LARGEST * max(1, (shape[0] / (p.numel() / shape[0])) ** 0.5)
    bound = (0.71 if len(shape) == 1 else multiple) * rho / c
    for _ in range(5):
        before = p.detach().clone()
        scale = 10 ** (decades * torch.rand((), generator=generator))
        p.grad = torch.randn(shape, generator=generator) * scale
        opt.step()
        moved = (p.detach() - before).reshape(shape[0], -1).norm(dim=1)
        assert (moved <= bound * (1 + 1e-4) + 1e-6).all()
        assert (moved <= rho / 2 * (1 + 1e-4) + 1e-6).all()


def test_multiplying_the_loss_by_a_power_of_two_changes_no_bit():
    a = network()
    b = copy.deepcopy(a)
    ours, theirs = WNMuon(a), WNMuon(b)
    for seed in range(5):
        for model, opt, factor in ((a, ours, 1.0), (b, theirs, 2.0**20)):
            opt.zero_grad()
            backward(model, seed)
            for p in model.parameters():
                p.grad *= factor
            opt.step()
    assert same(a, b)


def test_a_model_and_its_groups_take_the_same_steps_as_bare_parameters_of_these_shapes():
    a = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))
    b = copy.deepcopy(a)
    c = copy.deepcopy(a)
    options = [WNMuon(a), WNMuon(matrix_groups(b)), WNMuon(c.parameters())]
    for model, opt in zip((a, b, c), options, strict=True):
        for seed in range(4):
            opt.zero_grad()
            torch.manual_seed(seed)
            model(torch.randn(3, 4)).square().sum().backward()
            opt.step()
    assert same(a, b)
    assert same(a, c)


def test_blocks_that_are_asked_for_are_those_of_a_model_too():
    model = network()
    opt = WNMuon(model, per="tensor")
    train(model, opt, 1)
    assert all(opt.state[p]["b"].numel() == 1 for p in model.parameters())


def test_a_gradient_that_is_not_finite_spoils_its_own_matrix_alone():
    a, b = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    opt = WNMuon([a, b], nonfinite="skip")
    a.grad, b.grad = torch.randn(2, 3), torch.randn(2, 3)
    a.grad[0, 1] = torch.nan
    opt.step()
    assert torch.equal(a, torch.ones(2, 3))
    assert not opt.state[a]["m"].any()
    assert opt.skipped() == 2
    assert (b != 1).all()


def test_packed_matrices_are_orthogonalized_each_for_itself():
    a = nn.MultiheadAttention(4, 2, bias=False)
    parts = [nn.Parameter(part.clone()) for part in a.in_proj_weight.detach().chunk(3)]
    packed, apart = WNMuon(a), WNMuon(parts)
    for _ in range(5):
        g = torch.randn(12, 4)
        a.in_proj_weight.grad = g
        for p, part in zip(parts, g.chunk(3), strict=True):
            p.grad = part.clone()
        packed.step()
        apart.step()
    assert torch.allclose(a.in_proj_weight, torch.cat(parts), atol=1e-6)


def test_a_stack_of_experts_and_grouped_convolutions_have_a_rate_for_each_row():
    experts = nn.Parameter(torch.randn(3, 5, 4))
    opt = WNMuon([{"params": [experts], "layout": ("stack", 1)}])
    experts.grad = torch.randn(3, 5, 4)
    before = experts.detach().clone()
    opt.step()
    assert opt.state[experts]["b"].shape == (3, 5, 1)
    for k in range(3):
        alone = nn.Parameter(before[k].clone())
        alone.grad = experts.grad[k]
        WNMuon([alone]).step()
        assert torch.allclose(experts[k], alone, atol=1e-6)
    for conv in (nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose2d(4, 6, 3, groups=2)):
        opt = WNMuon(conv)
        conv(torch.randn(1, 4, 5, 5)).square().sum().backward()
        opt.step()
        assert opt.state[conv.weight]["b"].numel() == 6


def test_rows_of_an_embedding_without_a_gradient_do_not_move():
    """Not by momentum, not by decay, not in the average's limit; the others do."""
    table = nn.Embedding(10, 4)
    opt = WNMuon(table)
    for used in ([1, 2, 3], [2, 5], [1]):
        before = table.weight.detach().clone()
        b = opt.state[table.weight]["b"].clone() if opt.state else torch.full((10, 1), C)
        opt.zero_grad()
        table(torch.tensor(used)).square().sum().backward()
        opt.step()
        still = torch.tensor([i not in used for i in range(10)])
        assert torch.equal(table.weight[still], before[still])
        assert torch.equal(opt.state[table.weight]["b"][still], b[still])
        assert (table.weight[~still] != before[~still]).all()


def test_a_row_of_an_embedding_moves_with_a_gradient_in_a_single_entry():
    table = nn.Embedding(3, 4)
    before = table.weight.detach().clone()
    opt = WNMuon(table)
    table.weight.grad = torch.zeros(3, 4)
    table.weight.grad[1, 2] = 1.0
    opt.step()
    assert (table.weight != before).any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("lrs", [(0.0, 0.3), (0.3, 0.0)], ids=str)
def test_a_group_without_rate_stands_still_and_the_others_move(lrs):
    x, g = torch.randn(2, 4, 6), torch.randn(2, 4, 6)
    ends = []
    for fused in (None, False):
        params = [nn.Parameter(value.clone()) for value in x]
        groups = [{"params": [p], "lr": lr} for p, lr in zip(params, lrs, strict=True)]
        opt = WNMuon(groups, fused=fused)
        for _ in range(3):
            for p, gradient in zip(params, g, strict=True):
                p.grad = gradient.clone()
            opt.step()
        assert [bool((p == value).all()) for p, value in zip(params, x, strict=True)] == [
            lr == 0 for lr in lrs
        ]
        ends.append(torch.stack([p.detach() for p in params]))
    torch.testing.assert_close(*ends, rtol=0, atol=2e-6)


def test_groups_of_other_momenta_are_stepped_by_kernels_as_they_are_plainly():
    x, g, ends = torch.randn(2, 4, 6), torch.randn(3, 2, 4, 6), []
    for fused in (None, False):
        params = [nn.Parameter(value.clone()) for value in x]
        groups = zip(params, (0.9, 0.5), strict=True)
        opt = WNMuon([{"params": [p], "momentum": mu} for p, mu in groups], fused=fused)
        for gradients in g:
            for p, gradient in zip(params, gradients, strict=True):
                p.grad = gradient.clone()
            opt.step()
        ends.append(torch.stack([p.detach() for p in params]))
    torch.testing.assert_close(*ends, rtol=0, atol=2e-6)


def test_lora_starts_from_zero():
    """B = 0: A has no gradient at first, and moves as soon as it has one."""
    a, b = nn.Linear(6, 2, bias=False), nn.Linear(2, 5, bias=False)
    nn.init.zeros_(b.weight)
    opt = WNMuon(nn.Sequential(a, b), weight_decay=0.0)
    start = a.weight.detach().clone()
    for step in range(3):
        opt.zero_grad()
        (b(a(torch.randn(8, 6))) - 1).square().mean().backward()
        opt.step()
        assert torch.equal(a.weight, start) == (step == 0)
        assert b.weight.any()


def test_state_is_a_momentum_and_an_average():
    model = nn.Linear(100, 100, bias=False)
    for average, most in ((8.0, 2.02), (None, 1.02)):
        opt = WNMuon(model, average=average)
        model(torch.randn(2, 100)).sum().backward()
        opt.step()
        held = sum(t.numel() for t in opt.state[model.weight].values())
        assert held <= most * model.weight.numel()


def test_ratios_between_groups_are_honoured_exactly():
    a, b = (nn.Parameter(torch.zeros(3, 4)) for _ in range(2))
    opt = WNMuon([{"params": [a]}, {"params": [b], "lr": 16 * 0.25}], lr=0.25, weight_decay=0.0)
    for _ in range(4):
        a.grad = b.grad = torch.randn(3, 4)
        opt.step()
    assert torch.equal(b, 16 * a)


def test_a_step_in_backward_is_the_same_step():
    a = network()
    b = copy.deepcopy(a)
    ours, theirs = WNMuon(a), WNMuon(b)
    train(a, ours, 4)
    with step_in_backward(theirs):
        for seed in range(4):
            backward(b, seed)
    assert all(
        torch.allclose(p, q, atol=1e-6) for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )
    means = [opt.state[p]["average"] for opt, m in ((ours, a), (theirs, b)) for p in m.parameters()]
    half = len(means) // 2
    assert all(
        torch.allclose(p, q, atol=1e-6) for p, q in zip(means[:half], means[half:], strict=True)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": ("columns", 1)}, "Layout: `kind` must be one of"),
        ({"layout": "rows"}, r"WNMuon: `layout` must be a pair \(kind, pieces\), got 'rows'"),
        ({"role": "head"}, "WNMuon: `role` must be one of 'matrix', 'embedding', 'vector'"),
        ({"momentum": 1.0}, r"WNMuon: `momentum` must be in \[0, 1\)"),
        ({"average": -1.0}, "WNMuon: `average` must be >= 0 and finite"),
    ],
)
def test_bad_settings_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        WNMuon([{"params": [nn.Parameter(torch.ones(2, 2))], **options}])


@pytest.mark.parametrize("beta", [0.9, 0.999, 0.99999])
def test_adams_first_direction_is_the_sign_of_the_gradient(beta):
    """1 − βᵗ in float32 is off by 1.3e-5 at β = 0.999, by 1.4e-3 at 0.99999."""
    g = torch.tensor([3.0, -0.1])
    zeros = {"m": [torch.zeros(2)], "rms": [torch.zeros(2)]}
    (u,) = Adam(1.0, beta).propose(
        SimpleNamespace(g=[g], buffers=zeros, counts=lambda: [torch.zeros(())])
    )
    torch.testing.assert_close(u, g.sign(), rtol=3e-6, atol=0)
