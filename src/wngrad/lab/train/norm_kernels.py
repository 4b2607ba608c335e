"""Batch normalization with what follows it, in Triton: y = max(0, γ (x − mean)/sd + β + residual).

x is a table of rows (examples × places) and columns (channels): a batch of images with the channels
last. Forward reads x twice and writes y; backward reads x and the gradient twice, and so y where
there is a residual: without one, x alone says where the ReLU cut off. `column_sums` adds up rows, a
part of them in each program; `find_scales` and `find_slopes` add the parts up in a fixed order, so
that a run can be repeated to the bit; `apply` and `gradient` are one pass. `tests/test_lab_norm.py`
holds this to torch's own.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The rows of `scales`: what a forward pass finds out for each channel.
MEAN, RSTD, SCALE, OFFSET = map(tl.constexpr, range(4))
HUGE = tl.constexpr(1e30)


@triton.jit
def _columns(C, WIDE: tl.constexpr, axis: tl.constexpr):
    at = tl.program_id(axis) * WIDE + tl.arange(0, WIDE)
    return at, at < C


@triton.jit
def _shift(running_mean, c, here):
    """Near the mean, so that the variance loses no digits; 0 where a run has diverged."""
    k = tl.load(running_mean + c, mask=here, other=0.0)
    return tl.where(tl.abs(k) < HUGE, k, 0.0)


@triton.jit
def _gradient_of_sum(x, dy, y, scale, offset, at, inside, ADDS: tl.constexpr, RELU: tl.constexpr):
    """The gradient before the ReLU; `x` is what was loaded, the others are pointers."""
    g = tl.load(dy + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        if ADDS:
            out = tl.load(y + at, mask=inside, other=0.0).to(tl.float32)
        else:
            out = x * scale[None, :] + offset[None, :]  # of the sign of y, as `apply` rounds it
        g = tl.where(out > 0, g, 0.0)
    return g


@triton.jit
def column_sums(
    x, dy, y, means, sums, M, C, ROWS, TALL: tl.constexpr, WIDE: tl.constexpr,
    BACKWARD: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """Of ROWS rows: Σ d and Σ d², d = x − shift; backward Σ g and Σ g d, d = x − mean."""
    c, here = _columns(C, WIDE, 1)
    if BACKWARD:  # `means` are the `scales`, whose first row they are
        k = tl.load(means + MEAN * C + c, mask=here, other=0.0)
        scale = tl.load(means + SCALE * C + c, mask=here, other=0.0)
        offset = tl.load(means + OFFSET * C + c, mask=here, other=0.0)
    else:
        k = _shift(means, c, here)
    first = tl.zeros((TALL, WIDE), tl.float32)
    second = tl.zeros((TALL, WIDE), tl.float32)
    for row in range(0, ROWS, TALL):
        m = tl.program_id(0) * ROWS + row + tl.arange(0, TALL)
        inside = (m < M)[:, None] & here[None, :]
        at = m.to(tl.int64)[:, None] * C + c[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        d = tl.where(inside, value - k[None, :], 0)
        if BACKWARD:
            g = _gradient_of_sum(value, dy, y, scale, offset, at, inside, ADDS, RELU)
        else:
            g = d
        first += g
        second += g * d
    out = sums + 2 * tl.program_id(0) * C + c
    tl.store(out, tl.sum(first, 0), mask=here)
    tl.store(out + C, tl.sum(second, 0), mask=here)


@triton.jit
def _added(sums, c, here, PARTS, C, PADDED: tl.constexpr):
    """The two sums of all parts."""
    part = tl.arange(0, PADDED)
    at = 2 * part[:, None] * C + c[None, :]
    inside = (part < PARTS)[:, None] & here[None, :]
    first = tl.sum(tl.load(sums + at, mask=inside, other=0.0), 0)
    return first, tl.sum(tl.load(sums + C + at, mask=inside, other=0.0), 0)


@triton.jit
def find_scales(
    sums, weight, bias, running_mean, running_var, scales, M, C, PARTS, momentum, eps,
    WIDE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Mean, 1/sd, scale and offset of every channel; the running statistics move on."""
    c, here = _columns(C, WIDE, 0)
    total, squares = _added(sums, c, here, PARTS, C, PADDED)
    k = _shift(running_mean, c, here)
    var = tl.maximum(squares / M - (total / M) * (total / M), 0.0)
    var = tl.where(squares == squares, var, squares)  # nan stays, whatever `maximum` does with it
    mean, rstd = k + total / M, 1.0 / tl.sqrt(var + eps)
    scale = tl.load(weight + c, mask=here, other=0.0) * rstd
    offset = tl.load(bias + c, mask=here, other=0.0) - mean * scale
    tl.store(scales + MEAN * C + c, mean, mask=here)
    tl.store(scales + RSTD * C + c, rstd, mask=here)
    tl.store(scales + SCALE * C + c, scale, mask=here)
    tl.store(scales + OFFSET * C + c, offset, mask=here)
    before = tl.load(running_mean + c, mask=here, other=0.0)
    tl.store(running_mean + c, (1 - momentum) * before + momentum * mean, mask=here)
    before = tl.load(running_var + c, mask=here, other=0.0)
    unbiased = var * (M / (M - 1.0))
    tl.store(running_var + c, (1 - momentum) * before + momentum * unbiased, mask=here)


