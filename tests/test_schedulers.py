"""Every scheduler torch has drives λ as it drives SGD's learning rate."""

from __future__ import annotations

import io

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from conftest import same, same_state
from wngrad import WNAdam, WNGrad

STEPS, START = 12, 0.5


def lam(step: int) -> float:
    return 0.9**step


# Each takes the optimizer; those with a cycle turn its momentum, or β, as well.
TABLE = {
    "LambdaLR": lambda opt: schedulers.LambdaLR(opt, lam),
    "MultiplicativeLR": lambda opt: schedulers.MultiplicativeLR(opt, lam),
    "StepLR": lambda opt: schedulers.StepLR(opt, 3, 0.5),
    "MultiStepLR": lambda opt: schedulers.MultiStepLR(opt, [2, 5, 6], 0.3),
    "ConstantLR": lambda opt: schedulers.ConstantLR(opt, 0.3, 4),
    "LinearLR": lambda opt: schedulers.LinearLR(opt, 0.1, 1.0, 5),
    "ExponentialLR": lambda opt: schedulers.ExponentialLR(opt, 0.8),
    "CosineAnnealingLR": lambda opt: schedulers.CosineAnnealingLR(opt, 8),  # to 0, and up
    "CosineAnnealingWarmRestarts": lambda opt: schedulers.CosineAnnealingWarmRestarts(opt, 3, 2),
    "PolynomialLR": lambda opt: schedulers.PolynomialLR(opt, 9, 2.0),  # 0 from step 9 on
    "OneCycleLR": lambda opt: schedulers.OneCycleLR(opt, 2.0, 13),
    "CyclicLR": lambda opt: schedulers.CyclicLR(opt, 0.1, 1.0, 4),
    "ReduceLROnPlateau": lambda opt: schedulers.ReduceLROnPlateau(opt, patience=2),
    "SequentialLR": lambda opt: schedulers.SequentialLR(
        opt, [schedulers.LinearLR(opt, 0.1, 1.0, 4), schedulers.CosineAnnealingLR(opt, 9)], [4]
    ),
    "ChainedScheduler": lambda opt: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(opt, 0.5, 3), schedulers.ExponentialLR(opt, 0.9)]
    ),
    "SWALR": lambda opt: SWALR(opt, 0.05, 6),
}


@pytest.fixture(params=TABLE)
def schedule(request):
    return TABLE[request.param]


@pytest.fixture(params=[WNGrad, WNAdam])
def make(request):
    return request.param


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def settings(opt):
    group = opt.param_groups[0]
    return {key: float(group[key]) for key in ("lr", "momentum") if key in group}


def train(net, opt, steps, schedule=None, by_hand=None):
    """A training loop; what λ and the momentum were in each step."""
    used = []
    for k in steps:
        draw = torch.Generator().manual_seed(k)
        opt.zero_grad()
        net(torch.randn(8, 3, generator=draw)).square().mean().backward()
        opt.param_groups[0].update(by_hand[k] if by_hand else {})
        used.append(settings(opt))
        opt.step()
        if isinstance(schedule, schedulers.ReduceLROnPlateau):
            schedule.step(1.0)
        elif schedule is not None:
            schedule.step()
    return used


def test_the_table_has_every_scheduler_of_torch():
    assert set(TABLE) - {"SWALR"} == set(schedulers.__all__) - {"LRScheduler"}


def test_lam_is_what_torch_gives_sgd(schedule, make):
    a, b = network(), network()
    opt, sgd = make(a.parameters(), lr=START), torch.optim.SGD(b.parameters(), lr=START)
    used = train(a, opt, range(STEPS), schedule(opt))
    expected = train(b, sgd, range(STEPS), schedule(sgd))
    assert [s["lr"] for s in used] == [s["lr"] for s in expected]
    assert len({s["lr"] for s in used}) > 1
    if make is WNGrad:
        assert used == expected  # the momentum too, which a cycle turns on as it does SGD's


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_schedule_is_lam_set_by_hand(schedule, make, as_tensor):
    """Bit for bit; a tensor λ is filled in place, in its own precision."""
    a, b = network(), network()
    start = torch.tensor(START, dtype=torch.float64) if as_tensor else START
    one, other = make(a.parameters(), lr=start), make(b.parameters(), lr=START)
    used = train(a, one, range(STEPS), schedule(one))
    by_hand = [{**s, "lr": torch.tensor(s["lr"], dtype=torch.float64)} for s in used]
    train(b, other, range(STEPS), by_hand=by_hand if as_tensor else used)
    assert same(a, b)
    assert same_state(one, other)
    assert torch.is_tensor(one.param_groups[0]["lr"]) == as_tensor


def test_optimizer_and_schedule_resume_from_a_file_bit_for_bit(schedule, make):
    a, b = network(), network()
    whole, first = make(a.parameters(), lr=START), make(b.parameters(), lr=START)
    train(a, whole, range(STEPS), schedule(whole))
    plan = schedule(first)
    train(b, first, range(5), plan)
    file = io.BytesIO()
    torch.save([b.state_dict(), first.state_dict(), plan.state_dict()], file)
    file.seek(0)
    c = network()
    second = make(c.parameters(), lr=START)
    plan = schedule(second)
    for part, saved in zip((c, second, plan), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(saved)
    train(c, second, range(5, STEPS), plan)
    assert same(a, c)
    assert same_state(whole, second)
    assert settings(whole) == settings(second)


def test_groups_have_schedules_of_their_own(make):
    net = network()
    opt = make([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.1}])
    plan = schedulers.LambdaLR(opt, [lambda k: 1.0, lam])
    train(net, opt, range(4), plan)
    assert [group["lr"] for group in opt.param_groups] == [1.0, 0.1 * lam(4)]


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("warmup", [10, 100])
def test_a_warm_up_is_harmless_with_momentum_and_b1_from_the_gradient(warmup, fused):
    """Loss 0.02 to 0.08 at a constant λ, by seed; 2 to 6 if the buffer kept the first λ's scale."""
    x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = WNGrad(net.parameters(), momentum=0.9, b_init="gradient", fused=fused)
    plan = schedulers.LambdaLR(opt, lambda step: min(1, (step + 1) / warmup))
    for _ in range(400):
        i = torch.randint(len(x), (64,))
        opt.zero_grad()
        nn.functional.cross_entropy(net(x[i].float() / 16), y[i]).backward()
        opt.step()
        plan.step()
    assert nn.functional.cross_entropy(net(x.float() / 16), y) < 0.3


@pytest.mark.parametrize("name", ["OneCycleLR", "CyclicLR"])
def test_a_cycle_turns_beta_as_it_turns_the_momentum_of_sgd(name):
    a, b = network(), network()
    opt, sgd = WNAdam(a.parameters(), beta=0.7), torch.optim.SGD(b.parameters(), lr=1.0)
    used = train(a, opt, range(STEPS), TABLE[name](opt))
    expected = train(b, sgd, range(STEPS), TABLE[name](sgd))
    assert [s["momentum"] for s in used] == [s["momentum"] for s in expected]
    assert len({s["momentum"] for s in used}) > 3
