"""WNMuon(finetune=True): steps in units of each parameter's norm before its first step."""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from conftest import same, same_state
from wngrad import WNMuon, matrix_groups, rate_metrics, step_in_backward
from wngrad.muon_numbers import FRESH, LEAST

FUSED = pytest.mark.parametrize("fused", [None, False], ids=["fused", "plain"])


def network(scale: float = 1.0) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model


def give(model: nn.Module, seed: int) -> None:
    """Gradients that do not depend on the weights."""
    rng = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=rng).to(p.dtype)


def trained(model: nn.Module, opt: WNMuon, steps: int, first: int = 0) -> WNMuon:
    for seed in range(first, first + steps):
        give(model, seed)
        opt.step()
    return opt


def row_norm(p: torch.Tensor) -> float:
    return float((p.detach().double().square().sum() / p.shape[0]).sqrt())


# --------------------------------------------------------------------------------- the rule


@FUSED
def test_the_rates_are_those_of_wnmuon_times_the_norm_of_a_row(fused):
    ours, theirs = network(), network()
    norms = [max(row_norm(p), LEAST) for p in ours.parameters()]
    relative = trained(ours, WNMuon(ours, finetune=True, fused=fused), 5)
    plain = trained(theirs, WNMuon(theirs, fused=fused), 5)
    pairs = zip(ours.parameters(), theirs.parameters(), norms, strict=True)
    for p, q, norm in pairs:
        assert torch.equal(relative.state[p]["b"], plain.state[q]["b"])
        assert float(relative.state[p]["norm"]) == pytest.approx(norm, rel=1e-6)
        torch.testing.assert_close(relative.rates()[p], norm * plain.rates()[q])


@FUSED
def test_weights_twice_as_large_move_twice_as_far(fused):
    """And so stay twice as large, bit for bit: nothing depends on the unit of the weights."""
    small, large = network(4.0), network(8.0)
    settings = {"finetune": True, "fused": fused, "weight_decay": 0.0}
    trained(small, WNMuon(small, **settings), 4)
    trained(large, WNMuon(large, **settings), 4)
    for p, q in zip(small.parameters(), large.parameters(), strict=True):
        assert torch.equal(2 * p, q)


def test_a_step_is_no_longer_than_rho_times_the_norm_over_c():
    model = network()
    before = [p.detach().clone() for p in model.parameters()]
    trained(model, WNMuon(model, finetune=True, weight_decay=0.0), 1)
    for p, old in zip(model.parameters(), before, strict=True):
        if p.dim() > 1:
            most = 1.15 * max(1, math.sqrt(p.shape[0] / p.shape[1])) * 0.3 / 10
            assert (p - old).norm(dim=1).max() <= most * max(row_norm(old), LEAST)


def test_what_starts_at_zero_takes_the_norm_of_a_fresh_neuron():
    model = network(0.0)
    opt = trained(model, WNMuon(model, finetune=True), 1)
    assert {round(float(its["norm"]), 6) for its in opt.state.values()} == {round(FRESH, 6)}
    fresh = nn.Linear(1000, 1000, bias=False).weight
    assert row_norm(fresh) == pytest.approx(FRESH, rel=1e-2)


def test_what_is_nearly_zero_is_not_stuck_there():
    model = network(1e-9)
    before = copy.deepcopy(model)
    opt = trained(model, WNMuon(model, finetune=True), 1)
    assert {float(its["norm"]) for its in opt.state.values()} == {float(torch.tensor(LEAST))}
    assert all(
        (p - q).norm() > 1e-4 for p, q in zip(model.parameters(), before.parameters(), strict=True)
    )


@pytest.mark.parametrize("per", ["neuron", "tensor", "slice"])
def test_the_norm_is_of_a_neuron_whoever_shares_a_rate(per):
    model = network()
    expected = row_norm(model[0].weight)
    opt = trained(model, WNMuon(model, finetune=True, per=per), 1)
    assert float(opt.state[model[0].weight]["norm"]) == pytest.approx(expected)


