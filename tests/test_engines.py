"""The kernels, in lock-step with the plain step: one battery for every engine.

The engines are Triton, which its interpreter runs where there is no GPU, and C, where the package
was built with a compiler. What only one of them has is tested at the end.
"""

from __future__ import annotations

import copy
import pickle
import sys
import weakref
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from itertools import product
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from wngrad import WNAdam, WNGrad, WNMuon, neuron_groups
from wngrad.optim.fused import (
    cpu,
    cuda,
    eligibility,
    engine,
    launch_key,
    matrices,
    records,
    snapshot,
    tables,
    tiling,
)
from wngrad.optim.rounding import rounded

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SPACING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
POISON = 77.0
BUFFERS = ("m", "velocity", "rms")
KINDS = ("plain", "momentum", "adam", "vector")  # and "matrix"
TRITON = eligibility.why_no_triton() is None
ENGINES = ["triton"] * TRITON + ["c"] * (not CUDA and cpu.why_not() is None)


@pytest.fixture(params=ENGINES, autouse=True)
def kernels(request, monkeypatch):
    """The engine that `fused=True` asks for, and `fused=None` where a GPU would be."""
    if request.param == "c":
        monkeypatch.setattr(launch_key, "interpreted", lambda: False)
    elif not CUDA:
        monkeypatch.setattr(eligibility, "_may", lambda p: True)
        for module in (launch_key, eligibility):
            monkeypatch.setattr(module, "runs_native", lambda p, settings: False)
    with np.errstate(all="ignore"):  # NumPy runs the interpreter, over NaN and inf on purpose
        yield request.param


