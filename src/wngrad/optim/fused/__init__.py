"""Fused steps: kernels for CPU and CUDA that stand in for the plain step where they can."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wngrad.optim.fused.eligibility import insist, why_never
from wngrad.optim.fused.engine import Engine
from wngrad.optim.fused.snapshot import Scope
from wngrad.optim.settings import Settings

__all__ = ["Engine", "Reasons", "Scope", "insist", "why_never", "why_plain"]


class Reasons(dict[Tensor, str]):
    """Parameters that take the plain step, each with the reason; printed, a line for each."""

    def __repr__(self) -> str:
        if not self:
            return "every parameter takes the fused step"
        rows = [(f"{tuple(p.shape)} {str(p.dtype)[6:]}", reason) for p, reason in self.items()]
        width = max(len(what) for what, _ in rows)
        return "\n".join(f"{what:<{width}}  {reason}" for what, reason in rows)


def why_plain(optimizer: Any, settings: list[Settings], latest: dict[int, str]) -> Reasons:
    """Why parameters do not take the fused step: as the latest was taken, or as far as is known.

    Args:
        settings: of the optimizer's groups, checked.
        latest: the reasons of the latest step, by the parameters' ids.
    """
    reasons = Reasons()
    for group, checked in zip(optimizer.param_groups, settings, strict=True):
        for p in group["params"]:
            never = why_never(optimizer, p, checked)
            if reason := never if checked.fused is False else latest.get(id(p)) or never:
                reasons[p] = reason
    return reasons
