"""Real processes over gloo: every way torch shards a model, and checkpoints that change ranks.

The oracle of a step is the step on the whole: the gradients of all shards put together, given to a
plain optimizer of plain parameters. It holds whatever made the gradients.
"""

from __future__ import annotations

import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from wngrad import WNAdam, WNGrad, WNMuon, neuron_groups

pytestmark = pytest.mark.integrations

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "neuron": lambda p: WNGrad(p, weight_decay=0.1),
    "neuron-momentum": lambda p: WNGrad(p, momentum=0.9, decoupled_weight_decay=True),
    "neuron-adam-gradient": lambda p: WNAdam(p, b_init="gradient", nonfinite="skip"),
    "slice": lambda p: WNGrad(p, per="slice"),
    "tensor": lambda p: WNGrad(p, per="tensor"),
    "tensor-adam": lambda p: WNAdam(p, per="tensor"),
    "model": lambda p: WNGrad(p, per="model", b_init="gradient"),
    "model-momentum": lambda p: WNGrad(p, per="model", momentum=0.9),
    "muon": WNMuon,
}
LOCAL = ("neuron", "neuron-momentum", "neuron-adam-gradient", "slice")  # need no collective


class Net(nn.Module):
    """A convolution, an embedding, layers of odd sizes and a bias of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.conv = nn.Conv1d(6, 5, 3, padding=1)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.embed(x).mT).relu().mT
        return self.head(self.norm(h)).mean((1, 2))


class Mlp(nn.Module):
    """For tensor parallelism: one layer cut by rows, the next by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean(1)


