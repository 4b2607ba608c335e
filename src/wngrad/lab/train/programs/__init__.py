"""Three ways to train the lanes of a pack, with one face."""

from wngrad.lab.train.programs.base import Program
from wngrad.lab.train.programs.branches import Branches
from wngrad.lab.train.programs.lone import Lone
from wngrad.lab.train.programs.stacked import Stacked

PROGRAMS: dict[str, type[Program]] = {"stacked": Stacked, "branches": Branches, "lone": Lone}

__all__ = ["PROGRAMS", "Branches", "Lone", "Program", "Stacked"]
