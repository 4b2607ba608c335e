"""Part two of the fault table: N1 to N8, N13 (N2: test_differential.py, N6: test_door.py)."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from conftest import backward, flat_state, network, same, train, twins
from wngrad import WNAdam, WNGrad, rule

SETTINGS = [
    (WNGrad, {}),
    (WNGrad, {"momentum": 0.9, "weight_decay": 0.1}),
    (WNAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    (WNAdam, {"b_init": "gradient"}),
]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_n1_a_bad_gradient_shows_in_the_parameters_at_once(optimizer, bad):
    p = nn.Parameter(torch.ones(4, 3))
    opt = optimizer([p], nonfinite="propagate")
    p.grad = torch.ones(4, 3)
    p.grad[1, 2] = bad
    opt.step()
    assert p[1, 2].isnan()


@pytest.mark.parametrize(("make", "options"), SETTINGS)
@pytest.mark.parametrize("per", ["neuron", "slice", "tensor"])
def test_n1_skipped_blocks_stay_bit_identical(make, options, per):
    """1,000 blocks with a bad entry or more, among 12 settings; the good ones step as ever."""
    draw = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(8, 3, 2, generator=draw))
    q = nn.Parameter(p.detach().clone())
    opt = make([p], per=per, nonfinite="skip", **options)
    plain = make([q], per=per, **options)
    b_shape = {"neuron": (8, 1, 1), "slice": (8, 3, 1), "tensor": (1, 1, 1)}[per]
    skipped = 0
    while skipped < 1000 / 12:
        good = torch.randn(8, 3, 2, generator=draw)
        bad = torch.rand(b_shape, generator=draw) < 0.3
        q.data.copy_(p.data)  # The plain twin starts each step from the same place.
        for key, value in opt.state.get(p, {}).items():
            if key in plain.state.get(q, {}):
                plain.state[q][key].copy_(value)
        before = {k: v.clone() for k, v in opt.state.get(p, {}).items()} | {"p": p.detach().clone()}
        p.grad, q.grad = good.clone(), good.clone()
        values = torch.tensor([math.nan, math.inf, -math.inf])
        at = bad & (torch.rand(8, 3, 2, generator=draw) < 0.5)
        p.grad[at] = values[torch.randint(3, (int(at.sum()),), generator=draw)]
        bad = at.sum([i for i, n in enumerate(b_shape) if n == 1], keepdim=True) > 0
        opt.step()
        plain.step()
        skipped += int(bad.sum())
        after = dict(opt.state[p]) | {"p": p.detach()}
        for key in set(before) - {"t", "skipped"}:
            where = bad.expand_as(after[key])
            assert torch.equal(after[key][where], before[key][where])
        expected = torch.where(bad, before["p"], q.detach())
        assert torch.equal(p.detach(), expected)
    assert opt.skipped() == skipped


def test_n1_raise_changes_nothing(optimizer):
    a, b = twins()
    opt = optimizer(a.parameters(), nonfinite="raise")
    backward(a)
    a[4].bias.grad[1] = math.nan
    with pytest.raises(ValueError, match=r"`nonfinite` is 'raise'.*Nothing was changed"):
        opt.step()
    assert same(a, b)
    assert not opt.state
    a[4].bias.grad[1] = 0.0
    opt.step()
    plain = optimizer(b.parameters())
    backward(b)
    b[4].bias.grad[1] = 0.0
    plain.step()
    assert same(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 300.0, 65504.0])
@pytest.mark.parametrize("per", ["neuron", "tensor"])
def test_n3_large_low_precision_gradients(dtype, size, per):
    """b finite, and within 1e-3 of float64's after 20 steps."""
    p = nn.Parameter(torch.zeros(4, 100, dtype=dtype))
    q = nn.Parameter(torch.zeros(4, 100, dtype=torch.float64))
    one, other = WNGrad([p], per=per), WNGrad([q], per=per)
    for k in range(20):
        p.grad = torch.full_like(p, size / (1 + k))
        q.grad = p.grad.double()
        one.step()
        other.step()
    b, exact = one.state[p]["b"].double(), other.state[q]["b"]
    assert torch.isfinite(b).all()
    torch.testing.assert_close(b, exact, rtol=1e-3, atol=0)


def test_n3_no_finite_gradient_freezes_a_neuron_in_silence():
    """float32: where ‖g‖² would overflow b is still right; where b itself would, NaN shows."""
    p = nn.Parameter(torch.zeros(2, 2))
    opt = WNGrad([p], b_init=1e10)
    p.grad = torch.tensor([[1e20, 0.0], [1.0, 0.0]])
    opt.step()
    torch.testing.assert_close(opt.state[p]["b"].flatten(), torch.tensor([1e30, 1e10]))
    assert p.isfinite().all()
    p.grad = torch.tensor([[1e38, 0.0], [1.0, 0.0]])
    opt.step()
    assert opt.state[p]["b"].flatten().isfinite().tolist() == [False, True]
    assert p[0].isnan().all()
    assert p[1].isfinite().all()


def test_n3_a_gradient_too_large_for_b_is_skipped_or_refused():
    for nonfinite in ("skip", "raise"):
        p = nn.Parameter(torch.zeros(2, 2))
        opt = WNGrad([p], nonfinite=nonfinite)
        p.grad = torch.full((2, 2), 1e30)
        if nonfinite == "skip":
            opt.step()
            assert opt.skipped() == 2
            assert (opt.state[p]["b"] == 1).all()
        else:
            with pytest.raises(ValueError, match="too large"):
                opt.step()
            assert not opt.state
        assert (p == 0).all()


