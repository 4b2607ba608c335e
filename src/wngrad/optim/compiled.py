"""C, compiled where it runs: once for a machine; the result is kept in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

# One rounding for each operation, on any machine. Without errno a square root is one instruction.
_FLAGS = ["-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno"]


@cache
def library(name: str, kind: type[ctypes.CDLL], *wishes: str) -> ctypes.CDLL | str:
    """`name`.c, compiled and loaded; or why that cannot be done here.

    Args:
        wishes: up to two more flags, for a compiler that knows them.
    """
    if os.environ.get("WNGRAD_NATIVE") == "0":
        return "WNGRAD_NATIVE is 0"
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler or sys.platform == "win32":
        return "there is no C compiler (cc)"
    try:
        return kind(str(_compiled(compiler, Path(__file__).with_name(f"{name}.c"), wishes)))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"{name}.c could not be compiled or loaded ({' '.join(str(error).split())[:200]})"


def _compiled(compiler: str, source: Path, wishes: tuple[str, ...]) -> Path:
    """The compiled file, in the cache; under another name for another source or processor."""
    said = f"{source.read_text()} {compiler} {_FLAGS} {wishes} {platform.machine()} {_processor()}"
    path = _cache() / f"{source.stem}-{hashlib.sha256(said.encode()).hexdigest()[:16]}.so"
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            for more in dict.fromkeys((wishes, wishes[1:], wishes[:1], ())):
                given = [*shlex.split(compiler), *_FLAGS, *more]  # CC may be two words
                command = [*given, str(source), "-o", str(made), "-lm"]
                done = subprocess.run(command, capture_output=True, text=True, timeout=60)
                if done.returncode == 0:
                    break
            else:
                raise OSError(done.stderr)
            os.replace(made, path)  # whole or not at all, whoever else is compiling
    return path


def _cache() -> Path:
    """A folder of the user's own; a new one if that cannot be written."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "wngrad"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    except (OSError, RuntimeError):
        pass
    return _own_folder()


@cache
def _own_folder() -> Path:
    held = tempfile.TemporaryDirectory(prefix="wngrad-")  # goes with the process
    _HELD.append(held)
    return Path(held.name)


_HELD: list[Any] = []


def _processor() -> str:
    """What `-march=native` depends on: a home folder may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return " ".join(sorted({s for s in lines if s.startswith(("flags", "Features", "model name"))}))
