"""What is to be run, in the order of importance, and the records of what was."""

from __future__ import annotations

import json
import math
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


def cost(record: Mapping[str, Any]) -> tuple[float, float]:
    """What is to be small: the accuracy's negative, then the loss; infinite if the run diverged."""
    if record["diverged"]:
        return math.inf, math.inf
    return -(record["accuracy"] or 0.0), record["loss"]


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of some tasks, methods and parts of the experiment.

    Args:
        seeds: how many; paired over the methods.
        seeds_first: run a grid of λ with the first seed alone, then its best λ and the two
            beside it with all, and so on until the best over all seeds has both beside it.
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

    def first(self, runs: list[Run]) -> list[Run]:
        """Those of the missing runs that come first: other lengths than a task's own are last."""
        return [run for run in runs if run.steps == TASKS[run.task].steps] or runs

    def _part(self, part: str, records: Records) -> Iterable[Run]:
        for task in self.tasks:
            for method in self.methods:
                for steps in lengths(task, method, part):
                    yield from self.grid(task, method, steps, records)

    def grid(self, task: Task, method: Method, steps: int, records: Records) -> list[Run]:
        """All λ with all seeds; with `seeds_first` those that the records call for so far."""

        def runs(lams: Iterable[float], seeds: Iterable[int]) -> list[Run]:
            return [Run(task.name, method.name, lam, k, steps) for k in seeds for lam in lams]

        every, lams = range(self.seeds), method.lams
        if not self.seeds_first or len(lams) == 1 or method.part == "flatness":
            return runs(lams, every)
        wanted = runs(lams, [0])
        for seeds in ([0], every):
            if any(run not in records for run in wanted):
                break
            whole = [lam for lam in lams if all(run in records for run in runs([lam], seeds))]
            costs = {lam: _mean(records[run] for run in runs([lam], seeds)) for lam in whole}
            best = lams.index(min(costs, key=costs.__getitem__))
            wanted += runs(lams[max(best - 1, 0) : best + 2], every)
        return wanted


def _mean(records: Iterable[Mapping[str, Any]]) -> tuple[float, ...]:
    return tuple(map(sum, zip(*map(cost, records), strict=True)))


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


def read(folder: Path, names: Iterable[str] = tuple(TASKS)) -> dict[Run, dict[str, Any]]:
    """The records in a folder; a line that a killed call has left by half is passed over."""
    records = {}
    for name in names:
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
