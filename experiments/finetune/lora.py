"""LoRA: a low-rank matrix beside every linear layer, trained in its place (Hu et al. 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


class LoRA(nn.Module):
    """y = W x + (α/r)·B A x, with W fixed, A drawn as `nn.Linear` draws its weights, and B = 0.

    Args:
        base: the layer, whose parameters are frozen.
        rank: r.
        alpha: α.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.scale = base.requires_grad_(False), alpha / rank
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.kaiming_uniform_(self.a.weight, a=math.sqrt(5))
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.scale * self.b(self.a(x))
        return y


def add_lora(model: nn.Module, rank: int, alpha: float) -> nn.Module:
    """Freeze the model, and put LoRA beside all of its linear layers; the same model.

    Example:
        >>> model = add_lora(nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2)), rank=2, alpha=2)
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['0.a.weight', '0.b.weight', '1.a.weight', '1.b.weight']
    """
    model.requires_grad_(False)
    layers = [(m, name) for m in model.modules() for name, part in m.named_children()
              if isinstance(part, nn.Linear)]  # fmt: skip
    for owner, name in layers:
        setattr(owner, name, LoRA(getattr(owner, name), rank, alpha))
    return model


def plus_groups(model: nn.Module, lr: float, ratio: float = 16.0) -> list[dict[str, object]]:
    """LoRA+: groups in which every B has `ratio` times the rate of its A (Hayou et al. 2024)."""
    layers = [part for part in model.modules() if isinstance(part, LoRA)]
    a: list[torch.Tensor] = [part.a.weight for part in layers]
    b: list[torch.Tensor] = [part.b.weight for part in layers]
    return [
        {"params": a, "lr": lr, "role": "matrix"},
        {"params": b, "lr": ratio * lr, "role": "matrix"},
    ]
