"""λ, b and the coefficients of rows in Triton, for every kernel of the fused step."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from wngrad.optim.fused.records import GROUP, Rule


def words(record: Any, *names: str) -> list[Any]:
    """The number of each field among the words of a record, and how many there are of all."""
    every = record.names
    return [tl.constexpr(every.index(name)) for name in names] + [tl.constexpr(len(every))]


LAM, LAM_KIND, MU, LOG_MU, *_ = words(GROUP, "lam", "lam_kind", "mu", "log_mu")
WEIGHT_DECAY, C, SIGN, ETA, SETTINGS = words(GROUP, "weight_decay", "c", "sign", "eta")
PLAIN, MOMENTUM, RUNNING_MEAN, ADAM = (tl.constexpr(rule.value) for rule in Rule)
STAYS = tl.constexpr(-1.0)  # in the place of what is kept of a row's buffer: it does not move
_FLOOR = tl.constexpr(2.0**-103)  # float32's smallest normal number over its ε: see `guarded_b`


@triton.jit
def real(word):
    return word.to(tl.float64, bitcast=True)


@triton.jit
def lam_of(conf, found, FOUND: tl.constexpr):
    """λ: a number in the table, or read from the tensor whose address is there."""
    here = conf + LAM
    word, kind = tl.load(here), tl.load(conf + LAM_KIND)
    # Without a branch: Triton 3.6 loads from address 0 where a branch turns a word into what lies
    # there.
    single = tl.where(kind == 1, word, here.to(tl.int64)).to(tl.pointer_type(tl.float32))
    double = tl.where(kind == 2, word, here.to(tl.int64)).to(tl.pointer_type(tl.float64))
    lam = tl.where(kind == 1, tl.load(single).to(tl.float64), tl.load(double))
    if FOUND:  # A scaler has found an inf: a step without rate changes nothing.
        lam = tl.where(tl.load(found) != 0, 0.0, lam)
    return lam


@triton.jit
def next_b(b, sq, lam, c, hold, LATCH: tl.constexpr, RATED: tl.constexpr):
    """b_j ← b_{j-1} + λ²‖u‖²/b_{j-1}, without λ unless RATED, and whether all of it is finite."""
    wide = b.to(tl.float64)
    if LATCH:  # b₁ ← C·λ·‖g₁‖ where a row meets its first gradient
        norm = tl.sqrt(sq)
        first = c * norm
        if RATED:
            first = first * lam
        wide = tl.where((wide == 0) & (norm >= _FLOOR) & (first >= _FLOOR), first, wide)
    else:  # b₁ is a number, and perhaps was not when the row's state was made
        wide = tl.where(wide == 0, c, wide)
    unset = wide == 0
    safe = tl.where(unset, 1.0, wide)
    added = sq
    if RATED:
        added = lam * lam * sq
    grown = tl.where(unset, 0 * sq, safe + added / safe)
    new = tl.where(hold, wide, grown).to(tl.float32)
    finite = (tl.abs(new) < float("inf")) & (tl.abs(sq) < float("inf"))
    return tl.where(tl.abs(new) == float("inf"), float("nan"), new), finite


@triton.jit
def coefficients(before, b, lam, mu, METHOD: tl.constexpr):
    """λ/b_j, by which g is multiplied, and what is kept of the buffer.

    By momentum and Algorithm 4 the buffer holds steps, each with the λ of its own. Of Algorithm 4
    they are (1 − β)·λ/b_j and β·b_{j-1}/b_j.
    """
    b = tl.where(b == 0, 1.0, b).to(tl.float64)  # where there is no b yet nothing is written
    factor, kept = 1 / b, mu
    if METHOD == RUNNING_MEAN:
        factor, kept = (1 - mu) / b, mu * (before.to(tl.float64) / b)
    return (factor * lam).to(tl.float32), (kept + 0 * b).to(tl.float32)
