"""b₁ from a sampled Lipschitz constant (Remark 2.2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from wngrad import slopes, values
from wngrad.optim.average import snapshot


def lipschitz_b_init(
    model: nn.Module,
    closure: Callable[[], Tensor],
    *,
    lr: float = 1.0,
    points: int = 2,
    radius: float = 1e-3,
    seed: int = 0,
) -> float:
    """b₁ = λ·max ‖∇f(u_j) − ∇f(u_k)‖/‖u_j − u_k‖ over points near the start (Remark 2.2).

    An estimate of the gradient's Lipschitz constant from below. The model is left bit for bit as it
    was: parameters, gradients, buffers and the random state.

    Args:
        model: the model at its start.
        closure: computes the loss from the model, without `backward`.
        lr: the λ the optimizer will be given; b₁ is in proportion to it.
        points: R ≥ 2, the number of points and of gradients.
        radius: how far the points lie from the start, relative to the parameters' norm (or, if
            that is smaller, to 1).
        seed: for the points.

    Returns:
        A number for `b_init`.

    Example:
        >>> model = torch.nn.Linear(3, 1, bias=False)  # f = 2‖w‖², so L = 4
        >>> b1 = lipschitz_b_init(model, lambda: 2 * model.weight.square().sum())
        >>> opt = WNGrad(model.parameters(), b_init=b1)
        >>> round(b1, 3)
        4.0
    """
    owner = "lipschitz_b_init"
    lam = values.finite(owner, "lr", lr, above=0)
    far = values.finite(owner, "radius", radius, above=0)
    points = values.count(owner, "points", points, least=2)
    params = [p for p in model.parameters() if p.requires_grad]
    if not params:
        raise ValueError(f"{owner}: `model` must have a parameter that requires a gradient.")
    eps = max(torch.finfo(p.dtype).eps for p in params)
    size = slopes.radius(far, _norm(_flat(params)), eps)
    generator = torch.Generator().manual_seed(seed)
    near = []  # points, and the gradients there
    for _ in range(points):
        away = [torch.randn(p.shape, generator=generator, dtype=_wide(p)) for p in params]
        scale = size / _norm(_flat(away))
        with _untouched(model):
            with torch.no_grad():
                for p, d in zip(params, away, strict=True):
                    p.add_((scale * d).to(p.device, p.dtype))
            with torch.enable_grad():
                grads = torch.autograd.grad(closure(), params, allow_unused=True)
            pairs = zip(params, grads, strict=True)
            dense = [torch.zeros_like(p) if g is None else g.to_dense() for p, g in pairs]
            near.append((_flat(params), _flat(dense)))  # as it is after rounding to their types
    return lam * slopes.largest(owner, "closure", near, _norm)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    """Puts parameters, gradients, buffers and random states back, whatever happens inside."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    restore = snapshot("lipschitz_b_init", tensors)
    grads = [(p, p.grad) for p in model.parameters()]
    buffers = [(module, dict(module.named_buffers(recurse=False))) for module in model.modules()]
    cuda = sorted({t.device.index for _, t in tensors if t.is_cuda})
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            for p, grad in grads:
                p.grad = grad
            for module, named in buffers:  # a forward pass may have put new ones in their place
                for name, buffer in named.items():
                    setattr(module, name, buffer)
            restore()


def _wide(p: Tensor) -> torch.dtype:
    return torch.complex128 if p.is_complex() else torch.float64


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().cpu().to(_wide(t)).flatten() for t in tensors])


def _norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x))
