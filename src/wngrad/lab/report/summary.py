"""The end of a sweep: the report is written, and what a terminal shows of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wngrad.lab.report import builder, sweep_table
from wngrad.lab.report.results import Results
from wngrad.lab.run.places import is_address
from wngrad.lab.run.store import Store
from wngrad.lab.sweep import Plan


@dataclass(frozen=True, slots=True)
class Told:
    """A table, and some lines below it."""

    heads: list[str]
    rows: list[list[str]]
    lines: list[str]


def write(
    plan: Plan, home: Path | str, usual: Path, command: str, warn: Callable[[str], None]
) -> Told:
    """Write the report of a sweep from its records.

    Args:
        home: where they are; the report goes there, too, if it is a folder.
        usual: where the report goes if not.
        command: what the user typed; the report ends with it.
        warn: is told of records that cannot be read.

    Raises:
        ValueError: there is no record of this sweep.
    """
    folder = usual if is_address(home) else Path(home)
    store = Store(home, warn=warn)
    records = store.records()
    results = Results(plan.sweep, records)
    written = builder.write(plan.sweep, records, folder, notes=plan.how, recipe=command)
    store.export(folder / "records.jsonl")
    found = sweep_table.rows(results)
    lines = [
        f"{results.facts()}. {sweep_table.verdict(results, found)}",
        *results.left_out(),
        f"Wrote {written[0]}, and {len(written)} more files beside it.",
    ]
    rows = [[_short(text) for text in sweep_table.texts(results, row)] for row in found]
    return Told(sweep_table.heads(results), rows, lines)


def _short(text: str) -> str:
    """A terminal is narrow, and n is told below."""
    return re.sub(r" \(n = \d+\)", "", text)
