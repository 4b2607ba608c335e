"""What the fused kernel reads: words on the device, and the parameters that step in one launch."""

from __future__ import annotations

import platform
import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from wngrad.optim.layout import Layout, layout
from wngrad.optim.pieces import Family, Piece

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


class Tiling(NamedTuple):
    """How rows are dealt out to programs."""

    tiles: tuple[int, ...]  # elements that a program holds at once, for short and for longer rows
    warp: int  # elements for each warp that works on them
    stages: int  # loads ahead, where a row is longer than the tile: it is read twice, then, the
    # second time from the cache


# The fastest of some eighty tried on an H200: for 1.2 B parameters, with rows in registers; and for
# ResNet-18, where one warp for each row waits for no other.
_HALF = Tiling((2**12, 2**13), 2**11, 1)
LARGE = {
    torch.float32: Tiling((2**11, 2**13), 2**9, 1),
    torch.bfloat16: _HALF,
    torch.float16: _HALF,
}
SMALL = Tiling((2**8,), 2**8, 5)
SMALL_SET = 2**25  # parameters
MOST_TILES, WARPS = 16, 2**13  # of one program, as long as there are so many warps of all of them
LONGEST = 2**16  # longer rows are cut between programs, which reads their gradient twice
_SENT = 2**12  # words at once, half of what CUDA takes with a call
_TAKEN = platform.machine() in ("x86_64", "AMD64") and torch.version.hip is None
_DOUBLE, _WORD = struct.Struct("<d").pack, struct.Struct("<q").unpack
_SINGLE, _JOINT = (1, 4096), (128, 16)  # rows × summands that a program settles at once


class Table:
    """Words of 64 bits on the device, sent again when one of them changes.

    Nothing waits for that: CUDA takes up to 64 KB of ordinary memory with the call, and has them
    when it returns. (From pinned memory they would be taken later, and an event would have to say
    when; that took the host twice as long.) Where a device may read the host's memory by itself,
    at a time of its own, the call waits.
    """

    def __init__(self, words: Sequence[int], device: torch.device) -> None:
        self.tensor = torch.empty(max(1, len(words)), dtype=torch.int64, device=device)
        self.words: Sequence[int] = ()
        staged = torch.empty_like(self.tensor, device="cpu")
        self._write = partial(struct.Struct(f"{len(words)}q").pack_into, staged.numpy().data, 0)
        ends = [(i, i + _SENT) for i in range(0, len(words), _SENT)]
        self._sent = [(self.tensor[i:j], staged[i:j]) for i, j in ends]
        self.update(words)

    def update(self, words: Sequence[int]) -> None:
        if words is self.words or words == self.words or not words:
            return
        self._write(*words)
        for there, here in self._sent:
            there.copy_(here, non_blocking=_TAKEN)
        self.words = words


class Rule(IntEnum):
    """What moves a parameter."""

    PLAIN, MOMENTUM, ADAM = range(3)  # Algorithms 3, 3 with momentum, and 4


class Decay(IntEnum):
    """Where weight decay comes in."""

    NONE, COUPLED, DECOUPLED = range(3)


class Method(NamedTuple):
    """What the kernel is compiled for."""

    device: torch.device
    dtype: torch.dtype
    native: bool  # by native.c, not by Triton
    rule: Rule
    decay: Decay
    skip: bool
    latch: bool
    rounds: bool  # stochastically
    tile: int  # elements a program holds at once
    warps: int
    stages: int
    whole: bool  # a row's norm, b and move by one program
    looks: bool  # at everything, before anything is changed


class Refused(NamedTuple):
    """A parameter with blocks that are not finite."""

    param: Tensor
    blocks: int


