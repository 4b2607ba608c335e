"""The axis that counts neurons: where Flax and Equinox keep it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Axes = int | tuple[int, ...] | None  # an axis or several; None for one b per entry
AxisFunction = Callable[[tuple[Any, ...], tuple[int, ...]], Axes]  # of a leaf's path and shape


def flax_neuron_axis(path: tuple[Any, ...], shape: tuple[int, ...]) -> Axes:
    """Flax's convention: a kernel's last axis, an embedding's first, each entry of a bias or scale.

    The kernel of an attention's query, key or value is (in, heads, dim): its neurons are the last
    two axes.
    """
    names = [getattr(key, "key", getattr(key, "name", None)) for key in path]
    if names[-1:] == ["value"]:  # an nnx variable wraps its content once more
        names.pop()
    layer, name = [None, None, *names][-2:]
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
