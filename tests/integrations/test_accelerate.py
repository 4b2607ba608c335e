"""Hugging Face Accelerate."""

from __future__ import annotations

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from conftest import same, same_state
from wngrad import WNAdam, WNGrad, rate_metrics

MAKERS = {
    "wngrad": WNGrad,
    "wngrad-momentum": lambda params: WNGrad(params, momentum=0.9, nonfinite="skip"),
    "wnadam": lambda params: WNAdam(params, b_init="gradient"),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def loader(size=4):
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 3, generator=draw), torch.randint(2, (32,), generator=draw)
    return DataLoader(TensorDataset(x, y), batch_size=size)


def prepared(make, **options):
    accelerator = Accelerator(cpu=True, **options)
    net = network()
    opt = make(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    return accelerator, *accelerator.prepare(net, opt, loader(), schedule)


def train(accelerator, net, opt, batches, schedule, clip=None):
    for x, y in batches:
        with accelerator.accumulate(net):
            accelerator.backward(nn.functional.cross_entropy(net(x), y))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), clip)
            opt.step()
            schedule.step()
            opt.zero_grad()


def by_hand(make, size, clip=None):
    net = network()
    opt = make(net.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    for x, y in loader(size):
        opt.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        opt.step()
        schedule.step()
    return net, opt


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_prepared_loop_is_a_plain_loop(make, clip):
    accelerator, net, opt, batches, schedule = prepared(make)
    train(accelerator, net, opt, batches, schedule, clip)
    plain_net, plain_opt = by_hand(make, 4, clip)
    assert same(accelerator.unwrap_model(net), plain_net)
    assert same_state(opt.optimizer, plain_opt)
    assert rate_metrics(opt) == rate_metrics(plain_opt) != {}


def test_accumulated_gradients_make_one_step(make):
    """Two batches of four are one of eight, but for rounding."""
    accelerator, net, opt, batches, schedule = prepared(make, gradient_accumulation_steps=2)
    train(accelerator, net, opt, batches, schedule)
    plain_net, plain_opt = by_hand(make, 8)
    mine = accelerator.unwrap_model(net)
    for p, q in zip(mine.parameters(), plain_net.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        assert torch.equal(opt.optimizer.state[p]["t"], plain_opt.state[q]["t"])


def test_a_saved_state_goes_on_bit_for_bit(make, tmp_path):
    accelerator, net, opt, batches, schedule = prepared(make)
    train(accelerator, net, opt, batches, schedule)
    accelerator.save_state(str(tmp_path))
    train(accelerator, net, opt, batches, schedule)
    again, *others = prepared(make)
    with torch.no_grad():
        next(others[0].parameters()).zero_()
    again.load_state(str(tmp_path))
    train(again, *others)
    assert same(accelerator.unwrap_model(net), again.unwrap_model(others[0]))
    assert same_state(opt.optimizer, others[1].optimizer)
    assert schedule.get_last_lr() == others[3].get_last_lr()


def test_bfloat16_leaves_parameters_and_b_in_float32(make):
    accelerator, net, opt, batches, schedule = prepared(make, mixed_precision="bf16")
    x, _ = next(iter(batches))
    train(accelerator, net, opt, batches, schedule)
    mine = accelerator.unwrap_model(net, keep_fp32_wrapper=False)
    with accelerator.autocast():
        assert mine(x).dtype == torch.bfloat16
    assert {p.dtype for p in mine.parameters()} == {torch.float32}
    assert {s["b"].dtype for s in opt.optimizer.state.values()} == {torch.float32}
    assert not same(mine, network())
    plain_net, _ = by_hand(make, 4)
    for p, q in zip(mine.parameters(), plain_net.parameters(), strict=True):
        # Eight steps of gradients that have eight bits.
        torch.testing.assert_close(p, q, rtol=0.05, atol=0.05)
