"""First steps: a network trains, and nothing that is not the optimizer's is touched."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from wngrad.conformance.compare import apart, copies, finite, same
from wngrad.conformance.registry import probe
from wngrad.conformance.subject import Subject
from wngrad.conformance.training import STEPS, batch, fresh, network, ones, pull, repeat, train
from wngrad.conformance.verdicts import Failed, described


@probe("made")
def made(make: Subject) -> None:
    model = network()
    try:
        opt = make(model.parameters())
    except Exception as error:
        raise Failed(f"cannot be made: {described(error)}") from error
    before = copies(model.parameters())
    train(make, model, opt, STEPS)
    if not finite(model.parameters()):
        raise Failed(f"the parameters are not finite after {STEPS} steps")
    if all(map(torch.equal, before, model.parameters())):
        raise Failed(f"no parameter has moved after {STEPS} steps")


@probe("quiet")
def quiet(make: Subject) -> None:
    with tempfile.TemporaryFile() as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.stdout.flush()
        sys.stderr.flush()
        terminal = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            for options in make.options():
                model = network()
                train(make, model, make(model.parameters(), **options), 3)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, old in enumerate(terminal, start=1):
                os.dup2(old, fd)
                os.close(old)
        file.seek(0)
        output = file.read(200).decode(errors="replace").strip()
    if output:
        raise Failed(f"it prints {output.splitlines()[0]!r}")


@probe("unused parameters")
def unused_parameters(make: Subject) -> None:
    model, late = network(), ones(3, 2)
    opt = make([*model.parameters(), late])
    train(make, model, opt, 2)
    if not torch.equal(late, ones(3, 2)):
        raise Failed("a parameter without a gradient has moved")
    repeat(make, opt, pull(late, *model.parameters()))
    if torch.equal(late, ones(3, 2)):
        raise Failed("a parameter whose first gradient comes late never moves")


@probe("gradients untouched")
def gradients_untouched(make: Subject) -> None:
    before: list[Tensor] = []

    def watched(model: nn.Module, scale: float) -> Tensor:
        loss = batch(model, 2, scale)()
        before[:] = copies(p.grad for p in model.parameters() if p.grad is not None)
        return loss

    for options, scale in product(make.options(), (1.0, 1e4)):  # the latter for those who clip
        model = network()
        opt = make(model.parameters(), **options)
        train(make, model, opt, 2)
        make.step(opt, partial(watched, model, scale))
        for p, g in zip(model.parameters(), before, strict=True):
            if p.grad is None or not torch.equal(p.grad, g):
                how = " with weight decay" * bool(options) + " if gradients are large" * (scale > 1)
                raise Failed(f"a step writes into p.grad{how}")


@probe("zero first gradient")
def zero_first_gradient(make: Subject) -> None:
    p = ones(4, 3)
    opt = make([p])
    make.step(opt, pull(p, weights=0.0))
    before = copies([p])
    repeat(make, opt, pull(p))
    if not finite([p]):
        raise Failed("NaN after a first gradient of zero")
    if torch.equal(p, before[0]):
        raise Failed("never moves after a first gradient of zero")


@probe("closure")
def closure_semantics(make: Subject) -> None:
    (model, opt), (twin, other) = fresh(make), fresh(make)
    calls: list[tuple[bool, float]] = []

    def closure() -> Tensor:
        enabled, loss = torch.is_grad_enabled(), batch(model, 0)()
        calls.append((enabled, float(loss)))
        return loss

    loss = opt.step(closure)
    if not calls:
        raise Failed("the closure is not called")
    if not all(enabled for enabled, _ in calls):
        raise Failed("the closure is called with gradients off")
    if loss is None or float(loss) != calls[0][1]:
        raise Failed(f"step returns {loss!r} where the closure returned {calls[0][1]:.4g}")
    if make.takes == "closure":
        return  # As often as it likes, and there is no step without.
    if len(calls) > 1:
        raise Failed(f"the closure is called {len(calls)} times")
    make.step(other, batch(twin, 0))
    if not same(model, twin):
        raise Failed(f"a step with a closure is another one than without, by {apart(model, twin)}")


class _FaultAt(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets the n-th tensor operation fail."""

    def __init__(self, n: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.left = n

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            raise MemoryError("injected")
        return func(*args, **(kwargs or {}))


@probe("autograd mode after an error")
def autograd_mode(make: Subject) -> None:
    p = ones(4, 3)
    opt = make([p])
    make.step(opt, pull(p))

    def broken() -> Tensor:
        raise MemoryError("injected")

    try:
        for n in range(41):  # the 0th fault is the closure's
            try:
                if n == 0:
                    opt.step(broken)
                else:
                    loss = pull(p)()
                    with _FaultAt(n):
                        make.step(opt, lambda loss=loss: loss)  # type: ignore[misc]
            except MemoryError:
                pass
            if not torch.is_grad_enabled():
                raise Failed("gradients stay off after a step that raised")
    finally:
        torch.set_grad_enabled(True)