only_triton = pytest.mark.parametrize(
    "kernels",
    [pytest.param("triton", marks=pytest.mark.skipif(not TRITON, reason="needs Triton 3.4"))],
    indirect=True,
)
only_c = pytest.mark.parametrize(
    "kernels",
    [pytest.param("c", marks=pytest.mark.skipif("c" not in ENGINES, reason="needs C, no GPU"))],
    indirect=True,
)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Long rows are short here, so that the interpreter has little to do."""
    if not CUDA:
        monkeypatch.setattr(tiling, "LONGEST", 2**8)
        large = tiling._Choice((2**6, 2**8), 2**6, 1)  # never 2^5 or 2^7: `tables._kind`
        monkeypatch.setattr(tiling, "_LARGE_SET", dict.fromkeys(SPACING, large))


# ------------------------------------------------------------------ what is drawn

SHAPES = [
    (),
    (1,),
    (7,),
    (130,),
    (0,),
    (1, 1),
    (3, 5),
    (16, 16),
    (5, 33),
    (2, 300),
    (40, 4),
    (3, 0),
]
SHAPES += [(2, 3, 3, 3), (4, 2, 3), (3, 4, 2, 2, 2), (2, 200), (1, 400), (70, 2)]
SHAPES += [(2, 4500), (1, 9000), (2, 70_000)] if CUDA else []
PERS = ("neuron", "neuron", "tensor", "model", "slice")
NONFINITES = ("propagate", "skip", "raise")
LAYOUTS = ("contiguous", "transposed", "channels last", "every other column", "off by one")


def placed(shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """An unset tensor of this shape, and the poisoned memory it lies in."""
    shape = tuple(shape)
    n = 1
    for size in shape:
        n *= size
    room = torch.full((2 * n + 64,), POISON, dtype=dtype, device=DEVICE)
    start = 17 if layout == "off by one" else 16
    if layout == "transposed" and 1 < len(shape) < 5:
        return room[start : start + n].view(shape[::-1]).permute(*reversed(range(len(shape)))), room
    if layout == "channels last" and len(shape) > 2:
        last = (shape[0], *shape[2:], shape[1])
        moved = room[start : start + n].view(last)
        return moved.permute(0, len(shape) - 1, *range(1, len(shape) - 1)), room
    if layout == "every other column" and shape:
        return room[start : start + 2 * n].view(*shape[:-1], 2 * shape[-1])[..., ::2], room
    return room[start : start + n].view(shape), room


def filled(shape, layout, dtype, seed, scale):
    t, room = placed(shape, layout, dtype)
    draw = torch.Generator().manual_seed(seed)
    t.copy_(scale * torch.randn(shape, generator=draw, dtype=torch.float64))
    return t, room


@st.composite
def cases(draw, dtypes=tuple(SPACING), pers=PERS, nonfinites=NONFINITES):
    dtype = draw(st.sampled_from(dtypes))
    some = st.tuples(st.sampled_from(SHAPES), *[st.sampled_from(LAYOUTS)] * 2)
    options = {
        "per": draw(st.sampled_from(pers)),
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.1])),
        "decoupled_weight_decay": draw(st.booleans()),
        "maximize": draw(st.booleans()),
        "nonfinite": draw(st.sampled_from(nonfinites)),
        "hold_1d": draw(st.booleans()),
        "b_init": draw(st.sampled_from([1.0, 0.3, "gradient", ("gradient", 2.0)])),
        "average": draw(st.sampled_from([None, 8.0])),
    }
    kind = draw(st.sampled_from(KINDS if CUDA else [*KINDS, "matrix", "matrix"]))
    if kind in ("vector", "matrix"):
        options["finetune"] = draw(st.booleans())
    params = draw(st.lists(some, min_size=1, max_size=4))
    if kind == "matrix":
        options |= {"decoupled_weight_decay": True, "b_init": draw(st.sampled_from([10.0, 0.3]))}
        options["nonfinite"] = draw(st.sampled_from(NONFINITES[:2]))
        options["per"] = draw(st.sampled_from(["neuron", "tensor", "slice"]))
        flat = {shape: layout for shape, layout, _ in params if len(shape) < 3}
        params = [(shape, flat.get(shape, "off by one"), g) for shape, _, g in params]
    return {
        "dtype": dtype,
        "params": params,
        "options": options,
        "kind": kind,
        "lr": draw(st.sampled_from([1.0, 0.01, 0.0, "float32", "float64", "zero"])),
        "scale": draw(st.sampled_from([None, None, 1.0, 1024.0])),
        "found": draw(st.sampled_from([None, None, 0.0, 1.0])),
        "bad": draw(st.sampled_from([None, None, None, float("nan"), float("inf")])),
        "size": draw(st.sampled_from([1.0, 1.0, 1e-3, 30.0])),
        "absent": draw(st.booleans()),  # the first parameter, in the second step
        "small": draw(st.sampled_from([tiling.SMALL, 0])),
        "seed": draw(st.integers(0, 2**20)),
    }


def make(kind, params, **options):
    if kind == "adam":
        return WNAdam(params, **options)
    if kind == "vector":
        return WNMuon([{"params": params, "role": "vector"}], **options)
    if kind == "matrix":
        return WNMuon(params, **options)
    return WNGrad(params, momentum=0.9 if kind == "momentum" else 0.0, **options)


def rate(lr):
    if lr == "zero":
        return torch.zeros((), device=DEVICE)
    if isinstance(lr, str):
        return torch.tensor([0.7], dtype=getattr(torch, lr), device=DEVICE)
    return lr


# ------------------------------------------------------------------ one step, twice


def twin(kind, params, opt, dtype, options):
    """The plain path from where the fused one stands, in another type if asked."""
    theirs = [nn.Parameter(p.detach().to(dtype, copy=True)) for p in params]
    plain = make(kind, theirs, fused=False, **options)
    saved = opt.state_dict()
    if dtype == torch.float64:
        saved = copy.deepcopy(saved)
        for mine in saved["state"].values():
            for key in mine.keys() - {"skipped", "t"} | (
                {"t"} if kind in ("adam", "vector") else set()
            ):
                mine[key] = mine[key].double()
    plain.load_state_dict(saved)
    return theirs, plain


def take(opt, params, grads, case):
    for p, g in zip(params, grads, strict=True):
        p.grad = None if g is None else g.to(p.dtype)
    if case["scale"] is not None:
        opt.grad_scale = torch.full((1,), case["scale"], device=DEVICE)
    if case["found"] is not None:
        opt.found_inf = torch.full((1,), case["found"], device=DEVICE)
    try:
        opt.step()
    except ValueError as error:
        return str(error)
    return None


def close(ours: Tensor, theirs: Tensor, spacing: float, terms: Tensor) -> None:
    """Neighbours in their type, after some roundings in float32 of terms of this size."""
    a, b = ours.detach().double(), theirs.detach().double()
    assert torch.equal(a.isnan(), b.isnan())
    apart = torch.where(a == b, 0.0, (a - b).abs().nan_to_num(0, posinf=float("inf")))
    size = torch.maximum(a.abs(), b.abs()).nan_to_num(0, 0, 0)
    info = torch.finfo(ours.dtype)
    denormal = 1.01 * info.smallest_normal * info.eps  # how far neighbours next to 0 are apart
    allowed = 1.01 * spacing * size + 16 * 2.0**-23 * (size + terms) + denormal
    assert bool((apart <= allowed).all()), (apart / allowed).max()


def largest(*tensors: Tensor | None) -> Tensor:
    every = [
        t.detach().double().abs().nan_to_num(0, 0, 0).flatten() for t in tensors if t is not None
    ]
    return torch.cat([torch.zeros(1, device=DEVICE, dtype=torch.float64), *every]).max()


def cancelled(opt, x: Tensor, g: Tensor | None) -> Tensor:
    """What may cancel in g + w·x, of which a first b is up to twice the norm."""
    if opt.defaults["decoupled_weight_decay"] or not opt.defaults["weight_decay"]:
        return largest()
    return largest(x, g)


def assert_alike(params, opt, theirs, plain, before, spacing):
    for p, q, (x, was) in zip(params, theirs, before, strict=True):
        mine, other = opt.state[p], plain.state[q]
        assert mine.keys() == other.keys()
        close(mine["b"], other["b"], 4e-7, 2 * cancelled(opt, x, q.grad))
        assert torch.equal(mine["t"].double(), other["t"].double())
        if "skipped" in mine:
            assert torch.equal(mine["skipped"], other["skipped"])
        moved = largest(q.detach() - x, x)
        for key in BUFFERS:
            if key in mine:
                terms = largest(was.get(key), other[key])
                moved = torch.maximum(moved, terms)
                close(mine[key], other[key], spacing, terms)
        close(p, q, spacing, moved)
        if "average" in mine:
            close(mine["average"], other["average"], SPACING[torch.float32], moved)


def lock_step(case):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "SMALL", case["small"])
        run_in_lock_step(case)


def run_in_lock_step(case):
    kind, dtype, size = case["kind"], case["dtype"], case["size"]
    options = {**case["options"], "lr": rate(case["lr"])}
    rooms, params = [], []
    for i, (shape, layout, _) in enumerate(case["params"]):
        t, room = filled(shape, layout, dtype, case["seed"] + i, 1.0)
        params.append(nn.Parameter(t))
        rooms.append((room, t))
    assert all(p.data_ptr() == t.data_ptr() for p, (_, t) in zip(params, rooms, strict=True))
    opt = make(kind, params, fused=True, **options)
    for k in range(2):
        grads = []
        for i, (shape, _, layout) in enumerate(case["params"]):
            g, _ = filled(shape, layout, dtype, 7919 * (k + 1) + case["seed"] + i, size)
            if case["bad"] is not None and g.numel() and i == k % len(params):
                g[(0,) * g.dim()] = case["bad"]
            grads.append(g)
        if case["absent"] and k and len(params) > 1:
            grads[0] = None
        asked = [None if g is None else g.clone() for g in grads]
        before = [
            (
                p.detach().clone(),
                {k: v.clone() for k, v in opt.state.get(p, {}).items() if k in BUFFERS},
            )
            for p in params
        ]
        twins = [twin(kind, params, opt, dtype, options)]
        if kind != "matrix":  # whose small singular values float64 has other digits of
            twins.append(twin(kind, params, opt, torch.float64, options))
        said = take(opt, params, grads, case)
        divided = 1.0 if said or case["scale"] is None else case["scale"]
        for g, a in zip(grads, asked, strict=True):  # the gradients are as they were, or unscaled
            if g is not None:
                left = (a.float() / divided).to(dtype)
                assert torch.equal(g.nan_to_num(POISON), left.nan_to_num(POISON))
        for theirs, plain in twins:
            for g, a in zip(grads, asked, strict=True):
                if g is not None:
                    g.copy_(a)
            assert (take(plain, theirs, grads, case) is None) == (said is None)
        if said is not None:
            assert all(torch.equal(p, x) for p, (x, _) in zip(params, before, strict=True))
            return
        assert not opt.why_plain()
        for theirs, plain in twins:
            assert_alike(params, opt, theirs, plain, before, SPACING[dtype])
    for room, t in rooms:  # nothing beside the parameters was written
        t.detach().fill_(POISON)
        assert bool((room == POISON).all())


@pytest.mark.parametrize("part", range(2))
def test_a_step_is_the_plain_one_whatever_the_shapes_strides_types_and_options(part, kernels):
    how_many = 100 if kernels == "c" else 8  # the interpreter takes seconds for one; see below
    drawn = settings(
        max_examples=how_many, derandomize=False, phases=[Phase.generate], database=None
    )
    types = cpu.DTYPES if kernels == "c" else tuple(SPACING)
    seed(part)(drawn(given(cases(types))(lock_step)))()


@pytest.mark.faults
@pytest.mark.parametrize("part", range(10))
def test_five_hundred_drawn_steps_and_more(part, kernels):
    drawn = settings(max_examples=150, derandomize=False, phases=[Phase.generate], database=None)
    types = cpu.DTYPES if kernels == "c" else tuple(SPACING)
    seed(100 + part)(drawn(given(cases(types))(lock_step)))()


# ------------------------------------------------------------------ whole runs, side by side


class Both:
    """A fused optimizer and a plain one, over copies of the same parameters."""

    def __init__(self, make, tensors, *, fused=True, groups=lambda params: params, **options):
        copies = [[nn.Parameter(t.detach().to(DEVICE, copy=True)) for t in tensors] for _ in "ab"]
        self.ours, self.theirs = copies
        self.fused = make(groups(self.ours), fused=fused, **options)
        self.plain = make(groups(self.theirs), **{**options, "fused": False})

    @property
    def pairs(self):
        return list(zip(self.ours, self.theirs, strict=True))

    def set(self, **settings):
        for opt in (self.fused, self.plain):
            opt.param_groups[0].update(settings)

    def give(self, seed, absent=(), bad=None):
        draw = torch.Generator().manual_seed(seed)
        for i, (p, q) in enumerate(self.pairs):
            g = torch.randn(p.shape, generator=draw).to(p.device, p.dtype)
            if bad is not None and i == 0:
                g.view(-1)[0] = bad
            p.grad, q.grad = (None, None) if i in absent else (g, g.clone())

    def step(self, seed, absent=(), bad=None):
        self.give(seed, absent, bad)
        self.fused.step()
        self.plain.step()
        self.assert_together()

    def assert_together(self):
        """To a few roundings of float32, or of the parameter's own type."""
        for p, q in self.pairs:
            near = max(4e-6, 1.01 * torch.finfo(p.dtype).eps)
            torch.testing.assert_close(p, q, rtol=near, atol=near, equal_nan=True)
            mine, other = self.fused.state.get(p, {}), self.plain.state.get(q, {})
            assert mine.keys() == other.keys()
            for key in mine:
                torch.testing.assert_close(
                    mine[key], other[key], rtol=near, atol=near, equal_nan=True
                )


