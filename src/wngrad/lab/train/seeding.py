"""Every generator a training may draw from: torch's, NumPy's and Python's, seeded and saved."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_all(*key: int) -> None:
    """Seed them all with one number drawn from the key: a seed, an epoch, a step."""
    drawn = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])
    torch.manual_seed(drawn)  # CUDA's too
    random.seed(drawn)
    np.random.seed(drawn % 2**32)


def state() -> dict[str, Any]:
    """Where they all stand, as tensors and plain numbers."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "torch": torch.get_rng_state(),
        "cuda": cuda,
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
        "python": random.getstate(),
    }


def load(saved: dict[str, Any]) -> None:
    """Go on from a `state`."""
    torch.set_rng_state(saved["torch"])
    if saved["cuda"]:
        torch.cuda.set_rng_state_all(saved["cuda"])
    kind, keys, *rest = saved["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