@triton.jit
def _write(
    x, residual, y, scale, offset, c, here, M, C, TALL: tl.constexpr, ADDS: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    """Of one tile, y = max(0, x scale + offset + residual)."""
    m = tl.program_id(0) * TALL + tl.arange(0, TALL)
    inside = (m < M)[:, None] & here[None, :]
    at = m.to(tl.int64)[:, None] * C + c[None, :]
    out = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale[None, :] + offset[None, :]
    if ADDS:
        out += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if RELU:
        out = tl.where(out < 0, 0.0, out)  # nan stays
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def apply(
    x, residual, y, scales, M, C, TALL: tl.constexpr, WIDE: tl.constexpr, ADDS: tl.constexpr,
    RELU: tl.constexpr,
):  # fmt: skip
    c, here = _columns(C, WIDE, 1)
    scale = tl.load(scales + SCALE * C + c, mask=here, other=0.0)
    offset = tl.load(scales + OFFSET * C + c, mask=here, other=0.0)
    _write(x, residual, y, scale, offset, c, here, M, C, TALL, ADDS, RELU)


@triton.jit
def apply_running(
    x, residual, y, weight, bias, running_mean, running_var, M, C, eps, TALL: tl.constexpr,
    WIDE: tl.constexpr, ADDS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    """By the running statistics: as a network is tested."""
    c, here = _columns(C, WIDE, 1)
    var = tl.load(running_var + c, mask=here, other=1.0)
    scale = tl.load(weight + c, mask=here, other=0.0) / tl.sqrt(var + eps)
    mean = tl.load(running_mean + c, mask=here, other=0.0)
    offset = tl.load(bias + c, mask=here, other=0.0) - mean * scale
    _write(x, residual, y, scale, offset, c, here, M, C, TALL, ADDS, RELU)


@triton.jit
def find_slopes(
    sums, scales, slopes, dweight, dbias, M, C, PARTS, WIDE: tl.constexpr, PADDED: tl.constexpr
):
    """dγ and dβ, and for dx = scale g + slope (x − mean) + level the last two."""
    c, here = _columns(C, WIDE, 0)
    total, products = _added(sums, c, here, PARTS, C, PADDED)
    rstd = tl.load(scales + RSTD * C + c, mask=here, other=0.0)
    scale = tl.load(scales + SCALE * C + c, mask=here, other=0.0)
    tl.store(dbias + c, total, mask=here)
    tl.store(dweight + c, products * rstd, mask=here)
    tl.store(slopes + c, -scale * rstd * rstd * products / M, mask=here)
    tl.store(slopes + C + c, -scale * total / M, mask=here)


@triton.jit
def gradient(
    x, dy, y, scales, slopes, dx, dresidual, M, C, TALL: tl.constexpr, WIDE: tl.constexpr,
    ADDS: tl.constexpr, RELU: tl.constexpr,
):  # fmt: skip
    c, here = _columns(C, WIDE, 1)
    m = tl.program_id(0) * TALL + tl.arange(0, TALL)
    inside = (m < M)[:, None] & here[None, :]
    at = m.to(tl.int64)[:, None] * C + c[None, :]
    mean = tl.load(scales + MEAN * C + c, mask=here, other=0.0)
    scale = tl.load(scales + SCALE * C + c, mask=here, other=0.0)
    offset = tl.load(scales + OFFSET * C + c, mask=here, other=0.0)
    slope = tl.load(slopes + c, mask=here, other=0.0)
    level = tl.load(slopes + C + c, mask=here, other=0.0)
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    g = _gradient_of_sum(value, dy, y, scale, offset, at, inside, ADDS, RELU)
    if ADDS:
        tl.store(dresidual + at, g.to(dresidual.dtype.element_ty), mask=inside)
    out = scale[None, :] * g + slope[None, :] * (value - mean[None, :]) + level[None, :]
    tl.store(dx + at, out.to(dx.dtype.element_ty), mask=inside)
