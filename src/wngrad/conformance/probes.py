"""The probes: each a question a drop-in optimizer should answer well, in plain code.

A probe takes `make`: `make(params)` is the optimizer, `make.step(opt, closure)` a step in the way
its authors document. It returns None or a measurement for a pass, and raises `Failed` or
`NotApplicable`. Any other exception is a failure too, with the exception as its reason.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import sys
import tempfile
import warnings
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wngrad.conformance.subject import (
    STEPS,
    Failed,
    NotApplicable,
    Subject,
    apart,
    batch,
    copies,
    described,
    differentiated,
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
    unless_refused,
)

# ------------------------------------------------------------------------ first steps


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


# -------------------------------------------------------------------- groups and rates


@probe(
    "lr = 0 group",
    does="Trains two groups, one of them with lr = 0.",
    why="The usual way to freeze a part, and where every warm-up begins.",
    failing="The frozen part moves, or the others do not, or a division by zero.",
)
def lr_zero_group(make: Subject) -> None:
    make.lr()
    still, free = ones(4, 3), ones(4, 3)
    with unless_refused("group"):
        opt = make([{"params": [free]}, {"params": [still], "lr": 0.0}])
    repeat(make, opt, pull(free, still))
    if not torch.equal(still, ones(4, 3)):
        raise Failed("the group with lr = 0 has moved")
    if torch.equal(free, ones(4, 3)):
        raise Failed("the other group does not move")


@probe(
    "per-group lr",
    does="Trains two equal groups, one at a quarter of the other's lr, both lr small.",
    why="Layer-wise rates, heads that learn faster than backbones.",
    failing="The setting is ignored: all layers learn at one rate.",
)
def per_group_lr(make: Subject) -> str:
    lr = make.lr() / 1000  # Where lr is a cap, small enough to be one.
    fast, slow = ones(4, 3), ones(4, 3)
    with unless_refused("lr", "learning rate", "group"):
        opt = make([{"params": [fast], "lr": lr}, {"params": [slow], "lr": lr / 4}])
        repeat(make, opt, pull(fast, slow))
    far, near = (float((1 - p).detach().norm()) for p in (fast, slow))
    if not 0 < near < far:
        raise Failed(f"at a quarter of the lr a group moves {near:.2g}, the other one {far:.2g}")
    return f"a quarter of the lr moves {near / far:.2g} × as far"


@probe(
    "scheduler to 0",
    does="Lets a LinearLR take lr to 0, and trains on.",
    why="Most schedules end there, and lr is written into the group at every step.",
    failing="The last epochs still move the weights, or the step divides by lr.",
)
def scheduler_to_zero(make: Subject) -> None:
    make.lr()
    model = network()
    opt = make(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=4)
    for seed in range(4):
        make.step(opt, batch(model, seed))
        schedule.step()
    before = copies(model.parameters())
    train(make, model, opt, 2, first=4)
    if not all(map(torch.equal, before, model.parameters())):
        raise Failed("the parameters move although the scheduler has taken lr to 0")


@probe(
    "tensor lr",
    does="Gives lr as a tensor, halves it in place, and compares with numbers.",
    why="CUDA graphs and torch.compile change lr that way, without a recompile.",
    failing="A TypeError, or a rate that stays what it was.",
)
def tensor_lr(make: Subject) -> None:
    lr = make.lr()
    p, q = ones(4, 3), ones(4, 3)
    rate = torch.tensor(lr, dtype=torch.float64)
    with unless_refused("lr", "learning rate"):
        opt, other = make([p], lr=rate), make([q])
    for value in (lr, lr / 2):
        other.param_groups[0]["lr"] = value
        opt.param_groups[0]["lr"].fill_(value)
        repeat(make, opt, pull(p))
        repeat(make, other, pull(q))
        if float(opt.param_groups[0]["lr"]) != value:
            raise Failed("a step changes the lr tensor")
    if not finite([p]):
        raise Failed("NaN with a tensor lr")
    if not (p - q).detach().norm() <= 1e-6 * (1 - q).detach().norm():
        raise Failed("a tensor lr gives other steps than the same number")


@probe(
    "late group",
    does="Adds a parameter group after three steps.",
    why="Gradual unfreezing, and networks that grow.",
    failing="A KeyError at the next step, or a group that never moves.",
)
def late_group(make: Subject) -> None:
    first, late = ones(4, 3), ones(4, 3)
    opt = make([first])
    repeat(make, opt, pull(first), 3)
    with unless_refused("group"):
        opt.add_param_group({"params": [late]})
        make.train(opt)
        repeat(make, opt, pull(first, late))
    if torch.equal(late, ones(4, 3)):
        raise Failed("the added group never moves")
    if not finite([first, late]):
        raise Failed("NaN after a group was added")


# ------------------------------------------------------------------------ checkpoints


def _resumed(make: Subject, dtype: torch.dtype) -> None:
    model, other = network(0, dtype), network(7, dtype)
    opt, again = make(model.parameters()), make(other.parameters())
    train(make, model, opt, 8)
    make.load(other, again, make.saved(model, opt))
    train(make, model, opt, 8, first=8)
    train(make, other, again, 8, first=8)
    if not same(model, other):
        raise Failed(f"eight steps after resuming, parameters differ by {apart(model, other)}")
    kept, found = (tree_leaves(o.state_dict()) for o in (opt, again))
    for a, b in zip(kept, found, strict=True):
        if isinstance(a, Tensor) and (a.dtype != b.dtype or not torch.equal(a, b)):
            raise Failed(f"state comes back rounded: {a.dtype} was saved, {b.dtype} is loaded")


@probe(
    "resume",
    does="Saves, loads into a fresh pair with weights_only=True, compares bit for bit.",
    why="Every long run is interrupted.",
    failing="A jump in the loss after a restart: something was not in the state_dict.",
)
def resume(make: Subject) -> None:
    _resumed(make, torch.float32)


@probe(
    "resume in bfloat16",
    does="The same with bfloat16 parameters.",
    why="load_state_dict casts state to the parameter's dtype, unless the optimizer sees to it.",
    failing="Float32 statistics come back rounded to 8 bits.",
)
def resume_bfloat16(make: Subject) -> None:
    _resumed(make, torch.bfloat16)


def _goes_on(make: Subject, model: nn.Module, opt: Any, other: nn.Module, again: Any) -> None:
    train(make, model, opt, 3, first=3)
    train(make, other, again, 3, first=3)
    if not same(model, other):
        raise Failed(f"three steps later its copy is apart by {apart(model, other)}")


@probe(
    "pickle",
    does="Pickles model and optimizer together, and trains both pairs on.",
    why="Spawned workers, Ray, whole-trainer snapshots.",
    failing="A PicklingError, or a copy that goes its own way.",
)
def pickled(make: Subject) -> None:
    model = network()
    opt = make(model.parameters())
    train(make, model, opt, 3)
    _goes_on(make, model, opt, *pickle.loads(pickle.dumps((model, opt))))


@probe(
    "deepcopy",
    does="Deep-copies model and optimizer together, and trains both pairs on.",
    why="Best-so-far snapshots, population training, a look ahead.",
    failing="The copy still moves the original, or has lost its state.",
)
def deepcopied(make: Subject) -> None:
    model = network()
    opt = make(model.parameters())
    train(make, model, opt, 3)
    _goes_on(make, model, opt, *copy.deepcopy((model, opt)))


@probe(
    "mismatched state",
    does="Loads the state of a (1, 3) parameter for a (4, 3) one, and steps.",
    why="The checkpoint of another model must be an error, at the latest at the next step.",
    failing="Shapes broadcast, and training goes on with another layer's statistics.",
)
def mismatched_state(make: Subject) -> str:
    small, large = ones(1, 3), ones(4, 3, value=2.0)
    opt, other = make([small]), make([large])
    repeat(make, opt, pull(small), 2)
    if not held(opt):
        raise NotApplicable("it keeps no state")
    try:
        other.load_state_dict(opt.state_dict())
    except Exception:
        return "refused at the load"
    make.train(other)
    try:
        make.step(other, pull(large))
    except Exception:
        return "refused at the next step"
    raise Failed("state of another shape is accepted, and the next step says nothing")


# ------------------------------------------------------------------- kinds of tensors


@probe(
    "complex",
    does="Minimizes |z|² over complex numbers for twelve steps.",
    why="Signal processing, Fourier layers, quantum circuits.",
    failing="An operation that complex numbers lack, or an imaginary part that stands still.",
)
def complex_parameters(make: Subject) -> None:
    z = nn.Parameter(torch.full((3, 2), 1 + 2j, dtype=torch.complex128))
    start = z.detach().clone()
    with unless_refused("complex"):
        repeat(make, make([z]), pull(z))
    moved = torch.view_as_real(z.detach() - start)
    if not bool((moved < 0).all()):
        raise Failed("real and imaginary parts do not both go downhill")


@probe(
    "sparse",
    does="Trains an embedding with sparse=True.",
    why="Large vocabularies: only the rows of a batch have a gradient.",
    failing="An obscure error, or rows that move without having been looked up.",
)
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


@probe(
    "bfloat16",
    does="Fits a network to one batch in 300 steps in bfloat16, and in float32.",
    why="Models are trained in bfloat16 without a float32 copy of the weights.",
    failing="Steps below half a unit in the last place: it stands still, and nothing says so.",
)
def bfloat16(make: Subject) -> str:
    ends = [_fitted(make, dtype) for dtype in (torch.bfloat16, torch.float32)]
    said = "the loss ends at {:.2g} × its start, in float32 at {:.2g} ×".format(*ends)
    if ends[1] >= 1:
        raise NotApplicable("it does not lower the loss in float32 either")
    if not 1 - ends[0] >= 0.01 * (1 - ends[1]):
        raise Failed(f"it stands still: {said}")
    return said


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


@probe(
    "odd shapes",
    does="Trains a scalar and tensors without elements beside an ordinary one.",
    why="Temperatures and gates are scalars; sharding leaves empty pieces on some ranks.",
    failing="An index error, or a norm of nothing that turns into NaN.",
)
def odd_shapes(make: Subject) -> None:
    params = [ones(), ones(0, 3), ones(3, 0), ones(2, 2)]
    repeat(make, make(params), pull(*params))
    if not finite(params):
        raise Failed("NaN beside a tensor without elements")
    if torch.equal(params[0], ones()) or torch.equal(params[3], ones(2, 2)):
        raise Failed("a scalar, or the tensor beside it, does not move")


@probe(
    "memory layouts",
    does="Trains a channels-last and a transposed parameter beside contiguous ones.",
    why="channels_last convolutions, tied and transposed weights.",
    failing="An error from view(), or state that is laid out another way than its parameter.",
)
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


# ------------------------------------------------------------------- fast and compiled


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the numbers read that depend on parameters: on a GPU each one waits for the device.

    Numbers that depend on no parameter, such as a step count, may live on the host.
    """

    def __init__(self, sources: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0
        self.kept = [p.untyped_storage() for p in sources]  # alive, so that no address comes twice
        self.marked = {s.data_ptr() for s in self.kept}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if any(t.untyped_storage().data_ptr() in self.marked for t in given):
            self.count += func in _READS
            # What an operation writes to are its results and, without results, its arguments.
            for t in tree_leaves(out if out is not None else args):
                if isinstance(t, Tensor):
                    self.kept.append(t.untyped_storage())
                    self.marked.add(self.kept[-1].data_ptr())
        return out


_READS = (
    torch.ops.aten._local_scalar_dense.default,  # item(), float(), bool(), if
    torch.ops.aten.nonzero.default,  # and masks as indices
    torch.ops.aten.masked_select.default,
)


@probe(
    "host waits",
    does="Counts in a later step the reads, such as item(), of numbers that depend on parameters.",
    why="On a GPU each one waits for the device, and none is allowed in a CUDA graph.",
    failing="A GPU that idles at every step; capturing a CUDA graph fails.",
)
def host_waits(make: Subject) -> str:
    model = network()
    opt = make(model.parameters())
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


@probe(
    "compile",
    does="Compiles the step, counts graphs made after the eighth step, compares with eager.",
    why="A compiled step is one kernel instead of hundreds.",
    failing="A recompile at every step, then silently eager; or other numbers.",
)
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


@probe(
    "GradScaler",
    does="Trains under GradScaler with one overflow, and beside it without both.",
    why="Mixed precision with float16: steps with an overflow are skipped.",
    failing="The skipped step moves the parameters, or counts.",
)
def grad_scaler(make: Subject) -> None:
    if make.takes == "closure":
        raise NotApplicable("GradScaler takes no closures, and it needs one")
    model, twin = network(), network()
    opt, other = make(model.parameters()), make(twin.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))  # makes its scale
    for seed in range(6):
        loss = batch(model, seed, scale=float(scaler.get_scale()))()
        if seed == 3:
            next(model.parameters()).grad[0] = torch.inf  # type: ignore[index]
        extra = {"loss": loss / scaler.get_scale()} if make.takes == "loss" else {}
        scaler.step(opt, **extra)
        scaler.update()
        if seed != 3:
            make.step(other, batch(twin, seed))
    if not same(model, twin):
        raise Failed(f"it is not the run without GradScaler, by {apart(model, twin)}")


# --------------------------------------------------------------------- bad gradients


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
