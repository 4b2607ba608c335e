"""WN-Adam: Algorithm 4 of the paper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from wngrad import rule
from wngrad.optim import door
from wngrad.optim.base import BlockOptimizer
from wngrad.optim.blocks import Per, accumulator
from wngrad.optim.door import BInit, Nonfinite
from wngrad.optim.pieces import Family
from wngrad.optim.state import Group


class WNAdam(BlockOptimizer):
    """Adam's running mean under WNGrad's learning rate, one for every neuron (Alg. 4).

    ĝ_j ← β ĝ_{j-1} + (1−β) g,  b_j ← b_{j-1} + λ²‖g‖²/b_{j-1},  then
    x_j ← x_{j-1} − (λ/b_j)·ĝ_j/(1−βᵗ), with t = 1 at the first step. No ε, no second moment.

    Args:
        params: as for `WNGrad`, and so are all arguments but `beta`.
        lr: λ.
        beta: β of the running mean.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> opt = WNAdam(model.parameters())
        >>> model(torch.ones(1, 3)).square().sum().backward()
        >>> opt.step()
    """

    _buffer = "m"
    _fraction = "beta"
    _counts_blocks = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        *,
        beta: float = 0.9,
        weight_decay: float = 0.0,
        decoupled_weight_decay: bool = False,
        b_init: BInit = 1.0,
        per: Per = "neuron",
        hold_1d: bool = False,
        joint: bool = False,
        nonfinite: Nonfinite = "propagate",
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        stochastic_rounding: bool = False,
    ) -> None:
        settings: dict[str, Any] = {
            "lr": lr,
            "beta": beta,
            "weight_decay": weight_decay,
            "decoupled_weight_decay": decoupled_weight_decay,
            "b_init": b_init,
            "per": per,
            "hold_1d": hold_1d,
            "joint": joint,
            "nonfinite": nonfinite,
            "maximize": maximize,
            "differentiable": differentiable,
            "fused": fused,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, settings)

    def _checked(self, group: Group) -> Group:
        return {"beta": door.fraction(self._owner, "beta", group["beta"])}

    def _buffered(self, group: Group) -> bool:
        return True

    def _move(
        self, x: Tensor, g: Tensor, b: Tensor, buf: Tensor | None, t: Tensor, family: Family
    ) -> tuple[Tensor, Tensor | None]:
        assert buf is not None
        beta = family.group["beta"]
        m = rule.running_mean(buf, g, beta)  # ĝ_j ← β ĝ_{j-1} + (1−β) g
        unbiased = m * _share(beta, t, x.dtype)  # ĝ_j/(1−βᵗ)
        return rule.descend(x, unbiased / b, family.lam), m  # x_j ← x_{j-1} − (λ/b_j) ĝ_j/(1−βᵗ)

    def _move_in_place(
        self, p: Tensor, g: Tensor, b: Tensor, buf: Tensor | None, t: Tensor, family: Family
    ) -> None:
        assert buf is not None
        beta = family.group["beta"]
        buf.mul_(beta).add_(g, alpha=1 - beta)  # ĝ_j ← β ĝ_{j-1} + (1−β) g
        inv = _share(beta, t, p.dtype) / b
        p.addcmul_(buf, inv, value=-float(family.lam))  # x_j ← x_{j-1} − (λ/b_j) ĝ_j/(1−βᵗ)


def _share(beta: float, t: Tensor, dtype: torch.dtype) -> Tensor:
    """1/(1−βᵗ), found in float64: βᵗ may be close to 1. At t = 0 nothing is seen, and ĝ is 0."""
    seen: Tensor = rule.unbiased(1.0, beta, torch.clamp(t, min=1).to(accumulator(t.device)))
    return seen.to(dtype)
