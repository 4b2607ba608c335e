"""A step inside backward: bit for bit the ordinary loop, without the gradients of the whole."""

from __future__ import annotations

import copy
import gc
import json
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import release

from conftest import TABLE, same, same_state
from wngrad import WNAdam, WNGrad, WNMuon, neuron_groups, step_in_backward
from wngrad.conformance.distributed import on_ranks
from wngrad.optim.report import SmallRateWarning

ROWS = [row for row in TABLE if row.options.get("per") != "model"]
every_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 9), nn.Tanh(), nn.Linear(9, 9), nn.ReLU(), nn.Linear(9, 4))


def convnet() -> nn.Sequential:
    conv = nn.Conv2d(2, 3, 3, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4))


NETWORKS = {"mlp": lambda: nn.Sequential(nn.Flatten(), mlp()), "convnet": convnet}


class Tied(nn.Module):
    """A weight used twice, one that is never used, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.unused, self.frozen = (nn.Linear(4, 4) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.shared(self.frozen(self.shared(x.flatten(1)[:, :4]).tanh()))


def loss(model: nn.Module, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    x, y = torch.randn(8, 2, 4, 4, generator=draw), torch.randint(4, (8,), generator=draw)
    p = next(model.parameters())
    return nn.functional.cross_entropy(model(x.to(p.device, p.dtype)), y.to(p.device))


def loop(model, opt, steps: int = 4, first: int = 0, schedule=None) -> None:
    """The training loop, the same for both."""
    for seed in range(first, first + steps):
        opt.zero_grad()
        loss(model, seed).backward()
        opt.step()
        if schedule is not None:
            schedule.step()


def pair(make_model, make, **options):
    """Twin models, an optimizer for each."""
    model = make_model()
    twin = copy.deepcopy(model)
    return (model, make(model.parameters(), **options)), (twin, make(twin.parameters(), **options))


def equal(a, b) -> bool:
    """Parameters and state, bit for bit."""
    return same(a[0], b[0]) and same_state(a[1], b[1])


# -------------------------------------------------------------------- edited groups


def two_groups(rates=(0.5, 0.1)):
    """Two layers in groups of their own, with λ of their own."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [{"params": [layer.weight], "lr": lr} for layer, lr in zip(model, rates, strict=True)]
    return model, WNGrad(groups, per="tensor")


@pytest.mark.parametrize("single", [False, True])
def test_a_group_that_is_removed_is_left_alone_and_the_others_keep_their_rates(single):
    def one_step(released):
        torch.manual_seed(0)
        model, opt = two_groups()
        with step_in_backward(opt) if released and not single else nullcontext():
            for _ in range(2):
                opt.zero_grad()
                model(torch.ones(1, 3)).square().sum().backward()
                if released and single:
                    for group in opt.param_groups:
                        opt.step_parameter(group["params"][0], group, 0)
                elif not released:
                    opt.step()
                opt.param_groups[:] = opt.param_groups[-1:]
        return model

    assert same(one_step(False), one_step(True))


def test_a_parameter_that_takes_another_s_place_is_stepped_in_its_stead():
    _, opt = two_groups()
    group, new = opt.param_groups[0], nn.Parameter(torch.ones(4, 3))
    old = group["params"][0]
    for p in (old, new):
        p.grad = torch.ones_like(p)
    opt.step_parameter(old, group, 0)
    before = old.detach().clone()
    group["params"][0] = new
    opt.step_parameter(new, group, 0)
    assert torch.equal(old, before)
    assert not torch.equal(new, torch.ones_like(new))


def test_no_step_is_taken_inside_backward_within_averaged():
    model = nn.Linear(3, 2)
    opt = WNMuon(model)
    with step_in_backward(opt):
        model(torch.ones(1, 3)).sum().backward()
        before = copy.deepcopy(opt.state_dict())
        with opt.averaged(), pytest.raises(RuntimeError, match="must not be taken within"):
            model(torch.ones(1, 3)).sum().backward()
        assert all(
            torch.equal(value, before["state"][i][key])
            for i, state in opt.state_dict()["state"].items()
            for key, value in state.items()
        )
        model(torch.ones(1, 3)).sum().backward()  # and afterwards steps are taken again


# -------------------------------------------------------------------- the ordinary loop


@every_row
@pytest.mark.parametrize("network", NETWORKS)
def test_the_released_loop_is_the_ordinary_one(row, network):
    a, b = pair(NETWORKS[network], row)
    loop(*a)
    with step_in_backward(b[1]):
        loop(*b)
    assert equal(a, b)


