"""Bad input: a message that names the class, the argument, the rule and the value."""

from __future__ import annotations

import copy
import inspect
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from conftest import network, same, train, twins
from wngrad import WNAdam, WNGrad, WNMuon
from wngrad.optim.checks import item
from wngrad.optim.fused import launch_key

NAN = math.nan

BAD = [
    (ValueError, "lr", -0.1, ">= 0"),
    (ValueError, "lr", NAN, ">= 0"),
    (ValueError, "lr", math.inf, "finite"),
    (ValueError, "lr", torch.tensor(-1.0), ">= 0"),
    (ValueError, "lr", torch.ones(3), "one real element"),
    (ValueError, "lr", torch.ones(1, 1, 1), "0 to 2 dimensions"),
    (TypeError, "lr", "0.1", "a number"),
    (TypeError, "lr", None, "a number"),
    (TypeError, "lr", True, "a number"),
    (ValueError, "lr", 10**400, "finite"),
    (ValueError, "lr", 1e200, "<= 3.40282e+38"),
    (ValueError, "lr", 1e39, "<= 3.40282e+38"),
    (ValueError, "lr", torch.tensor(1e39, dtype=torch.float64), "<= 3.40282e+38"),
    (ValueError, "b_init", 1e-50, "the range of torch.float32"),
    (ValueError, "b_init", 1e39, "the range of torch.float32"),
    (ValueError, "b_init", 0.0, "> 0"),
    (ValueError, "b_init", -1.0, "> 0"),
    (ValueError, "b_init", NAN, "> 0"),
    (ValueError, "b_init", "grad", '"gradient"'),
    (ValueError, "b_init", ("gradient",), '"gradient", C'),
    (ValueError, "b_init", ("gradient", 0.0), "> 0"),
    (TypeError, "b_init", ("gradient", "2"), "a number"),
    (TypeError, "b_init", None, "a number"),
    (ValueError, "weight_decay", -0.1, ">= 0"),
    (ValueError, "per", "layer", "'neuron', 'tensor', 'model', 'slice'"),
    (TypeError, "per", 3, "a callable"),
    (TypeError, "per", [(3, 1)], "each of the 2 parameters"),
    (TypeError, "per", lambda p: None, "tuple of ints"),
    (TypeError, "per", lambda p: "ab", "tuple of ints"),
    (TypeError, "per", lambda p: (1.0, 1), "tuple of ints"),
    (ValueError, "per", lambda p: (1,) * (p.dim() + 1), "divide"),
    (ValueError, "per", lambda p: (2,) * p.dim(), "divide"),
    (ValueError, "per", lambda p: (0,) * p.dim(), "divide"),
    (ValueError, "per", lambda p: (-1,) * p.dim(), "divide"),
    (ValueError, "nonfinite", "ignore", "'propagate', 'skip', 'raise'"),
    (TypeError, "maximize", 1, "True or False"),
    (TypeError, "differentiable", None, "True or False"),
    (TypeError, "hold_1d", "yes", "True or False"),
    (ValueError, "joint", True, "as many blocks"),
]


def params():
    return [nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(5))]


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
@pytest.mark.parametrize(("error", "name", "value", "rule"), BAD)
def test_bad_arguments_are_named_in_the_message(make, error, name, value, rule):
    with pytest.raises(error) as info:
        make(params(), **{name: value})
    message = str(info.value)
    assert message.startswith(f"{make.__name__}: `{name}`")
    assert rule in message
    assert "got" in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("make", "name"), [(WNGrad, "momentum"), (WNAdam, "beta")], ids=["momentum", "beta"]
)
@pytest.mark.parametrize("value", [-0.1, 1.0, 1.5, NAN])
def test_momentum_and_beta_lie_below_one(make, name, value):
    rule = re.escape(f"{make.__name__}: `{name}` must be in [0, 1), got {value!r}.")
    with pytest.raises(ValueError, match=rule):
        make(params(), **{name: value})


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_a_bad_group_is_refused_like_a_bad_default_and_not_added(make):
    opt = make(params())
    with pytest.raises(ValueError, match="`b_init` must be > 0"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))], "b_init": -2.0})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_parameters_that_cannot_be_trained_are_refused(make):
    with pytest.raises(ValueError, match="`params` must be in every group"):
        make([{"lr": 1.0}])
    with pytest.raises(TypeError, match="`param_group` must be a dict"):
        make(params()).add_param_group([1])
    with pytest.raises(TypeError, match="`params` must hold tensors"):
        make([(params()[0],)])
    with pytest.raises(TypeError, match=r"`params` must be of a floating-point.*torch.int64"):
        make([torch.ones(2, dtype=torch.int64)])
    with pytest.raises(TypeError, match="`params` must hold tensors, got 3"):
        make([3])
    with pytest.raises(ValueError, match="empty parameter list"):
        make([])
    with pytest.raises(TypeError, match="set"):
        make([{"params": set(params())}])


