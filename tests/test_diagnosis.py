"""What `diagnose` notices, and that it calls no healthy run sick."""

from __future__ import annotations

import math
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import nn

from conftest import from_the_docs, network, train
from wngrad import WNAdam, WNGrad, WNMuon, neuron_groups
from wngrad.optim.report import SmallRateWarning

SICK = ("the median hides", "nothing has been learned", "stuck", "rises", "too large", "not finite")


def stepped(grads, make=WNGrad, **options):
    p = nn.Parameter(torch.zeros_like(grads[0]))
    opt = make([p], **options)
    for g in grads:
        p.grad = g.clone()
        opt.step()
    return opt


def noise(n, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def trained(model, opt, steps):
    """The losses of a network on scikit-learn's digits."""
    x, y = (torch.tensor(a) for a in load_digits(return_X_y=True))
    draw = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        i = torch.randint(len(x), (64,), generator=draw)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x[i].float().view(-1, 1, 8, 8) / 16), y[i])
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return losses


# ----------------------------------------------------------------- whole runs on digits


def test_a_deep_cnn_at_chance_is_noticed():
    layers = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU()]
    for _ in range(5):
        layers += [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))
    opt = WNGrad(model.named_parameters(), momentum=0.9)
    loss, line = opt.diagnose(trained(model, opt, 120))
    assert "falls (" not in loss or "hardly falls (" in loss
    assert "ln 10 = 2.303 is the loss of guessing among 10 classes" in loss
    assert "smaller lr" in loss
    assert "has not moved in 120 steps (most of them in `0.weight`" in line


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_healthy_run_is_not_called_sick_early_or_late(make, grouped):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    opt = make(neuron_groups(model) if grouped else model.parameters())
    losses = trained(model, opt, 400)
    assert opt.diagnose(losses)[0].startswith("loss: falls (median ")
    assert opt.diagnose(losses[:40])[0].startswith("loss: falls (median ")
    for recent in (losses, losses[-100:], losses[-20:]):
        assert not [word for line in opt.diagnose(recent) for word in SICK if word in line]
    assert (
        "close to zero, as the loss of a run that has converged" in opt.diagnose(losses[-100:])[0]
    )


def test_every_optimizer_of_the_table_has_a_verdict_and_a_line_for_each_group(optimizer):
    model = network()
    opt = optimizer(model.parameters(), lr=0.5)
    assert opt.diagnose([2.0] * 20)[1:] == ["group 0: no step taken yet."]
    train(model, opt, 12)
    before = [p.clone() for p in model.parameters()]
    lines = opt.diagnose(deque([2.0] * 20))
    assert lines[0].startswith("loss: does not fall (median 2 in the first quarter of 20 losses")
    assert lines[1:] == opt.diagnose()
    assert "12 steps" in lines[1]
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters(), strict=True))


# ------------------------------------------------------------------------- runaways


@given(bad=st.integers(1, 4), more=st.integers(1, 9), steps=st.integers(1, 40))
def test_runaways_that_the_median_hides_are_counted(bad, more, steps):
    g = torch.full((bad + bad + more, 1), 0.1)
    g[:bad] = 1e3
    (line,) = stepped([g] + [0.1 * torch.ones_like(g)] * (steps - 1)).diagnose()
    n = g.numel()
    assert f"the median hides {bad} of {n} blocks" in line
    assert f"(in parameter 0 of shape ({n}, 1): {bad} of its {n})" in line
    expected = f"up to 1e+06-fold where directions of norm 1 explain {math.sqrt(2 * steps + 1):.3g}"
    assert expected in line


def test_the_parameter_with_most_runaways_is_named():
    model = nn.Sequential(nn.Linear(2, 6), nn.Linear(6, 5))
    opt = WNGrad(model.named_parameters())
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.1)
    model[0].weight.grad[:1] = model[1].weight.grad[:2] = 1e3
    opt.step()
    assert "3 of 22 blocks" in opt.diagnose()[0]
    assert "(most of them in `1.weight`: 2 of its 5)" in opt.diagnose()[0]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_unit_gradients_are_explained_whatever_lam_and_b1(scale):
    g = torch.zeros(3, 4)
    g[:, 0] = 1.0
    (line,) = stepped([g] * 300, lr=scale, b_init=scale).diagnose()
    assert line == "group 0: b has grown 24.6-fold in 300 steps."


def test_a_unit_direction_from_b1_of_ten_grows_as_the_reference_says():
    g = torch.full((4, 1), 7.0)
    opt = stepped([g] * 200, make=from_the_docs(), lr=1.0, b_init=10.0)
    assert opt.diagnose() == ["group 0: b has grown 2.24-fold in 200 steps."]
    assert math.sqrt(10**2 + 2 * 200) / 10 == pytest.approx(2.24, abs=0.01)


# ------------------------------------------------------------------ blocks that do not move


