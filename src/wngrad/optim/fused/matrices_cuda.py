"""Orthogonalized directions on CUDA: from gradients and momenta to U, batch after batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wngrad.optim.fused.cuda import on
from wngrad.optim.fused.products import (
    LARGE,
    LARGE_SIDE,
    NEARLY_SQUARE,
    SMALL,
    WIDTH_OF_SUMS,
    Blocks,
    Launch,
    Matrix,
    MatrixBatch,
    Products,
    Workspace,
)
from wngrad.optim.fused.records import DTYPES
from wngrad.optim.fused.tables import Table
from wngrad.optim.modules import Layout

_NO_FLAGS = {"SCALE": False, "FOUND": False}
_LARGEST = 2**30  # elements of a parameter: kernels count them in 32 bits, padding included
_AT_ONCE = 9 * 2**24  # elements of large matrices: enough for the GPU, and little memory


class Words:
    """The words that a step brings up to date: each group's numbers, the gradients' addresses.

    Args:
        index: which of a snapshot's words these are, `head` of them numbers of groups.
    """

    def __init__(
        self, words: Sequence[int], index: list[int], head: int, device: torch.device
    ) -> None:
        self._index, self._seen = index, words
        self._table = Table([words[i] for i in index], device)
        self.settings, self.gradients = self._table.tensor[:head], self._table.tensor[head:]

    def update(self, words: list[int]) -> None:
        if words is not self._seen:
            self._table.update([words[i] for i in self._index])
            self._seen = words


class Source(NamedTuple):
    """A parameter whose direction is wanted; nothing that would keep it alive."""

    shape: torch.Size
    stride: tuple[int, ...]
    m: int  # the address of its momentum
    aligned: bool  # to 16 bytes, as its gradient is
    dtype: torch.dtype
    layout: Layout
    gradient: int  # its number among the gradients
    group: int
    hides_rows: bool  # those without a gradient

    @staticmethod
    def of(
        g: Tensor, m: Tensor, layout: Layout, gradient: int, group: int, *, hides_rows: bool
    ) -> Source:
        aligned = all(t.data_ptr() % 16 == 0 for t in (g, m))
        facts = (layout, gradient, group, hides_rows)
        return Source(m.shape, m.stride(), m.data_ptr(), aligned, m.dtype, *facts)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(how many, out, in) of its matrices."""
        return self.layout.sizes(self.shape)

    @property
    def room(self) -> int:
        """Elements for its direction, so that the next begins at a multiple of 16 bytes."""
        return -(-self.shape.numel() // 16) * 16


def fits(p: Tensor, g: Tensor, m: Tensor, layout: Layout) -> bool:
    """Whether its matrices lie in memory row after row, in all three tensors alike."""
    if layout.kind == "transposed" or not 0 < p.numel() <= _LARGEST:
        return False
    if {g.stride(), m.stride()} != {p.stride()}:
        return False
    last = p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last)
    return p.is_contiguous() or (layout.kind == "rows" and last)


def stages(sources: Sequence[Source], skip: bool, words: Words) -> list[Stage]:
    """The stages of some parameters of one type on one device, which share their memory.

    So one stage's directions must have been used before the next is run.
    """
    device = words.settings.device
    parts = [(part, _batch(part, blocks, steps, device)) for blocks, steps, part in _parts(sources)]
    workspace = Workspace([batch for _, batch in parts])
    return [Stage(part, batch, workspace, skip, words) for part, batch in parts]


def _batch(sources: list[Source], blocks: Blocks, steps: bool, device: torch.device) -> MatrixBatch:
    matrices: list[Matrix] = []
    for source, start in zip(sources, _starts(sources), strict=True):
        count, rows, columns = source.sizes
        scale, size = source.layout.scale(source.shape), rows * columns
        for k in range(count):
            place = (source.m + k * size * source.dtype.itemsize, source.gradient, k * size)
            matrices.append(Matrix(*place, rows, columns, source.group, scale, start + k * size))
    return MatrixBatch(matrices, blocks, steps, device)


def _starts(sources: list[Source]) -> list[int]:
    """Where each of their directions begins."""
    return list(accumulate((source.room for source in sources), initial=0))[:-1]


