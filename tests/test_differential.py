"""Against torch itself: SGD in the limit, compiled, scaled and low-precision training."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from conftest import backward, network, same, train, twins
from wngrad import WNAdam, WNGrad, WNMuon


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_small_lam_over_b1_is_sgd_at_that_rate(momentum, weight_decay):
    """λ = 1e-3 and b₁ = 1: over 50 steps b grows by less than 1e-4, and so do the differences."""
    a, b = (m.double() for m in twins())
    options = {"lr": 1e-3, "momentum": momentum, "weight_decay": weight_decay}
    train(a, WNGrad(a.parameters(), **options), 50)
    train(b, torch.optim.SGD(b.parameters(), **options), 50)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-4)


def test_one_dimensional_parameters_held_at_b1_are_exactly_sgd():
    p, q = nn.Parameter(torch.randn(5)), nn.Parameter(torch.zeros(5))
    q.data.copy_(p.data)
    ours, sgd = WNGrad([p], lr=0.125, hold_1d=True), torch.optim.SGD([q], lr=0.125)
    for _ in range(5):
        p.grad = torch.randn(5)
        q.grad = p.grad.clone()
        ours.step()
        sgd.step()
    assert torch.equal(p, q)
    assert (ours.state[p]["b"] == 1).all()


@pytest.mark.parametrize("make", [WNGrad, WNAdam, WNMuon])
@pytest.mark.parametrize("schedule", ["float", "tensor"])
def test_a_compiled_step_follows_a_schedule_without_recompiling(make, schedule):
    """100 steps; all is compiled within the first three, and equals the eager step."""
    torch._dynamo.reset()
    counters.clear()
    a, b = (m.double() for m in twins())
    lr = torch.tensor(1.0) if schedule == "tensor" else 1.0
    one, other = make(a.parameters(), lr=lr), make(b.parameters(), lr=copy.deepcopy(lr))
    rates = [torch.optim.lr_scheduler.CosineAnnealingLR(opt, 100) for opt in (one, other)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        step = torch.compile(one.step)
        for seed in range(100):
            for model, opt, go in ((a, one, step), (b, other, other.step)):
                opt.zero_grad()
                backward(model, seed)
                go()
            for rate in rates:
                rate.step()
            if seed == 2:
                graphs = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == graphs
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_a_whole_training_step_compiles_with_its_closure(make):
    torch._dynamo.reset()
    a, b = twins()
    one, other = make(a.parameters()), make(b.parameters())
    x, y = torch.randn(8, 2, 4, 4), torch.randint(4, (8,))

    def closure():
        one.zero_grad()
        loss = nn.functional.cross_entropy(a(x), y)
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        compiled = torch.compile(lambda: one.step(closure))
        losses = [compiled().item() for _ in range(5)]
    for loss in losses:
        other.zero_grad()
        plain = nn.functional.cross_entropy(b(x), y)
        plain.backward()
        other.step()
        assert loss == pytest.approx(plain.item(), rel=1e-4)


def test_a_step_the_grad_scaler_skips_leaves_everything(optimizer):
    """N2: an overflow at each of 50 steps in turn leaves parameters and state bit-identical."""
    model = network()
    opt = optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(50):
        for overflow in (True, False):
            opt.zero_grad()
            scaler.scale(backward_loss(model, seed)).backward()
            if overflow:
                model[0].weight.grad[0, 0, 0, 0] = torch.inf
            before = copy.deepcopy((model, opt))
            scaler.step(opt)
            scaler.update()
            unchanged = same(model, before[0])
            assert unchanged == overflow
            if overflow:
                for p, q in zip(model.parameters(), before[0].parameters(), strict=True):
                    known = before[1].state.get(q, {})
                    for key, value in opt.state[p].items():
                        if key in known:
                            assert torch.equal(value, known[key])
                        elif key == "average":
                            assert torch.equal(value, p)
                        else:  # made by the first step, as for any step that changes nothing
                            begun = key == "average" and torch.equal(value, p)
                            assert key in ("b", "norm") or begun or not value.any()


def backward_loss(model, seed):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 2, 4, 4, generator=draw)
    return nn.functional.cross_entropy(model(x), torch.randint(4, (8,), generator=draw))


def test_scaled_training_is_unscaled_training(optimizer):
    """A loss scale that is a power of two changes nothing, not even a bit."""
    a, b = twins()
    one, other = optimizer(a.parameters()), optimizer(b.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    for seed in range(5):
        one.zero_grad()
        scaler.scale(backward_loss(a, seed)).backward()
        scaler.step(one)
        scaler.update()
        other.zero_grad()
        backward_loss(b, seed).backward()
        other.step()
    assert same(a, b)


@pytest.mark.parametrize("what", ["a step", "an overflow", "a rate of 0"])
def test_a_grad_scaler_s_step_leaves_the_gradients_unscaled(optimizer, what):
    """As with torch's own optimizers, whatever becomes of the step."""
    a, b = twins()
    opt = optimizer(a.parameters(), **({"lr": 0.0} if what == "a rate of 0" else {}))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    for seed in range(2):
        opt.zero_grad()
        b.load_state_dict(a.state_dict())
        b.zero_grad()
        scaler.scale(backward_loss(a, seed)).backward()
        backward_loss(b, seed).backward()
        if what == "an overflow":
            a[0].weight.grad[0, 0, 0, 0] = b[0].weight.grad[0, 0, 0, 0] = torch.inf
        scaler.step(opt)
        scaler.update(2.0**16)
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)