def launches(opt):
    """Those of the latest step."""
    return opt._engine._latest[1]._launches


def drawn(*shapes, dtype=torch.float32):
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]


CHANGES = [
    {"momentum": 0.5},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "decoupled_weight_decay": True},
    {"maximize": True},
    {"nonfinite": "skip"},
    {"nonfinite": "raise"},
    {"hold_1d": True},
    {"joint": True},
    {"b_init": ["gradient", 2.0]},
    {"b_init": 3},
    {"lr": 0.0},
    {"lr": -0.0},
    {"lr": 2},
    {"lr": torch.tensor(0.3)},
    {"lr": torch.tensor([[0.3]], dtype=torch.float64)},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_setting_changed_between_steps_is_seen(change):
    both = Both(WNGrad, drawn((3, 5), (3,)), momentum=0.9, b_init="gradient")
    before = {key: both.fused.param_groups[0][key] for key in change}
    for k, now in enumerate((before, change, before)):
        both.set(**now)
        both.step(2 * k)
        both.step(2 * k + 1)


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "lr": 0.5}, {"hold_1d": True}, {"per": "model"}]
)
def test_blocks_that_have_no_b_yet_start_from_a_number_once_b_init_is_one(options):
    both = Both(WNGrad, [torch.zeros(3, 2), torch.zeros(2)], b_init="gradient", **options)
    for p in both.ours + both.theirs:
        p.grad = torch.zeros_like(p)
    both.fused.step()
    both.plain.step()
    assert not any(both.plain.state[q]["b"].any() for q in both.theirs)
    both.set(b_init=2.0)
    for k in range(3):
        for p in both.ours + both.theirs:
            p.grad = torch.full_like(p, 1000.0)
        both.fused.step()
        both.plain.step()
        both.assert_together()
        if k == 0:
            sums = (
                torch.tensor([2e6, 1e6]) if options != {"per": "model"} else torch.full((2,), 8e6)
            )
            for q, sq in zip(both.theirs, sums, strict=True):
                held = "hold_1d" in options and q.dim() == 1
                b = 2.0 if held else 2 + options.get("lr", 1.0) ** 2 * sq / 2
                assert torch.allclose(both.plain.state[q]["b"].cpu(), torch.as_tensor(b))


def test_momentum_set_to_0_and_another_beta_are_seen():
    for make, name in ((WNGrad, "momentum"), (WNAdam, "beta")):
        both = Both(make, drawn((3, 5)), **{name: 0.9})
        for k, value in enumerate((0.9, 0.0, 0.5)):
            both.set(**{name: value})
            both.step(k)


def test_a_first_step_without_rate_does_not_settle_what_later_ones_do():
    for nothing in (0.0, -0.0, torch.tensor(0.0)):
        both = Both(WNGrad, drawn((3, 5)))
        for k, lr in enumerate((nothing, 1.0, nothing, 0.5)):
            both.set(lr=lr)
            both.step(k)


def test_a_tensor_rate_may_change_in_place():
    lr = torch.tensor(1.0, device=DEVICE)
    both = Both(WNGrad, drawn((3, 5)), lr=lr)
    for k in range(4):
        lr.fill_(1.0 / (1 + k))
        both.step(k)


@pytest.mark.parametrize("lr", [torch.ones(2), torch.ones(1, 1, 1), torch.ones(1) * 1j], ids=str)
def test_a_rate_that_is_not_one_number_is_refused_in_any_step(lr):
    both = Both(WNGrad, drawn((3, 5)))
    for k in range(2):
        both.set(lr=1.0)
        both.step(k)
        both.set(lr=lr)
        with pytest.raises(ValueError, match="WNGrad: `lr` as a tensor must have one real"):
            both.fused.step()


@pytest.mark.parametrize(
    "options", [{}, {"per": "model"}, {"joint": True, "hold_1d": True}], ids=str
)
@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_parameters_come_and_go(make, options):
    """Among relatives, one that was away takes over the b the others have reached."""
    both = Both(make, drawn((3, 5), (3, 2), (3,)), nonfinite="skip", **options)
    for k, absent in enumerate([(), (0,), (1, 2), (0, 1, 2), (), (0,)]):
        both.step(k, absent)


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_a_parameter_that_was_away_keeps_its_b_if_the_step_is_skipped_or_has_no_rate(make):
    both = Both(make, drawn((4, 4), (2, 3)), per="model", nonfinite="skip")
    both.step(0)
    both.step(1, absent=(1,))
    away = both.plain.state[both.theirs[1]]["b"].clone()
    both.step(2, bad=float("nan"))
    both.set(lr=torch.zeros((), device=DEVICE))
    both.step(3)
    assert torch.equal(both.plain.state[both.theirs[1]]["b"], away)
    both.set(lr=1.0)
    both.step(4)


@pytest.mark.parametrize("options", [{}, {"per": "model"}, {"momentum": 0.9}], ids=str)
def test_empty_and_0_d_parameters_step_with_the_others(options):
    both = Both(WNGrad, drawn((), (0,), (3, 0), (0, 3), (2, 2)), **options)
    both.step(0)
    both.step(1)
    assert all(both.fused.state[p]["t"] == 2 for p in both.ours)


def test_a_group_may_be_added():
    both = Both(WNGrad, drawn((3, 5), (4,)), groups=lambda params: params[:1])
    both.step(0)
    for opt, params in ((both.fused, both.ours), (both.plain, both.theirs)):
        opt.add_param_group({"params": params[1:], "lr": 0.1, "weight_decay": 0.1})
    both.step(1)
    both.step(2)


def test_parameters_may_move_and_turn():
    both = Both(WNGrad, drawn((4, 4)))
    both.step(0)
    for turn in (Tensor.clone, Tensor.t, Tensor.contiguous):
        for p in both.ours + both.theirs:
            p.data = turn(p.data)
        both.step(1)


@pytest.mark.parametrize("shape", [(8, 3), (24,)])
def test_another_shape_in_the_same_memory_is_refused(shape):
    both = Both(WNGrad, drawn((4, 6)))
    both.step(0)
    for p, opt in ((both.ours[0], both.fused), (both.theirs[0], both.plain)):
        p.grad = None
        p.data = p.data.view(shape)
        p.grad = torch.ones_like(p)
        with pytest.raises(ValueError, match="nor a shape may change"):
            opt.step()


def test_a_parameter_may_change_its_group_or_give_its_place_and_memory_to_another():
    both = Both(WNGrad, drawn((2, 3), (2, 3), (2, 3)))
    for opt in (both.fused, both.plain):
        first = opt.param_groups[0]
        opt.add_param_group({"params": [first["params"].pop()], "lr": 0.01})
    both.step(0)
    for opt in (both.fused, both.plain):
        first, second = opt.param_groups
        second["params"].insert(0, first["params"].pop())
    both.step(1)
    for params, opt in ((both.ours, both.fused), (both.theirs, both.plain)):
        params[0] = opt.param_groups[0]["params"][0] = nn.Parameter(params[0].data)
    both.step(2)
    assert both.fused.state[both.ours[0]]["t"].item() == 1


