"""The runner: processes that train, on one GPU and on cores beside it, and one that records.

A process keeps its task's network, data and CUDA graph from one run to the next, and is handed
runs of the same task as long as there are any.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from experiments.untuned.plan import Plan, Run, append, read

PATIENCE = 1.0  # seconds to wait for news before looking at the clock
BROKEN = "CUDA error"
KNOWN = Path("results/untuned")  # records that are never made again
BENCH = "experiments.untuned.bench"  # a module with TASKS, METHODS and Trainer


@dataclass(slots=True)
class Worker:
    """A process that trains, and what it is at."""

    device: str
    folder: Path | None
    captured: str
    compiled: bool = True
    bench: str = BENCH
    run: Run | None = None
    task: str = ""  # the one that it has in memory
    pipe: Connection[Any, Any] = field(init=False)
    process: Any = field(init=False)

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        settings = (theirs, self.device, self.folder, self.captured, self.compiled, self.bench)
        # No daemon: those may have no children, and torch.compile has some.
        self.process = context.Process(target=serve, args=settings)
        self.process.start()
        theirs.close()
        self.run, self.task = None, ""

    def give(self, run: Run) -> None:
        self.run, self.task = run, run.task
        self.pipe.send(run)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()


def serve(
    pipe: Connection[Any, Any],
    device: str,
    folder: Path | None,
    captured: Any,
    compiled: bool = True,
    bench: str = BENCH,
) -> None:
    """What a worker does: a run for every one that comes, until nobody asks any more."""
    import torch

    from experiments.untuned.train import CaptureError

    known = import_module(bench)
    torch.set_num_threads(1)
    trainer: Any = None
    with suppress(EOFError, ConnectionError):  # whoever asked is gone
        while run := pipe.recv():
            answer: Any
            try:
                if trainer is None or trainer.task.name != run.task:
                    trainer = None  # its memory first
                    task = known.TASKS[run.task]
                    task = task if compiled else replace(task, compiled=False)
                    trainer = known.Trainer(task, device, folder, captured=captured)
                answer = trainer.run(known.METHODS[run.method], run.lam, run.seed, run.steps)
            except CaptureError as error:
                answer = (_line(error),)
            except Exception as error:
                trainer = None  # a graph may be broken
                answer = _line(error)
            pipe.send(answer)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


class Runner:
    """All runs of a plan that have no record yet.

    Args:
        plan: what is to be run.
        out: the folder of the records; those in results/untuned count as well.
        device: "cpu" or "cuda", for the tasks that gain from a GPU.
        workers: processes on the GPU.
        cpu_workers: processes of one core each, for all other tasks; 0: the GPU takes those too.
        limit: seconds after which to stop; what is under way then is not recorded.
        folder: of the data.
        captured: what becomes a CUDA graph, see `Trainer`.
        compiled: whether networks may be compiled first.
        bench: the module whose tasks and methods are run.
        say: is handed lines for the user.
    """

    def __init__(
        self,
        plan: Plan,
        out: Path,
        *,
        device: str = "cpu",
        workers: int = 1,
        cpu_workers: int = 1,
        limit: float | None = None,
        folder: Path | None = None,
        captured: str = "all",
        compiled: bool = True,
        bench: str = BENCH,
        say: Callable[[str], None] = print,
    ) -> None:
        self.plan, self.out, self.say = plan, out, say
        self._tasks = import_module(bench).TASKS
        self.records = {**(read(KNOWN) if bench == BENCH else {}), **read(out, self._tasks)}
        self.failed: set[Run] = set()
        self._broken: Counter[Run] = Counter()  # how often a run's process was
        self.until = time.monotonic() + limit if limit else float("inf")
        self._cpu_workers = cpu_workers
        devices = ["cuda"] * workers * (device == "cuda") + ["cpu"] * cpu_workers
        self._new = [(device, folder, captured, compiled, bench) for device in devices]

    def run(self) -> int:
        """Run what is missing; the number of runs that were recorded."""
        before = len(self.records)
        used = {self._device(run) for run in self._missing()}
        workers: list[Worker] = []
        try:
            workers += (Worker(*settings) for settings in self._new if settings[0] in used)
            while time.monotonic() < self.until:
                self._hand_out(workers)
                busy = {worker.pipe: worker for worker in workers if worker.run}
                if not busy:
                    break
                for pipe in wait(list(busy), PATIENCE):
                    self._answer(busy[pipe])  # type: ignore[index]
        finally:
            for worker in workers:
                worker.stop()
        return len(self.records) - before

    def _missing(self) -> list[Run]:
        return [run for run in self.plan.missing(self.records) if run not in self.failed]

    def _device(self, run: Run) -> str:
        gpu = any(device == "cuda" for device, *_ in self._new)
        return "cuda" if gpu and (self._tasks[run.task].cuda or not self._cpu_workers) else "cpu"

    def _hand_out(self, workers: list[Worker]) -> None:
        """Give every idle worker a run: of its own task, of one that nobody has, or any."""
        under_way = {worker.run for worker in workers}
        waiting = [run for run in self._missing() if run not in under_way]
        for worker in (worker for worker in workers if worker.run is None):
            runs = [run for run in waiting if self._device(run) == worker.device]
            if not runs:
                continue
            runs = self.plan.first(runs)
            crowd = Counter(other.task for other in workers if other is not worker and other.run)
            same = [run for run in runs if run.task == worker.task]
            run = same[0] if same else min(runs, key=lambda each: crowd[each.task])
            waiting.remove(run)
            worker.give(run)

    def _answer(self, worker: Worker) -> None:
        """Record what a worker has sent; start another in the place of one that died."""
        run = worker.run
        assert run is not None
        try:
            record = worker.pipe.recv()
        except (EOFError, OSError):
            record = f"{BROKEN}: its process died"
        if isinstance(record, str) and BROKEN in record:  # which nothing in that process survives
            worker.stop()
            worker.start()
            self._broken[run] += 1
        worker.run = None
        text = f"{run.task}, {run.method} at λ = {run.lam:g}, seed {run.seed}, {run.steps} steps"
        if isinstance(record, tuple):  # in a new process, since a broken capture leaves traces
            self.say(f"{text}: once more, its step launched from the host: {record[0]}")
            worker.stop()
            worker.captured = "gradient"
            worker.start()
            return
        if isinstance(record, str):
            again = self._broken[run] == 1  # It may not have been this run that broke it.
            if not again:
                self.failed.add(run)
            self.say(f"{text}: {'once more' if again else 'failed, not recorded'}: {record}")
            return
        self.records[run] = append(self.out, run, record)
        result = "diverged" if record["diverged"] else f"loss {record['loss']:.4f}"
        if record["accuracy"] is not None:
            result += f", accuracy {100 * record['accuracy']:.2f} %"
        left = len(self._missing())
        self.say(f"{text}: {result}, {record['seconds']:.1f} s; {left} to go")
