"""On a CUDA device: captured without flags, no host sync, the same numbers as on the CPU."""

from __future__ import annotations

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from conftest import backward, network, same, same_state, train, twins
from wngrad import WNAdam, WNGrad

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


# ------------------------------------------------------------------ the fused step


def give(model, seed):
    """Gradients drawn from `seed`, written where the old ones lie."""
    draw = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        g = torch.randn(p.shape, generator=draw).to(p)
        if p.grad is None:
            p.grad = g
        else:
            p.grad.copy_(g)


def fused_twins(optimizer):
    """The same network twice, its fused optimizer after one step, and its λ as a tensor."""
    found = []
    for model in twins():
        lr = torch.tensor(1.0, device="cuda")
        opt = optimizer(model.cuda().parameters(), lr=lr, fused=True)
        give(model, 99)
        opt.step()
        found.append((model, opt, lr))
    return found


def captured(opt, steps=1):
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(steps):
            opt.step()
    return graph


def assert_same(a, one, b, two):
    assert same(a, b)
    assert same_state(one, two)
    assert not one.why_plain()
    assert not two.why_plain()


def test_a_step_on_a_gpu_is_fused_unless_asked_otherwise(fused_optimizer):
    model = network().cuda()
    for fused, says in ((None, set()), (False, {"`fused` is False"})):
        opt = fused_optimizer(model.parameters(), fused=fused)
        assert set(opt.why_plain().values()) == says
        train(model, opt, 1)
        assert set(opt.why_plain().values()) == says


def test_a_fused_step_replays_bit_for_bit(fused_optimizer):
    """With other gradients and another λ in every replay."""
    (a, one, lam), (b, two, mu) = fused_twins(fused_optimizer)
    graph = captured(one)
    for k in range(10):
        for model, lr in ((a, lam), (b, mu)):
            give(model, k)
            lr.fill_(1.0 / (1 + k))
        graph.replay()
        two.step()
        assert_same(a, one, b, two)


def test_ten_fused_steps_fit_in_one_graph(fused_optimizer):
    (a, one, _), (b, two, _) = fused_twins(fused_optimizer)
    graph = captured(one, steps=10)
    for k in range(2):
        give(a, k)
        give(b, k)
        graph.replay()
        for _ in range(10):
            two.step()
        assert_same(a, one, b, two)


def test_a_step_outside_a_graph_leaves_its_replays_alone(fused_optimizer):
    """Its gradients lie elsewhere, and its λ is a number."""
    (a, one, lam), (b, two, mu) = fused_twins(fused_optimizer)
    held = [[p.grad for p in model.parameters()] for model in (a, b)]
    graph = captured(one)
    for k in range(4):
        for model, opt in ((a, one), (b, two)):
            model.zero_grad()
            give(model, 100 + k)
            opt.param_groups[0]["lr"] = 0.25
            opt.step()
        for model, grads in ((a, held[0]), (b, held[1])):
            for p, g in zip(model.parameters(), grads, strict=True):
                p.grad = g
            give(model, k)
        two.param_groups[0]["lr"] = mu
        graph.replay()
        two.step()
        assert_same(a, one, b, two)
    assert lam == mu


def test_a_fused_step_never_waits_though_gradients_move(fused_optimizer):
    """Nor if some are missing."""
    model = network().cuda()
    opt = fused_optimizer(model.parameters(), fused=True)
    train(model, opt, 2)
    held = []
    with no_host_sync():
        for k in range(40):
            for i, p in enumerate(model.parameters()):
                p.grad = None if k % 4 == 3 and i == 0 else torch.randn_like(p)
                held.append(p.grad)  # so that the next one lies elsewhere
            opt.param_groups[0]["lr"] = 1.0 / (1 + k)
            opt.step()
    torch.cuda.synchronize()
    assert not opt.why_plain()


