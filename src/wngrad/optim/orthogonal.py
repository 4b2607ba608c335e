"""Orthogonalization: the nearest matrix with all singular values 1, by products of matrices alone.

The polynomials, and what they are for, are in `wngrad.polynomials`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wngrad.optim import lists
from wngrad.polynomials import ABOVE, COEFFICIENTS, NOTHING, WIDE


def orthogonalize(matrices: Tensor) -> Tensor:
    """U Vᵀ, nearly, of every matrix U Σ Vᵀ: singular values near 1, singular vectors kept.

    No singular value of the result is above `LARGEST`, and none is below `LEAST` that was at least
    1/1000 of the largest (from 1/250 on it is between 0.85 and 1.15). Zero stays zero: matrices,
    rows and columns. Multiplying a matrix by a power of two changes no bit of the result. A matrix
    with an entry that is not finite becomes NaN.

    Args:
        matrices: of shape (…, rows, columns), real.

    Returns:
        A tensor of the same shape, in float32 or wider.

    Note:
        On CUDA the products are taken in float16, which has the speed of bfloat16 and eight times
        its precision; everything is scaled such that none of it can overflow.

    Example:
        >>> u = orthogonalize(torch.diag(torch.tensor([3.0, 2.0, 0.5])))
        >>> torch.allclose(u, torch.eye(3), atol=0.15)
        True
    """
    wide = torch.promote_types(matrices.dtype, torch.float32)
    x = matrices.to(wide)
    if x.numel() == 0:
        return x
    if x.dim() > 2:  # On a CPU, products of two dimensions are faster than of three.
        single = x.shape[:-2].numel() == 1 and x.device.type == "cpu"
        x = x.reshape(x.shape[-2:] if single else (-1, *x.shape[-2:]))
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    exact = wide == torch.float64 or not x.is_cuda
    if exact and x.shape[-1] > WIDE * x.shape[-2]:
        x = _by_gram(x)
    else:
        x = _scaled(x)
        x = _polynomials(x if exact else x.half()).to(wide)
    return (x.mT if tall else x).reshape_as(matrices)


def _scaled(x: Tensor) -> Tensor:
    """Every matrix divided by its Frobenius norm, which neither overflows nor underflows."""
    least = torch.finfo(x.dtype).tiny
    x = x / x.abs().amax((-2, -1), keepdim=True).clamp(min=least)
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=least)
    # Too small to matter, and its powers would be denormal, at which some processors are slow.
    return torch.nn.functional.hardshrink(x, NOTHING)


def _scale(square: Tensor) -> Tensor:
    """What brings all σ to 1 at most, from (XXᵀ)².

    (Σσ⁸)^⅛ is at least the largest σ, and at most rank^⅛ times as much.
    """
    wide = torch.promote_types(square.dtype, torch.float32)
    norm = torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True, dtype=wide)
    return 1 / (ABOVE * torch.where(norm > 0, norm, 1).sqrt().sqrt())


def _by_gram(x: Tensor) -> Tensor:
    """P·X, where P is made from XXᵀ alone: fewer operations where a row is much longer."""
    # With no entry above 1, neither XXᵀ nor its square overflows.
    x = x / x.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    x = torch.nn.functional.hardshrink(x, NOTHING)
    return gram_factor(x @ x.mT) @ x


def gram_factor(gram: Tensor) -> Tensor:
    """P, from XXᵀ alone, such that P·X is X orthogonalized.

    XXᵀ has the squares of the singular values, of which float32 has digits enough and float16
    has not. All matrices here are polynomials of one, so their order does not matter.
    """
    square = gram @ gram
    tiny = torch.finfo(gram.dtype).tiny
    norm = torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True)
    scale_2 = norm.clamp(min=tiny).rsqrt() * ABOVE**-2  # of σ²: see `_scale`
    (a, b, c), *rest = COEFFICIENTS
    gram = torch.nn.functional.hardshrink(gram * scale_2, NOTHING**2)
    factor = torch.add(b * gram, square * (scale_2 * scale_2), alpha=c)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    product: Tensor = torch.add(factor, eye, alpha=a) * scale_2.sqrt()  # P ← a + b·A + c·A²
    for a_next, b, c in rest:
        half = _plus(gram, a, factor, gram)
        gram = _plus(half, a, half, factor)  # A ← (a + b·A + c·A²)²·A
        a, factor = a_next, _plus(gram, b, gram, gram, c)
        product = _plus(product, a, factor, product)  # P ← (a + b·A + c·A²)·P
    return product


def _plus(x: Tensor, beta: float, y: Tensor, z: Tensor, alpha: float = 1.0) -> Tensor:
    """beta·X + alpha·Y·Z."""
    if x.dim() == 2:
        return torch.addmm(x, y, z, beta=beta, alpha=alpha)
    return torch.baddbmm(x, y, z, beta=beta, alpha=alpha)


def _polynomials(x: Tensor) -> Tensor:
    (a, b, c), *rest = COEFFICIENTS
    gram = x @ x.mT
    square = gram @ gram
    scale = _scale(square)
    mixed = (b * scale**2) * gram + (c * scale**4) * square
    x = (x * scale).to(x.dtype)
    x = _next(x, a, mixed.to(x.dtype))
    for a, b, c in rest:
        gram = x @ x.mT
        mixed = b * gram + c * (gram @ gram) if x.is_cuda else _plus(gram, b, gram, gram, c)
        x = _next(x, a, mixed)
    return x


def _next(x: Tensor, a: float, mixed: Tensor) -> Tensor:
    """a·X + (b·XXᵀ + c·(XXᵀ)²)·X."""
    if x.dim() == 3 or not x.is_cuda:
        return _plus(x, a, mixed, x)
    return a * x + mixed @ x


def orthogonalize_all(matrices: Sequence[Tensor]) -> list[Tensor]:
    """The same for a list of matrices or stacks of them: those of one size in one batch.

    But not on a CPU, where that saves little, and no stack's digits are to depend on the others.
    """
    if all(stack.device.type == "cpu" for stack in matrices):
        return [orthogonalize(stack) for stack in matrices]
    tall = [stack.shape[-2] > stack.shape[-1] for stack in matrices]
    stacks = [x if x.dim() == 3 else x.unsqueeze(0) for x in matrices]
    wide = [x.mT if flips else x for x, flips in zip(stacks, tall, strict=True)]
    results = zip(lists.in_batches(orthogonalize, wide), tall, strict=True)
    return [u.mT if flips else u for u, flips in results]
