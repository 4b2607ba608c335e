"""The report of a sweep of one's own task: how much each optimizer depends on λ."""

from __future__ import annotations

import math
import shlex
from functools import cached_property

from wngrad.lab.report import dependence, page
from wngrad.lab.report.base import PICTURE, Axis, Report
from wngrad.lab.report.cells import ACCURACY, HIGHER, LOSSES, label, lam_text, lead
from wngrad.lab.report.dependence import BY, Dependence, Row
from wngrad.lab.report.markdown import plain, table
from wngrad.lab.report.sensitivity import LEVEL, WITHIN
from wngrad.lab.train.spec import Metric

BEYOND = 3.0  # times the loss at the start: as far as a task's losses are drawn


class TaskReport(Report):
    """The report of a sweep that has a task."""

    HEAD, TABLE = "How much each optimizer depends on λ", "dependence"

    @cached_property
    def dependence(self) -> Dependence:
        return dependence.measure(self.results)

    def verdict(self) -> str:
        return self.ranking() + self.provisional()

    def cards(self) -> list[str]:
        heads = self.heads()[1:]
        return [page.card(row[0], dict(zip(heads, row[1:], strict=True))) for row in self.rows()]

    def opening(self) -> list[str]:
        sweep = self.results.sweep
        return [
            *[f"# {plain(sweep.name)}", "", f"{sweep.claim} {plain(self.verdict())}", ""],
            *[f"{plain(self.results.facts())}.", ""],
            *[*table(self.heads(), self.rows()), "", self.legend(), "", PICTURE, ""],
        ]

    def axis(self, metric: Metric) -> Axis:
        if metric == ACCURACY:
            return Axis(metric, -math.inf, False)
        means = [cell.mean for cell in self.results.cells(metric) if cell.mean is not None]
        start = self.results.start(BY if metric == "train_loss" else metric)
        log = metric in LOSSES and all(mean >= 0 for mean in means) and (start or 0) > 0
        if start is None or not means:
            return Axis(metric, -math.inf if metric in HIGHER else math.inf, log)
        usable = self.dependence.limit if metric == BY else None
        if log:
            return Axis(metric, BEYOND * start, True, usable)
        best = max(means) if metric in HIGHER else min(means)
        return Axis(metric, start - (best - start), False, usable)

    def beyond(self) -> str:
        axes = [a for a in map(self.axis, self.results.sweep.metrics) if math.isfinite(a.worst)]
        return "a mean " + " or ".join(
            f"{self.results.label(a.metric)} {'below' if a.higher else 'above'} {a.worst:.3g}"
            for a in axes
        )

    def commands(self) -> list[str]:
        """One command does both, and the user has just typed it."""
        return [self.recipe or shlex.join(["wngrad", "sweep", self.results.sweep.task])]

    # ----------------------------------------------------------------- the table of optimizers

    def heads(self) -> list[str]:
        return [
            "optimizer",
            f"best {self.results.label(BY)}",
            *(f"{self.results.label(metric)} there" for metric in self._others()),
            "best λ",
            "recommended λ",
            "sensitivity",
            f"usable decades [{100 * LEVEL:g} %]",
            "diverged lanes",
        ]

    def rows(self) -> list[list[str]]:
        """The table's cells, a row for each optimizer."""
        return [self._cells(row) for row in self.dependence.rows]

    def legend(self) -> str:
        results, grid, start = self.results, self.results.sweep.lam, self.results.start(BY)
        before = "" if start is None else f" (here {start:.3g})"
        return (
            f"At epoch {results.epochs}, over {len(grid)} λ from {min(grid):.3g} to "
            f"{max(grid):.3g}; ± is one sample standard deviation over the n seeds. Best λ: the "
            f"lowest mean {results.label(BY)} among the λ at which no seed diverged. Sensitivity: "
            f"the mean over the grid of min(loss, loss at the start{before}) − the optimizer's own "
            "best loss, so 0 means that any λ of the grid will do. A λ is usable if it keeps all "
            f"but {100 * WITHIN:g} % of what the best of all optimizers gains over the start; the "
            "decades are those around the optimizer's best λ, with Student's "
            f"{100 * LEVEL:g} % interval over the seeds; ≥: they reach an end of the grid. "
            "Recommended: the geometric middle of the usable range; –: no λ is usable."
        )

    def ranking(self) -> str:
        """Who reaches the lowest loss, and who does over the widest range, in a sentence."""
        pairs = [(r.best, r.curves) for r in self.dependence.rows if r.best and r.curves]
        if not pairs:
            return "No optimizer has a result at every λ: see what was left out."
        low, _ = min(pairs, key=lambda pair: pair[0].cell.cost)
        wide, widest = max(pairs, key=lambda pair: pair[1].decades.value)
        near = [
            label(b.optimizer) for b, _ in pairs if b is not low and lead(low.cell, b.cell).noise
        ]
        level = f", within noise of {' and '.join(near)}" if near else ""
        return (
            f"Lowest {self.results.label(BY)}: {label(low.optimizer)}, {low.cell} at "
            f"λ = {lam_text(low.lam)}{level}. Most usable decades: {label(wide.optimizer)}, "
            f"{widest.decades}."
        )

    def _cells(self, row: Row) -> list[str]:
        best, failed = row.best, f"; {row.failed} failed" if row.failed else ""
        return [
            label(row.optimizer),
            str(best.cell) if best else "–",
            *(
                str(self.results.cell(row.optimizer, best.lam, metric)) if best else "–"
                for metric in self._others()
            ),
            lam_text(best.lam if best else None),
            lam_text(row.curves.recommended if row.curves else None),
            str(row.curves.sensitivity) if row.curves else "–",
            str(row.curves.decades) if row.curves else "–",
            f"{row.diverged} of {row.lanes}{failed}",
        ]

    def _others(self) -> list[Metric]:
        """The metrics beside the losses."""
        return [metric for metric in self.results.metrics if metric not in LOSSES]
