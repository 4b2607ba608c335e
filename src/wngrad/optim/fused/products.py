"""Orthogonalization on CUDA: the launches of `kernel_matrices`, for matrices of any sizes at once.

What `wngrad.optim.orthogonal` says in a few lines is here twenty launches, each of which does its
part for all matrices of a batch. The five polynomials are taken of the square companions of X
alone, XXᵀ or XᵀX, and X is multiplied twice: after the second of them, since float16 has not the
digits for the squares of small singular values, and at the end.

    A = s²·XXᵀ;  P₁ = p₁(A);  A ← P₁·A·P₁;  P₂ = p₂(A);             X ← s·P₂·P₁·X
    A = XXᵀ;     P₃ = p₃(A);  A ← P₃·A·P₃;  …;       P₅ = p₅(A);    X ← P₅·P₄·P₃·X

Of symmetric products half is worked out, but not of P₂·P₁ and its like: rounding has moved their
eigenvectors apart, and a mirrored half, or the other order, let singular values grow to 1.4. In
units of n³ operations a matrix n × m takes 6 m/n + 17 that way, and 15 m/n + 5 by five steps of X
itself (30 m/n + 10 without symmetry), which are taken where a large matrix is nearly square.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wngrad.optim.fused.cuda import again
from wngrad.optim.fused.records import bits
from wngrad.optim.fused.tables import Table
from wngrad.polynomials import COEFFICIENTS

SHRINK = 0.98  # of the result, for what rounding to float16 may add
WIDTH_OF_SUMS = 256


class Matrix(NamedTuple):
    """A matrix of a parameter, in row-major order."""

    m: int  # the address of its momentum
    gradient: int  # which of the gradients it is in
    start: int  # and from which element on
    rows: int
    columns: int
    group: int
    scale: float  # of the result
    u: int  # where its direction begins


class Blocks(NamedTuple):
    """How the products of a batch are cut into tiles."""

    side: int  # of a tile
    depth: int  # of a product that is loaded at once; it divides the side
    across: int  # columns of a tile of P·X; a multiple of the side
    warps: tuple[int, int, int]  # for square matrices, XXᵀ and P·X
    stages: tuple[int, int, int]  # loads ahead
    piece: int  # elements that one program fills
    tile: int  # elements that it fills at once


LARGE = Blocks(128, 64, 256, (4, 4, 8), (3, 4, 4), 2**14, 2**11)
SMALL = Blocks(64, 64, 64, (4, 4, 4), (4, 4, 4), 2**12, 2**10)
LARGE_SIDE = 1024  # from which on a matrix is large
NEARLY_SQUARE = 1.3  # the longer side over the shorter up to which X is stepped itself


class MatrixBatch:
    """Matrices that are worked on together, with padding, and the tables of their tiles.

    Args:
        steps: whether X is stepped itself, not its square companion.
    """

    def __init__(
        self, matrices: Sequence[Matrix], blocks: Blocks, steps: bool, device: torch.device
    ) -> None:
        self.blocks, self.steps, self.device = blocks, steps, device
        padded = [(_up(m.rows, blocks.across), _up(m.columns, blocks.across)) for m in matrices]
        sides = [min(size) for size in padded]
        tall = [size[0] > size[1] for size in padded]
        lower = [_lower(side // blocks.side) for side in sides]
        x = _starts(height * width for height, width in padded)
        square = _starts(side * side for side in sides)
        sums = _starts(-(-m.rows * m.columns // blocks.piece) for m in matrices)
        tiles = _starts(map(len, lower))
        pieces = _starts(-(-height * width // blocks.piece) for height, width in padded)
        words: list[int] = []
        for i, m in enumerate(matrices):
            words += [m.m, m.gradient, m.start, m.rows, m.columns, *padded[i], int(tall[i])]
            words += [m.group, bits(SHRINK * m.scale), x[i], m.u, square[i], sides[i]]
            words += [sums[i], sums[i + 1] - sums[i], tiles[i], tiles[i + 1] - tiles[i]]
        ends = [m.u + m.rows * m.columns for m in matrices]
        # X and its successor, and as many squares as either way of working needs at a time.
        self.sizes = [_up(max(x[-1], *ends), 16)] * 2 + [square[-1]] * (3 if steps else 5)
        self.sums, self.tiles, self.count = sums[-1], tiles[-1], len(matrices)
        self.exact = all(size == m[3:5] for size, m in zip(padded, matrices, strict=True))
        self.records = Table(words, device)
        self.firsts = Table(pieces[:-1], device).tensor
        self.summing = _repeated(sums, device)
        self.filling = _repeated(pieces, device)
        self.lower = _table(_numbered(lower), device)
        wide = _table(_chosen(lower, tiles, [not t for t in tall]), device)
        self.grams = [(False, wide), (True, _table(_chosen(lower, tiles, tall), device))]
        square_tiles = [_grid(side, side, blocks.side, blocks.side) for side in sides]
        self.squares = _table(_numbered(square_tiles), device)
        whole = [_grid(*size, blocks.side, blocks.across) for size in padded]
        self.whole = _table(_numbered(whole), device)


def _up(n: int, multiple: int) -> int:
    return max(1, -(-n // multiple)) * multiple


def _starts(sizes: Iterable[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))


def _lower(n: int) -> list[tuple[int, int]]:
    return [(row, column) for row in range(n) for column in range(row + 1)]


def _grid(height: int, width: int, side: int, across: int) -> list[tuple[int, int]]:
    """All tiles, some rows of them together: they read the same columns while those are cached."""
    rows, columns, together = height // side, width // across, 8
    return [
        (row, column)
        for first in range(0, rows, together)
        for column in range(columns)
        for row in range(first, min(first + together, rows))
    ]


Tile = tuple[int, int, int, int]  # of which matrix; row, column, number


def _numbered(tiles: list[list[tuple[int, int]]]) -> list[Tile]:
    each = [(i, *place) for i, places in enumerate(tiles) for place in places]
    return [(*tile, number) for number, tile in enumerate(each)]


def _chosen(tiles: list[list[tuple[int, int]]], first: list[int], on: list[bool]) -> list[Tile]:
    return [tile for tile in _numbered(tiles) if on[tile[0]]]


def _table(tiles: list[Tile], device: torch.device) -> Tensor:
    return torch.tensor(tiles, dtype=torch.int32).reshape(-1, 4).to(device)


def _repeated(starts: list[int], device: torch.device) -> Tensor:
    """The number of each program's matrix."""
    counts = torch.tensor(starts).diff()
    return torch.arange(len(counts), dtype=torch.int32).repeat_interleave(counts).to(device)


