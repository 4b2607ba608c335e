"""First steps: a network trains, and nothing that is not the optimizer's is touched."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from wngrad.conformance.subject import (
    STEPS,
    Failed,
    Subject,
    apart,
    batch,
    copies,
    described,
    finite,
    network,
    ones,
    probe,
    pull,
    repeat,
    same,
    train,
)


@probe(
    "made",
    does="Imports it, makes it from a network's parameters and takes twelve steps.",
    why="Everything else needs it; where it fails, nothing else is asked.",
    failing="An ImportError, a missing argument, NaN, or parameters that do not move.",
)
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


@probe(
    "quiet",
    does="Listens to stdout and stderr while it is made, also with weight decay, and steps.",
    why="Output of a library belongs to `logging` and `warnings`, where a user can filter it.",
    failing="A line in every log, times every rank.",
)
def quiet(make: Subject) -> None:
    with tempfile.TemporaryFile() as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.stdout.flush()
        sys.stderr.flush()
        kept = os.dup(1), os.dup(2)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        try:
            for options in make.options():
                model = network()
                train(make, model, make(model.parameters(), **options), 3)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for fd, old in enumerate(kept, start=1):
                os.dup2(old, fd)
                os.close(old)
        file.seek(0)
        said = file.read(200).decode(errors="replace").strip()
    if said:
        raise Failed(f"it prints {said.splitlines()[0]!r}")


@probe(
    "unused parameters",
    does="Gives it a parameter that has no gradient for two steps, and then has one.",
    why="Frozen layers, layers thawed later, branches that a batch does not take.",
    failing="An error about None, a frozen layer that drifts, a thawed one that never moves.",
)
def unused_parameters(make: Subject) -> None:
    model, late = network(), ones(3, 2)
    opt = make([*model.parameters(), late])
    train(make, model, opt, 2)
    if not torch.equal(late, ones(3, 2)):
        raise Failed("a parameter without a gradient has moved")
    repeat(make, opt, pull(late, *model.parameters()))
    if torch.equal(late, ones(3, 2)):
        raise Failed("a parameter whose first gradient comes late never moves")


@probe(
    "gradients untouched",
    does="Compares every gradient with itself after a step, also with weight decay.",
    why="Gradients are logged, clipped, accumulated and reused by others after a step.",
    failing="Gradient norms in a log that are something else; accumulation that goes wrong.",
)
def gradients_untouched(make: Subject) -> None:
    model = network()
    before: list[Tensor] = []

    def watched() -> Tensor:
        loss = batch(model, 2)()
        before[:] = copies(p.grad for p in model.parameters() if p.grad is not None)
        return loss

    for options in make.options():
        opt = make(model.parameters(), **options)
        train(make, model, opt, 2)
        make.step(opt, watched)
        for p, g in zip(model.parameters(), before, strict=True):
            if p.grad is None or not torch.equal(p.grad, g):
                raise Failed(f"a step writes into p.grad{' with weight decay' * bool(options)}")


@probe(
    "zero first gradient",
    does="Lets the first gradients be zero, and then trains.",
    why="Dead units, masked losses; distributed checkpoints are loaded after such a step.",
    failing="A division by zero, NaN, or a run that never starts.",
)
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


@probe(
    "closure",
    does="Steps with a closure, and beside it without one.",
    why="Line searches, and trainers that always pass a closure.",
    failing="A loss of None, a batch that is counted twice, other parameters than without.",
)
def closure_semantics(make: Subject) -> None:
    model, twin = network(), network()
    opt, other = make(model.parameters()), make(twin.parameters())
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


@probe(
    "autograd mode after an error",
    does="Lets the closure, then each tensor operation of a step fail, and looks at grad mode.",
    why="Notebooks, out-of-memory handlers and trainers go on after an exception.",
    failing="`loss.backward()` says that no tensor requires a gradient, far from the cause.",
)
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
