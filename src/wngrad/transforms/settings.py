"""The settings of the transformations: a row each, with its default, its check and what it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Literal, get_args

import jax
import optax

from wngrad.transforms.layouts import Axes, AxisFunction, LayoutFunction

PyTree = Any
Number = Any  # a float, or an array of one
Rate = optax.ScalarOrSchedule
NeuronAxis = Axes | AxisFunction
BInit = Number | Literal["gradient"] | tuple[Literal["gradient"], float]
Per = Literal["neuron", "tensor", "model"]
Nonfinite = Literal["propagate", "skip"]
Layout = LayoutFunction | PyTree  # or a tree of labels


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
    if isinstance(value, str) and value == "gradient":
        return "gradient", 1.0
    several = isinstance(value, (tuple, list))  # JSON gives back a list for a tuple
    if several and len(value) == 2 and value[0] == "gradient":
        return "gradient", number(owner, name, value[1], above=0.0)
    if value is None or several or isinstance(value, str):
        raise ValueError(
            f'{owner}: `{name}` must be a number > 0, "gradient" or ("gradient", C), got {value!r}.'
        )
    return number(owner, name, value, above=0.0)


def _flag(owner: str, name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: `{name}` must be True or False, got {value!r}.")
    return value


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


def _row(default: Any, doc: str, check: Callable[[str, str, Any], Any] | None = None) -> Any:
    return field(default=default, metadata={"doc": doc, "check": check})


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """What a transformation was made with, checked: a row of the table for each argument.

    The defaults are those of `wngrad` and `wn_adam`, and of `wnmuon` for what it alone takes; the
    documentation is the beginning of what their docstrings say.
    """

    owner: str
    learning_rate: Rate = _row(1.0, "λ: a number, an array or a schedule.", _rate)
    momentum: Number = _row(0.0, "μ of v ← μ·v + λ g/b_j, x ← x − v.", _FRACTION)
    beta: Number = _row(0.9, "β of the running mean.", _FRACTION)
    weight_decay: Number = _row(0.0, "added to the gradient before the norm is taken.", number)
    decoupled_weight_decay: bool = _row(False, "shrink x by λ·weight_decay·x instead", _flag)
    b_init: BInit = _row(1.0, 'b₁: a number, or "gradient" (or ("gradient", C))', _b_init)
    per: Per = _row("neuron", "what shares one b", partial(_one_of, Per))
    neuron_axis: NeuronAxis = _row(None, "the axis (or axes) that count neurons", _axis)
    nonfinite: Nonfinite = _row("propagate", '"propagate", or "skip"', partial(_one_of, Nonfinite))
    layout: Layout = _row(None, "what each leaf is")
    finetune: bool = _row(False, "for weights that were trained before", _flag)
    precision: Any = _row("highest", "of the products in the orthogonalization")

    def __post_init__(self) -> None:
        for row in fields(self):
            value, check = getattr(self, row.name), row.metadata.get("check")
            if value is None and is_off(row.default):  # None is another word for 0
                object.__setattr__(self, row.name, row.default)
            elif check is not None:
                object.__setattr__(self, row.name, check(self.owner, row.name, value))

    def rate(self, count: Any) -> Any:
        """λ after so many updates."""
        lam: Any = self.learning_rate
        return lam(count) if callable(lam) else lam

    @property
    def c(self) -> Number | None:
        """C of b₁ = C·λ·‖g₁‖; None where b₁ is a number."""
        return self.b_init[1] if isinstance(self.b_init, tuple) else None


def is_off(setting: Number) -> bool:
    """Whether μ or a decay is a number that is 0; an array's value must not shape a state."""
    return isinstance(setting, float) and setting == 0
