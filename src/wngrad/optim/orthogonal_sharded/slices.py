"""Parts of matrices, and what is done to all of one kind at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def alike(keys: Iterable[Any]) -> dict[Any, list[int]]:
    """The positions of each distinct key, in the order of the first of them."""
    members: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    return members


def in_order(by_index: dict[int, Tensor]) -> list[Tensor]:
    return [by_index[i] for i in range(len(by_index))]


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


def together(f: Callable[..., Tensor], keys: Iterable[Any], *lists: list[Tensor]) -> list[Tensor]:
    """f(key, x, …) of each x and its partners: those of one key are put together for one call."""
    out: dict[int, Tensor] = {}
    for key, members in alike(keys).items():
        inputs = [joined([tensors[i] for i in members]) for tensors in lists]
        results = torch.split(f(key, *inputs), [len(lists[0][i]) for i in members])
        out.update(zip(members, results, strict=True))
    return in_order(out)


def in_batches(f: Callable[..., Tensor], *stacks: list[Tensor]) -> list[Tensor]:
    """f(x, …) of each x and its partners, those of one shape in one call.

    Messages must not be put together like that: parts of one shape here may differ elsewhere.
    """
    kinds = [[(t.shape[1:], t.dtype, t.device) for t in stack] for stack in stacks]
    return together(lambda _, *inputs: f(*inputs), zip(*kinds, strict=True), *stacks)
