"""The layout of a parameter's blocks in memory: rows of elements, for the fused kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from wngrad.optim.collect import Step
from wngrad.optim.fused.records import TENSORS
from wngrad.optim.state import AVERAGE

_MOST_KEPT, _MOST_SUMMED = 2, 4  # dimensions a strided address can have


class _Dim(NamedTuple):
    size: int
    strides: tuple[int, ...]  # of each of `records.TENSORS`


@dataclass(frozen=True, slots=True)
class RowLayout:
    """`rows` blocks of `length` elements each."""

    rows: int
    length: int
    kept: tuple[_Dim, ...]  # across rows
    summed: tuple[_Dim, ...]  # within a row

    @property
    def dense(self) -> bool:
        """Whether rows follow one another without gaps, alike in all tensors."""
        across = all(set(d.strides) == {self.length} for d in self.kept)
        within = all(set(d.strides) == {1} for d in self.summed)
        return len(self.kept) <= 1 and len(self.summed) <= 1 and across and within

    def words(self) -> list[int]:
        """Sizes, then the strides of each tensor, as in `records.LAYOUT`."""
        one = _Dim(1, (0,) * len(TENSORS))
        kept = (one,) * (_MOST_KEPT - len(self.kept)) + self.kept
        summed = (one,) * (_MOST_SUMMED - len(self.summed)) + self.summed
        sizes = [kept[1].size, *(d.size for d in summed[1:])]
        return sizes + [d.strides[k] for k in range(len(TENSORS)) for d in (*kept, *summed)]


def tensors(view: Step) -> tuple[Tensor | None, ...]:
    """Those of the parameter's shape that kernels read, as in `records.TENSORS`; None: it has not.

    What an orthogonalized direction keeps is not among them: it belongs to `fused.matrices`.
    """
    names = () if view.direction.orthogonalizes else view.direction.buffers
    buffers = [view.buffers[name] for name in names]
    missing = [None] * (2 - len(buffers))
    return view.p, view.g, *buffers, *missing, view.buffers.get(AVERAGE)


def layout(view: Step) -> RowLayout:
    """The rows of a view that `fits` the kernels."""
    dims, rows, length = _dims(view), view.b.numel(), view.p.numel() // max(1, view.b.numel())
    if not rows * length:
        return RowLayout(rows, 0, (), ())
    kept, summed = _sorted_out(dims, view)
    return RowLayout(rows, length, _merged(kept), _merged(summed))


def fits(view: Step) -> bool:
    """Whether the strides are few enough for the kernels, and nothing would be written twice."""
    found = layout(view)
    written = ((d.strides[0], *d.strides[2:]) for d in _dims(view) if d.size > 1)
    few = len(found.kept) <= _MOST_KEPT and len(found.summed) <= _MOST_SUMMED
    return few and (not view.p.numel() or all(0 not in each for each in written))


def _dims(view: Step) -> list[_Dim]:
    every = (view.p if t is None else t for t in tensors(view))
    strides = zip(*(t.stride() for t in every), strict=True)
    return [_Dim(n, s) for n, s in zip(view.p.shape, strides, strict=True)]


def _sorted_out(dims: list[_Dim], view: Step) -> tuple[list[_Dim], list[_Dim]]:
    """Dimensions across rows, and those within one."""
    pairs = list(zip(dims, view.b.shape, strict=True))
    summed = [d for d, n in pairs if n != d.size]
    # Within a row any order will do, so that of memory (channels last, say). Rows follow b.
    summed.sort(key=lambda d: d.strides, reverse=True)
    return [d for d, n in pairs if n == d.size != 1], summed


def _merged(dims: list[_Dim]) -> tuple[_Dim, ...]:
    """Neighbours that are one run of memory, as one dimension."""
    out: list[_Dim] = []
    for d in dims:
        if out and out[-1].strides == tuple(d.size * s for s in d.strides):
            out[-1] = _Dim(out[-1].size * d.size, d.strides)
        else:
            out.append(d)
    return tuple(out)
