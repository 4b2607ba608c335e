"""Fast and compiled: nothing waits, nothing is compiled twice."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wngrad.conformance.compare import apart, same
from wngrad.conformance.registry import probe
from wngrad.conformance.subject import Subject
from wngrad.conformance.training import STEPS, batch, fresh, pull
from wngrad.conformance.verdicts import Failed, NotApplicable


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers read that depend on parameters: on a GPU each one waits for the device.

    Numbers that depend on no parameter, such as a step count, may live on the host.
    """

    def __init__(self, sources: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.alive = [p.untyped_storage() for p in sources]  # so that no address comes twice
        self.marked = {s.data_ptr() for s in self.alive}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(t.untyped_storage().data_ptr() in self.marked for t in given):
            self.count += func in _READS
            # What an operation writes to are its results and, without results, its arguments.
            for t in tree_leaves(out if out is not None else args):
                if isinstance(t, Tensor):
                    self.alive.append(t.untyped_storage())
                    self.marked.add(self.alive[-1].data_ptr())
        return out


_READS = (
    torch.ops.aten._local_scalar_dense.default,  # item(), float(), bool(), if
    torch.ops.aten.nonzero.default,  # and masks as indices
    torch.ops.aten.masked_select.default,
)


@probe("host waits")
def host_waits(make: Subject) -> str:
    model, opt = fresh(make)
    waits = 0
    with _Reads(list(model.parameters())) as reads:
        for seed in range(4):
            loss = batch(model, seed)()
            before = reads.count
            make.step(opt, lambda loss=loss: loss)  # type: ignore[misc]
            waits = reads.count - before
    if waits:
        tensors = len(list(model.parameters()))
        raise Failed(f"reads that wait for the device: {waits} in a step, with {tensors} tensors")
    return "none"


@probe("compile")
def compiled(make: Subject) -> str:
    made_graphs = 0

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        nonlocal made_graphs
        made_graphs += 1
        return graph.forward

    p, q = (nn.Parameter(torch.linspace(0.5, 1.5, 12).view(4, 3)) for _ in range(2))
    opt, other = make([p]), make([q])
    start, graphs = p.detach().clone(), []
    torch._dynamo.reset()
    unlimited = torch._dynamo.config.patch(recompile_limit=1000)  # It gives up after eight.
    with unlimited, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = torch.compile(lambda loss: make.step(opt, lambda: loss), backend=counting)
        for _ in range(STEPS):
            step(pull(p)())
            make.step(other, pull(q))
            graphs.append(made_graphs)
    torch._dynamo.reset()
    if not graphs[-1]:
        raise Failed("no graph is made: the whole step stays as it was")
    if graphs[-1] > graphs[7]:
        raise Failed(f"{graphs[-1] - graphs[7]} graphs are made anew in steps 9 to {STEPS}")
    far = float((p - q).detach().norm())
    moved = float((q - start).detach().norm())
    if not far <= 0.01 * moved:  # Counts and corrections may be float32 when compiled.
        raise Failed(f"compiled, parameters that should have moved {moved:.2g} are {far:.2g} off")
    return f"graphs made: {graphs[-1]}"


@probe("GradScaler")
def grad_scaler(make: Subject) -> None:
    if make.takes == "closure":
        raise NotApplicable("GradScaler takes no closures, and it needs one")
    (model, opt), (twin, other) = fresh(make), fresh(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))  # makes its scale
    for seed in range(6):
        loss = batch(model, seed, scale=float(scaler.get_scale()))()
        if seed == 3:
            next(model.parameters()).grad[0] = torch.inf
        extra = {"loss": loss / scaler.get_scale()} if make.takes == "loss" else {}
        scaler.step(opt, **extra)
        scaler.update()
        if seed != 3:
            make.step(other, batch(twin, seed))
    if not same(model, twin):
        raise Failed(f"it is not the run without GradScaler, by {apart(model, twin)}")
