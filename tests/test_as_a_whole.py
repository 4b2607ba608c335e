"""What has to be seen whole.

A direction sees the parameter's own shape, whatever shape its b has. A launch sees every setting,
because a setting is a field of its key. A load is checked as a whole before anything changes, and
`averaged` puts back whatever can be put back. A velocity is in the units of λ as it is now.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conftest import flat_state, same_state
from test_wnmuon import polar
from wngrad import WNAdam, WNGrad, WNMuon
from wngrad.optim.directions import Direction

RHO, C, MU, DECAY = 0.3, 10.0, 0.9, 0.1
FUSED = pytest.mark.parametrize("fused", [None, False], ids=["fused", "plain"])

Array = np.ndarray[Any, np.dtype[np.float64]]


def fails(reason: str) -> pytest.MarkDecorator:
    return pytest.mark.xfail(strict=True, reason=reason)


def stepped(params: Sequence[Tensor], opt: Any, gradients: Sequence[Sequence[Tensor]]) -> None:
    for step in gradients:
        for p, g in zip(params, step, strict=True):
            p.grad = g.to(p.dtype)
        opt.step()


def moved(x: Tensor, make: Callable[[list[Tensor]], Any], gradients: Sequence[Tensor]) -> Tensor:
    """How far a parameter that starts at `x` has come."""
    p = nn.Parameter(x.clone())
    stepped([p], make([p]), [[g] for g in gradients])
    return p.detach() - x


# ------------------------------------------------------------- a direction sees the own shape


def account(
    x: Array,
    gradients: Sequence[Array],
    blocks: tuple[int, int],
    *,
    coupled: bool = False,
    latches: bool = False,
) -> Array:
    """One matrix after some steps of WNMuon in float64, by SVD; b has the shape `blocks`."""
    m, b = np.zeros_like(x), np.full(blocks, 0.0 if latches else C)
    entries = np.ones((x.shape[0] // blocks[0], x.shape[1] // blocks[1]))
    for g in gradients:
        seen = g + DECAY * x if coupled else g
        m = MU * m + (1 - MU) * seen
        u = polar(MU * m + (1 - MU) * seen) * max(1, (x.shape[0] / x.shape[1]) ** 0.5)
        parts = (u**2).reshape(blocks[0], entries.shape[0], blocks[1], entries.shape[1])
        sq = parts.sum((1, 3))
        b = np.where(b == 0, C * np.sqrt(sq), b)
        b = b + sq / b
        rates = RHO / np.kron(b, entries)
        x = x * (1 if coupled else 1 - DECAY * rates) - rates * u
    return x


def group_matrices(t: Tensor, groups: int) -> list[Array]:
    """Of a transposed convolution's weight (in, out/groups, …), each group's (out, in·k)."""
    return [part.transpose(0, 1).flatten(1).double().numpy() for part in t.chunk(groups)]


@FUSED
@pytest.mark.parametrize("groups", [1, 2])
def test_each_group_of_a_transposed_convolution_is_orthogonalized_by_itself(groups, fused):
    layer = nn.ConvTranspose2d(8, 6, 3, groups=groups, bias=False)
    before = group_matrices(layer.weight.detach(), groups)
    gradients = torch.randn(3, *layer.weight.shape)
    stepped([layer.weight], WNMuon(layer, fused=fused), [[g] for g in gradients])
    steps = zip(*(group_matrices(g, groups) for g in gradients), strict=True)
    after = group_matrices(layer.weight.detach(), groups)
    for x, new, g in zip(before, after, steps, strict=True):
        np.testing.assert_allclose(new, account(x, g, (len(x), 1)), rtol=0, atol=2e-6)


WAYS = [
    ("fused", torch.float32, {}),
    ("plain", torch.float32, {"fused": False}),
    ("float64", torch.float64, {}),
    ("float16", torch.float16, {}),
    ("first b", torch.float32, {"b_init": ("gradient", C)}),
    ("raise", torch.float32, {"nonfinite": "raise"}),
    ("coupled", torch.float32, {"decoupled_weight_decay": False}),
]


@pytest.mark.parametrize(
    ("per", "dtype", "options"),
    [
        pytest.param(per, dtype, options, id=f"{name} {per}")
        for per in [(12, 1), (1, 1), (12, 2), (4, 1), (4, 2)]
        for name, dtype, options in WAYS
    ],
)
def test_a_matrix_is_orthogonalized_whole_wherever_its_blocks_are_cut(per, dtype, options):
    x = torch.randn(12, 6, dtype=dtype)
    gradients = torch.randn(3, 12, 6, dtype=dtype)
    p = nn.Parameter(x.clone())
    opt = WNMuon([p], per=lambda _: per, **options)
    stepped([p], opt, [[g] for g in gradients])
    expected = account(
        x.double().numpy(),
        list(gradients.double().numpy()),
        per,
        coupled="decoupled_weight_decay" in options,
        latches="b_init" in options,
    )
    atol = {torch.float64: 1e-9, torch.float32: 2e-6, torch.float16: 4e-3}[dtype]
    np.testing.assert_allclose(p.detach().double().numpy(), expected, rtol=0, atol=atol)


@FUSED
@pytest.mark.parametrize("per", [(12, 1), (4, 1)], ids=str)
def test_a_row_of_an_embedding_without_a_gradient_stays_wherever_blocks_are_cut(per, fused):
    x, g = torch.randn(12, 6), torch.randn(12, 6)
    still = torch.tensor([0, 4, 5, 11])
    g[still] = 0
    embedding = nn.Parameter(x.clone())
    groups = [{"params": [embedding], "role": "embedding", "per": [per]}]
    stepped([embedding], WNMuon(groups, fused=fused), [[g]])
    unmoved = (embedding.detach() == x).all(1)
    assert unmoved.nonzero().flatten().tolist() == still.tolist()


class Watching(Direction):
    """The gradient, with a note of the shapes that it came in."""

    shapes: ClassVar[list[tuple[int, ...]]] = []

    def propose(self, batch):
        self.shapes.extend(tuple(g.shape) for g in batch.g)
        return batch.g


class Watched(WNGrad):
    def direction(self, group, p):
        return Watching()


@pytest.mark.parametrize(
    ("shape", "per"),
    [
        ((12, 6), (12, 1)),
        ((12, 6), (1, 1)),
        ((12, 6), (4, 1)),
        ((12, 6), (12, 3)),
        ((8, 3, 3, 3), (2, 3, 1, 1)),
        ((6,), (2,)),
    ],
    ids=str,
)
def test_a_direction_sees_its_parameters_own_shape(shape, per, monkeypatch):
    monkeypatch.setattr(Watching, "shapes", [])
    moved(torch.randn(shape), lambda p: Watched(p, per=lambda _: per), [torch.randn(shape)])
    assert Watching.shapes == [shape]


# ----------------------------------------------------------------------------- finetune


@FUSED
@pytest.mark.parametrize(
    ("shape", "dtype", "per"),
    [
        ((12, 6), torch.float32, (12, 1)),
        ((12, 6), torch.float32, (1, 1)),
        ((6,), torch.float32, (6,)),
        ((12, 6), torch.float32, (4, 1)),
        ((12, 6), torch.float32, (12, 2)),
        ((6,), torch.float32, (2,)),
        ((12, 6), torch.complex64, (12, 1)),
        ((6,), torch.complex64, (6,)),
    ],
    ids=str,
)
def test_finetuned_weights_that_are_twice_as_large_move_twice_as_far(shape, dtype, per, fused):
    """Bit for bit, whatever a parameter is and whoever shares its b."""

    def make(params: list[Tensor]) -> WNMuon:
        return WNMuon(params, finetune=True, weight_decay=0.0, per=lambda _: per, fused=fused)

    x, gradients = 4 * torch.randn(shape, dtype=dtype), torch.randn(3, *shape, dtype=dtype)
    assert torch.equal(2 * moved(x, make, gradients), moved(2 * x, make, gradients))


# -------------------------------------------------------------- a setting is in the key


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"momentum": 0.9}, {"momentum": 0.5}),
        ({"layout": ("rows", 1)}, {"layout": ("rows", 2)}),
        ({"role": "matrix"}, {"role": "embedding"}),
        ({"finetune": False}, {"finetune": True}),
        ({"finetune": True}, {"finetune": False}),
    ],
    ids=str,
)
def test_a_fused_step_obeys_a_setting_that_changed_between_two_steps(before, after):
    """As the plain one does; every setting that WNMuon adds."""
    x, gradients = 4 * torch.randn(6, 4), torch.randn(4, 6, 4)
    gradients[:, 2] = 0  # a row of an embedding that does not move
    ends = []
    for fused in (None, False):
        p = nn.Parameter(x.clone())
        opt = WNMuon([{"params": [p], **before}], fused=fused, per="neuron")
        stepped([p], opt, [[g] for g in gradients[:2]])
        opt.param_groups[0].update(after)
        stepped([p], opt, [[g] for g in gradients[2:]])
        ends.append(p.detach())
    torch.testing.assert_close(*ends, rtol=0, atol=2e-6)


# ------------------------------------------------------------------ momentum and λ that falls


COASTS = fails("v keeps the λ that it was made with")
FALLING = [0.5, 0.5, 0.05, 0.05, 0.2, 0.02]
CONSTANT, RISING = [0.5] * 6, [0.02, 0.02, 0.05, 0.2, 0.2, 0.5]


def velocities(make: Any, rates: Sequence[float], g: Array) -> Array:
    """v after steps at these rates, in float64: no step of before counts for more than λ now."""
    b, v, before = np.ones((len(g[0]), 1)), np.zeros_like(g[0]), rates[0]
    for lam, gradient in zip(rates, g, strict=True):
        grown = b + lam**2 * (gradient**2).sum(1, keepdims=True) / b
        kept, entering = (0.9, 1.0) if make is WNGrad else (0.9 * b / grown, 0.1)
        v = kept * min(1.0, lam / before) * v + entering * lam * gradient / grown
        b, before = grown, lam
    return v


@FUSED
@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
@pytest.mark.parametrize(
    ("make", "options"),
    [(WNGrad, {"momentum": 0.9}), (WNAdam, {"beta": 0.9})],
    ids=["wngrad", "wnadam"],
)
@pytest.mark.parametrize(
    "rates",
    [CONSTANT, RISING, pytest.param(FALLING, marks=COASTS)],
    ids=["constant", "rising", "falling"],
)
def test_a_velocity_is_scaled_down_with_a_rate_that_falls(rates, make, options, as_tensor, fused):
    gradients = torch.randn(len(rates), 4, 3)
    p = nn.Parameter(torch.randn(4, 3))
    lr = torch.tensor(rates[0]) if as_tensor else rates[0]
    opt = make([p], lr=lr, fused=fused, **options)
    for lam, g in zip(rates, gradients, strict=True):
        opt.param_groups[0]["lr"] = torch.tensor(lam) if as_tensor else lam
        stepped([p], opt, [[g]])
    expected = velocities(make, rates, gradients.double().numpy())
    np.testing.assert_allclose(opt.state[p]["velocity"].numpy(), expected, rtol=2e-5, atol=1e-6)


def peak_after_a_drop(
    make: Callable[..., Any], high: float, low: float, at: int, dim: int, seed: int
) -> float:
    """Least squares: how far the loss rises once λ has dropped, over the loss at the drop."""
    rng = torch.Generator().manual_seed(seed)
    a = torch.randn(20, dim, generator=rng, dtype=torch.float64)
    y = a @ torch.randn(dim, generator=rng, dtype=torch.float64)
    p = nn.Parameter(torch.zeros(1, dim, dtype=torch.float64))
    opt = make([p], lr=high)
    losses = []
    for step in range(at + 20):
        opt.param_groups[0]["lr"] = high if step < at else low
        rest = a @ p.detach()[0] - y
        losses.append(float(rest.square().sum()))
        stepped([p], opt, [[(rest @ a / len(a))[None]]])
    return max(losses[at:]) / losses[at]


@pytest.mark.parametrize(
    ("make", "high", "low", "at", "dim"),
    [
        pytest.param(torch.optim.SGD, 0.1, 0.01, 12, 10, id="torch's SGD"),
        pytest.param(WNGrad, 0.1, 0.01, 12, 10, id="wngrad", marks=COASTS),
        pytest.param(WNAdam, 1.0, 0.01, 8, 5, id="wnadam", marks=COASTS),
    ],
)
def test_the_loss_does_not_rise_after_a_rate_that_falls(make, high, low, at, dim):
    options = {} if make is WNAdam else {"momentum": 0.9}

    def with_momentum(params: list[Tensor], lr: float) -> Any:
        return make(params, lr=lr, **options)

    peaks = [peak_after_a_drop(with_momentum, high, low, at, dim, seed) for seed in range(20)]
    assert statistics.median(peaks) <= 1.2


@pytest.mark.parametrize(
    ("make", "options"),
    [(WNGrad, {"momentum": 0.9}), (WNAdam, {})],
    ids=["wngrad", "wnadam"],
)
def test_a_rate_that_falls_right_after_a_load_finds_what_the_run_would_have_found(make, options):
    gradients = [[g] for g in torch.randn(5, 4, 3)]
    p = nn.Parameter(torch.randn(4, 3))
    opt = make([p], lr=0.5, **options)
    stepped([p], opt, gradients[:3])
    q = nn.Parameter(p.detach().clone())
    resumed = make([q], lr=0.5, **options)
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    for params, each in (([p], opt), ([q], resumed)):
        each.param_groups[0]["lr"] = 0.05
        stepped(params, each, gradients[3:])
    assert torch.equal(p, q)
    assert same_state(opt, resumed)


# --------------------------------------------------------------- what `averaged` puts back


@pytest.mark.parametrize("spoiled", [0, 1, 2])
def test_all_that_can_be_put_back_is_though_one_parameter_cannot(spoiled):
    params = [nn.Parameter(torch.randn(4, 3)) for _ in range(3)]
    opt = WNMuon(params)
    stepped(params, opt, torch.randn(3, 3, 4, 3))
    before = [p.detach().clone() for p in params]
    with pytest.raises((RuntimeError, ValueError)), opt.averaged():  # noqa: PT012
        assert not any(torch.equal(p, x) for p, x in zip(params, before, strict=True))
        params[spoiled].data = torch.zeros(2, 5)
    others = [i for i in range(3) if i != spoiled]
    assert all(torch.equal(params[i], before[i]) for i in others)
    params[spoiled].grad = None
    opt.step()  # It is no longer within `averaged`.


# ------------------------------------------------------------------ a load is checked whole


def trained(make: Any, **options: Any) -> Any:
    """After two steps, with a matrix and a vector."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))]
    opt = make(params, **options)
    for _ in range(2):
        stepped(params, opt, [[torch.randn_like(p) for p in params]])
    return opt


