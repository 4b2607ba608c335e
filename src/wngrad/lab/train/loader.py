"""What a name on the command line stands for: "module:name", or "path/to/file.py:name"."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any


def found(name: str, argument: str, known: Iterable[str] = ()) -> Any:
    """What `name` leads to, or a ValueError of one line that says why it leads nowhere."""
    home, _, attribute = name.rpartition(":")
    if not home or not attribute:
        names = f"one of {', '.join(known)} or" if known else "file.py:name or"
        raise ValueError(f"lab: `{argument}` must be {names} module:name, got {name!r}.")
    try:
        return getattr(from_file(home) if is_file(home) else import_module(home), attribute)
    except Exception as error:  # whatever a user's file may raise
        raise ValueError(f"lab: `{argument}` {name!r} cannot be imported: {why(error)}.") from error


def imported(name: str, argument: str, known: Iterable[str]) -> Callable[..., Any]:
    """What `name` leads to, if it can be called."""
    value = found(name, argument, known)
    if not callable(value):
        raise ValueError(f"lab: `{argument}` {name!r} must be callable, got {value!r}.")
    callable_: Callable[..., Any] = value
    return callable_


def is_file(home: str) -> bool:
    return home.endswith(".py")


def from_file(home: str) -> ModuleType:
    """The module in a file, run once a process; what lies beside it can be imported, too."""
    path = Path(home).expanduser().resolve()
    if not path.is_file():
        raise FileNotFoundError(f"{home} is not there")
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    if (folder := str(path.parent)) not in sys.path:
        sys.path.insert(0, folder)  # as `python file.py` would
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def why(error: BaseException) -> str:
    """An exception in a line, without a full stop at its end."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError at line {error.lineno}: {error.msg}"
    text = " ".join(str(error).split())[:500].rstrip(".")
    return text if type(error) in (ImportError, ModuleNotFoundError) else _typed(error, text)


def _typed(error: BaseException, text: str) -> str:
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
