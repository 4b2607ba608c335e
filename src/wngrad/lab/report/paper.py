"""The report of one of the paper's figures: its claims beside what was measured."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from functools import cached_property
from html import escape

from wngrad.lab.report import page
from wngrad.lab.report.base import PICTURE, Axis, Report
from wngrad.lab.report.cells import ACCURACY, label, lam_text
from wngrad.lab.report.claims import Finding
from wngrad.lab.report.markdown import table
from wngrad.lab.report.results import USABLE
from wngrad.lab.train.spec import Metric

# No classifier with a larger loss is worth telling from another: it is marked on the edge.
CEILING = 10.0


class PaperReport(Report):
    """The report of a sweep that has claims."""

    HEAD, TABLE = "What is claimed, and what was measured", "claims"

    @cached_property
    def findings(self) -> Sequence[Finding]:
        return [claim.measure(self.results) for claim in self.results.sweep.claims]

    def headline(self) -> str:
        """The sweep's claim; said to be no more than that unless all that was measured agrees."""
        claim = self.results.sweep.claim
        sound = all(finding.holds and not finding.look for finding in self.findings)
        return claim if sound and not self.provisional() else f"Claimed: {claim}"

    def verdict(self) -> str:
        """How many of the claims hold, and whether that is final."""
        judged = [finding.holds for finding in self.findings if not finding.look]
        looks = [finding.holds for finding in self.findings if finding.look]
        good, bad, unknown = (judged.count(way) for way in (True, False, None))
        of_all = f"of {len(self.findings)} claims"
        if not self.findings:
            return f"No claim is judged.{self.provisional()}"
        parts = [f"{good} {of_all} hold"] if good or bad or not looks else []
        parts += [f"{bad} {'does' if bad == 1 else 'do'} not"] if bad else []
        if looks:
            yes, count = looks.count(True), len(looks)
            which = f"{count} of them" if parts else f"{count} {of_all}"
            parts += [f"a look at n = 1, no more, at {which}: {yes} yes, {count - yes} no"]
        parts += [f"{unknown} cannot be judged"] if unknown else []
        text = "; ".join(parts)
        return f"{text[0].upper()}{text[1:]}.{self.provisional()}"

    def heads(self) -> Sequence[str]:
        return ("claim", "source", "measured", "n (lanes)", "how judged", "verdict")

    def cards(self) -> list[str]:
        return [_card(finding) for finding in self.findings]

    def opening(self) -> list[str]:
        sweep = self.results.sweep
        return [
            f"# {sweep.name}: {label(sweep.dataset)}, {label(sweep.model)}",
            "",
            f"{self.headline()} {self.verdict()}",
            "",
            f"{self.results.facts()}. {self._words()}",
            "",
            PICTURE,
            "",
            *(["## Claims", "", *self._claims(), ""] if self.findings else []),
            *["## Best λ", "", *self._bests(), ""],
        ]

    def legend(self) -> str:
        return f"{self._words()} {self._criterion()}"

    def _words(self) -> str:
        """What the numbers and the words of the tables mean."""
        return (
            "Every mean is over the seeds, ± one sample standard deviation; n is their number, or "
            "in the first table that of all lanes. Ahead and behind: by the mean difference, seed "
            "by seed, ± one standard error of it; less than two of these is called noise. What "
            "rests on a single seed is called a look."
        )

    def _criterion(self) -> str:
        """What a best λ is."""
        results = self.results
        return (
            f"The best λ is that of the best mean {label(results.sweep.best_by)} at epoch "
            f"{results.epochs}, among those at which no seed diverged."
        )

    def axis(self, metric: Metric) -> Axis:
        return Axis(metric, -math.inf, False) if metric == ACCURACY else Axis(metric, CEILING, True)

    def beyond(self) -> str:
        return f"a mean loss above {CEILING:g}"

    def commands(self) -> list[str]:
        results, sweep = self.results, self.results.sweep
        name = self.recipe or sweep.name
        words = ["wngrad", "run", name]
        words += ["--epochs", str(results.epochs)] if results.epochs < sweep.epochs else []
        words += ["--seeds", str(results.seeds)] if results.seeds < len(sweep.seeds) else []
        words += ["--note", *results.notes()[:1]] if results.notes() else []
        return [shlex.join(words), shlex.join(["wngrad", "report", name])]

    def _claims(self) -> list[str]:
        heads = ("claim", "source", "measured", "n", "how judged", "verdict")
        cells = [
            (f.text, f.source, f.measured, f.n or "–", f.rule, f.verdict) for f in self.findings
        ]
        return table(heads, cells)

    def _bests(self) -> list[str]:
        """Each optimizer at its best, and what it reaches there."""
        results, metrics = self.results, self.results.sweep.metrics
        there = [f"{label(metric)} there" for metric in metrics]
        heads = ("optimizer", "best λ", *there, "diverged lanes", "usable λ")
        return [
            *table(heads, [self._best(name) for name in results.sweep.optimizers]),
            "",
            f"{self._criterion()} A λ is usable if its mean test accuracy is within "
            f"{100 * USABLE:g} points of the best of all optimizers.",
        ]

    def _best(self, name: str) -> list[object]:
        results, sweep = self.results, self.results.sweep
        best = results.best(name)
        return [
            label(name),
            lam_text(best.lam if best else None),
            *(results.cell(name, best.lam, m) if best else "–" for m in sweep.metrics),
            f"{results.diverged(name)} of {results.finished(name)}",
            f"{len(results.usable(name))} of {len(sweep.lam)}",
        ]


def _card(finding: Finding) -> str:
    """A finding as a row of the page, with its verdict as a badge."""
    cells = {
        "source": finding.source,
        "measured": finding.measured,
        "n (lanes)": str(finding.n or "–"),
        "how judged": finding.rule,
    }
    kind = {True: "good", False: "bad", None: "open"}[None if finding.look else finding.holds]
    badge = f'<td><span class="badge {kind}">{escape(finding.verdict)}</span></td>'
    return page.card(finding.text, cells, badge)
