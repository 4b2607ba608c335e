"""The tables of the Triton kernels: records on the device, for parameters that step together."""

from __future__ import annotations

import platform
import struct
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wngrad.optim.collect import Step, Unit
from wngrad.optim.fused.launch_key import LaunchKey, RowLayout, layout, places, tensors
from wngrad.optim.fused.records import address
from wngrad.optim.fused.tiling import Tiling

MOST_TILES, WARPS = 16, 2**13  # of one program, as long as there are so many warps of all of them
_SENT = 2**12  # words at once, half of what CUDA takes with a call
_TAKEN = platform.machine() in ("x86_64", "AMD64") and torch.version.hip is None
_SINGLE, _JOINT = (1, 4096), (128, 16)  # rows × summands of a program of `SplitStep`


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


class _Row(NamedTuple):
    """A parameter of a batch, and how its rows are cut."""

    unit: Unit
    view: Step
    layout: RowLayout
    kind: int
    pieces: int  # of each row
    tiles: int

    @property
    def parts(self) -> int:
        return self.layout.rows * self.pieces


class LaunchBatch:
    """Parameters that step in one launch or, where rows are cut or shared, in three."""

    def __init__(self, key: LaunchKey, tiling: Tiling, units: list[Unit]) -> None:
        rows = [_row(unit, view, tiling) for unit in units for view in unit]
        span = max(1, min(MOST_TILES, sum(row.tiles for row in rows) * tiling.warps // WARPS))
        # Even an empty parameter has a program, which counts its step.
        programs = [max(1, -(-row.tiles // span)) for row in rows]
        first, sums, room = (
            list(accumulate(sizes, initial=0))
            for sizes in (programs, [r.parts for r in rows], [r.layout.rows for r in rows])
        )
        records: list[int] = []
        for i, row in enumerate(rows):
            piece = row.layout.length if row.pieces == 1 else tiling.tile
            records += places(row.view)
            records += [row.layout.length, row.layout.rows, row.pieces, piece, first[i], span]
            records += [row.view.group, int(row.view.holds), sums[i], room[i]]
        device = key.device
        self.kinds = sum(1 << kind for kind in {row.kind for row in rows})
        self.tiles = _programs(programs, device, [row.kind for row in rows])
        self.records = Table(records, device)
        self.layouts = Table(_layouts(rows), device)
        scratch = (0, 0) if tiling.whole else (sums[-1], room[-1])
        self.sums = torch.empty(max(1, scratch[0]), dtype=torch.float64, device=device)
        self.coefs = torch.empty(max(1, scratch[1]), 2, dtype=torch.float32, device=device)
        self.splits = [] if tiling.whole else _splits(units, rows, sums, room, device)


def _row(unit: Unit, view: Step, tiling: Tiling) -> _Row:
    from wngrad.optim.fused.kernel import ROOM_FOR_B

    shape = layout(view)
    kind = _kind(view, shape, tiling.tile)
    pieces = 1 if tiling.whole else max(1, -(-shape.length // tiling.tile))
    at_once = tiling.tile // max(2 ** (kind % 16), ROOM_FOR_B.value)
    return _Row(unit, view, shape, kind, pieces, -(-shape.rows * pieces // at_once))


def _kind(view: Step, shape: RowLayout, tile: int) -> int:
    """The shape of a parameter's tiles, and the width of its loads."""
    from wngrad.optim.fused.kernel import LOOSE, STRIDED

    columns = max(4, (min(shape.length, tile) - 1).bit_length())
    columns += columns in (5, 7)  # fewer kinds are compiled sooner
    if not shape.dense:
        return columns + int(STRIDED.value)
    vector = 16 // view.p.element_size()
    wide = shape.length % vector == 0
    if shape.length == 1:
        columns, wide = 0, True
    wide = wide and all(address(t) % 16 == 0 for t in tensors(view))
    return columns if wide else columns + int(LOOSE.value)


def _layouts(rows: list[_Row]) -> list[int]:
    from wngrad.optim.fused.kernel import STRIDED

    strided = any(row.kind >= STRIDED.value for row in rows)
    return [word for row in rows for word in row.layout.words()] if strided else []


def _programs(
    counts: list[int], device: torch.device, kinds: Sequence[int] | None = None
) -> Tensor:
    """For each program the index of its parameter, and of which kind its tiles are."""
    from wngrad.optim.fused.kernel import PARAMETERS

    words = [i + kind * PARAMETERS.value for i, kind in enumerate(kinds or [0] * len(counts))]
    how_many, which = Table(counts, device).tensor, Table(words, device).tensor.to(torch.int32)
    return which.repeat_interleave(how_many, output_size=sum(counts))


# ------------------------------------------------------------- rows cut across programs, or shared


class _Member(NamedTuple):
    """A parameter whose sums of squares lie ready, and where."""

    view: Step
    sums: int
    pieces: int  # sums for each of its rows
    room: int  # of its coefficients


class SplitStep:
    """The second launch for rows that are cut or shared: partial sums → ‖g‖² → b.

    Args:
        rows: rows that one program finds b for.
        span: summands that it adds up at once.
    """

    def __init__(
        self,
        units: list[tuple[Unit, list[_Member]]],
        rows: int,
        span: int,
        device: torch.device,
    ) -> None:
        self.rows, self.span = rows, span
        shared: list[int] = []
        runs: list[tuple[int, int]] = []
        members: list[tuple[int, ...]] = []
        counts: list[int] = []
        for unit, own in units:
            n = unit[0].b.numel()
            added, listed = _runs(own, n), _members(unit, own)
            shared += [n, len(runs), len(added), len(members), len(listed)]
            shared += [unit[0].group, int(unit[0].holds), sum(counts)]
            runs += added
            members += listed
            counts.append(max(1, -(-n // rows)))
        self.tiles = _programs(counts, device)
        self.records = Table(shared, device)
        self.runs = Table([word for run in runs for word in run], device)
        self.members = Table([word for member in members for word in member], device)
        self.bad = torch.zeros(sum(counts), dtype=torch.int32, device=device)
        firsts = [id(unit[0].param) for unit, _ in units]
        self.owners = [p for p, n in zip(firsts, counts, strict=True) for _ in range(n)]


def _runs(members: list[_Member], rows: int) -> list[tuple[int, int]]:
    """Where sums lie, and how many for each row, as in `records.TRITON_RUN`."""
    runs = [(member.sums, member.pieces) for member in members]
    # The sums of a single row lie side by side, whosever they are.
    return [(runs[0][0], sum(count for _, count in runs))] if rows == 1 else runs


def _members(unit: Unit, members: list[_Member]) -> list[tuple[int, ...]]:
    """As in `records.TRITON_MEMBER`, those without a gradient at the end."""
    views = [(m.view.b, m.view.t, m.view.skipped, m.view.norm) for m in members]
    pairs = zip(members, views, strict=True)
    present = [(*map(address, tensors), m.room, 1) for m, tensors in pairs]
    absent = [(b.data_ptr(), 0, 0, 0, 0, 0) for b in unit[0].absent]
    return [*present, *absent]


def _splits(
    units: list[Unit],
    rows: list[_Row],
    sums: list[int],
    room: list[int],
    device: torch.device,
) -> list[SplitStep]:
    """One launch for units of a single row, with many summands each, and one for the others."""
    each = iter(zip(rows, sums, room, strict=False))
    listed: list[tuple[Unit, list[_Member]]] = []
    for unit in units:
        members = [next(each) for _ in unit]
        listed.append((unit, [_Member(row.view, s, row.pieces, r) for row, s, r in members]))
    single = [pair for pair in listed if pair[0][0].b.numel() == 1]
    joint = [pair for pair in listed if pair[0][0].b.numel() != 1]
    parts: list[tuple[Any, tuple[int, int]]] = [(single, _SINGLE), (joint, _JOINT)]
    return [SplitStep(part, *size, device) for part, size in parts if part]