@every_row
def test_backward_takes_the_whole_step_and_leaves_no_gradient(row):
    a, b = pair(convnet, row)
    loop(*a, steps=1)
    with step_in_backward(b[1]):
        loss(b[0], 0).backward()
    assert all(p.grad is None for p in b[0].parameters())
    assert equal(a, b)


@every_row
def test_tied_unused_and_frozen_parameters_are_as_in_the_ordinary_loop(row):
    a, b = pair(Tied, row)
    loop(*a)
    with step_in_backward(b[1]):
        loop(*b)
    assert equal(a, b)
    assert b[0].unused.weight not in b[1].state


@pytest.mark.parametrize("options", [{"lr": torch.tensor(0.5)}, {"maximize": True}, {"lr": 0.0}])
def test_settings_are_read_as_in_the_ordinary_loop(options):
    a, b = pair(convnet, WNAdam, **options)
    loop(*a)
    with step_in_backward(b[1]):
        loop(*b)
    assert equal(a, b)


def test_bfloat16_is_rounded_at_random_alike():
    """The chance is a hash of place and step, so it does not matter who steps when."""
    a, b = pair(lambda: mlp().bfloat16(), WNGrad, stochastic_rounding=True)
    for model, opt in (a, b):
        with step_in_backward(opt) if model is b[0] else nullcontext():
            for seed in range(4):
                opt.zero_grad()
                torch.manual_seed(seed)
                model(torch.randn(8, 32).bfloat16()).square().mean().backward()
                opt.step()
    assert equal(a, b)


def test_sparse_rows_and_a_shape_for_each_parameter():
    table = nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Linear(6, 4, bias=False))
    twin = copy.deepcopy(table)
    a, b = (
        (m, WNGrad(m.parameters(), per=lambda p: (p.shape[0], 1) if p.shape[0] == 10 else (2, 3)))
        for m in (table, twin)
    )
    hooks = step_in_backward(b[1])
    for words in torch.randint(10, (4, 5)):
        for model, opt in (a, b):
            opt.zero_grad()
            model(words).square().mean().backward()
            opt.step()
    hooks.remove()
    assert equal(a, b)


def test_a_closure_steps_once():
    a, b = pair(convnet, WNGrad, momentum=0.9)

    def closure(model, opt):
        opt.zero_grad()
        found = loss(model, 0)
        found.backward()
        return found

    first = a[1].step(lambda: closure(*a))
    with step_in_backward(b[1]):
        assert torch.equal(first, b[1].step(lambda: closure(*b)))
    assert equal(a, b)


@pytest.mark.parametrize("row", ROWS[:3], ids=lambda row: row.name)
def test_a_schedule_turns_the_rate_in_the_released_loop(row):
    a, b = pair(convnet, row)
    for (model, opt), hooked in ((a, False), (b, True)):
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=4)
        hooks = step_in_backward(opt) if hooked else None
        loop(model, opt, schedule=schedule)
        assert hooks is None or hooks.remove() is None
    assert a[1].param_groups[0]["lr"] == 0
    assert equal(a, b)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_activations_come_before_the_step(reentrant):
    a, b = pair(lambda: nn.Sequential(nn.Flatten(), mlp()), WNGrad, momentum=0.9)
    with step_in_backward(b[1]):
        for seed in range(3):
            for model, opt in (a, b):
                opt.zero_grad()
                x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
                x.requires_grad_()  # or a reentrant checkpoint would see no gradient to compute
                checkpoint_sequential(model[1], 2, x, use_reentrant=reentrant).sum().backward()
                opt.step()
    assert equal(a, b)


def test_a_weight_in_two_recomputed_segments_steps_once():
    layer = nn.Linear(32, 32)
    a, b = pair(lambda: nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh()), WNAdam)
    x = torch.randn(8, 32)
    with step_in_backward(b[1]):
        for _ in range(3):
            for model, opt in (a, b):
                opt.zero_grad()
                checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
                opt.step()
    assert equal(a, b)


@pytest.mark.parametrize("layers", [True, False])
def test_a_compiled_model_is_as_in_the_ordinary_loop(layers):
    a, b = pair(lambda: nn.Sequential(nn.Flatten(), mlp()), WNGrad, momentum=0.9)
    for model, _ in (a, b):
        for part in model[1] if layers else [model]:
            part.compile(backend="aot_eager")
    loop(*a)
    with step_in_backward(b[1]):
        loop(*b)
    assert equal(a, b)


