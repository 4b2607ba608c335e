"""The spellings of b₁, for every backend: a number, a word, or a word with its number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

# The words and their numbers if none is given: C of b₁ = C·λ·‖g₁‖, and how many points are sampled
# for a Lipschitz constant (Remark 2.2).
DEFAULTS = {"gradient": 1.0, "lipschitz": 2}


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
        word, number = value, DEFAULTS[value]
    elif isinstance(value, Sequence):
        if not (len(value) == 2 and isinstance(value[0], str) and value[0] in words):
            raise ValueError(f"{owner}: {rule}, got {value!r}.")
        word, number = value
    if isinstance(number, arrays):
        return word, number
    if word == "lipschitz" and not (isinstance(number, Integral) and int(number) >= 2):
        raise ValueError(f"{owner}: {rule}, got {value!r}.")
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{owner}: `b_init` must be a number, got {number!r}.")
    try:
        real = float(number)
    except OverflowError:
        raise ValueError(f"{owner}: `b_init` must be finite, got a number too large.") from None
    if not 0 < real < math.inf:  # also catches nan
        raise ValueError(f"{owner}: `b_init` must be > 0 and finite, got {number!r}.")
    return word, real
