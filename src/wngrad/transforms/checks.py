"""Checks of a transformation's settings."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

from wngrad.b_init import parse_b_init as parse

_B_INIT = '`b_init` must be a number > 0, "gradient" or ("gradient", C)'


def parse_b_init(owner: str, b_init: Any) -> tuple[Any, Any]:
    """(b₁, None), or (None, C) where the first gradient sets it."""
    if b_init is None:
        raise ValueError(f"{owner}: {_B_INIT}, got None.")
    word, number = parse(owner, b_init, _B_INIT, arrays=(jax.Array, np.ndarray))
    number = checked(owner, "b_init", number, above=0.0)
    return (number, None) if word == "number" else (None, number)


def checked(
    owner: str, name: str, value: Any, *, above: float | None = None, below: float = math.inf
) -> Any:
    """A number in range as a float, or an array as it is; a traced one has no value to check."""
    if value is None and name in ("momentum", "weight_decay"):
        return None
    if isinstance(value, jax.core.Tracer):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{owner}: `{name}` must be a number, got {value!r}.") from None
    low = number > above if above is not None else number >= 0
    if isinstance(value, bool) or not (low and number < below):
        least = f"> {above:g}" if above is not None else ">= 0"
        most = f"< {below:g}" if below < math.inf else "finite"
        raise ValueError(f"{owner}: `{name}` must be {least} and {most}, got {value!r}.")
    return value if isinstance(value, jax.Array) else number


def is_axes(value: Any) -> bool:
    """Whether a value is None, an axis, or several."""
    several = isinstance(value, tuple) and all(type(axis) is int for axis in value)
    return value is None or type(value) is int or several
