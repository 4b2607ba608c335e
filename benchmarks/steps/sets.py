"""What is stepped: parameters and gradients with the shapes of known networks."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from wngrad.lab.train.models import mlp, resnet18

Shapes = list[tuple[int, ...]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def llama(vocab: int, hidden: int, layers: int, kv: int, wide: int) -> Shapes:
    """A Llama with tied embeddings, grouped keys and values, a gated MLP and RMS norms."""
    attention = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    gated = [(wide, hidden), (wide, hidden), (hidden, wide)]
    norms = [(hidden,), (hidden,)]
    return [(vocab, hidden), *(attention + gated + norms) * layers, (hidden,)]


def shapes_of(build: Callable[[tuple[int, ...], int], nn.Module], shape: tuple[int, ...]) -> Shapes:
    with torch.device("meta"):
        return [tuple(p.shape) for p in build(shape, 10).parameters()]


def hidden(shapes: Shapes) -> Shapes:
    """The matrices but the first layer's or embedding's, convolutions as (out, rest)."""
    return [(shape[0], math.prod(shape[1:])) for shape in shapes if len(shape) > 1][1:]


def transformer() -> Shapes:
    """The hidden matrices of four layers of width 256."""
    return [(768, 256), (256, 256), (1024, 256), (256, 1024)] * 4


SETS: dict[str, Callable[[], Shapes]] = {
    "llama": lambda: llama(128_256, 2048, 16, 512, 8192),  # Llama-3.2-1B
    "38M": lambda: llama(32_768, 512, 5, 512, 2048),
    "resnet18": lambda: shapes_of(resnet18, (3, 32, 32)),
    "mlp": lambda: shapes_of(mlp, (1, 28, 28)),
    # Matrices alone, for optimizers that orthogonalize.
    "llama-hidden": lambda: hidden(SETS["llama"]()),
    "38M-hidden": lambda: hidden(SETS["38M"]()),
    "resnet18-hidden": lambda: hidden(SETS["resnet18"]()[:-1]),  # without the last layer
    "transformer-hidden": transformer,
}


def count(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(map(math.prod, shapes))


def floor_seconds(parameters: int, itemsize: int, passes: int, bandwidth: float) -> float:
    """The time in which `passes` over the parameters move at `bandwidth` bytes a second."""
    return passes * parameters * itemsize / bandwidth


class Field:
    """The parameters that all contestants share, and sets of gradients, none of them zero."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        self.parameters, self.itemsize, self.device = count(shapes), dtype.itemsize, device
        self.bytes = self.parameters * dtype.itemsize
        torch.manual_seed(0)

        def draw(scale: float) -> list[Tensor]:
            return [torch.randn(s, dtype=dtype, device=device).mul_(scale) for s in shapes]

        self.params = [p.requires_grad_() for p in draw(0.02)]
        self._start = [p.detach().clone() for p in self.params]
        self._gradients = [draw(0.01) for _ in range(8 if self.bytes < 2**26 else 2)]
        self._random = random.Random(0)

    @torch.no_grad()
    def reset(self) -> None:
        """Parameters as at first, and the first set of gradients."""
        torch._foreach_copy_(self.params, self._start)
        for p, g in zip(self.params, self._gradients[0], strict=True):
            p.grad = g

    def move(self) -> None:
        """Gradients at other addresses, in a combination that is unlikely to come back.

        As after `zero_grad(set_to_none=True)`: a table of their addresses is of no use any more.
        """
        for p, drawn in zip(self.params, zip(*self._gradients, strict=True), strict=True):
            p.grad = self._random.choice(drawn)

    @torch.no_grad()
    def check(self) -> None:
        """A step of numbers that are not finite would not be the step of a training."""
        norms = torch.stack([n.float() for n in torch._foreach_norm(self.params)])
        if not bool(norms.isfinite().all()):
            raise FloatingPointError("the parameters are no longer finite")
