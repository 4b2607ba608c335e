"""The ways to train the lanes of a pack, with one face."""

from collections.abc import Callable
from typing import Any

from wngrad.lab.train.programs.base import Program
from wngrad.lab.train.programs.branches import Branches
from wngrad.lab.train.programs.function import FunctionRun
from wngrad.lab.train.programs.lone import Lone
from wngrad.lab.train.programs.loop import LoopRun
from wngrad.lab.train.programs.run import Run
from wngrad.lab.train.programs.stacked import Stacked

PROGRAMS: dict[str, type[Program]] = {"stacked": Stacked, "branches": Branches, "lone": Lone}
RUNS: dict[str, Callable[..., Run]] = {**PROGRAMS, "loop": LoopRun, "function": FunctionRun}


def make(kind: str, *args: Any) -> Run:
    """The run of a kind, for (sweep, pack, data or task, device)."""
    return RUNS[kind](*args)


__all__ = ["PROGRAMS", "RUNS", "Branches", "Lone", "LoopRun", "Program", "Run", "Stacked", "make"]
