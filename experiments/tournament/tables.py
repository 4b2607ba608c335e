"""The tournament's records as numbers: who comes how far at a default, and over how many λ."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from experiments.tournament.contestants import CONTESTANTS, Contestant
from experiments.tournament.records import read
from experiments.tournament.tasks import EVENTS, Event
from wngrad.lab.report.cells import Cell, lead
from wngrad.lab.report.dependence import Curves
from wngrad.lab.report.sensitivity import best_lam
from wngrad.lab.train.spec import Lane, Metric, Record

LOSS: Metric = "test_loss"


@dataclass(frozen=True)
class Curve(Curves):
    """A method over the grid; a run that failed counts as one that diverged."""

    diverged: int  # runs of the whole grid, of all seeds
    failed: int
    runs: int

    @cached_property
    def best_lam(self) -> float | None:
        try:
            return best_lam(self.lam, self.losses)
        except ValueError:
            return None

    @cached_property
    def at_best(self) -> Cell:
        if self.best_lam is None:
            return Cell.of(LOSS, [math.nan] * len(self.seeds), self.seeds)
        column = self.lam.index(self.best_lam)
        return Cell.of(LOSS, [row[column] for row in self.losses], self.seeds)

    def capped(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation over the seeds, no loss above the one at the start."""
        first = np.array(self.start)[:, None]
        table = np.minimum(np.nan_to_num(np.array(self.losses), nan=np.inf), first)
        spread = table.std(0, ddof=1) if len(table) > 1 else np.zeros(table.shape[1])
        return table.mean(0).tolist(), spread.tolist()


@dataclass(frozen=True)
class Outcome:
    """What was run of one task."""

    event: Event
    default: Mapping[Lane, Record]
    grid: Mapping[Lane, Record]

    @property
    def name(self) -> str:
        return self.event.task.name

    @property
    def records(self) -> list[Record]:
        return [*self.default.values(), *self.grid.values()]

    @cached_property
    def cells(self) -> dict[str, Cell]:
        """The final metric of every method that was run at its documented default."""
        metric = self.event.task.metric_key or LOSS
        cells = {}
        for who in CONTESTANTS:
            records = _of(self.default, self.target(who))
            values = {lane.seed: final(r, metric) for lane, r in records.items()}
            if values:
                cells[who.name] = Cell.of(metric, list(values.values()), list(values))
        return cells

    @cached_property
    def ranks(self) -> dict[str, int]:
        """From 1, the best mean; methods of which a seed diverged or failed share the last."""
        costs = {name: cell.cost for name, cell in self.cells.items()}
        return {
            name: 1 + sum(other < cost for other in costs.values()) for name, cost in costs.items()
        }

    @cached_property
    def leaders(self) -> set[str]:
        """The best, and all that are behind it by less than two standard errors."""
        first = min(self.cells.values(), key=lambda cell: cell.cost, default=None)
        if first is None or first.cost == math.inf:
            return set()
        leads = {name: lead(first, cell) for name, cell in self.cells.items()}
        return {name for name, each in leads.items() if each.by == 0 or each.noise}

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """Of every method whose λ is moved, and of which some seed has the whole grid."""
        curves = {}
        for who in CONTESTANTS:
            target = self.target(who)
            records = _of(self.grid, target)
            lanes = {
                seed: [Lane(target, lam, seed) for lam in self.lam]
                for seed in dict.fromkeys(lane.seed for lane in records)
            }
            whole = {seed: row for seed, row in lanes.items() if all(x in records for x in row)}
            if whole:
                curves[who.name] = self._curve(records, whole)
        return curves

    @cached_property
    def lam(self) -> tuple[float, ...]:
        return tuple(sorted({lane.lam for lane in self.grid}))

    def target(self, who: Contestant) -> str:
        """The name of a contestant in this task's records."""
        return who.target(self.event.batch_norm)

    def _curve(self, records: Mapping[Lane, Record], lanes: Mapping[int, list[Lane]]) -> Curve:
        return Curve(
            self.lam,
            list(lanes),
            [[final(records[lane], LOSS) for lane in row] for row in lanes.values()],
            [_start(records, self.grid, seed=seed) for seed in lanes],
            [self._best[seed] for seed in lanes],
            sum(r.diverged_at is not None for r in records.values()),
            sum(r.status == "failed" for r in records.values()),
            len(records),
        )

    @cached_property
    def _best(self) -> dict[int, float]:
        """The least final loss of all methods and λ, seed by seed; the start's if there is none."""
        losses: dict[int, list[float]] = {}
        for lane, record in self.grid.items():
            losses.setdefault(lane.seed, []).append(final(record, LOSS))
        finite = {seed: [v for v in each if math.isfinite(v)] for seed, each in losses.items()}
        return {s: min(each) if each else _start(self.grid, seed=s) for s, each in finite.items()}


def load(folder: Path) -> list[Outcome]:
    """The outcomes that the exported records in `folder` hold, task by task.

    Raises:
        ValueError: there are none.
    """
    outcomes = []
    for name, event in EVENTS.items():
        paths = [folder / f"{name}-{question}.jsonl" for question in ("default", "grid")]
        parts = [{r.lane: r for r in read(path)} if path.is_file() else {} for path in paths]
        if any(parts):
            outcomes.append(Outcome(event, *parts))
    if not outcomes:
        raise ValueError(
            f"tournament: `records` must be a folder with records, got {folder}; "
            "`python -m experiments.tournament` makes them."
        )
    return outcomes


def final(record: Record, metric: Metric) -> float:
    """At the last epoch; nan if the run diverged or failed."""
    values = record.curves.get(metric) or [None]
    lost = record.status == "failed" or record.diverged_at is not None
    return math.nan if lost or values[-1] is None else values[-1]


def _of(records: Mapping[Lane, Record], target: str) -> dict[Lane, Record]:
    """The records of one optimizer, by seed and λ."""
    lanes = [lane for lane in records if lane.optimizer == target]
    return {lane: records[lane] for lane in sorted(lanes, key=lambda lane: (lane.seed, lane.lam))}


def _start(*where: Mapping[Lane, Record], seed: int) -> float:
    """The test loss before the first step, of the first record of the seed that has it."""
    for records in where:
        for lane, record in records.items():
            if lane.seed == seed and (value := record.start.get(LOSS)) is not None:
                return value
    raise ValueError(f"tournament: no record of seed {seed} tells the loss at the start.")