# --------------------------------------------------------------- to and fro, checkpoints


def test_removing_the_hooks_goes_back_to_the_ordinary_loop():
    a, b = pair(convnet, WNAdam)
    loop(*a, steps=6)
    hooks = step_in_backward(b[1])
    loop(*b, steps=2)
    hooks.remove()
    loss(b[0], 2).backward()
    assert all(p.grad is not None for p in b[0].parameters())
    b[1].step()
    loop(*b, steps=3, first=3)
    assert equal(a, b)


@pytest.mark.parametrize("released_first", [True, False])
@every_row
def test_a_checkpoint_goes_from_one_loop_to_the_other(row, released_first):
    a, b = pair(convnet, row)
    loop(*a, steps=5)
    if released_first:
        with step_in_backward(b[1]):
            loop(*b, steps=2)
    else:
        loop(*b, steps=2)
    fresh = row(b[0].parameters())
    hooks = None if released_first else step_in_backward(fresh)
    fresh.load_state_dict(b[1].state_dict())
    loop(b[0], fresh, steps=3, first=2)
    assert equal(a, (b[0], fresh))
    assert (hooks is None) == released_first


def test_a_checkpoint_loaded_between_two_steps_counts_at_once():
    """Its λ and state, though loading replaces all groups and state."""
    a, b = pair(convnet, WNAdam)
    loop(*a, steps=2)
    a[1].param_groups[0]["lr"] = 0.3
    with step_in_backward(b[1]):
        loop(*b, steps=1, first=7)
        b[0].load_state_dict(a[0].state_dict())
        b[1].load_state_dict(a[1].state_dict())
        loop(*b, steps=2, first=2)
    loop(*a, steps=2, first=2)
    assert equal(a, b)


def test_several_backward_passes_are_summed_up_with_the_hooks_around_the_last():
    a, b = pair(convnet, WNGrad)
    for model, opt in (a, b):
        loss(model, 0).backward()
        if opt is b[1]:
            with step_in_backward(opt):
                loss(model, 1).backward()
        else:
            loss(model, 1).backward()
            opt.step()
    assert equal(a, b)


def test_what_is_added_or_unfrozen_later_is_stepped_by_the_optimizer():
    (model, ordinary), (twin, opt) = pair(Tied, WNGrad)
    more, again = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    with step_in_backward(opt):
        for m, o, extra in ((model, ordinary, more), (twin, opt, again)):
            o.add_param_group({"params": [extra], "per": "model"})
            m.frozen.requires_grad_(True)
            (loss(m, 0) + extra.square().sum()).backward()
            o.step()
    assert equal((model, ordinary), (twin, opt))
    assert torch.equal(more, again)


def test_hooks_set_twice_step_once():
    a, b = pair(convnet, WNGrad)
    loop(*a)
    with step_in_backward(b[1]), step_in_backward(b[1]):
        loop(*b)
    assert equal(a, b)


# --------------------------------------------------------------------------- relatives


def related_pair(model, make=WNGrad):
    """Twin models with one b for a weight's row and its bias, an optimizer for each."""
    twin = copy.deepcopy(model)
    return (model, make(neuron_groups(model))), (twin, make(neuron_groups(twin)))


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_a_neurons_weights_and_bias_step_together(make):
    a, b = related_pair(convnet(), make)
    loop(*a)
    with step_in_backward(b[1]):
        loss(b[0], 0).backward()
        assert all(p.grad is None for p in b[0].parameters())
        loop(*b, steps=3, first=1)
    assert equal(a, b)


def test_relatives_of_which_one_had_no_gradient_wait_for_the_optimizer():
    """It may still come, and b is to grow by all of them at once."""
    a, b = related_pair(nn.Linear(3, 2))
    hooks = step_in_backward(b[1])
    for use_bias in (True, False, True):
        for model, opt in (a, b):
            opt.zero_grad()
            bias = model.bias if use_bias else None
            nn.functional.linear(torch.ones(1, 3), model.weight, bias).sum().backward()
            assert (model.weight.grad is None) == (use_bias and opt is b[1])
            opt.step()
    hooks.remove()
    assert equal(a, b)


def test_a_frozen_relative_is_not_waited_for():
    a, b = related_pair(nn.Linear(32, 4))
    hooks = step_in_backward(b[1])
    for frozen in (False, True, False):
        for model, opt in (a, b):
            model.bias.requires_grad_(not frozen)
            opt.zero_grad()
            loss(nn.Sequential(nn.Flatten(), model), 0).backward()
            assert (model.weight.grad is None) == (opt is b[1])
            opt.step()
    hooks.remove()
    assert equal(a, b)


