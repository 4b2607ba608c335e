"""The orthogonalized direction for CUDA, in Triton: momentum, and products of matrices.

`wngrad.optim.orthogonal` is the reference. A launch works on all matrices of a batch, whatever
their sizes: a program finds its matrix, and its tile of it, in a table. `fused.products` launches,
and lays out the memory: copies of the matrices are padded with zeros to whole tiles, so that no
product needs a mask. X is (height, width), and its square companions (side, side), where
`side` is the shorter of the two.

Of a product that is symmetric only the lower half is worked out. No sum depends on the order in
which programs run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from wngrad.optim.fused.kernel import MU, SETTINGS, SIGN, lam_of, real, words
from wngrad.optim.fused.records import TRITON_MATRIX
from wngrad.polynomials import ABOVE

M, GRADIENT, START, ROWS, COLUMNS, HEIGHT, WIDTH, *_ = words(
    TRITON_MATRIX, "m", "gradient", "start", "rows", "columns", "height", "width"
)
TALL, GROUP_NUMBER, FACTOR, X_AT, U_AT, SQUARE_AT, SIDE, *_ = words(
    TRITON_MATRIX, "tall", "group", "scale", "x", "u", "square", "side"
)
FIRST_SUM, SUMS, FIRST_TILE, TILES, WORDS = words(
    TRITON_MATRIX, "first_sum", "sums", "first_tile", "tiles"
)
# The Frobenius norm of X, and of its Gram matrix's square before it is scaled: large enough that
# in float16 nothing is too small that matters, and small enough that nothing overflows.
NORM = tl.constexpr(32.0)
_ABOVE = tl.constexpr(ABOVE)


@triton.jit
def _aligned(word):
    """A size or a place, of which the layout makes a multiple of 16, for 16 bytes at a time."""
    return tl.multiple_of(tl.load(word), 16)


@triton.jit
def _size(word):
    return tl.multiple_of(tl.load(word).to(tl.int32), 16)


# ------------------------------------------------------------------ momentum, and its size


@triton.jit
def _inputs(r, grads, conf, scale, DTYPE: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr):
    """Where a matrix's gradient and momentum lie, what gradients are multiplied by, μ and 1 − μ."""
    kind: tl.constexpr = tl.pointer_type(DTYPE)
    g, m = tl.load(grads + tl.load(r + GRADIENT)).to(kind), tl.load(r + M).to(kind)
    start = tl.load(r + START)
    if WIDE:
        g, m, start = tl.multiple_of(g, 16), tl.multiple_of(m, 16), tl.multiple_of(start, 16)
    conf += tl.load(r + GROUP_NUMBER) * SETTINGS
    factor, mu = real(tl.load(conf + SIGN)).to(tl.float32), real(tl.load(conf + MU))
    if SCALE:
        factor = factor / tl.load(scale)
    return g + start, m, factor, mu.to(tl.float32), (1 - mu).to(tl.float32)


