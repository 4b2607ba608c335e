"""The ready-made loop: one network, DataLoaders, and whatever its task asks for.

What is drawn depends on the seed, the epoch and the number of the batch alone: a run that goes on
in the middle of an epoch reads the batches before again, and draws what it would have drawn.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from wngrad.lab.train.cuda_stats import StepMemory, synchronize
from wngrad.lab.train.evaluation import evaluation, state_bytes, to_train
from wngrad.lab.train.loader_task import LoaderTask
from wngrad.lab.train.naming import parse
from wngrad.lab.train.programs.run import Run
from wngrad.lab.train.schedules import factor
from wngrad.lab.train.seeding import seed_all
from wngrad.lab.train.spec import Pack, Sweep

STATISTICS = 50  # batches to take batch statistics from
EARLY = "early stop"


class LoopRun(Run):
    """One lane of a `LoaderTask`."""

    def __init__(
        self, sweep: Sweep, pack: Pack, task: LoaderTask, device: str | torch.device
    ) -> None:
        super().__init__(sweep, pack)
        (self.lane,) = pack.lanes
        self.task, self.device = task, torch.device(device)
        self.keeps_checkpoint = not task.epochs_fixed
        self.train, valid, test = task.data()
        self.sets = {"valid": valid, **({} if test is None else {"test": test})}
        self.steps, self.memory = task.steps_of(self.train), StepMemory(self.device)
        seed_all(self.lane.seed)
        self.model = task.model().to(self.device)
        self.params = [p for p in self.model.parameters() if p.requires_grad]
        decay = {"weight_decay": sweep.weight_decay} if sweep.weight_decay else {}
        self.opt = to_train(parse(self.lane.optimizer).build(self.model, self.lane.lam, **decay))
        self.rates = [group["lr"] for group in self.opt.param_groups]  # before any schedule
        self.total, self.taken = 0.0, 0  # of the losses of this epoch; their number
        self._batches: Iterator[Any] | None = None

    def advance(self, steps: int) -> None:
        if self.epoch == self.step == 0 and not self.start:
            self.start = self._test()
        if self._batches is None:
            self._batches = self._opened()
        for _ in range(min(steps, self.steps - self.step)):
            self.memory.begin()
            began = time.perf_counter()
            self._one_step(self._batches)
            synchronize(self.device)
            self.memory.end()
            self._note_time(time.perf_counter() - began)
        if self.step >= self.steps:
            self._end_epoch()

    def _one_step(self, batches: Iterator[Any]) -> None:
        window = list(self._window(batches))
        if not window:  # the loader was shorter than it said
            self.step = self.steps
            return
        at = factor(self.task.schedule, self._done(), self._all_steps(), self.task.warmup)
        for group, rate in zip(self.opt.param_groups, self.rates, strict=True):
            group["lr"] = rate * at
        self.model.train()
        ready = [self._gradient(window)]

        def closure() -> Tensor:
            """The loss, for those who need it; taken anew if asked again, as by LBFGS."""
            return ready.pop() if ready else self._gradient(window)

        self.total, self.taken = self.total + float(ready[0]), self.taken + 1
        self.opt.step(closure)
        self.step += 1

    def _gradient(self, window: list[tuple[int, Any]]) -> Tensor:
        """The mean loss of some batches, whose gradient the parameters then hold."""
        self.opt.zero_grad()
        losses = []
        for index, batch in window:
            seed_all(self.lane.seed, self.epoch, index, 1)  # for what a network draws, as dropout
            loss = self._loss(batch) / len(window)
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        if self.task.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.params, self.task.clip)
        return torch.stack(losses).sum()

    def _loss(self, batch: Any) -> Tensor:
        with self._autocast():
            output, target = self.task.output_and_target(self.model, batch)
            return self.task.loss_of(output, target)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=bool(self.task.autocast))

    # -------------------------------------------------------------------------------- data

    def _opened(self) -> Iterator[Any]:
        """The batches of this epoch, those that are done read and passed over."""
        seed_all(self.lane.seed, self.epoch)
        _reseed(self.train, self.epoch, int(torch.randint(2**62, ()).item()))
        batches = iter(self.train)
        for index in range(self.step * self.task.accumulate):
            seed_all(self.lane.seed, self.epoch, index, 0)
            next(batches)
        return batches

    def _window(self, batches: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        """The batches of a step with their numbers, on the device."""
        first = self.step * self.task.accumulate
        for index in range(first, first + self.task.accumulate):
            seed_all(self.lane.seed, self.epoch, index, 0)  # for augmentation in this process
            try:
                yield index, moved(next(batches), self.device)
            except StopIteration:
                return

    def _done(self) -> int:
        return self.epoch * self.steps + self.step

    def _all_steps(self) -> int:
        return self.sweep.epochs * self.steps

    # ------------------------------------------------------------------------------- tests

    def _end_epoch(self) -> None:
        self._batches = None
        train = self.total / max(self.taken, 1)
        for name, values in {"train_loss": [train], **self._test()}.items():
            self.curves.setdefault(name, []).append(values)
        self.epoch, self.step, self.total, self.taken = self.epoch + 1, 0, 0.0, 0
        self.state_bytes, self.peak_bytes = state_bytes([self.opt]), self.memory.peak
        self._stop_early()

    def _stop_early(self) -> None:
        """End at the best epoch, once it is `patience` epochs ago or all are done."""
        losses = [row[0] for row in self.curves["valid_loss"]]
        best = min(range(len(losses)), key=lambda k: (not math.isfinite(losses[k]), losses[k]))
        patience = self.task.patience
        if patience is None or (len(losses) - 1 - best < patience and not self.finished):
            return
        self.curves = {name: rows[: best + 1] for name, rows in self.curves.items()}
        self.ended = EARLY

    def _test(self) -> dict[str, list[float]]:
        seed_all(self.lane.seed, self.epoch, 2**32 - 1)
        for loader in (self.train, *self.sets.values()):
            _reseed(loader, self.epoch, torch.initial_seed())
        with evaluation(self.model, [self.opt], self._recompute):
            return {
                f"{part}_{name}": [value]
                for part, loader in self.sets.items()
                for name, value in self._means(loader).items()
            }

    def _means(self, loader: Iterable[Any]) -> dict[str, float]:
        """Over a set, its batches weighted by their size."""
        sums: dict[str, float] = {}
        count = 0
        for batch in loader:
            here = moved(batch, self.device)
            size = _size(here) or 1  # an object that holds no tensor we can see
            for name, value in self._measure(here).items():
                sums[name] = sums.get(name, 0.0) + size * value
            count += size
        if not count:
            raise ValueError("LoaderTask: `loaders` must give some batches to test on, got none.")
        return {name: value / count for name, value in sums.items()}

    def _measure(self, batch: Any) -> dict[str, float]:
        with self._autocast():
            output, target = self.task.output_and_target(self.model, batch)
            values = {"loss": float(self.task.loss_of(output, target))}
            if self.task.metric is not None and self.task.metric_key is not None:
                name = self.task.metric_key.partition("_")[2]
                values[name] = float(self.task.metric(output, target))
        return values

    def _recompute(self) -> None:
        """Take batch statistics of the weights to be tested, as schedule-free's README asks."""
        for index, batch in enumerate(self.train):
            if index == STATISTICS:
                return
            with self._autocast():
                self.task.output_and_target(self.model, moved(batch, self.device))

    def _note_time(self, seconds: float) -> None:
        if self._done() > 1:  # the first step also warms up
            self.step_seconds = min(seconds, self.step_seconds or math.inf)

    # ------------------------------------------------------------------------------- state

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "curves": self.curves,
            "start": self.start,
            "total": self.total,
            "taken": self.taken,
            "model": self.model.state_dict(),
            "optimizer": self.opt.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["optimizer"])
        self.curves = {name: list(rows) for name, rows in state["curves"].items()}
        for name in ("epoch", "step", "start", "total", "taken"):
            setattr(self, name, state[name])
        self._batches = None