def assert_refused(opt: Any, damaged: dict[str, Any], says: str) -> None:
    """The load raises what it should, and leaves groups, state and parameters bit for bit."""
    groups = copy.deepcopy([{**group, "params": None} for group in opt.param_groups])
    state, keys = copy.deepcopy(flat_state(opt)), {p: set(its) for p, its in opt.state.items()}
    params = [p.detach().clone() for group in opt.param_groups for p in group["params"]]
    with pytest.raises((ValueError, TypeError), match=says):
        opt.load_state_dict(damaged)
    assert [{**group, "params": None} for group in opt.param_groups] == groups
    assert {p: set(its) for p, its in opt.state.items()} == keys
    assert all(map(torch.equal, flat_state(opt), state))
    now = [p for group in opt.param_groups for p in group["params"]]
    assert all(map(torch.equal, now, params))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("lr", math.nan, "`lr`"),
        ("lr", math.inf, "`lr`"),
        ("lr", "1", "`lr`"),
        ("lr", None, "`lr`"),
        ("momentum", 5.0, "`momentum`"),
        ("momentum", math.nan, "`momentum`"),
        ("momentum", "0.5", "`momentum`"),
        ("weight_decay", -1.0, "`weight_decay`"),
        ("nonfinite", "skp", "`nonfinite`"),
        ("average", -3.0, "`average`"),
        ("maximize", 3, "`maximize`"),
        ("finetune", 3, "`finetune`"),
        ("role", "matrices", "`role`"),
        ("joint", 1, "`joint`"),
        ("b_init", "x", "`b_init`"),
        ("layout", ("rows", 0), "`pieces`"),
        ("layout", ("row", 1), "`kind`"),
        ("per", "layer", "`per`"),
    ],
)
def test_a_setting_of_a_checkpoint_that_is_none_is_refused_and_nothing_changes(key, value, says):
    opt = trained(WNMuon, per="neuron", joint=False)
    damaged = copy.deepcopy(opt.state_dict())
    damaged["param_groups"][0][key] = value
    assert_refused(opt, damaged, says)


