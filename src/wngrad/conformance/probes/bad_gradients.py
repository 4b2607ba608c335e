"""Bad gradients: NaN, spikes and scales; and what state costs."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from wngrad.conformance.compare import copies, finite, held, same
from wngrad.conformance.registry import probe
from wngrad.conformance.subject import Subject
from wngrad.conformance.training import STEPS, batch, fresh, ones, pull, push, repeat, train
from wngrad.conformance.verdicts import Failed, NotApplicable


def _nan_step(make: Subject, model: nn.Module, opt: Any) -> None:
    closure = batch(model, 3)

    def poisoned() -> Tensor:
        loss = closure()
        next(model.parameters()).grad[0, 0, 0, 0] = torch.nan  # type: ignore[index]
        return loss

    make.step(opt, poisoned)


@probe("NaN gradient")
def nan_gradient(make: Subject) -> str:
    (model, opt), (twin, other) = fresh(make), fresh(make)
    for m, o in ((model, opt), (twin, other)):
        train(make, m, o, 3)
    before = copies(model.parameters())
    try:
        _nan_step(make, model, opt)
    except Exception as error:
        if not all(map(torch.equal, before, model.parameters())):
            raise Failed("it raises when some parameters have already moved") from error
        return f"raises {type(error).__name__}"
    if not finite(model.parameters()):
        return "NaN in the parameters at once"
    after = [*copies(model.parameters()), *copies(twin.parameters())]
    for m, o in ((model, opt), (twin, other)):
        train(make, m, o, STEPS, first=4)
    if not finite(model.parameters()):
        raise Failed(f"the parameters look well after the NaN and are NaN within {STEPS} steps")
    stood = [p == q for p, q in zip(after, [*model.parameters(), *twin.parameters()], strict=True)]
    for here, there in zip(stood, stood[len(stood) // 2 :], strict=False):
        if bool((here & ~there).any()):
            raise Failed("the parameters look well after the NaN, and some never move again")
    return "the step is left out" if same(model, twin) else "goes on"


@probe("rollback after NaN")
def rollback(make: Subject) -> None:
    (model, opt), (twin, other) = (fresh(make, dtype=torch.float32) for _ in range(2))
    train(make, model, opt, 3)
    train(make, twin, other, 3)
    checkpoint = make.saved(model, opt)
    make.saved(twin, other)  # Going to eval() and back may round, so both do.
    with contextlib.suppress(Exception):  # It may raise; now the step is taken back.
        _nan_step(make, model, opt)
    make.load(model, opt, checkpoint)
    train(make, model, opt, 5, first=3)
    train(make, twin, other, 5, first=3)
    if not same(model, twin):
        raise Failed("after the rollback it is not the run without the NaN")


@probe("gradient spike")
def gradient_spike(make: Subject) -> str:
    p, weights = ones(4, 5), torch.linspace(0.5, 1.0, 20).double().view(4, 5)
    opt = make([p])
    closure = pull(p, weights=weights)

    def spiked() -> Tensor:
        loss = closure()
        p.grad.mul_(1e6)  # type: ignore[union-attr]
        return loss

    def loss_now() -> float:
        make.eval(opt)
        loss = float(closure())
        make.train(opt)
        return loss

    start = loss_now()
    repeat(make, opt, closure, 20)
    before = max(loss_now(), 1e-30)
    make.step(opt, spiked)
    repeat(make, opt, closure, 500)
    end = loss_now()
    if not end <= start:
        raise Failed(f"the loss ends at {end / start:.2g} × where it started")
    return f"from {before / start:.2g} × the first loss before the spike to {end / start:.2g} ×"


@probe("loss scale")
def loss_scale(make: Subject) -> str:
    def trained(scale: float, dtype: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        p = ones(4, 3, dtype=dtype)
        opt = make([p])
        for _ in range(STEPS):
            make.step(opt, push(p, scale * torch.randn(4, 3).to(dtype)))
        return p.detach() - 1

    for scale in (2.0**40, 2.0**-40):
        if not finite([trained(scale, torch.float32)]):
            raise Failed(f"NaN or infinity with the loss times {scale:.0e}, all gradients finite")
    one, other = trained(1.0, torch.float64), trained(1024.0, torch.float64)
    if (one - other).norm() <= 1e-3 * one.norm():
        return "invariant"
    raise NotApplicable("finite at all scales; not invariant, and not every method claims to be")


@probe("state size")
def state_size(make: Subject) -> str:
    p = ones(64, 64, dtype=torch.float32)
    opt = make([p])
    sizes = []
    for steps in (2, 10):
        repeat(make, opt, pull(p), steps)
        storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in held(opt))}
        sizes.append(sum(storages.values()))
    if sizes[1] > sizes[0]:
        raise Failed(f"its tensors grow from {sizes[0]:,} to {sizes[1]:,} bytes in ten steps")
    return f"{sizes[1] / p.numel():.2g} bytes per parameter"
