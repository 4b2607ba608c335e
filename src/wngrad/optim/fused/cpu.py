"""The fused step on a CPU: the launches of `cpu.c`.

Tried on two cores with 38 M float32 parameters, in milliseconds a step, where torch's SGD takes 6
to 10, as the machine's other users let it: torch's own operations, rows in cache-sized pieces,
30 to 40; the same rule through `torch.compile` 12 to 14, compiled anew for
each shape; this 7 to 10. No faster: asking for a row's parameters while its gradient is summed, or
for the next gradient while the row moves; summing the next row on the way; eight rows at a time
(slower).
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wngrad.optim.collect import Unit
from wngrad.optim.fused import library, records
from wngrad.optim.fused.launch_key import LaunchKey, RowLayout, layout, places
from wngrad.optim.fused.records import Refused, address

DTYPES = (torch.float32, torch.bfloat16)
PIECE = 2**16  # elements of an item of work, and of a piece of a row twice as long or longer
ALONE = 2**15  # elements that are stepped before another thread would have woken up
_ALL, _CHECK, _REST = range(3)  # a step; or its sums, to be checked, and then what is left of it


def why_not() -> str | None:
    """Why there is no fused step on a CPU here; None if there is."""
    loaded = library.cpu()
    return loaded if isinstance(loaded, str) else None


class Launch:
    """The parameters that step in one call.

    Args:
        index: which of a snapshot's words it reads: the settings, `head` words, and gradients.
        given: addresses that stand for those of gradients.
    """

    def __init__(
        self, key: LaunchKey, units: list[Unit], index: list[int], given: list[int], head: int
    ) -> None:
        loaded = library.cpu()
        assert not isinstance(loaded, str), loaded  # `why_not` was asked before
        self._call = loaded[f"step_{library.level()}"]
        self._call.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
        self._call.restype = None
        self.key, self._index, self._given = key, index, given
        self._owners = [id(unit[0].param) for unit in units]
        layouts = [[layout(step) for step in unit] for unit in units]
        work = _work(layouts)
        self._elements = sum(size.rows * size.length for sizes in layouts for size in sizes)
        self._words = np.zeros(len(index) + len(given), np.int64)  # settings, then gradients
        self._seen: list[int] = []
        self._bad = np.zeros(len(units), np.int32)
        self._scaled: list[Tensor] = []  # what a GradScaler says of this step, on the CPU
        tables = (*_tables(units, layouts), *work.tables)
        sums = np.zeros(len(work.pieces) + (work.whole if key.checks_first else 0))
        scratch = [sums, np.zeros(2 * work.factors, np.float32), self._bad]
        self._held = [*tables, *scratch]  # since the call only knows where they lie
        words = _place(self._words)
        self._step = library.Step(
            *map(_place, tables),
            *(len(units), len(work.rows), len(work.pieces), len(work.long_rows)),
            *map(_place, scratch),
            *(words, words + 8 * head, key.rule, key.decay, key.skip, key.latch),
            *(key.rated, key.averages, key.dtype == torch.bfloat16),
            *(key.proposed is not None, 0, 0, library.parallel()),
        )
        self._at = ctypes.addressof(self._step)

    def prepare(self, words: list[int], scale: Tensor | None, found_inf: Tensor | None) -> None:
        if words is not self._seen:
            self._words[:] = [words[i] for i in self._index] + self._given
            self._seen = words
        if scale is not None or found_inf is not None or self._scaled:
            pair = (scale, found_inf)
            here = [None if t is None else t.to("cpu", torch.float32) for t in pair]
            self._step.scale, self._step.found_inf = map(address, here)
            self._scaled = [t for t in here if t is not None]

    def step(self) -> None:
        """Take the step; where it is checked first, what `bad` has left of it."""
        self._run(_REST if self.key.checks_first else _ALL)

    def bad(self) -> Refused | None:
        """A parameter with rows that are not finite, if that is to be known."""
        self._bad[:] = 0
        self._run(_CHECK)
        which = np.flatnonzero(self._bad)
        return Refused(self._owners[which[0]], int(self._bad[which[0]])) if len(which) else None

    def _run(self, mode: int) -> None:
        threads = 1 if self._elements <= ALONE else torch.get_num_threads()
        self._call(self._at, mode, threads)


def _tables(units: list[Unit], layouts: list[list[RowLayout]]) -> list[Any]:
    """Parameters, who of them share their b, and the b of those without a gradient."""
    parameters: list[tuple[int, ...]] = []
    shared: list[tuple[int, ...]] = []
    absent: list[int] = []
    for unit, sizes in zip(units, layouts, strict=True):
        others = unit[0].absent
        shared.append((len(parameters), len(unit), len(absent), len(others)))
        absent += [b.data_ptr() for b in others]
        for step, size in zip(unit, sizes, strict=True):
            rest = (size.length, step.group, int(step.holds), int(size.dense))
            parameters.append((*places(step), *rest, *size.words()))
    return [
        records.table(records.C_PARAMETER, parameters),
        records.table(records.C_SHARED, shared),
        np.array(absent, np.int64),
    ]


class _Work(NamedTuple):
    """Items of whole rows, the pieces of long rows, and the long rows themselves, as C has them."""

    rows: list[tuple[int, ...]]
    pieces: list[tuple[int, ...]]
    long_rows: list[tuple[int, ...]]
    whole: int  # rows that are
    factors: int

    @property
    def tables(self) -> list[Any]:
        kinds = (records.C_ROWS, records.C_PIECE, records.C_LONG_ROW)
        return [records.table(k, rows) for k, rows in zip(kinds, self[:3], strict=True)]


def _work(layouts: list[list[RowLayout]]) -> _Work:
    """Cut alike for any number of threads, so that they cannot change a sum."""
    rows: list[tuple[int, ...]] = []
    pieces: list[tuple[int, ...]] = []
    long_rows: list[tuple[int, ...]] = []
    whole = factors = first = 0
    for i, sizes in enumerate(layouts):
        length, count = sum(size.length for size in sizes), sizes[0].rows
        if length < 2 * PIECE:
            at_once = max(1, PIECE // max(1, length))
            for row in range(0, count, at_once):
                n = min(at_once, count - row)
                rows.append((i, row, n, whole))
                whole += n
        else:
            cuts = sum(-(-size.length // PIECE) for size in sizes)
            for row in range(count):
                long_rows.append((i, row, factors, cuts, len(pieces)))
                for k, size in enumerate(sizes, first):
                    for begin in range(0, size.length, PIECE):
                        end = min(begin + PIECE, size.length)
                        pieces.append((k, row, factors, begin, end))
                    factors += 1
        first += len(sizes)
    # The sums of whole rows lie after those of the pieces.
    rows = [(i, row, n, len(pieces) + slot) for i, row, n, slot in rows]
    return _Work(rows, pieces, long_rows, whole, factors)


def _place(words: Any) -> int:
    return int(words.ctypes.data)