@pytest.mark.parametrize(
    ("make", "key", "value"),
    [
        (WNMuon, "t", -3.0),
        (WNMuon, "t", math.nan),
        (WNMuon, "t", math.inf),
        (WNAdam, "t", -3.0),
        (WNAdam, "t", math.nan),
        (WNGrad, "t", -3.0),
        (WNMuon, "rms", -1.0),
        (WNMuon, "rms", math.nan),
        (WNMuon, "m", math.nan),
        (WNMuon, "m", math.inf),
        (WNMuon, "m", torch.bool),
        (WNMuon, "m", torch.complex64),
        (WNAdam, "velocity", math.nan),
        (WNAdam, "velocity", torch.complex64),
        (WNMuon, "average", math.nan),
        (WNMuon, "average", math.inf),
        (WNMuon, "average", torch.bool),
        (WNMuon, "average", torch.complex64),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Casting complex values to real")
def test_a_damaged_state_is_refused_and_nothing_changes(make, key, value):
    """Numbers that no step leaves where `nonfinite` is "skip", and types that do not fit."""
    opt = trained(make, nonfinite="skip")
    numbers = [i for i, its in opt.state_dict()["state"].items() if key in its]
    for i in numbers:
        damaged = copy.deepcopy(opt.state_dict())
        its = damaged["state"][i]
        if isinstance(value, torch.dtype):
            its[key] = its[key].to(value)
        else:
            its[key].view(-1)[0] = value
        assert_refused(opt, damaged, f"`state_dict` must hold `{key}`")
    assert numbers


def test_a_state_that_does_not_fit_is_refused_and_nothing_changes():
    opt = trained(WNMuon)
    damaged = copy.deepcopy(opt.state_dict())
    damaged["state"][1]["m"] = torch.zeros(5)
    assert_refused(opt, damaged, "`m` of shape")


def test_a_models_state_is_refused_by_bare_parameters_for_its_number_of_groups():
    """A matrix and a vector: two groups of a model, and one of its parameters."""
    model = nn.Linear(3, 4)
    opt, bare = WNMuon(model), WNMuon(reversed(list(model.parameters())))
    for each in (opt, bare):
        stepped(list(model.parameters()), each, [[torch.ones(4, 3), torch.ones(4)]])
    assert_refused(bare, copy.deepcopy(opt.state_dict()), "groups")


def test_a_load_does_not_change_how_a_models_matrices_lie():
    """That is for the model to say, as the shapes of its b are."""
    model = nn.LSTM(3, 4, bias=False)
    opt = WNMuon(model)
    stepped(list(model.parameters()), opt, [[torch.ones_like(p) for p in model.parameters()]])
    saved = copy.deepcopy(opt.state_dict())
    saved["param_groups"][0]["layout"] = ("rows", 1)
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["layout"] == ("rows", 4)


@pytest.mark.parametrize("make", [WNGrad, WNAdam, WNMuon])
@pytest.mark.parametrize(
    "nonfinite",
    ["propagate", "skip", "raise"],
)
def test_an_optimizer_takes_its_own_state_whatever_has_happened_to_it(make, nonfinite):
    opt = trained(make)
    params = opt.param_groups[0]["params"]
    stepped(params, opt, [[torch.full_like(p, math.nan) for p in params]])
    opt.param_groups[0]["nonfinite"] = nonfinite
    before = copy.deepcopy(flat_state(opt))
    assert any(t.isnan().any() for t in before)
    opt.load_state_dict(opt.state_dict())
    pairs = zip(flat_state(opt), before, strict=True)
    assert all(torch.equal(now.nan_to_num(7), old.nan_to_num(7)) for now, old in pairs)


@pytest.mark.parametrize("options", [{"hold_1d": True}, {}], ids=["held", "float16"])
def test_a_state_that_nothing_bounds_is_loaded_as_it_is(options):
    """A b that is held limits no step, and float16 overflows early: `skip` looks at b alone."""
    dtype = torch.float32 if options else torch.float16
    p = nn.Parameter(torch.zeros(4, dtype=dtype))
    opt = WNGrad([p], momentum=0.5, nonfinite="skip", **options)
    stepped([p], opt, [[torch.ones(4)]])
    opt.state[p]["velocity"].fill_(torch.inf)
    again = WNGrad([p], momentum=0.5, nonfinite="skip", **options)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert again.state[p]["velocity"].isinf().all()
