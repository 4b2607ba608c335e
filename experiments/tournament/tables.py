"""The tournament's records as numbers: who comes how far at a default, and over how many λ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from experiments.tournament.contestants import CONTESTANTS, Contestant
from experiments.tournament.records import read
from experiments.tournament.tasks import EVENTS, Event
from wngrad.lab.report.cells import Cell, Lead, lead
from wngrad.lab.report.sensitivity import (
    Estimate,
    best_lam,
    lr_sensitivity,
    recommended_lam,
    usable_decades,
)
from wngrad.lab.train.spec import Lane, Metric, Record

LOSS: Metric = "test_loss"


@dataclass(frozen=True, slots=True)
class Curve:
    """A method over the grid: its losses, and what follows from them."""

    lam: tuple[float, ...]
    losses: tuple[tuple[float, ...], ...]  # (seeds, grid), nan where it diverged or failed
    start: tuple[float, ...]  # the loss before training, of each seed
    seeds: tuple[int, ...]
    best: tuple[float, ...]  # the least loss of all methods, of each seed
    diverged: int  # runs of the whole grid, of all seeds
    failed: int
    runs: int

    @property
    def best_lam(self) -> float | None:
        try:
            return best_lam(self.lam, self.losses)
        except ValueError:
            return None

    @property
    def at_best(self) -> Cell:
        at = self.best_lam
        if at is None:
            return Cell.of(LOSS, [math.nan] * len(self.seeds), self.seeds)
        column = self.lam.index(at)
        return Cell.of(LOSS, [row[column] for row in self.losses], self.seeds)

    @property
    def sensitivity(self) -> Cell:
        """From its own best; one value for each seed."""
        every = zip(self.losses, self.start, strict=True)
        return Cell.of(LOSS, [lr_sensitivity(self.lam, [row], first) for row, first in every])

    @property
    def usable(self) -> Estimate:
        """Decades that end within 5 % of the way from the best of all methods to the start."""
        return usable_decades(self.lam, self.losses, self.start, best=self.best)

    @property
    def recommended(self) -> float | None:
        return recommended_lam(self.lam, self.losses, self.start, best=self.best)

    def capped(self) -> tuple[list[float], list[float]]:
        """Mean and standard deviation over the seeds, no loss above the one at the start."""
        first = np.array(self.start)[:, None]
        table = np.minimum(np.nan_to_num(np.array(self.losses), nan=np.inf), first)
        spread = table.std(0, ddof=1) if len(table) > 1 else np.zeros(table.shape[1])
        return table.mean(0).tolist(), spread.tolist()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What was run of one task."""

    event: Event
    default: Mapping[Lane, Record]
    grid: Mapping[Lane, Record]

    @property
    def metric(self) -> Metric:
        """By which the methods are ranked at their defaults."""
        return self.event.task.metric_key or LOSS

    @property
    def records(self) -> list[Record]:
        return [*self.default.values(), *self.grid.values()]

    def cell(self, who: Contestant) -> Cell:
        """The final metric at the documented default."""
        mine = _of(self.default, self._target(who))
        values = {lane.seed: final(r, self.metric) for lane, r in mine.items()}
        return Cell.of(self.metric, list(values.values()), list(values))

    def cells(self) -> dict[str, Cell]:
        found = {who.name: self.cell(who) for who in CONTESTANTS}
        return {name: cell for name, cell in found.items() if cell.lanes}

    def ranks(self) -> dict[str, int]:
        """From 1, the best mean; methods of which a seed diverged or failed share the last."""
        costs = {name: cell.cost for name, cell in self.cells().items()}
        return {
            name: 1 + sum(other < cost for other in costs.values()) for name, cost in costs.items()
        }

    def leaders(self) -> set[str]:
        """The best, and all that are behind it by less than two standard errors."""
        cells = self.cells()
        first = min(cells, key=lambda name: cells[name].cost, default=None)
        if first is None or cells[first].cost == math.inf:
            return set()
        near = {name for name in cells if _close(lead(cells[first], cells[name]))}
        return near | {first}

    def curves(self) -> dict[str, Curve]:
        """Of every method whose λ is moved, and of which some seed has the whole grid."""
        found = {}
        best = self._best()
        for who in CONTESTANTS:
            mine = _of(self.grid, self._target(who))
            seeds = [s for s in _seeds(mine) if all(_at(mine, lam, s) for lam in self.lam)]
            if mine and seeds:
                found[who.name] = self._curve(mine, seeds, best)
        return found

    @property
    def lam(self) -> tuple[float, ...]:
        return tuple(sorted({lane.lam for lane in self.grid}))

    def _curve(
        self, mine: Mapping[Lane, Record], seeds: Sequence[int], best: Mapping[int, float]
    ) -> Curve:
        rows = [[_at(mine, lam, seed) for lam in self.lam] for seed in seeds]
        return Curve(
            self.lam,
            tuple(tuple(final(r, LOSS) for r in row if r) for row in rows),
            tuple(_start(mine, self.grid, seed=seed) for seed in seeds),
            tuple(seeds),
            tuple(best[seed] for seed in seeds),
            sum(r.diverged_at is not None for r in mine.values()),
            sum(r.status == "failed" for r in mine.values()),
            len(mine),
        )

    def _best(self) -> dict[int, float]:
        """The least final loss of all methods and λ, seed by seed; the start's if there is none."""
        found: dict[int, float] = {}
        for seed in _seeds(self.grid):
            mine = [final(r, LOSS) for lane, r in self.grid.items() if lane.seed == seed]
            found[seed] = min(
                (v for v in mine if math.isfinite(v)), default=_start(self.grid, seed=seed)
            )
        return found

    def _target(self, who: Contestant) -> str:
        return who.target(self.event.batch_norm)


def load(folder: Path) -> list[Outcome]:
    """What the exported records in `folder` tell, task by task.

    Raises:
        ValueError: there are none.
    """
    found = []
    for name, event in EVENTS.items():
        both = [_records(folder / f"{name}-{question}.jsonl") for question in ("default", "grid")]
        if any(both):
            found.append(Outcome(event, *both))
    if not found:
        raise ValueError(
            f"tournament: `records` must be a folder with records, got {folder}; "
            "`python -m experiments.tournament` makes them."
        )
    return found


def final(record: Record, metric: Metric) -> float:
    """At the last epoch; nan if the run diverged or failed."""
    values = record.curves.get(metric) or [None]
    lost = record.status == "failed" or record.diverged_at is not None
    return math.nan if lost or values[-1] is None else values[-1]


def _records(path: Path) -> dict[Lane, Record]:
    return {r.lane: r for r in read(path)} if path.is_file() else {}


def _of(records: Mapping[Lane, Record], target: str) -> dict[Lane, Record]:
    mine = {lane: r for lane, r in records.items() if lane.optimizer == target}
    return dict(sorted(mine.items(), key=lambda item: (item[0].seed, item[0].lam)))


def _seeds(lanes: Iterable[Lane]) -> list[int]:
    return sorted({lane.seed for lane in lanes})


def _at(mine: Mapping[Lane, Record], lam: float, seed: int) -> Record | None:
    return next((r for lane, r in mine.items() if (lane.lam, lane.seed) == (lam, seed)), None)


def _start(*where: Mapping[Lane, Record], seed: int) -> float:
    """The test loss before the first step, of the first record of the seed that tells it."""
    for records in where:
        for lane, record in records.items():
            if lane.seed == seed and (value := record.start.get(LOSS)) is not None:
                return value
    raise ValueError(f"tournament: no record of seed {seed} tells the loss at the start.")


def _close(by: Lead) -> bool:
    return by.by == 0 or bool(by.noise)
