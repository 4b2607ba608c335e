"""Leaves as matrices: which axes of a leaf are a neuron's inputs, and which count neurons.

The names of the axes are those of `optax.contrib.MuonDimensionNumbers`, which is taken wherever
`MatrixAxes` is: labels written for `optax.contrib.muon` serve here, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from wngrad.transforms.neurons import flax_neuron_axis

Path = tuple[Any, ...]
Shape = tuple[int, ...]
Several = int | tuple[int, ...]


class MatrixAxes(NamedTuple):
    """The axes of a leaf that make a matrix; all others count matrices.

    A scan over layers stacks kernels as (layers, in, out), which is `MatrixAxes(-2, -1)`.
    """

    reduction_axis: Several = 0  # a neuron's inputs, over which a layer sums
    output_axis: Several = 1  # the neurons


Label = MatrixAxes | Literal["matrix", "embedding", "vector"] | None  # None: a vector
LayoutFunction = Callable[[Path, Shape], Label]
_NAMES = ("matrix", "embedding", "vector")


def flax_layout(path: Path, shape: Shape) -> Label:
    """What a leaf is by Flax's convention, as `flax_neuron_axis` has it.

    - Fewer than two dimensions, or called `bias` or `scale`: a vector.
    - `embedding`: an embedding, (vocabulary, features), one row for each entry of the vocabulary.
    - `kernel`: a matrix with the neuron last, (in, out) or (k…, in, out). That of an attention's
      query, key or value, (in, heads, dim), is one matrix with heads·dim neurons.
    - Every other: a matrix with the neuron last, unless all axes before it are 1, as those of a
      token (1, 1, features): then a vector.
    """
    axes = flax_neuron_axis(path, shape)
    if axes is None:
        return "vector"
    if axes == 0:
        return "embedding"
    if isinstance(axes, tuple):
        return MatrixAxes(0, axes)
    kernel = "kernel" in names_of(path)[-2:]  # An nnx variable wraps its content once more.
    return "matrix" if kernel or math.prod(shape[:-1]) > 1 else "vector"


@dataclass(frozen=True, slots=True)
class Matrices:
    """A leaf as a stack of matrices (how many, out, in), by axes counted from 0."""

    stacked: tuple[int, ...]
    outputs: tuple[int, ...]
    inputs: tuple[int, ...]
    by_rows: bool = False  # an embedding: rows without a gradient do not move

    @property
    def order(self) -> tuple[int, ...]:
        return self.stacked + self.outputs + self.inputs

    @property
    def neurons(self) -> tuple[int, ...]:
        """The axes along which every index has a b of its own."""
        return self.stacked + self.outputs

    def of(self, leaf: Array) -> Array:
        """A leaf as its matrices."""
        return leaf.transpose(self.order).reshape(self._sizes(leaf.shape))

    def restore(self, matrices: Array, shape: Shape) -> Array:
        """The inverse of `of`."""
        moved = matrices.reshape(tuple(shape[i] for i in self.order))
        return moved.transpose(tuple(self.order.index(i) for i in range(len(shape))))

    def scale(self, shape: Shape) -> float:
        """max(1, √(out/in)) of one matrix; 1 for one without inputs."""
        _, out, size = self._sizes(shape)
        return max(1.0, math.sqrt(out / size)) if size else 1.0

    def seen(self, g: Array) -> Array:
        """The rows that have a gradient, as a mask."""
        return jnp.any(g != 0, self.inputs, keepdims=True)

    def _sizes(self, shape: Shape) -> tuple[int, ...]:
        axes = (self.stacked, self.outputs, self.inputs)
        return tuple(math.prod(shape[i] for i in part) for part in axes)


class Layouts:
    """The layout of every leaf of a tree.

    Args:
        owner: whose `layout` it is, for messages.
        layout: None for `flax_layout`, a function like it, or a tree of labels: one for each leaf,
            or for a whole part of the tree.
    """

    def __init__(self, owner: str, layout: Any) -> None:
        self._owner = owner
        self._label: LayoutFunction
        if layout is None or callable(layout):
            self._label = flax_layout if layout is None else layout
            return
        labels, _ = jax.tree_util.tree_flatten_with_path(layout, is_leaf=_is_label)
        self._table = {names_of(path): label for path, label in labels}
        self._label = self._by_place

    def matrices(self, path: Path, shape: Shape) -> Matrices | None:
        """The matrices of a leaf; None for a vector."""
        label: Any = self._label(path, shape)
        n = len(shape)
        if label is None or label == "vector":
            return None
        if label == "embedding" and n > 1:
            return Matrices((), (0,), tuple(range(1, n)), by_rows=True)
        if label == "matrix" and n > 1:
            return Matrices((), (n - 1,), tuple(range(n - 1)))
        if not _is_axes(label):
            rule = f"must be one of {_NAMES}, None or MatrixAxes, or a tree or function of these"
            if label in ("matrix", "embedding"):
                rule = "must be 'vector' for fewer than 2 dimensions"
            raise self._error(rule, label, path, shape)
        inputs, outputs = (_counted(each, n) for each in (label.reduction_axis, label.output_axis))
        if inputs is None or outputs is None or set(inputs) & set(outputs):
            raise self._error("must name different axes of the leaf", label, path, shape)
        stacked = tuple(i for i in range(n) if i not in inputs + outputs)
        return Matrices(stacked, outputs, inputs)

    def neuron_axis(self, path: Path, shape: Shape) -> tuple[int, ...] | None:
        """The axes with a b for every index; None for a b for each entry."""
        matrices = self.matrices(path, shape)
        return None if matrices is None else matrices.neurons

    def _by_place(self, path: Path, shape: Shape) -> Label:
        names = names_of(path)
        for n in range(len(names), -1, -1):
            if names[:n] in self._table:
                label: Label = self._table[names[:n]]
                return label
        raise self._error("must have a label for every leaf", "none", path, shape)

    def _error(self, rule: str, label: object, path: Path, shape: Shape) -> ValueError:
        where = jax.tree_util.keystr(path) or "the leaf"
        return ValueError(
            f"{self._owner}: `layout` {rule}, got {label!r} for {where} of shape {shape}."
        )


def names_of(path: Path) -> tuple[Any, ...]:
    """The names and numbers on a path, whatever kind of container each is of."""
    fields = ("key", "name", "idx")
    return tuple(next((getattr(k, f) for f in fields if hasattr(k, f)), k) for k in path)


def _is_axes(label: Any) -> bool:
    return hasattr(label, "reduction_axis") and hasattr(label, "output_axis")


def _is_label(value: Any) -> bool:
    return value is None or _is_axes(value)


def _counted(axes: Any, n: int) -> tuple[int, ...] | None:
    """Axes counted from 0; None if they are not different axes of n dimensions."""
    several = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    if not several or not all(type(i) is int and -n <= i < n for i in several):
        return None
    counted = tuple(i % n for i in several)
    return counted if len(set(counted)) == len(counted) else None
