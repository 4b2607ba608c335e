"""The records as numbers: cells over seeds, the λ that is best, paired differences, ranks."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from statistics import mean, median, stdev
from typing import Any, Literal

from experiments.untuned.methods import METHODS
from experiments.untuned.plan import Records
from experiments.untuned.tasks import TASKS, Task
from wngrad.lab.report.cells import Cell
from wngrad.lab.train.spec import Metric as Name

Metric = Literal["accuracy", "loss"]
Best = tuple[float, Cell]  # λ, and what is reached there
NAMES: dict[Metric, Name] = {"accuracy": "test_accuracy", "loss": "test_loss"}


@dataclass(frozen=True, slots=True)
class Difference:
    """One method less another, seed by seed."""

    mean: float  # infinite or nan where a run diverged
    error: float | None  # standard error of the mean; None for fewer than two seeds
    n: int
    word: str  # "ahead" and "behind" are beyond two standard errors, all else is a "tie"


def difference(first: Cell, second: Cell) -> Difference:
    """The first less the second, over the seeds that both have."""
    if math.inf in (first.cost, second.cost):
        word = "tie" if first.cost == second.cost else "ahead"
        return Difference(math.nan, None, 0, word if first.cost <= second.cost else "behind")
    one, other = dict(first.by_seed), dict(second.by_seed)
    gaps = [one[seed] - other[seed] for seed in one if seed in other]
    if len(gaps) < 2:
        return Difference(gaps[0] if gaps else math.nan, None, len(gaps), "one seed")
    middle, error = mean(gaps), stdev(gaps) / math.sqrt(len(gaps))
    better = middle > 0 if first.metric == "test_accuracy" else middle < 0
    word = "tie" if abs(middle) <= 2 * error else "ahead" if better else "behind"
    return Difference(middle, error, len(gaps), word)


class Results:
    """The records of all runs, by task, length, method, λ and seed."""

    def __init__(self, records: Records) -> None:
        self.records = records
        self._table: dict[tuple[str, int, str], dict[float, dict[int, Any]]] = defaultdict(dict)
        for run, record in sorted(records.items()):
            lams = self._table[run.task, run.steps, run.method]
            lams.setdefault(run.lam, {})[run.seed] = record

    @property
    def tasks(self) -> list[Task]:
        return [task for name, task in TASKS.items() if any(key[0] == name for key in self._table)]

    def lams(self, task: Task, method: str, steps: int = 0) -> dict[float, dict[int, Any]]:
        """λ → seed → record, of one method at one task."""
        return self._table.get((task.name, steps or task.steps, method), {})

    def cell(
        self, task: Task, method: str, lam: float, steps: int = 0, metric: Metric | None = None
    ) -> Cell:
        """The final metric at one λ; nan where a run diverged."""
        records, key = self.lams(task, method, steps).get(lam, {}), metric or task.metric
        values = [math.nan if r["diverged"] else r[key] for r in records.values()]
        return Cell.of(NAMES[key], values, list(records))

    def best(
        self, task: Task, method: str, steps: int = 0, metric: Metric | None = None
    ) -> Best | None:
        """The λ that is best on the test set, among those with the most seeds; None without runs.

        Of two with the same accuracy the one with the smaller loss.
        """
        lams = self.lams(task, method, steps)
        most = max(map(len, lams.values()), default=0)
        cells = {
            lam: (
                self.cell(task, method, lam, steps, metric),
                self.cell(task, method, lam, steps, "loss"),
            )
            for lam, seeds in lams.items()
            if len(seeds) == most
        }
        if not cells:
            return None
        lam = min(cells, key=lambda each: tuple(cell.cost for cell in cells[each]))
        return lam, cells[lam][0]

    def defaults(self, task: Task, metric: Metric | None = None) -> dict[str, Cell]:
        """Every method of which nothing was tuned."""
        names = [m.name for m in METHODS.values() if m.part in ("default", "rivals")]
        bests = {name: self.best(task, name, metric=metric) for name in names}
        return {name: best[1] for name, best in bests.items() if best}

    def ranks(self, task: Task) -> dict[str, int]:
        """From 1, the best mean; methods of which a seed diverged share the last."""
        costs = {name: cell.cost for name, cell in self.defaults(task).items()}
        return {
            name: 1 + sum(other < cost for other in costs.values()) for name, cost in costs.items()
        }

    def times(self, task: Task, method: str) -> tuple[float, float] | None:
        """Median milliseconds of a training step and of the optimizer's part of it."""
        records = [r for seeds in self.lams(task, method).values() for r in seeds.values()]
        pairs = [(r["step_ms"], r["optimizer_ms"]) for r in records if r["step_ms"]]
        if not pairs:
            return None
        return median(p[0] for p in pairs), median(p[1] for p in pairs)
