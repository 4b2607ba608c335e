"""Kinds of tensors: complex, sparse, narrow, oddly shaped, oddly laid out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wngrad.conformance.compare import finite
from wngrad.conformance.registry import probe
from wngrad.conformance.subject import Subject
from wngrad.conformance.training import differentiated, ones, pull, repeat
from wngrad.conformance.verdicts import Failed, NotApplicable, unless_refused


@probe("complex")
def complex_parameters(make: Subject) -> None:
    z = nn.Parameter(torch.full((3, 2), 1 + 2j, dtype=torch.complex128))
    start = z.detach().clone()
    with unless_refused("complex"):
        repeat(make, make([z]), pull(z))
    moved = torch.view_as_real(z.detach() - start)
    if not bool((moved < 0).all()):
        raise Failed("real and imaginary parts do not both go downhill")


@probe("sparse")
def sparse_gradients(make: Subject) -> None:
    table = nn.Embedding(6, 3, sparse=True, dtype=torch.float64)
    start = table.weight.detach().clone()

    def closure() -> Tensor:
        table.zero_grad()
        return differentiated(table(torch.tensor([1, 4, 4])).square().sum())

    with unless_refused("sparse"):
        repeat(make, make(table.parameters()), closure)
    moved = [i for i in range(6) if not torch.equal(table.weight[i], start[i])]
    if moved != [1, 4]:
        raise Failed(f"rows 1 and 4 have a gradient, rows {moved} move")


@probe("bfloat16")
def bfloat16(make: Subject) -> str:
    ends = [_fitted(make, dtype) for dtype in (torch.bfloat16, torch.float32)]
    losses = "the loss ends at {:.2g} × its start, in float32 at {:.2g} ×".format(*ends)
    if ends[1] >= 1:
        raise NotApplicable("it does not lower the loss in float32 either")
    if not 1 - ends[0] >= 0.01 * (1 - ends[1]):
        raise Failed(f"it stands still: {losses}")
    return losses


def _fitted(make: Subject, dtype: torch.dtype) -> float:
    """The loss after 300 steps on one batch, divided by the first."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 2)).to(dtype)
    x, y = torch.randn(64, 20).to(dtype), torch.randint(2, (64,))
    opt = make(model.parameters())

    def closure() -> Tensor:
        model.zero_grad()
        return differentiated(nn.functional.cross_entropy(model(x), y) / 2)

    start = float(closure())
    repeat(make, opt, closure, 300)
    make.eval(opt)
    if not finite(model.parameters()) or any(p.dtype != dtype for p in model.parameters()):
        raise Failed(f"in {dtype} the parameters end as another type, or not finite")
    return float(closure()) / start


@probe("odd shapes")
def odd_shapes(make: Subject) -> None:
    params = [ones(), ones(0, 3), ones(3, 0), ones(2, 2)]
    repeat(make, make(params), pull(*params))
    if not finite(params):
        raise Failed("NaN beside a tensor without elements")
    if torch.equal(params[0], ones()) or torch.equal(params[3], ones(2, 2)):
        raise Failed("a scalar, or the tensor beside it, does not move")


@probe("memory layouts")
def memory_layouts(make: Subject) -> None:
    torch.manual_seed(0)
    images, matrix = torch.randn(4, 3, 2, 5).double(), torch.randn(4, 6).double()
    plain = [nn.Parameter(images.clone()), nn.Parameter(matrix.clone())]
    odd = [
        nn.Parameter(images.contiguous(memory_format=torch.channels_last)),
        nn.Parameter(matrix.T.contiguous().T),
    ]
    repeat(make, make(plain), pull(*plain))
    repeat(make, make(odd), pull(*odd))
    for p, q, start in zip(plain, odd, (images, matrix), strict=True):
        moved = (p - start).detach().norm()
        if not (p - q).detach().norm() <= 1e-6 * moved:
            raise Failed("another memory layout gives another result")
