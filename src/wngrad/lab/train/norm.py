"""Batch normalization together with the sum and the ReLU that follow it in a residual network."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

# Of the tiles tried on an H200, with eight tables at work at once, these were the fastest.
WIDEST = 64  # channels of a tile: 128 bytes of bfloat16
TALL = 32  # rows of a tile,
SHORT, TALLER = 2**14, 128  # and where a table with fewer rows than SHORT is added up
PROGRAMS = 512  # that add up a table: some for each multiprocessor of a GPU


class BatchNorm(nn.BatchNorm2d):
    """relu(batch normalization of x, plus a residual); the ReLU can be left out.

    On CUDA each table is read and written as few times as can be, if `use_kernels` has asked for
    it; else, and everywhere else, it is torch's own operations.
    """

    by_kernels = False

    def __init__(self, channels: int, relu: bool = True) -> None:
        super().__init__(channels)
        self.relu = relu

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self.by_kernels and self._suits(x, residual):
            of = (self.weight, self.bias, self.running_mean, self.running_var)
            if not self.training:
                return _tested(x, residual, of, self.eps, self.relu)
            how = (residual, self.momentum, self.eps, self.relu)
            y: Tensor = Norm.apply(x, *of, *how)  # type: ignore[no-untyped-call]
            return y
        y = super().forward(x)
        y = y if residual is None else y + residual
        return torch.relu(y) if self.relu else y

    def _suits(self, x: Tensor, residual: Tensor | None) -> bool:
        tables = [x] if residual is None else [x, residual]
        return (
            x.is_cuda
            and (self.training or not torch.is_grad_enabled())
            and x.dtype in (torch.bfloat16, torch.float32)
            and all(t.is_contiguous(memory_format=torch.channels_last) for t in tables)
        )


def has_kernels(model: nn.Module) -> bool:
    """Whether there are kernels for some of a network's layers, and Triton to compile them."""
    layers = any(isinstance(layer, BatchNorm) for layer in model.modules())
    return layers and find_spec("triton") is not None


def use_kernels(model: nn.Module) -> None:
    """Have a network's `BatchNorm` done by our kernels on CUDA."""
    for layer in model.modules():
        if isinstance(layer, BatchNorm):
            layer.by_kernels = True


def _tested(x: Tensor, residual: Tensor | None, of: Any, eps: float, relu: bool) -> Tensor:
    """As a network is tested: by the running statistics, without a gradient."""
    from wngrad.lab.train import norm_kernels as k

    shape, y = _Shape(x), torch.empty_like(x)
    flags = {"ADDS": residual is not None, "RELU": relu}
    added = x if residual is None else residual
    k.apply_running[shape.grid](x, added, y, *of, shape.m, shape.c, eps, **shape.tiles, **flags)
    return y


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
