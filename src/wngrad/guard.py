"""The guard around the rule for b: first b, unset b, overflow and gradients that are not finite.

One function for every kind of array: it takes the namespace that the arrays belong to, `numpy`,
`torch` or `jax.numpy`, and uses its `where`, `sqrt`, `isfinite` and `isinf`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from wngrad import rule
from wngrad.rule import Array


def guarded_b(
    xp: Any,
    b: Array,
    sq_norm: Array | None,
    lam: Any,
    *,
    c: Any = None,
    b1: Any = None,
    floor: float = 0.0,
    hold: bool = False,
    norm: Array | None = None,
    narrow: Callable[[Array], Array] | None = None,
) -> tuple[Array, Array]:
    """The new b of every block, and a mask of the blocks where it and the gradient are finite.

    A block whose b is 0 has none yet. It stays 0 until a gradient sets it; one that is not a number
    shows all the same. A b that overflows becomes NaN: infinite, it would freeze its block for
    ever and in silence.

    Args:
        xp: the arrays' namespace.
        b: b_{j-1} of every block, in the type of the arithmetic.
        sq_norm: ‖g‖² of every block; not read where `norm` is given.
        lam: λ.
        c: C of the first b₁ = C·λ·‖g‖, for blocks that have none; None if b is set at the start.
        b1: what blocks that have none start from, where it is a number.
        floor: the least ‖g‖ and b₁ that set a b; below it entries may be denormal, with too few
            digits to start from (`tiny / eps` of b's type).
        hold: keep the b of every block that has one.
        norm: ‖g‖, where the caller has it without its square: then nothing is squared.
        narrow: rounds the new b to the type it is stored in.

    Example:
        >>> import numpy as np
        >>> b, finite = guarded_b(np, np.array([1.0, 0.0]), np.array([4.0, 9.0]), 1.0, c=2.0)
        >>> b.tolist(), finite.tolist()
        ([5.0, 7.5], [True, True])
    """
    size: Array = sq_norm if norm is None else norm
    grow = rule.next_b if norm is None else rule.next_b_of_norm
    if c is not None:
        length = safe_sqrt(xp, sq_norm) if norm is None else norm
        first = rule.first_b(length, lam, c)
        b = xp.where((b == 0) & (length >= floor) & (first >= floor), first, b)
    elif b1 is not None:
        b = xp.where(b == 0, b1, b)
    if not hold:
        unset = b == 0
        # 0·‖g‖² keeps b at 0, and lets a NaN show.
        b = xp.where(unset, 0 * size, grow(xp.where(unset, 1, b), size, lam))
    new = b if narrow is None else narrow(b)
    finite = xp.isfinite(new) & xp.isfinite(size)
    return xp.where(xp.isinf(new), math.nan, new), finite


def safe_sqrt(xp: Any, sq: Array) -> Array:
    """√sq, and 0 where sq is 0 or not a number: there √ has no slope that autograd could use."""
    positive = sq > 0
    return xp.where(positive, xp.sqrt(xp.where(positive, sq, 1)), 0)
