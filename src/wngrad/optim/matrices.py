"""Parameters as matrices: the layout in which a parameter holds them, and what it is by its shape.

An optimizer that orthogonalizes has to know which of a parameter's dimensions are a neuron's
inputs, and how many matrices are packed into it. `matrix_groups` in `roles.py` answers that for a
whole model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from torch import Tensor

from wngrad.optim.blocks import Shape, named_shape

Role: TypeAlias = Literal["matrix", "embedding", "vector"]
Kind: TypeAlias = Literal["rows", "stack", "transposed"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a parameter is a stack of matrices with one row for each output neuron.

    `dataclasses.astuple` makes it plain data for a checkpoint, and `Layout(*pair)` takes it back.

    Args:
        kind: "rows": dimension 0 is the output, all others are the input, and dimension 0 is cut
            into `pieces` equal matrices (packed queries, keys and values: 3; the gates of an LSTM:
            4; a convolution: its groups).
            "stack": the last two dimensions are (out, in), those before count the matrices.
            "transposed": (in, out), or a transposed convolution's (in, out/groups, k…) with
            `pieces` groups; a group's matrix is (out/groups, in/groups·k).
        pieces: how many equal matrices dimension 0 holds; 1 for a "stack".

    Example:
        >>> import torch
        >>> packed = Layout("rows", pieces=3)
        >>> packed.matrices(torch.zeros(12, 4)).shape
        torch.Size([3, 4, 4])
        >>> Layout("stack").blocks((8, 5, 4))
        (8, 5, 1)
    """

    kind: Kind = "rows"
    pieces: int = 1

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            names = ", ".join(map(repr, get_args(Kind)))
            raise ValueError(f"Layout: `kind` must be one of {names}, got {self.kind!r}.")
        if type(self.pieces) is not int:
            raise TypeError(f"Layout: `pieces` must be an int, got {self.pieces!r}.")
        if self.pieces < 1:
            raise ValueError(f"Layout: `pieces` must be >= 1, got {self.pieces!r}.")
        if self.kind == "stack" and self.pieces != 1:
            raise ValueError(f"Layout: `pieces` of a 'stack' must be 1, got {self.pieces!r}.")

    def sizes(self, shape: Shape) -> tuple[int, int, int]:
        """(how many, out, in) of the matrices of a parameter of this shape."""
        if len(shape) < 2:
            raise ValueError(
                f"Layout: `shape` must have at least 2 dimensions, got {tuple(shape)!r}."
            )
        if self.kind == "stack":
            return math.prod(shape[:-2]), shape[-2], shape[-1]
        if shape[0] % self.pieces:
            raise ValueError(
                f"Layout: `pieces` must divide dimension 0, got {self.pieces!r} for a parameter of "
                f"shape {tuple(shape)!r}."
            )
        first, rest = shape[0] // self.pieces, math.prod(shape[2:])
        if self.kind == "transposed":
            return self.pieces, shape[1], first * rest
        return self.pieces, first, shape[1] * rest

    def matrices(self, t: Tensor) -> Tensor:
        """`t` as its matrices, (how many, out, in); a view where the strides allow it."""
        count, out, size = self.sizes(t.shape)
        if self.kind == "transposed":
            inputs, rest = t.shape[0] // count, math.prod(t.shape[2:])
            t = t.reshape(count, inputs, out, rest).transpose(1, 2)
        return t.reshape(count, out, size)

    def restore(self, m: Tensor, like: Tensor) -> Tensor:
        """The inverse of `matrices`: m in the shape of `like`, its bits unchanged.

        A view of m where its strides allow it; type, device and strides are m's, not `like`'s.
        """
        count, out, _ = self.sizes(like.shape)
        if self.kind == "transposed":
            inputs, rest = like.shape[0] // count, math.prod(like.shape[2:])
            m = m.reshape(count, out, inputs, rest).transpose(1, 2)
        return m.reshape(like.shape)

    def blocks(self, shape: Shape) -> Shape:
        """The shape of b with one b for each row of each matrix.

        Its entries are in the rows' order: `b.reshape(how many, out, 1)` broadcasts against
        `matrices`.
        """
        count, out, _ = self.sizes(shape)
        if self.kind == "stack":
            return (*shape[:-1], 1)
        if self.kind == "transposed":
            return (count, out) + (1,) * (len(shape) - 2)
        return named_shape(shape, "neuron")

    def scale(self, shape: Shape) -> float:
        """max(1, √(out/in)) of one matrix; 1 for one without inputs."""
        _, out, size = self.sizes(shape)
        return max(1.0, math.sqrt(out / size)) if size else 1.0


def by_shape(p: Tensor) -> Layout | None:
    """The layout of a parameter of which nothing is known but its shape and type; None: a vector.

    - Fewer than two dimensions: a vector.
    - One entry or none in all, such as a temperature of shape (1, 1): a vector.
    - A complex type: a vector, whatever its shape.
    - Three dimensions of which the first is 1, such as places learned for an image's patches: the
      matrix of the other two, or, if the second is 1 as well, a vector.
    - Every other: a matrix with `Layout("rows")`, dimension 0 against all others. A single row
      (1, n) or column (n, 1) is one, too: to orthogonalize it is to normalize it.

    Nothing is an embedding by its shape.
    """
    if p.dim() < 2 or p.numel() <= 1 or p.is_complex():
        return None
    if p.dim() == 3 and p.shape[0] == 1:
        return Layout("stack") if p.shape[1] > 1 else None
    return Layout()
