"""What the paper says of its experiments, as data that can be measured.

A claim holds or does not hold by a rule that stands beside it; where lanes are missing it is not
judged at all. What rests on a single seed is called a look, whatever it shows. A lead that is
smaller than two standard errors of it is called noise, and still counts for the side that has it:
the report shows both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple

from wngrad.lab.report.cells import ACCURACY, Cell, Lead, label, lam_text, lead
from wngrad.lab.report.results import NEAR, Best, Results
from wngrad.lab.train.spec import Metric

GUESSING = 2.3  # ln 10, the loss of guessing among ten classes; down: who just guesses is above


class UnjudgedError(Exception):
    """The lanes that are there do not suffice to judge a claim; the message says why."""


class Verdict(NamedTuple):
    """What a claim's rule says of some results."""

    measured: str
    holds: bool
    cells: Sequence[Cell]  # what it was measured from
    decisive: Sequence[Cell] | None = None  # those that could turn it; None: all of them


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim beside what was measured."""

    text: str
    source: str
    measured: str
    n: int  # lanes that the finding rests on
    rule: str  # by which it was judged
    holds: bool | None  # None: cannot be judged, `measured` says why
    look: bool = False  # it rests on a single seed somewhere

    @property
    def verdict(self) -> str:
        if self.look and self.holds is not None:
            return f"a look (n = 1): {'yes' if self.holds else 'no'}"
        return {True: "holds", False: "does not hold", None: "cannot be judged"}[self.holds]


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement, in the words of its source; each kind knows how to judge it.

    `RULE` says how, with the claim's fields in braces: names are written as in a report, {much}
    is `within` in the unit of the metric, {since} is a `start` that is not 0.
    """

    text: str
    source: Literal["paper", "ours"] = field(default="paper", kw_only=True)
    RULE: ClassVar[str] = ""

    @property
    def rule(self) -> str:
        """How the claim is judged, in words."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        within, accuracy = values.get("within", 0), values.get("metric", ACCURACY) == ACCURACY
        much = f"{100 * within:g} points" if accuracy else f"{within:g}"
        since = f"from {values['start']:g} " if values.get("start") else ""
        names = {key: label(value) for key, value in values.items() if isinstance(value, str)}
        return self.RULE.format(**values | names, much=much, since=since)

    def judge(self, results: Results) -> Verdict:
        raise NotImplementedError

    def measure(self, results: Results) -> Finding:
        """The finding of the claim in these results."""
        try:
            verdict = self.judge(results)
        except UnjudgedError as why:
            return Finding(self.text, self.source, str(why), 0, self.rule, None)
        n = sum(cell.lanes for cell in verdict.cells)
        decisive = verdict.cells if verdict.decisive is None else verdict.decisive
        look = any(cell.lanes < 2 for cell in decisive)
        return Finding(self.text, self.source, verdict.measured, n, self.rule, verdict.holds, look)


@dataclass(frozen=True, slots=True)
class Ahead(Claim):
    """One optimizer has the better final mean at one λ."""

    RULE = "{winner} has the better mean {metric} at the last epoch"
    metric: Metric
    winner: str
    loser: str
    lam: float

    def judge(self, results: Results) -> Verdict:
        lam = results.nearest(self.lam)
        cells = [_cell(results, name, lam, self.metric) for name in (self.winner, self.loser)]
        ahead = lead(*cells)
        pair = zip((self.winner, self.loser), cells, strict=True)
        text = ", ".join(f"{label(name)} {cell.brief}" for name, cell in pair)
        return Verdict(f"{text}: {ahead}", ahead.by > 0, cells)


@dataclass(frozen=True, slots=True)
class AheadOver(Claim):
    """One optimizer has the better final mean at every λ of a range."""

    RULE = "{winner} has the better mean {metric} at every λ from {lo:g} to {hi:g}"
    metric: Metric
    winner: str
    loser: str
    lo: float
    hi: float

    def judge(self, results: Results) -> Verdict:
        lams = _between(results, self.lo, self.hi)
        leads, cells = _leads(results, self.winner, self.loser, self.metric, lams)
        lost = [lam for lam in lams if not leads[lam].by > 0]
        least = min(lams, key=lambda lam: leads[lam].by)
        text = f"ahead at {len(lams) - len(lost)} of {len(lams)} λ{_except(lost)}"
        text += f"; narrowest at λ = {lam_text(least)}: {leads[least]}"
        return Verdict(text, not lost, cells)


@dataclass(frozen=True, slots=True)
class Level(Claim):
    """Two optimizers do equally well at every λ below a limit."""

    RULE = "the means of the {metric} differ by at most {much} at every λ below {below:g}"
    metric: Metric
    first: str
    second: str
    below: float
    within: float

    def judge(self, results: Results) -> Verdict:
        lams = _between(results, 0, self.below * (1 - 2 * NEAR))
        leads, cells = _leads(results, self.first, self.second, self.metric, lams)
        far = [lam for lam in lams if not abs(leads[lam].by) <= self.within]
        most = max(lams, key=lambda lam: abs(leads[lam].by))
        text = f"level at {len(lams) - len(far)} of {len(lams)} λ; widest at λ = {lam_text(most)}"
        return Verdict(f"{text}: {label(self.first)} is {leads[most]}", not far, cells)


@dataclass(frozen=True, slots=True)
class BestAt(Claim):
    """An optimizer's best λ is this one of the grid."""

    RULE = "of all λ, {optimizer}'s mean {metric} at the last epoch is best at {lam:g}"
    metric: Metric
    optimizer: str
    lam: float

    def judge(self, results: Results) -> Verdict:
        best = _best(results, self.optimizer, self.metric)
        named = results.nearest(self.lam)
        cells = {lam: results.cell(self.optimizer, lam, self.metric) for lam in results.sweep.lam}
        text = f"best at λ = {lam_text(best.lam)}: {label(self.metric)} {best.cell.brief}"
        others = [lam for lam in cells if lam != best.lam]
        if others:  # that which is named, or the next best
            next_best = min(others, key=lambda lam: cells[lam].cost)
            other = next_best if best.lam == named else named
            apart = lead(best.cell, cells[other])
            text += f"; at {lam_text(other)}: {cells[other].brief}, the best is {apart}"
        return Verdict(text, best.lam == named, list(cells.values()))