def built(kind: type[nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return kind().to(dtype)


def batch(kind: type[nn.Module], step: int, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(step)
    if kind is Net:
        return torch.randint(11, (8, 7), generator=g)
    return torch.randn(8, 6, generator=g).to(dtype)


# ------------------------------------------------------------------ processes


def spawned(work: Callable[..., Any], world: int, folder: Path, *args: Any) -> list[Any]:
    """What `work(rank, *args)` returns on every rank; a rank that hangs or raises is a failure."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    context = mp.spawn(_rank, (work, world, port, str(folder), args), nprocs=world, join=False)
    for process in context.processes:
        process.join(timeout=120)
    hung = [k for k, process in enumerate(context.processes) if process.is_alive()]
    for process in context.processes:
        process.kill()
    assert not hung, f"ranks {hung} hang"
    found = [torch.load(folder / f"rank{k}.pt", weights_only=False) for k in range(world)]
    for k, (ok, value) in enumerate(found):
        assert ok, f"rank {k}: {value}"
    return [value for _, value in found]


def _rank(rank: int, work: Any, world: int, port: int, folder: str, args: Any) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        result = (True, work(rank, *args))
    except BaseException:
        result = (False, traceback.format_exc())
    torch.save(result, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def whole(t: Tensor) -> Tensor:
    t = t.full_tensor() if hasattr(t, "full_tensor") else t
    return t.detach().clone()


# ---------------------------------------------------------- the step on shards


def compare(model: nn.Module, kind: type[nn.Module], name: str, dtype: torch.dtype) -> Any:
    """Three steps with the gradients of real backward passes, beside the step on the whole.

    Returns the largest difference of any parameter and b, whether every b is the same to the bit,
    and how many collectives a step took.
    """
    from torch.distributed.tensor.debug import CommDebugMode

    opt = OPTIMIZERS[name](model.parameters())
    params = list(model.parameters())
    plain = [nn.Parameter(whole(p)) for p in params]
    reference = OPTIMIZERS[name](plain)
    counts = []
    for step in range(3):
        opt.zero_grad()
        model(batch(kind, step, dtype)).sum().backward()
        for p, q in zip(params, plain, strict=True):
            q.grad = whole(p.grad)
        with CommDebugMode() as mode:
            opt.step()
        reference.step()
        counts.append(mode.get_total_counts())
    pairs = [(whole(p), q.detach()) for p, q in zip(params, plain, strict=True)]
    bs = [
        (whole(opt.state[p]["b"]), reference.state[q]["b"])
        for p, q in zip(params, plain, strict=True)
    ]
    far = max(float((a.double() - b.double()).abs().max()) for a, b in (*pairs, *bs))
    return far, all(torch.equal(a, b) for a, b in bs), max(counts)


def wrapped(how: str, world: int) -> tuple[nn.Module, type[nn.Module], torch.dtype]:
    """A model sharded in one of the ways there are."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.nn.parallel import DistributedDataParallel

    kind: type[nn.Module] = Mlp if how in ("tp", "tp-fsdp") else Net
    dtype = torch.float32 if how == "mixed" else torch.float64
    model = built(kind, dtype)
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if how == "ddp":
        return DistributedDataParallel(model), kind, dtype
    if how == "tp":
        return parallelize_module(model, init_device_mesh("cpu", (world,)), plan), kind, dtype
    if how == "tp-fsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], plan)
        return fully_shard(model, mesh=mesh["dp"]), kind, dtype
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (world,))}
    if how == "hsdp":
        options["mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("r", "s"))
    if how == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if how == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if how == "nested":
        for layer in (model.conv, model.head):
            fully_shard(layer, **options)
    return fully_shard(model, **options), kind, dtype


def compare_(how: str, name: str) -> Any:
    model, kind, dtype = wrapped(how, dist.get_world_size())
    return compare(model, kind, name, dtype)


def ways_worker(rank: int, ways: list[str]) -> dict[tuple[str, str], Any]:
    return {(how, name): compare_(how, name) for how in ways for name in OPTIMIZERS}


WAYS = {2: ["ddp", "fsdp", "nested", "mixed", "offload", "tp"], 4: ["fsdp", "hsdp", "tp-fsdp"]}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str, str], Any]:
    found = {}
    for world, ways in WAYS.items():
        ranks = spawned(ways_worker, world, tmp_path_factory.mktemp("ranks"), ways)
        for (how, name), _ in ranks[0].items():
            found[world, how, name] = [rank[how, name] for rank in ranks]
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("world", "how"), [(w, how) for w, ways in WAYS.items() for how in ways])
def test_a_step_on_shards_is_the_step_on_the_whole(steps, world, how, name):
    for far, same_b, collectives in steps[world, how, name]:
        assert far < (1e-5 if how == "mixed" else 1e-12)
        by_rows = how not in ("tp", "tp-fsdp")  # there a layer is cut through its neurons
        if name in LOCAL and by_rows:
            assert same_b
            assert collectives == 0
        else:
            # One small sum for each set of ranks that cuts a block: tensor parallelism and FSDP2
            # together cut some blocks along the one mesh, some along both.
            sums = 4 if how == "tp-fsdp" else 1
            # Orthogonalized matrices take four messages, however many there are; under FSDP2 over
            # tensor parallelism they are cut in two ways, each along both dimensions of the mesh.
            muon = (12 if how == "tp-fsdp" else 4) if name == "muon" else 0
            assert collectives <= sums + muon


# ------------------------------------------------------------------ checkpoints


def gradients(model: nn.Module, step: int) -> None:
    """The same gradients for any number of ranks, dealt out as the parameters are."""
    from torch.distributed.tensor import distribute_tensor

    g = torch.Generator().manual_seed(100 + step)
    for p in model.parameters():
        full = torch.randn(p.shape, generator=g, dtype=p.dtype)
        if hasattr(p, "placements"):
            p.grad = distribute_tensor(full, p.device_mesh, p.placements)
        else:
            p.grad = full


def train(model: nn.Module, opt: torch.optim.Optimizer, start: int, stop: int) -> None:
    for step in range(start, stop):
        gradients(model, step)
        opt.step()


def sharded_net(seed: int) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    model = built(Net)
    if seed:
        for p in model.parameters():
            nn.init.normal_(p, generator=torch.Generator().manual_seed(seed))
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def saves(rank: int, name: str, folder: str) -> list[Tensor]:
    model = sharded_net(0)
    opt = OPTIMIZERS[name](model.parameters())
    train(model, opt, 0, 4)
    weights, state = get_state_dict(model, opt)
    dcp.save({"model": weights, "opt": state}, checkpoint_id=f"{folder}/{name}")
    train(model, opt, 4, 8)
    return end(model, opt)


