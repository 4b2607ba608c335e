"""On a CUDA device: captured without flags, no host sync, the same numbers as on the CPU."""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch

from conftest import backward, network, train, twins

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@contextmanager
def no_host_sync():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_gpu_takes_the_steps_of_the_cpu(optimizer):
    """In float64, to the order of summation within a block and in the network."""
    a, b = (m.double() for m in twins())
    b.cuda()
    train(a, optimizer(a.parameters()), 5)
    train(b, optimizer(b.parameters()), 5)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q.cpu(), rtol=1e-9, atol=1e-9)


def test_a_step_never_waits_for_the_device(optimizer):
    """Nor do the reports, unless asked for numbers."""
    model = network().cuda()
    opt = optimizer(model.parameters())
    train(model, opt, 2)
    backward(model)
    with no_host_sync():
        opt.step()
        opt.rates()
        opt.rate_summary()


@pytest.mark.parametrize("tensor_lr", [False, True])
def test_a_captured_step_replays_as_it_would_have_run(optimizer, tensor_lr):
    """A CUDA graph without any flag; a tensor λ may change between replays."""
    model = network().cuda().double()
    lr = torch.tensor(1.0, device="cuda", dtype=torch.float64) if tensor_lr else 1.0
    opt = optimizer(model.parameters(), lr=lr)
    train(model, opt, 3)
    eager = copy.deepcopy(model)
    other = optimizer(eager.parameters(), lr=1.0)
    other.load_state_dict(opt.state_dict())
    opt.param_groups[0]["lr"] = lr
    other.param_groups[0]["lr"] = 1.0
    grads = [torch.randn_like(p) for p in model.parameters()]
    for p, q, g in zip(model.parameters(), eager.parameters(), grads, strict=True):
        p.grad, q.grad = g.clone(), g.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.step()
    for k in range(5):
        if tensor_lr:
            lr.fill_(1.0 / (1 + k))
            other.param_groups[0]["lr"] = 1.0 / (1 + k)
        graph.replay()
        other.step()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


def test_the_grad_scaler_skips_an_overflow(optimizer):
    model = network().cuda()
    opt = optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for overflow in (False, True):
        opt.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = model(torch.randn(8, 2, 4, 4, device="cuda")).square().mean()
        scaler.scale(loss).backward()
        if overflow:
            model[0].weight.grad[0, 0, 0, 0] = torch.inf
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(opt)
        scaler.update()
        after = list(model.parameters())
        unchanged = all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
        assert unchanged == overflow


def test_a_checkpoint_moves_between_devices(optimizer):
    model = network().cuda()
    opt = optimizer(model.parameters())
    train(model, opt, 2)
    saved = copy.deepcopy(opt.state_dict())
    for state in saved["state"].values():
        for key, value in state.items():
            state[key] = value.cpu()
    other = optimizer(model.parameters())
    other.load_state_dict(saved)
    for p in model.parameters():
        for key, value in other.state[p].items():
            assert value.is_cuda
            assert torch.equal(value, opt.state[p][key])