@dataclass(frozen=True, slots=True)
class AlongTheWay(Claim):
    """Each at its best λ, one optimizer is ahead during the training and at its end."""

    RULE = (
        "each at its best λ, {winner} has the better mean {metric} at the last epoch and in at "
        "least {share:.0%} of all epochs"
    )
    metric: Metric
    winner: str
    loser: str
    share: float = 0.9

    def judge(self, results: Results) -> Verdict:
        bests = [_best(results, name) for name in (self.winner, self.loser)]
        curves = [results.curve(best.optimizer, best.lam, self.metric) for best in bests]
        leads = [lead(*pair) for pair in zip(*curves, strict=True)]
        ahead = sum(lead.by > 0 for lead in leads)
        where = " and ".join(f"{label(b.optimizer)} at {lam_text(b.lam)}" for b in bests)
        text = f"{where}: ahead in {ahead} of {len(leads)} epochs; at the end {leads[-1]}"
        holds = ahead >= self.share * len(leads) and leads[-1].by > 0
        return Verdict(text, holds, [curve[-1] for curve in curves])


@dataclass(frozen=True, slots=True)
class Trains(Claim):
    """One optimizer trains at every λ up to a limit, and its rival does not."""

    RULE = (
        "at every λ {since}up to {up_to:g} every seed of {optimizer} ends with a train loss below "
        "{below:g}, that of guessing; {rival} fails this at some λ"
    )
    optimizer: str
    rival: str
    up_to: float
    start: float = 0.0  # Below it, too small a λ has not trained anything yet.
    below: float = GUESSING

    def judge(self, results: Results) -> Verdict:
        lams = _between(results, self.start, self.up_to)
        every: list[Cell] = []
        texts, failures = [], []
        for name in (self.optimizer, self.rival):
            cells = {lam: _cell(results, name, lam, "train_loss") for lam in lams}
            fails = [lam for lam in lams if not self._trains(results, name, lam)]
            text = f"{label(name)} trains at {len(lams) - len(fails)} of {len(lams)} λ"
            texts.append(f"{text}{_except(fails)}; {_worst_seed(cells)}")
            every += cells.values()
            failures.append(fails)
        return Verdict(". ".join(texts), not failures[0] and bool(failures[1]), every)

    def _trains(self, results: Results, optimizer: str, lam: float) -> bool:
        values = results.by_seed(optimizer, lam, "train_loss").values()
        return all(value < self.below for value in values)  # False for nan


