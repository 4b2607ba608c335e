"""Batch normalization together with the sum and the ReLU that follow it in a residual network."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# Of the tiles tried on an H200, with eight tables at work at once, these were the fastest.
WIDEST = 64  # channels of a tile: 128 bytes of bfloat16
TALL = 32  # rows of a tile,
SHORT, TALLER = 2**14, 128  # and where a table with fewer rows than SHORT is added up
PROGRAMS = 512  # that add up a table: some for each multiprocessor of a GPU


def norm(
    bn: nn.BatchNorm2d, x: Tensor, residual: Tensor | None = None, relu: bool = True
) -> Tensor:
    """relu(bn(x) + residual); by our kernels, where `use_kernels` has asked for them."""
    if getattr(bn, "by_kernels", False) and _suits(bn, x, residual):
        args = (bn.running_mean, bn.running_var, residual, bn.momentum, bn.eps, relu)
        y: Tensor = Norm.apply(x, bn.weight, bn.bias, *args)  # type: ignore[no-untyped-call]
        return y
    y = nn.BatchNorm2d.forward(bn, x)
    y = y if residual is None else y + residual
    return torch.relu(y) if relu else y


def use_kernels(model: nn.Module) -> None:
    """Have a network's batch normalization done by our kernels, as it trains on CUDA.

    In a Sequential, with the ReLU behind it, which then has nothing left to do.
    """
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.by_kernels = True  # type: ignore[assignment]
        if isinstance(layer, nn.Sequential):
            for bn, relu in itertools.pairwise(layer):
                if isinstance(bn, nn.BatchNorm2d) and isinstance(relu, nn.ReLU):
                    bn.forward = partial(norm, bn)  # type: ignore[method-assign]
                    relu.forward = _same  # type: ignore[method-assign, assignment]


def _same(x: Tensor) -> Tensor:
    return x


def _suits(bn: nn.BatchNorm2d, x: Tensor, residual: Tensor | None) -> bool:
    tables = [x] if residual is None else [x, residual]
    return (
        bn.training
        and bn.momentum is not None
        and bn.running_mean is not None
        and x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float32)
        and all(t.is_contiguous(memory_format=torch.channels_last) for t in tables)
    )


class Norm(torch.autograd.Function):
    """Training-mode batch normalization, sum and ReLU of tables with the channels last.

    The running statistics are moved in place.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, running_mean: Tensor,
        running_var: Tensor, residual: Tensor | None, momentum: float, eps: float, relu: bool,
    ) -> Tensor:  # fmt: skip
        from wngrad.lab.train import norm_kernels as k

        shape = _Shape(x)
        y, scales, sums = (
            torch.empty_like(x),
            x.new_empty((4, shape.c), dtype=torch.float32),
            shape.sums(),
        )
        size = (shape.m, shape.c)
        flags = {"ADDS": residual is not None, "RELU": relu}
        k.column_sums[shape.parts_grid](
            x,
            x,
            x,
            running_mean,
            sums,
            *size,
            shape.rows,
            **shape.sum_tiles,
            BACKWARD=False,
            **flags,
        )
        found = (sums, weight, bias, running_mean, running_var, scales)
        how = (shape.parts, momentum, eps)
        k.find_scales[shape.channels_grid](*found, *size, *how, **shape.channel_tiles)
        added = x if residual is None else residual
        k.apply[shape.grid](x, added, y, scales, *size, **shape.tiles, **flags)
        ctx.save_for_backward(x, y if all(flags.values()) else None, scales)
        ctx.flags = flags
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        from wngrad.lab.train import norm_kernels as k

        x, y, scales = ctx.saved_tensors
        y = x if y is None else y
        dy = grads[0].contiguous(memory_format=torch.channels_last)
        shape = _Shape(x)
        sums, dx = shape.sums(), torch.empty_like(x)
        dresidual = torch.empty_like(x) if ctx.flags["ADDS"] else None
        slopes, dweight, dbias = (x.new_empty(n, dtype=torch.float32) for n in shape.found)
        size = (shape.m, shape.c)
        k.column_sums[shape.parts_grid](
            x, dy, y, scales, sums, *size, shape.rows, **shape.sum_tiles, BACKWARD=True, **ctx.flags
        )
        k.find_slopes[shape.channels_grid](
            sums, scales, slopes, dweight, dbias, *size, shape.parts, **shape.channel_tiles
        )
        out = dx if dresidual is None else dresidual
        k.gradient[shape.grid](x, dy, y, scales, slopes, dx, out, *size, **shape.tiles, **ctx.flags)
        return dx, dweight, dbias, None, None, dresidual, None, None, None


class _Shape:
    """How a table is cut among programs."""

    def __init__(self, x: Tensor) -> None:
        self.like, self.c = x, x.shape[1]
        self.m = x.numel() // self.c
        wide = min(WIDEST, _power(self.c))
        across = -(-self.c // wide)
        tall = TALLER if self.m < SHORT else TALL
        self.rows = max(tall, _power(-(-self.m * across // PROGRAMS)))
        self.parts = -(-self.m // self.rows)
        self.parts_grid = (self.parts, across)
        self.sum_tiles = {"TALL": tall, "WIDE": wide}
        self.channels_grid = (-(-self.c // 16),)
        self.channel_tiles = {"WIDE": 16, "PADDED": _power(self.parts)}
        self.tiles = {"TALL": TALL, "WIDE": wide}
        self.grid = (-(-self.m // TALL), across)
        self.found = ((2, self.c), (self.c,), (self.c,))

    def sums(self) -> Tensor:
        return self.like.new_empty((self.parts, 2, self.c), dtype=torch.float32)


def _power(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()
