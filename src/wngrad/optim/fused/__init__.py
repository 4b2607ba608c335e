"""Fused steps: kernels for CPU and CUDA that stand in for the plain step where they can."""

from __future__ import annotations

from torch import Tensor

from wngrad.optim.fused.eligibility import Stepper, insist, is_quietly_plain, why_never
from wngrad.optim.fused.engine import Engine
from wngrad.optim.settings import Settings

__all__ = ["Engine", "Reasons", "insist", "is_quietly_plain", "why_plain"]


class Reasons(dict[Tensor, str]):
    """Parameters that take the plain step, each with the reason; printed, a line for each."""

    def __repr__(self) -> str:
        if not self:
            return "every parameter takes the fused step"
        rows = [(f"{tuple(p.shape)} {str(p.dtype)[6:]}", reason) for p, reason in self.items()]
        width = max(len(what) for what, _ in rows)
        return "\n".join(f"{what:<{width}}  {reason}" for what, reason in rows)


def why_plain(optimizer: Stepper, settings: list[Settings], latest: dict[int, str]) -> Reasons:
    """Why parameters do not take the fused step: as the latest was taken, or as far as is known.

    Args:
        latest: the reasons of the latest step, by the parameters' ids.
    """
    pairs = zip(optimizer.param_groups, settings, strict=True)
    reasons = Reasons()
    for group, its in pairs:
        for p in group["params"]:
            never = why_never(optimizer, p, its)
            if reason := never if its.fused is False else latest.get(id(p)) or never:
                reasons[p] = reason
    return reasons