def test_packed_matrices_and_convolutions_count_all_their_rows():
    model = nn.ModuleDict({"conv": nn.Conv2d(4, 6, 3, groups=2), "rnn": nn.LSTM(3, 5)})
    model["up"] = nn.ConvTranspose2d(4, 6, 3, groups=2)
    norms = {p: float(p.detach().norm()) for p in model.parameters()}
    opt = trained(model, WNMuon(model, finetune=True), 1)
    rows = {model["conv"].weight: 6, model["rnn"].weight_ih_l0: 20, model["up"].weight: 6}
    for p, count in rows.items():
        assert float(opt.state[p]["norm"]) == pytest.approx(norms[p] / math.sqrt(count))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_norm_is_kept_in_float32_whatever_the_weights_are(dtype):
    model = network().to(dtype)
    expected = row_norm(model[0].weight)
    opt = trained(model, WNMuon(model, finetune=True), 2)
    norm = opt.state[model[0].weight]["norm"]
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(expected, rel=1e-6)


# ------------------------------------------------------------------- lr, groups, schedulers


def lora() -> tuple[nn.Module, list[nn.Parameter], list[nn.Parameter]]:
    """Two layers' A, and their B, which start at zero."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in [(8, 2), (2, 8)] * 2))
    a, b = [model[0].weight, model[2].weight], [model[1].weight, model[3].weight]
    for p in b:
        nn.init.zeros_(p)
    return model, a, b


@FUSED
def test_lora_plus_moves_every_b_sixteen_times_as_far_to_the_bit(fused):
    def moved(ratio: float) -> list[torch.Tensor]:
        model, a, b = lora()
        before = [p.detach().clone() for p in (*a, *b)]
        groups = [{"params": a}, {"params": b, "lr": 0.3 * ratio}]
        opt = WNMuon(groups, finetune=True, fused=fused, weight_decay=0.0, lr=0.3)
        trained(model, opt, 1)
        return [p - old for p, old in zip((*a, *b), before, strict=True)]

    one, plus = moved(1.0), moved(16.0)
    assert all(map(torch.equal, one[:2], plus[:2]))
    assert all(torch.equal(16 * x, y) for x, y in zip(one[2:], plus[2:], strict=True))
    assert all(x.abs().max() > 0 for x in one)


def test_ratios_between_groups_are_those_of_their_rates():
    model, a, b = lora()
    groups = [{"params": a, "lr": 0.25}, {"params": b, "lr": 4.0}]
    opt = trained(model, WNMuon(groups, finetune=True), 3)
    for p, q in zip(a, b, strict=True):
        units = opt.state[p]["norm"] / opt.state[p]["b"], opt.state[q]["norm"] / opt.state[q]["b"]
        assert torch.equal(opt.rates()[p], 0.25 * units[0])
        assert torch.equal(opt.rates()[q], 4.0 * units[1])


def test_one_network_beside_another_does_not_change_it():
    """Rates are local: an adapter learns the same alone and beside one with larger gradients."""
    alone, pair, loud = network(), network(), network(30.0)
    trained(alone, WNMuon(alone, finetune=True), 5)
    opt = WNMuon([*matrix_groups(pair), *matrix_groups(loud)], finetune=True)
    for seed in range(5):
        give(pair, seed)
        give(loud, 100 + seed)
        for p in loud.parameters():
            p.grad.mul_(1e6)
        opt.step()
    assert same(alone, pair)


@FUSED
def test_a_schedule_turns_the_rate_and_not_the_norm(fused):
    model = network()
    opt = WNMuon(model, lr=0.5, finetune=True, fused=fused)
    schedule = lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
    trained(model, opt, 1)
    norms = {p: its["norm"].clone() for p, its in opt.state.items()}
    for k in range(1, 4):
        schedule.step()
        trained(model, opt, 1, first=k)
        for p, its in opt.state.items():
            assert torch.equal(its["norm"], norms[p])
            assert torch.equal(opt.rates()[p], 0.5 * 0.5**k * norms[p] / its["b"])


def test_a_tensor_rate_is_multiplied_as_a_number_is():
    number, tensor = network(), network()
    trained(number, WNMuon(number, lr=0.25, finetune=True, fused=False), 3)
    trained(tensor, WNMuon(tensor, lr=torch.tensor(0.25), finetune=True, fused=False), 3)
    assert same(number, tensor)


def test_groups_may_differ():
    model = network()
    groups = [{**group, "finetune": group["role"] == "matrix"} for group in matrix_groups(model)]
    opt = trained(model, WNMuon(groups), 1)
    assert ["norm" in opt.state[p] for p in model.parameters()] == [True, False, True, False]


def test_metrics_show_the_rates_that_are_used():
    model = network()
    opt = trained(model, WNMuon(model, finetune=True), 1)
    rates = [opt.rates()[p] for p in opt.param_groups[0]["params"]]
    told = rate_metrics(opt)
    assert told["wngrad/matrices/rate_max"] == pytest.approx(max(r.max().item() for r in rates))


# ------------------------------------------------------------------------- state and resume


@FUSED
def test_a_resumed_run_keeps_the_norms_it_began_with(fused):
    whole = network()
    opt = trained(whole, WNMuon(whole, finetune=True, fused=fused), 4)
    half = network()
    saved = trained(half, WNMuon(half, finetune=True, fused=fused), 2)
    file = io.BytesIO()
    torch.save({"model": half.state_dict(), "opt": saved.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    again = network(7.0)
    other = WNMuon(again, finetune=True, fused=fused)
    trained(again, other, 1)  # of other weights, with norms of their own
    again.load_state_dict(state["model"])
    other.load_state_dict(state["opt"])
    trained(again, other, 2, first=2)
    assert same(whole, again)
    assert same_state(opt, other)


def test_a_loaders_dummy_step_changes_nothing_and_its_norms_give_way():
    model = network()
    opt = trained(model, WNMuon(model, finetune=True), 2)
    empty = network(5.0)
    other = WNMuon(empty, finetune=True, lr=0.0)
    for p in empty.parameters():
        p.grad = torch.zeros_like(p)
    other.step()
    assert same(empty, network(5.0))
    other.load_state_dict(opt.state_dict())
    empty.load_state_dict(model.state_dict())
    trained(model, opt, 1, first=9)
    trained(empty, other, 1, first=9)
    assert same(model, empty)


def test_weights_that_are_loaded_after_the_optimizer_was_made_count():
    model = network()
    opt = WNMuon(model, finetune=True)
    model.load_state_dict(network(3.0).state_dict())
    trained(model, opt, 1)
    assert float(opt.state[model[0].weight]["norm"]) == pytest.approx(
        row_norm(network(3.0)[0].weight)
    )


def test_a_checkpoint_from_before_there_was_the_setting_loads():
    model = network()
    opt = trained(model, WNMuon(model), 1)
    state = opt.state_dict()
    for group in state["param_groups"]:
        del group["finetune"]
    other = WNMuon(network())
    other.load_state_dict(state)
    trained(model, other, 1)
    assert not any("norm" in its for its in other.state.values())


def test_a_step_inside_backward_is_the_ordinary_step():
    def run(inside: bool) -> tuple[nn.Module, WNMuon]:
        model = network()
        opt = WNMuon(model, finetune=True)
        released = step_in_backward(opt) if inside else None
        for seed in range(3):
            opt.zero_grad()
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
            model(x).square().sum().backward()
            opt.step()
        if released:
            released.remove()
        return model, opt

    (one, opt), (other, inside) = run(False), run(True)
    assert same(one, other)
    assert same_state(opt, inside)


def test_copies_have_norms_of_their_own():
    model = network()
    opt = trained(model, WNMuon(model, finetune=True), 1)
    twin_model, twin = copy.deepcopy((model, opt))
    trained(model, opt, 1, first=1)
    trained(twin_model, twin, 1, first=1)
    assert same(model, twin_model)
    norms = [[its["norm"].data_ptr() for its in each.state.values()] for each in (opt, twin)]
    assert not set(norms[0]) & set(norms[1])


@pytest.mark.parametrize("value", [1, "yes", None])
def test_anything_but_true_or_false_is_refused(value):
    with pytest.raises(TypeError, match="WNMuon: `finetune` must be True or False"):
        WNMuon(network(), finetune=value)