@pytest.mark.parametrize(
    "opt",
    [
        lambda p: WNGrad(p, momentum=0.9),
        lambda p: WNGrad(p, weight_decay=0.1),
        lambda p: WNAdam(p),
    ],
)
def test_sparse_gradients_with_a_buffer_are_refused_before_anything_changes(opt):
    first, second = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2))
    opt = opt([first, second])
    first.grad, second.grad = torch.ones(3, 2), torch.ones(3, 2).to_sparse(1)
    with pytest.raises(ValueError, match=r"sparse `grad`.*\(3, 2\)"):
        opt.step()
    assert (first == 1).all()
    assert not opt.state


def test_a_checkpoint_of_another_model_is_refused_and_nothing_changes(optimizer):
    model = network()
    other = [nn.Parameter(p.detach().clone()) for p in reversed(list(model.parameters()))]
    opt, foreign = optimizer(model.parameters()), optimizer(other)
    train(model, opt, 2)
    for p in other:
        p.grad = torch.ones_like(p)
    foreign.step()
    before = opt.state_dict()
    before = [v.clone() for s in before["state"].values() for v in s.values()]
    with pytest.raises(ValueError, match="`state_dict` must fit"):
        opt.load_state_dict(foreign.state_dict())
    after = [v for s in opt.state_dict()["state"].values() for v in s.values()]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("b", "rule"),
    [
        (-1.0, r"`b` >= 0 and finite.*got -1.0"),
        (math.inf, r"`b` >= 0 and finite.*got inf"),
        (math.nan, r"`b` >= 0 and finite.*got nan"),
        (2.0, "`b` as a real tensor.*got float"),
        ([2.0, 2.0, 2.0], "`b` as a real tensor.*got list"),
        (torch.ones(3, 1, dtype=torch.bool), "`b` as a real tensor.*got torch.bool"),
        (torch.ones(3, 1, dtype=torch.complex64), "`b` as a real tensor.*got torch.complex64"),
    ],
    ids=["negative", "inf", "nan", "float", "list", "bool", "complex"],
)
def test_a_checkpoint_whose_b_is_no_b_is_refused_and_nothing_changes(optimizer, b, rule):
    p = nn.Parameter(torch.ones(3, 5))
    opt = optimizer([p], per="neuron", b_init=2.0, nonfinite="skip")
    p.grad = torch.ones(3, 5)
    opt.step()
    before, bad = opt.state[p]["b"].clone(), copy.deepcopy(opt.state_dict())
    if isinstance(b, float) and b != 2.0:
        bad["state"][0]["b"][1] = b
    else:
        bad["state"][0]["b"] = b
    with pytest.raises(ValueError, match=f"`state_dict` must hold {rule}.*(3, 5)"):
        opt.load_state_dict(bad)
    assert torch.equal(opt.state[p]["b"], before)


def test_a_checkpoint_of_a_block_that_has_diverged_is_loaded_and_shows(optimizer):
    p = nn.Parameter(torch.ones(3, 5))
    opt = optimizer([p], per="neuron", nonfinite="propagate")
    p.grad = torch.ones(3, 5)
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["b"][1] = NAN
    opt.load_state_dict(saved)
    opt.step()
    assert p.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("fused", [None, False])
def test_a_b_of_0_in_a_checkpoint_starts_from_b_init(fused):
    p = nn.Parameter(torch.ones(3, 5))
    opt = WNGrad([p], b_init=2.0, fused=fused)
    p.grad = torch.ones(3, 5)
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["b"].zero_()
    opt.load_state_dict(saved)
    opt.step()
    assert (opt.state[p]["b"] == 2 + 5 / 2).all()


