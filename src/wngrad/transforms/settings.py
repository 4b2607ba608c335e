"""The settings of the transformations: a row each, with its default, its check and what it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, get_args

import jax
import numpy as np
import optax

from wngrad import values
from wngrad.transforms.layouts import Axes, AxisFunction, LayoutFunction

PyTree = Any
Number = Any  # a float, or an array of one
Rate = optax.ScalarOrSchedule
NeuronAxis = Axes | AxisFunction
BInit = Number | values.BInit
Per = Literal["neuron", "tensor", "model"]
Nonfinite = Literal["propagate", "skip"]
Layout = LayoutFunction | PyTree  # or a tree of labels
_B_INIT = '`b_init` must be a number > 0, "gradient" or ("gradient", C)'


def number(owner: str, name: str, value: Any, above: Any = None, below: float = math.inf) -> Any:
    """A number in range as a float, or an array as it is; a traced one has no value to check."""
    if isinstance(value, jax.core.Tracer):
        return value
    try:
        x = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{owner}: `{name}` must be a number, got {value!r}.") from None
    low = x > above if above is not None else x >= 0
    if isinstance(value, bool) or not (low and x < below):
        least = f"> {above:g}" if above is not None else ">= 0"
        most = f"< {below:g}" if below < math.inf else "finite"
        raise ValueError(f"{owner}: `{name}` must be {least} and {most}, got {value!r}.")
    return value if isinstance(value, jax.Array) else x


def _rate(owner: str, name: str, value: Any) -> Any:
    return value if callable(value) else number(owner, name, value)


def _b_init(owner: str, name: str, value: Any) -> Any:
    """b₁, or ("gradient", C) where the first gradient sets it."""
    if value is None:
        raise ValueError(f"{owner}: {_B_INIT}, got None.")
    word, b = values.parse_b_init(owner, value, _B_INIT, arrays=(jax.Array, np.ndarray))
    b = number(owner, name, b, above=0.0)
    return b if word == "number" else ("gradient", b)


def _one_of(options: Any, owner: str, name: str, value: Any) -> Any:
    if value not in get_args(options):
        raise ValueError(f"{owner}: `{name}` must be one of {get_args(options)}, got {value!r}.")
    return value


def _axis(owner: str, name: str, value: Any) -> Any:
    axes = value if isinstance(value, tuple) else (value,)
    if value is None or callable(value) or all(type(axis) is int for axis in axes):
        return value
    raise TypeError(
        f"{owner}: `{name}` must be an integer, several, or a function of path and shape (static "
        f"under inject_hyperparams), got {value!r}."
    )


_FRACTION = partial(number, below=1.0)


def setting(default: Any, check: Callable[[str, str, Any], Any] | None, doc: str) -> Any:
    """A row: its default, a check of (owner, name, value), and a line of documentation."""
    return field(default=default, metadata={"check": check, "doc": doc})


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """What a transformation was made with, checked: a row of the table for each argument.

    The defaults are those of `wngrad` and `wn_adam`, and of `wnmuon` for what it alone takes; the
    documentation is the beginning of what their docstrings say.
    """

    owner: str
    learning_rate: Any = setting(1.0, _rate, "λ: a number, an array or a schedule.")
    momentum: Number = setting(0.0, _FRACTION, "μ of v ← μ·v + λ g/b_j, x ← x − v.")
    beta: Number = setting(0.9, _FRACTION, "β of the running mean.")
    weight_decay: Number = setting(0.0, number, "added to the gradient before the norm is taken.")
    decoupled_weight_decay: bool = setting(
        False, values.flag, "shrink x by λ·weight_decay·x instead"
    )
    b_init: BInit = setting(1.0, _b_init, 'b₁: a number, or "gradient" (or ("gradient", C))')
    per: Per = setting("neuron", partial(_one_of, Per), "what shares one b")
    neuron_axis: NeuronAxis = setting(None, _axis, "the axis (or axes) that count neurons")
    nonfinite: str = setting("propagate", partial(_one_of, Nonfinite), '"propagate", or "skip"')
    layout: Layout = setting(None, None, "what each leaf is")
    finetune: bool = setting(False, values.flag, "for weights that were trained before")
    precision: Any = setting("highest", None, "of the products in the orthogonalization")

    def __post_init__(self) -> None:
        for row in fields(self):
            value, check = getattr(self, row.name), row.metadata.get("check")
            if value is None and is_off(row.default):  # None is another word for 0
                object.__setattr__(self, row.name, row.default)
            elif check is not None:
                object.__setattr__(self, row.name, check(self.owner, row.name, value))

    def rate(self, count: Any) -> Any:
        """λ after so many updates."""
        return self.learning_rate(count) if callable(self.learning_rate) else self.learning_rate

    @property
    def c(self) -> Number | None:
        """C of b₁ = C·λ·‖g₁‖; None where b₁ is a number."""
        return self.b_init[1] if isinstance(self.b_init, tuple) else None


def is_off(value: Number) -> bool:
    """Whether μ or a decay is a number that is 0; an array's value must not shape a state."""
    return isinstance(value, float) and value == 0