@given(
    dead=st.integers(1, 5),
    alive=st.integers(1, 6),
    steps=st.integers(10, 15),
    make=st.sampled_from([WNGrad, WNAdam]),
    b_init=st.sampled_from([0.1, 1.0, 3.0]),
)
def test_rows_without_any_gradient_are_counted(dead, alive, steps, make, b_init):
    g = torch.ones(dead + alive, 2)
    g[:dead] = 0
    (line,) = stepped([g] * steps, make, b_init=b_init).diagnose()
    n = dead + alive
    assert f"b of {dead} of {n} blocks has not moved in {steps} steps" in line
    assert f"(in parameter 0 of shape ({n}, 2): {dead} of its {n})" in line
    assert ("has grown by less than 0.1%" in line) == (2 * dead > n)


def test_ten_steps_are_needed_and_one_gradient_in_them_is_enough():
    g, none = torch.tensor([1.0, 0.0]), torch.zeros(2)
    assert "not moved" not in stepped([g] * 9).diagnose()[0]
    assert "1 of 2 blocks has not moved in 10 steps" in stepped([g] * 10).diagnose()[0]
    assert "not moved" not in stepped([torch.ones(2)] + [none] * 30).diagnose()[0]


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_a_block_that_was_skipped_is_not_called_dead(make):
    g = torch.tensor([1.0, math.nan, 0.0])
    (line,) = stepped([g] * 12, make, nonfinite="skip").diagnose()
    assert "12 blocks with gradients that were not finite have been skipped" in line
    assert "b of 1 of 3 blocks has not moved" in line


def test_blocks_that_wait_for_their_first_gradient_are_named():
    opt = stepped([torch.tensor([[1.0], [0.0], [0.0]])] * 12, b_init=("gradient", 2.0))
    line = "2 of 3 blocks have seen no gradient yet (in parameter 0 of shape (3, 1): 2 of its 3)"
    assert line in opt.diagnose()[0]


def test_shared_blocks_count_once_and_held_ones_not_at_all():
    layer = nn.Linear(3, 4)
    joint = WNGrad(neuron_groups(layer))
    held = WNGrad(layer.parameters(), hold_1d=True)
    for opt in (joint, held):
        for _ in range(10):
            for p in layer.parameters():
                p.grad = torch.ones_like(p)
                p.grad[0] = 0
            opt.step()
    assert "group 0 (Linear): b has grown" in joint.diagnose()[0]
    assert "b of 1 of 4 blocks has not moved" in joint.diagnose()[0]
    assert "b of 1 of 4 blocks has not moved" in held.diagnose()[0]


# ------------------------------------------------------------------------------- losses


def said(losses, classes=None):
    p = nn.Parameter(torch.ones(() if classes is None else (classes,)))
    return WNGrad([p]).diagnose(losses)[0]


@given(st.integers(20, 300), st.integers(0, 9), st.integers(-20, 20), st.booleans())
def test_a_loss_that_falls_by_ten_times_its_spread_falls_whatever_its_scale(n, seed, power, up):
    losses = 10 - torch.linspace(0, 1, n) + 0.1 * noise(n, seed).clamp(-2, 2)
    word = "rises (" if up else "falls ("
    assert said((losses.flip(0) if up else losses) * 2.0**power).startswith(f"loss: {word}")


@given(st.integers(0, 30))
def test_no_trend_is_read_from_noise_or_an_outlier(seed):
    losses = 2.3 + 0.03 * noise(200, seed)
    losses[0] = losses[1] = 1e6
    assert said(losses).startswith("loss: does not fall (")


def test_a_certain_fall_that_is_less_than_the_spread_hardly_falls():
    losses = 2.3 - 0.02 * torch.linspace(0, 1, 1000) + 0.03 * noise(1000)
    assert said(losses).startswith("loss: hardly falls (")


def test_what_a_flat_loss_may_mean():
    flat = [1.0 + 1e-3 * x for x in noise(40).tolist()]
    assert "either this is as low as it gets, or the run is stuck" in said(flat)
    assert "either" in said(flat, 10)
    assert "guessing" in said([2.5] * 40, 10)
    assert "guessing" not in said([2.6] * 40, 10) + said([2.2] * 40, 10) + said([0.01] * 40, 1)
    assert "ln 3 = 1.099 is the loss of guessing among 3 classes" in said([1.1] * 40, 3)
    assert "close to zero" in said(torch.exp(noise(40) - 3))
    assert "close to zero" in said([1.2e-7] * 40, 10)
    assert "close to zero" in said([0.0] * 20)
    assert "close to zero" not in said(noise(40))  # below zero: zero is no floor


def test_losses_that_are_few_or_not_finite():
    assert said([]) == "loss: too few to judge: 0 finite ones of at least 20."
    assert said([1.0] * 19) == "loss: too few to judge: 19 finite ones of at least 20."
    line = said([3.0] * 7 + [math.nan, math.inf])
    assert line.startswith("loss: 2 of 9 are not finite, the first at index 7")
    line = said([float(x) for x in range(40, 0, -1)] + [math.nan])
    assert line.endswith("; falls (median 35.5 in the first quarter of 40 losses, 5.5 in the last, "
                         "spread 3.7).")  # fmt: skip