def test_the_state_of_another_kind_of_optimizer_is_refused():
    model = network()
    adam = torch.optim.Adam(model.parameters())
    train(model, adam, 1)
    with pytest.raises(ValueError, match=r"`state_dict` must hold `b`.*exp_avg"):
        WNGrad(model.parameters()).load_state_dict(adam.state_dict())
    plain = WNGrad(model.parameters())
    train(model, plain, 1)
    with pytest.raises(ValueError, match="`t` of shape"):
        WNAdam(model.parameters()).load_state_dict(plain.state_dict())


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("first", [False, True], ids=["at once", "after a step"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("nonfinite", "skp"),
        ("b_init", "grad"),
        ("b_init", 1e-50),
        ("per", "layer"),
        ("b_init", ("gradient", -1.0)),
        ("b_init", ("gradient", [1.0])),
        ("joint", 1),
        ("per", [3]),
        ("per", [(1,), (1,)]),
        ("per", [(3,)]),
        ("per", (1,)),
        ("per", None),
        ("lr", "1"),
        ("lr", None),
        ("lr", True),
        ("lr", [1.0]),
        ("lr", 1j),
        ("lr", 1e39),
        ("lr", math.nan),
        ("lr", math.inf),
        ("weight_decay", torch.ones(2)),
        ("weight_decay", torch.tensor(-0.5)),
        ("weight_decay", [0.5]),
        ("weight_decay", None),
        ("momentum", torch.tensor(1.5)),
        ("momentum", torch.tensor(True)),
        ("momentum", torch.tensor(0.5j)),
        ("momentum", "0.5"),
        ("momentum", 1),
        ("momentum", 1.0),
        ("momentum", math.nan),
        ("weight_decay", -1.0),
        ("weight_decay", math.inf),
    ],
    ids=str,
)
def test_settings_changed_for_the_worse_are_named_at_the_next_step(key, value, first, fused):
    p = nn.Parameter(torch.ones(2))
    opt = WNGrad([p], momentum=0.9, fused=fused)
    p.grad = torch.ones(2)
    if first:
        opt.step()
    before = p.detach().clone()
    opt.param_groups[0][key] = value
    shown = value[-1] if value in (("gradient", -1.0), ("gradient", [1.0]), [(3,)]) else item(value)
    with pytest.raises((ValueError, TypeError), match=f"`{key}` must .*{re.escape(repr(shown))}"):
        opt.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("first", [False, True], ids=["at once", "after a step"])
def test_parameters_that_cannot_share_their_b_are_refused_when_told_to(first, fused):
    given = params()
    opt = WNGrad(given, fused=fused)
    for p in given:
        p.grad = torch.ones_like(p)
    if first:
        opt.step()
    before = [p.detach().clone() for p in given]
    opt.param_groups[0]["joint"] = True
    with pytest.raises(ValueError, match=r"^WNGrad: `joint` parameters must have as many blocks"):
        opt.step()
    assert all(torch.equal(p, x) for p, x in zip(given, before, strict=True))


def test_a_parameter_that_joins_a_joint_group_must_fit_it():
    p, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
    opt = WNGrad([p], joint=True)
    p.grad, other.grad = torch.ones(3), torch.ones(4)
    opt.step()
    opt.param_groups[0]["params"].append(other)
    with pytest.raises(ValueError, match=r"^WNGrad: `joint` parameters must have as many blocks"):
        opt.step()


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        (WNGrad, {"average": 8.0}, "with `average`, which"),
        (WNGrad, {"momentum": 0.9, "weight_decay": 0.1}, "with `momentum` and `weight_decay`,"),
        (WNAdam, {}, "with `momentum`, which"),
    ],
)
def test_what_a_sparse_gradient_does_not_go_with_is_named(make, options, says):
    layer = nn.Embedding(4, 2, sparse=True)
    opt = make(layer.parameters(), **options)
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=f"a sparse `grad` does not go {says}"):
        opt.step()


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (nn.Linear(2, 2), r"got a model of class Linear; use `model.parameters\(\)`\."),
        (nn.Sequential(nn.Linear(2, 2)), r"got a model of class Sequential; use `model"),
        (nn.ParameterDict({"a": torch.ones(2)}), r"got a model of class ParameterDict; use"),
        (None, r"got None\."),
        (3, r"got 3\."),
    ],
    ids=["layer", "layers", "dict", "None", "number"],
)
def test_what_are_no_parameters_is_said_with_what_to_pass(make, given, says):
    rule = rf"^{make.__name__}: `params` must be parameters or groups of them, {says}"
    with pytest.raises(TypeError, match=rule):
        make(given)


