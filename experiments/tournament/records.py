"""The tournament's exported records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from wngrad.lab.run.store import exported
from wngrad.lab.train.spec import Record

# Records hold a contestant's address, and the first were made when it was in the package.
BEFORE, NOW = "wngrad.lab.contestants:", "experiments.tournament.contestants:"


def read(path: Path) -> list[Record]:
    """The records of an exported file, every contestant at its present address."""
    return [
        replace(
            record,
            lane=replace(record.lane, optimizer=_moved(record.lane.optimizer)),
            settings=_moved(record.settings),
        )
        for record in exported(path)
    ]


def _moved(value: Any) -> Any:
    if isinstance(value, str):
        return value.replace(BEFORE, NOW)
    if isinstance(value, list):
        return [_moved(each) for each in value]
    return {key: _moved(each) for key, each in value.items()} if isinstance(value, dict) else value
