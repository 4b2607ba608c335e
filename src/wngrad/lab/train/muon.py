"""Muon as people use it: hidden matrices by Muon, everything else by AdamW, at one λ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wngrad.optim import matrix_groups


class MuonAdamW(Optimizer):
    """`torch.optim.Muon` for the matrices of hidden layers, AdamW for the rest.

    Muon's step is scaled to the size of AdamW's (`adjust_lr_fn="match_rms_adamw"`), so that both
    take the same λ. Embeddings and the last layer's weight are AdamW's, as Muon's author advises;
    so are convolutions, which `torch.optim.Muon` does not take.

    Args:
        model: says what each parameter is (see `matrix_groups`); the last `Linear` in it is taken
            for the output layer.
        lr: λ of both.
        weight_decay: of both.
        momentum: Muon's.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
    ) -> None:
        matrices, others = _split(model)
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self.members: list[Optimizer] = []
        if matrices:
            adjusted: dict[str, Any] = {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
            self.members.append(torch.optim.Muon(matrices, **shared, **adjusted))
        if others:
            self.members.append(torch.optim.AdamW(others, **shared))
        super().__init__([*matrices, *others], shared)
        # The groups of the members themselves: schedules change λ there.
        self.param_groups = [group for each in self.members for group in each.param_groups]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for each in self.members:
            each.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"members": [each.state_dict() for each in self.members]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for each, saved in zip(self.members, state_dict["members"], strict=True):
            each.load_state_dict(saved)
        self.param_groups = [group for each in self.members for group in each.param_groups]


def _split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of hidden layers, and all other parameters that are trained."""
    groups = [group for group in matrix_groups(model) if group["role"] == "matrix"]
    last = [layer.weight for layer in model.modules() if isinstance(layer, nn.Linear)][-1:]
    flat = {id(p) for group in groups for p in group["params"] if p.ndim == 2}
    hidden = flat - {id(p) for p in last}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if id(p) in hidden]
    return matrices, [p for p in trained if id(p) not in hidden]
