"""The fused step on a CPU: native.c, held to the plain path bit for bit."""

from __future__ import annotations

import math
import os
import shutil
import stat
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from wngrad import WNAdam, WNGrad
from wngrad.optim import compiled, launch, native

pytest.importorskip("triton")
import test_fused as both_kernels

pytestmark = pytest.mark.skipif(
    native.why_not() is not None or torch.cuda.is_available(), reason="needs a C compiler, no GPU"
)


@pytest.fixture(autouse=True)
def chosen(monkeypatch):
    """`fused=True` asks for native.c, not for Triton's interpreter."""
    monkeypatch.setattr(launch, "interpreted", lambda: False)


# ------------------------------------------------------------------ in lock-step

drawn_cases = both_kernels.cases(dtypes=native.DTYPES)


@pytest.mark.parametrize("part", range(4))
def test_a_step_is_the_plain_path_s_whatever_the_shapes_strides_and_options(part):
    drawn = settings(max_examples=75, derandomize=False, phases=[Phase.generate], database=None)
    seed(part)(drawn(given(drawn_cases)(both_kernels.run_in_lock_step)))()


def pair(make, tensors, **options):
    """A fused optimizer and a plain one, over copies of the same parameters."""
    copies = [[nn.Parameter(t.clone()) for t in tensors] for _ in "ab"]
    return [
        (ps, make(ps, fused=fuse, **options))
        for ps, fuse in zip(copies, (True, False), strict=True)
    ]


def step(pairs, k):
    for params, opt in pairs:
        draw = torch.Generator().manual_seed(k)
        for p in params:
            p.grad = torch.randn(p.shape, generator=draw).to(p.dtype)
        opt.step()


def assert_same(pairs):
    (ours, fused), (theirs, plain) = pairs
    for p, q in zip(ours, theirs, strict=True):
        mine, other = fused.state.get(p, {}), plain.state.get(q, {})
        assert mine.keys() == other.keys()
        for a, b in ((p, q), *((mine[key], other[key]) for key in mine)):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


OPTIONS = [
    {},
    {"weight_decay": 0.01},
    {"weight_decay": 0.01, "decoupled_weight_decay": True},
    {"maximize": True, "b_init": "gradient"},
    {"nonfinite": "skip", "hold_1d": True},
    {"per": "tensor"},
    {"per": "model"},
    {"per": "model", "nonfinite": "raise", "b_init": "gradient"},
    {"nonfinite": "raise"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", ["plain", "momentum", "adam"])
@pytest.mark.parametrize("dtype", native.DTYPES, ids=str)
def test_several_steps_are_those_of_the_plain_path_bit_for_bit(kind, options, dtype):
    draw = torch.Generator().manual_seed(3)
    shapes = [(64, 300), (65,), (7, 3, 3, 3), (2, 200_001), (1,), ()]
    tensors = [torch.randn(shape, generator=draw) for shape in shapes]
    tensors.append(torch.randn(4, 5, 3, 3, generator=draw).to(memory_format=torch.channels_last))
    tensors.append(torch.randn(6, 5, generator=draw).t())

    def make(params, **more):
        return both_kernels.make(kind, params, lr=0.37, **options, **more)

    pairs = pair(make, [t.to(dtype) for t in tensors])
    for k in range(4):
        step(pairs, k)
        assert_same(pairs)
    assert not pairs[0][1].why_plain()


@given(
    st.integers(1, 4),
    st.integers(1, 300),
    st.integers(1, 70),
    st.sampled_from([WNGrad, WNAdam]),
    st.sampled_from(native.DTYPES),
)
@settings(max_examples=80)
def test_where_a_row_is_cut_does_not_show(rows, length, piece, make, dtype):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "interpreted", lambda: False)
        patch.setattr(native, "PIECE", piece)
        pairs = pair(make, [torch.ones(rows, length, dtype=dtype)], lr=0.37, nonfinite="skip")
        for k in range(3):
            step(pairs, k)
            assert_same(pairs)


def test_the_number_of_threads_does_not_show():
    before, ends = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            p = nn.Parameter(torch.ones(300, 700))
            q = nn.Parameter(torch.ones(1, 300_000))
            opt = WNGrad([p, q], 0.37, momentum=0.9, fused=True)
            for k in range(3):
                step([([p, q], opt)], k)
            ends.append((p, q))
    finally:
        torch.set_num_threads(before)
    for p, q in ends[1:]:
        assert torch.equal(p, ends[0][0])
        assert torch.equal(q, ends[0][1])


@given(
    rows=st.integers(1, 5),
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=3),
    piece=st.integers(1, 70),
    kind=st.sampled_from(["plain", "momentum", "adam"]),
    start=st.sampled_from([1.0, "gradient"]),
    nonfinite=st.sampled_from(["propagate", "skip", "raise"]),
    bad=st.sampled_from([None, None, math.nan, 1e38]),
    absent=st.lists(st.sets(st.integers(0, 3)), min_size=4, max_size=4),
    dtype=st.sampled_from(native.DTYPES),
)
@settings(max_examples=200)
def test_relatives_share_their_b_as_on_the_plain_path(
    rows, lengths, piece, kind, start, nonfinite, bad, absent, dtype
):
    """A layer's weight and bias, and others of as many neurons, now and then without a gradient."""
    tensors = [torch.randn(rows, n).to(dtype) for n in lengths] + [torch.randn(rows).to(dtype)]
    group = {"joint": True, "b_init": start, "nonfinite": nonfinite}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "interpreted", lambda: False)
        patch.setattr(native, "PIECE", piece)
        pairs = pair(lambda ps, **more: both_kernels.make(kind, ps, **more), tensors, **group)
        for k in range(4):
            said = []
            for params, opt in pairs:
                draw = torch.Generator().manual_seed(k)
                for i, p in enumerate(params):
                    g = torch.randn(p.shape, generator=draw).to(dtype)
                    p.grad = None if i in absent[k] else g
                if k == 1 and bad is not None and params[-1].grad is not None:
                    params[-1].grad[0] = bad
                try:
                    opt.step()
                except ValueError as error:
                    said.append(str(error))
            assert said[:1] == said[1:]
            assert not pairs[0][1].why_plain()
            assert_same(pairs)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("absent", [(), (0,), (1,)])
