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

from typing import Any

import triton
import triton.language as tl

from wngrad.optim.fused.records import GROUP, LAYOUT, TRITON_PARAMETER, Decay, Rule


def words(record: Any, *names: str) -> list[Any]:
    """The number of each field among the words of a record, and how many there are of all."""
    every = record.names
    return [tl.constexpr(every.index(name)) for name in names] + [tl.constexpr(len(every))]


P, B, BUF, T, SKIPPED, *_ = words(TRITON_PARAMETER, "p", "b", "buffer", "t", "skipped")
LENGTH, ROWS, PIECES, PIECE, *_ = words(TRITON_PARAMETER, "length", "rows", "pieces", "piece")
FIRST, SPAN, GROUP_NUMBER, HOLD, *_ = words(TRITON_PARAMETER, "first", "span", "group", "hold")
PARTS, ROOM, WORDS = words(TRITON_PARAMETER, "sums", "room")
LAM, LAM_KIND, MU, LOG_MU, *_ = words(GROUP, "lam", "lam_kind", "mu", "log_mu")
WEIGHT_DECAY, C, SIGN, SETTINGS = words(GROUP, "weight_decay", "c", "sign")
SIZES, P_STRIDES, LAYOUT_WORDS = words(LAYOUT, "size_0", "p_stride_0")
PARAMETERS = tl.constexpr(2**24)  # at most: a program's word is that times the kind, and an index

ALL, SUMS, MOVES = map(tl.constexpr, range(3))  # what step_tiles does
PLAIN, MOMENTUM, ADAM = (tl.constexpr(rule.value) for rule in Rule)
NONE, COUPLED, DECOUPLED = (tl.constexpr(decay.value) for decay in Decay)
# A tile's shape is its kind: 2^kind columns, and as many rows as the tile holds. Then whether
# loads can be 16 bytes wide, or need an address for each element.
LOOSE, STRIDED, KINDS_END = map(tl.constexpr, (16, 32, 48))
ROOM_FOR_B = tl.constexpr(16)  # elements: a row brings a b, and its float64 arithmetic
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
def next_b(b, sq, lam, c, hold, LATCH: tl.constexpr):
    """b_j ← b_{j-1} + λ²‖g‖²/b_{j-1}, and whether all of it is finite."""
    wide = b.to(tl.float64)
    if LATCH:  # b₁ ← C·λ·‖g₁‖ where a row meets its first gradient
        norm = tl.sqrt(sq)
        first = c * lam * norm
        wide = tl.where((wide == 0) & (norm >= _FLOOR) & (first >= _FLOOR), first, wide)
    else:  # b₁ is a number, and perhaps was not when the row's state was made
        wide = tl.where(wide == 0, c, wide)
    unset = wide == 0
    safe = tl.where(unset, 1.0, wide)
    grown = tl.where(unset, 0 * sq, safe + lam * lam * sq / safe)
    new = tl.where(hold, wide, grown).to(tl.float32)
    finite = (tl.abs(new) < float("inf")) & (tl.abs(sq) < float("inf"))
    return tl.where(tl.abs(new) == float("inf"), float("nan"), new), finite


@triton.jit
def coefficient(b, t, lam, log_mu, METHOD: tl.constexpr):
    """λ/b_j; for Algorithm 4, over 1 − βᵗ as well; with momentum 1/b_j, by which g enters."""
    b = tl.where(b == 0, 1.0, b).to(tl.float64)  # where there is no b yet nothing is written
    factor = 1 / b
    if METHOD == ADAM:
        factor = factor / (1 - tl.exp2(tl.maximum(t, 1.0).to(tl.float64) * log_mu))
    if METHOD != MOMENTUM:
        factor = factor * lam
    return factor.to(tl.float32)


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
def _read(
    at, here, col, inside, layout, METHOD: tl.constexpr, STRIDES: tl.constexpr, AGAIN: tl.constexpr
):
    """x, the gradient and the buffer in these columns of the rows, and where x and buffer lie.

    A long row that is read AGAIN need not stay in the cache. To keep all else was the fastest.
    """
    KEEP: tl.constexpr = "evict_first" if AGAIN else "evict_last"
    p, g, m = at
    row, begin, start = here
    if STRIDES:
        e = begin + col
        at_p, at_g = p + _offsets(layout, 0, row, e), g + _offsets(layout, 1, row, e)
        at_m = m + _offsets(layout, 2, row, e)
    else:
        at_p, at_g, at_m = p + start + col, g + start + col, m + start + col
    dg = tl.load(at_g, mask=inside, other=0.0, eviction_policy=KEEP)
    x = tl.load(at_p, mask=inside, other=0.0, eviction_policy=KEEP)
    buf = x
    if METHOD != PLAIN:
        buf = tl.load(at_m, mask=inside, other=0.0, eviction_policy=KEEP)
    return x, dg, buf, at_p, at_m


