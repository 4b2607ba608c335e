"""The norm of a parameter's neurons before its first step, where λ is in units of that.

Weights that were trained before are changed in proportion to their size: a step of length ρ times
the norm that a neuron has on the average. What starts at zero, such as B of LoRA, has no norm to be
in proportion to; it takes that of a neuron as torch starts it, 1/√3. What is nearly zero must not
be stuck there, so no norm is taken for less than 1/10.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wngrad.muon_numbers import FRESH, LEAST
from wngrad.optim import blocks, sharded


@torch.no_grad()
def norm(p: Tensor, neurons: int) -> Tensor:
    """√(‖p‖²/neurons), at least 0.1, or 1/√3 where that is 0; over all ranks of a shard."""
    part = sharded.local(p.detach())
    wide = blocks.accumulator(part.device)
    values = torch.view_as_real(part) if part.is_complex() else part
    total: Tensor = torch.linalg.vector_norm(values, dtype=wide).square()
    if sharded.is_sharded(p):
        dims = [dim for dim, _ in sharded.cut_by(p)]
        total = sharded.sum_over_ranks(total, sharded.groups(p, dims))
    mean = (total / max(1, neurons)).sqrt()
    return torch.where(mean == 0, FRESH, mean.clamp(min=LEAST)).to(torch.float32)
