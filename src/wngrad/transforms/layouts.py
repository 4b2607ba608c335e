"""What the axes of a leaf are: which count neurons, and which are a neuron's inputs.

The names of the axes are those of `optax.contrib.MuonDimensionNumbers`, which is taken wherever
`MatrixAxes` is: labels written for `optax.contrib.muon` serve here, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
from jax import Array

Path = tuple[Any, ...]
Shape = tuple[int, ...]
Several = int | tuple[int, ...]
Axes = Several | None  # None for one b per entry
AxisFunction = Callable[[Path, Shape], Axes]


def flax_neuron_axis(path: Path, shape: Shape) -> Axes:
    """Flax's convention: a kernel's last axis, an embedding's first, each entry of a bias or scale.

    The kernel of an attention's query, key or value is (in, heads, dim): its neurons are the last
    two axes.
    """
    names = names_of(path)
    if names[-1:] == ("value",):  # an nnx variable wraps its content once more
        names = names[:-1]
    layer, name = (None, None, *names)[-2:]
    if len(shape) < 2 or name in ("bias", "scale"):
        return None
    if name == "embedding":
        return 0
    return (-2, -1) if layer in ("query", "key", "value") and len(shape) == 3 else -1


def neuron_axis_of(module: Any) -> AxisFunction:
    """The `neuron_axis` of a model: Equinox keeps the neuron first, Flax last (embeddings first).

    Leaves that a transformation has stacked (`nn.scan`, `eqx.filter_vmap`) have one axis more, and
    need a function of yours.

    Args:
        module: an Equinox module, or a Flax one (linen or nnx).
    """
    origins = {base.__module__.split(".")[0] for base in type(module).__mro__}
    if "equinox" in origins:
        return lambda path, shape: 0 if len(shape) > 1 else None
    if "flax" in origins:
        return flax_neuron_axis
    raise TypeError(
        f"neuron_axis_of: `module` must be an Equinox or Flax module, got "
        f"{type(module).__name__}; give `neuron_axis` as a number or a function of path and shape."
    )


# ---------------------------------------------------------------- leaves as matrices


class MatrixAxes(NamedTuple):
    """The axes of a leaf that make a matrix; all others count matrices.

    A scan over layers stacks kernels as (layers, in, out), which is `MatrixAxes(-2, -1)`.
    """

    reduction_axis: Several = 0  # a neuron's inputs, over which a layer sums
    output_axis: Several = 1  # the neurons


Label = MatrixAxes | Literal["matrix", "embedding", "vector"] | None  # None: a vector
LayoutFunction = Callable[[Path, Shape], Label]


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
    def neurons(self) -> tuple[int, ...]:
        """The axes along which every index has a b of its own."""
        return self.stacked + self.outputs

    def apply(self, f: Callable[[Array], Array], leaf: Array) -> Array:
        """f of a leaf's matrices, as a leaf again."""
        order = self.neurons + self.inputs
        moved = leaf.transpose(order)
        axes = (self.stacked, self.outputs, self.inputs)
        stack = moved.reshape(tuple(math.prod(leaf.shape[i] for i in part) for part in axes))
        new = f(stack).reshape(moved.shape)
        return new.transpose(tuple(order.index(i) for i in range(leaf.ndim)))


def matrices_of(owner: str, layout: Any) -> Callable[[Path, Shape], Matrices | None]:
    """A function of a leaf's path and shape: its matrices, or None for a vector.

    Args:
        owner: whose `layout` it is, for messages.
        layout: None for `flax_layout`, a function like it, or a tree of labels: one for each leaf,
            or for a whole part of the tree.
    """
    label_of = flax_layout if layout is None else layout
    labels = {}
    if not callable(label_of):
        leaves, _ = jax.tree_util.tree_flatten_with_path(
            layout, is_leaf=lambda part: part is None or _has_axes(part)
        )
        labels = {names_of(path): label for path, label in leaves}

    def error(rule: str, label: object, path: Path, shape: Shape) -> ValueError:
        where = jax.tree_util.keystr(path) or "the leaf"
        return ValueError(f"{owner}: `layout` {rule}, got {label!r} for {where} of shape {shape}.")

    def matrices(path: Path, shape: Shape) -> Matrices | None:
        label: Any
        if callable(label_of):
            label = label_of(path, shape)
        else:
            parts = (names_of(path)[:n] for n in range(len(path), -1, -1))
            if (part := next((part for part in parts if part in labels), None)) is None:
                raise error("must have a label for every leaf", "none", path, shape)
            label = labels[part]
        n = len(shape)
        if label is None or label == "vector":
            return None
        if label == "embedding" and n > 1:
            return Matrices((), (0,), tuple(range(1, n)), by_rows=True)
        if label == "matrix" and n > 1:
            return Matrices((), (n - 1,), tuple(range(n - 1)))
        if label in ("matrix", "embedding"):
            raise error("must be 'vector' for fewer than 2 dimensions", label, path, shape)
        if not _has_axes(label):
            names = ("matrix", "embedding", "vector")
            rule = f"must be one of {names}, None or MatrixAxes, or a tree or function of these"
            raise error(rule, label, path, shape)
        inputs, outputs = (from_0(axes, n) for axes in (label.reduction_axis, label.output_axis))
        if not inputs or not outputs or len({*inputs, *outputs}) < len(inputs + outputs):
            raise error("must name different axes of the leaf", label, path, shape)
        return Matrices(tuple(i for i in range(n) if i not in inputs + outputs), outputs, inputs)

    return matrices


def from_0(axes: Any, n: int) -> tuple[int, ...] | None:
    """One axis or several, counted from 0; None unless they are axes of n dimensions."""
    several = tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)
    if not all(type(i) is int and -n <= i < n for i in several):
        return None
    return tuple(i % n for i in several)


def names_of(path: Path) -> tuple[Any, ...]:
    """The names and numbers on a path, whatever kind of container each is of."""
    attributes = ("key", "name", "idx")
    return tuple(next((getattr(k, a) for a in attributes if hasattr(k, a)), k) for k in path)


def _has_axes(label: Any) -> bool:
    return hasattr(label, "reduction_axis") and hasattr(label, "output_axis")
