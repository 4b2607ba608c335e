"""Which part of each matrix of a sharded parameter lies on which rank.

A parameter holds its matrices in a `Layout`, and a mesh of ranks cuts its dimensions; so a matrix
may be cut between rows, between columns, between both, or lie whole on a rank. Which rows or
columns a rank has never matters to what is computed here, only how many, and of which matrix:
exchanging rows or columns of a matrix exchanges those of the orthogonalized one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from wngrad.optim import sharded
from wngrad.optim.blocks import Shape
from wngrad.optim.modules import Layout

_MATRICES, ROWS, COLUMNS = 0, 1, 2  # the dimensions of (how many, rows, columns)


class _MeshCut(NamedTuple):
    """A dimension of a mesh that cuts a dimension of a parameter."""

    mesh_dim: int
    dim: int
    ranks: int
    rank: int  # this process's


@dataclass(frozen=True, slots=True)
class Cut:
    """A dimension of a mesh that cuts a matrix between its rows or its columns."""

    mesh_dim: int
    axis: int  # ROWS or COLUMNS
    sizes: Shape  # how many of them each rank has, once the cuts after this one are undone


@dataclass(frozen=True, slots=True)
class Part:
    """Where a parameter holds this rank's part of a matrix, or of some that are cut alike."""

    start: int  # of the local tensor's dimension 0
    stop: int
    layout: Layout  # of the local tensor between them
    rows: int  # of the whole matrix
    columns: int
    cuts: tuple[Cut, ...]  # empty if it is whole, or if this rank has nothing of it


@dataclass(frozen=True, slots=True)
class Slice:
    """The numbers of a `Part`, and how they travel."""

    x: Tensor  # (how many, rows, columns)
    rows: int  # of the whole matrix
    columns: int
    cuts: tuple[Cut, ...]
    groups: tuple[Any, ...]  # the ranks of each cut

    @property
    def route(self) -> tuple[Any, ...]:
        """What all that goes to owners in one message has in common."""
        return self.groups[-1], self.x.dtype, self.x.device

    @property
    def wire_type(self) -> torch.dtype:
        """The type in which it travels to its owner, and the result back.

        On CUDA `orthogonalize` takes its products in float16 anyway. What travels in a type that
        is narrower than its own is scaled first.
        """
        x = self.x
        return torch.float16 if x.is_cuda and x.dtype == torch.float32 else x.dtype

    @property
    def takes_gram(self) -> bool:
        """Whether a sum of Gram matrices is fewer bytes than the way to an owner and back."""
        axes, ranks = {cut.axis for cut in self.cuts}, prod(len(cut.sizes) for cut in self.cuts)
        if len(axes) != 1:
            return False
        m, n = (self.rows, self.columns) if ROWS in axes else (self.columns, self.rows)
        return ranks * (n + 1) * self.x.itemsize <= 2 * m * self.wire_type.itemsize

    @property
    def moves(self) -> bool:
        """Whether it goes to an owner."""
        return bool(self.cuts) and not self.takes_gram

    @property
    def flips(self) -> bool:
        """Whether x has to be transposed for its rows to be whole, where it is cut one way."""
        return self.cuts[0].axis == ROWS


def parts(p: Tensor, layout: Layout) -> tuple[Part, ...]:
    """The parts of the matrices of a sharded parameter, in the order of its local dimension 0."""
    return _parts(tuple(p.shape), layout, _mesh_cuts(p))


def is_cut(p: Tensor, layout: Layout) -> bool:
    """Whether any matrix of a sharded parameter lies on several ranks."""
    return any(part.cuts for part in parts(p, layout))


def _mesh_cuts(p: Tensor) -> tuple[_MeshCut, ...]:
    """In the order in which they cut.

    A strided shard (FSDP2 over tensor parallelism) cuts what the others have left to it.
    """
    mesh = cast(Any, p).device_mesh
    here = mesh.get_coordinate()
    if here is None:  # This process has no part in it.
        return ()
    places = [pair for pair in sharded.cut_by(p) if mesh.size(pair[0]) > 1]
    places.sort(key=lambda pair: getattr(pair[1], "split_factor", 0))
    cuts = tuple(_MeshCut(k, place.dim, mesh.size(k), here[k]) for k, place in places)
    ranges = [_range(size, d, cuts) for d, size in enumerate(p.shape)]
    found = tuple(sharded.local(p).shape)
    if found != tuple(stop - start for start, stop in ranges):
        raise ValueError(
            f"orthogonalize_sharded: `params` must be cut as torch.chunk does, got a part of "
            f"shape {found} of a parameter of shape {tuple(p.shape)} placed as {p.placements}."  # type: ignore[attr-defined]
        )
    return cuts


@cache
def _parts(shape: Shape, layout: Layout, cuts: tuple[_MeshCut, ...]) -> tuple[Part, ...]:
    _, rows, columns = layout.sizes(shape)
    size, (start, stop) = shape[0] // layout.pieces, _range(shape[0], 0, cuts)
    if layout.pieces == 1 or not any(cut.dim == 0 for cut in cuts):  # all of them are cut alike
        alike = _matrix_cuts(shape, layout.kind, cuts, (0, size))
        return (Part(0, stop - start, layout, rows, columns, alike),)
    parts = []
    for begin in range(0, shape[0], size):
        piece = begin, begin + size
        low, high = _overlap((start, stop), piece)
        found = _matrix_cuts(shape, layout.kind, cuts, piece)
        parts.append(Part(low - start, high - start, Layout(layout.kind), rows, columns, found))
    return tuple(parts)


def _matrix_cuts(
    shape: Shape, kind: str, cuts: tuple[_MeshCut, ...], piece: tuple[int, int]
) -> tuple[Cut, ...]:
    """What cuts the matrix that lies in these rows of dimension 0."""
    dims = range(len(shape))
    if kind == "stack":  # which of (how many, rows, columns) a dimension is part of
        axes = [max(_MATRICES, d - len(shape) + 3) for d in dims]
    else:
        axes = [ROWS if d == (1 if kind == "transposed" else 0) else COLUMNS for d in dims]

    def count(axis: int, places: Iterable[_MeshCut]) -> int:
        ranges = {d: _range(shape[d], d, places) for d in dims if axes[d] == axis}
        if 0 in ranges:
            ranges[0] = _overlap(ranges[0], piece)
        return prod(stop - start for start, stop in ranges.values())

    found = []
    for i, cut in enumerate(cuts):
        axis, ranks = axes[cut.dim], [cut._replace(rank=k) for k in range(cut.ranks)]
        if axis != _MATRICES:
            sizes = tuple(count(axis, [*cuts[:i], rank]) for rank in ranks)
            found.append(Cut(cut.mesh_dim, axis, sizes))
    lies_whole = len(found) == 1 and sum(size > 0 for size in found[0].sizes) <= 1
    return () if lies_whole else tuple(found)


def _range(size: int, dim: int, cuts: Iterable[_MeshCut]) -> tuple[int, int]:
    """Where this rank's part of a dimension starts and stops: as torch.chunk, cut after cut."""
    start, stop = 0, size
    for cut in cuts:
        if cut.dim == dim:
            chunk = -(-(stop - start) // cut.ranks)
            start, stop = (min(start + chunk * k, stop) for k in (cut.rank, cut.rank + 1))
    return start, stop


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    start = min(max(a[0], b[0]), a[1])
    return start, max(start, min(a[1], b[1]))
