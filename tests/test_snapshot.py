"""Snapshots: whether a step is like an earlier one, by C and by Python."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn

from wngrad import WNAdam, WNGrad
from wngrad.optim.fused import cpu, library, records, snapshot
from wngrad.optim.fused.snapshot import Snapshots

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IN_C = pytest.param(
    True, id="C", marks=pytest.mark.skipif(snapshot._walk() is None, reason="needs C and DLPack")
)


@pytest.fixture(params=[IN_C, pytest.param(False, id="Python")], autouse=True)
def in_c(request, monkeypatch):
    if not request.param:
        monkeypatch.setattr(snapshot, "_walk", lambda: None)
    return request.param


def one(*shape, dtype=torch.float32):
    p = nn.Parameter(torch.zeros(*shape, dtype=dtype, device=DEVICE))
    p.grad = torch.ones_like(p)
    return p


class Step:
    """Two parameters, one of them with state."""

    def __init__(self):
        self.params = [one(4, 4), one(3, dtype=torch.bfloat16)]
        b = torch.ones(4, 1, device=DEVICE)
        self.state = defaultdict(dict, {self.params[0]: {"b": b, "t": b[0, 0].clone()}})
        self.snapshots = Snapshots()

    @property
    def mine(self):
        return self.state[self.params[0]]

    def now(self):
        """The tensors of a step, and where the gradients lie."""
        return self.snapshots._tensors(self.params, self.state)


def test_equal_steps_are_equal_wherever_the_gradients_lie():
    step = Step()
    first, _ = step.now()
    for _ in range(2):
        tensors, places = step.now()
        assert tensors == first
        assert places == [p.grad.data_ptr() for p in step.params]
        for p in step.params:
            p.grad = torch.ones_like(p)  # elsewhere


def test_there_is_room_for_many():
    step = Step()
    before, _ = step.now()
    step.params += [one(2, 2, 2, 2) for _ in range(50)]
    tensors, places = step.now()
    assert tensors != before
    assert len(places) == 52
    assert step.now()[0] == tensors


def test_gradients_that_are_not_there_count_too():
    step = Step()
    seen = []
    for absent in ((), (0,), (1,), (0, 1)):
        for i, p in enumerate(step.params):
            p.grad = None if i in absent else torch.ones_like(p)
        tensors, places = step.now()
        assert len(places) == 2 - len(absent)
        seen.append(tensors)
    assert len(set(seen)) == 4


def changed_parameter(step):
    step.params[1] = one(3, dtype=torch.bfloat16)


def twin(step):
    p = step.params[0]
    step.params[0] = nn.Parameter(p.data)
    step.params[0].grad = p.grad


def moved_parameter(step):
    step.params[0].data = step.params[0].data.clone()


def same_memory(view):
    def change(step):
        step.params[0].data = view(step.params[0].data)

    return change


def other_gradient(grad):
    def change(step):
        p = step.params[0]
        p.grad_dtype = None
        p.grad = grad(p.grad)

    return change


def freed_gradient(step):
    step.params[0].grad.untyped_storage().resize_(0)


def gradient_of_another_shape(step):
    g = step.params[0].grad
    g.data = g.data.view(2, 8)


def other_state(key, value):
    def change(step):
        step.mine[key] = value(step.mine[key])

    return change


def more_state(step):
    step.state[step.params[1]] = {"b": torch.ones(3, 1, device=DEVICE)}


def negated(step):
    """The imaginary part of a conjugate: what lies in memory has the other sign."""
    z = torch.ones(4, 4, dtype=torch.complex64, device=DEVICE)
    step.params[0].data = z.imag
    before = step.now()[0]
    step.params[0].data = z.conj().imag
    assert step.params[0].is_neg()
    assert step.now()[0] != before


CHANGES = {
    "fewer parameters": lambda step: step.params.pop(),
    "more parameters": lambda step: step.params.append(one(2)),
    "others in another order": lambda step: step.params.reverse(),
    "another parameter": changed_parameter,
    "another parameter in the same memory": twin,
    "a parameter elsewhere": moved_parameter,
    "a parameter turned": same_memory(lambda x: x.t()),
    "a parameter of another shape": same_memory(lambda x: x.view(2, 8)),
    "a shorter parameter": same_memory(lambda x: x[:2]),
    "a parameter without memory": same_memory(lambda x: x[:0]),
    "no gradient": other_gradient(lambda g: None),
    "a gradient of another type": other_gradient(lambda g: g.view(torch.int32).to(torch.float64)),
    "a gradient turned": other_gradient(lambda g: g.t()),
    "a gradient to be negated": other_gradient(torch._neg_view),
    "a sparse gradient": other_gradient(lambda g: g.to_sparse()),
    "a gradient of another class": other_gradient(nn.Parameter),
    "a gradient of another shape": gradient_of_another_shape,
    "a gradient whose memory was freed": freed_gradient,
    "no state": lambda step: step.state.clear(),
    "less state": lambda step: step.mine.pop("t"),
    "more state": more_state,
    "more state of the same": lambda step: step.mine.update(m=step.mine["b"].clone()),
    "state elsewhere": other_state("b", torch.clone),
    "state elsewhere behind the same tensor": lambda step: setattr(
        step.mine["b"], "data", step.mine["b"].data.clone()
    ),
    "state of another shape": other_state("b", lambda b: b.view(2, 2)),
    "state that is sparse": other_state("b", lambda b: b.to_sparse()),
    "state that is no tensor": other_state("t", lambda t: 0.0),
    "state under another name": lambda step: step.mine.update(c=step.mine.pop("t")),
    "state of another parameter": lambda step: step.state.update(
        {step.params[1]: step.state.pop(step.params[0])}
    ),
    "a parameter to be negated": negated,
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen(name):
    step = Step()
    before, _ = step.now()
    CHANGES[name](step)
    after, _ = step.now()
    assert after != before
    assert step.now()[0] == after


@pytest.mark.skipif(DEVICE == "cpu", reason="needs two of them")
def test_a_gradient_on_another_device_is_seen():
    step = Step()
    before, _ = step.now()
    g = step.params[0].grad
    g.data = g.data.cpu()
    assert step.now()[0] != before


def test_subclasses_are_read_by_python():
    """They may say anything of themselves: here, of their gradient."""

    class Odd(nn.Parameter):
        @property
        def grad(self):
            return self.other

        @grad.setter
        def grad(self, value):
            self.other = value

    step = Step()
    p = Odd(torch.zeros(2, device=DEVICE))
    p.grad = torch.ones(2, device=DEVICE)
    step.params = [p]
    tensors, places = step.now()
    assert isinstance(tensors, tuple)
    assert places == [p.other.data_ptr()]


def test_nothing_is_held_and_nothing_is_lost():
    """No gradient and no state is kept alive, and no count of references drifts."""
    step = Step()
    p, g, t = step.params[0], step.params[0].grad, step.mine["t"]
    counted = (p, g, t, type(p), type(g), "grad", Tensor.is_neg, False, None)
    before = [sys.getrefcount(x) for x in counted]
    for _ in range(1000):
        assert step.now()
    # Other tests' garbage may go in the meantime.
    assert all(abs(sys.getrefcount(x) - n) < 500 for x, n in zip(counted, before, strict=True))
    gone = [weakref.ref(g), weakref.ref(t)]
    p.grad, step.mine["t"] = None, None
    del g, t, counted
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_a_second_step_finds_its_launches_ready(make):
    params = [one(4, 4), one(3)]
    opt = make(params)
    opt.step()
    if opt.why_plain():
        pytest.skip("no kernel here")
    _, launches = opt._engine._latest
    for k in range(2):
        for p in params:
            p.grad = torch.ones_like(p) if k == 0 or p is params[0] else p.grad
        opt.step()
        assert opt._engine._latest[1] is launches


@pytest.mark.parametrize("key", ["velocity", "b"])
def test_state_that_is_another_view_of_its_memory_is_seen_by_a_step(key):
    both = [one(4, 4), one(4, 4)]
    ours, plain = (
        WNGrad([p], momentum=0.9, fused=f) for p, f in zip(both, (None, False), strict=True)
    )
    draw = torch.Generator().manual_seed(0)
    for k in range(4):
        g = torch.randn(4, 4, generator=draw).to(DEVICE)
        for p, opt in zip(both, (ours, plain), strict=True):
            p.grad = g
            if k == 2:
                old = opt.state[p][key]
                opt.state[p][key] = old.t() if key != "b" else old.view(2, 2)
            if k >= 2 and key == "b":
                with pytest.raises(ValueError, match="neither `per` nor a shape may change"):
                    opt.step()
            else:
                opt.step()
        torch.testing.assert_close(*both, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "lacking",
    [
        lambda patch: patch.setenv("WNGRAD_NATIVE", "0"),
        lambda patch: patch.setattr(snapshot, "_MAJOR", 2),
        lambda patch: patch.setattr(snapshot, "_NAME", b"another"),
        lambda patch: patch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False),
    ],
    ids=["no library", "another DLPack", "another capsule", "no lock"],
)
def test_without_what_it_needs_there_is_no_walk_in_c(lacking, in_c):
    if not in_c:
        pytest.skip("only of C")
    library.snapshot.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        lacking(patch)
        assert snapshot._walk.__wrapped__() is None
    library.snapshot.cache_clear()
    assert snapshot._walk.__wrapped__() is not None


def test_minus_zero_is_zero_in_every_number():
    """Whichever comes first in a process: else a step without rate would settle later ones."""
    records.bits.cache_clear()
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones(2)
    WNGrad(params[:1], momentum=-0.0).step()
    opt = WNGrad(params[1:], lr=0.0)
    opt.step()
    opt.param_groups[0]["lr"] = 1.0
    opt.step()
    assert params[1].all()


@pytest.mark.skipif(cpu.why_not() is not None, reason="no kernels of the CPU")
def test_a_gradient_that_comes_to_lie_on_its_parameter_is_seen():
    p, apart = one(64), torch.ones(64, device=DEVICE)
    opt = WNGrad([p])
    for _ in range(2):
        p.grad = apart
        opt.step()
    p.grad = p.detach()
    opt.step()
    assert opt.why_plain() == {p: "its gradient lies on its memory"}
