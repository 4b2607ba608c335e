"""How rows are dealt out to the programs of the Triton kernel."""

from __future__ import annotations

from typing import NamedTuple

import torch

from wngrad.optim.collect import Unit, alone


class Tiling(NamedTuple):
    """What a program works on at once."""

    tile: int  # elements
    warps: int
    stages: int  # loads ahead, where a row is longer than the tile: it is read twice, then, the
    # second time from the cache
    whole: bool  # a row's norm, b and move by one program


class _Choice(NamedTuple):
    tiles: tuple[int, ...]  # for short and for longer rows
    warp: int  # elements for each warp
    stages: int


# The fastest of some eighty tried on an H200: for 1.2 B parameters, with rows in registers; and for
# ResNet-18, where one warp for each row waits for no other.
_HALF = _Choice((2**12, 2**13), 2**11, 1)
_LARGE_SET = {
    torch.float32: _Choice((2**11, 2**13), 2**9, 1),
    torch.bfloat16: _HALF,
    torch.float16: _HALF,
}
_SMALL_SET = _Choice((2**8,), 2**8, 5)
SMALL = 2**25  # parameters, of a set that is small
LONGEST = 2**16  # longer rows are cut between programs, which reads their gradient twice


def tiling(unit: Unit, small: bool) -> Tiling:
    """The tiling of a unit's rows, in a set of parameters that is small or not."""
    dtype = unit[0].p.dtype
    longest = max(view.p.numel() // max(1, view.b.numel()) for view in unit)
    checked = unit[0].settings.nonfinite == "raise"
    whole = alone(unit) and not checked and longest <= LONGEST
    choice = _SMALL_SET if small and whole else _LARGE_SET[dtype]
    tiles = choice.tiles
    tile = next((n for n in tiles if longest <= n), tiles[-1]) if whole else tiles[0]
    return Tiling(tile, tile // choice.warp, choice.stages, whole)