def test_other_state_is_seen():
    both = Both(WNGrad, drawn((3, 5)), momentum=0.9)
    both.step(0)
    for p, q in both.pairs:
        both.fused.state[p]["b"] = both.fused.state[p]["b"] * 4
        both.plain.state[q]["b"] *= 4
    both.step(1)
    for opt in (both.fused, both.plain):
        opt.state.clear()
    both.step(2)


def test_gradients_may_have_other_strides_and_addresses_in_every_step():
    both = Both(WNGrad, drawn((4, 8)), momentum=0.9)
    (p, q), room = both.pairs[0], torch.randn(100, device=DEVICE)
    even, odd = room[4:36].view(4, 8), room[5:37].view(4, 8)
    turned, one = room[:32].view(8, 4).t(), room[3].expand(4, 8)
    for g in (even, odd, even, turned, room[:64].view(4, 16)[:, ::2], one, odd):
        p.grad = q.grad = g
        both.fused.step()
        both.plain.step()
        both.assert_together()


@only_triton
@pytest.mark.parametrize("warps", [1, 8])
def test_a_program_may_take_several_tiles(monkeypatch, warps):
    monkeypatch.setattr(tables, "WARPS", warps)
    both = Both(WNGrad, drawn((137, 5), (60,), (3, 70), (1, 1)), momentum=0.9)
    both.step(0)
    record = records.TRITON_PARAMETER
    at, words = record.names.index("span"), len(record.names)
    batches = [launch.batch for launch in launches(both.fused) if isinstance(launch, cuda.Launch)]
    spans = {span for batch in batches for span in batch.records.words[at::words]}
    assert max(spans) > 1


@only_triton
def test_rows_too_long_for_one_program_are_cut():
    both = Both(WNGrad, drawn((1, 700)), momentum=0.9)
    assert tiling.LONGEST < 700 or CUDA
    both.step(0)


def test_1_minus_beta_does_not_lose_its_digits():
    (x,) = drawn((3, 5))
    p, q = (
        nn.Parameter(x.to(DEVICE, dtype, copy=True)) for dtype in (torch.float32, torch.float64)
    )
    for k, opt in enumerate((WNAdam([p], beta=0.9999, fused=True), WNAdam([q], beta=0.9999)) * 3):
        param = opt.param_groups[0]["params"][0]
        draw = torch.Generator().manual_seed(k // 2)
        param.grad = torch.randn(x.shape, generator=draw).to(param)
        opt.step()
    torch.testing.assert_close(p.double(), q, rtol=1e-6, atol=1e-6)


# ------------------------------------------------------------------ blocks of every shape


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_neuron_groups_step_as_on_the_plain_path(make):
    model = nn.Sequential(
        nn.Embedding(5, 3),
        nn.Linear(3, 4),
        nn.Conv2d(4, 6, (1, 3), groups=2),
        nn.ConvTranspose2d(6, 4, 2, groups=2),
        nn.LayerNorm((2, 2)),
        nn.GRUCell(3, 2),
    )
    params, shapes = list(model.parameters()), neuron_groups(model)
    index = {p: i for i, p in enumerate(params)}

    def groups(copies):
        return [{**g, "params": [copies[index[p]] for p in g["params"]]} for g in shapes]

    both = Both(make, params, groups=groups, weight_decay=0.01)
    for k, absent in enumerate([(), (1, 4), ()]):
        both.step(k, absent)
    assert not both.fused.why_plain()


@pytest.mark.parametrize(
    ("shape", "b"),
    [((6, 4), (3, 1)), ((6, 4), (1, 2)), ((6, 4), (3, 2)), ((4, 3, 2, 2), (2, 3, 1, 1))],
)
@pytest.mark.parametrize("layout", LAYOUTS[:3])
def test_b_may_have_any_shape_that_divides(shape, b, layout):
    """(heads, 1), and the (groups, out) of a transposed convolution, among others."""
    both = Both(WNGrad, drawn(shape), per=lambda p: b, momentum=0.9)
    for k in range(2):
        for p, q in both.pairs:
            p.grad = q.grad = filled(shape, layout, p.dtype, k, 1.0)[0]
        both.fused.step()
        both.plain.step()
        both.assert_together()
    assert both.fused.state[both.ours[0]]["b"].shape == b
    assert not both.fused.why_plain()


# ------------------------------------------------------------------ who takes it, and who says so


def refused(reason, make=WNGrad, dtype=torch.float32, **options):
    p = nn.Parameter(torch.zeros(2, 3, dtype=dtype, device=DEVICE))
    owner = make.__name__
    with pytest.raises(ValueError, match=rf"^{owner}: `fused` is True, .*\(2, 3\).*: {reason}\.$"):
        make([p], fused=True, **options)


def test_insisting_names_owner_argument_and_reason():
    if CUDA:
        refused("its type is torch.float64", dtype=torch.float64)
    refused("its type is torch.complex64", WNAdam, dtype=torch.complex64)
    refused("`differentiable` is True", differentiable=True)


@only_triton
def test_without_triton_that_is_the_reason(monkeypatch):
    monkeypatch.setattr(eligibility, "why_no_triton", lambda: "Triton is not installed")
    refused("Triton is not installed")


@only_triton
def test_a_triton_that_is_too_old_is_the_reason(monkeypatch):
    old = ModuleType("triton")
    old.__version__, old.__spec__ = "3.2.0", ModuleSpec("triton", None)
    monkeypatch.setitem(sys.modules, "triton", old)
    assert eligibility.why_no_triton.__wrapped__() == "Triton 3.2.0 is older than 3.4"
    assert not launch_key.interpreted()


def sparse(p):
    rows = torch.ones(1, *p.shape[1:])
    return torch.sparse_coo_tensor([[1]], rows, p.shape, device=DEVICE, check_invariants=True)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, on CUDA
def test_a_sparse_gradient_is_refused_at_the_step_and_changes_nothing():
    p, q = (nn.Parameter(t.to(DEVICE)) for t in drawn((2, 3), (2, 3)))
    before = p.detach().clone()
    opt = WNGrad([p, q], fused=True)
    p.grad, q.grad = torch.ones_like(p), sparse(q)
    with pytest.raises(
        ValueError, match=r"^WNGrad: `fused` is True, .*: its gradient is sparse\.$"
    ):
        opt.step()
    assert torch.equal(p, before)
    assert not opt.state[p]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch's own, on CUDA
def test_what_cannot_take_it_is_left_to_the_plain_path_and_says_why():
    both = Both(WNGrad, [*drawn((4, 3), (5,)), *drawn((3,), dtype=torch.float64)], fused=None)
    wide = both.ours[2]
    assert both.fused.why_plain() == {wide: "its type is torch.float64"}
    for k in range(3):
        both.give(k)
        if k:
            for p in (both.ours[0], both.theirs[0]):
                p.grad = sparse(p)
        both.fused.step()
        both.plain.step()
        both.assert_together()
        left = {both.ours[0]: "its gradient is sparse"} if k else {}
        assert both.fused.why_plain() == {**left, wide: "its type is torch.float64"}
    both.set(fused=False)
    assert set(both.fused.why_plain().values()) == {"`fused` is False"}


def test_relatives_of_other_types_go_the_plain_way_present_or_absent():
    mixed = [*drawn((4, 3)), *drawn((3,), dtype=torch.float64)]
    both = Both(WNGrad, mixed, fused=None, per="model")
    for k, absent in enumerate([(), (1,), (0,), (1,)]):
        both.step(k, absent)
        assert both.ours[0] in both.fused.why_plain() or 0 in absent


def test_a_model_cast_after_some_steps_goes_the_plain_way():
    """Its momentum is still of the type it was made in."""
    both = Both(WNGrad, drawn((3, 5)), fused=None, momentum=0.9)
    both.step(0)
    for p in both.ours + both.theirs:
        p.grad, p.data = None, p.data.bfloat16()
    both.step(1)
    assert "of another type" in both.fused.why_plain()[both.ours[0]]


def test_a_gradient_that_is_not_yet_worked_out_goes_the_plain_way():
    """What lies in memory has the other sign."""
    both = Both(WNGrad, drawn((3, 5)), fused=None)
    (p, q), z = both.pairs[0], torch.randn(3, 5, dtype=torch.complex64, device=DEVICE)
    p.grad = q.grad = z.conj().imag
    both.fused.step()
    both.plain.step()
    both.assert_together()
    assert both.fused.why_plain()[p] == "its gradient must be worked out first"


def test_a_parameter_whose_sign_is_still_to_be_turned_goes_the_plain_way():
    """It is moved the right way: what lies in memory has the other sign."""
    z = torch.randn(3, 5, dtype=torch.complex64, device=DEVICE)
    p, q = z.conj().imag, z.conj().imag.clone()
    assert p.is_neg()
    p.grad = q.grad = torch.ones(3, 5, device=DEVICE)
    WNGrad([p], fused=None).step()
    WNGrad([q], fused=False).step()
    torch.testing.assert_close(p.clone(), q)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch 2.10 or later")
def test_a_gradient_of_another_type_goes_the_plain_way():
    both = Both(WNGrad, drawn((3, 5), dtype=torch.bfloat16), fused=None)
    both.step(0)
    for p in both.pairs[0]:
        p.grad, p.grad_dtype = None, None
        p.grad = torch.ones(3, 5, device=DEVICE)
    both.fused.step()
    both.plain.step()
    both.assert_together()
    assert both.fused.why_plain()[both.ours[0]] == "its gradient is of type torch.float32"


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="torch 2.10 or later")
@pytest.mark.parametrize("in_c", [True, False])
def test_gradients_that_change_where_they_lie_are_seen(monkeypatch, in_c):
    """The same memory as another type, with other strides, with its sign still to be turned."""
    if not in_c:  # as without a compiler
        monkeypatch.setattr(snapshot, "_walk", lambda: None)
    both = Both(WNGrad, drawn((4, 4), dtype=torch.bfloat16), fused=None)
    for p in both.pairs[0]:
        p.grad_dtype = None
    g = drawn((4, 4), dtype=torch.bfloat16)[0].to(DEVICE)
    negative = torch._neg_view(g)
    kinds = [g, g, g.view(torch.float16), g, g.t(), g.t(), negative, g, g, negative, g]
    for grad in kinds:
        for p in both.pairs[0]:
            p.grad = grad
        both.fused.step()
        both.plain.step()
        both.assert_together()
        both.theirs[0].data.copy_(both.ours[0].data)


