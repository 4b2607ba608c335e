"""Stochastic rounding to bfloat16: up or down at random, so that on average nothing is lost.

Rounding to the nearest loses every update smaller than half the distance between two bfloat16
numbers (1/256 of x). The random numbers are a hash of the element's place and the step, so a run
that is repeated or resumed rounds alike, and so do replicas on several ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 2**32 - 1


def rounded(x: Tensor, t: Tensor) -> Tensor:
    """float32 `x` as bfloat16, at step t."""
    place = torch.arange(x.numel(), device=x.device).view(x.shape)
    u = (place * 0x9E3779B1 + t.long() * 0x85EBCA77) & _MASK
    u = ((u ^ (u >> 16)) * 0x7FEB352D) & _MASK
    u = ((u ^ (u >> 15)) * 0x846CA68B) & _MASK
    u = u ^ (u >> 16)
    bits = x.contiguous().view(torch.int32).long() + (u & 0xFFFF)
    near = ((bits >> 16) << 16).to(torch.int32).view(torch.float32)
    return torch.where(torch.isfinite(x), near, x).to(torch.bfloat16)
