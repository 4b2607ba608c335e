"""Orthogonalization: the nearest matrix with all singular values 1, by products of matrices alone.

The polynomials, and what they are for, are in `wngrad.polynomials`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
    tall = x.shape[-2] > x.shape[-1]
    x = _scaled(x.mT if tall else x)
    exact = wide == torch.float64 or not x.is_cuda
    if exact and x.shape[-1] > WIDE * x.shape[-2]:
        x = _by_gram(x)
    else:
        x = _polynomials(x if exact else x.half()).to(wide)
    return x.mT if tall else x


def _scaled(x: Tensor) -> Tensor:
    """Every matrix divided by its Frobenius norm, which neither overflows nor underflows."""
    top = x.abs().amax((-2, -1), keepdim=True)
    x = x / torch.where(top > 0, top, 1)
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    x = x / torch.where(norm > 0, norm, 1)
    # Too small to matter, and its powers would be denormal, at which some processors are slow.
    return torch.where(x.abs() < NOTHING, 0, x)


def _scale(square: Tensor) -> Tensor:
    """What brings all σ to 1 at most, from (XXᵀ)².

    (Σσ⁸)^⅛ is at least the largest σ, and at most rank^⅛ times as much.
    """
    wide = torch.promote_types(square.dtype, torch.float32)
    norm = torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True, dtype=wide)
    return 1 / (ABOVE * torch.where(norm > 0, norm, 1).sqrt().sqrt())


def _by_gram(x: Tensor) -> Tensor:
    """P·X, where P is made from XXᵀ alone: fewer operations where a row is much longer."""
    return gram_factor(x @ x.mT) @ x


def gram_factor(gram: Tensor) -> Tensor:
    """P, from XXᵀ alone, such that P·X is X orthogonalized.

    XXᵀ has the squares of the singular values, of which float32 has digits enough and float16
    has not. All matrices here are polynomials of one, so their order does not matter.
    """
    scale = _scale(gram @ gram)
    one = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    gram, product = gram * scale**2, scale * one
    for k, (a, b, c) in enumerate(COEFFICIENTS, 1):
        factor = b * gram + c * (gram @ gram)
        product = a * product + factor @ product  # P ← (a + b·A + c·A²)·P
        if k < len(COEFFICIENTS):
            half = a * gram + factor @ gram
            gram = a * half + half @ factor  # A ← (a + b·A + c·A²)²·A
    return product


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
        x = _next(x, a, b * gram + c * (gram @ gram))
    return x


def _next(x: Tensor, a: float, mixed: Tensor) -> Tensor:
    """a·X + (b·XXᵀ + c·(XXᵀ)²)·X."""
    if x.dim() == 3 and x.is_cuda:
        return torch.baddbmm(x, mixed, x, beta=a)
    return a * x + mixed @ x


def orthogonalize_all(matrices: Sequence[Tensor]) -> list[Tensor]:
    """The same for a list of stacks (n, rows, columns): those of one size in one batch.

    But not on a CPU, where that saves little, and no stack's digits are to depend on the others.
    """
    by_size: dict[tuple[object, ...], list[int]] = {}
    for i, each in enumerate(matrices):
        rows, columns = each.shape[-2:]
        size = min(rows, columns), max(rows, columns)
        apart = i if each.device.type == "cpu" else None
        by_size.setdefault((size, each.dtype, each.device, apart), []).append(i)
    out: dict[int, Tensor] = {}
    for members in by_size.values():
        wide = [_wide(matrices[i]) for i in members]
        stack = wide[0] if len(wide) == 1 else torch.cat(wide)
        parts = torch.split(orthogonalize(stack), [len(each) for each in wide])
        for i, part in zip(members, parts, strict=True):
            out[i] = part if part.shape == matrices[i].shape else part.mT
    return [out[i] for i in range(len(matrices))]


def _wide(stack: Tensor) -> Tensor:
    return stack.mT if stack.shape[-2] > stack.shape[-1] else stack
