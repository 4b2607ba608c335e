"""Many training runs as one program.

Nothing in a program is drawn from a generator that would have to be saved: the seed and the number
of the step say what comes next. What `state` returns is therefore all there is to a run.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wngrad.lab.train import models
from wngrad.lab.train.data import Data
from wngrad.lab.train.programs.run import Run
from wngrad.lab.train.spec import Pack, Sweep
from wngrad.lab.train.update import Update

TEST_CHUNK = 1000  # examples evaluated at a time: bounds the memory of an evaluation
Parts = Iterator[tuple[Tensor, Tensor, Any]]


class Program(Run):
    """Lanes that train on pairs of tensors."""

    def __init__(self, sweep: Sweep, pack: Pack, data: Data, device: str | torch.device) -> None:
        super().__init__(sweep, pack)
        self.device = torch.device(device)
        self.dtype = torch.float64 if sweep.precision == "float64" else torch.float32
        self.train_x, self.train_y = self._here(data.train_x), self._here(data.train_y)
        self.test_x, self.test_y = self._here(data.test_x), self._here(data.test_y)
        self.valid_count = 0  # examples for validation, which lie before those of the test
        if data.validation is not None:
            self.valid_count = len(data.validation[1])
            ahead = [self._here(part) for part in data.validation]
            self.test_x, self.test_y = (
                torch.cat(pair) for pair in zip(ahead, (self.test_x, self.test_y), strict=True)
            )
        self.data, self.objective = data, data.objective
        self.steps = len(data.train_y) // sweep.batch  # an incomplete last batch is left out
        if self.steps == 0:
            raise ValueError(
                f"lab: `batch` must be at most the {len(data.train_y)} training examples, "
                f"got {sweep.batch}."
            )
        self.measured = list(self.objective.measured("test"))
        if data.validation is not None:
            self.measured = [*self.objective.measured("valid"), *self.measured]
        self.curves = {name: [] for name in ("train_loss", *self.measured)}
        seeds = len(pack.seeds)
        self.order = torch.zeros(seeds, self.steps * sweep.batch, device=self.device).long()
        self.at = torch.arange(sweep.batch, device=self.device)  # of the next step, in `order`
        self.total = torch.zeros(len(pack.lanes), dtype=torch.float64, device=self.device)
        self._shuffle()

    def advance(self, steps: int) -> None:
        steps = min(steps, self.steps - self.step)
        if self.epoch == self.step == 0 and not self.start:
            self.start = self._means(self._test())
        self._train(steps)
        self.step += steps
        if self.step == self.steps:
            self._end_epoch()

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "step": self.step,
            "curves": self.curves,
            "start": self.start,
            "total": self.total,
            "lanes": self._lanes_state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self._load_lanes(state["lanes"])
        self.total.copy_(state["total"])
        self.epoch, self.step = state["epoch"], state["step"]
        self.curves = {name: list(rows) for name, rows in state["curves"].items()}
        self.start = dict(state.get("start", {}))
        self._shuffle()

    def _end_epoch(self) -> None:
        self.curves["train_loss"].append((self.total / self.steps).tolist())
        for name, values in self._means(self._test()).items():
            self.curves[name].append(values)
        self.epoch, self.step = self.epoch + 1, 0
        self.total.zero_()
        self._shuffle()

    def network(self, seed: int) -> nn.Module:
        """A fresh network, drawn from `seed` alone."""
        return models.network(self.sweep.model, self.data, seed).to(self.device, self.dtype)

    def _here(self, t: Tensor) -> Tensor:
        return t.to(self.device, self.dtype if t.is_floating_point() else t.dtype)

    def _means(self, sums: Sequence[Tensor]) -> dict[str, list[float]]:
        """The means over the validation and the test set, by name, one number per lane."""
        count = {"valid": self.valid_count, "test": len(self.test_y) - self.valid_count}
        pairs = zip(self.measured, sums, strict=True)
        return {name: (total / count[name.partition("_")[0]]).tolist() for name, total in pairs}

    def _totals(self) -> list[Tensor]:
        """A zero for each lane, for each thing that a test sums."""
        return [torch.zeros_like(self.total) for _ in self.measured]

    def _shuffle(self) -> None:
        """The order of the examples in this epoch: the same for all lanes of a seed."""
        for row, seed in zip(self.order, self.pack.seeds, strict=True):
            drawn = np.random.default_rng([seed, self.epoch]).permutation(len(self.train_y))
            row.copy_(torch.from_numpy(drawn[: row.numel()]))
        self.at.copy_(torch.arange(self.sweep.batch) + self.step * self.sweep.batch)

    def test_chunks(self, totals: Sequence[Tensor], size: int = TEST_CHUNK) -> Parts:
        """The validation and the test set, a part at a time, each with the totals it belongs to."""
        sets = [(self.valid_count, len(self.test_y))]
        if self.valid_count:
            sets.insert(0, (0, self.valid_count))
        each = len(totals) // len(sets)
        for k, (first, last) in enumerate(sets):
            for at in range(first, last, size):
                part = slice(at, min(at + size, last))
                yield self.test_x[part], self.test_y[part], totals[k * each : (k + 1) * each]

    @abstractmethod
    def _train(self, steps: int) -> None: ...

    @abstractmethod
    def _test(self) -> Sequence[Tensor]:
        """What `objective.sums` says of the test set, each a tensor of one number per lane."""

    @abstractmethod
    def _lanes_state(self) -> Any: ...

    @abstractmethod
    def _load_lanes(self, state: Any) -> None: ...


class Fused(Program):
    """A program whose step on CUDA is compiled, captured once, and replayed."""

    _step_graph: torch.cuda.CUDAGraph | None = None
    _test_graph: torch.cuda.CUDAGraph | None = None

    def _train(self, steps: int) -> None:
        if self.device.type != "cuda":
            for _ in range(steps):
                self._one_step()
            return
        if self._step_graph is None:
            self._step_graph = self._captured(self._one_step)
        for _ in range(steps):
            self._step_graph.replay()
        torch.cuda.synchronize()

    def _test(self) -> Sequence[Tensor]:
        if self.device.type != "cuda":
            return self._evaluate()
        if self._test_graph is None:
            with _capturing(self.sweep.precision):
                self._sums = self._evaluate()
            self._test_graph = self._captured(self._evaluate_again)
        self._test_graph.replay()
        return self._sums

    def _evaluate_again(self) -> None:
        for sums, new in zip(self._sums, self._evaluate(), strict=True):
            sums.copy_(new)

    def _captured(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """`work` as a CUDA graph; what its warm-up changed is put back."""
        before = _cloned(self.state())
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with _capturing(self.sweep.precision), torch.cuda.stream(side):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with _capturing(self.sweep.precision), torch.cuda.graph(graph):
            work()
        self.load(before)
        return graph

    @property
    def compiles(self) -> bool:
        return self.device.type == "cuda"

    def compiled(self, work: Any) -> Any:
        """`work`, compiled where that pays; each shape and mode it is called in takes seconds."""
        return torch.compile(work, fullgraph=True, dynamic=False) if self.compiles else work

    @abstractmethod
    def _one_step(self) -> None: ...

    @abstractmethod
    def _evaluate(self) -> Sequence[Tensor]: ...


def move(update: Update, grads: Sequence[Tensor]) -> None:
    """A step as a plain function, which is what a compiler likes."""
    with torch.no_grad():
        update(grads)


def copy_into(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Copy saved values into the tensors of the same names."""
    if tensors.keys() != saved.keys():
        others = sorted(tensors.keys() ^ saved.keys())
        raise ValueError(f"lab: the checkpoint is of other lanes: {others}.")
    with torch.no_grad():
        for key, value in saved.items():
            tensors[key].copy_(value)


def _cloned(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _cloned(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_cloned(value) for value in state]
    return state


@contextmanager
def _capturing(precision: str) -> Iterator[None]:
    """What holds while a step is compiled and captured, and nowhere else.

    Float32 products in TF32 if the sweep asks for it; cuDNN tries its algorithms; the compiler may
    meet the same function often, once for each layer and size of batch.
    """
    import torch._dynamo

    before, tried = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.benchmark = True
    try:
        with torch._dynamo.config.patch(recompile_limit=1000), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TensorFloat32 tensor cores")
            yield
    finally:
        torch.set_float32_matmul_precision(before)
        torch.backends.cudnn.benchmark = tried