@dataclass(frozen=True, slots=True)
class MoreRobust(Claim):
    """One optimizer does well at more λ of the grid than another (`Results.usable`)."""

    RULE = "{robust} has a mean test accuracy within {much} of the best of all optimizers at more λ"
    robust: str
    fragile: str
    within: float = 0.05

    def judge(self, results: Results) -> Verdict:
        lams, names = results.sweep.lam, (self.robust, self.fragile)
        cells = {(name, lam): _cell(results, name, lam, ACCURACY) for name in names for lam in lams}
        usable = {name: results.usable(name, self.within) for name in names}
        best = _best_of_all(results)
        counts = ", ".join(
            f"{label(name)} at {len(good)} of {len(lams)} λ"
            + (f" ({', '.join(map(lam_text, sorted(good)))})" if good else "")
            for name, good in usable.items()
        )
        text = f"{counts}; the best is {best.cell}, {_where(best)}"
        margin = len(usable[self.robust]) - len(usable[self.fragile])
        holds, every = margin > 0, list(cells.values())
        several = [cell for cell in every if cell.lanes > 1]
        if not several or len(several) == len(every):
            return Verdict(text, holds, every)
        reach = _reach(several, best)
        turning = [  # what another seed might put on the other side of the limit, against this
            cell
            for (name, lam), cell in cells.items()
            if cell.lanes == 1
            and _close_to_limit(cell, best, self.within, reach)
            and (lam in usable[name]) == ((name == self.robust) == holds)
        ]
        needed = margin if holds else 1 - margin  # so many λ must change sides to turn it
        text += (
            f"; {len(every) - len(several)} of {len(every)} means are of one seed, {len(turning)} "
            "of these so close to the limit that another could turn them against it (within "
            f"{100 * reach:.2g} points, {_sds(best)} of the largest sd)"
        )
        return Verdict(text, holds, every, every if len(turning) >= needed else several)


@dataclass(frozen=True, slots=True)
class Generalizes(Claim):
    """At one λ an optimizer still does fairly well on the test set."""

    RULE = "the mean test accuracy is within {much} of the best of all optimizers"
    optimizer: str
    lam: float
    within: float = 0.1

    def judge(self, results: Results) -> Verdict:
        lam = results.nearest(self.lam)
        cell = _cell(results, self.optimizer, lam, ACCURACY)
        holds = lam in results.usable(self.optimizer, self.within)
        best = _best_of_all(results)
        text = f"{cell.brief}; the best is {best.cell.brief}, {_where(best)}"
        if (best.optimizer, best.lam) != (self.optimizer, lam):
            text += f": {lead(cell, best.cell)}"
        cells, reach = [cell, best.cell], _reach([cell], best)
        if (
            best.cell.lanes > 1
            or cell.lanes == 1
            or _close_to_limit(cell, best, self.within, reach)
        ):
            return Verdict(text, holds, cells)
        text += (
            f"; other seeds may move that limit by {100 * reach:.2g} points, which is too little"
        )
        return Verdict(text, holds, cells, [cell])


