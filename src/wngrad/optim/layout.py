"""How a parameter's blocks lie in memory: rows of elements, for the fused kernel."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from torch import Tensor

from wngrad.optim.pieces import Piece

_MOST_KEPT, _MOST_SUMMED = 2, 4  # dimensions a strided address can have


class _Dim(NamedTuple):
    size: int
    strides: tuple[int, ...]  # of the parameter, its gradient and its buffer


@dataclass(frozen=True, slots=True)
class Layout:
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
        """Sizes, then the strides of each tensor, as the kernel reads them."""
        one = _Dim(1, (0, 0, 0))
        kept = (one,) * (_MOST_KEPT - len(self.kept)) + self.kept
        summed = (one,) * (_MOST_SUMMED - len(self.summed)) + self.summed
        sizes = [kept[1].size, *(d.size for d in summed[1:])]
        return sizes + [d.strides[k] for k in range(3) for d in (*kept, *summed)]


def layout(part: Piece, buffer: Tensor | None) -> Layout | None:
    """The rows of a piece; None if its strides are too many, or it would be written twice."""
    tensors = (part.p, part.g, part.p if buffer is None else buffer)
    strides = zip(*(t.stride() for t in tensors), strict=True)
    dims = [_Dim(n, s) for n, s in zip(part.p.shape, strides, strict=True)]
    b_shape = part.state["b"].shape
    kept = [d for d, n in zip(dims, b_shape, strict=True) if n == d.size != 1]
    summed = [d for d, n in zip(dims, b_shape, strict=True) if n != d.size]
    rows, length = prod(d.size for d in kept), prod(d.size for d in summed)
    if not rows * length:
        return Layout(rows, 0, (), ())
    # Within a row any order will do, so that of memory (channels last, say). Rows follow b.
    summed.sort(key=lambda d: d.strides, reverse=True)
    found = Layout(rows, length, _merged(kept), _merged(summed))
    fits = len(found.kept) <= _MOST_KEPT and len(found.summed) <= _MOST_SUMMED
    written = ((d.strides[0], d.strides[2]) for d in dims if d.size > 1)
    return found if fits and all(0 not in each for each in written) else None


def _merged(dims: list[_Dim]) -> tuple[_Dim, ...]:
    """Neighbours that are one run of memory, as one dimension."""
    out: list[_Dim] = []
    for d in dims:
        if out and out[-1].strides == tuple(d.size * s for s in d.strides):
            out[-1] = _Dim(out[-1].size * d.size, d.strides)
        else:
            out.append(d)
    return tuple(out)