class Workspace:
    """Memory that one batch after another works in."""

    def __init__(self, batches: Sequence[MatrixBatch]) -> None:
        size = max(sum(batch.sizes) for batch in batches)
        self._memory = torch.empty(size, dtype=torch.float16, device=batches[0].device)

    def of(self, batch: MatrixBatch) -> list[Tensor]:
        """X, its successor, and squares."""
        return list(torch.split(self._memory[: sum(batch.sizes)], batch.sizes))


class Launch:
    """A kernel with its arguments; the second time it is launched without looking anything up."""

    def __init__(self, jit: Any, programs: int, *tensors: Tensor, **options: Any) -> None:
        self._jit, self._grid, self._tensors, self._options = (
            jit,
            (programs, 1, 1),
            tensors,
            options,
        )
        self._ready: Callable[[], object] | None = None

    def __call__(self) -> None:
        if self._ready is not None:
            self._ready()
            return
        compiled = self._jit[self._grid](*self._tensors, **self._options)
        if compiled is not None:  # None from the interpreter
            names = [name for name in self._jit.arg_names if name in self._options]
            places = (t.data_ptr() for t in self._tensors)
            arguments = (*places, *(self._options[name] for name in names))
            self._ready = again(compiled, self._grid, arguments, self._tensors[0].device)


