"""The commands that make a report's results again."""

from __future__ import annotations

import shlex

from wngrad.lab.report.results import Results


def commands(results: Results, recipe: str = "") -> list[str]:
    """What to type to make these very results again, and the report."""
    name, sweep = recipe or results.sweep.name, results.sweep
    if sweep.task:  # one command does both, and the user has just typed it
        return [recipe or shlex.join(["wngrad", "sweep", sweep.task])]
    seeds = len({lane.seed for lane in results.done})
    words = ["wngrad", "run", name]
    words += ["--epochs", str(results.epochs)] if results.epochs < sweep.epochs else []
    words += ["--seeds", str(seeds)] if seeds < len(sweep.seeds) else []
    words += ["--note", *results.notes()[:1]] if results.notes() else []
    return [shlex.join(words), shlex.join(["wngrad", "report", name])]
