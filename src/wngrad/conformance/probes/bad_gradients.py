"""Bad gradients: NaN, spikes and scales; and what state costs."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn

from wngrad.conformance.subject import (
    STEPS,
    Failed,
    NotApplicable,
    Subject,
    batch,
    copies,
    finite,
    held,
    network,
    ones,
    probe,
    pull,
    push,
    repeat,
    same,
    train,
)


def _nan_step(make: Subject, model: nn.Module, opt: Any) -> None:
    closure = batch(model, 3)

    def poisoned() -> Tensor:
        loss = closure()
        next(model.parameters()).grad[0, 0, 0, 0] = torch.nan  # type: ignore[index]
        return loss

    make.step(opt, poisoned)


@probe(
    "NaN gradient",
    does="Puts one NaN into one gradient, and trains on.",
    why="It must show: as NaN in the parameters, as an error, or as a step that is left out.",
    failing="All looks well, and some steps later all is NaN, or a layer stands still for ever.",
)
def nan_gradient(make: Subject) -> str:
    model, twin = network(), network()
    opt, other = make(model.parameters()), make(twin.parameters())
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
    for mine, others in zip(stood, stood[len(stood) // 2 :], strict=False):
        if bool((mine & ~others).any()):
            raise Failed("the parameters look well after the NaN, and some never move again")
    return "the step is left out" if same(model, twin) else "goes on"


@probe(
    "rollback after NaN",
    does="After a NaN gradient, loads an earlier checkpoint into the same objects, compares.",
    why="Trainers that notice a bad step go back to the last good one.",
    failing="What is kept outside the state_dict stays poisoned.",
)
def rollback(make: Subject) -> None:
    model, twin = (network(dtype=torch.float32) for _ in range(2))
    opt, other = make(model.parameters()), make(twin.parameters())
    train(make, model, opt, 3)
    train(make, twin, other, 3)
    checkpoint = make.saved(model, opt)
    make.saved(twin, other)  # Going to eval() and back may round, so both do.
    with contextlib.suppress(Exception):  # It is told; now it is taken back.
        _nan_step(make, model, opt)
    make.load(model, opt, checkpoint)
    train(make, model, opt, 5, first=3)
    train(make, twin, other, 5, first=3)
    if not same(model, twin):
        raise Failed("after the rollback it is not the run without the NaN")


@probe(
    "gradient spike",
    does="On a quadratic, multiplies one gradient by a million at step 20, trains 500 steps more.",
    why="One bad batch must not cost the run: it may not end worse than it started.",
    failing="The loss jumps, and stays above where training began.",
)
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


@probe(
    "loss scale",
    does="Multiplies loss and gradients by 2¹⁰ and compares; by 2⁴⁰ and 2⁻⁴⁰ in float32.",
    why="Sums or means over a batch, loss scaling: does lr mean the same?",
    failing="NaN from an overflow or a division by zero where all gradients are finite.",
)
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


@probe(
    "state size",
    does="Weighs all tensors it holds for a 64 × 64 weight in float32, after 2 and after 12 steps.",
    why="Optimizer state is often the largest thing in memory.",
    failing="State that grows with every step.",
)
def state_size(make: Subject) -> str:
    p = ones(64, 64, dtype=torch.float32)
    opt = make([p])
    sizes = []
    for steps in (2, 10):
        repeat(make, opt, pull(p), steps)
        pieces = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held(opt)}
        sizes.append(sum(pieces.values()))
    if sizes[1] > sizes[0]:
        raise Failed(f"its tensors grow from {sizes[0]:,} to {sizes[1]:,} bytes in ten steps")
    return f"{sizes[1] / p.numel():.2g} bytes per parameter"
