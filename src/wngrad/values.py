"""Checks of values, for every backend: a refusal names owner, argument, rule and value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Literal

BInit = float | Literal["gradient"] | tuple[Literal["gradient"], float]

# The words for b₁ and their numbers if none is given: C of b₁ = C·λ·‖g₁‖, and how many points are
# sampled for a Lipschitz constant (Remark 2.2).
_B_INIT_DEFAULTS = {"gradient": 1.0, "lipschitz": 2}


def real(owner: str, name: str, value: object) -> float:
    """`value` as a float; booleans, strings and arrays are refused."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: `{name}` must be a number, got {value!r}.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{owner}: `{name}` must be finite, got a number too large.") from None


def finite(owner: str, name: str, value: object, *, above: float | None = None) -> float:
    """A finite number ≥ 0, or > `above` where that is given."""
    x = real(owner, name, value)
    if above is not None and not (x > above and math.isfinite(x)):
        raise ValueError(f"{owner}: `{name}` must be > {above:g} and finite, got {value!r}.")
    if not (x >= 0 and math.isfinite(x)):  # also catches nan
        raise ValueError(f"{owner}: `{name}` must be >= 0 and finite, got {value!r}.")
    return x


def count(owner: str, name: str, value: Any, *, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise ValueError(f"{owner}: `{name}` must be an integer >= {least}, got {value!r}.")
    return int(value)


def flag(owner: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: `{name}` must be True or False, got {value!r}.")
    return value


def parse_b_init(
    owner: str,
    value: Any,
    rule: str,
    *,
    words: tuple[str, ...] = ("gradient",),
    arrays: tuple[type, ...] = (),
) -> tuple[str, Any]:
    """("number", b₁), ("gradient", C) or ("lipschitz", R).

    Args:
        owner: who is asked, for the errors.
        value: what was given; a list is as good as a tuple, which JSON does not have.
        rule: what may be given, for the errors.
        words: those that may be given.
        arrays: types whose values are taken as numbers, unchecked: one that is traced has none.

    Example:
        >>> parse_b_init("minimize", ["gradient", 2], "`b_init` must be a number")
        ('gradient', 2.0)
    """
    word, number = "number", value
    if isinstance(value, str) and value in words:
        word, number = value, _B_INIT_DEFAULTS[value]
    elif isinstance(value, Sequence):
        if not (len(value) == 2 and isinstance(value[0], str) and value[0] in words):
            raise ValueError(f"{owner}: {rule}, got {value!r}.")
        word, number = value
    if isinstance(number, arrays):
        return word, number
    if word == "lipschitz" and not (isinstance(number, Integral) and int(number) >= 2):
        raise ValueError(f"{owner}: {rule}, got {value!r}.")
    return word, finite(owner, "b_init", number, above=0)