# ----------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"per": "model"}, "`per` must not be 'model', whose one b for the whole group needs"),
        ({"nonfinite": "raise"}, "`nonfinite` must not be 'raise', which changes nothing before"),
        ({"differentiable": True}, "`differentiable` must be False"),
    ],
)
def test_what_needs_all_gradients_is_refused_with_the_reason(options, message):
    model = mlp()
    opt = WNGrad([{"params": model[0].parameters()}, {"params": model[2].parameters(), **options}])
    with pytest.raises(ValueError, match=f"step_in_backward: {message}"):
        step_in_backward(opt)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_setting_that_is_changed_afterwards_is_refused_in_backward():
    model, opt = pair(convnet, WNGrad, per="tensor")[0]
    before = copy.deepcopy(model)
    with step_in_backward(opt):
        opt.param_groups[0]["per"] = "model"
        with pytest.raises(ValueError, match="`per` must not be 'model'"):
            loss(model, 0).backward()
    assert same(model, before)


def test_a_setting_of_another_type_is_put_right_in_the_optimizer_s_own_group():
    """Else every later hook would find it again, and take the slow way."""
    model = mlp()
    opt = WNGrad(model.parameters(), momentum=0.5)
    with step_in_backward(opt):
        opt.param_groups[0].update(weight_decay=0, momentum=np.float64(0.25))
        model(torch.ones(1, 32)).sum().backward()
    assert [type(opt.param_groups[0][key]) for key in ("weight_decay", "momentum")] == [float] * 2


def test_other_optimizers_are_refused():
    opt = torch.optim.SGD([torch.ones(1)], lr=1.0)
    with pytest.raises(TypeError, match="`optimizer` must be one of wngrad's, got SGD"):
        step_in_backward(opt)


def test_relatives_on_two_devices_are_refused():
    here, there = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, device="meta"))
    opt = WNGrad([{"params": [here, there], "joint": True}])
    with pytest.raises(ValueError, match=r"must be on one device.*got \['cpu', 'meta'\]"):
        step_in_backward(opt)


def test_a_grad_scaler_is_refused():
    model, opt = pair(convnet, WNGrad)[0]
    scaler = torch.amp.GradScaler("cpu")
    with step_in_backward(opt):
        scaler.scale(loss(model, 0)).backward()
        with pytest.raises(ValueError, match="a GradScaler must not be used"):
            scaler.step(opt)


