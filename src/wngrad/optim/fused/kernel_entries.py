"""The entries of rows in Triton: they are read, squared, and moved with their buffers."""

from __future__ import annotations

import triton
import triton.language as tl

from wngrad.optim.fused.kernel_rule import ADAM, MOMENTUM, PLAIN, words
from wngrad.optim.fused.records import LAYOUT, Decay

SIZES, P_STRIDES, LAYOUT_WORDS = words(LAYOUT, "size_0", "p_stride_0")
NONE, COUPLED, DECOUPLED, BY_RATE = (tl.constexpr(decay.value) for decay in Decay)


@triton.jit
def _lerp(x, y, w):
    """x + w·(y − x), from the end that is nearer."""
    near = tl.abs(w) < 0.5
    return tl.fma(tl.where(near, w, w - 1), y - x, tl.where(near, x, y))


@triton.jit
def _offsets(layout, which, row, e):
    """Where element e of a row lies, for any strides."""
    sizes, s = layout + SIZES, layout + P_STRIDES + 6 * which
    d0, d1 = tl.load(sizes), tl.load(sizes + 1)
    d2, d3 = tl.load(sizes + 2), tl.load(sizes + 3)
    at = (row // d0) * tl.load(s) + (row % d0) * tl.load(s + 1)
    e = e.to(tl.int64)
    at += (e // (d1 * d2 * d3)) * tl.load(s + 2) + ((e // (d2 * d3)) % d1) * tl.load(s + 3)
    return at + ((e // d3) % d2) * tl.load(s + 4) + (e % d3) * tl.load(s + 5)


@triton.jit
def _rounded(x, seed, col, DTYPE: tl.constexpr, ROUND: tl.constexpr):
    """x in the parameter's type; if asked, up or down at random, so that no update is lost."""
    if not ROUND:
        return x.to(DTYPE)
    u = seed + col.to(tl.uint32) * 0x9E3779B1
    u = (u ^ (u >> 16)) * 0x7FEB352D
    u = (u ^ (u >> 15)) * 0x846CA68B
    u = u ^ (u >> 16)
    bits = x.to(tl.uint32, bitcast=True) + (u & 0xFFFF)
    near = ((bits >> 16) << 16).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(x) < float("inf"), near, x).to(DTYPE)


@triton.jit
def read_entries(
    at,
    here,
    col,
    inside,
    layout,
    METHOD: tl.constexpr,
    AVERAGES: tl.constexpr,
    STRIDES: tl.constexpr,
    AGAIN: tl.constexpr,
):
    """x, the gradient, buffers and average in these columns of the rows; where all but g lie.

    A long row that is read AGAIN need not stay in the cache. To keep all else was the fastest.
    """
    KEEP: tl.constexpr = "evict_first" if AGAIN else "evict_last"
    p, g, m, r, a = at
    row, begin, start = here
    if STRIDES:
        e = begin + col
        at_p, at_g = p + _offsets(layout, 0, row, e), g + _offsets(layout, 1, row, e)
        at_m, at_r = m + _offsets(layout, 2, row, e), r + _offsets(layout, 3, row, e)
        at_a = a + _offsets(layout, 4, row, e)
    else:
        at_p, at_g, at_m = p + start + col, g + start + col, m + start + col
        at_r, at_a = r + start + col, a + start + col
    dg = tl.load(at_g, mask=inside, other=0.0, eviction_policy=KEEP)
    x = tl.load(at_p, mask=inside, other=0.0, eviction_policy=KEEP)
    buf, rms, mean = x, x, x
    if METHOD != PLAIN:
        buf = tl.load(at_m, mask=inside, other=0.0, eviction_policy=KEEP)
    if METHOD == ADAM:
        rms = tl.load(at_r, mask=inside, other=0.0, eviction_policy=KEEP)
    if AVERAGES:
        mean = tl.load(at_a, mask=inside, other=0.0, eviction_policy=KEEP)
    return x, dg, buf, rms, mean, at_p, at_m, at_r, at_a


@triton.jit
def _gradient(was, numbers, DECAY: tl.constexpr):
    """The gradient the rule sees: unscaled, of −f if maximizing, with coupled decay in it."""
    g = was[1].to(tl.float32) * numbers[0]
    if DECAY == COUPLED:
        g = tl.fma(numbers[1], was[0].to(tl.float32), g)
    return g


@triton.jit
def _adam(was, g, unbiased, numbers):
    """u = scale·m̂/√v̂, and m and √v as they will be."""
    m = _lerp(was[2].to(tl.float32), g, numbers[3])  # m ← β₁·m + (1−β₁)·g
    old, new = numbers[5] * was[3].to(tl.float32), numbers[6] * g
    a, b = old.to(tl.float64), new.to(tl.float64)
    endless = (tl.abs(old) == float("inf")) | (tl.abs(new) == float("inf"))
    rms = tl.where(endless, float("inf"), tl.sqrt(a * a + b * b)).to(tl.float32)
    ratio = tl.where(rms == 0, m, m / tl.where(rms == 0, 1.0, rms))
    return unbiased * ratio, m, rms


@triton.jit
def squares(was, unbiased, numbers, METHOD: tl.constexpr, DECAY: tl.constexpr):
    u = _gradient(was, numbers, DECAY)
    if METHOD == ADAM:
        u, m, rms = _adam(was, u, unbiased, numbers)
    wide = u.to(tl.float64)
    return wide * wide


@triton.jit
def write_entries(
    was,
    col,
    inside,
    of_row,
    seed,
    numbers,
    DTYPE: tl.constexpr,
    METHOD: tl.constexpr,
    DECAY: tl.constexpr,
    ROUND: tl.constexpr,
    AVERAGES: tl.constexpr,
):
    """x_j ← x_{j-1} − (λ/b_j) g, or with what stands in for g; then the average of x.

    Which product a sum takes unrounded is said (`fma`), or the compiler would choose, and choose
    differently for a parameter alone and among others.
    """
    x, buf = was[0].to(tl.float32), was[2].to(tl.float32)
    coef, kept, unbiased, share = of_row
    decay, keep = numbers[1], numbers[2]
    g = _gradient(was, numbers, DECAY)
    if DECAY == DECOUPLED:
        x = x * keep  # x ← x·(1 − λ·w)
    if DECAY == BY_RATE:
        x = tl.fma(-(coef * decay), x, x)  # x ← x·(1 − w·λ/b_j)
    if METHOD == PLAIN:
        x = tl.fma(-coef, g, x)
    elif METHOD == ADAM:
        u, buf, rms = _adam(was, g, unbiased, numbers)
        x = tl.fma(-coef, u, x)
        tl.store(was[7], rms.to(DTYPE), mask=inside, eviction_policy="evict_first")
    else:
        buf = tl.fma(g, coef, kept * buf)  # v ← kept·v + λ·entering·g
        x = x - buf if METHOD == MOMENTUM else tl.fma(-unbiased, buf, x)
    if AVERAGES:  # x̄ ← x̄ + (η+1)/(k+η)·(x − x̄)
        mean = _lerp(was[4], x, share)
        tl.store(was[8], mean, mask=inside, eviction_policy="evict_first")
    rounded = _rounded(x, seed, col, DTYPE, ROUND)
    tl.store(was[5], rounded, mask=inside, eviction_policy="evict_first")
    if METHOD != PLAIN:
        tl.store(was[6], buf.to(DTYPE), mask=inside, eviction_policy="evict_first")
