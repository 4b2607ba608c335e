"""Factors of λ over a training."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def factor(schedule: Schedule, step: int, total: int, warmup: float) -> float:
    """What λ is multiplied with at a step, counted from 0.

    Args:
        warmup: the share of all steps in which λ rises linearly; then it stays, or falls to 0
            linearly or as half a cosine.

    >>> [round(factor("linear", k, 10, 0.2), 2) for k in range(10)]
    [0.5, 1.0, 1.0, 0.88, 0.75, 0.62, 0.5, 0.38, 0.25, 0.12]
    """
    rising = math.ceil(warmup * total)
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(total - rising, 1)
    if schedule == "linear":
        return 1 - done
    return (1 + math.cos(math.pi * done)) / 2 if schedule == "cosine" else 1.0
