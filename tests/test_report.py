"""What an optimizer says of itself."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from conftest import network, train
from wngrad import WNGrad, neuron_groups


def stepped(grads, **options):
    p = nn.Parameter(torch.zeros_like(grads[0]))
    opt = WNGrad([p], **options)
    for g in grads:
        p.grad = g
        opt.step()
    return p, opt


def test_rates_are_lam_over_b(optimizer):
    model = network()
    opt = optimizer(model.parameters(), lr=0.5)
    assert opt.rates() == {}
    train(model, opt, 2)
    rates = opt.rates()
    assert set(rates) == set(model.parameters())
    for p, rate in rates.items():
        torch.testing.assert_close(rate, 0.5 * opt.state[p].get("norm", 1) / opt.state[p]["b"])


def test_rates_see_a_tensor_lr_and_no_b_yet():
    p, opt = stepped([torch.tensor([[0.0], [3.0]])], lr=torch.tensor([2.0]), b_init="gradient")
    assert opt.rates()[p].flatten().tolist() == pytest.approx([math.nan, 1 / 6], nan_ok=True)


def test_the_summary_is_min_median_and_max_of_a_group():
    _, opt = stepped([torch.tensor([1.0, 2.0, 3.0])])
    (summary,) = opt.rate_summary()
    assert isinstance(summary.median, torch.Tensor)
    assert summary.floats() == pytest.approx((1 / 10, 1 / 5, 1 / 2))


def test_the_summary_of_nothing_is_nan():
    opt = WNGrad([nn.Parameter(torch.ones(2))])
    assert all(math.isnan(x) for x in opt.rate_summary()[0].floats())
    _, opt = stepped([torch.tensor([0.0, 0.0])], b_init="gradient")
    assert all(math.isnan(x) for x in opt.rate_summary()[0].floats())
    _, opt = stepped([torch.tensor([0.0, 1.0])], b_init="gradient")
    assert opt.rate_summary()[0].floats() == (0.5, 0.5, 0.5)


def test_no_step_yet():
    opt = WNGrad([{"params": [nn.Parameter(torch.ones(2))], "name": "head"}])
    assert opt.diagnose() == ["group 0 (head): no step taken yet."]


def test_first_steps_that_were_too_large():
    grads = [torch.full((3,), 1e4)] + [torch.full((3,), 1e-3)] * 49
    _, opt = stepped(grads, lr=0.01)
    (line,) = opt.diagnose()
    assert "b has grown 10⁴-fold in 50 steps: the first steps were too large" in line


def test_a_lam_so_small_that_this_is_sgd():
    _, opt = stepped([torch.ones(3)] * 20, lr=1e-4)
    assert "b has not moved in 20 steps: λ is so small that this is plain SGD" in opt.diagnose()[0]


def test_a_healthy_run_says_how_far_b_has_come():
    _, opt = stepped([torch.ones(3)] * 12)
    assert opt.diagnose() == ["group 0: b has grown 5.2-fold in 12 steps."]


def test_blocks_without_b_nan_and_skips_are_told():
    _, opt = stepped([torch.tensor([1.0, 0.0])], b_init="gradient")
    assert "1 of 2 blocks have seen no gradient yet" in opt.diagnose()[0]
    _, opt = stepped([torch.tensor([1.0, 2.0])], b_init="gradient")
    assert "b lies between 2 and 4 after 1 steps" in opt.diagnose()[0]
    _, opt = stepped([torch.tensor([1.0, math.nan])])
    assert "1 of 2 blocks are NaN" in opt.diagnose()[0]
    _, opt = stepped([torch.tensor([1.0, math.nan])] * 3, nonfinite="skip")
    assert "3 blocks with gradients that were not finite have been skipped" in opt.diagnose()[0]
    assert opt.skipped() == 3


def test_held_vectors_are_not_blamed_on_lam():
    _, opt = stepped([torch.ones(3)] * 20, hold_1d=True)
    assert opt.diagnose() == ["group 0: no b that moves."]


@pytest.mark.parametrize("per", ["model", "neuron"])
def test_a_shared_block_is_counted_once(per):
    layer = nn.Linear(3, 2)
    opt = WNGrad(
        layer.parameters() if per == "model" else neuron_groups(layer), per=per, nonfinite="skip"
    )
    for p in layer.parameters():
        p.grad = torch.full_like(p, math.nan)
    opt.step()
    assert opt.skipped() == (1 if per == "model" else 2)


def test_a_skip_of_a_parameter_that_is_held_counts_too():
    p, held = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(3))
    opt = WNGrad([p, held], hold_1d=True, nonfinite="skip")
    p.grad, held.grad = torch.ones(2, 2), torch.tensor([1.0, torch.nan, torch.inf])
    opt.step()
    assert opt.skipped() == 2
