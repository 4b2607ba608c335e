"""Optimizers by the names that people type."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wngrad import WNMuon
from wngrad.lab.optimizers import NAMED
from wngrad.lab.train.muon import MuonAdamW
from wngrad.lab.train.naming import parse, split


@pytest.mark.parametrize(
    ("typed", "name", "settings"),
    [
        ("adamw", "adamw", {}),
        ("AdamW( weight_decay = 0.1 )", "adamw(weight_decay=0.1)", {"weight_decay": 0.1}),
        ("sgd(momentum=0.9, nesterov=True)", "sgd(momentum=0.9, nesterov=True)",
         {"momentum": 0.9, "nesterov": True}),
        ("torch.optim:AdamW(betas=(0.9, 0.95))", "torch.optim:AdamW(betas=(0.9, 0.95))",
         {"betas": (0.9, 0.95)}),
        ("Schedule-Free", "schedulefree", {}),
        ("WN_Adam", "wnadam", {}),
        ("sgd-momentum", "sgd-momentum", {"momentum": 0.9}),
    ],
)  # fmt: skip
def test_a_name_and_its_settings_have_one_spelling(typed, name, settings):
    choice = parse(typed)
    assert (choice.name, dict(choice.settings)) == (name, settings)
    assert parse(choice.name) == choice


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("admw", "Did you mean 'adamw'?"),
        ("prodgy", "Did you mean 'prodigy'?"),
        ("adamw(0.1)", "must be a name, or name(setting=value, …) with plain values"),
        ("adamw(weight_decay=x)", "with plain values"),
        ("adamw(lr=0.1)", "must leave `lr` to the sweep"),
        ("torch.optim:Adamw", "Did you mean 'AdamW'?"),
    ],
)
def test_what_is_no_optimizer_is_told_in_a_line(typed, said):
    with pytest.raises(ValueError, match="lab: `optimizer`") as error:
        parse(typed).function()
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("adamw(weight_decy=0.1)", "'weight_decy'. Did you mean 'weight_decay'?"),
        ("torch.optim:SGD(momentun=0.9)", "'momentun'. Did you mean 'momentum'?"),
        ("wngrad(eps=1e-8)", "'eps'."),
    ],
)
def test_a_setting_that_an_optimizer_does_not_have_is_told_before_anything_is_trained(typed, said):
    with pytest.raises(ValueError, match="has no setting") as error:
        parse(typed).function()
    assert str(error.value).endswith(f"has no setting {said}")


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "prodigyopt", None)
    with pytest.raises(ValueError, match="'prodigy' needs prodigyopt: pip install prodigyopt"):
        parse("prodigy").function()


def test_every_optimizer_of_torch_that_has_a_name_can_be_built_and_has_a_default():
    model = nn.Linear(3, 2)
    for name, row in NAMED.items():
        if not row.package:
            assert parse(name).default_lam() > 0, name
            assert parse(name).build(model, 0.01).param_groups[0]["lr"] == 0.01, name


def test_commas_in_parentheses_are_no_end():
    assert split("sgd,adamw(betas=(0.9, 0.99), eps=1), ,x:Y") == [
        "sgd", "adamw(betas=(0.9, 0.99), eps=1)", "x:Y"
    ]  # fmt: skip


def test_wnmuon_is_given_the_model_and_others_what_is_trained():
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
    model[1].bias.requires_grad_(False)
    opt = parse("wnmuon").build(model, 0.3)
    assert isinstance(opt, WNMuon)
    assert {group.get("role") for group in opt.param_groups} >= {"matrix", "embedding"}
    trained = parse("adamw(weight_decay=0.5)").build(model, 0.1, weight_decay=0.1, eps=1e-6)
    assert trained.param_groups[0]["params"] == [model[0].weight, model[1].weight]
    group = trained.param_groups[0]
    assert (group["weight_decay"], group["eps"]) == (0.5, 1e-6)  # the name comes first


def test_muon_moves_hidden_matrices_and_adamw_the_rest():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    twin = nn.Sequential(*[type(m)(*_sizes(m)) for m in model])
    twin.load_state_dict(model.state_dict())
    opt = MuonAdamW(model, lr=0.01)
    hidden = [twin[0].weight, twin[2].weight]
    rest = [p for p in twin.parameters() if all(p is not h for h in hidden)]
    both = [
        torch.optim.Muon(hidden, lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.01, weight_decay=0.1),
    ]
    for step in range(4):
        if step == 2:  # and a checkpoint between
            saved, opt = opt.state_dict(), MuonAdamW(model, lr=0.5)
            opt.load_state_dict(saved)
        x = torch.randn(8, 4)
        for net, opts in ((model, [opt]), (twin, both)):
            net.zero_grad()
            net(x).square().sum().backward()
            for each in opts:
                each.step()
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )


def _sizes(layer: nn.Module) -> tuple[int, ...]:
    return (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else ()