def moved(batch: Any, device: torch.device) -> Any:
    """A batch with its tensors on a device."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: moved(value, device) for key, value in batch.items()}
    if hasattr(batch, "to"):  # a class of its own, as a batch of graphs or a packed sequence
        return batch.to(device)
    if isinstance(batch, (tuple, list)):
        values = [moved(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else values
    return batch


def _size(batch: Any) -> int:
    """How many examples a batch has: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else 1
    parts = batch.values() if isinstance(batch, Mapping) else batch
    for part in parts if isinstance(batch, (Mapping, tuple, list)) else ():
        if (size := _size(part)) > 0:
            return size
    return 0


def _reseed(loader: Any, epoch: int, seed: int) -> None:
    """Seed the generators that a loader has of its own, and tell its samplers the epoch."""
    for part in _parts(loader):
        if isinstance(generator := getattr(part, "generator", None), torch.Generator):
            generator.manual_seed(seed)
        if (set_epoch := getattr(part, "set_epoch", None)) is not None:
            set_epoch(epoch)


def _parts(loader: Any) -> list[Any]:
    """A loader, its samplers, and theirs, each once: a batch sampler draws from another."""
    parts, waiting = list[Any](), [loader]
    while waiting:
        part = waiting.pop()
        if part is None or any(part is each for each in parts):
            continue
        parts.append(part)
        waiting += [getattr(part, name, None) for name in ("sampler", "batch_sampler")]
    return parts