@triton.jit
def _gradient(was, numbers, DECAY: tl.constexpr):
    """The gradient the rule sees: unscaled, of −f if maximizing, with coupled decay in it."""
    g = was[1].to(tl.float32) * numbers[0]
    if DECAY == COUPLED:
        g = tl.fma(numbers[3], was[0].to(tl.float32), g)
    return g


@triton.jit
def _squares(was, numbers, DECAY: tl.constexpr):
    wide = _gradient(was, numbers, DECAY).to(tl.float64)
    return wide * wide


@triton.jit
def _write(
    was,
    col,
    inside,
    coef,
    seed,
    numbers,
    DTYPE: tl.constexpr,
    METHOD: tl.constexpr,
    DECAY: tl.constexpr,
    ROUND: tl.constexpr,
):
    """x_j ← x_{j-1} − (λ/b_j) g, or with what stands in for g.

    Which product a sum takes unrounded is said (`fma`), or the compiler would choose, and choose
    differently for a parameter alone and among others.
    """
    x, buf = was[0].to(tl.float32), was[2].to(tl.float32)
    factor, lam, mu, decay, keep, rest = numbers
    g = _gradient(was, numbers, DECAY)
    if DECAY == DECOUPLED:
        x = x * keep  # x ← x·(1 − λ·w)
    if METHOD == PLAIN:
        x = tl.fma(-coef, g, x)
    elif METHOD == MOMENTUM:
        buf = tl.fma(mu, buf, g * coef)  # buf ← μ·buf + g/b_j
        x = tl.fma(-lam, buf, x)
    else:
        buf = tl.fma(mu, buf, rest * g)  # ĝ_j ← β ĝ_{j-1} + (1−β) g
        x = tl.fma(-coef, buf, x)
    new = _rounded(x, seed, col, DTYPE, ROUND)
    tl.store(was[3], new, mask=inside, eviction_policy="evict_first")
    if METHOD != PLAIN:
        tl.store(was[4], buf.to(DTYPE), mask=inside, eviction_policy="evict_first")


@triton.jit
def _held(r, row, there, METHOD: tl.constexpr):
    """b and t of whole rows. They are asked for early, so that no norm has to wait for them."""
    bs = tl.load(r + B).to(tl.pointer_type(tl.float32)) + row
    b = tl.load(bs, mask=there, other=1.0)
    t = b
    if METHOD == ADAM:
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
    ROUND: tl.constexpr,
):
    """Store b, t and the skips of whole rows; return coefficients, the rows that move, their t."""
    bs = tl.load(r + B).to(tl.pointer_type(tl.float32)) + row
    t = tl.load(r + T).to(tl.pointer_type(tl.float32))
    c, hold = real(tl.load(conf + C)), tl.load(r + HOLD) != 0
    new, finite = next_b(held[0], sq, lam, c, hold, LATCH)
    live = there & (tl.where(there, lam, 0.0) != 0)  # none of them if λ = 0
    if SKIP:
        skips = tl.load(r + SKIPPED).to(tl.pointer_type(tl.int32)) + row
        tl.store(skips, tl.load(skips, mask=there, other=0) + 1, mask=live & (finite == 0))
        live = live & finite
    tl.store(bs, new, mask=live)
    if LATCH:
        live = live & (new != 0)
    steps = held[1]
    if METHOD == ADAM:
        steps += live.to(tl.float32)
        tl.store(t + row, steps, mask=there)
    elif ROUND:  # has been counted before, since every program reads it
        steps = tl.load(t + row * 0, mask=there, other=0.0)
    elif first:
        tl.store(t, tl.load(t) + tl.where(lam != 0, 1.0, 0.0))
    log_mu = real(tl.load(conf + LOG_MU))
    return coefficient(new, steps, lam, log_mu, METHOD), live, steps


@triton.jit
def _coefficients(r, coefs, row, there, METHOD: tl.constexpr):
    """What `kernel_split.find_b` has left for rows: coefficients, the rows that move, their t."""
    spot = coefs + (tl.load(r + ROOM) + row) * 2
    coef = tl.load(spot, mask=there, other=0.0)
    live = there & (tl.load(spot + 1, mask=there, other=0.0) != 0)
    t = tl.load(r + T).to(tl.pointer_type(tl.float32)) + row * (METHOD == ADAM)
    return coef, live, tl.load(t, mask=there, other=0.0)


@triton.jit
def _numbers(conf, lam, scale, SCALE: tl.constexpr):
    """Of a group, in float32: what gradients are multiplied by, λ, μ, decay, 1 − λ·decay, 1 − μ."""
    factor, mu = real(tl.load(conf + SIGN)).to(tl.float32), real(tl.load(conf + MU))
    decay = real(tl.load(conf + WEIGHT_DECAY))
    if SCALE:
        factor = factor / tl.load(scale)
    keep, rest = (1 - lam * decay).to(tl.float32), (1 - mu).to(tl.float32)
    return factor, lam.to(tl.float32), mu.to(tl.float32), decay.to(tl.float32), keep, rest


