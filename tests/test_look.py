"""look.c: whether every tensor of a step is as it was noted."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import defaultdict

import pytest
import torch
from torch import Tensor, nn

from wngrad import WNAdam, WNGrad
from wngrad.optim import compiled, look

pytestmark = pytest.mark.skipif(
    look.noted([], {}) is None, reason="needs a C compiler, and DLPack's C interface to torch"
)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def one(*shape, dtype=torch.float32):
    p = nn.Parameter(torch.zeros(*shape, dtype=dtype, device=DEVICE))
    p.grad = torch.ones_like(p)
    return p


class Step:
    """Two parameters, one of them with state, and notes of them."""

    def __init__(self):
        self.params = [one(4, 4), one(3, dtype=torch.bfloat16)]
        b = torch.ones(4, 1, device=DEVICE)
        self.state = defaultdict(dict, {self.params[0]: {"b": b, "t": b[0, 0].clone()}})
        self.look = look.noted(self.params, self.state)

    @property
    def mine(self):
        return self.state[self.params[0]]

    def now(self):
        return self.look(self.params, self.state)


def test_what_is_as_it_was_gives_the_places_of_the_gradients():
    step = Step()
    for _ in range(2):
        assert step.now() == [p.grad.data_ptr() for p in step.params]
        for p in step.params:
            p.grad = torch.ones_like(p)  # elsewhere


def test_gradients_that_are_not_there_are_noted_too():
    p, q, r = one(2), one(3), one(4)
    q.grad = None
    noted = look.noted([p, q, r], {})
    assert noted([p, q, r], {}) == [p.grad.data_ptr(), r.grad.data_ptr()]
    q.grad = torch.ones_like(q)
    assert noted([p, q, r], {}) is None
    q.grad = r.grad = None
    assert noted([p, q, r], {}) is None


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
    "state in no dict": lambda step: step.state.update({step.params[0]: 1}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen_and_none_is_left_behind(name):
    step = Step()
    CHANGES[name](step)
    assert step.now() is None
    assert look.noted(Step().params, {})


@pytest.mark.skipif(DEVICE == "cpu", reason="needs two of them")
def test_a_gradient_on_another_device_is_seen():
    step = Step()
    g = step.params[0].grad
    g.data = g.data.cpu()
    assert step.now() is None


def test_an_attribute_that_fails_is_a_change():
    class Odd(nn.Parameter):
        broken = False

        @property
        def grad(self):
            if self.broken:
                raise RuntimeError("not now")
            return Tensor.grad.__get__(self)

        @grad.setter
        def grad(self, value):
            Tensor.grad.__set__(self, value)

    p = Odd(torch.zeros(2, device=DEVICE))
    p.grad = torch.ones_like(p)
    noted = look.noted([p], {})
    assert noted([p], {}) == [p.grad.data_ptr()]
    Odd.broken = True
    assert noted([p], {}) is None


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
def test_a_second_step_is_looked_at_and_not_planned_again(make):
    params = [one(4, 4), one(3)]
    opt = make(params)
    opt.step()
    if opt.why_plain():
        pytest.skip("no kernel here")
    plan = opt._engine.latest
    assert plan.look(params, opt.state)
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
        assert opt._engine.latest is plan


@pytest.mark.parametrize("by_look", [True, False])
@pytest.mark.parametrize("key", ["momentum_buffer", "b"])
def test_state_that_is_another_view_of_its_memory_is_seen_by_a_step(monkeypatch, by_look, key):
    if not by_look:
        monkeypatch.setattr(look, "noted", lambda params, state: None)
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


def test_a_parameter_that_is_frozen_costs_the_look_nothing():
    params = [one(4, 4), one(3)]
    params[1].grad = None
    opt = WNGrad(params)
    opt.step()
    if opt.why_plain():
        pytest.skip("no kernel here")
    assert opt._engine.latest.look(params, opt.state) == [params[0].grad.data_ptr()]


@pytest.mark.parametrize(
    "lacking",
    [
        lambda patch: patch.setenv("WNGRAD_NATIVE", "0"),
        lambda patch: patch.setattr(look, "_MAJOR", 2),
        lambda patch: patch.setattr(look, "_NAME", b"another"),
        lambda patch: patch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False),
    ],
    ids=["no compiler", "another DLPack", "another capsule", "no lock"],
)
def test_without_what_it_needs_there_is_none(monkeypatch, lacking):
    compiled.library.cache_clear()
    lacking(monkeypatch)
    try:
        assert look.noted([one(2)], {}) is None
    finally:
        compiled.library.cache_clear()