def test_floats_and_tensors_are_read_alike():
    losses = (3 - noise(40).abs()).tolist()
    as_tensors = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in losses]
    mixed = [t if i % 2 else x for i, (x, t) in enumerate(zip(losses, as_tensors, strict=True))]
    assert said(losses) == said(as_tensors) == said(mixed) == said(torch.tensor(losses).double())
    assert "of 40 losses" in said(losses)


@pytest.mark.parametrize(
    ("losses", "error", "words"),
    [
        (["a"] * 20, TypeError, "`losses` must be a number, got 'a'"),
        ([torch.ones(2)] * 20, ValueError, r"got a tensor of shape \(2,\)"),
        ([torch.tensor(1j)], ValueError, "dtype torch.complex64"),
    ],
)
def test_what_is_not_a_loss_is_refused(losses, error, words):
    opt = WNGrad([nn.Parameter(torch.ones(2))])
    with pytest.raises(error, match=f"WNGrad: .*{words}"):
        opt.diagnose(losses)


# ------------------------------------------------------------------ a hint, given once


def small_steps(count, make=WNGrad, lr=0.001, **options):
    p = nn.Parameter(torch.ones(4, 3))
    opt = make([p], **({} if lr is None else {"lr": lr}), **options)
    for _ in range(count):
        p.grad = torch.full((4, 3), 0.1)
        opt.step()
    return opt


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("lr", [0.01, 0.001, torch.tensor(0.001)])
def test_a_rate_so_small_that_b_has_nothing_to_do_is_noticed_once(make, fused, lr):
    small_steps(100, make, lr, fused=fused)  # not yet
    with pytest.warns(SmallRateWarning, match=r"`lr` = 0.0.*start from lr=1.0") as warned:
        small_steps(300, make, lr, fused=fused)
    assert len(warned) == 1
    assert warned[0].filename == __file__


class Doubled(WNGrad):
    def __init__(self, params, lr=2.0, **settings):
        super().__init__(params, lr, **settings)


def test_the_hint_names_the_default_of_the_optimizer_itself():
    with pytest.warns(SmallRateWarning, match=r"start from lr=2.0, the default"):
        small_steps(101, Doubled, 0.001)


def test_with_momentum_the_hint_names_a_rate_that_trains():
    with pytest.warns(SmallRateWarning, match=r"start from lr=0.03, as momentum asks for"):
        small_steps(150, momentum=0.9)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 1.0},
        {"lr": 0.1},
        {"lr": 0.01, "momentum": 0.9},
        {"lr": 0.0},
        {"b_init": "gradient"},
        {"b_init": 1e-3},
    ],
    ids=str,
)
def test_no_hint_where_the_rate_is_not_small_or_b_grows(options):
    small_steps(150, **options)  # A warning would be an error.


@pytest.mark.parametrize("finetune", [False, True])
def test_a_trainers_rate_that_is_none_for_wnmuon_is_noticed_once(finetune):
    """Scripts that always pass `lr` hand it 1e-4, at which nothing would move."""
    with pytest.warns(SmallRateWarning, match=r"WNMuon: .* `lr` = 0.0001 .* use 0.3") as warned:
        small_steps(300, WNMuon, 1e-4, finetune=finetune)
    assert len(warned) == 1
    small_steps(150, WNMuon, 0.003, finetune=finetune)  # A warning would be an error.


def test_a_hint_is_given_only_where_its_sentence_is_true():
    """Neither WNMuon nor a sign descends along the gradient, however small λ is."""
    for lr in (0.0011, 0.01):
        small_steps(150, WNMuon, lr)  # A warning would be an error.
    small_steps(150, from_the_docs(), 0.001)


class Fixed(WNGrad):
    def __init__(self, params):
        super().__init__(params, 0.001)


class Passing(WNGrad):
    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)


class Required(WNGrad):
    def __init__(self, params, lr, **settings):
        super().__init__(params, lr, **settings)


class Small(WNGrad):
    def __init__(self, params, lr=0.001, **settings):
        super().__init__(params, lr, **settings)


@pytest.mark.parametrize("make", [Fixed, Passing, Required, Small])
def test_the_hint_names_no_default_where_the_signature_has_none_that_is_larger(make):
    with pytest.warns(SmallRateWarning, match=r"b has hardly grown.* start from a larger one, "):
        small_steps(101, make, None if make is Fixed else 0.001)


def test_no_hint_in_a_warm_up():
    p = nn.Parameter(torch.ones(4, 3))
    opt = WNGrad([p])
    warm_up = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: step / 1e5)
    for _ in range(150):
        p.grad = torch.full((4, 3), 0.1)
        opt.step()
        warm_up.step()


def test_relatives_have_taken_the_steps_of_the_one_that_has_taken_most():
    late, early = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    opt = WNGrad([late, early], joint=True)
    for k in range(12):
        early.grad = torch.ones(2)
        late.grad = torch.ones(2) if k >= 9 else None
        opt.step()
    (line,) = opt.diagnose()
    assert "in 12 steps" in line
