"""What is run, in which order, and the records of what has been run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

RIVALS = ("muon", "adamw")
RATES = (1e-3, 3e-4, 3e-3, 1e-2, 1e-4)  # from the middle: should time run out, the ends are missing
DECAY = 0.1
OTHER_DECAYS = (0.0333, 0.3)  # a third and three times the usual one
SEEDS = (0, 1, 2)
FILE = "gpt.jsonl"

Records = dict["Run", dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """The key of a record: a method, what is set of it (nothing of WNMuon), seed and length."""

    method: str
    rate: float | None
    decay: float | None
    seed: int
    steps: int

    def __str__(self) -> str:
        settings = "" if self.rate is None else f" at {self.rate:g}, decay {self.decay:.3g}"
        return f"{self.method}{settings}, seed {self.seed}, {self.steps} steps"


def missing(records: Records, steps: int) -> Run | None:
    """The next run that has no record; None if there is none."""
    return next((run for run in _wanted(records, steps) if run not in records), None)


def _wanted(records: Records, steps: int) -> Iterator[Run]:
    """All runs in order; the later ones depend on the records of the earlier ones."""

    def ours(seed: int) -> Run:
        return Run("wnmuon", None, None, seed, steps)

    yield ours(0)
    for rate in RATES:
        yield from (Run(method, rate, DECAY, 0, steps) for method in RIVALS)
    yield from map(ours, SEEDS[1:])
    best = {method: best_rate(records, method, steps) for method in RIVALS}
    for seed in SEEDS[1:]:
        yield from (Run(method, best[method], DECAY, seed, steps) for method in RIVALS)
    for decay in OTHER_DECAYS:
        yield from (Run(method, best[method], decay, 0, steps) for method in RIVALS)


def best_rate(records: Records, method: str, steps: int) -> float | None:
    """The rate with the smallest final test loss at the first seed and the usual decay."""
    costs = {
        run.rate: math.inf if record["loss"] is None else record["loss"]
        for run, record in records.items()
        if (run.method, run.decay, run.seed, run.steps) == (method, DECAY, SEEDS[0], steps)
    }
    return min(costs, key=costs.__getitem__, default=None)


def read(folder: Path) -> Records:
    """The records in a folder; a line that a killed process has written half of is passed over."""
    path, records = folder / FILE, {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        records[Run(**{field.name: record[field.name] for field in fields(Run)})] = record
    return records


def append(folder: Path, run: Run, record: dict[str, Any]) -> dict[str, Any]:
    """Write a record as a line of its own; the record with its key."""
    folder.mkdir(parents=True, exist_ok=True)
    path, whole = folder / FILE, {**asdict(run), **record}
    torn = path.is_file() and not path.read_bytes().endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * torn + json.dumps(whole, allow_nan=False) + "\n")
    return whole
