"""Records as a table: a metric over the seeds, for every optimizer and λ.

A lane whose loss was not finite has no value, and is counted: a mean stands beside the number of
lanes that diverged, and a λ at which any lane diverged is never an optimizer's best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from wngrad.lab.report.cells import ACCURACY, Cell, label
from wngrad.lab.train.spec import METRICS, Lane, Metric, Record, Sweep

USABLE = 0.05  # A λ is usable if its test accuracy is within so much of the best of all.
NEAR = 0.01  # The paper rounds its λ: 0.056 is 10^−1.25.


@dataclass(frozen=True, slots=True)
class Best:
    """The λ at which an optimizer does best, and what it reaches there."""

    optimizer: str
    lam: float
    cell: Cell


class Results:
    """The records of a sweep, to be asked by optimizer, λ, metric and epoch (from 1)."""

    def __init__(self, sweep: Sweep, records: Sequence[Record]) -> None:
        latest = {record.lane: record for record in records}
        mine = {
            lane: latest[lane]
            for lane in sweep.lanes
            if lane in latest and _of(sweep, latest[lane])
        }
        if not mine:
            raise ValueError(
                f"report: `records` must hold a lane of the sweep {sweep.name!r}, got "
                f"{len(records)} record(s) and none of them is; `wngrad run` makes records."
            )
        self.sweep = sweep
        self.done = {lane: r for lane, r in mine.items() if r.status == "done"}
        self.failed = [r for r in mine.values() if r.status == "failed"]
        self.missing = [lane for lane in sweep.lanes if lane not in mine]
        self.foreign = len(latest) - len(mine)
        # The last epoch that every lane has reached: no number mixes lanes of different ages.
        self.epochs = min((r.epochs for r in self.done.values()), default=0)

    def values(
        self, optimizer: str, lam: float, metric: Metric, epoch: int | None = None
    ) -> list[float]:
        """One value per seed that was run, nan if it diverged; at the last epoch unless told."""
        return list(self.by_seed(optimizer, lam, metric, epoch).values())

    def cell(self, optimizer: str, lam: float, metric: Metric, epoch: int | None = None) -> Cell:
        found = self.by_seed(optimizer, lam, metric, epoch)
        return Cell.of(metric, list(found.values()), list(found))

    def by_seed(
        self, optimizer: str, lam: float, metric: Metric, epoch: int | None = None
    ) -> dict[int, float]:
        """The values with their seeds."""
        at = self.epochs if epoch is None else epoch
        lanes = (Lane(optimizer, lam, seed) for seed in self.sweep.seeds)
        found = (self.done[lane] for lane in lanes if lane in self.done)
        return {
            r.lane.seed: _value(r, metric, at)
            for r in found
            if 0 < at <= len(r.curves.get(metric, ()))
        }

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What the records tell: the paper's three, or a task's own."""
        return tuple(dict.fromkeys(("train_loss", "test_loss", *self.sweep.metrics, *_own(self))))

    def label(self, metric: Metric) -> str:
        """How a report writes a metric: a task's by the name that its author gave it."""
        own = metric in ("test_score", "test_error") and self.sweep.metric_name
        return f"test {self.sweep.metric_name}" if own else label(metric)

    def cells(self, metric: Metric) -> list[Cell]:
        """The last of every optimizer and λ."""
        return [self.cell(s.optimizer, s.lam, metric) for s in self.sweep.settings]

    def start(self, metric: Metric) -> float | None:
        """The mean over the seeds before training; None if the records do not tell."""
        by_seed: dict[int, float | None] = {}
        for name in self.sweep.optimizers:
            by_seed |= self.starts(name, metric)
        found = [value for value in by_seed.values() if value is not None]
        return sum(found) / len(found) if found else None

    def starts(self, optimizer: str, metric: Metric) -> dict[int, float | None]:
        """What each seed began from."""
        mine = (r for lane, r in self.done.items() if lane.optimizer == optimizer)
        return {r.lane.seed: r.start.get(metric) for r in mine}

    def undefined(self) -> list[str]:
        """The lanes that have a loss and yet no metric, in a sentence for each metric."""
        out = []
        for metric in self.metrics:
            if metric in ("train_loss", "test_loss") or not self.epochs:
                continue
            lost = [
                str(lane)
                for lane, r in self.done.items()
                if r.diverged_at is None
                and metric in r.curves
                and r.curves[metric][self.epochs - 1] is None
            ]
            if lost:
                what = f"{self.label(metric)} is not a finite number"
                out.append(f"{what} in {len(lost)} of {len(self.done)} lanes: {few(lost)}.")
        return out

    def curve(self, optimizer: str, lam: float, metric: Metric) -> list[Cell]:
        """A cell for each epoch."""
        return [self.cell(optimizer, lam, metric, at + 1) for at in range(self.epochs)]

    def best(self, optimizer: str, metric: Metric | None = None) -> Best | None:
        """Where the mean of a metric (the sweep's `best_by`) is best; never where one diverged."""
        by = metric or self.sweep.best_by
        found = [Best(optimizer, lam, self.cell(optimizer, lam, by)) for lam in self.sweep.lam]
        most = max(
            (best.cell.n for best in found), default=0
        )  # a λ that lost seeds is not compared
        found = [best for best in found if best.cell.cost < math.inf and best.cell.n == most]
        return min(found, key=lambda best: best.cell.cost, default=None)

    def best_of_all(self, metric: Metric) -> Best | None:
        found = [best for name in self.sweep.optimizers if (best := self.best(name, metric))]
        return min(found, key=lambda best: best.cell.cost, default=None)

    def usable(self, optimizer: str, within: float = USABLE) -> list[float]:
        """The λ whose mean test accuracy is within `within` of the best of all optimizers.

        The best of *all*: measured by its own best, an optimizer that is poor everywhere would be
        the most robust one.
        """
        best = self.best_of_all(ACCURACY)
        limit = math.inf if best is None else best.cell.cost + within
        cells = {lam: self.cell(optimizer, lam, ACCURACY) for lam in self.sweep.lam}
        return [lam for lam, cell in cells.items() if cell.cost < math.inf and cell.cost <= limit]

    def diverged(self, optimizer: str) -> int:
        """Lanes of an optimizer that diverged."""
        cells = [self.cell(optimizer, lam, "train_loss") for lam in self.sweep.lam]
        return sum(cell.diverged for cell in cells)

    def nearest(self, lam: float) -> float:
        """The λ of the grid that the paper writes as `lam`, rounded."""
        near = min(self.sweep.lam, key=lambda grid: abs(math.log(grid / lam)))
        if abs(near / lam - 1) > NEAR:
            raise ValueError(
                f"report: `lam` must be a λ of the sweep {self.sweep.name!r} to 1 %, got {lam!r}; "
                f"the nearest is {near:.4g}."
            )
        return near

    def facts(self) -> str:
        """What was run, in a line."""
        sweep, seeds = self.sweep, len({lane.seed for lane in self.done})
        lanes = f"{len(self.done)} of {len(sweep.lanes)} lanes"
        what = label(sweep.dataset)
        what += f", {label(sweep.model)}" if sweep.model != sweep.dataset else ""
        many = "seed" if seeds == 1 else "seeds"
        return f"{what}; n = {seeds} {many}, {self.epochs} epochs, {lanes}"

    def provenance(self) -> dict[str, str]:
        """Every distinct value of what the records say of their making."""
        found: dict[str, list[str]] = {}
        for record in (*self.done.values(), *self.failed):
            kept = {k: record.settings[k] for k in ("precision", "data") if k in record.settings}
            for key, value in (record.environment | kept).items():
                _add(found.setdefault(key, []), value)
        return {key: "; ".join(values) for key, values in found.items()}

    def notes(self) -> list[str]:
        """What the data or the run had to remark, once each."""
        found: list[str] = []
        for record in (*self.done.values(), *self.failed):
            _add(found, record.settings.get("note") or "")
        return [note for note in found if note]

    def left_out(self) -> list[str]:
        """What these numbers do not rest on, in sentences."""
        every, asked = len(self.sweep.lanes), self.sweep.epochs
        out = []
        if self.missing:
            ran = {lane.seed for lane in (*self.done, *(r.lane for r in self.failed))}
            seeds = [seed for seed in self.sweep.seeds if seed not in ran]
            rest = [str(lane) for lane in self.missing if lane.seed not in seeds]
            which = few([*(f"all of seed {seed}" for seed in seeds), *rest])
            out.append(f"{len(self.missing)} of {every} lanes have not been run: {which}.")
        if self.failed:
            by_reason: dict[str, list[str]] = {}
            for record in self.failed:
                by_reason.setdefault(record.reason or "no reason given", []).append(
                    str(record.lane)
                )
            which = few(f"{few(lanes, 2)} ({reason})" for reason, lanes in by_reason.items())
            out.append(f"{len(self.failed)} of {every} lanes failed: {which}.")
        out += self.undefined()
        if self.foreign:
            out.append(f"{self.foreign} records are of lanes that this sweep does not have.")
        if self.epochs < asked:
            out.append(
                f"All numbers are at epoch {self.epochs}, the last that every lane reached; the "
                f"sweep asks for {asked}."
            )
        return out


def few(items: Iterable[str], most: int = 6) -> str:
    """The first items, and how many more there are."""
    every = list(items)
    more = f"; and {len(every) - most} more" if len(every) > most else ""
    return "; ".join(every[:most]) + more


def _of(sweep: Sweep, record: Record) -> bool:
    """Whether a record is of this experiment, and not of one that has lanes of the same name."""
    said, same = record.settings, ("dataset", "model", "batch", "weight_decay")
    return all(key not in said or said[key] == sweep.identity()[key] for key in same)


def _own(results: Results) -> tuple[Metric, ...]:
    if not results.sweep.task:
        return METRICS
    curves = next((r.curves for r in results.done.values()), {})
    return tuple(key for key in get_args(Metric) if key in curves)


def _value(record: Record, metric: Metric, epoch: int) -> float:
    # A network of nan still has a test accuracy, that of guessing: the training loss decides.
    lost = record.diverged_at is not None and record.diverged_at <= epoch
    value = record.curves[metric][epoch - 1]
    return math.nan if lost or value is None else value


def _add(found: list[str], value: Any) -> None:
    if str(value) not in found:
        found.append(str(value))
