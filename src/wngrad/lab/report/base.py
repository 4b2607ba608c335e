"""The interface of a report: what its page, its figure and its summary are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from wngrad.lab.report.cells import Cell, in_percent, more_is_better
from wngrad.lab.report.costs import Log
from wngrad.lab.report.markdown import bullets
from wngrad.lab.report.results import Results
from wngrad.lab.train.spec import Metric

FLOOR = 1e-6  # A loss of zero has no place on a log axis: it is drawn here.
SHORTEST = 0.1  # of a mean: a bar with a lower foot would fill a log axis
PICTURE = "![Two metrics over λ and over the epochs](figure.png)"


@dataclass(frozen=True, slots=True)
class Axis:
    """The axis of one metric, on paper and on the page."""

    metric: Metric
    worst: float  # what is worse is marked on the edge
    log: bool
    usable: float | None = None  # up to where a task's loss is usable

    @property
    def percent(self) -> bool:
        return in_percent(self.metric)

    @property
    def higher(self) -> bool:
        """True if more is better; what is bad is marked at the other end."""
        return more_is_better(self.metric)

    def height(self, cell: Cell) -> float | None:
        """Where a mean is drawn: accuracy in per cent, a loss within reach of a log axis."""
        if cell.mean is None:
            return None
        if self.percent:
            return 100 * cell.mean
        return min(max(cell.mean, FLOOR), 1e3 * self.worst) if self.log else cell.mean

    def bar(self, cell: Cell) -> float:
        """The standard deviation, as it is drawn."""
        return (cell.sd or 0) * (100 if self.percent else 1)

    def foot(self, cell: Cell) -> float:
        """How far a bar reaches down: on a log axis not at all if below a tenth of its mean."""
        bar, height = self.bar(cell), self.height(cell) or 0.0
        return 0.0 if self.log and height - bar < SHORTEST * height else bar

    def beyond(self, cell: Cell) -> bool:
        """True if a mean is too bad to be drawn to scale."""
        if cell.mean is None:
            return False
        return cell.mean < self.worst if self.higher else cell.mean > self.worst


class Report(ABC):
    """A report of results; the two kinds are that of the paper's figures and that of a task.

    HEAD and TABLE are the title and the id of the page's first table.

    Args:
        notes: remarks to print beside those of the records.
        recipe: what the user calls the sweep on the command line, if not by its name; of a task's
            sweep all commands that were typed, a line each.
        log: what steps cost.
    """

    HEAD: ClassVar[str]
    TABLE: ClassVar[str]

    def __init__(
        self,
        results: Results,
        notes: Sequence[str] = (),
        recipe: str = "",
        log: Log | None = None,
    ) -> None:
        self.results, self.notes, self.recipe = results, list(notes), recipe
        self.log = log or Log()

    @abstractmethod
    def verdict(self) -> str:
        """The answer to the sweep's question, in a sentence."""

    @abstractmethod
    def heads(self) -> Sequence[str]:
        """The heads of the first table's columns."""

    @abstractmethod
    def cards(self) -> list[str]:
        """The rows of the first table, as HTML."""

    @abstractmethod
    def opening(self) -> list[str]:
        """The first lines of the summary, in Markdown."""

    @abstractmethod
    def axis(self, metric: Metric) -> Axis:
        """The axis that a metric is drawn on."""

    @abstractmethod
    def beyond(self) -> str:
        """The mean values that are marked on the edge of a panel; empty if none would be."""

    @abstractmethod
    def commands(self) -> list[str]:
        """The commands that make these very results again, and the report."""

    def headline(self) -> str:
        """The title: never says more than was found."""
        return self.results.sweep.claim

    def legend(self) -> str:
        """What the columns of the first table mean, if that must be said."""
        return ""

    def markdown(self) -> str:
        """The summary: the opening, and what it all rests on."""
        facts = [f"{key}: {value}" for key, value in self.results.provenance().items()]
        lines = [
            *self.opening(),
            *["## How it was made", ""],
            *bullets([*facts, *self.results.notes(), *self.notes]),
            *["", "To make it again:", "", "```sh", *self.commands(), "```", ""],
            *["## What was left out", "", *bullets(self.results.left_out() or ["Nothing."]), ""],
        ]
        return "\n".join(lines)

    def remarks(self) -> list[str]:
        """What a reader must know: notes, and what was left out."""
        return [*self.results.notes(), *self.notes, *self.results.left_out()]

    def marks(self) -> str:
        """What the marks on the edge of the panels mean."""
        axes, beyond = [self.axis(m) for m in self.results.sweep.metrics], self.beyond()
        hollow = f", a hollow marker for {beyond}, which is where the dotted line is"
        sentences = [
            "On the grey edge, off the scale: × where a seed diverged (a hollow marker inside is "
            f"the mean of the others){hollow if beyond else ''}."
        ]
        if any(axis.log for axis in axes):
            sentences.append(
                f"On a logarithmic axis a bar that would reach below a tenth of its mean has no "
                f"foot, and a loss below {FLOOR:g} is drawn there."
            )
        if any(axis.usable is not None for axis in axes):
            sentences.append("Dashed: below it a λ is usable.")
        return " ".join(sentences)

    def provisional(self) -> str:
        """What is still to come, in a sentence; empty if nothing is."""
        results, short = self.results, []
        if results.cut_short:
            short.append(f"{results.epochs} of {results.sweep.epochs} epochs")
        if results.missing:
            short.append(f"{results.lanes - len(results.missing)} of {results.lanes} lanes")
        return f" Provisional: {', '.join(short)}." if short else ""
