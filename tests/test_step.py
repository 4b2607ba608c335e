"""The plain step, and who takes it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from wngrad import WNAdam, WNGrad
from wngrad.optim.directions import Direction, known_to_kernels
from wngrad.optim.fused import cpu, library, snapshot


class Operations(TorchDispatchMode):
    """The names of all operations of torch's inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def one(*shape, dtype=torch.float32):
    p = nn.Parameter(torch.zeros(*shape, dtype=dtype))
    p.grad = torch.ones_like(p)
    return p


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_fused_false_asks_for_no_kernel_and_takes_no_snapshot(make, monkeypatch):
    def forbidden(*_):
        raise AssertionError

    monkeypatch.setattr(library, "_loaded", forbidden)
    monkeypatch.setattr(snapshot.Snapshots, "take", forbidden)
    library.cpu.cache_clear()
    library.snapshot.cache_clear()
    p = one(2, 3)
    opt = make([p], fused=False)
    try:
        for _ in range(2):
            opt.step()
    finally:
        library.cpu.cache_clear()
        library.snapshot.cache_clear()
    assert opt.why_plain() == {p: "`fused` is False"}
    assert not opt._engine._launches


@pytest.mark.parametrize("make", [WNGrad, lambda params: WNGrad(params, momentum=0.9), WNAdam])
def test_a_small_tensor_costs_few_operations(make):
    """One norm for each tensor, and the rest of the step for all of them: see `lists`."""
    params = [one(4, 3, 3, 3) for _ in range(21)] + [one(4) for _ in range(41)]
    opt = make(params)
    opt.step()
    with Operations() as operations:
        opt.step()
    shaping = {"view", "narrow", "slice", "split", "detach", "alias", "split_with_sizes"}
    counted = [name for name in operations.names if name not in shaping]
    assert len(counted) <= 3 * len(params) + 60
    assert sum("foreach" in name for name in counted) >= 3


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("first", [False, True], ids=["at once", "after a step"])
@pytest.mark.parametrize("bad", [("gradient", -1.0), ("gradient", 0), ("gradient",), -1.0, "x"])
def test_a_bad_b_init_is_refused_on_either_path_and_changes_nothing(bad, first, fused):
    p = one(2, 3)
    opt = WNGrad([p], b_init="gradient", fused=fused)
    if first:
        opt.step()
    before, state = p.detach().clone(), {k: v.clone() for k, v in opt.state[p].items()}
    opt.param_groups[0]["b_init"] = bad
    with pytest.raises(ValueError, match="WNGrad: `b_init` must"):
        opt.step()
    assert torch.equal(p, before)
    assert all(torch.equal(opt.state[p][key], value) for key, value in state.items())


class Halved(Direction):
    """The gradient, and half a step."""

    calls = 0

    def displace(self, batch):
        type(self).calls += 1
        return [x / 2 for x in batch.u], batch.rates


def test_whoever_overrides_a_direction_is_stepped_with_it_and_by_no_kernel():
    class Half(WNGrad):
        def direction(self, group, p):
            return Halved()

    class Known(WNGrad):
        @known_to_kernels("momentum")
        def direction(self, group, p):
            return Halved()

    for make, reason in ((Half, "direction of `Half`"), (Known, "direction `Halved`")):
        p, calls = one(2, 3), Halved.calls
        opt = make([p])
        for _ in range(2):
            opt.step()
        assert Halved.calls == calls + 2
        assert opt.why_plain()[p] == f"no kernel knows the {reason}"
    with pytest.raises(ValueError, match=r"`fused` is True.* no kernel knows the direction of"):
        Half([one(2, 3)], fused=True)


def test_a_direction_that_the_rule_measures_is_made_from_whole_parameters():
    """However large: rows of a matrix may depend on one another, as orthogonalized ones do."""
    shapes = []

    class Whole(Direction):
        def propose(self, batch):
            shapes.extend(tuple(g.shape) for g in batch.g)
            return batch.g

    class Own(WNGrad):
        def direction(self, group, p):
            return Whole()

    p, q = one(6, 5), one(6, 5)
    Own([p]).step()
    WNGrad([q], fused=False).step()
    assert shapes == [(6, 5)]
    assert torch.equal(p, q)


def test_why_plain_prints_a_line_for_each_parameter():
    opt = WNGrad([one(300, 200), one(7)], fused=False)
    assert str(opt.why_plain()).splitlines() == [
        "(300, 200) float32  `fused` is False",
        "(7,) float32        `fused` is False",
    ]
    if library.cpu() and not isinstance(library.cpu(), str):
        assert str(WNGrad([one(2)]).why_plain()) == "every parameter takes the fused step"


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda p: setattr(p, "data", torch.zeros(300, 300)),
        lambda p: p.grad.resize_(300, 300),
        lambda p: p.grad.resize_(3, 5),
    ],
    ids=["a larger parameter", "a larger gradient", "other columns"],
)
def test_a_gradient_of_another_shape_is_refused_on_every_path(spoil, fused):
    p = one(3, 3)
    opt = WNGrad([p], fused=fused)
    for _ in range(2):
        opt.step()
    spoil(p)
    before = p.detach().clone()
    with pytest.raises(ValueError, match="`grad` must have the shape and device of its parameter"):
        opt.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize(
    "lr", [torch.tensor(1e-4, dtype=torch.float16), torch.tensor(4_000_000_000)], ids=str
)
def test_the_square_of_a_tensor_rate_is_taken_in_a_wide_type(lr):
    p, q = one(2, 3, dtype=torch.float64), one(2, 3, dtype=torch.float64)
    WNGrad([p], lr, fused=False).step()
    WNGrad([q], float(lr), fused=False).step()
    torch.testing.assert_close(p, q, rtol=1e-12, atol=0)