@pytest.mark.parametrize("fused", [False, True])
def test_a_graph_that_still_needs_the_old_values_says_so(fused):
    """Here the weight is used where no gradient asks for it, below where one does."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    w = nn.Parameter(torch.eye(3, device=device))
    x = torch.ones(1, 3, device=device, requires_grad=True)
    opt = WNGrad([w], fused=fused)
    with step_in_backward(opt), pytest.raises(RuntimeError, match="inplace operation"):
        ((x @ w.detach()) @ w).sum().backward()
    assert not torch.equal(w, torch.eye(3, device=device))


# ----------------------------------------------------------------------------- sharded


def hooked_and_not() -> dict:
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    rank, mesh = dist.get_rank(), dist.device_mesh.init_device_mesh("cpu", (2,))
    results = {}
    for name, make in {
        "neuron": lambda m: WNGrad(m.parameters(), momentum=0.9),
        "groups": lambda m: WNAdam(neuron_groups(m)),
    }.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), mlp())
        for hooked in (False, True):
            parts = copy.deepcopy(model)
            fully_shard(parts[1][2], mesh=mesh)
            fully_shard(parts, mesh=mesh)
            opt = make(parts)
            hooks = step_in_backward(opt) if hooked else None
            for seed in range(4):
                opt.zero_grad()
                loss(parts, 2 * seed + rank).backward()
                assert all((p.grad is None) == hooked for p in parts.parameters())
                opt.step()
            results[name, hooked] = [p.full_tensor().detach() for p in parts.parameters()]
            assert hooks is None or hooks.remove() is None
    refused = []
    for opt in (WNGrad(parts.parameters(), per="tensor"), WNGrad(mlp().parameters())):
        with pytest.raises(ValueError, match="step_in_backward") as error:
            step_in_backward(opt)
        refused.append(str(error.value))
    assert DistributedDataParallel.__name__ in refused[1]
    return {"results": results, "refused": refused}


@pytest.fixture(scope="module")
def two_ranks():
    return on_ranks(2, hooked_and_not)


@pytest.mark.parametrize("name", ["neuron", "groups"])
def test_fsdp2_steps_inside_backward_bit_for_bit(two_ranks, name):
    ordinary, released = (two_ranks["results"][name, hooked] for hooked in (False, True))
    assert all(torch.equal(p, q) for p, q in zip(ordinary, released, strict=True))


def test_blocks_cut_between_ranks_and_ddp_are_refused(two_ranks):
    cut, plain = two_ranks["refused"]
    assert "`per` must leave blocks whole on a rank" in cut
    assert "averages gradients after the step" in plain


# ------------------------------------------------------------------------ the fused step


def train_on_drawn_gradients(params, opt, steps: int) -> None:
    """Gradients that are the same bits whoever asks, on any device."""
    for seed in range(steps):
        draw = torch.Generator().manual_seed(seed)
        drawn = [torch.randn(p.shape, generator=draw).to(p) for p in params]
        opt.zero_grad()
        sum((p * g).sum() for p, g in zip(params, drawn, strict=True)).backward()
        opt.step()


def fused_twins(row, device):
    pytest.importorskip("triton")
    shapes = [(3, 5), (7,), (2, 3, 2, 2), ()] * 5  # more than an optimizer keeps plans
    ours = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
    twins = [nn.Parameter(p.detach().clone()) for p in ours]
    fused = None if row.name == "sign" else True  # whose direction no kernel knows
    return (ours, row(ours, fused=fused)), (twins, row(twins, fused=fused))


@pytest.mark.parametrize("row", [ROWS[1], ROWS[-1]], ids=lambda row: row.name)
def test_the_fused_step_inside_backward_is_the_fused_step(row, monkeypatch):
    """And each parameter's launch is planned once."""
    from wngrad.optim.fused import engine

    (p, a), (q, b) = fused_twins(row, "cuda" if torch.cuda.is_available() else "cpu")
    planned = []
    make = engine._sorted_out
    monkeypatch.setattr(engine, "_sorted_out", lambda *given: planned.append(1) or make(*given))
    with np.errstate(all="ignore"):
        train_on_drawn_gradients(p, a, 3)
        planned.clear()
        with step_in_backward(b):
            train_on_drawn_gradients(q, b, 3)
    assert all(torch.equal(x, y) for x, y in zip(p, q, strict=True))
    assert same_state(a, b)
    assert len(planned) <= len(q) + 1  # and one for the step that finds no gradient


def test_no_plan_outlives_the_state_it_was_made_for(monkeypatch):
    """State that is loaded may lie where the old one lay."""
    from wngrad.optim.fused import Engine

    (p, a), (q, b) = fused_twins(ROWS[1], "cuda" if torch.cuda.is_available() else "cpu")
    forgotten = []
    forget = Engine.forget
    with np.errstate(all="ignore"), step_in_backward(b):
        train_on_drawn_gradients(p, a, 1)
        train_on_drawn_gradients(q, b, 1)
        monkeypatch.setattr(Engine, "forget", lambda e: forgotten.append(e) or forget(e))
        b.load_state_dict(b.state_dict())
        train_on_drawn_gradients(p, a, 2)
        train_on_drawn_gradients(q, b, 2)
    assert len(set(forgotten)) == len(forgotten) == len(q) + 1
    assert all(torch.equal(x, y) for x, y in zip(p, q, strict=True))


# --------------------------------------------------------------------------- the memory


def test_one_gradient_is_alive_at_a_time():
    layers = [nn.Linear(16, 16, bias=False) for _ in range(8)]
    found = {}
    for hooked in (False, True):
        model = nn.Sequential(*copy.deepcopy(layers))
        found[hooked] = release.live_gradient_bytes(model, WNGrad(model.parameters()), hooked)
    assert found == {False: 8 * 16 * 16 * 4, True: 16 * 16 * 4}