def loads(rank: int, name: str, folder: str) -> list[Tensor]:
    model = sharded_net(7)  # other weights: all that follows must come from the file
    opt = OPTIMIZERS[name](model.parameters())
    weights, state = get_state_dict(model, opt)
    both = {"model": weights, "opt": state}
    dcp.load(both, checkpoint_id=f"{folder}/{name}")
    set_state_dict(model, opt, model_state_dict=both["model"], optim_state_dict=both["opt"])
    train(model, opt, 4, 8)
    return end(model, opt)


def end(model: nn.Module, opt: torch.optim.Optimizer) -> list[Tensor]:
    params = list(model.parameters())
    state = [opt.state[p][key] for p in params for key in sorted(opt.state[p])]
    return [whole(t) for t in (*params, *state)]


def all_of(rank: int, work: Callable[..., Any], folder: str) -> dict[str, list[Tensor]]:
    return {name: work(rank, name, folder) for name in OPTIMIZERS}


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, list[Tensor]]]:
    """Saved on two ranks at step 4; then on two, four and one rank from there to step 8."""
    folder = tmp_path_factory.mktemp("checkpoint")

    def run(work: Any, world: int) -> dict[str, list[Tensor]]:
        return spawned(all_of, world, tmp_path_factory.mktemp("r"), work, str(folder))[0]

    return {0: run(saves, 2), 2: run(loads, 2), 4: run(loads, 4), 1: run(loads, 1)}


@pytest.mark.parametrize("world", [2, 4, 1])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_distributed_checkpoint_goes_on_exactly_on_any_number_of_ranks(resumed, world, name):
    for ours, theirs in zip(resumed[world][name], resumed[0][name], strict=True):
        if name in LOCAL or world == 2:
            assert torch.equal(ours, theirs)
        else:  # a norm summed over other parts
            torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-15)


# -------------------------------------------------------------------- bad use


def bad_use(rank: int) -> dict[str, str]:
    """Messages, the same on every rank; whoever cannot raise it would hang here."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    said = {}

    def note(name: str, work: Callable[[], Any]) -> None:
        try:
            work()
            said[name] = "nothing"
        except ValueError as error:
            said[name] = str(error)
        dist.barrier()

    odd = nn.Parameter(distribute_tensor(torch.randn(4, 6), mesh, [Shard(1)]))
    note("a block cut apart", lambda: WNGrad([odd], per=[(4, 3)]))
    partial = torch.zeros(2, 2)
    from torch.distributed.tensor import DTensor

    part = nn.Parameter(DTensor.from_local(partial, mesh, [Partial()]))
    note("a partial parameter", lambda: WNGrad([part]))
    layer = nn.ConvTranspose2d(4, 6, 2)
    fully_shard(layer, mesh=mesh)
    note("relatives on other ranks", lambda: WNGrad(neuron_groups(layer)))

    small, large = nn.Linear(3, 4), nn.Linear(3, 5)
    for m in (small, large):
        fully_shard(m, mesh=mesh)
    opts = [WNGrad(m.parameters(), momentum=0.9) for m in (small, large)]
    for m, opt in zip((small, large), opts, strict=True):
        gradients(m, 0)
        opt.step()
    note("a checkpoint of another model", lambda: opts[0].load_state_dict(opts[1].state_dict()))
    lacking = opts[0].state_dict()
    for state in lacking["state"].values():
        del state["b"]
    note("a group without its b", lambda: opts[0].load_state_dict(lacking))
    strict = WNGrad(small.parameters(), nonfinite="raise")
    gradients(small, 0)
    if rank == 0:
        small.weight.grad.to_local()[0, 0] = torch.nan
    before = [whole(p) for p in small.parameters()]
    note("one rank's NaN", strict.step)
    assert all(map(torch.equal, before, [whole(p) for p in small.parameters()]))
    return said


def test_bad_use_is_named_on_every_rank_and_none_hangs(tmp_path):
    ranks = spawned(bad_use, 2, tmp_path)
    assert ranks[0] == ranks[1]
    rules = {
        "a block cut apart": "`params` placed as",
        "a partial parameter": "`params` placed as",
        "relatives on other ranks": "`joint` parameters must be sharded alike",
        "a checkpoint of another model": "`state_dict` must fit the parameters",
        "a group without its b": "`state_dict` must hold `b`",
        "one rank's NaN": "`nonfinite` is 'raise'",
    }
    for name, said in ranks[0].items():
        assert said.startswith("WNGrad: "), (name, said)
        assert rules[name] in said, (name, said)
