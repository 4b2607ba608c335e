"""The forward pass of many networks at once: each layer one product for all lanes.

What a network of `nn.Sequential` computes, on weights that carry (seeds, settings) in front.
Activations are (lanes, channels, batch, …), the batch behind the channels: then a layer is
weight @ activations with nothing to copy. The first layer meets the data before the lanes of a seed
have parted: there the activations are (seeds, channels, batch, …) and one product serves all
settings of the seed, which `torch.func.vmap` would not see.

The products go to the library for them; what lies between two products is one function, which the
caller may compile. (Compiled as a whole, a step of Figure 2 took 3.7 to 4.4 ms on an H200: the
compiler cut patches in 25 kernels, or pooled again for each of them, or cut them twice.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Pair = tuple[int, ...]
Compiler = Callable[[Any], Any]
BETWEEN = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Identity)
POOLS = (nn.MaxPool2d, nn.AvgPool2d)


class Stack:
    """A Sequential of products and what lies between them, for many lanes at once."""

    def __init__(self, model: nn.Sequential, compiled: Compiler = lambda work: work) -> None:
        self.products: list[nn.Module] = []
        between: list[list[nn.Module]] = [[]]
        for layer in model:
            if isinstance(layer, (nn.Linear, nn.Conv2d)):
                self.products.append(layer)
                between.append([])
            else:
                between[-1].append(layer)
        biased = [False, *(layer.bias is not None for layer in self.products)]
        pairs = zip(between, biased, strict=True)
        self.between = [_between(layers, bias, compiled) for layers, bias in pairs]
        self.cut, self.fold = compiled(_cut), compiled(_fold)

    def __call__(self, weights: Sequence[Tensor], x: Tensor) -> Tensor:
        """Logits (lanes, classes, batch).

        Args:
            weights: the model's parameters in order, each (seeds, settings, *shape).
            x: one batch for each seed, (seeds, batch, *shape).
        """
        left = list(weights)
        h: Tensor = self.between[0](x.transpose(1, 2) if x.ndim > 3 else x.mT, None)
        for layer, after in zip(self.products, self.between[1:], strict=True):
            w = left.pop(0)
            y = _linear(w, h) if isinstance(layer, nn.Linear) else self._conv(layer, w, h)
            h = after(y, None if layer.bias is None else left.pop(0))
        return h

    def _conv(self, layer: nn.Module, w: Tensor, h: Tensor) -> Tensor:
        """A convolution as one product with the patches of its input."""
        conv = cast(nn.Conv2d, layer)
        if conv.padding not in ((0, 0), "valid"):
            down, right = cast("tuple[int, int]", conv.padding)
            h = F.pad(h, (right, right, down, down))
        window = (conv.kernel_size, conv.stride, conv.dilation)
        tall, wide = (_count(h.shape[3 + d], *(w_[d] for w_ in window)) for d in (0, 1))
        patches = _Patches.apply(h, self, window)  # type: ignore[no-untyped-call]
        rows = w.flatten(3)
        y = _linear(F.pad(rows, (0, patches.shape[1] - rows.shape[3])), patches)
        return y.view(y.shape[0], y.shape[1], h.shape[2], tall, wide)


def why_not(model: nn.Module) -> str | None:
    """What keeps `model` from being stacked, in words; None if nothing does."""
    if type(model) is not nn.Sequential:
        return f"it is a {type(model).__name__}, not a Sequential"
    for layer in model:
        if type(layer) not in (nn.Linear, nn.Conv2d, nn.Flatten, *BETWEEN, *POOLS):
            return f"it has a {type(layer).__name__}"
        if isinstance(layer, nn.Conv2d) and not _plain(layer):
            return "it has a convolution with groups or with a padding other than a number of zeros"
        if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1):
            return "it has a Flatten of some dimensions only"
        if isinstance(layer, nn.MaxPool2d) and layer.return_indices:
            return "it has a MaxPool2d that returns indices"
    return None


def _plain(conv: nn.Conv2d) -> bool:
    return conv.groups == 1 and conv.padding_mode == "zeros" and conv.padding != "same"


def _linear(w: Tensor, h: Tensor) -> Tensor:
    """w @ h for every lane: w (seeds, settings, out, in), h (seeds or lanes, in, columns)."""
    seeds, settings, out, inner = w.shape
    rows = settings * out if len(h) == seeds else out
    y = torch.bmm(w.reshape(len(h), rows, inner), h)
    return y.view(seeds * settings, out, -1)


class _Between:
    """The bias of a product, and the layers without weights that follow it."""

    def __init__(self, layers: list[nn.Module]) -> None:
        self.layers = layers

    def __call__(self, h: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            h = h + bias.view(h.shape[0], h.shape[1], *[1] * (h.ndim - 2))
        for layer in self.layers:
            if isinstance(layer, nn.Flatten):
                h = h.movedim(2, -1).flatten(1, -2) if h.ndim > 3 else h
            elif isinstance(layer, POOLS):
                y = layer(h.flatten(0, 1))
                h = y.view(*h.shape[:3], *y.shape[2:])
            else:
                h = layer(h)
        return h


def _between(layers: list[nn.Module], bias: bool, compiled: Compiler) -> Any:
    """What lies between two products; compiled, unless there is nothing to compute."""
    computes = bias or any(not isinstance(layer, (nn.Flatten, nn.Identity)) for layer in layers)
    return compiled(_Between(layers)) if computes else _Between(layers)


class _Patches(torch.autograd.Function):
    """(n, channels, batch, height, width) → (n, channels × kernel, batch × output): one copy.

    Its own gradient, because those on offer are slow: stacked slices are one kernel each, and
    `unfold` scatters with atomic additions.
    """

    @staticmethod
    def forward(ctx: Any, h: Tensor, stack: Stack, window: tuple[Pair, ...]) -> Tensor:
        ctx.shape, ctx.stack, ctx.window = h.shape, stack, window
        patches: Tensor = stack.cut(h, window)
        return patches

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.stack.fold(grads[0], ctx.shape, ctx.window), None, None


def _count(size: int, kernel: int, stride: int, dilation: int) -> int:
    return (size - dilation * (kernel - 1) - 1) // stride + 1


def _cut(h: Tensor, window: tuple[Pair, ...]) -> Tensor:
    kernel, stride, dilation = window
    for d in (0, 1):  # windows as wide as the kernel reaches, of which every dilation-th
        h = h.unfold(3 + d, dilation[d] * (kernel[d] - 1) + 1, stride[d])
    h = h[..., :: dilation[0], :: dilation[1]].permute(0, 1, 5, 6, 2, 3, 4)
    rows = h.flatten(4).flatten(1, 3)
    # With rows of zeros up to a multiple of eight the product can read sixteen bytes at a time.
    return F.pad(rows, (0, 0, 0, -rows.shape[1] % 8))


def _fold(g: Tensor, shape: Sequence[int], window: tuple[Pair, ...]) -> Tensor:
    """Each patch's gradient added where the patch was cut from."""
    kernel, stride, dilation = window
    n, channels, batch = shape[:3]
    tall, wide = (_count(shape[3 + d], *(w[d] for w in window)) for d in (0, 1))
    g = g[:, : channels * kernel[0] * kernel[1]].view(n, channels, -1, batch, tall, wide)
    total = g.new_zeros(tuple(shape))
    for k, (i, j) in enumerate(product(*(range(size) for size in kernel))):
        top, left = i * dilation[0], j * dilation[1]
        down = slice(top, top + (tall - 1) * stride[0] + 1, stride[0])
        right = slice(left, left + (wide - 1) * stride[1] + 1, stride[1])
        if torch.compiler.is_compiling():  # a sum that becomes one kernel
            total = total + _placed(g[:, :, k], shape, down, right)
        else:
            total[..., down, right] += g[:, :, k]
    return total


def _placed(g: Tensor, shape: Sequence[int], down: slice, right: slice) -> Tensor:
    """Zeros of `shape`, but for `g` at [..., down, right]."""
    columns = g.new_zeros((*shape[:3], g.shape[3], shape[4]))
    columns = columns.slice_scatter(g, 4, right.start, right.stop, right.step)
    rows = g.new_zeros(tuple(shape))
    return rows.slice_scatter(columns, 3, down.start, down.stop, down.step)
