"""The size of packs and the time of a sweep: arithmetic on a few measurements."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from wngrad.lab.train.spec import Kind, Pack, Sweep
from wngrad.lab.train.words import counted

LIMIT = 600.0  # seconds a pack may take, so that a lost one is cheap
LEVEL = 0.9  # of the best rate: from there on more lanes no longer pay
GROWTH = 1.1  # what the next program must gain in rate to go on measuring


@dataclass(frozen=True, slots=True)
class Measured:
    """What a program of so many lanes costs, in seconds."""

    lanes: int
    start: float  # until its first step is done: building, compiling, a first test
    step: float  # of all lanes together
    test: float
    steps: int  # of an epoch

    @property
    def epoch(self) -> float:
        return self.steps * self.step + self.test

    @property
    def rate(self) -> float:
        """Lanes × epochs a second."""
        return self.lanes / self.epoch


Costs = Mapping[Kind, Sequence[Measured]]  # by the program, in the order of their lanes


@dataclass(frozen=True, slots=True)
class Choice:
    """At most so many lanes in a pack, and why."""

    lanes: int
    why: str


def enough(costs: Sequence[Measured]) -> bool:
    """Whether more lanes would not be trained at a better rate."""
    return len(costs) > 1 and costs[-1].rate < GROWTH * costs[-2].rate


def seconds(costs: Sequence[Measured], lanes: int, epochs: int) -> float:
    """What a pack takes; between and beyond measurements an epoch is linear in the lanes."""
    sizes = [m.lanes for m in costs]
    start = np.interp(lanes, sizes, [m.start for m in costs])
    epoch = np.interp(lanes, sizes, [m.epoch for m in costs])
    full = max(1.0, lanes / sizes[-1])  # the largest that was measured is taken to be full
    return float(start + epochs * epoch * full)


def choose(
    costs: Sequence[Measured], lanes: int, slots: int, epochs: int, limit: float = LIMIT
) -> Choice:
    """The size of the packs that `lanes` lanes are cut into.

    Of those that train at nearly the best rate, the largest that takes less than `limit` seconds,
    or else the smallest; but never so large that a slot has nothing to do.

    Args:
        costs: measurements, in the order of their lanes.
        slots: how many packs can run at the same time.
    """
    best = max(m.rate for m in costs)
    full = [m.lanes for m in costs if m.rate >= LEVEL * best]
    short = [n for n in full if seconds(costs, n, epochs) <= limit]
    share, size = math.ceil(lanes / slots), (short or full[:1])[-1]
    if share < size:
        return Choice(share, f"so that all {slots} slots have work")
    if not short:
        why = f"fewer are trained at a lower rate, though these take over {clock(limit)}"
    elif size == full[-1]:
        why = "the best rate that was measured"
    else:
        why = f"more are not trained at a better rate, and take over {clock(limit)}"
    return Choice(size, why)


def even(size: int, settings: int) -> int:
    """The size that cuts `settings` into as many packs, but alike ones.

    >>> even(16, 20)
    10
    """
    return size if size >= settings else math.ceil(settings / math.ceil(settings / size))


def makespan(costs: Iterable[float], slots: int) -> float:
    """Seconds until the last is done, if whoever is free takes the next.

    >>> makespan([3, 1, 1, 1], slots=2)
    3.0
    """
    free = [0.0] * slots
    for cost in costs:
        heapq.heapreplace(free, free[0] + cost)
    return max(free)


@dataclass(frozen=True, slots=True)
class Plan:
    """The packs of a sweep, which of them are done, and what the others will take."""

    sweep: Sweep
    packs: Sequence[Pack]
    done: frozenset[str]  # names of packs
    slots: int
    resources: str  # of a pack, in words
    costs: Costs

    def lines(self) -> list[str]:
        """What `--dry-run` prints."""
        rows = [self._row(list(group)) for _, group in groupby(self.packs, self._alike)]
        lanes = sum(len(pack.lanes) for pack in self.packs)
        packs = "1 pack" if len(self.packs) == 1 else f"{len(self.packs)} packs"
        parts = [f"{counted(lanes, 'lane')} of {counted(self.sweep.epochs, 'epoch')} in {packs}"]
        parts += [f"{len(self.done)} of them done"] if self.done else []
        parts += [f"{self.slots} at a time", f"about {clock(self.seconds)} in all"]
        return [*rows, f"{', '.join(parts)}."]

    @property
    def seconds(self) -> float:
        """Of what is left; a pack that was interrupted is counted whole."""
        return makespan((self.cost(p) for p in self.packs if p.name not in self.done), self.slots)

    def cost(self, pack: Pack) -> float:
        return seconds(self.costs[self.sweep.kind(pack)], len(pack.lanes), self.sweep.epochs)

    def _alike(self, pack: Pack) -> tuple[int, Kind, bool]:
        return len(pack.lanes), self.sweep.kind(pack), pack.name in self.done

    def _row(self, packs: Sequence[Pack]) -> str:
        first, last, lanes = packs[0], packs[-1], len(packs[0].lanes)
        names = first.name if len(packs) == 1 else f"{first.name} to {last.name}"
        each = " each" if len(packs) > 1 else ""
        which = f"{names}: {counted(lanes, 'lane')}{each}"
        if first.name in self.done:
            return f"{which}, done"
        return f"{which}, {self.resources}, about {clock(self.cost(first))}"


def in_words(costs: Sequence[Measured]) -> str:
    """Measurements in a line."""
    each = ", ".join(f"{counted(m.lanes, 'lane')} {m.step * 1e3:.3g} ms" for m in costs)
    last = costs[-1]
    return f"a step of {each}; {last.test * 1e3:.3g} ms a test, {last.start:.1f} s to begin"


def clock(seconds: float) -> str:
    """Seconds as a person reads them: 42 s, 3:05, 2:10:00."""
    if seconds < 99.5:
        return f"{seconds:.0f} s" if seconds >= 9.5 else f"{seconds:.1f} s"
    return minutes(seconds)


def minutes(seconds: float) -> str:
    """Seconds as minutes and seconds: 0:42, 3:05, 2:10:00."""
    count, left = divmod(round(seconds), 60)
    hours, count = divmod(count, 60)
    return f"{hours}:{count:02d}:{left:02d}" if hours else f"{count}:{left:02d}"
