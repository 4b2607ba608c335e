"""Small networks and functions to train, and comparisons of tensors.

All gradients have norms below 1, as some methods ask for, unless a probe says otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wngrad.conformance.subject import Closure, Subject

STEPS = 12  # Enough for methods that stand still in their first steps, as RAdam may.


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A convolution, a normalization and a linear layer: parameters of 1, 2 and 4 dimensions."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)
    )
    return model.to(dtype)


def fresh(make: Subject, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Any, Any]:
    """A network and its optimizer."""
    model = network(seed, dtype)
    return model, make(model.parameters())


def differentiated(loss: Tensor) -> Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def batch(model: nn.Module, seed: int, scale: float = 1.0) -> Closure:
    """The loss and gradients of one batch drawn from `seed`."""

    def closure() -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 2, 4, 4, generator=draw).to(next(model.parameters()))
        y = torch.randint(4, (8,), generator=draw).to(x.device)
        model.zero_grad()
        return differentiated(scale * 0.25 * nn.functional.cross_entropy(model(x), y))

    return closure


def train(make: Subject, model: nn.Module, opt: Any, steps: int, first: int = 0) -> None:
    for seed in range(first, first + steps):
        make.step(opt, batch(model, seed))


def repeat(make: Subject, opt: Any, closure: Closure, steps: int = STEPS) -> None:
    for _ in range(steps):
        make.step(opt, closure)


def pull(*params: Tensor, weights: float | Tensor = 0.05) -> Closure:
    """Σ h|x|²/2: the gradient of every entry is its value times its weight h."""

    def closure() -> Tensor:
        for p in params:
            p.grad = None
        halves = [(weights * p.abs().square()).sum() / 2 for p in params]
        return differentiated(torch.stack(halves).sum())

    return closure


def push(p: Tensor, g: Tensor) -> Closure:
    """⟨g, x⟩ plus a constant that keeps the loss positive: the gradient is g, wherever x is."""

    def closure() -> Tensor:
        p.grad = None
        return differentiated((g * p).sum() + 100 * g.abs().sum())

    return closure


def ones(*shape: int, dtype: torch.dtype = torch.float64, value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, value, dtype=dtype))
