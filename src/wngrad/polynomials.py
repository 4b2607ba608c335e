"""The polynomials that orthogonalize a matrix, for every framework.

An odd polynomial of a matrix is that polynomial of its singular values. Five quintics in a row,
each the best for the interval that the one before it has left (Amsel et al. 2025, "The Polar
Express"), bring everything from 1/1000 of the largest singular value upward close to 1.
"""

from __future__ import annotations

# σ ← a·σ + b·σ³ + c·σ⁵. Each minimizes max |1 − p(σ)| over an interval: the first over [0.001, 1],
# each further one over the image of the one before it, widened by 3 % at the top, since what is
# rounded may lie above it, where these polynomials soon grow without bound.
# `tests/test_orthogonal.py` finds them again.
COEFFICIENTS = (
    (8.47033, -25.1081, 18.6293),
    (4.06356, -2.8473, 0.501291),
    (3.86353, -2.71752, 0.48793),
    (3.25471, -2.30939, 0.446269),
    (2.29076, -1.59282, 0.376506),
)
# From this many columns a row on P·X, with P from XXᵀ alone, is faster than five steps of X: for
# 20n²m + 10n³ operations 4n²m + 34n³, in smaller products. (Measured on one core: at m = 2n it is
# slower by a tenth, at 4n faster by a third, at 8n twice as fast.)
WIDE = 3
NOTHING = 1e-9  # of a matrix's norm: what is smaller counts as 0
ABOVE = 1.02  # how much larger than the bound on σ that is divided by, for the same reason

# What the singular values of a result lie between: all of them; and those that were at least
# 1/1000 of the largest, in a matrix of rank 2^15 at most.
LARGEST, LEAST = 1.15, 0.25
