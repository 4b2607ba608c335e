"""The lab's programs: a lane is the lone run of the real class, whatever runs beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from small_lab import blobs
from wngrad.lab.optimizers import OPTIMIZERS, Optimizer
from wngrad.lab.report.cells import ACCURACY, LOSSES
from wngrad.lab.train import models, norm, stack
from wngrad.lab.train.data import Data
from wngrad.lab.train.programs import PROGRAMS, Branches, Lone, Program, Stacked
from wngrad.lab.train.spec import Pack, Sweep, packs

METRICS = (*LOSSES, ACCURACY)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def narrow_resnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    return models.resnet18(shape, classes, width=4)


def sweep(model: str = "mlp", **changes: object) -> Sweep:
    base = Sweep(
        name="t", claim="", dataset="blobs", model=model, optimizers=tuple(OPTIMIZERS),
        lam=(0.003, 0.03), epochs=2, seeds=(0, 1), batch=16, weight_decay=1e-3,
    )  # fmt: skip
    return replace(base, **changes)


def program(kind: type[Program], s: Sweep, data: Data, device: str = "cpu") -> Program:
    return kind(s, packs(s.settings, s.seeds, None)[0], data, device)


def weights(p: Program) -> list[list[Tensor]]:
    """For each lane its parameters, in the model's own shapes."""
    if isinstance(p, Lone):
        return [[w.detach() for w in m.parameters()] for m in p.models]
    if isinstance(p, Branches):
        return [[w.detach() for w in lane.params.values()] for lane in p.lanes]
    return [[w.flatten(0, 1)[k] for w in p.update.params] for k in range(len(p.pack.lanes))]


def steps(p: Program, n: int) -> Program:
    while n:
        before = p.steps - p.step
        p.advance(min(n, before))
        n -= min(n, before)
    return p


NETWORKS = {
    "mlp": (Stacked, (20,)),
    "cnn": (Stacked, (3, 20, 20)),
    "test_lab_programs:narrow_resnet": (Branches, (3, 8, 8)),
}
# A lane of ResNet takes a hundred times as long as one of an MLP: one λ and one seed for it.
FEW = {"mlp": {}, "cnn": {"lam": (0.03,)}}
FEWEST = {"lam": (0.01,), "seeds": (1,)}


@pytest.mark.parametrize(
    ("model", "count"), [*zip(NETWORKS, (50, 10, 20), strict=True)], ids=NETWORKS
)
def test_the_steps_of_every_lane_are_those_of_the_real_class(model: str, count: int) -> None:
    kind, shape = NETWORKS[model]
    s, data = sweep(model, precision="float64", **FEW.get(model, FEWEST)), blobs(shape)
    ours, real = steps(program(kind, s, data), count), steps(program(Lone, s, data), count)
    for lane, mine, its in zip(ours.pack.lanes, weights(ours), weights(real), strict=True):
        for a, b in zip(mine, its, strict=True):
            # ResNet's normalizations amplify a rounding by a few digits over the steps.
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9, msg=str(lane))
    for name in METRICS:
        assert ours.curves[name][-1] == pytest.approx(real.curves[name][-1], rel=1e-7)