def test_relatives_of_different_sizes_are_refused(order, absent):
    same = both_kernels.test_relatives_of_different_sizes_are_refused_however_they_came_together
    same(order, absent, automatic=None)


@pytest.mark.parametrize("late", [0, 1])
def test_a_relative_without_a_buffer_does_not_cost_the_others_theirs(late):
    same = both_kernels.test_a_relative_without_a_buffer_does_not_cost_the_others_theirs
    same(late, automatic=None)


def test_raise_looks_at_every_parameter_before_the_first_is_changed():
    """Of two groups, which step in two calls; short rows, and long ones in pieces."""
    shapes = [(3, 5), (2, 200_001), (7,)]
    params = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    first, last = {"params": params[:2]}, {"params": params[2:], "momentum": 0.9}
    opt = WNGrad([first, last], nonfinite="raise", fused=True)
    for at, shape in enumerate(shapes):
        for p in params:
            p.grad = torch.ones_like(p)
        params[at].grad.view(-1)[-1] = torch.inf
        with pytest.raises(ValueError, match="gradient of 1 blocks or more") as said:
            opt.step()
        assert f"of shape {shape}" in str(said.value)
        assert all(bool((p == 1).all()) for p in params)
        assert all(bool((mine["b"] == 1).all()) for mine in opt.state.values())
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert not any(bool((p == 1).any()) for p in params)
    assert not opt.why_plain()


def test_it_is_the_default_for_float32_and_bfloat16_and_says_where_it_is_not_used():
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


@pytest.mark.parametrize("part", [2.0**-10, 2.0**-9, 2.0**-8, 3 * 2.0**-9, 1.0, -0.75])
def test_bfloat16_is_rounded_as_torch_rounds_it(part):
    """x − g for every bfloat16 x there is; g is a part of x, so that many lie halfway between."""
    every = torch.arange(2**16).to(torch.uint16).view(torch.bfloat16)

    def make(params, **more):
        return WNGrad(params, lr=1.0, hold_1d=True, **more)

    pairs = pair(make, [every])
    for (p,), opt in pairs:
        p.grad = (every.float() * part).to(torch.bfloat16)
        opt.step()
    ours, theirs = (p.detach() for (p,), _ in pairs)
    assert torch.equal(ours.isnan(), theirs.isnan())
    numbers = ~ours.isnan()  # of NaN torch itself has several
    assert torch.equal(ours.view(torch.int16)[numbers], theirs.view(torch.int16)[numbers])
    assert not pairs[0][1].why_plain()


def test_no_nan_becomes_a_number_when_it_is_rounded():
    p = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16))
    opt = WNGrad([p], fused=True)
    for _ in range(2):
        p.grad = torch.ones_like(p)
        opt.step()
        opt.state[p]["b"].view(torch.int32).fill_(0x7FFFFFFF)  # which, rounded up, would be −0
    assert bool(p.isnan().all())


def test_a_parameter_that_lies_on_itself_is_left_to_torch_which_refuses_it():
    p = torch.zeros(1, 3).expand(2, 3)
    p.grad = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="single memory location"):
        WNGrad([p]).step()


# ------------------------------------------------------------------ compiling