class Batch:
    """Parameters that step in one launch or, where rows are cut or shared, in three."""

    def __init__(self, method: Method, families: list[tuple[Family, int]], buffer: str) -> None:
        from wngrad.optim import kernel as k

        self.method = method
        members = [(part, f, group) for f, group in families for part in f.pieces]
        shapes = [cast(Layout, layout(part, part.state.get(buffer))) for part, _, _ in members]
        tile, both = method.tile, list(zip(members, shapes, strict=True))
        kinds = [_kind(k, part, s, buffer, tile) for (part, _, _), s in both]
        pieces = [1 if method.whole else max(1, -(-s.length // tile)) for s in shapes]
        rows = [tile // max(2 ** (kind % 16), k.ROOM_FOR_B.value) for kind in kinds]
        parts = [s.rows * n for s, n in zip(shapes, pieces, strict=True)]
        tiles = [-(-n // per) for n, per in zip(parts, rows, strict=True)]
        span = max(1, min(MOST_TILES, sum(tiles) * method.warps // WARPS))
        # Even an empty parameter has a program, which counts its step.
        counts = [max(1, -(-n // span)) for n in tiles]
        first, sums, room = (
            list(accumulate(sizes, initial=0))
            for sizes in (counts, parts, [s.rows for s in shapes])
        )
        records: list[int] = []
        for i, ((part, family, group), s) in enumerate(zip(members, shapes, strict=True)):
            piece = s.length if pieces[i] == 1 else tile
            records += [part.p.data_ptr(), *(address(part, key) for key in ("b", buffer, "t"))]
            records += [address(part, "skipped"), s.length, s.rows, pieces[i], piece, first[i]]
            records += [span, group, int(family.hold), sums[i], room[i]]
        device = method.device
        self.kinds = sum(1 << kind for kind in set(kinds))
        self.tiles = programs(counts, device, [kind * k.PARAMETERS.value for kind in kinds])
        self.records = Table(records, device)
        strided = any(kind >= k.STRIDED.value for kind in kinds)
        self.layouts = Table([w for s in shapes for w in s.words()] if strided else [], device)
        scratch = (0, 0) if method.whole else (sums[-1], room[-1])
        self.sums = torch.empty(max(1, scratch[0]), dtype=torch.float64, device=device)
        self.coefs = torch.empty(max(1, scratch[1]), 2, device=device)
        self.settlers: list[Settler] = []
        if not method.whole:
            spots = _spots(families, sums, room, pieces)
            for single in (True, False):
                some = [
                    both for both in spots if (both[0].pieces[0].state["b"].numel() == 1) == single
                ]
                if some:
                    self.settlers.append(Settler(some, *(_SINGLE if single else _JOINT), device))


class _Spot(NamedTuple):
    """Where a member's sums and coefficients lie."""

    part: Piece
    sums: int
    pieces: int  # sums for each of its rows
    room: int


class Settler:
    """Families whose b is found from sums that lie ready."""

    def __init__(
        self,
        families: list[tuple[Family, int, list[_Spot]]],
        rows: int,
        span: int,
        device: torch.device,
    ) -> None:
        self.rows, self.span = rows, span
        words: list[int] = []
        runs: list[int] = []
        members: list[int] = []
        counts: list[int] = []
        for family, group, spots in families:
            b = family.pieces[0].state["b"].numel()
            # The sums of a single row lie side by side, whosever they are.
            mine = [(s.sums, s.pieces) for s in spots]
            if b == 1:
                mine = [(mine[0][0], sum(count for _, count in mine))]
            absent = [(b_.data_ptr(), 0, 0, 0, 0) for b_ in family.absent]
            present = [
                (
                    address(s.part, "b"),
                    address(s.part, "t"),
                    address(s.part, "skipped"),
                    s.room,
                    1,
                )
                for s in spots
            ]
            words += [b, len(runs) // 2, len(mine), len(members) // 5, len(absent) + len(present)]
            words += [group, int(family.hold), sum(counts)]
            runs += [word for run in mine for word in run]
            members += [word for member in (*present, *absent) for word in member]
            counts.append(max(1, -(-b // rows)))
        self.tiles = programs(counts, device)
        self.records, self.runs = Table(words, device), Table(runs, device)
        self.members = Table(members, device)
        self.bad = torch.zeros(sum(counts), dtype=torch.int32, device=device)
        firsts = [family.pieces[0].param for family, _, _ in families]
        self.owners = [p for p, n in zip(firsts, counts, strict=True) for _ in range(n)]


def _spots(
    families: list[tuple[Family, int]], sums: list[int], room: list[int], pieces: list[int]
) -> list[tuple[Family, int, list[_Spot]]]:
    found, i = [], 0
    for family, group in families:
        spots = []
        for part in family.pieces:
            spots.append(_Spot(part, sums[i], pieces[i], room[i]))
            i += 1
        found.append((family, group, spots))
    return found


def address(part: Piece, key: str) -> int:
    """Where a part of the state lies; 0 if there is none."""
    return part.state[key].data_ptr() if key in part.state else 0


def _kind(k: Any, part: Piece, shape: Layout, buffer: str, tile: int) -> int:
    """The shape of a parameter's tiles, and the width of its loads."""
    columns = max(4, (min(shape.length, tile) - 1).bit_length())
    columns += columns in (5, 7)  # fewer kinds are compiled sooner
    if not shape.dense:
        return cast(int, columns + k.STRIDED.value)
    vector = 16 // part.p.element_size()
    wide = shape.length % vector == 0
    if shape.length == 1:
        columns, wide = 0, True
    tensors = [part.p, part.g, *([part.state[buffer]] if buffer in part.state else [])]
    wide = wide and all(t.data_ptr() % 16 == 0 for t in tensors)
    return columns if wide else cast(int, columns + k.LOOSE.value)


def programs(counts: list[int], device: torch.device, marks: Sequence[int] | None = None) -> Tensor:
    """For each program the index of its parameter, plus its mark."""
    words = [i + mark for i, mark in enumerate(marks or [0] * len(counts))]
    how_many, which = Table(counts, device).tensor, Table(words, device).tensor.to(torch.int32)
    return which.repeat_interleave(how_many, output_size=sum(counts))


def bits(x: float) -> int:
    word: int = _WORD(_DOUBLE(x))[0]
    return word