def test_the_benchmark_says_what_it_found(tmp_path, capsys):
    options = ["--device", "cpu", "--layers", "6", "--width", "16", "--batch", "4", "--steps", "2"]
    release.main([*options, "--json", str(tmp_path / "found.json")])
    table = capsys.readouterr().out
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["optimizer"] for row in rows] == ["WNGrad", "WNGrad-momentum", "WNAdam"]
    for row in rows:
        assert row["ordinary"]["peak bytes"] == 6 * row["released"]["peak bytes"]
        assert f"| {row['optimizer']} |" in table


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_the_peak_of_memory_is_lower_by_nearly_all_gradients(make):
    layers, size = 16, 2048 * 2048 * 4
    peaks = {}
    for hooked in (False, True):
        torch.manual_seed(0)
        stack = [nn.Linear(2048, 2048, bias=False, device="cuda") for _ in range(layers)]
        model = nn.Sequential(*stack)
        work = release.Loop(model, make(model.parameters()), torch.randn(8, 2048, device="cuda"))
        peaks[hooked] = release.peak_bytes(work, hooked)
        del stack, model, work
        gc.collect()
    assert peaks[False] - peaks[True] >= 0.85 * layers * size


@pytest.mark.gpu
@cuda
@every_row
def test_on_the_gpu_the_released_loop_is_the_ordinary_one(row):
    (p, a), (q, b) = fused_twins(row, "cuda")
    train_on_drawn_gradients(p, a, 4)
    with step_in_backward(b):
        train_on_drawn_gradients(q, b, 4)
    assert all(torch.equal(x, y) for x, y in zip(p, q, strict=True))
    assert same_state(a, b)


@pytest.mark.gpu
@cuda
def test_a_captured_backward_steps_in_every_replay():
    """Forward, backward and step as one CUDA graph."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)).cuda()
    twin, x = copy.deepcopy(model), torch.randn(16, 8, device="cuda")
    a, b = WNGrad(model.parameters(), momentum=0.9), WNGrad(twin.parameters(), momentum=0.9)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with step_in_backward(b):
        with torch.cuda.stream(side):
            for _ in range(3):
                twin(x).square().mean().backward()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, stream=side):
            twin(x).square().mean().backward()
    for _ in range(4):
        graph.replay()
    for _ in range(3 + 4):
        a.zero_grad()
        model(x).square().mean().backward()
        a.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------- a trainer's step_parameter(p, group, i)


def hooked(model, opt):
    """What trainers do that step inside backward: a hook for each parameter, as they write it."""
    for group in opt.param_groups:
        for i, p in enumerate(group["params"]):

            def hook(p, group=group, i=i):
                opt.step_parameter(p, group, i)
                p.grad = None

            p.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize(
    "make",
    [WNGrad, WNAdam, WNMuon, partial(WNMuon, finetune=True), partial(WNGrad, momentum=0.9)],
    ids=["wngrad", "wnadam", "wnmuon", "finetune", "momentum"],
)
def test_step_parameter_in_hooks_is_the_ordinary_step(make):
    def run(inside):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
        opt = make(model.parameters())
        if inside:
            hooked(model, opt)
        for k in range(3):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(k))
            model(x).square().sum().backward()
            assert all(p.grad is None for p in model.parameters()) == inside
            opt.step()
            opt.zero_grad()
            for group in opt.param_groups:  # as a scheduler does
                group["lr"] *= 0.5
        return model, opt

    (one, opt), (other, inside) = run(False), run(True)
    assert same(one, other)
    assert same_state(opt, inside)


@pytest.mark.parametrize("alone", [False, True])
def test_that_the_rate_is_small_is_said_once_not_once_a_parameter(alone):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    opt = WNGrad(model.parameters(), lr=1e-4)
    hooks = hooked(model, opt) if alone else step_in_backward(opt)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for k in range(110):
            model(torch.full((1, 3), 0.01)).sum().backward()
            if not alone:
                opt.step()
            assert len(said) == (k >= 100)
    assert (hooks is None) == alone
    assert said[0].category is SmallRateWarning


def test_step_parameter_leaves_the_gradient_and_all_other_parameters_alone():
    model = nn.Linear(3, 2)
    opt = WNGrad(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    bias = model.bias.detach().clone()
    opt.step_parameter(model.weight, opt.param_groups[0], 0)
    assert model.weight.grad is not None
    assert torch.equal(model.bias, bias)
    assert list(opt.state) == [model.weight]


def test_step_parameter_refuses_what_is_not_the_optimizers():
    model = nn.Linear(3, 2)
    opt = WNGrad(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    group = opt.param_groups[0]
    for p, own, i in ((model.weight, group, 1), (model.weight, dict(group), 0)):
        with pytest.raises(ValueError, match=r"WNGrad: `step_parameter` must be given one of"):
            opt.step_parameter(p, own, i)
    whole = WNGrad([model.weight], per="model")
    with pytest.raises(ValueError, match="`per` must not be 'model'"):
        whole.step_parameter(model.weight, whole.param_groups[0], 0)