@dataclass(frozen=True, slots=True)
class Flat(Claim):
    """An optimizer ends at the same place from every λ."""

    RULE = "over all λ, the mean {metric} varies by at most {within:.0%}"
    metric: Metric
    optimizer: str
    within: float = 0.01

    def judge(self, results: Results) -> Verdict:
        lams = results.sweep.lam
        cells = [_cell(results, self.optimizer, lam, self.metric) for lam in lams]
        low, high = (extreme(cells, key=lambda cell: cell.cost) for extreme in (min, max))
        text = f"lowest {low.brief}, highest {high.brief}, over {len(lams)} λ"
        if low.mean is None or high.mean is None or high.diverged:
            return Verdict(text, False, cells)
        text += f": the lowest is {lead(low, high)}"
        return Verdict(text, abs(high.mean - low.mean) <= self.within * abs(low.mean), cells)


def _leads(
    results: Results, first: str, second: str, metric: Metric, lams: Sequence[float]
) -> tuple[dict[float, Lead], list[Cell]]:
    pairs = [[_cell(results, name, lam, metric) for name in (first, second)] for lam in lams]
    leads = {lam: lead(*pair) for lam, pair in zip(lams, pairs, strict=True)}
    return leads, [cell for pair in pairs for cell in pair]


def _cell(results: Results, optimizer: str, lam: float, metric: Metric) -> Cell:
    cell = results.cell(optimizer, lam, metric)
    if not cell.lanes:
        raise UnjudgedError(f"no run of {label(optimizer)} at λ = {lam_text(lam)}")
    return cell


def _best(results: Results, optimizer: str, metric: Metric | None = None) -> Best:
    for lam in results.sweep.lam:
        _cell(results, optimizer, lam, results.sweep.metrics[1])
    best = results.best(optimizer, metric)
    if best is None:
        raise UnjudgedError(f"{label(optimizer)} has no λ at which no seed diverged")
    return best


def _best_of_all(results: Results) -> Best:
    best = results.best_of_all(ACCURACY)
    if best is None:
        raise UnjudgedError("every λ of every optimizer has a seed that diverged")
    return best


def _where(best: Best) -> str:
    return f"{label(best.optimizer)} at λ = {lam_text(best.lam)}"


def _reach(several: Sequence[Cell], best: Best) -> float:
    """How far one more seed may move a mean of one seed from the limit."""
    return _sds(best) * max(cell.sd or 0.0 for cell in several)


def _sds(best: Best) -> int:
    """How many standard deviations: twice as many if the limit, too, comes from a single seed."""
    return 4 if best.cell.lanes == 1 else 2


def _close_to_limit(cell: Cell, best: Best, within: float, reach: float) -> bool:
    """Whether other seeds might put a mean on the other side of the limit."""
    limit = -math.inf if best.cell.mean is None else best.cell.mean - within
    return cell.mean is None or abs(cell.mean - limit) <= reach


def _worst_seed(cells: Mapping[float, Cell]) -> str:
    """The seed that ends worst over these λ, in words: it is what decides."""
    if diverged := sum(cell.diverged for cell in cells.values()):
        where = [lam_text(lam) for lam, cell in cells.items() if cell.diverged]
        lanes = sum(cell.lanes for cell in cells.values())
        return f"{diverged} of {lanes} lanes diverged, at λ = {', '.join(where)}"
    losses = [(value, lam) for lam, cell in cells.items() for _, value in cell.by_seed]
    value, lam = max(losses)
    return f"the worst seed ends at {value:#.3g}, at λ = {lam_text(lam)}"


def _between(results: Results, lo: float, hi: float) -> list[float]:
    lams = [lam for lam in results.sweep.lam if lo * (1 - NEAR) <= lam <= hi * (1 + NEAR)]
    if not lams:
        raise UnjudgedError(f"the sweep has no λ from {lo:g} to {hi:g}")
    return sorted(lams)


def _except(lams: Sequence[float]) -> str:
    return f", not at λ = {', '.join(lam_text(lam) for lam in sorted(lams))}" if lams else ""
