"""What a training step of each optimizer costs: its wall time, and what it keeps in memory."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

import torch

from wngrad.lab.run.environment import Trained
from wngrad.lab.train.data import Data
from wngrad.lab.train.evaluation import state_bytes
from wngrad.lab.train.programs import Lone, Run
from wngrad.lab.train.spec import Pack, Setting, Sweep

STEPS, SECONDS = 12, 1.0  # at most, of a run that is made to be measured


def measured(run: Run, sweep: Sweep, data: Trained, device: str) -> dict[str, Any]:
    """The costs of a finished pack, by optimizer, for the log of a task's sweep.

    A run on its own has measured itself. Lanes that train as one program have no time of their
    own: each of their optimizers takes some steps alone.
    """
    if not sweep.task:
        return {}
    names = dict.fromkeys(setting.optimizer for setting in run.pack.settings)
    if isinstance(data, Data):
        costs = {name: _alone(sweep, name, data, device) for name in names}
    else:
        costs = dict.fromkeys(names, (run.step_seconds, run.state_bytes))
    keys = ("step_seconds", "state_bytes")
    return {"costs": {name: dict(zip(keys, cost, strict=True)) for name, cost in costs.items()}}


@lru_cache(maxsize=64)
def _alone(sweep: Sweep, name: str, data: Data, device: str) -> tuple[float | None, int | None]:
    """The least seconds of a step, and the bytes of the optimizer's state."""
    lam = sweep.default_lam(name) or min(sweep.lam)
    pack = Pack("pack-0000", (Setting(name, lam),), sweep.seeds[:1])
    try:
        run, least, until = Lone(sweep, pack, data, device), None, time.perf_counter() + SECONDS
        for _ in range(min(STEPS, run.steps)):
            began = time.perf_counter()
            run._train(1)
            if run.device.type == "cuda":
                torch.cuda.synchronize()
            run.step += 1
            spent = time.perf_counter() - began
            least = spent if least is None else min(least, spent)
            if time.perf_counter() > until:
                break
        return least, state_bytes(run.optimizers)
    except Exception:  # its own runs will say what is wrong with it
        return None, None
