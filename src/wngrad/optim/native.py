"""The fused step on a CPU: `native.c`, compiled where it runs, and its launches.

Compiling takes a fraction of a second, once for a machine; the result is kept in the user's cache
folder. Where there is no C compiler the plain path is taken, and `why_plain` says so.

Tried on two cores with 38 M float32 parameters, in milliseconds a step, where torch's SGD takes 8
to 10: torch's own operations, rows in cache-sized pieces (`rows`), 30 to 40; the same rule through
`torch.compile` 12 to 14, compiled anew for each shape; this 8 to 11.
"""

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
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from wngrad.optim.layout import Layout, layout
from wngrad.optim.pieces import Family
from wngrad.optim.tables import Method, address

PIECE = 2**16  # elements of an item of work, and of a piece of a row twice as long or longer
ALONE = 2**15  # elements that are stepped before another thread would have woken up
_SOURCE = Path(__file__).with_name("native.c")
# One rounding for each operation, on any machine. Without errno a square root is one instruction.
_FLAGS = ["-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno"]

# ------------------------------------------------------------------------ the library


def why_not() -> str | None:
    """Why nothing can be compiled or loaded here; None if it can."""
    found = _library()
    return found if isinstance(found, str) else None


@cache
def _library() -> ctypes.CDLL | str:
    if os.environ.get("WNGRAD_NATIVE") == "0":
        return "WNGRAD_NATIVE is 0"
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    if not compiler or sys.platform == "win32":
        return "there is no C compiler (cc)"
    try:
        return _loaded(_compiled(compiler))
    except (OSError, subprocess.SubprocessError) as error:
        return f"native.c could not be compiled or loaded ({' '.join(str(error).split())[:200]})"


def _loaded(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    word: Any = ctypes.c_void_p
    whole: Any = ctypes.c_int64
    library.step.argtypes = [
        *[word, whole, word, word, word, whole, whole, word, whole, word, word],
        *[ctypes.c_int] * 4,
        *[word, word, ctypes.c_int],
    ]
    library.step.restype = None
    return library


def _compiled(compiler: str) -> Path:
    """The compiled file, in the cache; under another name for another source or processor."""
    said = f"{_SOURCE.read_text()} {compiler} {_FLAGS} {platform.machine()} {_processor()}"
    path = _cache() / f"native-{hashlib.sha256(said.encode()).hexdigest()[:16]}.so"
    if not path.is_file():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            for more in (["-march=native", "-fopenmp"], ["-fopenmp"], ["-march=native"], []):
                given = [*shlex.split(compiler), *_FLAGS, *more]  # CC may be two words
                command = [*given, str(_SOURCE), "-o", str(made), "-lm"]
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


# ------------------------------------------------------------------------ its launches


class Launch:
    """The parameters that step in one call."""

    def __init__(
        self,
        method: Method,
        families: list[tuple[Family, int]],
        buffer: str,
        index: list[int],
        head: int,
    ) -> None:
        self.method = method
        self._index, self._step = index, _library_or_fail().step
        records: list[int] = []
        sizes: list[Layout] = []
        for family, group in families:
            part = family.pieces[0]
            shape = cast(Layout, layout(part, part.state.get(buffer)))
            records += [part.p.data_ptr(), *(address(part, key) for key in ("b", buffer, "t"))]
            records += [address(part, "skipped"), shape.length, shape.rows, group]
            records += [int(family.hold), int(shape.dense), *shape.words()]
            sizes.append(shape)
        whole, pieces, longs = _work(sizes)
        self._elements = sum(s.rows * s.length for s in sizes)
        self._words = np.zeros(len(index), np.int64)  # settings, `head` of them, and gradients
        self._scale: Tensor | None = None
        self._found: Tensor | None = None
        # Held here, since the call only knows where they lie.
        self._held = [np.array(words, np.int64) for words in (records, [*whole, *pieces], longs)]
        self._sums = np.zeros(max(1, len(pieces) // 5))
        self._factors = np.zeros(max(1, len(longs) // 4 * 2), np.float32)
        rest = (_at(self._sums), _at(self._factors), method.rule, method.decay)
        now = _at(self._words)
        self._head = (_at(self._held[0]), len(sizes), now + 8 * head, now)
        work = (_at(self._held[1]), len(whole) // 5, (len(whole) + len(pieces)) // 5)
        self._tail = (*work, _at(self._held[2]), len(longs) // 4, *rest, method.skip, method.latch)

    def prepare(self, words: list[int], scale: Tensor | None, found: Tensor | None) -> None:
        self._words[:] = [words[i] for i in self._index]
        self._scale, self._found = _here(scale), _here(found)

    def step(self) -> None:
        threads = 1 if self._elements <= ALONE else torch.get_num_threads()
        scaler = (_pointer(self._scale), _pointer(self._found))
        self._step(*self._head, *self._tail, *scaler, threads)


def _work(sizes: list[Layout]) -> tuple[list[int], list[int], list[int]]:
    """Items of whole rows, then the pieces of long rows, and the long rows themselves.

    Cut alike for any number of threads, so that they cannot change a sum.
    """
    whole: list[int] = []
    pieces: list[int] = []
    longs: list[int] = []
    for i, s in enumerate(sizes):
        if s.length < 2 * PIECE:
            each = max(1, PIECE // max(1, s.length))
            for row in range(0, s.rows, each):
                whole += [i, row, min(each, s.rows - row), 0, 0]
            continue
        for row in range(s.rows):
            spots = range(0, s.length, PIECE)
            longs += [i, row, len(pieces) // 5, len(spots)]
            for begin in spots:
                which, end = len(longs) // 4 - 1, min(begin + PIECE, s.length)
                pieces += [i, row, which, begin, end]
    return whole, pieces, longs


def _library_or_fail() -> ctypes.CDLL:
    found = _library()
    assert isinstance(found, ctypes.CDLL), found  # asked before
    return found


def _here(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to("cpu", torch.float32)


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _at(words: Any) -> int:
    return int(words.ctypes.data)
