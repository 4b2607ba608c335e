"""Sharded parameters on real processes: FSDP2 over gloo, even and uneven shards."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from wngrad import WNAdam, WNGrad, WNMuon, neuron_groups, step_in_backward
from wngrad.conformance.distributed import on_ranks

CASES = {
    "neuron": (WNGrad, {}),
    "neuron-momentum": (WNGrad, {"momentum": 0.9, "weight_decay": 0.1}),
    "neuron-adam": (WNAdam, {"b_init": "gradient", "nonfinite": "skip"}),
    "tensor": (WNGrad, {"per": "tensor"}),
    "model": (WNGrad, {"per": "model", "b_init": "gradient"}),
    "model-adam": (WNAdam, {"per": "model"}),
    "groups": (WNGrad, "groups"),
    "muon": (WNMuon, "model"),
    "finetune": (partial(WNMuon, finetune=True), "model"),
    "average": (WNGrad, {"average": 8.0}),
}


def build() -> nn.Module:
    """Seven rows on two ranks: an uneven cut, and a bias of one element that one rank lacks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 1)).double()


def optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    make, options = CASES[name]
    if options == "groups":
        return make(neuron_groups(model))
    if options == "model":
        return make(model)
    return make(model.parameters(), **options)


def run(name: str, model: nn.Module) -> list[torch.Tensor]:
    """Five steps on fixed batches; returns all parameters, averages and b, whole."""
    opt = optimizer(name, model)
    for seed in range(5):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed)).double()
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    params = list(model.parameters())
    tensors = [p.detach() for p in params]
    if "average" in opt.state[params[0]]:
        with opt.averaged():
            tensors += [p.detach().clone() for p in params]
    tensors += [opt.state[p]["b"] for p in params]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in tensors]


def on_two_ranks() -> dict[str, tuple]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    torch.set_num_threads(1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    results = {}
    for name in CASES:
        model = build()
        plain = [p.detach().clone() for p in run(name, copy.deepcopy(model))]
        fully_shard(model, mesh=mesh)
        sharded = run(name, model)
        opt = optimizer(name, model)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        with CommDebugMode() as mode:
            opt.step()
        results[name] = (plain, sharded, mode.get_total_counts())
    return results


@pytest.fixture(scope="module")
def outcomes():
    return on_ranks(2, on_two_ranks)


@pytest.mark.parametrize("name", CASES)
def test_sharded_training_is_plain_training(outcomes, name):
    """Bit for bit where whole neurons lie on a rank; to float64's rounding where a sum is split."""
    plain, sharded, _ = outcomes[name]
    b_from = len(sharded) - 4  # of four parameters
    for i, (ours, theirs) in enumerate(zip(sharded, plain, strict=True)):
        if name == "neuron" and i >= b_from:
            assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ["neuron", "neuron-momentum", "neuron-adam", "groups", "average"])
def test_a_step_per_neuron_communicates_nothing(outcomes, name):
    assert outcomes[name][2] == 0


@pytest.mark.parametrize("name", ["tensor", "model", "model-adam"])
def test_cut_blocks_cost_one_small_sum_for_the_whole_step(outcomes, name):
    assert outcomes[name][2] == 1


def two_by_two() -> dict:
    """FSDP2 over tensor parallelism, and a partial gradient, on four ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    torch.set_num_threads(1)
    # RowwiseParallel returns a view, of which FSDP2 warns; nothing here writes to it.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    results = {}
    for name in ("neuron", "tensor", "model", "model-adam", "muon", "finetune"):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)).double()
        for p in model.parameters():
            nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
        plain = run(name, copy.deepcopy(model))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp"])
        results[name] = (plain, run(name, model))
    results["partial"] = partial_gradient(mesh["tp"], SequenceParallel, parallelize_module)
    results["refused"] = refusals(mesh["dp"], fully_shard)
    return results


def partial_gradient(mesh, style, parallelize):
    """A replicated LayerNorm whose gradient each rank has a part of."""
    norm, plain = nn.LayerNorm(4).double(), nn.LayerNorm(4).double()
    wrapped = nn.Sequential(norm)
    parallelize(wrapped, mesh, {"0": style()})
    x = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0)).double()
    mine = x.chunk(2, dim=1)[mesh.get_local_rank()]  # a sequence is cut between the ranks
    for model, part in ((wrapped, mine), (plain, x)):
        out = model(part)
        out = out.full_tensor() if hasattr(out, "full_tensor") else out
        (out**3).sum().backward()
        WNGrad(model.parameters()).step()
    return [plain.weight.detach()], [norm.weight.detach().full_tensor()]


def refusals(mesh, shard):
    """What cannot be served is named on every rank, and what one rank sees stops them all."""
    messages = []
    layer = nn.ConvTranspose2d(4, 6, 2)
    shard(layer, mesh=mesh)
    with pytest.raises(ValueError) as info:  # noqa: PT011  (the message is looked at below)
        WNGrad(neuron_groups(layer))
    messages.append(str(info.value))
    layer = nn.Linear(4, 6)
    shard(layer, mesh=mesh)
    opt = WNGrad(layer.parameters(), nonfinite="raise")
    for p in layer.parameters():
        p.grad = torch.ones_like(p)
    if mesh.get_local_rank() == 0:  # one rank of each group
        layer.weight.grad.to_local()[0, 0] = torch.nan
    with pytest.raises(ValueError) as info:  # noqa: PT011
        opt.step()
    messages.append(str(info.value))
    with pytest.raises(ValueError) as info:  # noqa: PT011
        step_in_backward(WNMuon(layer))
    messages.append(str(info.value))
    return messages


@pytest.fixture(scope="module")
def four():
    return on_ranks(4, two_by_two)


@pytest.mark.parametrize(
    "name", ["neuron", "tensor", "model", "model-adam", "muon", "finetune", "partial"]
)
def test_fsdp_over_tensor_parallelism_is_plain_training(four, name):
    plain, sharded = four[name]
    for ours, theirs in zip(sharded, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_what_cannot_be_served_is_said_on_every_rank(four):
    placed, raised, waiting = four["refused"]
    assert "`joint` parameters must be sharded alike" in placed
    assert "`nonfinite` is 'raise'" in raised
    assert "`params` that are orthogonalized must have their matrices whole" in waiting