def _parts(sources: Sequence[Source]) -> Iterable[tuple[Blocks, bool, list[Source]]]:
    """Small matrices all together; large ones, those of a shape side by side, some at a time."""

    def sides(source: Source) -> tuple[int, int]:
        _, rows, columns = source.sizes
        return min(rows, columns), max(rows, columns)

    large = [s for s in sources if sides(s)[0] >= LARGE_SIDE]
    square = [s for s in large if sides(s)[1] <= NEARLY_SQUARE * sides(s)[0]]
    longer = [s for s in large if sides(s)[1] > NEARLY_SQUARE * sides(s)[0]]
    small = [s for s in sources if sides(s)[0] < LARGE_SIDE]
    for blocks, part in ((LARGE, square), (LARGE, longer), (SMALL, small)):
        steps = part is square
        batch: list[Source] = []
        for source in sorted(part, key=lambda s: s.room, reverse=True):
            if batch and sum(s.room for s in (*batch, source)) > _AT_ONCE:
                yield blocks, steps, batch
                batch = []
            batch.append(source)
        if batch:
            yield blocks, steps, batch


class Stage:
    """A batch of parameters: `run` stores their momenta, and their directions in `u`."""

    def __init__(
        self,
        sources: list[Source],
        batch: MatrixBatch,
        workspace: Workspace,
        skip: bool,
        words: Words,
    ) -> None:
        from wngrad.optim.fused import kernel_matrices

        self.sources, self._batch, self._words = sources, batch, words
        self._kernel = kernel_matrices
        self._products = Products(batch, workspace)
        places, u = zip(sources, _starts(sources), strict=True), self._products.u
        first = u.storage_offset()
        self.u = [u.as_strided(s.shape, s.stride, first + at) for s, at in places]
        device = batch.device
        self._sums = torch.empty(batch.sums, dtype=torch.float64, device=device)
        self._factors = torch.empty(batch.count, dtype=torch.float64, device=device)
        aligned = all(source.aligned for source in sources)
        self._constants = {
            "DTYPE": _type(sources[0].dtype),
            "WIDE": batch.exact and aligned,
            "PIECE": batch.blocks.piece,
            "TILE": batch.blocks.tile,
        }
        self._skip = skip
        self._hidden = _hidden_rows(sources, device)
        self._usual = self._launches(self._sums, self._sums, _NO_FLAGS)

    def run(self, words: list[int], scale: Tensor | None, found_inf: Tensor | None) -> None:
        """Take the gradients as they are now, or divided by `scale`, unless `found_inf` says no."""
        self._words.update(words)
        launches = self._usual
        if scale is not None or found_inf is not None:
            flags = {"SCALE": scale is not None, "FOUND": found_inf is not None}
            launches = self._launches(self._here(scale), self._here(found_inf), flags)
        with on(self._sums.device):
            for launch in launches:
                launch()

    def _here(self, t: Tensor | None) -> Tensor:
        return self._sums if t is None else t.to(self._sums.device, non_blocking=True)

    def _launches(self, scale: Tensor, found_inf: Tensor, flags: dict[str, bool]) -> list[Any]:
        kernel, batch, rec = self._kernel, self._batch, self._batch.records.tensor
        inputs = (rec, self._words.gradients, self._words.settings, scale)
        usual, scaling = self._constants, {"SCALE": flags["SCALE"]}
        made = [
            Launch(kernel.sum_squares, batch.sums, batch.summing, *inputs, self._sums,
                   **scaling, **usual),
            Launch(kernel.find_factors, batch.count, rec, self._sums, self._factors,
                   WIDTH_OF_SUMS=WIDTH_OF_SUMS),
            Launch(kernel.fill, len(batch.filling), batch.filling, *inputs, found_inf,
                   self._factors, batch.firsts, self._products.x,
                   **flags, SKIP=self._skip, EXACT=batch.exact, **usual),
            self._products.run,
        ]  # fmt: skip
        if self._hidden is not None:
            which, firsts = self._hidden
            tensors = (which, firsts, rec, self._words.gradients, self._products.u)
            sizes = {"DTYPE": usual["DTYPE"], "TILE": 256}
            made.append(Launch(kernel.hide_rows, len(which), *tensors, **sizes))
        return made


def _hidden_rows(sources: list[Source], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """For each row that may be hidden the number of its matrix, and the first row of each."""
    sizes = [(source.sizes, source.hides_rows) for source in sources]
    rows = [rows * hides for (count, rows, _), hides in sizes for _ in range(count)]
    if not any(rows):
        return None
    which = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(torch.tensor(rows))
    firsts = torch.tensor(list(accumulate(rows, initial=0))[:-1])
    return which.to(device), firsts.to(device)


def _type(dtype: torch.dtype) -> Any:
    import triton.language as tl

    return getattr(tl, DTYPES[dtype])
