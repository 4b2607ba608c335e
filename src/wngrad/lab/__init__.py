"""The lab: hundreds of training runs over λ and seeds, kept in a store, and reports of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from wngrad.install import naming_the_extra

if TYPE_CHECKING:
    from wngrad.lab.train.data import Data as Data
    from wngrad.lab.train.function_task import FunctionTask as FunctionTask
    from wngrad.lab.train.loader_task import LoaderTask as LoaderTask
    from wngrad.lab.train.spec import Sweep as Sweep
    from wngrad.lab.train.task import Task as Task
    from wngrad.lab.train.trial import Trial as Trial

# A name is imported when it is first asked for: a report never loads torch.
_HOMES = {
    "Task": "wngrad.lab.train.task",
    "LoaderTask": "wngrad.lab.train.loader_task",
    "FunctionTask": "wngrad.lab.train.function_task",
    "Trial": "wngrad.lab.train.trial",
    "Data": "wngrad.lab.train.data",
    "Sweep": "wngrad.lab.train.spec",
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wngrad.lab' has no attribute {name!r}")
    with naming_the_extra(f"wngrad.lab.{name}"):
        return getattr(import_module(_HOMES[name]), name)


def _moved(old: str, new: str) -> Callable[[str], Any]:
    """The `__getattr__` of a documented module that has moved: its names, with a warning."""

    def find(name: str) -> Any:
        value = getattr(import_module(new), name)
        if not name.startswith("__"):
            warnings.warn(f"{old} has moved: import {name} from {new}.", DeprecationWarning, 2)
        return value

    return find