def test_a_grad_scaler_s_gradients_that_were_unscaled_are_left_alone():
    a, b = twins()
    opt, scaler = WNGrad(a.parameters()), torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(backward_loss(a, 0)).backward()
    backward_loss(b, 0).backward()
    scaler.unscale_(opt)
    scaler.step(opt)
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_narrow_gradients_are_unscaled_by_any_scale(dtype):
    """2^17 is not a float16; one gradient of two parameters is divided once."""
    p, q, still = (nn.Parameter(torch.ones(3, 2, dtype=dtype)) for _ in range(3))
    opt = WNGrad([p, q, still])
    p.grad = q.grad = torch.full((3, 2), 2.0**10, dtype=dtype)
    opt.grad_scale, opt.found_inf = torch.full((1,), 2.0**17), torch.zeros(1)
    opt.step()
    assert (p.grad == 2.0**-7).all()
    assert still.grad is None


def test_sparse_gradients_are_unscaled():
    p = nn.Parameter(torch.ones(3, 2))
    opt = WNGrad([p])
    p.grad = torch.sparse_coo_tensor(
        [[1, 1]], torch.full((2, 2), 8.0), (3, 2), check_invariants=True
    )
    opt.grad_scale = torch.tensor(8.0)
    opt.step()
    assert torch.equal(p.grad.to_dense(), torch.tensor([[0.0, 0.0], [2.0, 2.0], [0.0, 0.0]]))


@pytest.mark.parametrize("fused", [None, False])
def test_a_refused_step_leaves_the_gradients_scaled(fused):
    p = nn.Parameter(torch.ones(3, 2))
    opt = WNGrad([p], nonfinite="raise", fused=fused)
    p.grad = torch.full((3, 2), 8.0)
    p.grad[0, 0] = torch.nan
    opt.grad_scale = torch.tensor(8.0)
    with pytest.raises(ValueError, match="Nothing was changed"):
        opt.step()
    assert (p.grad[1] == 8).all()


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_a_bfloat16_model_follows_the_float32_model(make):
    """bfloat16 has 8 bits: after 30 steps the losses agree to a few percent, and both fell."""
    a, b = twins()
    a.to(torch.bfloat16)
    start = backward(b).item()
    one, other = make(a.parameters()), make(b.parameters())
    train_one_batch(a, one, 30)
    train_one_batch(b, other, 30)
    low, high = backward(a).item(), backward(b).item()
    assert high < 0.1 * start
    assert low == pytest.approx(high, abs=0.05 * start)
    assert all(s["b"].dtype == torch.float32 for s in one.state.values())


def train_one_batch(model, opt, steps):
    for _ in range(steps):
        opt.zero_grad()
        backward(model)
        opt.step()


def test_a_compiled_step_takes_sparse_gradients():
    torch._dynamo.reset()
    a, b = (nn.Embedding(6, 3, sparse=True) for _ in range(2))
    b.load_state_dict(a.state_dict())
    one, other = WNGrad(a.parameters()), WNGrad(b.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        step = torch.compile(one.step)
        for k in range(4):
            for layer, opt, go in ((a, one, step), (b, other, other.step)):
                opt.zero_grad()
                layer(torch.tensor([k, 2])).square().sum().backward()
                go()
    assert torch.equal(a.weight, b.weight)