def next_b_float32(b: np.float32) -> np.float32:
    """As a step does it under a unit gradient: in float64, rounded to b's type."""
    return np.float32(rule.next_b(float(b), 1.0, 1.0))


def test_n4_long_runs_of_unit_gradients():
    """10⁶ steps in float32: b within 1e-3 of √(2k+1)."""
    b = np.float32(1)
    for _ in range(10**6):
        b = next_b_float32(b)
    assert b == pytest.approx(math.sqrt(2e6 + 1), rel=1e-3)


def test_n4_the_recursion_above_is_the_optimizers():
    p = nn.Parameter(torch.zeros(1))
    opt, b = WNGrad([p]), np.float32(1)
    for _ in range(1000):
        p.grad = torch.ones(1)
        opt.step()
        b = next_b_float32(b)
    assert opt.state[p]["b"].item() == b


def test_n4_float32_stops_growing_at_4096():
    """1/b is half a unit in the last place of b there: after 9.1 million unit gradients."""
    assert next_b_float32(np.float32(4096)) == 4096
    assert next_b_float32(np.float32(4095)) > 4095


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0.0, "denormal"])
def test_n5_zero_and_denormal_first_gradients_latch_nothing(optimizer, dtype, size):
    if size and optimizer.name.startswith(("sign", "wnmuon")):
        pytest.skip("a direction of unit size is no smaller for a small gradient")
    size = torch.finfo(dtype).tiny / 16 if size == "denormal" else size
    p = nn.Parameter(torch.randn(4, 3, dtype=dtype))
    before = p.detach().clone()
    opt = optimizer([p], weight_decay=0.0)
    for _ in range(100):
        p.grad = torch.full_like(p, size)
        opt.step()
    start = opt.param_groups[0]["b_init"]
    assert torch.equal(p, before)
    assert (opt.state[p]["b"] == (0.0 if isinstance(start, tuple) else start)).all()
    p.grad = torch.ones_like(p)
    opt.step()
    assert (p < before).all()


def test_n5_each_block_latches_at_its_own_first_gradient():
    p = nn.Parameter(torch.zeros(2, 2))
    opt = WNGrad([p], b_init="gradient")
    for g in ([[3.0, 4], [0, 0]], [[0, 0], [0, 2.0]], [[0.0, 0], [0, 0]]):
        p.grad = torch.tensor(g)
        opt.step()
    assert opt.state[p]["b"].flatten().tolist() == [10, 4]


def test_n7_a_layer_frozen_and_thawed_is_as_if_it_had_seen_only_its_own_steps(optimizer):
    p, q, other = (nn.Parameter(torch.ones(3, 2)) for _ in range(3))
    one, two = optimizer([{"params": [p]}, {"params": [other]}]), optimizer([q])
    for k in range(6):
        g = torch.full((3, 2), 1.0 + k)
        other.grad = g.clone()
        p.grad = None if k in (1, 2, 4) else g.clone()
        one.step()
        if p.grad is not None:
            q.grad = g.clone()
            two.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("where", ["grad", "b", "t", "buffer", "lr", "nonfinite", "leaf"])
def test_n8_a_step_that_raises_leaves_all_as_it_was(optimizer, where):
    model = network()
    opt = optimizer([{"params": [p]} for p in model.parameters()])
    train(model, opt, 2)
    opt.zero_grad()
    backward(model)
    last = list(model.parameters())[-1]
    if where == "grad":
        opt.param_groups[-1]["weight_decay"] = 0.1
        last.grad = last.grad.to_sparse()
    elif where == "buffer":
        opt.param_groups[-1]["momentum"] = 0.9
        buffer, *_ = opt.direction(opt.param_groups[-1], last).buffers
        opt.state[last][buffer] = torch.ones(77)
    elif where in ("b", "t"):
        opt.state[last][where] = torch.ones(77)
    elif where == "nonfinite":
        opt.param_groups[-1]["nonfinite"] = "skp"
    elif where == "leaf":
        opt.param_groups[-1]["differentiable"] = True
    else:
        opt.param_groups[-1]["lr"] = torch.ones(2)
    before, state = copy.deepcopy(model), [v.clone() for v in flat_state(opt)]
    with torch.no_grad():
        with pytest.raises((ValueError, TypeError)):
            opt.step()
        assert not torch.is_grad_enabled()
    with pytest.raises((ValueError, TypeError)):
        opt.step()
    assert torch.is_grad_enabled()
    assert same(model, before)
    assert all(torch.equal(x, y) for x, y in zip(state, flat_state(opt), strict=True))


GROWTH = """
import sys, torch
from wngrad import WNGrad, WNMuon

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

def train(make, steps):
    params = [torch.nn.Parameter(torch.randn(30, 40)) for _ in range(3)]
    opt = make(params)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
        opt.step()
        del params[0].grad
    return opt

torch.set_num_threads(1)
makes = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "wngrad": lambda ps: WNGrad(ps, momentum=0.9, lr=0.01),
    "wnmuon": WNMuon,
}
steps, make = int(sys.argv[1]), makes[sys.argv[2]]
train(make, 1000)
before = resident()
for _ in range(10):  # optimizers that are dropped, too
    train(make, steps // 10)
print(resident() - before)
"""


@pytest.mark.faults
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("name", ["wngrad", "wnmuon"])
def test_n13_memory_after_a_hundred_thousand_steps_with_new_gradients_is_that_of_sgd(name):
    def growth(which: str) -> int:
        words = [sys.executable, "-c", GROWTH, "100000", which]
        return int(subprocess.run(words, capture_output=True, text=True, check=True).stdout)

    assert growth(name) <= growth("sgd") + 4 * 2**20  # what an allocator may keep