def test_counts_do_not_depend_on_the_default_type():
    p = one(2, 3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        opt = WNGrad([p], fused=False)
        opt.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert opt.state[p]["t"].dtype == torch.float32


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

        value = func(*map(open_, args), **{k: open_(v) for k, v in (kwargs or {}).items()})
        in_place = func.overloadpacket.__name__.endswith("_")
        return args[0] if in_place or not isinstance(value, Tensor) else Wrapper(value)


def test_a_parameter_that_wraps_another_takes_the_plain_path():
    inner = torch.zeros(2, 3)
    p = Wrapper(inner)
    p.grad = Wrapper(torch.ones(2, 3))
    opt = WNGrad([p])
    opt.step()
    assert torch.equal(inner, torch.full((2, 3), -0.25))  # −1/(1 + 3)
    opt.step()
    assert bool((inner < -0.25).all())
    if not isinstance(library.cpu(), str):
        assert list(opt.why_plain().values()) == [
            "it is of a class of its own, without memory to write to"
        ]


def test_a_mode_that_watches_operations_sees_them():
    p = one(2, 3)
    opt = WNGrad([p])
    for _ in range(2):
        opt.step()
        with Operations() as operations:
            opt.step()
        assert any("addcmul_" in name for name in operations.names)


def test_torch_func_can_trace_a_step():
    p = one(2, 3)
    opt = WNGrad([p])
    opt.step()

    def once_more(g):
        p.grad = g
        opt.step()
        return p.detach().clone()

    traced = make_fx(once_more)(torch.ones(2, 3))
    assert any("addcmul_" in str(node.target) for node in traced.graph.nodes)


def test_a_parameter_that_lies_on_itself_is_left_to_torch_which_refuses_it():
    p = torch.zeros(1, 3).expand(2, 3)
    p.grad = torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="single memory location"):
        WNGrad([p]).step()


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_a_parameter_with_the_negative_bit_steps_like_any_other(make, dtype, fused):
    p, q = (
        nn.Parameter(torch._neg_view(-torch.ones(2, 3, dtype=dtype))),
        nn.Parameter(torch.ones(2, 3, dtype=dtype)),
    )
    assert p.is_neg()
    for _ in range(2):
        for x in (p, q):
            x.grad = torch.full((2, 3), 0.5, dtype=dtype)
    one, other = make([p], fused=fused), make([q], fused=fused)
    for _ in range(2):
        one.step()
        other.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("options", [{}, {"nonfinite": "skip"}, {"momentum": 0.5}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parameters_on_one_storage_take_each_others_steps(dtype, options):
    """As with torch's optimizers, also where new values are made apart and then stored."""
    p, q, *others = (nn.Parameter(torch.ones(2, 3, dtype=dtype)) for _ in range(4))
    q.data = p.data
    opt = WNGrad([p, q, *others], fused=False, **options)
    for x in (p, q, *others):
        x.grad = torch.full((2, 3), 0.5, dtype=dtype)
    p.grad[0, 0] = torch.nan if options == {"nonfinite": "skip"} else 0.5
    opt.step()
    moved = 1 - others[0].detach().float()
    both = torch.full((2, 1), 2.0)
    if options == {"nonfinite": "skip"}:
        both[0] = 1.0
    torch.testing.assert_close(1 - p.detach().float(), both * moved, rtol=0.02, atol=0)
    assert torch.equal(p, q)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("compiling", [False, True])
def test_a_b_init_set_as_a_word_before_the_first_step_is_taken(fused, compiling, monkeypatch):
    p, q = (nn.Parameter(torch.ones(2, 3)) for _ in range(2))
    one, other = WNGrad([p], fused=fused), WNGrad([q], fused=fused, b_init="gradient")
    one.param_groups[0]["b_init"] = "gradient"
    for x, opt in ((p, one), (q, other)):
        x.grad = torch.ones(2, 3)
        (torch.compile(opt.step, backend="eager") if compiling else opt.step)()
    assert torch.equal(p, q)
    assert "b lies between" in one.diagnose()[0]


@pytest.mark.parametrize("fused", [None, False])
def test_a_refused_step_leaves_those_that_have_stepped_before_their_state(fused):
    """Though it has made state for others."""
    old, new = one(3, 2), one(2)
    opt = WNGrad([old, new], nonfinite="raise", fused=fused)
    new.grad = None
    opt.step()
    before = {name: value.clone() for name, value in opt.state[old].items()}
    new.grad = torch.full_like(new, torch.nan)
    with pytest.raises(ValueError, match="`nonfinite` is 'raise'"):
        opt.step()
    assert opt.state.keys() == {old}
    assert all(torch.equal(opt.state[old][name], value) for name, value in before.items())


def test_state_with_the_negative_bit_is_read_as_what_it_is():
    p, q = one(3, 5), one(3, 5)
    opt, plain = WNGrad([p], momentum=0.9), WNGrad([q], momentum=0.9, fused=False)
    opt.step()
    plain.step()
    for name in ("b", "velocity"):
        opt.state[p][name] = torch._neg_view(-opt.state[p][name])
    opt.step()
    plain.step()
    assert torch.allclose(p, q)


@pytest.mark.skipif(cpu.why_not() is not None, reason="no kernels of the CPU")
def test_an_absent_relative_of_another_type_sends_the_others_the_plain_way():
    there, away = one(3), one(3)
    opt = WNGrad([there, away], joint=True)
    opt.step()
    opt.state[away]["b"], away.grad = opt.state[away]["b"].double() + 5, None
    opt.step()
    assert "of another type" in str(opt.why_plain())
    assert torch.allclose(opt.state[there]["b"], torch.tensor(8 + 1 / 8))  # 3 + 5
