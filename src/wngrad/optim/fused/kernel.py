"""The fused step for CUDA, in Triton. `cpu.c` is the same for a CPU.

`wngrad.optim.step` is the reference; `tests/test_engines.py` holds this file to it, on a GPU and,
in Triton's interpreter, on any machine. `wngrad.optim.fused.cuda` launches.

A block of entries that share one b is a *row*; a *tile* is some whole rows, or one piece of a long
one, that a program works through at once. `step_tiles` does a tile's norms, b and move in one pass:
each gradient is read once, each parameter read and written once. Where a row is too long for that,
or parameters share their b, `step_tiles` sums the squares (SUMS), `kernel_split.find_b` finds every
new b, and `step_tiles` moves (MOVES). Sums of squares, b's recursion and rates are in float64, as
in the reference, everything else in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from wngrad.optim.fused.kernel_entries import LAYOUT_WORDS, read_entries, squares, write_entries
from wngrad.optim.fused.kernel_rule import (
    ADAM,
    ETA,
    LOG_MU,
    MU,
    RUNNING_MEAN,
    SETTINGS,
    SIGN,
    STAYS,
    WEIGHT_DECAY,
    C,
    coefficients,
    lam_of,
    next_b,
    real,
    words,
)
from wngrad.optim.fused.records import TRITON_PARAMETER

P, B, BUF, RMS, AVERAGE, *_ = words(TRITON_PARAMETER, "p", "b", "buffer", "rms", "average")
T, SKIPPED, SCALE_U, LOG_BETA2, *_ = words(TRITON_PARAMETER, "t", "skipped", "scale", "log_beta2")
OLD_RMS, NEW_RMS, NORM, *_ = words(TRITON_PARAMETER, "old_rms", "new_rms", "norm")
LENGTH, ROWS, PIECES, PIECE, *_ = words(TRITON_PARAMETER, "length", "rows", "pieces", "piece")
FIRST, SPAN, GROUP_NUMBER, HOLD, *_ = words(TRITON_PARAMETER, "first", "span", "group", "hold")
PARTS, ROOM, WORDS = words(TRITON_PARAMETER, "sums", "room")
PARAMETERS = tl.constexpr(2**24)  # at most: a program's word is that times the kind, and an index

ALL, SUMS, MOVES = map(tl.constexpr, range(3))  # what step_tiles does
# A tile's shape is its kind: 2^kind columns, and as many rows as the tile holds. Then whether
# loads can be 16 bytes wide, or need an address for each element.
LOOSE, STRIDED, KINDS_END = map(tl.constexpr, (16, 32, 48))
ROOM_FOR_B = tl.constexpr(16)  # elements: a row brings a b, and its float64 arithmetic


@triton.jit
def _unbiased(r, t, log_mu, METHOD: tl.constexpr):
    """What a row's direction is multiplied by in its step t: Algorithm 4's 1/(1 − βᵗ) or, for
    m/√v, Adam's scale·√(1 − β₂ᵗ)/(1 − βᵗ).
    """
    factor = t
    if METHOD == RUNNING_MEAN:
        factor = (1 / (1 - tl.exp2(t.to(tl.float64) * log_mu))).to(tl.float32)
    if METHOD == ADAM:
        wide, log_beta2 = t.to(tl.float64), real(tl.load(r + LOG_BETA2))
        ratio = tl.sqrt(1 - tl.exp2(wide * log_beta2)) / (1 - tl.exp2(wide * log_mu))
        factor = (real(tl.load(r + SCALE_U)) * ratio).to(tl.float32)
    return factor


@triton.jit
def _held(r, row, there, METHOD: tl.constexpr):
    """b and t of whole rows. They are asked for early, so that no norm has to wait for them."""
    bs = tl.load(r + B).to(tl.pointer_type(tl.float32)) + row
    b = tl.load(bs, mask=there, other=1.0)
    t = b
    if METHOD >= RUNNING_MEAN:
        t = tl.load(tl.load(r + T).to(tl.pointer_type(tl.float32)) + row, mask=there, other=0.0)
    return b, t


@triton.jit
def _store(
    r,
    row,
    there,
    first,
    held,
    sq,
    lam,
    conf,
    METHOD: tl.constexpr,
    SKIP: tl.constexpr,
    LATCH: tl.constexpr,
    RATED: tl.constexpr,
    RELATIVE: tl.constexpr,
    COUNTED: tl.constexpr,
):
    """Store b, t and skips of whole rows; return coefficients, the rows that move, their t."""
    bs = tl.load(r + B).to(tl.pointer_type(tl.float32)) + row
    t = tl.load(r + T).to(tl.pointer_type(tl.float32))
    c, hold = real(tl.load(conf + C)), tl.load(r + HOLD) != 0
    new, finite = next_b(held[0], sq, lam, c, hold, LATCH, RATED)
    live = there & (tl.where(there, lam, 0.0) != 0)  # none of them if λ = 0
    if SKIP:
        skips = tl.load(r + SKIPPED).to(tl.pointer_type(tl.int32)) + row
        tl.store(skips, tl.load(skips, mask=there, other=0) + 1, mask=live & (finite == 0))
        live = live & finite
    tl.store(bs, new, mask=live)
    if LATCH:
        live = live & (new != 0)
    steps = held[1]
    if METHOD >= RUNNING_MEAN:
        steps += live.to(tl.float32)
        tl.store(t + row, steps, mask=there)
    elif COUNTED:  # has been counted before, since every program reads it
        steps = tl.load(t + row * 0, mask=there, other=0.0)
    elif first:
        tl.store(t, tl.load(t) + tl.where(lam != 0, 1.0, 0.0))
    if RELATIVE:
        lam = lam * tl.load(tl.load(r + NORM).to(tl.pointer_type(tl.float32))).to(tl.float64)
    coef, kept = coefficients(held[0], new, lam, real(tl.load(conf + MU)), METHOD)
    return coef, kept, live, steps


@triton.jit
def _found_coefficients(r, coefs, row, there, METHOD: tl.constexpr):
    """What `kernel_split.find_b` has left for rows: coefficients, the rows that move, their t."""
    spot = coefs + (tl.load(r + ROOM) + row) * 2
    coef, kept = tl.load(spot, mask=there, other=0.0), tl.load(spot + 1, mask=there, other=STAYS)
    live = there & (kept != STAYS)
    t = tl.load(r + T).to(tl.pointer_type(tl.float32)) + row * (METHOD >= RUNNING_MEAN)
    return coef, kept, live, tl.load(t, mask=there, other=0.0)


@triton.jit
def _numbers(r, conf, lam, scale, SCALE: tl.constexpr, PROPOSED: tl.constexpr):
    """In float32: what gradients are multiplied by, decay, 1 − λ·decay, 1 − μ, η, Adam's."""
    factor, mu = real(tl.load(conf + SIGN)).to(tl.float32), real(tl.load(conf + MU))
    if PROPOSED:
        factor = factor * factor  # 1: the sign is in u already
    decay = real(tl.load(conf + WEIGHT_DECAY))
    if SCALE:
        factor = factor / tl.load(scale)
    keep, rest = (1 - lam * decay).to(tl.float32), (1 - mu).to(tl.float32)
    eta = real(tl.load(conf + ETA)).to(tl.float32)
    old, new = real(tl.load(r + OLD_RMS)), real(tl.load(r + NEW_RMS))
    return factor, decay.to(tl.float32), keep, rest, eta, old.to(tl.float32), new.to(tl.float32)


