"""Records as a table: a metric over the seeds, for every optimizer and λ.

A lane whose loss was not finite has no value, and is counted: a mean stands beside the number of
lanes that diverged, and a λ at which any lane diverged is never an optimizer's best.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wngrad.lab.report.cells import ACCURACY, LOSSES, Cell, label, lam_text, more_is_better
from wngrad.lab.train.spec import Lane, Metric, Record, Setting, Sweep
from wngrad.lab.train.words import counted

USABLE = 0.05  # A λ is usable if its test accuracy is within so much of the best of all.
NEAR = 0.01  # The paper rounds its λ: 0.056 is 10^−1.25.
IDENTITY = ("dataset", "model", "batch", "weight_decay")  # what tells one experiment from another


@dataclass(frozen=True, slots=True)
class Best:
    """The λ at which an optimizer does best, and what it reaches there."""

    optimizer: str
    lam: float
    cell: Cell


class Results:
    """The records of a sweep, by optimizer, λ, metric and epoch (from 1)."""

    def __init__(
        self, sweep: Sweep, records: Sequence[Record], planned: Iterable[Lane] | None = None
    ) -> None:
        latest = {record.lane: record for record in records}
        lanes = [lane for lane in sweep.lanes if lane in latest and _belongs(sweep, latest[lane])]
        if not lanes:
            raise ValueError(
                f"report: `records` must hold a lane of the sweep {sweep.name!r}, got "
                f"{len(records)} record(s) and none of them is; `wngrad run` makes records."
            )
        self.sweep = sweep
        self.done = {lane: latest[lane] for lane in lanes if latest[lane].status == "done"}
        self.failed = [latest[lane] for lane in lanes if latest[lane].status == "failed"]
        wanted = set(sweep.lanes if planned is None else planned)
        self.missing = [lane for lane in sweep.lanes if lane in wanted.difference(lanes)]
        self.foreign = len(latest) - len(lanes)
        # The last epoch that every lane has reached: no number mixes lanes of different ages.
        whole = [r.epochs for r in self.done.values() if not r.ended]
        every = [r.epochs for r in self.done.values()]
        self.epochs = min(whole) if whole else max(every, default=0)
        self.cut_short = bool(whole or not every) and self.epochs < sweep.epochs
        self.seeds = len({lane.seed for lane in self.done})
        self._done_at: dict[Setting, list[Record]] = {}
        for lane, record in self.done.items():
            self._done_at.setdefault(Setting(lane.optimizer, lane.lam), []).append(record)

    # ----------------------------------------------------------------------------- numbers

    def by_seed(
        self, optimizer: str, lam: float, metric: Metric, epoch: int | None = None
    ) -> dict[int, float]:
        """A value for each seed that was run, nan if it diverged; by default at the last epoch."""
        at = self.epochs if epoch is None else epoch
        return {
            record.lane.seed: _value(record, metric, at)
            for record in self._done_at.get(Setting(optimizer, lam), ())
            if (length := len(record.curves.get(metric, ())))
            and (0 < at <= length or (at > length and record.ended))
        }

    def cell(self, optimizer: str, lam: float, metric: Metric, epoch: int | None = None) -> Cell:
        values = self.by_seed(optimizer, lam, metric, epoch)
        return Cell.of(metric, list(values.values()), list(values))

    def cells(self, metric: Metric) -> list[Cell]:
        """The last of every optimizer and λ."""
        return [self.cell(s.optimizer, s.lam, metric) for s in self.sweep.settings]

    def curve(self, optimizer: str, lam: float, metric: Metric) -> list[Cell]:
        """A cell for each epoch."""
        return [self.cell(optimizer, lam, metric, at + 1) for at in range(self.epochs)]

    def starts(self, optimizer: str, metric: Metric) -> dict[int, float | None]:
        """The value of each seed before training."""
        records = [r for lane, r in self.done.items() if lane.optimizer == optimizer]
        return {r.lane.seed: r.start.get(metric, self._first(r.lane.seed, metric)) for r in records}

    def _first(self, seed: int, metric: Metric) -> float | None:
        """In place of the value before training: the worst first report at the least λ."""
        if self.sweep.program != "function":
            return None
        firsts = []
        for name in self.sweep.optimizers:
            record = self.done.get(Lane(name, min(self.sweep.grid(name)), seed))
            value = None if record is None else next(iter(record.curves.get(metric, ())), None)
            firsts += [] if value is None else [value]
        return (min if more_is_better(metric) else max)(firsts, default=None)

    @property
    def has_starts(self) -> bool:
        """True if the records say what held before training."""
        return all(record.start for record in self.done.values())

    def start(self, metric: Metric) -> float | None:
        """The mean over the seeds before training; None if the records do not have it."""
        by_seed: dict[int, float | None] = {}
        for name in self.sweep.optimizers:
            by_seed |= self.starts(name, metric)
        values = [value for value in by_seed.values() if value is not None]
        return sum(values) / len(values) if values else None

    def best(self, optimizer: str, metric: Metric | None = None) -> Best | None:
        """Where the mean of a metric (the sweep's `best_by`) is best; never where one diverged."""
        by = metric or self.sweep.best_by
        grid = self.sweep.grid(optimizer)
        every = [Best(optimizer, lam, self.cell(optimizer, lam, by)) for lam in grid]
        lacking = [self._lacking(optimizer, best.lam, best.cell) for best in every]
        fewest = min(lacking)  # a λ that lost seeds is not compared
        sound = [
            best
            for best, count in zip(every, lacking, strict=True)
            if best.cell.cost < math.inf and count == fewest
        ]
        return min(sound, key=lambda best: best.cell.cost, default=None)

    def _lacking(self, optimizer: str, lam: float, cell: Cell) -> int:
        """How many seeds that the optimizer was run with are planned at a λ, but not in a cell."""
        ran = {lane.seed for lane in self.done if lane.optimizer == optimizer}
        setting = Setting(optimizer, lam)
        planned = [seed for seed in self.sweep.seeds if setting in self.sweep.settings_of(seed)]
        return len(ran.intersection(planned)) - cell.lanes

    def at_default(self, optimizer: str) -> Best | None:
        """What it reaches at the λ of its signature; None if it was not run there."""
        lam = self.sweep.default_lam(optimizer)
        if lam is None:
            return None
        cell = self.cell(optimizer, lam, self.sweep.best_by)
        return Best(optimizer, lam, cell) if cell.lanes else None

    def best_of_all(self, metric: Metric) -> Best | None:
        bests = [best for name in self.sweep.optimizers if (best := self.best(name, metric))]
        return min(bests, key=lambda best: best.cell.cost, default=None)

    def usable(self, optimizer: str, within: float = USABLE) -> list[float]:
        """The λ whose mean test accuracy is within `within` of the best of all optimizers.

        The best of *all*: measured by its own best, an optimizer that is poor everywhere would be
        the most robust one.
        """
        best = self.best_of_all(ACCURACY)
        limit = math.inf if best is None else best.cell.cost + within
        costs = {lam: self.cell(optimizer, lam, ACCURACY).cost for lam in self.sweep.lam}
        return [lam for lam, cost in costs.items() if cost < math.inf and cost <= limit]

    def diverged(self, optimizer: str) -> int:
        """How many lanes of an optimizer diverged."""
        lanes = (r for lane, r in self.done.items() if lane.optimizer == optimizer)
        return sum(_lost(r, self.epochs, self.sweep.best_by) for r in lanes)

    def finished(self, optimizer: str) -> int:
        """How many lanes of an optimizer have a result."""
        return sum(lane.optimizer == optimizer for lane in self.done)

    def nearest(self, lam: float) -> float:
        """The λ of the grid that the paper writes as `lam`, rounded."""
        near = min(filter(None, self.sweep.lam), key=lambda grid: abs(math.log(grid / lam)))
        if abs(near / lam - 1) > NEAR:
            raise ValueError(
                f"report: `lam` must be a λ of the sweep {self.sweep.name!r} to 1 %, got {lam!r}; "
                f"the nearest is {near:.4g}."
            )
        return near

    # ------------------------------------------------------------------------------- words

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Every metric that the sweep shows or a record has."""
        first = LOSSES if self.sweep.program != "function" else ()
        return tuple(dict.fromkeys((*first, *self.sweep.metrics, *self.recorded)))

    @property
    def recorded(self) -> list[Metric]:
        """Every metric that a record has: those of validation first, then those of the test."""
        curves = {key for record in self.done.values() for key in record.curves}
        return sorted(curves, key=lambda key: (key.partition("_")[0] != "valid", key))

    def label(self, metric: Metric) -> str:
        """How a report writes a metric: a task's by the name that its author gave it."""
        part, _, name = metric.partition("_")
        own = name in ("score", "error") and self.sweep.metric_name
        if part not in ("valid", "test"):
            return label(metric)
        where = "validation" if part == "valid" else "test"
        return f"{where} {own or name.replace('_', ' ')}"

    @property
    def time(self) -> tuple[str, list[int]]:
        """What curves are drawn over: epochs, or the steps at which a function reported."""
        steps = max((r.steps for r in self.done.values()), key=len, default=[])
        alike = all(r.steps == steps[: len(r.steps)] for r in self.done.values())
        if steps and alike:
            return "step", steps
        return ("report" if steps else "epoch"), list(range(1, self.epochs + 1))

    def last(self) -> str:
        """Where the final values were taken, in words."""
        word, at = self.time
        return f"{word} {at[-1] if at else 0}"

    @property
    def lanes(self) -> int:
        """How many there are to be, with a record or without."""
        return len(self.done) + len(self.failed) + len(self.missing)

    def facts(self) -> str:
        """What was run, in a line."""
        sweep = self.sweep
        problem = ", ".join(map(label, dict.fromkeys((sweep.dataset, sweep.model))))
        lanes = f"{len(self.done)} of {self.lanes} lanes"
        times = counted(self.epochs, "epoch" if self.time[0] == "epoch" else "report")
        return f"{problem}; {self._n()}, {times}, {lanes}"

    @property
    def n_text(self) -> str:
        """The number of seeds in words, if need be from the least to the greatest of a λ."""
        counts = self._counts().values()
        least, most = min(counts), max(counts)
        if least in (0, most):
            return f"n = {counted(self.seeds, 'seed')}"
        return f"n = {least} to {most} seeds"

    @property
    def same_n(self) -> bool:
        """Whether all λ that have a result have it of as many seeds."""
        return len(set(self._counts().values()) - {0}) < 2

    def _counts(self) -> dict[Setting, int]:
        """The number of seeds that have a result, at every λ of the grids."""
        names = self.sweep.optimizers
        grid = [Setting(name, lam) for name in names for lam in self.sweep.grid(name)]
        return {setting: len(self._done_at.get(setting, ())) for setting in grid}

    def _n(self) -> str:
        """The number of seeds; and where there are most, if it is not the same at all."""
        counts = self._counts()
        most = max(counts.values())
        if min(counts.values()) in (0, most):
            return self.n_text
        fewer = {setting for setting, count in counts.items() if count < most}
        return f"{self.n_text} ({most} {'; '.join(self._all_but(fewer))})"

    def _all_but(self, fewer: set[Setting]) -> list[str]:
        """The sweep's settings but these: λ that all optimizers share first, then by optimizer."""
        out = []
        every = {lam for lam in self.sweep.lam if not any(s.lam == lam for s in fewer)}
        if every:
            out.append(f"at {_lam_list(every)}")
        for name in self.sweep.optimizers:
            own = {lam for lam in self.sweep.grid(name) if Setting(name, lam) not in fewer} - every
            if own and not any(s.optimizer == name for s in fewer):
                out.append(f"of {label(name)}")
            elif own:
                out.append(f"of {label(name)} at {_lam_list(own)}")
        return out

    def provenance(self) -> dict[str, str]:
        """Every distinct value of what the records say of their making."""
        values: dict[str, dict[str, None]] = {}
        for record in (*self.done.values(), *self.failed):
            made = {k: record.settings[k] for k in ("precision", "data") if k in record.settings}
            for key, value in (record.environment | made).items():
                values.setdefault(key, {})[str(value)] = None
        return {key: text for key, each in values.items() if (text := "; ".join(each))}

    def notes(self) -> list[str]:
        """The remarks of the data and of the run, once each."""
        records = (*self.done.values(), *self.failed)
        return list(dict.fromkeys(str(note) for r in records if (note := r.settings.get("note"))))

    def left_out(self) -> list[str]:
        """What these numbers do not rest on, in sentences."""
        every, asked = self.lanes, self.sweep.epochs
        out = []
        if self.missing:
            which = few(self._missing())
            out.append(f"{len(self.missing)} of {every} lanes have not been run: {which}.")
        if self.failed:
            out.append(f"{len(self.failed)} of {every} lanes failed: {few(self._failures())}.")
        out += self._undefined()
        if self.foreign:
            out.append(f"Records of lanes that this sweep does not have, not used: {self.foreign}.")
        if self.cut_short:
            out.append(
                f"All numbers are at epoch {self.epochs}, the last that every lane reached; the "
                f"sweep asks for {asked}."
            )
        return out

    def _missing(self) -> list[str]:
        """The lanes that have not been run, whole seeds first."""
        ran = {lane.seed for lane in (*self.done, *(r.lane for r in self.failed))}
        seeds = [f"all of seed {seed}" for seed in self.sweep.seeds if seed not in ran]
        return seeds + [str(lane) for lane in self.missing if lane.seed in ran]

    def _failures(self) -> list[str]:
        """The lanes that failed, by reason."""
        lanes: dict[str, list[str]] = {}
        for record in self.failed:
            lanes.setdefault(record.reason or "no reason given", []).append(str(record.lane))
        return [f"{few(names, 2)} ({reason})" for reason, names in lanes.items()]

    def _undefined(self) -> list[str]:
        """The lanes that have a loss and yet no metric, in a sentence for each metric."""
        out = []
        for metric in self.metrics if self.epochs else ():
            lanes = [
                str(lane)
                for lane, record in self.done.items()
                if not metric.endswith("_loss")
                and record.diverged_at is None
                and metric in record.curves
                and record.curves[metric][: self.epochs][-1] is None
            ]
            if lanes:
                what = f"{self.label(metric)} is not a finite number"
                out.append(f"{what} in {len(lanes)} of {len(self.done)} lanes: {few(lanes)}.")
        return out


def few(items: Iterable[str], most: int = 6) -> str:
    """The first items, and how many more there are."""
    every = list(items)
    more = f"; and {len(every) - most} more" if len(every) > most else ""
    return "; ".join(every[:most]) + more


def _lam_list(lams: Iterable[float]) -> str:
    return f"λ = {', '.join(map(lam_text, sorted(lams)))}"


def _belongs(sweep: Sweep, record: Record) -> bool:
    """True unless the record is of another experiment that has lanes of the same name."""
    settings, identity = record.settings, sweep.identity()
    return all(key not in settings or settings[key] == identity[key] for key in IDENTITY)


def _value(record: Record, metric: Metric, epoch: int) -> float:
    # A network of nan still has a test accuracy, that of guessing: the training loss decides.
    lost = record.diverged_at is not None and record.diverged_at <= epoch
    values = record.curves[metric][:epoch]  # a run that has ended stays as it was
    value = values[-1] if values else None
    return math.nan if lost or value is None else value


def _lost(record: Record, epoch: int, by: Metric) -> bool:
    """True if a run has diverged by an epoch."""
    metric = "train_loss" if "train_loss" in record.curves else by
    return metric in record.curves and math.isnan(_value(record, metric, epoch))
