"""The trainer: runs of one task, one after another, each with a real optimizer of its own.

The optimizer steps outside of the gradient's graph, or as a graph of its own where its row says
that it may.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from experiments.untuned.gradient import EAGER, Gradient, graph
from experiments.untuned.methods import Method
from experiments.untuned.tasks import Split, Task

POINTS = 40  # of a loss curve
STATISTICS = 50  # batches from which the statistics of batch normalization are estimated again
CHUNK = 1_000  # test examples at once
Captured = Literal["all", "gradient", "nothing"]


class CaptureError(RuntimeError):
    """An optimizer's step cannot become a CUDA graph."""


class Trainer:
    """A task on one device.

    Args:
        task: what is trained.
        device: "cpu" or "cuda".
        folder: where the data is.
        captured: what becomes a CUDA graph on CUDA: the gradient, and the optimizers' steps where
            their rows allow it; the gradient alone; or nothing.
    """

    def __init__(
        self, task: Task, device: str, folder: Path | None = None, *, captured: Captured = "all"
    ) -> None:
        self.task = task
        self.gradient = Gradient(task, device, folder, captured=captured != "nothing")
        self._captures_steps = self.gradient.captured and captured == "all"

    def run(self, method: Method, lam: float, seed: int, steps: int) -> dict[str, Any]:
        """Train once; what a record says of it, its key apart.

        Raises:
            CaptureError: nothing is wrong but that; a new process must run it with
                `captured="gradient"`.
        """
        begun, gradient = time.perf_counter(), self.gradient
        gradient.start(seed)
        draws = self.task.draws(len(gradient.split.train_x), steps, seed).to(gradient.device)
        opt = method.build(gradient.model, self.task, lam, steps)
        marks = _marks(steps)
        curve, step_ms, optimizer_ms = self._train(method, opt, draws, marks)
        whole = len(curve) == len(marks) - 1
        scores = self._evaluate(opt, draws) if whole else {"loss": math.nan, "accuracy": None}
        diverged = not math.isfinite(scores["loss"] or 0.0)
        return {
            **(dict.fromkeys(scores) if diverged else scores),
            "diverged": diverged,
            "curve": [[end, value] for end, value in zip(marks[1:], curve, strict=False)],
            "step_ms": _median(step_ms),
            "optimizer_ms": _median(optimizer_ms),
            "version": method.version,
            **gradient.facts,
            "seconds": round(time.perf_counter() - begun, 3),
        }

    def _train(
        self, method: Method, opt: Any, draws: Tensor, marks: list[int]
    ) -> tuple[list[float], list[float], list[float]]:
        """The mean loss of every window before the first that is not finite; two times of each."""
        gradient, step = self.gradient, self._stepper(method, opt, len(draws))
        places = [p.data_ptr() for p in gradient.params]
        curve, step_ms, optimizer_ms = [], [], []
        _switch(opt, "train")
        for first, last in pairwise(marks):
            begun = time.perf_counter()
            try:
                for t in range(first, last):
                    gradient.draw.copy_(draws[t])
                    gradient.backward()
                    if t == first:
                        optimizer_ms.append(self._timed(step, t))
                    else:
                        step(t)
            except CaptureError:
                raise
            except Exception:
                if math.isfinite(gradient.mean(1)):  # an optimizer may refuse what is not finite
                    raise
                break
            mean = gradient.mean(last - first)
            if not math.isfinite(mean):
                break
            curve.append(mean)
            step_ms.append(1e3 * (time.perf_counter() - begun) / (last - first))
        if places != [p.data_ptr() for p in gradient.params]:
            raise RuntimeError(f"untuned: {method.name} has replaced a parameter's memory.")
        return curve, step_ms, optimizer_ms

    def _stepper(self, method: Method, opt: Any, steps: int) -> Callable[[int], None]:
        """A function of the step's number that sets λ and lets the optimizer step."""
        moved = method.decays or method.warmup > 0
        groups = [(group, group["lr"]) for group in opt.param_groups] if moved else []
        replay: list[Callable[[], None]] = []

        def step(t: int) -> None:
            for group, lam in groups:
                group["lr"] = lam * method.factor(t, steps)
            if t == EAGER and method.captured and self._captures_steps:
                try:
                    replay.append(graph(opt.step))
                except Exception as error:
                    raise CaptureError(f"{type(error).__name__}: {error}") from error
            if replay:
                replay[0]()
            else:
                opt.step(lambda: self.gradient.loss)

        return step

    def _timed(self, step: Callable[[int], None], t: int) -> float:
        """Milliseconds of a step alone, from launch to end."""
        self.gradient.wait()
        begun = time.perf_counter()
        step(t)
        self.gradient.wait()
        return 1e3 * (time.perf_counter() - begun)

    def _evaluate(self, opt: Any, draws: Tensor) -> dict[str, float | None]:
        """Test loss and accuracy, at the point where the optimizer is meant to be evaluated."""
        gradient, model = self.gradient, self.gradient.model
        model.eval()
        with torch.no_grad(), gradient.precision(), self._at_evaluation(opt, draws):
            model.eval()
            return self._scores()

    def _scores(self) -> dict[str, float | None]:
        """What the network reaches as it is now."""
        loss, accuracy = self.score(self.gradient.split)
        return {"loss": loss, "accuracy": accuracy}

    def score(self, split: Split) -> tuple[float, float | None]:
        """The network's loss and accuracy on test data."""
        x, y, model = split.test_x, split.test_y, self.gradient.model
        size = self.task.batch if self.task.context else CHUNK
        loss, hits = 0.0, 0.0
        for inputs, target in zip(torch.split(x, size), torch.split(y, size), strict=True):
            output = model(inputs)
            loss += self.task.loss(output, target).item() * len(target)
            hits += (output.argmax(1) == target).float().mean().item() * len(target)
        return loss / len(y), None if self.task.context else hits / len(y)

    @contextmanager
    def _at_evaluation(self, opt: Any, draws: Tensor) -> Iterator[None]:
        """The average, where there is one; statistics of batches are estimated there anew."""
        model, split = self.gradient.model, self.gradient.split
        inputs = (self.task.examples(split, draw)[0] for draw in draws[-STATISTICS:])
        if any(group.get("average") is not None for group in opt.param_groups):
            with opt.averaged(model, batches=inputs) if self.task.batch_norm else opt.averaged():
                yield
            return
        if _switch(opt, "eval") and self.task.batch_norm:
            torch.optim.swa_utils.update_bn(inputs, model)
        yield


def _switch(opt: Any, mode: str) -> bool:
    """Call the optimizer's own `train` or `eval`; whether it has one."""
    switch = getattr(opt, mode, None)
    if switch is not None:
        switch()
    return switch is not None


def _marks(steps: int) -> list[int]:
    """The ends of the windows of a loss curve, from 0."""
    return sorted({round(k * steps / POINTS) for k in range(POINTS + 1)})


def _median(values: list[float]) -> float | None:
    """Of all windows but the first, which pays for warm-up."""
    return round(statistics.median(values[1:] or values), 4) if values else None
