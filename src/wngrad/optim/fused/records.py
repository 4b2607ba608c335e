"""The records that kernels read: 64-bit words, laid out once and for all engines.

Each record is a NumPy structured dtype. The Triton kernel takes its word numbers from it, the C
kernel's structs have the same fields in the same order (and their sizes are compared when the
library is loaded), and Python fills it by name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from wngrad.optim import decays
from wngrad.optim.directions import Adam, Direction, Momentum, Orthogonalized, RunningMean


def _record(*names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names])


# A group's numbers, all float64 but `lam_kind`; an even number of them, so that the gradients'
# addresses, which follow, are aligned. `lam` is λ, or the address of a tensor that holds it.
GROUP = _record("lam", "lam_kind", "mu", "log_mu", "weight_decay", "c", "sign", "eta")
NUMBER, FLOAT32, FLOAT64 = range(3)  # kinds of λ

# Where a parameter and its state lie; 0 for what it has not.
_PLACES = ("p", "b", "buffer", "rms", "average", "t", "skipped", "norm")
# Of Adam's direction, float64: u = scale·m̂/√v̂, log₂ β₂, and rms ← hypot(old_rms·rms, new_rms·g).
_ADAM = ("scale", "log_beta2", "old_rms", "new_rms")
# A strided layout: sizes of the second of two dimensions across blocks and of the last three of
# four within one; then six strides for each tensor of the parameter's shape.
_SIZES = ("size_0", "size_1", "size_2", "size_3")
TENSORS = ("p", "g", "buffer", "rms", "average")
_STRIDES = tuple(f"{of}_stride_{i}" for of in TENSORS for i in range(6))
LAYOUT = _record(*_SIZES, *_STRIDES)

# Triton: a parameter, of which `pieces` programs sum each row; `first` of all, `span` tiles each.
TRITON_PARAMETER = _record(
    *_PLACES,
    *_ADAM,
    *("length", "rows", "pieces", "piece", "first", "span", "group", "hold", "sums", "room"),
)
# Parameters that share b: rows, then which runs of sums and which members are theirs.
TRITON_SHARED = _record(
    "rows", "run", "runs", "member", "members", "group", "hold", "first_program"
)
TRITON_RUN = _record("sums", "count")
TRITON_MEMBER = _record("b", "t", "skipped", "norm", "room", "present")
# A matrix to be orthogonalized: its momentum; which gradient it is in, and from which element on;
# its size, and with padding; where its copies and its square companions lie; which sums are its.
TRITON_MATRIX = _record(
    *("m", "gradient", "start", "rows", "columns", "height", "width", "tall", "group", "scale"),
    *("x", "u", "square", "side", "first_sum", "sums", "first_tile", "tiles"),
)

# C: a parameter, with its layout; parameters that share b; rows of them; pieces of long rows.
C_PARAMETER = _record(*_PLACES, *_ADAM, "length", "group", "hold", "dense", *_SIZES, *_STRIDES)
C_SHARED = _record("first", "members", "absent", "absents")
C_ROWS = _record("shared", "row", "count", "sum")
C_PIECE = _record("parameter", "row", "factor", "begin", "end")
C_LONG_ROW = _record("shared", "row", "factor", "pieces", "first")
C_RECORDS = (GROUP, C_PARAMETER, C_SHARED, C_ROWS, C_PIECE, C_LONG_ROW)


def table(record: np.dtype[np.void], rows: Iterable[tuple[int, ...]]) -> np.ndarray[Any, Any]:
    """An array of records, their fields in order."""
    return np.array(list(rows), dtype=record)


class Rule(IntEnum):
    """The directions that kernels know."""

    GRADIENT, MOMENTUM, RUNNING_MEAN, ADAM = range(4)

    @property
    def counts_blocks(self) -> bool:
        """Whether t is kept for every block."""
        return self >= Rule.RUNNING_MEAN


RULES: dict[type[Direction], Rule] = {
    Direction: Rule.GRADIENT,
    Momentum: Rule.MOMENTUM,
    RunningMean: Rule.RUNNING_MEAN,
    Adam: Rule.ADAM,
    Orthogonalized: Rule.GRADIENT,  # u, which `fused.matrices` makes, stands for the gradient
}


class Decay(IntEnum):
    """Where weight decay comes in: into the gradient, by x·(1 − w·λ) or by x·(1 − w·λ/b)."""

    NONE, COUPLED, DECOUPLED, BY_RATE = range(4)


DECAYS: dict[type, Decay] = {
    type(None): Decay.NONE,
    decays.ByLr: Decay.DECOUPLED,
    decays.ByRate: Decay.BY_RATE,
}


class Refused(NamedTuple):
    """A parameter with blocks that are not finite."""

    param: int  # its id
    blocks: int


_DOUBLE, _WORD = struct.Struct("<d").pack, struct.Struct("<q").unpack


@lru_cache(maxsize=4096)
def bits(x: float) -> int:
    """A float64 as a word; −0, which the cache takes for 0, is one with it."""
    word: int = _WORD(_DOUBLE(x + 0.0))[0]
    return word


def address(t: Tensor | None) -> int:
    """Where a tensor lies; 0 if there is none."""
    return 0 if t is None else t.data_ptr()


DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