def test_a_list_of_parameters_may_be_a_module():
    listed = nn.ParameterList([torch.ones(2), torch.ones(3)])
    assert len(WNGrad(listed).param_groups[0]["params"]) == 2


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("betas", (0.9, 0.999), r"use `momentum` \(`beta` of WNAdam\)"),
        ("eps", 1e-8, "leave it out"),
        ("nesterov", True, "leave it out"),
        ("dampening", 0.0, "leave it out"),
        ("capturable", True, "leave it out"),
        ("alpha", 0.99, ""),
    ],
)
def test_arguments_of_other_optimizers_are_refused_with_what_to_pass(make, name, value, instead):
    rule = rf"^{make.__name__}: `{name}` is not an argument, got {re.escape(repr(value))}"
    with pytest.raises(TypeError, match=rule + (f"; {instead}" if instead else r"\.$")):
        make(params(), **{name: value})
    with pytest.raises(TypeError, match=r"`beta` is not an argument, got 0\.9; use `momentum`"):
        WNGrad(params(), beta=0.9)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("behind", [False, True])
def test_a_gradient_that_ends_where_its_parameter_begins_is_taken(behind, fused):
    room = torch.arange(1.0, 21.0)
    x, g = (room[10:], room[:10]) if behind else (room[:10], room[10:])
    p, twin = nn.Parameter(x), nn.Parameter(x.clone())
    opt, plain = WNGrad([p], fused=fused), WNGrad([twin], fused=False)
    p.grad, twin.grad = g, g.clone()
    opt.step()
    plain.step()
    assert torch.equal(p, twin)
    assert not any("memory" in reason for reason in opt.why_plain().values())


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("first", [False, True], ids=["at once", "after a step"])
def test_a_gradient_that_overlaps_its_parameter_is_refused_and_nothing_changes(first, fused):
    """As torch refuses it; the same elements, each read before it is written, are taken."""
    room = torch.arange(1.0, 20.0)
    other, p = nn.Parameter(torch.ones(3)), nn.Parameter(room[:10])
    opt = WNGrad([other, p], fused=fused)
    other.grad, p.grad = torch.ones(3), torch.ones(10)
    if first:
        opt.step()
    before, p.grad = room.clone(), room[3:13]
    with pytest.raises(ValueError, match=r"^WNGrad: `grad` must not overlap its parameter"):
        opt.step()
    assert torch.equal(room, before)
    twin = nn.Parameter(p.detach().clone())
    plain = WNGrad([twin], fused=False)
    if first:
        plain.state[twin] = {key: value.clone() for key, value in opt.state[p].items()}
    p.grad, twin.grad = p.detach(), p.detach().clone()
    opt.step()
    plain.step()
    assert torch.equal(p, twin)
    assert fused is False or opt.why_plain()[p] == "its gradient lies on its memory"


@pytest.mark.parametrize("number", [0, np.float32(0.25), np.float64(0.25), Fraction(1, 4)])
def test_a_setting_may_become_a_number_of_another_kind(number):
    p = nn.Parameter(torch.ones(2))
    opt, same = WNGrad([p], momentum=0.9), nn.Parameter(torch.ones(2))
    other = WNGrad([same], momentum=0.9)
    for k in range(3):
        for q, its in ((p, opt), (same, other)):
            q.grad = torch.full((2,), k + 1.0)
            if k:
                given = number if its is opt else float(number)
                its.param_groups[0].update(weight_decay=given, momentum=given)
            its.step()
        assert torch.equal(p, same)


