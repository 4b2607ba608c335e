"""The fused kernel, in lock-step with the plain path.

Without a GPU Triton's interpreter runs the kernel; with one, the GPU does.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor, nn

pytest.importorskip("triton")

from wngrad import WNAdam, WNGrad

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SPACING = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
POISON = 77.0
BUFFERS = ("m", "momentum_buffer")


@pytest.fixture(autouse=True)
def quiet():
    with np.errstate(all="ignore"):  # NumPy runs the interpreter, over NaN and inf on purpose
        yield


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
SHAPES += [(2, 3, 3, 3), (4, 2, 3), (3, 4, 2, 2, 2), (2, 4500), (1, 9000), (2, 70_000), (600, 2)]
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
def cases(draw):
    dtype = draw(st.sampled_from(list(SPACING)))
    some = st.tuples(st.sampled_from(SHAPES), *[st.sampled_from(LAYOUTS)] * 2)
    options = {
        "per": draw(st.sampled_from(["neuron", "neuron", "tensor", "model", "slice"])),
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.1])),
        "decoupled_weight_decay": draw(st.booleans()),
        "maximize": draw(st.booleans()),
        "nonfinite": draw(st.sampled_from(["propagate", "skip", "raise"])),
        "hold_1d": draw(st.booleans()),
        "b_init": draw(st.sampled_from([1.0, 0.3, "gradient", ("gradient", 2.0)])),
    }
    kind = draw(st.sampled_from(["plain", "momentum", "adam"]))
    return {
        "dtype": dtype,
        "params": draw(st.lists(some, min_size=1, max_size=4)),
        "options": options,
        "kind": kind,
        "lr": draw(st.sampled_from([1.0, 0.01, 0.0, "float32", "float64", "zero"])),
        "scale": draw(st.sampled_from([None, None, 1.0, 1024.0])),
        "found": draw(st.sampled_from([None, None, 0.0, 1.0])),
        "bad": draw(st.sampled_from([None, None, None, float("nan"), float("inf")])),
        "size": draw(st.sampled_from([1.0, 1.0, 1e-3, 30.0])),
        "seed": draw(st.integers(0, 2**20)),
    }


def make(kind, params, **options):
    if kind == "adam":
        return WNAdam(params, **options)
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
            for key in mine.keys() - {"skipped", "t"} | ({"t"} if kind == "adam" else set()):
                mine[key] = mine[key].double()
    plain.load_state_dict(saved)
    return theirs, plain


def take(opt, params, grads, case):
    for p, g in zip(params, grads, strict=True):
        p.grad = g if g.dtype == p.dtype else g.to(p.dtype)
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
    allowed = 1.01 * spacing * size + 16 * 2.0**-23 * (size + terms)
    assert bool((apart <= allowed + 1e-45).all()), (apart / allowed).max()


def largest(*tensors: Tensor | None) -> Tensor:
    every = [
        t.detach().double().abs().nan_to_num(0, 0, 0).flatten() for t in tensors if t is not None
    ]
    return torch.cat([torch.zeros(1, device=DEVICE, dtype=torch.float64), *every]).max()


def assert_alike(params, opt, theirs, plain, before, spacing):
    for p, q, (x, was) in zip(params, theirs, before, strict=True):
        mine, other = opt.state[p], plain.state[q]
        assert mine.keys() == other.keys()
        close(mine["b"], other["b"], 4e-7, torch.zeros((), device=DEVICE))
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


def lock_step(case):
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
        asked = [g.clone() for g in grads]
        before = [
            (
                p.detach().clone(),
                {k: v.clone() for k, v in opt.state.get(p, {}).items() if k in BUFFERS},
            )
            for p in params
        ]
        same = twin(kind, params, opt, dtype, options)
        wide = twin(kind, params, opt, torch.float64, options)
        said = take(opt, params, grads, case)
        assert said == take(same[1], same[0], grads, case) or (said and same[1])
        refused = take(wide[1], wide[0], grads, case)
        assert (said is None) == (refused is None)
        if said is not None:
            assert all(torch.equal(p, x) for p, (x, _) in zip(params, before, strict=True))
            return
        assert not opt.why_plain()
        assert all(torch.equal(g, a) or a.isnan().any() for g, a in zip(grads, asked, strict=True))
        assert_alike(params, opt, *same, before, SPACING[dtype])
        assert_alike(params, opt, *wide, before, SPACING[dtype])
    for room, t in rooms:  # nothing beside the parameters was written
        t.detach().fill_(POISON)
        assert bool((room == POISON).all())


@pytest.mark.parametrize("part", range(10))
def test_a_step_is_the_plain_path_s_whatever_the_shapes_strides_types_and_options(part):
    drawn = settings(max_examples=50, derandomize=False, phases=[Phase.generate], database=None)
    seed(part)(drawn(given(cases())(lock_step)))()
