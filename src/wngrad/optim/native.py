"""The fused step on a CPU: `native.c`, compiled where it runs, and its launches.

Compiling takes some two seconds, once for a machine. Where there is no C compiler the plain path
is taken, and `why_plain` says so.

Tried on two cores with 38 M float32 parameters, in milliseconds a step, where torch's SGD takes 6
to 10, as the machine's other users let it: torch's own operations, rows in cache-sized pieces
(`rows`), 30 to 40; the same rule through `torch.compile` 12 to 14, compiled anew for each shape;
this 7 to 10. No faster: asking for a row's parameters while its gradient is summed, or for the next
gradient while the row moves; summing the next row on the way; eight rows at a time (slower).
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from wngrad.optim import compiled
from wngrad.optim.layout import Layout, layout
from wngrad.optim.pieces import Family
from wngrad.optim.tables import Method, Refused, address

DTYPES = (torch.float32, torch.bfloat16)
PIECE = 2**16  # elements of an item of work, and of a piece of a row twice as long or longer
ALONE = 2**15  # elements that are stepped before another thread would have woken up

# ------------------------------------------------------------------------ the library


def why_not() -> str | None:
    """Why nothing can be compiled or loaded here; None if it can."""
    found = _library()
    return found if isinstance(found, str) else None


def _library() -> ctypes.CDLL | str:
    return compiled.library("native", ctypes.CDLL, "-march=native", "-fopenmp")


def _step() -> Any:
    found = _library()
    assert isinstance(found, ctypes.CDLL), found  # asked before
    found.step.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    found.step.restype = None
    return found.step


class _Step(ctypes.Structure):
    """`Step` of native.c: numbers, and where tables lie."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("records", "families", "absent", "rows", "pieces", "longs"),
            *("how_many", "whole", "cut", "long_rows"),
            *("sums", "factors", "bad", "conf", "grads"),
            *("rule", "decay", "skip", "latch", "half", "scale", "found"),
        )
    ]


_ALL, _LOOK, _REST = range(3)  # a step; or its sums, to be looked at, and then what is left of it


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
        self._index, self._call = index, _step()
        self._owners = [family.pieces[0].param for family, _ in families]
        records: list[int] = []
        kin: list[int] = []  # of each family its first record, how many, and of those not here
        absent: list[int] = []
        sizes: list[list[Layout]] = []
        first = 0
        for family, group in families:
            kin += [first, len(family.pieces), len(absent), len(family.absent)]
            first += len(family.pieces)
            absent += [b.data_ptr() for b in family.absent]
            sizes.append([cast(Layout, layout(p, p.state.get(buffer))) for p in family.pieces])
            for part, shape in zip(family.pieces, sizes[-1], strict=True):
                keys = ("b", buffer, "t", "skipped")
                records += [part.p.data_ptr(), *(address(part, key) for key in keys)]
                records += [shape.length, group, int(family.hold), int(shape.dense)]
                records += shape.words()
        work = _work(sizes)
        self._elements = sum(s.rows * s.length for some in sizes for s in some)
        self._words = np.zeros(len(index), np.int64)  # settings, `head` of them, and gradients
        self._read: list[int] = []
        self._bad = np.zeros(len(families), np.int32)
        self._scale: Tensor | None = None
        self._found: Tensor | None = None
        tables = (records, kin, absent, work.rows, work.pieces, work.longs)
        sums = np.zeros(len(work.pieces) + (work.whole if method.looks else 0))
        scratch = [sums, np.zeros(2 * work.factors, np.float32), self._bad]
        # Held here, since the call only knows where they lie.
        self._held = [np.array(words, np.int64) for words in tables] + scratch
        words = _at(self._words)
        self._step = _Step(
            *map(_at, self._held[: len(tables)]),
            *(len(families), len(work.rows), len(work.pieces), len(work.longs)),
            *map(_at, scratch),
            *(words, words + 8 * head, method.rule, method.decay, method.skip, method.latch),
            method.dtype == torch.bfloat16,
        )
        self._at = ctypes.addressof(self._step)

    def prepare(self, words: list[int], scale: Tensor | None, found: Tensor | None) -> None:
        if words is not self._read:
            self._words[:] = [words[i] for i in self._index]
            self._read = words
        self._scale, self._found = _here(scale), _here(found)
        self._step.scale, self._step.found = _pointer(self._scale), _pointer(self._found)

    def step(self) -> None:
        """Take the step; where it is looked at, what `bad` has left of it."""
        self._run(_REST if self.method.looks else _ALL)

    def bad(self) -> Refused | None:
        """A parameter with rows that are not finite, if that is to be known."""
        self._bad[:] = 0
        self._run(_LOOK)
        found = np.flatnonzero(self._bad)
        return Refused(self._owners[found[0]], int(self._bad[found[0]])) if len(found) else None

    def _run(self, mode: int) -> None:
        threads = 1 if self._elements <= ALONE else torch.get_num_threads()
        self._call(self._at, mode, threads)


class _Work(NamedTuple):
    """Items of whole rows, the pieces of long rows, and the long rows themselves, as C has them."""

    rows: list[tuple[int, ...]]
    pieces: list[tuple[int, ...]]
    longs: list[tuple[int, ...]]
    whole: int  # rows that are
    factors: int


def _work(families: list[list[Layout]]) -> _Work:
    """Cut alike for any number of threads, so that they cannot change a sum."""
    rows: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    longs: list[tuple[int, ...]] = []
    whole = factors = first = 0
    for i, sizes in enumerate(families):
        length, count = sum(s.length for s in sizes), sizes[0].rows
        if length < 2 * PIECE:
            each = max(1, PIECE // max(1, length))
            for row in range(0, count, each):
                n = min(each, count - row)
                rows.append((i, row, n, whole))
                whole += n
        else:
            cuts = sum(-(-s.length // PIECE) for s in sizes)
            for row in range(count):
                longs.append((i, row, factors, cuts, len(pieces)))
                for k, s in enumerate(sizes, first):
                    for begin in range(0, s.length, PIECE):
                        pieces.append((k, row, factors, begin, min(begin + PIECE, s.length)))
                    factors += 1
        first += len(sizes)
    # The sums of whole rows lie after those of the pieces.
    rows = [(i, row, n, len(pieces) + slot) for i, row, n, slot in rows]
    return _Work(rows, pieces, longs, whole, factors)


def _here(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.to("cpu", torch.float32)


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _at(words: Any) -> int:
    return int(words.ctypes.data)
