"""`wngrad list`: the recipes."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table


def list_() -> None:
    """The recipes: what each claims, what it costs, and how much of it is reproduced."""
    from wngrad.lab.recipes import RECIPES

    table = Table()
    for column in ("recipe", "what it claims", "data, network", "runs", "cost", "reproduced"):
        table.add_column(column, justify="right" if column == "runs" else "left")
    for sweep in RECIPES.values():
        runs = f"{len(sweep.lanes)} × {sweep.epochs} epochs"
        what = f"{sweep.dataset}, {sweep.model}"
        table.add_row(sweep.name, sweep.claim, what, runs, sweep.cost, sweep.reproduced)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
