"""The loader of whatever a user names as "module:name" or "path/to/file.py:name"."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

MISSING = object()  # what an attribute that is not there is read as


def load(name: str, argument: str, known: Iterable[str] = (), *, owner: str = "lab") -> Any:
    """The object that `name` leads to.

    Args:
        name: "module:name" or "file.py:name".
        argument: what an error calls it.
        known: short names that the caller looked up before; an error lists them.
        owner: whose error it is.

    Raises:
        ValueError: the name leads nowhere; one line says why.
    """
    names = tuple(known)
    home, _, attribute = name.rpartition(":")
    if not home or not attribute:
        first = f"one of {', '.join(names)} or" if names else "file.py:name or"
        raise ValueError(
            f"{owner}: `{argument}` must be {first} module:name, got {name!r}"
            f"{did_you_mean(name, names)}"
        )
    try:
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())  # as `python -m` would
        module = load_file(home) if is_file(home) else import_module(home)
        value = getattr(module, attribute, MISSING)
    except Exception as error:  # whatever a user's file may raise
        text = f"cannot be imported: {error_text(error)}"
        raise ValueError(f"{owner}: `{argument}` {name!r} {text}.") from error
    if value is MISSING:
        text = f"cannot be imported: {home} has no attribute {attribute!r}"
        close = did_you_mean(attribute, vars(module))
        raise ValueError(f"{owner}: `{argument}` {name!r} {text}{close}")
    return value


def load_callable(
    name: str, argument: str, known: Iterable[str] = (), *, owner: str = "lab"
) -> Callable[..., Any]:
    """What `name` leads to, if it can be called."""
    value = load(name, argument, known, owner=owner)
    if not callable(value):
        raise ValueError(f"{owner}: `{argument}` {name!r} must be callable, got {value!r}.")
    function: Callable[..., Any] = value
    return function


def refused(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Why a function cannot be called so, by its signature; empty if it can, or has none to read.

    >>> refused(lambda x: x)
    "(x): missing a required argument: 'x'"
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        return f"{signature}: {error}"
    return ""


def load_file(home: str) -> ModuleType:
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


def is_file(home: str) -> bool:
    return home.endswith(".py")


def file_of(address: str) -> str:
    """The file in "file.py" or "file.py:name"; empty for a module."""
    home = address if is_file(address) else address.rpartition(":")[0]
    return home if is_file(home) else ""


def resolved(file: str) -> str:
    """The path by which frames of a file's code know it; empty for none."""
    return str(Path(file).expanduser().resolve()) if file else ""


def line_of(error: BaseException, path: str) -> int | None:
    """The line of a file that an exception went through last; None if it never did.

    Args:
        path: as `resolved` gives it.
    """
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line


def fingerprint(address: str) -> str:
    """A hash of the code in an address's file, its comments apart; empty for a module."""
    file = file_of(address)
    if not file:
        return ""
    code = ast.dump(ast.parse(Path(file).expanduser().read_bytes()))
    return hashlib.sha256(code.encode()).hexdigest()[:16]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of an error about an unknown name: the known one that is nearest, if one is near.

    >>> did_you_mean("adma", ["sgd", "adam"])
    ". Did you mean 'adam'?"
    >>> did_you_mean("lion", ["sgd", "adam"])
    '.'
    """
    spelled = {each.lower(): each for each in known}  # in capitals or not
    close = difflib.get_close_matches(name.lower(), list(spelled), n=1)
    return f". Did you mean {spelled[close[0]]!r}?" if close else "."


def error_text(error: BaseException) -> str:
    """An exception in a line, without a full stop at its end."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError at line {error.lineno}: {error.msg}"
    text = " ".join(str(error).split())[:500].rstrip(".")
    if type(error) in (ImportError, ModuleNotFoundError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
