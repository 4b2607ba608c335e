"""The trainer: also what is forgotten, the bytes of state, and the networks to start from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.finetune.methods import METHODS
from experiments.finetune.tasks import STARTS, FineTuning, head
from experiments.untuned import train
from experiments.untuned.methods import Method

RATE = 1e-3  # of AdamW in pre-training


class Folders(NamedTuple):
    """Where data is, and where pre-trained networks are."""

    data: Path | None
    starts: Path


class Trainer(train.Trainer):
    """A fine-tuning on one device; see `experiments.untuned.train.Trainer`."""

    task: FineTuning

    def __init__(
        self,
        task: FineTuning,
        device: str,
        folders: Folders,
        *,
        captured: train.Captured = "all",
    ) -> None:
        task = replace(task, starts=folders.starts)
        super().__init__(task, device, folders.data, captured=captured)
        self._first = None if task.first is None else task.first(folders.data).to(device)

    def _evaluate(self, opt: Any, draws: Tensor) -> dict[str, float | None]:
        return {**super()._evaluate(opt, draws), "state_bytes": state_bytes(opt)}

    def _scores(self) -> dict[str, float | None]:
        scores = super()._scores()
        if self._first is not None:
            scores["first_loss"], scores["first_accuracy"] = self.score(self._first)
        return scores

    def _stepper(self, method: Method, opt: Any, steps: int) -> Callable[[int], None]:
        """Steps of the head alone, if the task begins so, and then of all that is trained."""
        alone = self.task.head_only(steps)
        if not alone:
            return super()._stepper(method, opt, steps)
        step = super()._stepper(replace(method, captured=False), opt, steps)
        gradient, first = self.gradient, {id(p) for p in head(self.gradient.model)}
        rest = [p for p in gradient.params if id(p) not in first]

        def head_first(t: int) -> None:
            if t == alone:
                gradient.attach()
            for p in rest if t < alone else ():
                p.grad = None
            step(t)

        return head_first


def state_bytes(opt: Any) -> float:
    """The memory of an optimizer's state, of all its parts."""
    states = [part.state for part in getattr(opt, "_parts", [opt])]
    values = [value for state in states for its in state.values() for value in its.values()]
    return float(sum(v.numel() * v.element_size() for v in values if isinstance(v, Tensor)))


# ---------------------------------------------------------------------------- pre-training


def prepare(names: Iterable[str], folders: Folders, device: str, captured: Any) -> list[str]:
    """Pre-train the networks that are not there yet, each in its own process; their names."""
    missing = [n for n in dict.fromkeys(names) if not (folders.starts / f"{n}.pt").is_file()]
    folders.starts.mkdir(parents=True, exist_ok=True)
    context = get_context("spawn")
    processes = [
        context.Process(target=pretrain, args=(name, folders, device, captured)) for name in missing
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError("finetune: a network could not be pre-trained.")
    return missing


def pretrain(name: str, folders: Folders, device: str, captured: Any) -> None:
    """Train a network from scratch, and keep it and what it reaches on both data sets."""
    torch.set_num_threads(1)
    begun, task = time.perf_counter(), STARTS[name]
    trainer = Trainer(task, device, folders, captured=captured)
    record = trainer.run(METHODS["adamw"], RATE, 0, task.steps)
    if record["diverged"]:
        raise RuntimeError(f"finetune: {name} has diverged.")
    state = {key: value.cpu() for key, value in trainer.gradient.model.state_dict().items()}
    path = folders.starts / f"{name}.pt"
    (folders.starts / f"{name}.json").write_text(json.dumps({"task": name, **record}) + "\n")
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)
    print(f"{name}: loss {record['loss']:.4f}, {time.perf_counter() - begun:.1f} s", flush=True)
