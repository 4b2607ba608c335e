"""What a training step of each optimizer costs: wall time, memory on CUDA, and its state."""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any, TypeAlias

import torch

from wngrad.lab.run.environment import Trained
from wngrad.lab.train.cuda_stats import StepMemory, synchronize
from wngrad.lab.train.data import Data
from wngrad.lab.train.evaluation import state_bytes
from wngrad.lab.train.programs import Lone, Run
from wngrad.lab.train.spec import Pack, Setting, Sweep

STEPS, SECONDS = 12, 1.0  # at most, of a run that is made to be measured
KEYS = ("step_seconds", "state_bytes", "peak_bytes")  # in the log
Costs: TypeAlias = tuple[float | None, int | None, int | None]


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
        costs = dict.fromkeys(names, (run.step_seconds, run.state_bytes, run.peak_bytes))
    return {"costs": {name: dict(zip(KEYS, cost, strict=True)) for name, cost in costs.items()}}


@lru_cache(maxsize=64)
def _alone(sweep: Sweep, name: str, data: Data, device: str) -> Costs:
    """The least seconds of a step, the bytes of the optimizer's state, and on CUDA the peak.

    The peak is that above what is there before: the lanes that have just trained, for one.
    """
    lam = sweep.default_lam(name) or min(sweep.lam)
    pack = Pack("pack-0000", (Setting(name, lam),), sweep.seeds[:1])
    try:
        memory, held = StepMemory(torch.device(device)), _allocated(device)
        run, least, until = Lone(sweep, pack, data, device), None, time.perf_counter() + SECONDS
        memory.begin()
        for _ in range(min(STEPS, run.steps)):
            began = time.perf_counter()
            run._train(1)
            synchronize(run.device)
            run.step += 1
            spent = time.perf_counter() - began
            least = spent if least is None else min(least, spent)
            if time.perf_counter() > until:
                break
        memory.end()
        peak = None if memory.peak is None else memory.peak - held
        return least, state_bytes(run.optimizers), peak
    except Exception:  # its own runs will say what is wrong with it
        return None, None, None


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated(device) if device.startswith("cuda") else 0