def test_a_checkpoint_with_other_blocks_is_refused():
    model = network()
    fine, coarse = WNGrad(model.parameters()), WNGrad(model.parameters(), per="tensor")
    train(model, fine, 1)
    train(model, coarse, 1)
    broken = coarse.state_dict()
    broken["state"] = fine.state_dict()["state"]
    with pytest.raises(ValueError, match="`b` of shape"):
        coarse.load_state_dict(broken)
    fewer = fine.state_dict()
    fewer["param_groups"][0]["params"].pop()
    with pytest.raises(ValueError, match="group"):
        fine.load_state_dict(fewer)


def test_a_parameter_that_changed_its_shape_is_refused():
    p = nn.Parameter(torch.ones(3, 2))
    opt = WNGrad([p])
    p.grad = torch.ones(3, 2)
    opt.step()
    p.data, p.grad = torch.ones(4, 2), None
    p.grad = torch.ones(4, 2)
    with pytest.raises(
        ValueError, match=r"neither `per` nor a shape may change.*\(3, 1\) instead of \(4, 1\)"
    ):
        opt.step()


junk = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["gradient", "neuron", "tensor", "model", "slice", "skip", "raise"]),
    st.lists(st.integers(-2, 6), max_size=3),
    st.tuples(st.sampled_from(["gradient", "x"]), st.one_of(st.floats(), st.none())),
    st.lists(st.tuples(st.integers(-2, 6)), max_size=2),
    st.sampled_from([torch.ones(()), torch.ones(2), -torch.ones(1), object(), len, 1j, b"x"]),
    st.builds(lambda v: lambda p: v, st.one_of(st.none(), st.lists(st.integers(-2, 6)))),
)
names = st.sampled_from(sorted({**WNGrad(params()).defaults, "beta": 0.9}))


def only_named_errors(case):
    name, value = case
    make = WNAdam if name == "beta" else WNGrad
    refused = None
    try:
        make(params(), **{name: value})
    except (ValueError, TypeError) as error:
        refused = str(error)
    assert refused is None or f"`{name}`" in refused


@given(st.tuples(names, junk))
@settings(max_examples=1000)
def test_whatever_comes_in_only_named_errors_come_out(case):
    """N6, a tenth of its count; the rest is behind `make test-faults`."""
    only_named_errors(case)


@pytest.mark.faults
@given(st.tuples(names, junk))
@settings(max_examples=10_000)
def test_ten_thousand_bad_arguments(case):
    """N6."""
    only_named_errors(case)


@pytest.mark.parametrize("fused", [None, False])
def test_beta_is_one_setting_under_either_name(fused):
    """In the constructor, in a group, and set later; the group holds it as `momentum`."""
    tensors = [torch.ones(3, 5) for _ in range(5)]
    a, b, c, d, e = (nn.Parameter(t) for t in tensors)
    given = {"params": [c], "beta": 0.5}
    opts = [
        WNAdam([a], beta=0.5, fused=fused),
        WNAdam([b], momentum=0.5, fused=fused),
        WNAdam([given], fused=fused),
        WNAdam([d], fused=fused),
    ]
    opts[3].param_groups[0]["beta"] = 0.5
    opts.append(WNAdam([e], **{**opts[0].defaults, "foreach": None}))
    for k in range(3):
        for opt in opts:
            (p,) = opt.param_groups[0]["params"]
            p.grad = torch.full((3, 5), k + 1.0)
            opt.step()
    for opt in opts:
        assert opt.param_groups[0]["momentum"] == 0.5
        assert "beta" not in opt.param_groups[0]
    assert all(torch.equal(a, p) for p in (b, c, d, e))
    opts[0].param_groups[0]["beta"] = 1.5
    with pytest.raises(ValueError, match=r"^WNAdam: `beta` must be in \[0, 1\), got 1\.5"):
        opts[0].step()
    with pytest.raises(ValueError, match=r"^WNAdam: `beta` must be in \[0, 1\), got 1\.5"):
        WNAdam([{"params": [a], "beta": 1.5}])
    with pytest.raises(ValueError, match=r"^WNAdam: `momentum` must be `beta`.*0\.6 and 0\.5"):
        WNAdam([a], beta=0.5, momentum=0.6)


