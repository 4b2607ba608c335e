"""Checks of a transformation's settings."""

from __future__ import annotations

import math
from typing import Any

import jax


def parse_b_init(owner: str, b_init: Any) -> tuple[Any, Any]:
    """(b₁, None), or (None, C) where the first gradient sets it."""
    if isinstance(b_init, str) and b_init == "gradient":
        return None, 1.0
    several = isinstance(b_init, (tuple, list))  # JSON gives back a list for a tuple
    if several and len(b_init) == 2 and b_init[0] == "gradient":
        return None, checked(owner, "b_init", b_init[1], above=0.0)
    if b_init is None or several or isinstance(b_init, str):
        raise ValueError(
            f'{owner}: `b_init` must be a number > 0, "gradient" or ("gradient", C), '
            f"got {b_init!r}."
        )
    return checked(owner, "b_init", b_init, above=0.0), None


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