@pytest.mark.parametrize("turn", [lambda x: x.t(), lambda x: x.view(2, 8), lambda x: x[:2]])
def test_a_parameter_that_is_another_view_of_its_memory_is_seen(turn):
    both = Both(WNGrad, drawn((4, 4)), fused=None)
    both.step(0)
    both.step(1)
    for p in both.pairs[0]:
        p.grad, p.data = None, turn(p.data)
    both.give(2)
    if both.ours[0].shape == (4, 4):
        both.fused.step()
        both.plain.step()
        both.assert_together()
        return
    for opt in (both.fused, both.plain):
        with pytest.raises(ValueError, match="neither `per` nor a shape may change"):
            opt.step()


def test_a_step_holds_no_gradient():
    """One that is set to None is freed."""
    both = Both(WNGrad, drawn((4, 4)), fused=None)
    for k in range(3):
        both.step(k)
    p = both.ours[0]
    gone = weakref.ref(p.grad)
    p.grad = None
    assert gone() is None


@only_c
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"nonfinite": "raise"}, "`nonfinite` is 'raise'"),
        ({"decoupled_weight_decay": False}, "weight decay is in its gradient"),
        ({"b_init": "gradient"}, "`b_init` is from its gradient"),
        ({"per": "model"}, "shares its b"),
    ],
    ids=str,
)
def test_what_is_orthogonalized_in_a_way_of_its_own_goes_the_plain_way(options, reason):
    both = Both(WNMuon, drawn((3, 5), (3, 4)), fused=None, **options)
    both.step(0)
    assert set(both.fused.why_plain().values()) == {f"it is orthogonalized, and {reason}"}


@pytest.mark.parametrize("options", [{"per": "model"}, {"joint": True}], ids=str)
def test_parameters_that_share_a_b_have_each_a_norm_of_its_own(options):
    tensors = [
        scale * each for scale, each in zip((1, 10, 0.1), drawn((7,), (7,), (7,)), strict=True)
    ]
    both = Both(WNMuon, tensors, finetune=True, average=None, **options)
    for k in range(3):
        both.step(k)
    norms = [float(its["norm"]) for its in both.fused.state.values()]
    assert max(norms) > 10 * min(norms)
    assert not both.fused.why_plain()


@pytest.mark.parametrize("per", ["neuron", "tensor"])
def test_norms_are_read_by_every_engine(per):
    """In rows that a program has whole, and in those that are cut or share one b."""
    sizes = [(3, 5), (2, 300), (7,), (1, 2)]
    tensors = [(k + 1) * each for k, each in enumerate(drawn(*sizes))]
    both = Both(WNMuon, tensors, finetune=True, per=per, average=None)
    both.step(0)
    both.set(lr=0.1)
    both.step(1)
    norms = [float(its["norm"]) for its in both.fused.state.values()]
    assert len({round(norm, 3) for norm in norms}) == 4
    assert not both.fused.why_plain()
    before = [p.detach().clone() for p in both.ours]
    for its in both.fused.state.values():
        its["norm"].zero_()  # in place, so that nothing but the kernels can see it
    both.give(2)
    both.fused.step()
    assert all(map(torch.equal, both.ours, before))


@only_c
def test_the_role_of_a_group_may_change_between_steps():
    """A matrix becomes an embedding, whose rows without a gradient stay, and another layout."""
    both = Both(WNMuon, drawn((6, 5)))
    for k, role in enumerate(("matrix", "embedding", "embedding", "matrix")):
        both.set(role=role, layout=("rows", 1 + k % 2))
        both.give(k)
        for p in (both.ours[0], both.theirs[0]):
            p.grad[2] = 0
        both.fused.step()
        both.plain.step()
        exactly(both)
    assert not both.fused.why_plain()


@only_triton
@pytest.mark.skipif(CUDA, reason="there is no such stage yet")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_u_may_be_of_another_type_than_its_parameter(dtype, monkeypatch):
    """In float16, as products on a GPU leave it; half the spacing of u, in steps of λ/b."""
    whole = matrices._matrix
    monkeypatch.setattr(matrices, "_matrix", lambda *a: (m := whole(*a))._replace(u=m.u.half()))
    both = Both(WNMuon, drawn((6, 5), (3, 300), (70, 2), dtype=dtype), fused=True)
    both.give(0)
    both.fused.step()
    both.plain.step()
    for p, q in both.pairs:
        mean, other = (opt.state[x]["average"] for opt, x in ((both.fused, p), (both.plain, q)))
        torch.testing.assert_close(mean, other, rtol=1e-6, atol=6 * 0.3 / 10 * 2.0**-11)
        assert not torch.equal(mean, other)
    assert not both.fused.why_plain()


