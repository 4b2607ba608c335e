"""Gradients under a `GradScaler`: scaled while a step reads them, unscaled after it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from wngrad.optim import lists, sharded

_NARROW = {torch.float16, torch.bfloat16}  # in which a scale need not be a number


@torch.no_grad()
def unscale(params: Iterable[Tensor], scale: Tensor) -> None:
    """Divide every gradient by the scale, in place, as torch's optimizers leave them.

    After the step, not before it: kernels divide in float32, where a float16 gradient that is
    written back would lose digits, and a step that is refused must change nothing. A kernel that
    wrote them on its way would save one reading, and miss the blocks that do not move.
    """
    grads = {id(p.grad): p.grad for p in params if p.grad is not None}
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for g in map(sharded.local, grads.values()):
        values = g._values() if g.is_sparse else g
        alike.setdefault((g.device, g.dtype), []).append(values)
    for (device, dtype), part in alike.items():
        divisor = scale.to(device, non_blocking=True).reshape(())
        if dtype in _NARROW:
            for g in part:
                g.copy_(g.float() / divisor)
        else:
            lists.div_(part, divisor)  # g ← g/scale
