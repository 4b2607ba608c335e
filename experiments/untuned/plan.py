"""What is to be run, in the order of importance, and the records of what was."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from experiments.tournament.contestants import named
from experiments.untuned import tasks as tasks_
from experiments.untuned.methods import METHODS, Method
from experiments.untuned.tasks import TASKS, Task

# WNMuon; the rivals that are tuned; those that are not; WNMuon's settings moved; other lengths.
PARTS = ("default", "tuned", "rivals", "flatness", "length")
LENGTHS = (0.3, 1.0, 3.0, 10.0)  # times the steps of a task
LENGTH_TASKS, LENGTH_METHODS = ("mnist-mlp", "shakespeare"), ("wnmuon", "adamw")


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """What tells one run from all others."""

    task: str
    method: str
    lam: float
    seed: int
    steps: int


Records = Mapping[Run, dict[str, Any]]


def cost(record: Mapping[str, Any], metric: str) -> float:
    """What is to be small: the loss, or the accuracy's negative; infinite if the run diverged."""
    if record["diverged"]:
        return float("inf")
    return float(-record["accuracy"] if metric == "accuracy" else record["loss"])


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of some tasks, methods and parts of the experiment.

    Args:
        seeds: how many; paired over the methods.
        seeds_first: run a grid of λ with the first seed alone, and only its best λ and the two
            beside it with the others.
    """

    tasks: tuple[Task, ...]
    methods: tuple[Method, ...]
    parts: tuple[str, ...] = PARTS
    seeds: int = 3
    seeds_first: bool = False

    def missing(self, records: Records) -> list[Run]:
        """The runs that have no record; with `seeds_first` more follow as records come in."""
        runs = [run for part in self.parts for run in self._part(part, records)]
        return [run for run in dict.fromkeys(runs) if run not in records]

    def _part(self, part: str, records: Records) -> Iterable[Run]:
        for task in self.tasks:
            for method in self.methods:
                for steps in lengths(task, method, part):
                    yield from self._grid(task, method, steps, records)

    def _grid(self, task: Task, method: Method, steps: int, records: Records) -> Iterable[Run]:
        def runs(lams: Iterable[float], seeds: Iterable[int]) -> list[Run]:
            return [Run(task.name, method.name, lam, k, steps) for k in seeds for lam in lams]

        if not self.seeds_first or len(method.lams) == 1 or method.part == "flatness":
            return runs(method.lams, range(self.seeds))
        first = runs(method.lams, [0])
        if not all(run in records for run in first):
            return first
        costs = [cost(records[run], task.metric) for run in first]
        best = costs.index(min(costs))
        beside = method.lams[max(best - 1, 0) : best + 2]
        return [*first, *runs(beside, range(1, self.seeds))]


def lengths(task: Task, method: Method, part: str) -> tuple[int, ...]:
    """The numbers of steps that a method is run for at a task, in one part of the experiment."""
    if method.name == "muon" and not task.hidden:
        return ()
    if part == "length":
        both = task.name in LENGTH_TASKS and method.name in LENGTH_METHODS
        return tuple(round(task.steps * k) for k in LENGTHS) if both else ()
    if part != method.part or (part == "flatness" and task.group != "choosing"):
        return ()
    return (task.steps,)


def plan(
    tasks: list[str], methods: list[str], parts: list[str], seeds: int, seeds_first: bool
) -> Plan:
    """The plan for these names; all of a kind where there are none.

    Raises:
        ValueError: a name is unknown.
    """
    wanted = named("parts", parts, {part: part for part in PARTS})
    rows = [row for row in named("methods", methods, METHODS) if not row.missing()]
    return Plan(tuple(tasks_.find(tasks)), tuple(rows), tuple(wanted), seeds, seeds_first)


def absent() -> list[str]:
    """A line for every package that is needed and not installed."""
    lines = (row.missing() for row in METHODS.values())
    return list(dict.fromkeys(line.replace("tournament", "untuned") for line in lines if line))


# --------------------------------------------------------------------------------- records


def read(folder: Path) -> dict[Run, dict[str, Any]]:
    """The records in a folder; a line that a killed call has left by half is passed over."""
    records = {}
    for name in TASKS:
        path = folder / f"{name}.jsonl"
        for line in path.read_text().splitlines() if path.is_file() else ():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            records[Run(*(record[field.name] for field in fields(Run)))] = record
    return records


def append(folder: Path, run: Run, record: Mapping[str, Any]) -> dict[str, Any]:
    """Add a record to the file of its task, on a line of its own; the record with its key."""
    whole = {**asdict(run), **record}
    path = folder / f"{run.task}.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    torn = path.is_file() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * torn + json.dumps(whole, allow_nan=False) + "\n")
    return whole
