"""Steps 1 and 2: norms of cut matrices, and those that a sum of Gram matrices is enough for."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from wngrad.optim import sharded
from wngrad.optim.orthogonal import gram_factor
from wngrad.optim.orthogonal_sharded.slices import Slice, alike, in_batches
from wngrad.polynomials import NOTHING


def scaled(slices: list[Slice]) -> list[Tensor]:
    """x/‖X‖, with the Frobenius norm of the whole matrix, as `orthogonalize` does it."""
    x = [each.x for each in slices]
    norms = in_batches(_norms, x)
    for members in alike(each.message for each in slices):
        pairs = torch.cat([norms[i] for i in members])
        for group in slices[members[0]].groups:
            every = [torch.empty_like(pairs) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, pairs, group=group)
            pairs = _joined(torch.stack(every))
        split = torch.split(pairs, [len(x[i]) for i in members])
        for i, pair in zip(members, split, strict=True):
            norms[i] = pair
    return in_batches(_divided, x, norms)


def _norms(x: Tensor) -> Tensor:
    """(largest entry, norm in units of it) of each matrix."""
    top = x.abs().amax((1, 2)) if x.numel() else x.new_zeros(len(x))
    norm = torch.linalg.vector_norm(x / _or_one(top)[:, None, None], dim=(1, 2))
    return torch.stack([top, norm], 1)


def _joined(pairs: Tensor) -> Tensor:
    """The same of whole matrices, from that of their parts along dimension 0."""
    tops, norms = pairs.unbind(-1)
    top = tops.amax(0)
    norm = torch.linalg.vector_norm(norms * (tops / _or_one(top)), dim=0)
    return torch.stack([top, norm], -1)


def _divided(x: Tensor, norms: Tensor) -> Tensor:
    top, norm = (_or_one(each)[:, None, None] for each in norms.unbind(-1))
    x = (x / top).div_(norm)  # NaN everywhere if any part of the matrix is not finite
    return torch.nn.functional.hardshrink(x, NOTHING)  # 0 up to there


def _or_one(x: Tensor) -> Tensor:
    return torch.where(x == 0, 1, x)


def by_gram(slices: list[Slice]) -> list[Tensor]:
    """The orthogonalized x: P·X, with P from Σ over ranks of XᵣXᵣᵀ."""
    pairs = zip(scaled(slices), slices, strict=True)
    x = [_exact(x.mT if each.flips else x) for x, each in pairs]
    grams = in_batches(lambda x: packed(x @ x.mT), x)
    for members in alike(each.message for each in slices):
        flat = torch.cat([grams[i].flatten() for i in members]).to(slices[members[0]].x.dtype)
        flat = sharded.sum_over_ranks(flat, slices[members[0]].groups)
        sums = torch.split(flat, [grams[i].numel() for i in members])
        for i, part in zip(members, sums, strict=True):
            grams[i] = part.to(grams[i].dtype).view_as(grams[i])
    factors = in_batches(lambda gram: gram_factor(unpacked(gram)), grams)
    results = zip(in_batches(torch.matmul, factors, x), slices, strict=True)
    return [(u.mT if each.flips else u).to(each.x.dtype) for u, each in results]


def _exact(x: Tensor) -> Tensor:
    """In float64 where float32 products are rounded to TF32, too coarse for squares of σ."""
    tf32 = x.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return x.double() if tf32 and x.dtype == torch.float32 else x


def packed(symmetric: Tensor) -> Tensor:
    """The n(n+1)/2 numbers of symmetric matrices [[A, B], [Bᵀ, C]], as rectangles.

    The triangle below A's diagonal fits under the one above C's, if there is a row more; B is put
    below them. No indices are made, which would take more memory than the matrix.
    """
    h = symmetric.shape[-1] // 2
    a, b, c = symmetric[..., :h, :h], symmetric[..., :h, h:], symmetric[..., h:, h:]
    triangles = symmetric.new_zeros(*symmetric.shape[:-2], h + 1, c.shape[-1])
    triangles[..., : c.shape[-1], :] += c.triu()
    triangles[..., 1:, :h] += a.tril()
    return torch.cat([triangles, b], -2)


def unpacked(rectangles: Tensor) -> Tensor:
    """The inverse of `packed`."""
    size, h = rectangles.shape[-1], rectangles.shape[-2] // 2
    triangles, b = rectangles[..., : h + 1, :], rectangles[..., h + 1 :, :]
    a, c = triangles[..., 1:, :h].tril(), triangles[..., :size, :].triu()
    a, c = a + a.tril(-1).mT, c + c.triu(1).mT
    return torch.cat([torch.cat([a, b], -1), torch.cat([b.mT, c], -1)], -2)
