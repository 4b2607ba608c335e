"""Keep a checkpoint of this release: `python tests/keep.py`. The next releases must read it.

Writes tests/kept/VERSION.pt: for every optimizer of the table its state after three steps, the
network's weights then, and what both are two steps later.
"""

from __future__ import annotations

from pathlib import Path

import torch

import wngrad
from conftest import TABLE, flat_state, network, train

KEPT = Path(__file__).parent / "kept"


def kept() -> dict[str, dict[str, object]]:
    found: dict[str, dict[str, object]] = {}
    for row in TABLE:
        torch.manual_seed(0)
        model = network().double()
        opt = row(model.parameters())
        train(model, opt, 3)
        mine = {"model": model.state_dict(), "optimizer": opt.state_dict()}
        before = torch.utils._pytree.tree_map(
            lambda v: v.clone() if isinstance(v, torch.Tensor) else v, mine
        )
        train(model, opt, 2, first=3)
        after = [*(p.detach() for p in model.parameters()), *flat_state(opt)]
        found[row.name] = {**before, "after": after}
    return found


if __name__ == "__main__":
    KEPT.mkdir(exist_ok=True)
    path = KEPT / f"{wngrad.__version__}.pt"
    torch.save(kept(), path)
    print(f"Wrote {path}.")