def test_steps_are_issued_and_none_is_mixed_up_however_far_the_device_is_behind():
    """With more gradients than are sent at once, each of them elsewhere in every step."""
    params = [nn.Parameter(torch.zeros(2, device="cuda")) for _ in range(9000)]
    opt = WNGrad(params, lr=1.0, b_init=1e30, fused=True)  # moves by 1e-30 of the gradient
    sets = [torch.full((9000, 2), 2.0**k, device="cuda") for k in range(4)]
    grads = [list(some.unbind()) for some in sets]

    def step(k):
        for p, g in zip(params, grads[k], strict=True):
            p.grad = g
        opt.step()

    step(0)  # makes the plan
    torch.cuda.synchronize()
    torch.cuda._sleep(4_000_000_000)
    done = torch.cuda.Event()
    done.record()
    for k in (1, 2, 3):
        step(k)
    assert not done.query()  # The device has not begun with them.
    moved = torch.stack([p.detach() for p in params])
    torch.testing.assert_close(moved, torch.full_like(moved, -15e-30), rtol=1e-6, atol=0.0)


def test_hooks_of_triton_s_launches_are_called():
    """As its profiler needs."""
    import triton

    (a, one, _), _ = fused_twins(WNGrad)
    names = []

    def hook(about):
        names.append(about.get()["name"])

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        for k in range(3):
            give(a, k)
            one.step()
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    one.step()
    assert len(names) >= 3
    assert set(names) == {"step_tiles"}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (WNGrad, {}),
        (WNGrad, {"momentum": 0.9, "weight_decay": 0.1}),
        (WNGrad, {"per": "tensor"}),
        (WNGrad, {"per": "model", "b_init": "gradient"}),
        (WNGrad, {"nonfinite": "raise"}),
        (WNAdam, {"nonfinite": "skip"}),
    ],
    ids=str,
)
def test_a_fused_step_needs_no_memory_to_speak_of(make, options):
    """Less than 1 MB beside 64 MB of parameters, for its tables, too."""
    params = [nn.Parameter(torch.randn(2048, 2048, device="cuda")) for _ in range(4)]
    for p in params:
        p.grad = torch.randn_like(p)
    opt = make(params, fused=True, **options)
    opt.step()  # makes the state
    for gone in (False, True):  # as before, and with a plan to be made
        if gone:
            params[0].grad = None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        opt.step()
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before < 2**20
    assert not opt.why_plain()


def test_a_grad_scaler_works_end_to_end_and_waits_for_nothing(fused_optimizer):
    """Scaled by powers of two, the steps are those of an optimizer without a scaler, bit for bit;
    one with an inf is left out, and the scale goes down."""
    (a, one, _), (b, two, _) = fused_twins(fused_optimizer)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
    scaler.scale(torch.zeros((), device="cuda"))  # makes the scale
    scales = []
    for k, overflow in enumerate((False, True, False, False, False)):
        scales.append(scaler.get_scale())
        give(a, k)
        give(b, k)
        for p in a.parameters():
            p.grad.mul_(scales[-1])
        if overflow:
            a[0].weight.grad[0, 0, 0, 0] = torch.inf
        with no_host_sync():
            scaler.step(one)
            scaler.update()
        if not overflow:
            two.step()
        assert_same(a, one, b, two)
    assert scales == [2.0**10, 2.0**10, 2.0**9, 2.0**9, 2.0**10]


def test_a_rate_the_kernel_cannot_read_goes_the_plain_way():
    """With a scaler, too, under which the rule sees a λ in float64."""
    for scaled in (False, True):
        p = nn.Parameter(torch.randn(4, 3, device="cuda"))
        opt = WNGrad([p], lr=torch.tensor(0.5, dtype=torch.bfloat16, device="cuda"))
        if scaled:
            opt.grad_scale = torch.ones(1, device="cuda")
            opt.found_inf = torch.zeros(1, device="cuda")
        before = p.detach().clone()
        p.grad = torch.ones_like(p)
        opt.step()
        assert opt.why_plain() == {p: "`lr` is a tensor of type torch.bfloat16"}
        assert not torch.equal(p, before)


def test_tensors_without_memory_go_the_plain_way():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        p = nn.Parameter(torch.ones(3, 2, device="cuda"))
        p.grad = torch.ones(3, 2, device="cuda")
        opt = WNGrad([p], momentum=0.9)
        opt.step()
        assert list(opt.why_plain().values()) == ["it is fake, without memory"]
        assert opt.state[p]["b"].shape == (3, 1)