@triton.jit
def _tile(
    i, pid, rec, grads, conf, layouts, parts, coefs, scale, found,
    DTYPE: tl.constexpr, GDTYPE: tl.constexpr, METHOD: tl.constexpr, DECAY: tl.constexpr,
    MODE: tl.constexpr, SKIP: tl.constexpr, LATCH: tl.constexpr, ROUND: tl.constexpr,
    RATED: tl.constexpr, AVERAGES: tl.constexpr, RELATIVE: tl.constexpr, PROPOSED: tl.constexpr,
    SCALE: tl.constexpr, FOUND: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    COLS: tl.constexpr, WIDE: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = min(TILE // COLS, TILE // ROOM_FOR_B)
    VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    COUNTED: tl.constexpr = ROUND or AVERAGES  # before, by `count_steps`
    LONG: tl.constexpr = COLS == TILE and MODE == ALL  # a row may be longer than the tile
    r, layout = rec + i * WORDS, layouts + i * LAYOUT_WORDS
    length, piece, pieces = tl.load(r + LENGTH), tl.load(r + PIECE), tl.load(r + PIECES)
    p, g, m = tl.load(r + P), tl.load(grads + i), tl.load(r + BUF)
    v, a = tl.load(r + RMS), tl.load(r + AVERAGE)
    kind: tl.constexpr = tl.pointer_type(DTYPE)
    kind_g: tl.constexpr = tl.pointer_type(GDTYPE)
    p, g, m = p.to(kind), g.to(kind_g), m.to(kind)
    v, a = v.to(kind), a.to(tl.pointer_type(tl.float32))
    if WIDE and COLS > 1:
        length, piece = tl.multiple_of(length, VECTOR), tl.multiple_of(piece, VECTOR)
    if WIDE:
        p, g, m = tl.multiple_of(p, 16), tl.multiple_of(g, 16), tl.multiple_of(m, 16)
        v, a = tl.multiple_of(v, 16), tl.multiple_of(a, 16)
    at = (p, g, m, v, a)

    conf += tl.load(r + GROUP_NUMBER) * SETTINGS
    lam = lam_of(conf, found, FOUND)
    numbers = _numbers(r, conf, lam, scale, SCALE, PROPOSED)
    log_mu = real(tl.load(conf + LOG_MU))

    first, span, count = tl.load(r + FIRST), tl.load(r + SPAN), tl.load(r + ROWS) * pieces
    cols = tl.arange(0, COLS)[None, :]
    for k in range(0, span):
        rows = ((pid - first) * span + k) * R + tl.arange(0, R).to(tl.int64)
        there = rows < count
        if MODE == ALL:
            row, begin, width = rows, rows * 0, length.to(tl.int32)
            inside = there[:, None] & (cols < width)
        else:
            row, begin = rows // pieces, (rows % pieces) * piece
            width = tl.minimum(piece, length - begin).to(tl.int32)
            if WIDE and COLS > 1:
                width = tl.multiple_of(width, [VECTOR])
            inside = there[:, None] & (cols < width[:, None])
        start = row if COLS == 1 else row * length + begin  # the first element, in the parameter
        here = (row[:, None], begin[:, None], start[:, None])
        if MODE != MOVES:
            held = _held(r, row, there, METHOD)
            unbiased = _unbiased(r, held[1] + 1, log_mu, METHOD)[:, None]
        # These stay in registers between the norm and the move. A longer row is read a second
        # time, from the cache.
        was = read_entries(at, here, cols, inside, layout, METHOD, AVERAGES, STRIDES, False)

        if MODE == MOVES:
            coef, kept, live, steps = _found_coefficients(r, coefs, row, there, METHOD)
            unbiased = _unbiased(r, tl.maximum(steps, 1.0), log_mu, METHOD)[:, None]
        else:
            sums = squares(was, unbiased, numbers, METHOD, DECAY)
            if LONG:
                for c in tl.range(COLS, width, COLS, num_stages=STAGES):
                    more = there[:, None] & (c + cols < width)
                    also = read_entries(
                        at, here, c + cols, more, layout, METHOD, AVERAGES, STRIDES, False
                    )
                    sums += squares(also, unbiased, numbers, METHOD, DECAY)
            sq = tl.sum(sums, axis=1)
            if MODE == SUMS:
                tl.store(parts + tl.load(r + PARTS) + rows, sq, mask=there)
            else:
                opens = (pid == first) & (k == 0)
                coef, kept, live, steps = _store(
                    r, row, there, opens, held, sq, lam, conf,
                    METHOD, SKIP, LATCH, RATED, RELATIVE, COUNTED,
                )  # fmt: skip

        if MODE != SUMS:
            on = live[:, None]
            coef, kept, steps = coef[:, None], kept[:, None], steps[:, None]
            share = (numbers[4] + 1) / (steps + numbers[4])
            of_row = (coef, kept, unbiased, share)
            seed = start[:, None].to(tl.uint32) * 0x9E3779B1 + steps.to(tl.uint32) * 0x85EBCA77
            write_entries(
                was, cols, inside & on, of_row, seed, numbers,
                DTYPE, METHOD, DECAY, ROUND, AVERAGES,
            )  # fmt: skip
            if LONG:
                for c in tl.range(COLS, width, COLS, num_stages=STAGES):
                    more = on & (c + cols < width)
                    was = read_entries(
                        at, here, c + cols, more, layout, METHOD, AVERAGES, STRIDES, True
                    )
                    write_entries(
                        was, c + cols, more, of_row, seed, numbers,
                        DTYPE, METHOD, DECAY, ROUND, AVERAGES,
                    )  # fmt: skip


@triton.jit
def step_tiles(
    tiles,
    rec,
    grads,
    conf,
    layouts,
    parts,
    coefs,
    scale,
    found,
    DTYPE: tl.constexpr,
    GDTYPE: tl.constexpr,
    METHOD: tl.constexpr,
    DECAY: tl.constexpr,
    MODE: tl.constexpr,
    SKIP: tl.constexpr,
    LATCH: tl.constexpr,
    ROUND: tl.constexpr,
    RATED: tl.constexpr,
    AVERAGES: tl.constexpr,
    RELATIVE: tl.constexpr,
    PROPOSED: tl.constexpr,
    SCALE: tl.constexpr,
    FOUND: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    KINDS: tl.constexpr,
):
    """A few tiles for each program; `tiles` says of which parameter they are, and of which kind."""
    pid = tl.program_id(0)
    word = tl.load(tiles + pid)
    i, kind = (word % PARAMETERS).to(tl.int64), word // PARAMETERS
    for k in tl.static_range(0, KINDS_END):
        if (KINDS >> k) & 1:  # only kinds that occur are compiled
            if kind == k:
                _tile(
                    i, pid, rec, grads, conf, layouts, parts, coefs, scale, found,
                    DTYPE, GDTYPE, METHOD, DECAY, MODE, SKIP, LATCH, ROUND, RATED, AVERAGES,
                    RELATIVE, PROPOSED, SCALE, FOUND, TILE, STAGES,
                    2 ** (k % 16), k < LOOSE, k >= STRIDED,
                )  # fmt: skip


@triton.jit
def count_steps(rec, conf, found, FOUND: tl.constexpr):
    """t of every parameter, before a step all programs of which read it."""
    i = tl.program_id(0).to(tl.int64)
    r = rec + i * WORDS
    lam = lam_of(conf + tl.load(r + GROUP_NUMBER) * SETTINGS, found, FOUND)
    t = tl.load(r + T).to(tl.pointer_type(tl.float32))
    tl.store(t, tl.load(t) + tl.where(lam != 0, 1.0, 0.0))