# ------------------------------------------------------------------ torch's habits


@pytest.mark.parametrize("make", [WNGrad, WNAdam, WNMuon])
@pytest.mark.parametrize(
    ("name", "value"), [("lr", -1.0), ("weight_decay", -1.0), ("b_init", 0.0), ("per", "layer")]
)
def test_settings_are_checked_before_the_parameters_are_touched(make, name, value):
    def untouched():
        raise AssertionError("touched")
        yield

    for nothing in (None, untouched()):
        with pytest.raises(ValueError, match=f"^{make.__name__}: `{name}` must"):
            make(nothing, **{name: value})


def test_a_tensor_lr_of_two_elements_is_refused_in_torchs_words():
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        WNGrad(None, lr=torch.ones(2))
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        torch.optim.SGD(params(), lr=torch.ones(2))


@pytest.mark.parametrize("make", [WNGrad, WNAdam, WNMuon])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_foreach_is_taken_and_means_nothing(make, foreach):
    (p, *_), (q, *_) = params(), params()
    opt, other = make([p], foreach=foreach), make([{"params": [q], "foreach": foreach}])
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    opt.step()
    other.step()
    assert torch.equal(p, q)
    assert "foreach" in inspect.signature(make).parameters
    with pytest.raises(TypeError, match="`foreach` must be True or False, got 2"):
        make([p], foreach=2)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("at_once", [True, False])
def test_momentum_and_weight_decay_may_be_tensors_of_one_element(at_once, fused):
    """As they are now: they may change in place, too."""
    p, q = nn.Parameter(torch.ones(3, 5)), nn.Parameter(torch.ones(3, 5))
    numbers = {"momentum": torch.tensor(0.5), "weight_decay": torch.tensor([0.25])}
    opt, plain = WNGrad([p], fused=fused, **(numbers if at_once else {})), WNGrad([q], fused=False)
    opt.param_groups[0].update(numbers)
    for k in range(6):
        if k % 2 == 0:
            numbers["momentum"].fill_(0.5 - k / 8)
            numbers["weight_decay"].fill_(k / 8)
        plain.param_groups[0].update({name: t.item() for name, t in numbers.items()})
        p.grad, q.grad = (torch.full((3, 5), k + 1.0) for _ in "pq")
        opt.step()
        plain.step()
        assert torch.equal(p, q)
        assert all(opt.param_groups[0][name] is t for name, t in numbers.items())
    numbers["momentum"].fill_(1.0)
    with pytest.raises(ValueError, match=r"`momentum` must be in \[0, 1\), got 1\.0"):
        opt.step()


def test_a_flag_is_no_number_though_it_equals_one_that_was_taken():
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    opt = WNGrad([p], weight_decay=1.0)
    opt.step()
    opt.param_groups[0]["weight_decay"] = True
    with pytest.raises(TypeError, match="`weight_decay` must be a number, got True"):
        opt.step()


@pytest.mark.parametrize("make", [WNGrad, WNAdam, WNMuon])
def test_a_group_handed_in_stays_the_same_dict(make):
    first, second = {"params": params()[:1], "lr": 0.5}, {"params": params()[0], "mine": 7}
    opt = make([first])
    opt.add_param_group(second)
    assert opt.param_groups[0] is first
    assert opt.param_groups[1] is second
    assert second["lr"] == opt.defaults["lr"]
    third = {"params": params()[1:], "lr": -1.0}
    with pytest.raises(ValueError, match="`lr`"):
        opt.add_param_group(third)
    assert third.keys() == {"params", "lr"}  # what is refused is left alone


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_fused_on_a_cpu_is_quietly_plain_for_types_that_only_torch_has(make, dtype, monkeypatch):
    monkeypatch.setattr(launch_key, "interpreted", lambda: False)  # Triton knows float16
    p, q = (nn.Parameter(torch.ones(3, 5, dtype=dtype)) for _ in "pq")
    opt, plain = make([p], fused=True), make([q], fused=False)
    for _ in range(2):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        opt.step()
        plain.step()
        assert opt.why_plain() == {p: f"its type is {dtype}"}
    assert torch.equal(p, q)


def test_twins_of_the_tests_themselves_start_alike():
    assert same(*twins())