@pytest.mark.skipif(CUDA, reason="one CPU process is enough")
def test_ranks_that_must_agree_go_the_plain_way(tmp_path):
    """Only the plain path asks the other ranks before it refuses a gradient."""
    import torch.distributed as dist
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/x", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        p = nn.Parameter(distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)]))
        for nonfinite, says in (("raise", ["`nonfinite` is 'raise', on which"]), ("skip", [])):
            p.grad = distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)])
            opt = WNGrad([p], nonfinite=nonfinite)
            opt.step()
            reasons = list(opt.why_plain().values())
            assert [reason[: len(say)] for reason, say in zip(reasons, says, strict=True)] == says
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------ what is not finite, and scalers


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("absent", [(), (0,), (1,)])
def test_relatives_of_different_sizes_are_refused_however_they_came_together(order, absent):
    both = Both(WNGrad, drawn(*[(2, 3), (5, 3)][::order]), fused=None)
    both.step(0)
    before = [p.detach().clone() for p in both.ours]
    both.set(joint=True)
    both.give(1, absent)
    for opt in (both.fused, both.plain):
        with pytest.raises(ValueError, match="`joint` parameters must have as many blocks each"):
            opt.step()
    assert all(torch.equal(p, x) for p, x in zip(both.ours, before, strict=True))


@pytest.mark.parametrize("late", [0, 1])
def test_a_relative_without_a_buffer_does_not_cost_the_others_theirs(late):
    both = Both(WNGrad, drawn((8, 30), (8, 30)), fused=None, momentum=0.9, joint=True)
    both.step(0, absent=(late,))
    for k, mu in enumerate((0.0, 0.0, 0.9, 0.9), 1):
        both.set(momentum=mu)
        both.step(k)
        mixed = "others that share its b differ in direction" in both.fused.why_plain().values()
        assert mixed == (mu == 0)


@pytest.mark.parametrize("options", [{}, {"per": "model"}], ids=str)
def test_a_refused_gradient_changes_nothing_on_either_path(options):
    tensors = [*drawn((3, 5)), *drawn((3, 2), dtype=torch.float64)]
    for order in (tensors, tensors[::-1]):  # first the fused one is bad, then the plain one
        both = Both(WNGrad, order, fused=None, nonfinite="raise", momentum=0.9, **options)
        both.step(0)
        before = [p.detach().clone() for p in both.ours]
        kept = copy.deepcopy(both.fused.state_dict()["state"])
        both.give(1, bad=float("inf"))
        with pytest.raises(ValueError, match="`nonfinite` is 'raise'"):
            both.fused.step()
        assert all(torch.equal(p, x) for p, x in zip(both.ours, before, strict=True))
        after = both.fused.state_dict()["state"]
        assert all(torch.equal(after[i][key], kept[i][key]) for i in kept for key in kept[i])
        both.step(2)


def test_skips_are_counted_and_leave_a_block_as_it_was():
    both = Both(WNAdam, drawn((3, 5), (4,)), nonfinite="skip")
    for k, bad in enumerate((None, float("nan"), float("inf"), None)):
        both.step(k, bad=bad)
    assert both.fused.skipped() == both.plain.skipped() == 2


@pytest.mark.parametrize("options", [{}, {"per": "model"}, {"momentum": 0.9}], ids=str)
def test_a_scaler_s_attributes_count_while_they_are_there(options):
    both = Both(WNGrad, drawn((3, 5), (4,)), **options)
    for k, (scale, found) in enumerate(
        [(None, None), (8.0, 0.0), (8.0, 1.0), (None, 1.0), (3.0, None), (None, None), (4.0, 0.0)]
    ):
        before = both.ours[0].detach().clone()
        for opt in (both.fused, both.plain):
            for name, value in (("grad_scale", scale), ("found_inf", found)):
                vars(opt).pop(name, None)
                if value is not None:
                    setattr(opt, name, torch.full((1,), value, device=DEVICE))
        both.step(k)
        assert torch.equal(both.ours[0], before) == (found == 1.0)


# ------------------------------------------------------------------ plans and checkpoints


def test_launches_do_not_pile_up():
    both = Both(WNGrad, drawn(*[(2,)] * 6))
    for k in range(24):
        both.step(k, absent=[i for i in range(6) if k >> i & 1])
    assert len(both.fused._engine._launches) <= engine._MOST


def test_a_parameter_taken_out_of_the_optimizer_is_freed():
    both = Both(WNGrad, drawn((4, 4), (3, 2)), momentum=0.9)
    both.step(0)
    both.step(1)
    gone = weakref.ref(both.ours[1])
    storage = weakref.ref(both.fused.state[both.ours[1]]["velocity"])
    both.fused.state.pop(both.ours[1])
    both.fused.param_groups[0]["params"].pop()
    both.ours.pop()
    assert gone() is None
    assert storage() is None
    both.plain.param_groups[0]["params"].pop()
    both.theirs.pop()
    both.step(2)
    assert len(both.fused._engine._launches) == 1  # those of the step before are gone


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("make", [WNGrad, WNAdam, WNMuon])
def test_a_model_may_be_moved_and_cast_after_a_step(make, swap):
    """torch may swap parameters for others, which nothing may refer to weakly."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    opt = make(model.parameters())
    model(torch.ones(3, 4)).sum().backward()
    opt.step()
    opt.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        model.bfloat16()
        model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
        opt.step()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert all(p.isfinite().all() for p in model.parameters())


def test_parameters_on_one_memory_take_the_plain_step_one_after_another():
    """As with torch's own optimizers both steps count, always."""
    a, b = (nn.Parameter(torch.zeros(4, 4, device=DEVICE)) for _ in "ab")
    b.data = a.data
    other = nn.Parameter(torch.zeros(4, 4, device=DEVICE))
    opt = WNGrad([a, b, other], fused=None)
    for p in (a, b, other):
        p.grad = torch.ones_like(p)
    opt.step()
    assert set(opt.why_plain().values()) == {"it lies on the memory of another"}
    assert other not in opt.why_plain()
    torch.testing.assert_close(a, torch.full_like(a, -2 / 5))  # twice −1/(1 + 4)


def test_state_that_changes_owner_in_the_same_places_is_seen():
    both = Both(WNGrad, drawn((4, 4), (4, 4)), momentum=0.9)
    both.step(0)
    both.step(1)
    for opt, (p, q) in ((both.fused, both.ours), (both.plain, both.theirs)):
        of_p, of_q = opt.state[p], opt.state[q]
        opt.state.clear()
        opt.state[q], opt.state[p] = of_p, of_q  # the tensors in the order they had
    both.step(2)


def test_a_backward_through_a_parameter_that_has_stepped_says_so():
    """As after any operation in place; a kernel's writing alone would go unseen."""
    p = nn.Parameter(drawn((3,))[0].to(DEVICE))
    opt = WNGrad([p], fused=True)
    for _ in range(2):
        loss = (p * p).sum()
        p.grad = torch.ones_like(p)
        opt.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_gradients_die_with_zero_grad():
    for options in ({}, {"per": "model"}, {"nonfinite": "raise", "momentum": 0.9}):
        both = Both(WNGrad, drawn((3, 5), (4,)), **options)
        both.step(0)
        both.step(1)
        grads = [weakref.ref(p.grad) for p in both.ours]
        both.fused.zero_grad()
        assert [g() for g in grads] == [None, None]


