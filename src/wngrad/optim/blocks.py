"""Granularity: which entries of a parameter share one b.

A granularity is nothing but a shape for b. It has as many dimensions as the parameter, and each of
its entries divides the parameter's: `(out, 1)` is one b per row of a matrix, `(1, 1)` one for all
of it, `(heads, 1)` one for every attention head's rows.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor

Shape = tuple[int, ...]
PerName = Literal["neuron", "tensor", "model", "slice"]
NAMES = get_args(PerName)
Per = PerName | Sequence[Sequence[int]] | Callable[[Tensor], Sequence[int]]


class LostCallable(NamedTuple):
    """Stands for a callable `per` that could not be pickled, or not be found again."""

    name: str


class PortableCallable:
    """A callable `per` that any optimizer can be copied and pickled with.

    Copies keep the callable. So does a pickle if it can; else, where it is loaded, a `LostCallable`
    stands in its place.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __deepcopy__(self, memo: dict[int, Any]) -> PortableCallable:
        return PortableCallable(copy.deepcopy(self.function, memo))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[bytes | None, str]]:
        try:
            data = pickle.dumps(self.function)
        except Exception:  # Whatever its class raises, it is not picklable.
            data = None
        return _unpickled, (data, getattr(self.function, "__qualname__", repr(self.function)))


def _unpickled(data: bytes | None, name: str) -> PortableCallable | LostCallable:
    try:
        return LostCallable(name) if data is None else PortableCallable(pickle.loads(data))
    except Exception:  # It is not in this process.
        return LostCallable(name)


def named_shape(shape: Shape, per: PerName) -> Shape:
    """The shape of b for a parameter of this shape."""
    n = len(shape)
    if per not in NAMES:
        raise ValueError(f"`per` must be one of {NAMES}, got {per!r}.")
    if per in ("tensor", "model"):
        return (1,) * n
    kept = 2 if per == "slice" and n > 2 else 1  # (out, in) of a convolution, else (out,).
    return tuple(shape[:kept]) + (1,) * (n - kept)


def resolve(owner: str, per: Per, params: Sequence[Tensor]) -> PerName | list[Shape]:
    """What `per` means for these parameters, as plain data: a name, or a shape for each of them."""
    if isinstance(per, str):
        if per not in NAMES:
            names = ", ".join(map(repr, NAMES))
            raise ValueError(f"{owner}: `per` must be one of {names} or a callable, got {per!r}.")
        return per
    if isinstance(per, LostCallable):
        raise ValueError(
            f"{owner}: `per` must be given for a group added after a pickle was loaded, unless it "
            f"was a name or a function that can be imported, got no `{per.name}` from the pickle."
        )
    if callable(per):
        shapes = [per(p) for p in params]
    elif isinstance(per, Sequence) and len(per) == len(params):
        shapes = list(cast(Sequence[Sequence[int]], per))
    else:
        raise TypeError(
            f"{owner}: `per` must be a name, a callable, or one shape for each of the "
            f"{len(params)} parameters, got {per!r}."
        )
    return [_checked(owner, shape, p) for shape, p in zip(shapes, params, strict=True)]


def _checked(owner: str, shape: object, p: Tensor) -> Shape:
    if not isinstance(shape, Sequence) or not all(type(n) is int for n in shape):
        raise TypeError(
            f"{owner}: `per` must give the shape of b as a tuple of ints, got {shape!r} "
            f"for a parameter of shape {tuple(p.shape)}."
        )
    fits = len(shape) == p.dim() and all(
        n == d or (n > 0 and d % n == 0) for n, d in zip(shape, p.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"{owner}: `per` must give a shape whose entries divide the parameter's, got "
            f"{tuple(shape)!r} for a parameter of shape {tuple(p.shape)}."
        )
    return tuple(shape)


def split(t: Tensor, blocks: Shape) -> tuple[Tensor, Shape]:
    """`t` as a view against which b, seen with the returned shape, broadcasts."""
    shape: list[int] = []
    b_shape: list[int] = []
    for size, count in zip(t.shape, blocks, strict=True):
        whole = count in (1, size)
        shape += [size] if whole else [count, size // count]
        b_shape += [count] if whole else [count, 1]
    return (t if len(shape) == t.dim() else t.view(shape)), tuple(b_shape)


def sq_norm(g: Tensor, b_shape: Sequence[int], *, traced: bool = True) -> Tensor:
    """‖g‖² over each block, in b's shape, summed in float64 (float32 where there is nothing wider).

    No finite float32, bfloat16 or float16 gradient overflows or underflows here, and the result
    does not depend on the order of summation by more than float32's rounding. Unless autograd or a
    compiler is to see it, no squares are written down (on CUDA a copy of g in float64 is).
    """
    dims = [i for i, n in enumerate(b_shape) if n == 1]
    wide = accumulator(g.device)
    if not dims:  # An empty list of dimensions would make torch sum over all of them.
        return g.to(wide).square()
    if traced or g.device.type not in ("cpu", "cuda"):
        return g.to(wide).square().sum(dims, keepdim=True)
    norm: Tensor = torch.linalg.vector_norm(g, dim=dims, keepdim=True, dtype=wide)
    return norm.square()


def accumulator(device: torch.device) -> torch.dtype:
    """The widest type the device sums in."""
    return torch.float32 if device.type == "mps" else torch.float64
