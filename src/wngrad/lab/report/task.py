"""The report of a sweep of one's own task: how much each optimizer depends on λ."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from functools import cached_property

from wngrad.lab.report import dependence, page
from wngrad.lab.report.base import PICTURE, Axis, Report
from wngrad.lab.report.cells import in_percent, label, lam_text, more_is_better
from wngrad.lab.report.costs import Cost, bytes_text
from wngrad.lab.report.dependence import Dependence, Row
from wngrad.lab.report.markdown import plain, table
from wngrad.lab.report.ranking import ranking
from wngrad.lab.report.results import Best
from wngrad.lab.report.sensitivity import LEVEL, WITHIN
from wngrad.lab.train.spec import Metric

PEAK = "Peak GPU memory: the most that torch had allocated there in a training step. "
BEYOND = 3.0  # times the loss at the start: as far as a task's losses are drawn


class TaskReport(Report):
    """The report of a sweep that has a task."""

    HEAD, TABLE = "How much each optimizer depends on λ", "dependence"

    @property
    def by(self) -> Metric:
        """The loss that λ is chosen by."""
        return self.results.sweep.best_by

    @cached_property
    def dependence(self) -> Dependence:
        return dependence.measure(self.results)

    def verdict(self) -> str:
        return self.ranking() + self.provisional()

    def cards(self) -> list[str]:
        heads = self.heads()[1:]
        rows = [self.short(row) for row in self.rows()]
        return [page.card(row[0], dict(zip(heads, row[1:], strict=True))) for row in rows]

    def short(self, cells: Sequence[str]) -> list[str]:
        """Cells without their n where it is that of all; the legend says it."""
        n = f" (n = {self.results.seeds})" if self.results.same_n else ""
        return [cell.replace(n, "") for cell in cells]

    def opening(self) -> list[str]:
        sweep = self.results.sweep
        return [
            *[f"# {plain(sweep.name)}", "", f"{self.headline()} {plain(self.verdict())}", ""],
            *[f"{plain(self.results.facts())}.", ""],
            *[*table(self.heads(), self.rows()), "", self.legend(), "", PICTURE, ""],
        ]

    def axis(self, metric: Metric) -> Axis:
        if in_percent(metric):
            return Axis(metric, -math.inf, False)
        means = [cell.mean for cell in self.results.cells(metric) if cell.mean is not None]
        start = self.results.start(self.by if metric == "train_loss" else metric)
        log = metric.endswith("_loss") and all(mean >= 0 for mean in means) and (start or 0) > 0
        if start is None or not means:
            return Axis(metric, -math.inf if more_is_better(metric) else math.inf, log)
        usable = self.dependence.limit if metric == self.by else None
        if log:
            return Axis(metric, BEYOND * start, True, usable)
        best = max(means) if more_is_better(metric) else min(means)
        return Axis(metric, start - (best - start), False, usable)

    def beyond(self) -> str:
        axes = [a for a in map(self.axis, self.results.sweep.metrics) if math.isfinite(a.worst)]
        limits = " or ".join(
            f"{self.results.label(a.metric)} {'below' if a.higher else 'above'} {a.worst:.3g}"
            for a in axes
        )
        return f"a mean {limits}" if axes else ""

    def commands(self) -> list[str]:
        """Those that the user typed, in order: each trains and writes the report."""
        usual = shlex.join(["wngrad", "sweep", self.results.sweep.task])
        return self.recipe.splitlines() or [usual]

    # ----------------------------------------------------------------- the table of optimizers

    def heads(self, others: Sequence[Metric] | None = None) -> list[str]:
        loss, shown = self.results.label(self.by), self._others() if others is None else others
        return [
            "optimizer",
            f"{loss} at default λ",
            f"{loss} at best λ",
            *(f"{self.results.label(metric)} there" for metric in shown),
            f"usable decades [{100 * LEVEL:g} %]",
            "sensitivity",
            "step time",
            *(["peak GPU memory"] if self.log.has_peaks else []),
            "optimizer state",
            "recommended λ",
            "diverged lanes",
        ]

    def rows(self, others: Sequence[Metric] | None = None) -> list[list[str]]:
        """The table's cells, a row for each optimizer; `others` are shown at the best λ."""
        shown = self._others() if others is None else others
        return [self._cells(row, shown) for row in self.dependence.rows]

    def few(self) -> list[Metric]:
        """The metrics for a narrow table: those of the test, if there are any."""
        every = self._others()
        return [metric for metric in every if metric.startswith("test_")] or every

    def legend(self) -> str:
        results, start = self.results, self.results.start(self.by)
        own_lam = "An optimizer at its default alone has neither. " if self._has_untuned() else ""
        own = ", as its reports count steps" if results.sweep.program == "function" else ""
        before = "" if start is None else f" (here {start:.3g})"
        return (
            f"At {results.last()}, over {self._grids()}; ± is one sample standard deviation over "
            f"{results.n_text}. Default λ: "
            f"that of the optimizer's signature. Best λ: that of the grid with the lowest mean "
            f"{results.label(self.by)}, no seed having diverged. Sensitivity: the mean over the "
            f"grid of min(loss, loss at the start{before}) − the optimizer's own best loss, so 0 "
            f"means that any λ of the grid will do{self._apart()}. A λ is usable if it keeps all "
            f"but {100 * WITHIN:g} % of what the best of all results, those at a default λ too, "
            "gains over the start; the decades are those around the optimizer's best λ, seed by "
            f"seed, with Student's {100 * LEVEL:g} % interval over the seeds; ≥: they reach an end "
            f"of the grid. {own_lam}"
            "Recommended: the geometric middle of the range that is usable in the mean over the "
            "seeds; –: no λ is, though one may be for some seed. Within noise: the mean "
            "difference, seed by seed, is less than two of its standard errors. Step time: "
            f"the least wall time of a training step of one run alone{own}. "
            f"{PEAK if self.log.has_peaks else ''}"
            "Optimizer state: what the optimizer keeps in memory beside parameters and gradients."
        )

    def ranking(self) -> str:
        """Who reaches the lowest loss, and who does over the widest range, in two sentences."""
        return ranking(self.results, self.dependence)

    def _grids(self) -> str:
        """The grid in words, or those of each optimizer where they differ."""
        grids = self._by_grid()
        alike = len(grids) == 1
        return "; ".join(
            f"{len(grid)} λ from {grid[0]:.3g} to {grid[-1]:.3g}"
            + ("" if alike else f" ({', '.join(map(label, optimizers))})")
            for grid, optimizers in grids.items()
        )

    def _apart(self) -> str:
        return "" if len(self._by_grid()) == 1 else "; over different grids they do not compare"

    def _by_grid(self) -> dict[tuple[float, ...], list[str]]:
        """The optimizers of each grid; those at one λ alone apart, unless all are."""
        grids: dict[tuple[float, ...], list[str]] = {}
        for name in self.results.sweep.optimizers:
            grids.setdefault(self.results.sweep.grid(name), []).append(name)
        return {grid: names for grid, names in grids.items() if len(grid) > 1} or grids

    def _cells(self, row: Row, others: Sequence[Metric]) -> list[str]:
        cost = self.log.costs.get(row.optimizer, Cost())
        best, failed = row.best, f"; {row.failed} failed" if row.failed else ""
        curves = row.curves if row.curves and row.curves.has_range else None
        return [
            label(row.optimizer),
            _at(row.default),
            _at(best),
            *(
                str(self.results.cell(row.optimizer, best.lam, metric)) if best else "–"
                for metric in others
            ),
            str(curves.decades) if curves else "–",
            str(curves.sensitivity) if curves else "–",
            cost.time_text(),
            *([bytes_text(cost.peak)] if self.log.has_peaks else []),
            bytes_text(cost.state),
            lam_text(curves.recommended if curves else None),
            f"{row.diverged} of {row.lanes}{failed}",
        ]

    def _has_untuned(self) -> bool:
        """Whether some optimizers were run at one λ, and others at several."""
        return len({row.curves.has_range for row in self.dependence.rows if row.curves}) == 2

    def _others(self) -> list[Metric]:
        """What is shown at the best λ: all metrics but the loss it was chosen by, tests first."""
        every = [metric for metric in self.results.metrics if metric != "train_loss"]
        every.sort(key=lambda metric: not metric.startswith("test_"))
        return [metric for metric in every if metric != self.by and metric in self.results.recorded]


def _at(best: Best | None) -> str:
    """A result with its λ."""
    return "–" if best is None else f"{best.cell} at {lam_text(best.lam)}"
