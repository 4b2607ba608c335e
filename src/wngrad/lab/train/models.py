"""The paper's three networks, as ordinary modules of (shape of an example, number of classes)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from wngrad.lab.train.loader import load_callable
from wngrad.lab.train.norm import BatchNorm

if TYPE_CHECKING:
    from wngrad.lab.train.data import Data

Factory = Callable[[tuple[int, ...], int], nn.Module]


def mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two fully connected layers without biases: 784-100-10 on MNIST (Figure 1)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), 100, bias=False),
        nn.ReLU(),
        nn.Linear(100, classes, bias=False),
    )


def cnn(shape: tuple[int, ...], classes: int) -> nn.Module:
    """The five layers of Table 2: 62,006 parameters on CIFAR-10 (Figure 2).

    Note: Table 2 ends in "FC relu"; logits that cannot be negative would be a slip, so the last
    layer has no ReLU. Its second pool keeps the 16 channels it is given.
    """
    side = ((shape[1] - 4) // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(shape[0], 6, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side**2, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


class _Block(nn.Module):
    """Two 3×3 convolutions and a way around them."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.bn1 = BatchNorm(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.bn2 = BatchNorm(after)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            conv = nn.Conv2d(before, after, 1, stride, bias=False)
            self.around = nn.Sequential(conv, BatchNorm(after, relu=False))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.bn1(self.conv1(x)))
        return self.bn2(y, residual=self.around(x))  # type: ignore[no-any-return]


def resnet18(shape: tuple[int, ...], classes: int, width: int = 64) -> nn.Module:
    """ResNet-18 (He et al., 2015) with the stem for small images: 3×3, no max-pool (Figure 3)."""
    layers: list[nn.Module] = [
        nn.Conv2d(shape[0], width, 3, padding=1, bias=False),
        BatchNorm(width),
    ]
    before = width
    for level in range(4):
        after = width * 2**level
        layers += [_Block(before, after, 1 if level == 0 else 2), _Block(after, after, 1)]
        before = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes)]
    return nn.Sequential(*layers)


MODELS: dict[str, Factory] = {"mlp": mlp, "cnn": cnn, "resnet18": resnet18}


def build(name: str, shape: tuple[int, ...], classes: int, seed: int) -> nn.Module:
    """The network `name` with torch's default initialization, drawn from `seed` alone."""
    factory = MODELS.get(name) or load_callable(name, "model", MODELS)
    return _seeded(lambda: factory(shape, classes), seed)


def network(name: str, data: Data, seed: int) -> nn.Module:
    """The network for some data: its own, if it brings one, or the one called `name`."""
    if data.model is not None:
        return _seeded(data.model, seed)
    return build(name, data.shape, data.classes, seed)


def _seeded(factory: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


def why_not_together(model: nn.Module) -> str | None:
    """What keeps networks like `model` from being trained side by side; None if nothing does."""
    for layer in model.modules():
        if isinstance(layer, (_DropoutNd, nn.RReLU)):  # which network draws first would matter
            return f"it draws at random (a {type(layer).__name__})"
    if not all(p.requires_grad for p in model.parameters()):
        return "it has parameters that do not require a gradient"
    return None