def test_a_captured_step_keeps_its_tables(monkeypatch):
    """Steps outside the graph, with other gradients, leave those that replays read alone."""
    both = Both(WNGrad, drawn((3, 5)))
    both.step(0)
    both.give(1)
    held = [both.ours[0].grad, both.theirs[0].grad]
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_capturing", lambda: True)
        patch.setattr(engine, "_outside_the_graph", nullcontext)
        both.fused.step()
    both.plain.step()
    both.step(2)
    (captured,) = both.fused._engine._captured
    for one in captured._launches:  # a replay
        one.step()
    both.theirs[0].grad = held[1]
    both.plain.step()
    both.assert_together()


def resumed(opt, params, fuse):
    """Another optimizer that goes on where this one stands."""
    other = type(opt)(params, **{**opt.defaults, "fused": fuse})
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    return other


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_a_checkpoint_goes_from_path_to_path(make):
    both = Both(make, drawn((3, 5), (4,)), b_init="gradient", nonfinite="skip")
    for k in range(6):
        both.step(k)
        fuse = bool(k % 2)
        both.fused = resumed(both.fused, both.ours, fuse)
        assert bool(both.fused.why_plain()) != fuse


def test_a_checkpoint_with_a_wider_b_goes_the_plain_way():
    both = Both(WNGrad, drawn((3, 5)), fused=None)
    both.step(0)
    wide = WNGrad([nn.Parameter(both.theirs[0].detach().double())], fused=False)
    wide.param_groups[0]["params"][0].grad = both.theirs[0].grad.double()
    wide.step()
    for opt in (both.fused, both.plain):
        opt.load_state_dict(wide.state_dict())
    assert not both.fused._engine._launches  # The new state may lie where the old one lay.
    both.step(1)
    assert "of another type" in both.fused.why_plain()[both.ours[0]]


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_pickles_and_copies_of_one_that_has_stepped_step_alike(make):
    model = nn.Linear(4, 3, device=DEVICE)
    opt = make(model.parameters(), fused=True)
    x = torch.ones(2, 4, device=DEVICE)
    model(x).square().sum().backward()
    opt.step()
    copies = [copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))]
    after = []
    for one, its in [(model, opt), *copies]:
        its.zero_grad()
        one(x).square().sum().backward()
        its.step()
        assert not its.why_plain()
        after.append(one.weight)
    assert torch.equal(after[0], after[1])
    assert torch.equal(after[0], after[2])


# ------------------------------------------------------------------ C alone: bit for bit


OPTIONS = [
    {},
    {"weight_decay": 0.01},
    {"weight_decay": 0.01, "decoupled_weight_decay": True},
    {"maximize": True, "b_init": "gradient"},
    {"nonfinite": "skip", "hold_1d": True},
    {"per": "tensor", "average": 8.0},
    {"per": "model", "nonfinite": "raise", "b_init": "gradient", "average": 0.5},
]


MATRICES = [
    ("matrix", {}),
    ("matrix", {"nonfinite": "skip", "average": None}),
    ("matrix", {"maximize": True, "per": "tensor", "weight_decay": 0.0}),
]


def exactly(both):
    """`assert_together`, to the last bit."""
    for p, q in both.pairs:
        ours, theirs = both.fused.state.get(p, {}), both.plain.state.get(q, {})
        assert ours.keys() == theirs.keys()
        for a, b in ((p, q), *((ours[key], theirs[key]) for key in ours)):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@only_c
@pytest.mark.parametrize(("kind", "options"), [*product(KINDS, OPTIONS), *MATRICES], ids=str)
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
def test_several_steps_are_those_of_the_plain_path_bit_for_bit(kind, options, dtype, monkeypatch):
    monkeypatch.setattr(cpu, "PIECE", 2**7)
    tensors = drawn((64, 30), (65,), (7, 3, 3, 3), (2, 2001), (1,), ())
    tensors.append(drawn((6, 5))[0].t())
    if kind != "matrix":  # which would have to be copied
        tensors.append(drawn((4, 5, 3, 3))[0].to(memory_format=torch.channels_last))
    both = Both(
        lambda params, **more: make(kind, params, lr=0.37, **options, **more),
        [t.to(dtype) for t in tensors],
    )
    for k in range(4):
        both.step(k)
        exactly(both)
    assert not both.fused.why_plain()


@only_c
def test_every_instruction_set_gives_the_same_bits(monkeypatch):
    ends = []
    best = snapshot.library.level()
    for level in range(best + 1):
        monkeypatch.setattr(snapshot.library, "level", lambda level=level: level)
        both = Both(WNAdam, drawn((64, 30), (65,), (2, 2001)), lr=0.37)
        for k in range(3):
            both.step(k)
        ends.append([p.detach().clone() for p in both.ours])
    assert all(torch.equal(p, q) for end in ends for p, q in zip(end, ends[0], strict=True))


@only_c
@pytest.mark.parametrize("dtype", cpu.DTYPES, ids=str)
@given(
    rows=st.integers(1, 4),
    length=st.integers(1, 300),
    piece=st.integers(1, 70),
    make=st.sampled_from([WNGrad, WNAdam]),
)
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_where_a_row_is_cut_does_not_show(rows, length, piece, make, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "PIECE", piece)
        both = Both(make, [torch.ones(rows, length, dtype=dtype)], lr=0.37, nonfinite="skip")
        for k in range(3):
            both.step(k)
            exactly(both)


@only_c
def test_the_number_of_threads_does_not_show():
    before, ends = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            both = Both(WNGrad, [torch.ones(300, 700), torch.ones(1, 300_000)], lr=0.37)
            for k in range(3):
                both.step(k)
            ends.append([p.detach().clone() for p in both.ours])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(p, q) for end in ends for p, q in zip(end, ends[0], strict=True))


@only_c
@given(
    rows=st.integers(1, 5),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    piece=st.integers(1, 70),
    kind=st.sampled_from(KINDS),
    start=st.sampled_from([1.0, "gradient"]),
    nonfinite=st.sampled_from(["propagate", "skip", "raise"]),
    bad=st.sampled_from([None, None, float("nan"), 1e38]),
    absent=st.lists(st.sets(st.integers(0, 3)), min_size=4, max_size=4),
    dtype=st.sampled_from(cpu.DTYPES),
)
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_parameters_share_their_b_as_on_the_plain_path(
    rows, lengths, piece, kind, start, nonfinite, bad, absent, dtype
):
    """A layer's weight and bias, and others of as many neurons, now and then without a gradient."""
    tensors = [torch.randn(rows, n).to(dtype) for n in lengths] + [torch.randn(rows).to(dtype)]
    group = {"joint": True, "b_init": start, "nonfinite": nonfinite}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "PIECE", piece)
        both = Both(lambda ps, **more: make(kind, ps, **more), tensors, **group)
        for k in range(4):
            both.give(k, absent[k])
            for p in (both.ours[-1], both.theirs[-1]):
                if k == 1 and bad is not None and p.grad is not None:
                    p.grad[0] = bad
            messages = [refusal(opt) for opt in (both.fused, both.plain)]
            assert messages[0] == messages[1]
            assert not both.fused.why_plain()
            exactly(both)


def refusal(opt):
    try:
        opt.step()
    except ValueError as error:
        return str(error)
    return None


