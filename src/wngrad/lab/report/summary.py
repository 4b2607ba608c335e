"""The summary of a sweep that a terminal shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wngrad.lab.report import sweep_table
from wngrad.lab.report.results import Results


@dataclass(frozen=True, slots=True)
class Summary:
    """A table, and some lines below it."""

    heads: list[str]
    rows: list[list[str]]
    lines: list[str]


def summarize(results: Results, written: Sequence[Path]) -> Summary:
    """The summary of a sweep whose report has been written to these files."""
    table = sweep_table.rows(results)
    lines = [
        f"{results.facts()}. {sweep_table.verdict(results, table)}",
        *results.left_out(),
        f"Wrote {written[0]}, and {len(written)} more files beside it.",
    ]
    rows = [[_short(text) for text in sweep_table.texts(results, row)] for row in table]
    return Summary(sweep_table.heads(results), rows, lines)


def _short(text: str) -> str:
    """A terminal is narrow, and n is in a line below."""
    return re.sub(r" \(n = \d+\)", "", text)
