"""Parts of matrices, and what is done to all of one shape at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from wngrad.optim.orthogonal_sharded.placement import ROWS, Cut


@dataclass(frozen=True, slots=True)
class Slice:
    """This rank's part of a matrix, or of some matrices that are cut alike."""

    x: Tensor  # (how many, rows, columns)
    rows: int  # of the whole matrix
    columns: int
    cuts: tuple[Cut, ...]
    groups: tuple[Any, ...]  # the ranks of each cut

    @property
    def message(self) -> tuple[Any, ...]:
        """What all that travels in one message has in common."""
        return self.groups, self.x.dtype, self.x.device

    @property
    def takes_gram(self) -> bool:
        """Whether a sum of Gram matrices is fewer bytes than the way to an owner and back."""
        axes, ranks = {cut.axis for cut in self.cuts}, prod(len(cut.sizes) for cut in self.cuts)
        if len(axes) != 1:
            return False
        m, n = (self.rows, self.columns) if ROWS in axes else (self.columns, self.rows)
        return ranks * (n + 1) * self.x.itemsize <= 2 * m * wire_type(self.x).itemsize

    @property
    def moves(self) -> bool:
        """Whether it goes to an owner."""
        return bool(self.cuts) and not self.takes_gram

    @property
    def flips(self) -> bool:
        """Whether x has to be transposed for its rows to be whole, where it is cut one way."""
        return self.cuts[0].axis == ROWS


def wire_type(x: Tensor) -> torch.dtype:
    """The type in which a matrix travels to its owner, and the result back.

    On CUDA `orthogonalize` takes its products in float16 anyway. What travels in a type that is
    narrower than its own is scaled first.
    """
    return torch.float16 if x.is_cuda and x.dtype == torch.float32 else x.dtype


def alike(keys: Iterable[Any]) -> list[list[int]]:
    """The positions of each distinct key, in the order of the first of them."""
    members: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    return list(members.values())


def in_order(by_index: dict[int, Tensor]) -> list[Tensor]:
    return [by_index[i] for i in range(len(by_index))]


def in_batches(f: Callable[..., Tensor], *stacks: list[Tensor]) -> list[Tensor]:
    """f(x, …) of each x and its partners: those of one shape are put together for one call.

    Messages must not be put together like that: parts of one shape here may differ elsewhere.
    """
    out: dict[int, Tensor] = {}
    tuples = list(zip(*stacks, strict=True))
    for members in alike(tuple((t.shape[1:], t.dtype, t.device) for t in ts) for ts in tuples):
        columns = list(zip(*(tuples[i] for i in members), strict=True))
        inputs = [ts[0] if len(ts) == 1 else torch.cat(ts) for ts in columns]
        results = torch.split(f(*inputs), [len(tuples[i][0]) for i in members])
        out.update(zip(members, results, strict=True))
    return in_order(out)