@triton.jit
def _tile(
    i, pid, rec, grads, conf, layouts, parts, coefs, scale, found,
    DTYPE: tl.constexpr, METHOD: tl.constexpr, DECAY: tl.constexpr, MODE: tl.constexpr,
    SKIP: tl.constexpr, LATCH: tl.constexpr, ROUND: tl.constexpr, SCALE: tl.constexpr,
    FOUND: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, COLS: tl.constexpr,
    WIDE: tl.constexpr, STRIDES: tl.constexpr,
):  # fmt: skip
    R: tl.constexpr = min(TILE // COLS, TILE // ROOM_FOR_B)
    VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    LONG: tl.constexpr = COLS == TILE and MODE == ALL  # a row may be longer than the tile
    r, layout = rec + i * WORDS, layouts + i * LAYOUT_WORDS
    length, piece, pieces = tl.load(r + LENGTH), tl.load(r + PIECE), tl.load(r + PIECES)
    p, g, m = tl.load(r + P), tl.load(grads + i), tl.load(r + BUF)
    kind: tl.constexpr = tl.pointer_type(DTYPE)
    p, g, m = p.to(kind), g.to(kind), m.to(kind)
    if WIDE and COLS > 1:
        length, piece = tl.multiple_of(length, VECTOR), tl.multiple_of(piece, VECTOR)
    if WIDE:
        p, g, m = tl.multiple_of(p, 16), tl.multiple_of(g, 16), tl.multiple_of(m, 16)
    at = (p, g, m)

    conf += tl.load(r + GROUP_NUMBER) * SETTINGS
    lam = lam_of(conf, found, FOUND)
    numbers = _numbers(conf, lam, scale, SCALE)

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
        if MODE == ALL:
            held = _held(r, row, there, METHOD)
        # These stay in registers between the norm and the move. A longer row is read a second
        # time, from the cache.
        was = _read(at, here, cols, inside, layout, METHOD, STRIDES, False)

        if MODE == MOVES:
            coef, live, steps = _coefficients(r, coefs, row, there, METHOD)
        else:
            squares = _squares(was, numbers, DECAY)
            if LONG:
                for c in tl.range(COLS, width, COLS, num_stages=STAGES):
                    more = there[:, None] & (c + cols < width)
                    also = _read(at, here, c + cols, more, layout, METHOD, STRIDES, False)
                    squares += _squares(also, numbers, DECAY)
            sq = tl.sum(squares, axis=1)
            if MODE == SUMS:
                tl.store(parts + tl.load(r + PARTS) + rows, sq, mask=there)
            else:
                opens = (pid == first) & (k == 0)
                coef, live, steps = _store(
                    r, row, there, opens, held, sq, lam, conf, METHOD, SKIP, LATCH, ROUND
                )

        if MODE != SUMS:
            on = live[:, None]
            coef, steps = coef[:, None], steps[:, None]
            seed = start[:, None].to(tl.uint32) * 0x9E3779B1 + steps.to(tl.uint32) * 0x85EBCA77
            _write(was, cols, inside & on, coef, seed, numbers, DTYPE, METHOD, DECAY, ROUND)
            if LONG:
                for c in tl.range(COLS, width, COLS, num_stages=STAGES):
                    more = on & (c + cols < width)
                    was = _read(at, here, c + cols, more, layout, METHOD, STRIDES, True)
                    _write(was, c + cols, more, coef, seed, numbers, DTYPE, METHOD, DECAY, ROUND)


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
    METHOD: tl.constexpr,
    DECAY: tl.constexpr,
    MODE: tl.constexpr,
    SKIP: tl.constexpr,
    LATCH: tl.constexpr,
    ROUND: tl.constexpr,
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
                    DTYPE, METHOD, DECAY, MODE, SKIP, LATCH, ROUND, SCALE, FOUND, TILE, STAGES,
                    2 ** (k % 16), k < LOOSE, k >= STRIDED,
                )  # fmt: skip


@triton.jit
def count_steps(rec, conf, found, FOUND: tl.constexpr):
    """t of every parameter, before the step that draws its random numbers from it."""
    i = tl.program_id(0).to(tl.int64)
    r = rec + i * WORDS
    lam = lam_of(conf + tl.load(r + GROUP_NUMBER) * SETTINGS, found, FOUND)
    t = tl.load(r + T).to(tl.pointer_type(tl.float32))
    tl.store(t, tl.load(t) + tl.where(lam != 0, 1.0, 0.0))