@pytest.fixture
def anew(monkeypatch, tmp_path):
    """Nothing is compiled yet, and the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    compiled.library.cache_clear()
    compiled._own_folder.cache_clear()
    yield tmp_path
    compiled.library.cache_clear()
    compiled._own_folder.cache_clear()


def compiler(folder, body):
    """A compiler that is a script."""
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def real():
    found = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
    assert found
    return found


def stepped():
    p = nn.Parameter(torch.ones(2, 3))
    opt = WNGrad([p])
    p.grad = torch.ones(2, 3)
    opt.step()
    assert torch.equal(p, torch.full((2, 3), 0.75))  # 1 − 1/(1 + 3)
    return opt.why_plain().get(p)


def test_what_is_compiled_once_is_not_compiled_again(anew):
    assert stepped() is None
    made = {path: path.stat().st_mtime_ns for path in (anew / "cache" / "wngrad").iterdir()}
    assert {path.name.split("-")[0] for path in made} == {"native", "look"}
    compiled.library.cache_clear()
    assert stepped() is None
    assert {path: path.stat().st_mtime_ns for path in made} == made


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ({"PATH": ""}, "there is no C compiler (cc)"),
        ({"WNGRAD_NATIVE": "0"}, "WNGRAD_NATIVE is 0"),
        ({"CC": "/nowhere/cc"}, "native.c could not be compiled or loaded ("),
        ({"CC": 'cc "'}, "native.c could not be compiled or loaded ("),
    ],
    ids=str,
)
def test_without_a_compiler_the_plain_path_steps_and_says_why(anew, monkeypatch, env, why):
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    assert stepped().startswith(why)
    with pytest.raises(ValueError, match="`fused` is True, but a parameter of shape"):
        WNGrad([nn.Parameter(torch.ones(2, 3))], fused=True)


def test_a_compiler_that_fails_is_quoted(anew, monkeypatch):
    monkeypatch.setenv("CC", compiler(anew, "echo 'no luck today' >&2; exit 1"))
    assert "no luck today" in stepped()
    assert not list((anew / "cache" / "wngrad").iterdir())  # nothing is left behind


@pytest.mark.parametrize("unknown", ["-march=native", "-fopenmp"])
def test_a_compiler_that_does_not_know_a_flag_does_without(anew, monkeypatch, unknown):
    body = f'for word in "$@"; do test "$word" = {unknown} && exit 1; done; exec {real()} "$@"'
    monkeypatch.setenv("CC", compiler(anew, body))
    assert stepped() is None


def test_a_compiler_may_be_two_words(anew, monkeypatch):
    monkeypatch.setenv("CC", f"env {real()}")
    assert stepped() is None


def test_a_cache_that_cannot_be_written_is_done_without(anew, monkeypatch):
    (anew / "cache").write_text("a file, not a folder")
    assert stepped() is None


def test_several_processes_may_compile_at_once(anew):
    code = "from wngrad.optim import native; print(native.why_not())"
    some = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    assert [one.communicate(timeout=120)[0].strip() for one in some] == ["None"] * 3
    assert len(list((anew / "cache" / "wngrad").iterdir())) == 1


# ------------------------------------------------------------------ who must not be written to


class Wrapper(torch.Tensor):
    """A tensor around another, without memory of its own, as quantized ones are."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def open_(x):
            return x.inner if isinstance(x, Wrapper) else x

        found = func(*map(open_, args), **{k: open_(v) for k, v in (kwargs or {}).items()})
        in_place = func.overloadpacket.__name__.endswith("_")
        return args[0] if in_place or not isinstance(found, torch.Tensor) else Wrapper(found)


def test_a_parameter_that_wraps_another_takes_the_plain_path():
    inner = torch.zeros(2, 3)
    p = Wrapper(inner)
    p.grad = Wrapper(torch.ones(2, 3))
    opt = WNGrad([p])
    opt.step()
    assert torch.equal(inner, torch.full((2, 3), -0.25))  # −1/(1 + 3)
    opt.step()
    assert bool((inner < -0.25).all())
    assert list(opt.why_plain().values()) == [
        "it is of a class of its own, without memory to write to"
    ]


def test_a_mode_that_watches_operations_sees_them():
    class Names(TorchDispatchMode):
        seen: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    p = nn.Parameter(torch.ones(2, 3))
    opt = WNGrad([p])
    for _ in range(2):
        p.grad = torch.ones(2, 3)
        opt.step()
        with Names():
            opt.step()
        assert "addcmul_" in Names.seen
        Names.seen.clear()


def test_torch_func_can_trace_a_step():
    p = nn.Parameter(torch.zeros(2, 3))
    p.grad = torch.ones(2, 3)
    opt = WNGrad([p])
    opt.step()

    def once_more(g):
        p.grad = g
        opt.step()
        return p.detach().clone()

    traced = make_fx(once_more)(torch.ones(2, 3))
    assert any("addcmul_" in str(node.target) for node in traced.graph.nodes)
