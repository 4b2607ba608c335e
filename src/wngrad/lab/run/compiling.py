"""What makes a second start of a compiled program quick: caches that last, and early imports."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import wngrad
from wngrad.lab.train.spec import ONE_BY_ONE, Sweep

CACHE = "TORCHINDUCTOR_CACHE_DIR"


def keep_cache() -> None:
    """Have torch keep what it compiles in the user's cache, and not where a reboot clears it.

    Its entries are found by the program, the shapes, the device and the versions of torch and
    Triton: a stale one is never used. Where the user has named a folder, that stays.
    """
    os.environ.setdefault(CACHE, str(_home() / "compiled"))


def bytecode_kept() -> dict[str, str]:
    """What a process's environment needs for Python to keep the bytecode of what it imports.

    Nothing, if it does. In many containers it may not write beside torch's files, or is told not to
    write at all: there an import of torch with its compiler takes three times as long, each time.

    Python trusts bytecode if its source has the time and size of before. In an image all files may
    have one time, so what was installed at another moment has a folder of its own.
    """
    spec = find_spec("torch")
    if spec is None or not spec.origin or not spec.cached or Path(spec.cached).exists():
        return {}
    there = next(folder for folder in Path(spec.cached).parents if folder.exists())
    if not sys.dont_write_bytecode and os.access(there, os.W_OK):
        return {}
    installed = (Path(spec.origin).parents[1], Path(wngrad.__file__).parent)
    moment = "-".join(f"{folder.stat().st_ctime_ns:x}" for folder in installed)
    return {
        "PYTHONPYCACHEPREFIX": str(_home() / "bytecode" / moment),
        "PYTHONDONTWRITEBYTECODE": "",
    }


def _home() -> Path:
    """The package's folder in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wngrad"


@contextmanager
def compiler_loading(sweep: Sweep, device: str) -> Iterator[None]:
    """Load the compiler and wake the GPU in a thread, while the block loads the data."""
    if not device.startswith("cuda") or sweep.program in ONE_BY_ONE:
        yield
        return
    thread = threading.Thread(target=_load, args=(device,))
    thread.start()
    try:
        yield
    finally:
        thread.join()  # A run may fork, and must not do so beside an import.


def _load(device: str) -> None:
    """Compile next to nothing: most of the compiler is imported when it is first used."""
    import torch

    with suppress(Exception):  # whoever needs the device or the compiler will say so
        torch.compile(_double, fullgraph=True, dynamic=False)(torch.zeros(1, device=device))


def _double(x: Any) -> Any:
    return x + x