def test_in_float32_lane_and_lone_run_agree_to_its_digits() -> None:
    s, data = sweep(), blobs((20,))
    ours, real = steps(program(Stacked, s, data), 50), steps(program(Lone, s, data), 50)
    for mine, its in zip(weights(ours), weights(real), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("model", NETWORKS)
def test_a_lane_does_not_change_when_its_neighbours_diverge(model: str) -> None:
    kind, shape = NETWORKS[model]
    names = ("sgd", "wngrad", "adam")
    seeds = (0, 1) if kind is Stacked else (1,)
    quiet = sweep(model, optimizers=names, lam=(0.01, 0.02), epochs=1, seeds=seeds)
    loud = replace(quiet, lam=(0.01, 1e30))
    a, b = (steps(program(kind, s, blobs(shape)), 12) for s in (quiet, loud))
    same = [k for k, lane in enumerate(a.pack.lanes) if lane.lam == 0.01]
    for k in same:
        assert all(map(torch.equal, weights(a)[k], weights(b)[k]))
        assert {m: c[0][k] for m, c in a.curves.items()} == {
            m: c[0][k] for m, c in b.curves.items()
        }
    assert any(epoch is not None for epoch in b.diverged)


@pytest.mark.parametrize("model", NETWORKS)
def test_a_lane_does_not_change_with_the_number_of_its_neighbours(model: str) -> None:
    kind, shape = NETWORKS[model]
    lam = (0.01, 0.02, 0.03) if kind is Stacked else (0.01, 0.02)
    many = sweep(model, optimizers=("sgd", "wngrad", "wnadam"), lam=lam)
    few = replace(many, optimizers=("wngrad",), lam=(0.02,))
    a, b = (steps(program(kind, s, blobs(shape)), 12) for s in (many, few))
    for k, lane in enumerate(b.pack.lanes):
        mine = a.pack.lanes.index(lane)
        assert all(map(torch.equal, weights(a)[mine], weights(b)[k]))


def test_lanes_of_a_seed_share_their_start_and_their_data() -> None:
    p = program(Stacked, sweep(), blobs((20,)))
    first = p.update.params[0]
    assert all(torch.equal(first[0, 0], first[0, k]) for k in range(first.shape[1]))
    assert not torch.equal(first[0, 0], first[1, 0])
    assert not torch.equal(p.order[0], p.order[1])
    before = p.order.clone()
    p.advance(p.steps)
    assert not torch.equal(p.order, before)
    assert sorted(p.order[0].tolist()) == list(range(160))


def test_a_diverged_lane_is_marked_with_the_epoch_at_which_it_did() -> None:
    s = sweep(optimizers=("sgd",), lam=(1e-3, 1e4), seeds=(0,), epochs=3)
    p = steps(program(Stacked, s, blobs((20,))), 30)
    assert p.diverged == [None, 1]
    p.curves["train_loss"] = [[1.0, 1.0], [1.0, float("inf")], [1.0, 0.5]]
    assert p.diverged == [None, 2]


def test_an_incomplete_last_batch_is_left_out_and_too_large_a_batch_refused() -> None:
    assert program(Stacked, sweep(batch=30), blobs((20,))).steps == 5
    with pytest.raises(ValueError, match="`batch` must be at most the 160 training examples"):
        program(Stacked, sweep(batch=161), blobs((20,)))


@pytest.mark.parametrize("kind", PROGRAMS.values())
@pytest.mark.parametrize("at", [1, 10, 13])
def test_a_program_goes_on_exactly_from_a_state(kind: type[Program], at: int) -> None:
    s, data = sweep(lam=(0.03,)), blobs((20,))
    whole, first = program(kind, s, data), steps(program(kind, s, data), at)
    second = program(kind, s, data)
    second.load(first.state())
    for p, n in ((whole, 25), (second, 25 - at)):
        steps(p, n)
    assert whole.curves == second.curves
    for a, b in zip(weights(whole), weights(second), strict=True):
        assert all(map(torch.equal, a, b))


def test_a_state_of_other_lanes_is_refused() -> None:
    p, data = program(Stacked, sweep(), blobs((20,))), blobs((20,))
    other = program(Stacked, sweep(optimizers=("sgd",)), data)
    with pytest.raises(ValueError, match="other lanes"):
        p.load(other.state())


@pytest.mark.parametrize("row", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_rule_keeps_what_its_row_says(row: Optimizer) -> None:
    x, lam = torch.ones(1, 1, 2, 3), torch.full((1, 1, 1, 1), 0.1)
    state = {
        key: torch.full((1, 1, 2, 1) if key == "b" else x.shape, float(value))
        for key, value in row.state.items()
    }
    _, after = row.rule(x, x, state, lam, torch.ones(()))
    assert after.keys() == row.state.keys()


def test_the_paper_s_networks_have_the_sizes_it_gives() -> None:
    def count(model: nn.Module) -> int:
        return sum(p.numel() for p in model.parameters())

    assert count(models.build("mlp", (1, 28, 28), 10, 0)) == 79_400
    assert count(models.build("cnn", (3, 32, 32), 10, 0)) == 62_006
    assert count(models.build("resnet18", (3, 32, 32), 10, 0)) == 11_173_962


def test_building_a_network_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    a = models.build("mlp", (4,), 2, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(5)
    assert torch.equal(models.mlp((4,), 2)[1].weight, a[1].weight)


@given(
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    size=st.tuples(st.integers(5, 8), st.integers(5, 8)),
    bias=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_stacked_convolution_is_a_convolution_with_its_gradients(
    kernel, stride, dilation, padding, size, bias
) -> None:
    conv = nn.Conv2d(2, 3, kernel, stride, padding, dilation, bias=bias).double()
    model = nn.Sequential(conv, nn.Flatten())
    x = torch.randn(2, 4, 2, *size, dtype=torch.float64, requires_grad=True)
    w = [p.detach().expand(2, 1, *p.shape).clone().requires_grad_() for p in conv.parameters()]
    ours = stack.Stack(model)(w, x)
    real = model(x.flatten(0, 1)).unflatten(0, (2, 4)).mT
    torch.testing.assert_close(ours, real)
    out = torch.randn_like(real)
    mine = torch.autograd.grad((ours * out).sum(), [x, *w])
    its = torch.autograd.grad((real * out).sum(), [x, *conv.parameters()])
    torch.testing.assert_close(mine[0], its[0])
    for a, b in zip(mine[1:], its[1:], strict=True):
        torch.testing.assert_close(a.sum((0, 1)), b)


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ([nn.Linear(2, 2), nn.BatchNorm1d(2)], "BatchNorm1d"),
        ([nn.Conv2d(2, 2, 3, groups=2)], "groups"),
        ([nn.Conv2d(2, 2, 3, padding="same")], "padding"),
        ([nn.Flatten(2)], "Flatten"),
        ([nn.MaxPool2d(2, return_indices=True)], "indices"),
    ],
)
def test_what_cannot_be_stacked_is_told(layers: list[nn.Module], why: str) -> None:
    assert why in str(stack.why_not(nn.Sequential(*layers)))
    assert "not a Sequential" in str(stack.why_not(layers[0]))


def test_a_model_that_cannot_be_stacked_is_refused_by_name() -> None:
    s = sweep("test_lab_programs:narrow_resnet")
    with pytest.raises(ValueError, match=r"`model` 'test_lab.*' cannot be stacked: it has a Batch"):
        program(Stacked, s, blobs((3, 8, 8)))


@pytest.mark.parametrize("name", ["nothing", "no.such:thing", "torch:nothing", "torch:__version__"])
def test_a_name_that_leads_nowhere_is_named(name: str) -> None:
    with pytest.raises(ValueError, match="`model`"):
        models.build(name, (2,), 2, 0)
    lone = sweep(optimizers=(name,), program="lone")
    with pytest.raises(ValueError, match="`optimizer`"):
        program(Lone, lone, blobs((20,)))


def test_any_optimizer_class_can_run_alone() -> None:
    s = sweep(optimizers=("torch.optim:RMSprop",), lam=(1e-3,), program="lone")
    p = steps(program(Lone, s, blobs((20,))), 20)
    assert p.curves["train_loss"][1][0] < p.curves["train_loss"][0][0]


def test_packs_cover_every_lane_once() -> None:
    s = sweep(lam=(0.1, 0.2, 0.3), seeds=(0, 1, 2))
    for most in (None, 1, 4, 21, 22, 63, 100):
        cut: list[Pack] = packs(s.settings, s.seeds, most)
        lanes = [lane for pack in cut for lane in pack.lanes]
        assert sorted(map(str, lanes)) == sorted(map(str, s.lanes))
        assert most is None or all(len(pack.lanes) <= most for pack in cut)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("model", NETWORKS)
def test_on_cuda_a_captured_lane_is_the_lone_run(model: str) -> None:
    kind, shape = NETWORKS[model]
    s, data = sweep(model, precision="float64", **FEW.get(model, FEWEST)), blobs(shape)
    ours, real = program(kind, s, data, "cuda"), steps(program(Lone, s, data, "cpu"), 50)
    steps(ours, 50)
    for mine, its in zip(weights(ours), weights(real), strict=True):
        for a, b in zip(mine, its, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-5, atol=1e-8)
    for name in METRICS:
        assert ours.curves[name][-1] == pytest.approx(real.curves[name][-1], rel=1e-6)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("by", ["kernels", "compiler"])
def test_on_cuda_a_network_with_batch_normalization_is_the_lone_run(by, monkeypatch) -> None:
    """In float32: cuDNN would take TF32 in the lone run, and a pack does not."""
    monkeypatch.setattr(Branches, "network_by", by)
    s, data = sweep(list(NETWORKS)[2], **FEWEST), blobs((3, 8, 8))
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        ours, real = (steps(program(kind, s, data, "cuda"), 5) for kind in (Branches, Lone))
    torch.testing.assert_close(ours.total, real.total, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU: Triton's interpreter")
def test_a_network_normalized_by_kernels_is_the_lone_run(monkeypatch) -> None:
    """To the rounding of float32, which is 3e-6 between float32 and float64 here."""
    pytest.importorskip("triton")
    s = sweep(list(NETWORKS)[2], optimizers=("wnadam",), **FEWEST)
    real = steps(program(Lone, s, blobs((3, 8, 8))), 5)
    normalized: list[Tensor] = []

    def suits(bn: norm.BatchNorm, x: Tensor, residual: Tensor | None) -> bool:
        normalized.append(x)
        return True

    monkeypatch.setattr(norm.BatchNorm, "_suits", suits)
    ours = steps(program(Branches, s, blobs((3, 8, 8))), 5)
    tests = 20 * -(-len(ours.test_y) // 1000)  # before the first step
    assert len(normalized) == 5 * 20 + tests
    torch.testing.assert_close(ours.total, real.total, rtol=1e-5, atol=0)
    for name, values in real.start.items():
        assert ours.start[name] == pytest.approx(values, rel=1e-5)


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("kind", [Stacked, Branches])
def test_on_cuda_a_program_goes_on_from_a_state(kind: type[Program]) -> None:
    s, data = sweep(), blobs((20,))
    whole = steps(program(kind, s, data, "cuda"), 25)
    first = steps(program(kind, s, data, "cuda"), 13)
    second = program(kind, s, data, "cuda")
    second.load(first.state())
    steps(second, 12)
    assert second.epoch == whole.epoch == 2
    for name in METRICS:
        for a, b in zip(whole.curves[name], second.curves[name], strict=True):
            assert a == pytest.approx(b, rel=1e-4)


def test_halved_weights_are_those_of_autocast_and_their_gradients_are_taken() -> None:
    """Matrices are cast a table at a time, vectors are not; a step widens what it is given."""
    s = sweep(list(NETWORKS)[2], optimizers=("wngrad",), lam=(0.03,), seeds=(0,))
    lane, other = (program(Branches, s, blobs((3, 8, 8))).lanes[0] for _ in range(2))
    halves = lane.weights(half=True)
    for name, p in lane.params.items():
        assert torch.equal(halves[name], p.bfloat16() if p.ndim > 1 else p)
        assert halves[name].stride() == p.stride()
    grads = [w.detach().clone() for w in halves.values()]  # as good as any
    lane.update([g[None, None] for g in lane.rows(grads)])
    other.update([g[None, None].float() for g in other.rows(grads)])
    assert all(map(torch.equal, lane.params.values(), other.params.values()))


def test_the_loss_of_an_untrained_lane_is_that_of_its_network() -> None:
    s, data = sweep(seeds=(4,), optimizers=("sgd",), lam=(0.0,), epochs=1), blobs((20,))
    p = steps(program(Stacked, s, data), 10)
    model = models.build("mlp", (20,), 10, 4)
    expected = F.cross_entropy(model(data.test_x), data.test_y).item()
    assert p.curves["test_loss"][0][0] == pytest.approx(expected, rel=1e-5)


def with_dropout(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 8), nn.Dropout(), nn.Linear(8, classes))


def half_frozen(shape: tuple[int, ...], classes: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(shape[0], 8), nn.ReLU(), nn.Linear(8, classes))
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model", "why"), [("with_dropout", "Dropout"), ("half_frozen", "do not require a gradient")]
)
@pytest.mark.parametrize("kind", [Stacked, Branches])
def test_what_cannot_train_side_by_side_is_refused_and_runs_alone(kind, model, why) -> None:
    s = sweep(f"test_lab_programs:{model}", optimizers=("sgd",))
    with pytest.raises(ValueError, match=why):
        program(kind, s, blobs((20,)))
    assert steps(program(Lone, s, blobs((20,))), 10).epoch == 1


def test_an_optimizer_without_a_rule_is_named() -> None:
    with pytest.raises(ValueError, match=r"`optimizers` must be of sgd, .* got foo"):
        program(Stacked, sweep(optimizers=("sgd", "foo")), blobs((20,)))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"optimizers": ()}, "optimizers"),
        ({"lam": (0.1, 0.1)}, "lam"),
        ({"lam": (-1.0,)}, "lam"),
        ({"seeds": (-1,)}, "seeds"),
        ({"batch": 0}, "batch"),
        ({"epochs": 0}, "epochs"),
        ({"weight_decay": float("nan")}, "weight_decay"),
        ({"program": "bogus"}, "program"),
        ({"precision": "int8"}, "precision"),
        ({"stop": "medain", "best_by": "test_loss"}, "stop"),
        ({"stop": "median", "best_by": "test_accuracy"}, "best_by"),  # a rule looks at a loss
        ({"stop": "diverged", "best_by": "test_accuracy"}, "best_by"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused_at_the_door(changes, named) -> None:
    with pytest.raises(ValueError, match=f"Sweep: .*`{named}`"):
        sweep(**changes)


def test_seeds_may_be_a_range() -> None:
    assert sweep(seeds=range(2)).seeds == (0, 1)
