"""Scripts that find an optimizer by a dotted path and always pass `lr`, as kohya's do.

Their convention: `module.Class` is imported, and called with groups that may hold an `lr` each,
with `lr=` and with whatever `key=value` the user has typed, read as Python's literals.
"""

from __future__ import annotations

import ast
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import nn


def from_script(path: str, groups: Any, lr: float, arguments: list[str]) -> Any:
    """As such a script makes its optimizer."""
    module, _, name = path.rpartition(".")
    pairs = [argument.split("=", 1) for argument in arguments]
    typed = {key: ast.literal_eval(value) for key, value in pairs}
    return getattr(import_module(module), name)(groups, lr=lr, **typed)


def groups() -> list[dict[str, Any]]:
    """Two networks' adapters, the text encoder at its own rate."""
    torch.manual_seed(0)
    unet, text = (nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 6)) for _ in range(2))
    return [{"params": list(unet.parameters())}, {"params": list(text.parameters()), "lr": 0.15}]


@pytest.mark.parametrize(
    "path", ["wngrad.WNMuon", "wngrad.optim.WNMuon", "wngrad.optim.wnmuon.WNMuon"]
)
def test_a_dotted_path_makes_the_optimizer_with_a_rate_for_each_network(path):
    typed = ["finetune=True", "weight_decay=0.01", "momentum=0.95", "average=None"]
    opt = from_script(path, groups(), 0.3, typed)
    assert [group["lr"] for group in opt.param_groups] == [0.3, 0.15]
    assert {(group["finetune"], group["weight_decay"]) for group in opt.param_groups} == {
        (True, 0.01)
    }
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    opt.step()
    assert all("norm" in its for its in opt.state.values())


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("betas=(0.9, 0.99)", "use `momentum`"),
        ("eps=1e-8", "leave it out, since b is never 0"),
        ("d_coef=2", "`d_coef` is not an argument, got 2"),
        ("use_bias_correction=True", "`use_bias_correction` is not an argument, got True"),
        ("decouple=True", "`decoupled_weight_decay`"),
        ("safeguard_warmup=True", "leave it out"),
        ("warmup_steps=100", "leave it out"),
    ],
)
def test_what_belongs_to_another_optimizer_is_a_clear_error(argument, says):
    name = argument.split("=")[0]
    with pytest.raises(TypeError, match=f"^WNMuon: `{name}` is not an argument") as raised:
        from_script("wngrad.WNMuon", groups(), 0.3, [argument])
    assert says in str(raised.value)