class Products:
    """X → U of a batch, in the workspace's memory: from `x` to `u`."""

    def __init__(self, batch: MatrixBatch, workspace: Workspace) -> None:
        from wngrad.optim.fused import kernel_matrices as kernel

        self._kernel, self._batch = kernel, batch
        self.x, self._y, *self._squares = workspace.of(batch)
        floats = {"dtype": torch.float32, "device": batch.device}
        self._sums = torch.empty(2, max(1, batch.tiles), **floats)  # type: ignore[call-overload]
        self._scales = torch.empty(batch.count, **floats)  # type: ignore[call-overload]
        blocks = batch.blocks
        self._square, self._of_x, self._to_x = (
            {"num_warps": warps, "num_stages": stages}
            for warps, stages in zip(blocks.warps, blocks.stages, strict=True)
        )
        self._cut = {"BLOCK": blocks.side, "DEPTH": blocks.depth}
        self._launches = list(self._steps() if batch.steps else self._all())
        self.u = self._y if batch.steps else self.x

    def run(self) -> None:
        for launch in self._launches:
            launch()

    def _all(self) -> Iterable[Launch]:
        x, y = self.x, self._y
        g, s, p, q, h = self._squares
        _, b, *rest = COEFFICIENTS
        yield from self._start(x, g, s, p)
        yield from (self._product(p, g, h), self._product(p, h, q))  # A ← P₁·A·P₁
        yield from (self._polynomial(q, s, b), self._product(s, p, h, mirrors=False))  # P₂·P₁
        yield self._apply(h, x, y)
        yield from self._gram(y, g)
        yield self._polynomial(g, p, rest[0])
        yield from (self._product(p, g, h), self._product(p, h, s))
        yield from (self._polynomial(s, q, rest[1]), self._product(q, p, g, mirrors=False))
        yield from (self._product(q, s, h), self._product(q, h, p))
        yield from (self._polynomial(p, s, rest[2]), self._product(s, g, h, mirrors=False))
        yield self._apply(h, y, x, last=True)

    def _steps(self) -> Iterable[Launch]:
        """Five steps of X."""
        x, y = self.x, self._y
        g, s, p = self._squares
        yield from self._start(x, g, s, p)
        yield self._apply(p, x, y)
        for k, terms in enumerate(COEFFICIENTS[1:], 2):
            x, y = y, x
            yield from self._gram(x, g)
            yield self._polynomial(g, p, terms)
            yield self._apply(p, x, y, last=k == len(COEFFICIENTS), first=False)

    def _start(self, x: Tensor, g: Tensor, s: Tensor, p: Tensor) -> Iterable[Launch]:
        """P₁, and A scaled."""
        yield from self._gram(x, g, sums=True)
        yield self._product(g, g, s, norms=True)
        yield self._first(g, s, p, COEFFICIENTS[0])

    def _gram(self, x: Tensor, out: Tensor, *, sums: bool = False) -> Iterable[Launch]:
        batch, jit = self._batch, self._kernel.gram
        for tall, tiles in batch.grams:
            if len(tiles):
                tensors = (tiles, batch.records.tensor, x, out, self._sums[0])
                flags = {"IS_TALL": tall, "SUM": sums}
                yield Launch(jit, len(tiles), *tensors, **flags, **self._cut, **self._of_x)

    def _polynomial(self, a: Tensor, out: Tensor, terms: tuple[float, float, float]) -> Launch:
        return self._product(a, a, out, terms=terms)

    def _product(
        self,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        *,
        terms: tuple[float, float, float] | None = None,
        norms: bool = False,
        mirrors: bool = True,
    ) -> Launch:
        batch, (before, sums) = self._batch, self._sums
        tiles = batch.lower if mirrors else batch.squares
        tensors = (tiles, batch.records.tensor, a, b, a, out, sums, before)
        numbers = dict(zip(("alpha", "beta", "gamma"), terms or (0.0, 0.0, 1.0), strict=True))
        flags = {"ADDS": terms is not None, "SUM": norms, "NORMS": norms, "MIRRORS": mirrors}
        options = {**numbers, **flags, **self._cut, **self._square}
        options["WIDTH_OF_SUMS"] = WIDTH_OF_SUMS
        return Launch(self._kernel.product, len(tiles), *tensors, **options)

    def _first(
        self, g: Tensor, s: Tensor, out: Tensor, terms: tuple[float, float, float]
    ) -> Launch:
        batch = self._batch
        tensors = (batch.lower, batch.records.tensor, g, s, *self._sums, out, self._scales)
        numbers = dict(zip("abc", terms, strict=True))
        sizes = {"BLOCK": batch.blocks.side, "WIDTH_OF_SUMS": WIDTH_OF_SUMS}
        options = {**numbers, **sizes, "num_warps": batch.blocks.warps[0]}
        return Launch(self._kernel.first_polynomial, len(batch.lower), *tensors, **options)

    def _apply(
        self, square: Tensor, x: Tensor, out: Tensor, *, first: bool = True, last: bool = False
    ) -> Launch:
        batch, blocks = self._batch, self._batch.blocks
        tensors = (batch.whole, batch.records.tensor, square, x, out, self._scales)
        flags = {"FIRST": first, "LAST": last, "EXACT": batch.exact, "DEPTH": blocks.depth}
        cut = {"BLOCK_M": blocks.side, "BLOCK_N": blocks.across}
        return Launch(self._kernel.apply, len(batch.whole), *tensors, **flags, **cut, **self._to_x)
