"""From records to a report: a page, a picture and a summary. Nothing is trained here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wngrad.lab import atomic
from wngrad.lab.report import figures, page
from wngrad.lab.report.base import Report
from wngrad.lab.report.costs import Log
from wngrad.lab.report.paper import PaperReport
from wngrad.lab.report.results import Results
from wngrad.lab.report.task import TaskReport
from wngrad.lab.train.spec import Record, Sweep


def build(
    results: Results, notes: Sequence[str] = (), recipe: str = "", log: Log | None = None
) -> Report:
    """The report of these results: that of a task of one's own, or of a figure of the paper."""
    kind = TaskReport if results.sweep.task else PaperReport
    return kind(results, notes, recipe, log)


def write(
    sweep: Sweep,
    records: Sequence[Record],
    out: Path,
    *,
    notes: Sequence[str] = (),
    recipe: str = "",
) -> list[Path]:
    """Write report.html, figure.png, figure.svg and summary.md into `out`.

    Args:
        sweep: what was to be run; its claims are judged.
        records: what was run. Lanes that are missing or failed are named, never invented.
        out: a folder; made if need be.
        notes, recipe: as in `Report`.

    Returns:
        The files, the page first.

    Raises:
        ValueError: no record belongs to the sweep.
        OSError: a file could not be written; it is named, and what was there before is whole.
    """
    return write_results(Results(sweep, records), out, notes, recipe)


def write_results(
    results: Results,
    out: Path,
    notes: Sequence[str] = (),
    recipe: str = "",
    log: Log | None = None,
) -> list[Path]:
    """As `write`, of results; `log` says what steps cost."""
    report = build(results, notes, recipe, log)
    out.mkdir(parents=True, exist_ok=True)
    names = ("report.html", "figure.png", "figure.svg", "summary.md")
    html, png, svg, summary = (out / name for name in names)
    atomic.write(html, page.render(report).encode())
    figures.write(report, [png, svg])
    atomic.write(summary, report.markdown().encode())
    return [html, png, svg, summary]