def test_raise_asks_for_every_parameter_before_the_first_is_changed(monkeypatch):
    """Of two groups, which step in two calls; short rows, and long ones in pieces."""
    monkeypatch.setattr(cpu, "PIECE", 2**7)
    shapes = [(3, 5), (2, 501), (7,)]
    params = [nn.Parameter(torch.ones(shape, device=DEVICE)) for shape in shapes]
    first, last = {"params": params[:2]}, {"params": params[2:], "momentum": 0.9}
    opt = WNGrad([first, last], nonfinite="raise", fused=True)
    for at, shape in enumerate(shapes):
        for p in params:
            p.grad = torch.ones_like(p)
        params[at].grad.view(-1)[-1] = torch.inf
        with pytest.raises(ValueError, match="gradient of 1 blocks or more") as raised:
            opt.step()
        assert f"of shape {shape}" in str(raised.value)
        assert all(bool((p == 1).all()) for p in params)
        assert all(bool((its["b"] == 1).all()) for its in opt.state.values())
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert not any(bool((p == 1).any()) for p in params)
    assert not opt.why_plain()


@only_c
def test_c_is_the_default_for_float32_and_bfloat16_and_says_where_it_is_not_used():
    types = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    params = [nn.Parameter(torch.ones(2, 3, dtype=dtype)) for dtype in types]
    opt = WNGrad(params)
    for p in params:
        p.grad = torch.ones_like(p)
    left = {p: f"its type is {p.dtype}" for p in params[2:]}
    assert opt.why_plain() == left
    opt.step()
    assert opt.why_plain() == left
    random = WNGrad(params[:2], stochastic_rounding=True)
    assert random.why_plain() == {params[1]: "`stochastic_rounding` is True, on a CPU"}


@only_c
@pytest.mark.parametrize("part", [2.0**-10, 2.0**-9, 2.0**-8, 3 * 2.0**-9, 1.0, -0.75])
def test_bfloat16_is_rounded_as_torch_rounds_it(part):
    """x − g for every bfloat16 x there is; g is a part of x, so that many lie halfway between."""
    every = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)
    both = Both(WNGrad, [every], lr=1.0, hold_1d=True)
    for (p,), opt in ((both.ours, both.fused), (both.theirs, both.plain)):
        p.grad = (every.float() * part).to(torch.bfloat16)
        opt.step()
    (ours,), (theirs,) = both.ours, both.theirs
    assert torch.equal(ours.isnan(), theirs.isnan())
    numbers = ~ours.isnan()  # of NaN torch itself has several
    ours, theirs = ours.detach().view(torch.int16), theirs.detach().view(torch.int16)
    assert torch.equal(ours[numbers], theirs[numbers])
    assert not both.fused.why_plain()


@only_c
def test_no_nan_becomes_a_number_when_it_is_rounded():
    p = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    opt = WNGrad([p], fused=True)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        opt.step()
        opt.state[p]["b"].view(torch.int32).fill_(0x7FFFFFFF)  # which, rounded up, would be −0
    assert bool(p.isnan().all())


# ------------------------------------------------------------------ stochastic rounding

HALF = torch.bfloat16


@only_triton
def test_rounding_is_unbiased_and_goes_to_a_neighbour():
    n, t = 2**16, torch.tensor(3.0)
    for x, spacing in ((1 + 0.3 * 2**-7, 2**-7), (-5 - 0.9 * 2**-5, 2**-5), (1.5, 2**-7)):
        exact = torch.full((n,), x)
        got = rounded(exact, t).float()
        assert bool(((got - exact).abs() < spacing).all())
        share = (x / spacing) % 1
        error = spacing * (share * (1 - share) / n) ** 0.5
        assert abs(got.double().mean() - exact[0].double()) <= 4 * error
    assert torch.equal(rounded(torch.full((n,), 1.5), t), torch.full((n,), 1.5, dtype=HALF))


@only_triton
def test_rounding_leaves_inf_and_nan_alone_and_0_at_0():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    got = rounded(x, torch.tensor(1.0))
    assert torch.equal(got.nan_to_num(7, 8, 9), x.to(HALF).nan_to_num(7, 8, 9))


@only_triton
@pytest.mark.parametrize("make", [WNGrad, WNAdam])
@pytest.mark.parametrize(
    "options", [{}, {"per": "tensor"}, {"per": "model"}, {"nonfinite": "raise"}], ids=str
)
def test_both_paths_draw_the_same_numbers(make, options):
    """With gradients of 0 both compute the same x, which decay makes new; then so is each bit."""
    shapes = [(7, 30), (2, 500), (130,), (4, 3, 2, 2), ()]
    both = Both(make, drawn(*shapes, dtype=HALF), lr=0.5, weight_decay=0.003,
                decoupled_weight_decay=True, stochastic_rounding=True, **options)  # fmt: skip
    for _ in range(2):
        for p, q in both.pairs:
            p.grad, q.grad = torch.zeros_like(p), torch.zeros_like(q)
        both.fused.step()
        both.plain.step()
        assert all(torch.equal(p, q) for p, q in both.pairs)
    assert not both.fused.why_plain()


@only_triton
def test_large_parameters_are_rounded_entry_by_entry():
    p = nn.Parameter(torch.randn(600, 500).to(HALF))
    exact = p.detach().float() * (1 - 0.5 * 0.003)
    p.grad = torch.zeros_like(p)
    options = {"weight_decay": 0.003, "decoupled_weight_decay": True}
    WNGrad([p], 0.5, fused=False, stochastic_rounding=True, **options).step()
    assert torch.equal(p, rounded(exact, torch.tensor(1.0)))


@only_triton
@pytest.mark.parametrize("fuse", [True, False])
def test_small_updates_are_not_lost(fuse):
    """Each is a quarter of a spacing: to the nearest none survives, at random their sum does."""
    n, steps, each = 256, 16, 2.0**-10
    ends = []
    for stochastic in (False, True):
        p = nn.Parameter(torch.ones(n, dtype=HALF, device=DEVICE))
        p.grad = torch.ones_like(p)
        opt = WNGrad([p], each, hold_1d=True, fused=fuse, stochastic_rounding=stochastic)
        for _ in range(steps):
            opt.step()
        ends.append(p.double().mean().item())
    deviation = 2.0**-8 * (3 / 16 * steps / n) ** 0.5  # of the mean, if the draws are independent
    if CUDA or not fuse:  # Triton's interpreter cuts bfloat16 off instead of rounding it
        assert ends[0] == 1.0
    assert abs(ends[1] - (1 - steps * each)) <= 4 * deviation


@only_triton
@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_a_resumed_run_rounds_alike(make):
    both = Both(make, drawn((7, 30), (130,), dtype=HALF), stochastic_rounding=True)
    again = Both(make, both.ours, stochastic_rounding=True)
    for k in range(4):
        for one in (both, again):
            one.give(k)
            one.fused.step()
        again.fused = resumed(again.fused, again.ours, True)
        assert all(torch.equal(p, q) for p, q in zip(both.ours, again.ours, strict=True))


@only_triton
def test_inf_and_nan_show_and_float32_is_not_rounded():
    for dtype in (HALF, torch.float32):
        some = [
            Both(WNGrad, drawn((7, 3), dtype=dtype), stochastic_rounding=s) for s in (False, True)
        ]
        for one in some:
            one.give(0, bad=float("inf"))
            one.fused.step()
        a, b = (one.ours[0] for one in some)
        assert bool(a[0].isnan().all())
        assert torch.equal(a.isnan(), b.isnan())
        assert torch.equal(a.nan_to_num(), b.nan_to_num()) == (dtype == torch.float32)
