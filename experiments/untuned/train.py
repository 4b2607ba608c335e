"""A trainer: one network that is trained again and again, on a GPU as a CUDA graph.

The graph holds a batch's gathering, the forward and the backward pass over memory that stays where
it is; a run copies its first weights in. The optimizer is the real class and steps outside of the
graph, or as a graph of its own where its row says that it may.
"""

from __future__ import annotations

import hashlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.untuned.methods import Method
from experiments.untuned.tasks import Split, Task
from wngrad.lab.run.environment import environment

POINTS = 40  # of a loss curve
EAGER = 3  # steps before a capture: state is made, kernels are compiled
STATISTICS = 50  # batches from which the statistics of batch normalization are estimated again
CHUNK = 1_000  # test examples at once


class Trainer:
    """A task's network, data and gradient on one device.

    Args:
        task: what is trained.
        device: "cpu" or "cuda".
        folder: where the data is.
        captured: whether CUDA graphs are used on CUDA; if not every operation is launched alone.
    """

    def __init__(
        self, task: Task, device: str, folder: Path | None = None, *, captured: bool = True
    ) -> None:
        self.task, self.device = task, device
        self.cuda = device != "cpu"
        self.captured = captured and self.cuda
        if self.cuda:
            torch.backends.cudnn.benchmark = True
            torch.set_float32_matmul_precision("high")
        self.split = task.load(folder).to(device)
        self.facts = {  # that every record of this trainer repeats
            "precision": "bfloat16" if self._autocast else "float32",
            "data": _fingerprint(self.split),
            "environment": environment(device),
        }
        self.model = self._placed(task.network(0))
        self.params = list(self.model.parameters())
        self._first: dict[int, dict[str, Tensor]] = {}  # weights and statistics of every seed
        self.draw = task.draws(len(self.split.train_x), 1, 0)[0].to(device)
        self.loss = torch.zeros((), device=device)
        self.total = torch.zeros((), device=device)  # of the losses since it was last read
        self._forward = self._compiled() if task.compiled and self.captured else self.model
        self.backward: Callable[[], None] = self._backward
        if self.captured:
            self._warm_up()
            for p in self.params:
                p.grad = None  # so that its memory is the graph's, and written by every replay
            self.backward = _graph(self._backward)

    def run(self, method: Method, lam: float, seed: int, steps: int) -> dict[str, Any]:
        """Train once; what a record says of it, its key apart."""
        begun = time.perf_counter()
        self._start(seed)
        draws = self.task.draws(len(self.split.train_x), steps, seed).to(self.device)
        opt = method.build(self.model, self.task, lam, steps)
        curve, step_ms, optimizer_ms = self._train(method, opt, draws)
        diverged = len(curve) < len(_marks(steps)) - 1
        results = {} if diverged else self._evaluate(opt, draws)
        loss = results.get("loss", math.nan)
        diverged |= not math.isfinite(loss)
        return {
            "loss": None if diverged else loss,
            "accuracy": None if diverged else results.get("accuracy"),
            "diverged": diverged,
            "curve": [[end, value] for end, value in zip(_marks(steps)[1:], curve, strict=False)],
            "step_ms": _median(step_ms),
            "optimizer_ms": _median(optimizer_ms),
            "parameters": sum(p.numel() for p in self.params),
            "compiled": self._forward is not self.model,
            "version": method.version,
            **self.facts,
            "seconds": round(time.perf_counter() - begun, 3),
        }

    # ------------------------------------------------------------------------- training

    def _train(
        self, method: Method, opt: Any, draws: Tensor
    ) -> tuple[list[float], list[float], list[float]]:
        """The mean losses of the windows up to the first that is not finite, and two times."""
        _switch(opt, "train")
        places = [p.data_ptr() for p in self.params]
        curve, step_ms, optimizer_ms = [], [], []
        step = self._stepper(method, opt, len(draws))
        try:
            for first, last in pairwise(_marks(len(draws))):
                begun = time.perf_counter()
                for t in range(first, last):
                    self.draw.copy_(draws[t])
                    self.backward()
                    if t == first:
                        optimizer_ms.append(self._timed(lambda t=t: step(t)))  # type: ignore[misc]
                    else:
                        step(t)
                curve.append(self._mean(last - first))
                step_ms.append(1e3 * (time.perf_counter() - begun) / (last - first))
                if not math.isfinite(curve[-1]):
                    return curve[:-1], step_ms, optimizer_ms
        except Exception:
            if math.isfinite(self._mean(1)):  # an optimizer may refuse what is not finite
                raise
        if places != [p.data_ptr() for p in self.params]:
            raise RuntimeError(f"untuned: {method.name} has replaced a parameter's memory.")
        return curve, step_ms, optimizer_ms

    def _stepper(self, method: Method, opt: Any, steps: int) -> Callable[[int], None]:
        """A function of the step's number that sets λ and lets the optimizer step."""
        moved = method.decays or method.warmup > 0
        groups = [(group, group["lr"]) for group in opt.param_groups] if moved else []
        captured = self.captured and method.captured
        replay: list[Callable[[], None]] = []

        def step(t: int) -> None:
            for group, lam in groups:
                group["lr"] = lam * method.factor(t, steps)
            if captured and t == EAGER:
                replay.append(_graph(opt.step))
            if replay:
                replay[0]()
            else:
                opt.step(lambda: self.loss)

        return step

    def _backward(self) -> None:
        """One batch's loss and gradients, from `draw`; on the host the old gradients go first."""
        if not self.captured:
            self.model.zero_grad()
        x, y = self.task.examples(self.split, self.draw)
        with self._precision():
            output = self._forward(x)
        loss = self.task.loss(output, y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss.copy_(loss.detach())
        self.total.add_(self.loss)

    def _mean(self, count: int) -> float:
        """The mean loss since the last call; waits for the device."""
        mean = self.total.item() / count
        self.total.zero_()
        return mean

    def _timed(self, work: Callable[[], None]) -> float:
        """Milliseconds of `work` alone, launches included."""
        self._wait()
        begun = time.perf_counter()
        work()
        self._wait()
        return 1e3 * (time.perf_counter() - begun)

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    # ----------------------------------------------------------------------- evaluation

    def _evaluate(self, opt: Any, draws: Tensor) -> dict[str, float]:
        """Test loss and accuracy where the optimizer says that it is evaluated."""
        self.model.eval()
        with torch.no_grad(), self._precision(), self._at_evaluation(opt, draws):
            self.model.eval()
            losses, hits = 0.0, 0.0
            x, y = self.split.test_x, self.split.test_y
            size = self.task.batch if self.task.context else CHUNK
            for inputs, target in zip(x.split(size), y.split(size), strict=True):
                output = self.model(self._shaped(inputs))
                losses += self.task.loss(output, target).double() * len(target)
                hits += (output.argmax(1) == target).double().mean() * len(target)
        self.model.train()
        accuracy = {} if self.task.context else {"accuracy": float(hits) / len(y)}
        return {"loss": float(losses) / len(y)} | accuracy

    @contextmanager
    def _at_evaluation(self, opt: Any, draws: Tensor) -> Iterator[None]:
        """The average, where there is one; statistics of batches are estimated there anew."""
        recent = draws[-STATISTICS:] if self.task.batch_norm else ()
        inputs = (self.task.examples(self.split, draw)[0] for draw in recent)
        if hasattr(opt, "averaged"):
            with opt.averaged(self.model, batches=inputs) if len(recent) else opt.averaged():
                yield
            return
        if _switch(opt, "eval") and len(recent):
            self.model.train()
            for x in inputs:
                self.model(x)
        yield

    # -------------------------------------------------------------------------- set-up

    def _start(self, seed: int) -> None:
        """The network of a seed, in the memory that the graph reads."""
        if seed not in self._first:
            self._first[seed] = self._placed(self.task.network(seed)).state_dict()
        self.model.load_state_dict(self._first[seed])
        self.model.train()
        self.total.zero_()

    def _placed(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        if self.task.augmented and self.cuda:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def _shaped(self, x: Tensor) -> Tensor:
        last = self.task.augmented and self.cuda
        return x.contiguous(memory_format=torch.channels_last) if last else x

    def _compiled(self) -> Any:
        """The network through torch.compile; as it is, if that fails."""
        compiled = torch.compile(self.model, dynamic=False)
        self._forward = compiled
        try:
            self._backward()
        except Exception as error:
            text = str(error).strip().splitlines() or [type(error).__name__]
            print(f"untuned: {self.task.name} is not compiled: {text[0]}", flush=True)
            return self.model
        return compiled

    def _warm_up(self) -> None:
        """A few steps on a side stream, as capturing a CUDA graph asks for."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(EAGER):
                self._backward()
        torch.cuda.current_stream().wait_stream(side)

    @property
    def _autocast(self) -> bool:
        return self.task.bfloat16 and self.cuda

    def _precision(self) -> Any:
        kind = "cuda" if self.cuda else "cpu"
        # Without the cache: a copy of a weight must not outlive the capture it was made in.
        return torch.autocast(kind, torch.bfloat16, self._autocast, cache_enabled=False)


def _fingerprint(split: Split) -> str:
    """Of the test data: it tells whether two machines have the same."""
    raw = split.test_x.cpu().contiguous().flatten().view(torch.uint8).numpy()
    return f"{len(split.train_x)}+{hashlib.sha256(raw.data).hexdigest()[:12]}"


def _graph(work: Callable[[], Any]) -> Callable[[], None]:
    """`work` as a CUDA graph; captured only, not run."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


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
