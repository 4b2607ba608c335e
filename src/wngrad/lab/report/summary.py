"""The summary of a sweep that a terminal shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wngrad.lab.report.costs import Log
from wngrad.lab.report.results import Results
from wngrad.lab.report.task import TaskReport


@dataclass(frozen=True, slots=True)
class Summary:
    """A table, and some lines below it."""

    heads: list[str]
    rows: list[list[str]]
    lines: list[str]


def summarize(results: Results, written: Sequence[Path], log: Log | None = None) -> Summary:
    """The summary of a sweep whose report has been written to these files."""
    report = TaskReport(results, log=log)
    saved = [report.log.saved()] if results.sweep.stop else []
    lines = [
        f"{results.facts()}. {report.ranking()}",
        *saved,
        *results.left_out(),
        f"Wrote {written[0]}, and {len(written)} more files beside it.",
    ]
    # A terminal is narrow, and n is in a line below.
    heads, rows = report.heads(report.few()), report.rows(report.few())
    left = [k for k, head in enumerate(heads) if head != "recommended λ"]  # it is on the page
    cells = [report.short([row[k] for k in left]) for row in rows]
    return Summary([heads[k] for k in left], cells, lines)