@triton.jit
def _ahead(inputs, e, mask):
    """m ← μ·m + (1−μ)·g at these elements of a matrix, and μ·m + (1−μ)·g."""
    at_g, at_m, factor, mu, rest = inputs
    was = tl.load(at_m + e, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(at_g + e, mask=mask, other=0.0).to(tl.float32) * factor
    m = was + rest * (g - was)
    return m, g + mu * (m - g)


@triton.jit
def sum_squares(
    matrices, rec, grads, conf, scale, sums,
    DTYPE: tl.constexpr, SCALE: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """‖μ·m + (1−μ)·g‖², of a piece of a matrix, in float64: it neither overflows nor vanishes."""
    pid = tl.program_id(0)
    r = rec + tl.load(matrices + pid).to(tl.int64) * WORDS
    size = tl.load(r + ROWS) * tl.load(r + COLUMNS)
    if WIDE:
        size = tl.multiple_of(size, 16)
    begin = (pid - tl.load(r + FIRST_SUM)) * PIECE
    inputs = _inputs(r, grads, conf, scale, DTYPE, SCALE, WIDE)
    squares = tl.zeros([TILE], tl.float64)
    for k in range(0, PIECE, TILE):
        e = begin + k + tl.arange(0, TILE)
        _, ahead = _ahead(inputs, e, e < size)
        wide = tl.where(e < size, ahead, 0.0).to(tl.float64)
        squares += wide * wide
    tl.store(sums + pid, tl.sum(squares, axis=0))


@triton.jit
def find_factors(rec, sums, factors, WIDTH_OF_SUMS: tl.constexpr):
    """What brings every matrix to the norm `NORM`; NaN where that is not finite."""
    i = tl.program_id(0).to(tl.int64)
    r = rec + i * WORDS
    first, count = tl.load(r + FIRST_SUM), tl.load(r + SUMS)
    total = tl.zeros([WIDTH_OF_SUMS], tl.float64)
    for k in range(0, count, WIDTH_OF_SUMS):
        e = k + tl.arange(0, WIDTH_OF_SUMS)
        total += tl.load(sums + first + e, mask=e < count, other=0.0)
    sq = tl.sum(total, axis=0)
    factor = NORM / tl.sqrt(tl.where(sq == 0, 1.0, sq))
    tl.store(factors + i, tl.where(sq < float("inf"), factor, float("nan")))


@triton.jit
def fill(
    matrices, rec, grads, conf, scale, found, factors, firsts, x,
    DTYPE: tl.constexpr, SCALE: tl.constexpr, FOUND: tl.constexpr, SKIP: tl.constexpr,
    WIDE: tl.constexpr, EXACT: tl.constexpr, PIECE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Store m, and X: μ·m + (1−μ)·g in float16, scaled, with zeros around it.

    Args:
        firsts: the first program of each matrix.
        WIDE: gradients and momenta lie such that 16 bytes can be loaded at a time.
        EXACT: nothing is padded.
    """
    pid = tl.program_id(0)
    i = tl.load(matrices + pid).to(tl.int64)
    r = rec + i * WORDS
    rows, columns = tl.load(r + ROWS), tl.load(r + COLUMNS)
    width = tl.load(r + WIDTH)
    # Said of the size, too, or a mask keeps 16 bytes from being stored at a time.
    size = tl.multiple_of(tl.load(r + HEIGHT) * width, 16)
    here = conf + tl.load(r + GROUP_NUMBER) * SETTINGS
    factor = tl.load(factors + i)
    lam = lam_of(here, found, FOUND)
    if SKIP:  # A step without rate changes nothing.
        lam = tl.where(factor < float("inf"), lam, 0.0)
    kept = tl.multiple_of(tl.where(lam != 0, size, 0), 16)
    begin = (pid - tl.load(firsts + i)).to(tl.int64) * PIECE
    x += _aligned(r + X_AT)
    inputs = _inputs(r, grads, conf, scale, DTYPE, SCALE, WIDE)
    for k in range(0, PIECE, TILE):
        to = begin + k + tl.arange(0, TILE)
        if EXACT:
            e, inside = to, to < size
        else:
            row, column = to // width, to % width
            inside = (row < rows) & (column < columns) & (to < size)
            e = row * columns + column
        m, ahead = _ahead(inputs, e, inside)
        tl.store(inputs[1] + e, m.to(DTYPE), mask=inside & (to < kept))
        scaled = (ahead.to(tl.float64) * factor).to(tl.float32)
        # A matrix that is not finite is so everywhere.
        scaled = tl.where(factor < float("inf"), scaled, float("nan"))
        scaled = tl.where(inside, scaled, 0.0)
        tl.store(x + to, scaled.to(tl.float16), mask=to < size)


# -------------------------------------------------------------------------------- products


@triton.jit
def _norm(sums, r, WIDTH_OF_SUMS: tl.constexpr):
    """The Frobenius norm of a square matrix, from what its tiles have left."""
    first, count = tl.load(r + FIRST_TILE), tl.load(r + TILES)
    total = tl.zeros([WIDTH_OF_SUMS], tl.float32)
    for k in range(0, count, WIDTH_OF_SUMS):
        e = k + tl.arange(0, WIDTH_OF_SUMS)
        total += tl.load(sums + first + e, mask=e < count, other=0.0)
    return tl.sqrt(tl.sum(total, axis=0))


@triton.jit
def _keep(acc, out, row, column, side, BLOCK: tl.constexpr):
    """Store a tile of a symmetric matrix, and its mirror image."""
    rows, columns = row * BLOCK + tl.arange(0, BLOCK), column * BLOCK + tl.arange(0, BLOCK)
    value = acc.to(tl.float16)
    tl.store(out + rows[:, None] * side + columns[None, :], value)
    if row != column:
        tl.store(out + columns[:, None] * side + rows[None, :], tl.trans(value))


@triton.jit
def _sum(acc, sums, pid, row, column):
    squares = tl.sum(tl.sum(acc * acc, axis=1), axis=0)
    tl.store(sums + pid, tl.where(row == column, squares, 2 * squares))


@triton.jit
def _find(tiles, rec):
    """A program's matrix, its tile, and the number of that."""
    pid = tl.program_id(0)
    spot = tiles + pid.to(tl.int64) * 4
    i = tl.load(spot).to(tl.int64)
    return i, rec + i * WORDS, tl.load(spot + 1), tl.load(spot + 2), tl.load(spot + 3)


@triton.jit
def gram(
    tiles, rec, x, out, sums,
    IS_TALL: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """XXᵀ; XᵀX where X is tall."""
    i, r, row, column, tile = _find(tiles, rec)
    side, width, height = _size(r + SIDE), _size(r + WIDTH), _size(r + HEIGHT)
    x += _aligned(r + X_AT)
    rows, columns = row * BLOCK + tl.arange(0, BLOCK), column * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    if IS_TALL:
        left = x + depth[:, None] * width + rows[None, :]
        right = x + depth[:, None] * width + columns[None, :]
        for _ in range(0, height, DEPTH):
            acc = tl.dot(tl.trans(tl.load(left)), tl.load(right), acc)
            left += DEPTH * width
            right += DEPTH * width
    else:
        left = x + rows[:, None] * width + depth[None, :]
        right = x + columns[:, None] * width + depth[None, :]
        for _ in range(0, width, DEPTH):
            acc = tl.dot(tl.load(left), tl.trans(tl.load(right)), acc)
            left += DEPTH
            right += DEPTH
    _keep(acc, out + _aligned(r + SQUARE_AT), row, column, side, BLOCK)
    if SUM:
        _sum(acc, sums, tile, row, column)


@triton.jit
def product(
    tiles, rec, left, right, added, out, sums, before,
    alpha, beta, gamma,
    ADDS: tl.constexpr, SUM: tl.constexpr, NORMS: tl.constexpr, MIRRORS: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr, WIDTH_OF_SUMS: tl.constexpr,
):  # fmt: skip
    """α·I + β·D + γ·A·Bᵀ for matrices that are polynomials of one, nearly: they commute.

    Args:
        MIRRORS: the tiles are those of the lower half; else the result is transposed for a tall X.
        NORMS: divide the product by ‖A‖² (from the sums in `before`) and multiply it by `NORM`.
    """
    i, r, row, column, tile = _find(tiles, rec)
    side, at = _size(r + SIDE), _aligned(r + SQUARE_AT)
    rows, columns = row * BLOCK + tl.arange(0, BLOCK), column * BLOCK + tl.arange(0, BLOCK)
    depth = tl.arange(0, DEPTH)
    a = left + at + rows[:, None] * side + depth[None, :]
    b = right + at + columns[:, None] * side + depth[None, :]
    acc = tl.zeros([BLOCK, BLOCK], tl.float32)
    for _ in range(0, side, DEPTH):
        acc = tl.dot(tl.load(a), tl.trans(tl.load(b)), acc)
        a += DEPTH
        b += DEPTH
    if NORMS:
        norm = _norm(before, r, WIDTH_OF_SUMS)
        norm = tl.where(norm == 0, 1.0, norm)
        acc = (acc / norm) * (NORM / norm)
    if ADDS:
        d = tl.load(added + at + rows[:, None] * side + columns[None, :]).to(tl.float32)
        acc = gamma * acc + beta * d + tl.where(rows[:, None] == columns[None, :], alpha, 0.0)
    if MIRRORS:
        _keep(acc, out + at, row, column, side, BLOCK)
    else:  # The factor that X is multiplied by first stands next to it, on whichever side.
        tall, value = tl.load(r + TALL) != 0, acc.to(tl.float16)
        if tall:
            tl.store(out + at + columns[:, None] * side + rows[None, :], tl.trans(value))
        else:
            tl.store(out + at + rows[:, None] * side + columns[None, :], value)
    if SUM:
        _sum(acc, sums, tile, row, column)


@triton.jit
def first_polynomial(
    tiles, rec, gram_of, square, sums_of_gram, sums_of_square, out, factors,
    a, b, c, BLOCK: tl.constexpr, WIDTH_OF_SUMS: tl.constexpr,
):  # fmt: skip
    """P = a + b·A + c·A², and A itself, where A = s²·XXᵀ has no eigenvalue above 1; and s.

    (Σσ⁸)^⅛ is at least the largest σ, and at most rank^⅛ times as much.
    """
    i, r, row, column, tile = _find(tiles, rec)
    side, at = _size(r + SIDE), _aligned(r + SQUARE_AT)
    norm = _norm(sums_of_gram, r, WIDTH_OF_SUMS)
    norm = tl.where(norm == 0, 1.0, norm)
    of_square = _norm(sums_of_square, r, WIDTH_OF_SUMS) / NORM  # ‖(XXᵀ)²‖/‖XXᵀ‖²
    of_square = tl.where(of_square == 0, 1.0, of_square)
    s = 1 / (_ABOVE * _ABOVE * norm * tl.sqrt(of_square))
    rows, columns = row * BLOCK + tl.arange(0, BLOCK), column * BLOCK + tl.arange(0, BLOCK)
    e = at + rows[:, None] * side + columns[None, :]
    g = tl.load(gram_of + e).to(tl.float32) * s
    q = tl.load(square + e).to(tl.float32) * (s * norm) * (s * norm / NORM)
    p = b * g + c * q + tl.where(rows[:, None] == columns[None, :], a, 0.0)
    _keep(g, gram_of + at, row, column, side, BLOCK)
    _keep(p, out + at, row, column, side, BLOCK)
    if (row == 0) & (column == 0):
        tl.store(factors + i, tl.sqrt(s))


@triton.jit
def apply(
    tiles, rec, square, x, out, factors,
    FIRST: tl.constexpr, LAST: tl.constexpr, EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """P·X; X·P where X is tall.

    Args:
        FIRST: times s, by which X is yet to be scaled.
        LAST: the result is the direction: without padding, and scaled.
    """
    i, r, row, column, _ = _find(tiles, rec)
    side, width, tall = _size(r + SIDE), _size(r + WIDTH), tl.load(r + TALL) != 0
    x_at, p_at = x + _aligned(r + X_AT), square + _aligned(r + SQUARE_AT)
    rows, columns = row * BLOCK_M + tl.arange(0, BLOCK_M), column * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, DEPTH)
    # Addresses as numbers: a choice between pointers keeps a compiler from loading 16 bytes.
    kind: tl.constexpr = tl.pointer_type(tl.float16)
    left = tl.where(tall, x_at.to(tl.int64), p_at.to(tl.int64)).to(kind)
    right = tl.where(tall, p_at.to(tl.int64), x_at.to(tl.int64)).to(kind)
    left, right = tl.multiple_of(left, 16), tl.multiple_of(right, 16)
    # X's width is P's where X is tall; else the depth is the side, and P's width.
    a = left + rows[:, None] * side + depth[None, :]
    b = right + depth[:, None] * width + columns[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, side, DEPTH):
        acc = tl.dot(tl.load(a), tl.load(b), acc)
        a += DEPTH
        b += DEPTH * width
    if LAST:
        value = (acc * real(tl.load(r + FACTOR)).to(tl.float32)).to(tl.float16)
        stride = tl.load(r + COLUMNS).to(tl.int32)
        to = out + tl.load(r + U_AT) + rows[:, None] * stride + columns[None, :]
        if EXACT:
            tl.store(to, value)
        else:
            inside = (rows[:, None] < tl.load(r + ROWS)) & (columns[None, :] < stride)
            tl.store(to, value, mask=inside)
    else:
        if FIRST:
            acc *= tl.load(factors + i)
        value = acc.to(tl.float16)
        tl.store(out + _aligned(r + X_AT) + rows[:, None] * width + columns[None, :], value)


# ------------------------------------------------------------- embeddings


@triton.jit
def hide_rows(
    rows_of, firsts, rec, grads, u, DTYPE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Make rows of U zero whose gradient is zero, in the matrices that `rows_of` names."""
    pid = tl.program_id(0)
    i = tl.load(rows_of + pid).to(tl.int64)
    r, row = rec + i * WORDS, pid - tl.load(firsts + i)
    columns = tl.load(r + COLUMNS)
    g = tl.load(grads + tl.load(r + GRADIENT)).to(tl.pointer_type(DTYPE)) + tl.load(r + START)
    g += row * columns
    u += tl.load(r + U_AT) + row * columns
    seen = tl.zeros([TILE], tl.int32)
    for k in range(0, columns, TILE):
        e = k + tl.arange(0, TILE)
        seen |= (tl.load(g + e, mask=e < columns, other=0.0) != 0).to(tl.int32)  # NaN is, too
    if tl.max(seen, axis=0) == 0:
        for k in range(0, columns, TILE):
            e = k + tl.arange(0, TILE)
            tl.store(u + e, tl.zeros([TILE], tl.float16), mask=e < columns)
