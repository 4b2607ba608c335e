"""Three ways to train the lanes of a pack, with one face."""

from wngrad.lab.programs.base import Program
from wngrad.lab.programs.branches import Branches
from wngrad.lab.programs.lone import Lone
from wngrad.lab.programs.stacked import Stacked

PROGRAMS: dict[str, type[Program]] = {"stacked": Stacked, "branches": Branches, "lone": Lone}

__all__ = ["PROGRAMS", "Branches", "Lone", "Program", "Stacked"]
