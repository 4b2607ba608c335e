"""Whole training steps under torch.compile, autocast and torch.func; steps alone: test_contract."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.func import functional_call

from conftest import backward, network, same, same_state, train, twins


@pytest.mark.parametrize("dynamic_lr", [False, True])
def test_a_whole_compiled_training_step_is_the_eager_one(one_of_few, dynamic_lr):
    a, b = twins()
    lr = torch.tensor(0.5) if dynamic_lr else 0.5
    ours, theirs = one_of_few(a.parameters(), lr=lr), one_of_few(b.parameters(), lr=lr)

    def step(x, y):
        loss = nn.functional.cross_entropy(a(x), y)
        loss.backward()
        ours.step()
        ours.zero_grad()

    compiled = torch.compile(step, backend="aot_eager")
    for seed in range(4):
        draw = torch.Generator().manual_seed(seed)
        x, y = torch.randn(8, 2, 4, 4, generator=draw), torch.randint(4, (8,), generator=draw)
        compiled(x, y)
    train(b, theirs, 4)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_a_compiled_model_resumes_from_the_checkpoint_of_a_plain_one(one_of_few):
    a, b = twins()
    ours, theirs = one_of_few(a.parameters()), one_of_few(b.parameters())
    train(a, ours, 3)
    b.load_state_dict(a.state_dict())
    theirs.load_state_dict(ours.state_dict())
    step = torch.compile(theirs.step, backend="aot_eager")
    for seed in range(3, 6):
        theirs.zero_grad()
        backward(b, seed)
        step()
    train(a, ours, 3, first=3)
    assert same(a, b)
    assert same_state(ours, theirs)


def test_training_under_autocast_keeps_b_and_the_parameters_wide(optimizer):
    model = network()
    opt = optimizer(model.parameters())
    for seed in range(5):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            backward(model, seed)
        opt.step()
    for p in model.parameters():
        assert p.dtype == opt.state[p]["b"].dtype == torch.float32
        assert p.isfinite().all()


def test_bfloat16_training_is_the_step_of_the_wide_gradient_rounded_once(optimizer):
    """b sees bfloat16's gradients in full, and a parameter is rounded only when it is stored."""
    narrow, wide = network().bfloat16(), network()
    opt, reference = optimizer(narrow.parameters()), optimizer(wide.parameters())
    for seed in range(5):
        opt.zero_grad()
        backward(narrow, seed)
        for p, q in zip(narrow.parameters(), wide.parameters(), strict=True):
            q.data, q.grad = p.detach().float(), p.grad.float()
            for key, value in opt.state.get(p, {}).items():
                reference.state[q][key].copy_(value)
        opt.step()
        reference.step()
        for p, q in zip(narrow.parameters(), wide.parameters(), strict=True):
            assert torch.equal(opt.state[p]["b"], reference.state[q]["b"])
            assert torch.equal(p, q.bfloat16())


def test_a_gradient_through_ten_steps_of_a_network_is_that_of_finite_differences(optimizer):
    """Learning λ by gradient descent: `functional_call` on parameters that the steps have made."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    x, y = torch.randn(6, 3).double(), torch.randn(6, 1).double()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}

    def final_loss(lam):
        params = {name: p.clone() for name, p in start.items()}
        opt = optimizer(list(params.values()), lr=lam, differentiable=True)
        for _ in range(10):
            # A step writes in place: what its gradient needs is read from copies.
            now = {name: p.clone().requires_grad_() for name, p in params.items()}
            loss = (functional_call(model, now, (x,)) - y).square().mean()
            grads = torch.autograd.grad(loss, list(now.values()), create_graph=True)
            for p, g in zip(params.values(), grads, strict=True):
                p.grad = g
            opt.step()
        return (functional_call(model, params, (x,)) - y).square().mean()

    lam = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(final_loss(lam), lam)
    with torch.enable_grad():
        up, down = final_loss(lam.detach() + 1e-5), final_loss(lam.detach() - 1e-5)
    expected = ((up - down) / 2e-5).detach()
    torch.testing.assert_close(slope, expected, rtol=1e-5, atol=1e-8)
