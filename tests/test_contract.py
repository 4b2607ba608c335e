"""The torch contract (DESIGN, section 3): every row over every optimizer of the table."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from conftest import backward, flat_state, network, same, same_state, train, twins
from keep import KEPT
from wngrad import WNAdam, WNGrad, WNMuon


def test_all_state_lies_in_the_state_or_in_plain_groups(optimizer):
    model = network()
    opt = optimizer(model.parameters())
    fresh = set(vars(opt))
    train(model, opt, 3)
    plain = (int, float, str, bool, tuple, list, type(None))
    assert set(vars(opt)) == fresh
    assert all(isinstance(v, torch.Tensor) for v in flat_state(opt))
    assert all(isinstance(v, plain) for g in opt.param_groups for v in g.values())


def test_state_is_about_one_float_per_neuron(optimizer):
    model = nn.Sequential(nn.Linear(100, 50, bias=False), nn.Linear(50, 10, bias=False))
    opt = optimizer(model.parameters(), per="neuron", nonfinite="propagate")
    model(torch.randn(2, 100)).sum().backward()
    opt.step()
    neurons, weights = 60, 5500
    floats = sum(v.numel() for v in flat_state(opt))
    average = 0 if opt.defaults["average"] is None else weights
    if isinstance(opt, WNAdam):
        assert floats == weights + 2 * neurons + average  # ĝ, b and t
    else:
        buffer = weights if opt.defaults["momentum"] else 0
        norms = 2 if opt.defaults.get("finetune") else 0
        assert floats == buffer + neurons + 2 + average + norms  # b, and a count for each parameter


@pytest.mark.parametrize("as_tensor", [False, True])
def test_lr_is_read_from_the_group_at_each_step(optimizer, as_tensor):
    a, b = twins()
    value = torch.tensor(0.5) if as_tensor else 0.5
    one, other = optimizer(a.parameters(), lr=2.0), optimizer(b.parameters(), lr=value)
    one.param_groups[0]["lr"] = value.clone() if as_tensor else value
    train(a, one, 3)
    train(b, other, 3)
    assert same(a, b)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_tensor_lr_of_one_element_is_a_number(optimizer, shape):
    a, b = twins()
    one, other = optimizer(a.parameters(), lr=0.5), optimizer(b.parameters())
    other.param_groups[0]["lr"] = torch.full(shape, 0.5)
    train(a, one, 3)
    train(b, other, 3)
    assert same(a, b)


def test_a_tensor_lr_of_two_elements_is_refused_and_nothing_changes(optimizer):
    a, b = twins()
    with pytest.raises(ValueError, match=r"`lr`.*\(2,\)"):
        optimizer(a.parameters(), lr=torch.ones(2))
    opt = optimizer([{"params": p} for p in a.parameters()])
    opt.param_groups[-1]["lr"] = torch.ones(2)
    backward(a)
    with pytest.raises(ValueError, match=r"`lr`.*\(2,\)"):
        opt.step()
    assert same(a, b)
    assert not opt.state


def test_a_closure_is_called_once_with_gradients_on_and_its_loss_returned(optimizer):
    a, b = twins()
    one, other = optimizer(a.parameters()), optimizer(b.parameters())
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        one.zero_grad()
        calls.append(backward(a))
        return calls[-1]

    with torch.no_grad():
        loss = one.step(closure)
    backward(b)
    assert other.step() is None
    assert len(calls) == 1
    assert loss is calls[0]
    assert same(a, b)


def test_a_closure_that_raises_changes_nothing(optimizer):
    a, b = twins()
    opt = optimizer(a.parameters())

    def closure():
        backward(a)
        raise RuntimeError("no batch")

    with pytest.raises(RuntimeError, match="no batch"):
        opt.step(closure)
    assert same(a, b)
    assert torch.is_grad_enabled()


def test_maximize_descends_on_the_negated_loss(optimizer):
    a, b = twins()
    one, other = optimizer(a.parameters()), optimizer(b.parameters(), maximize=True)
    for seed in range(5):
        for model, opt, sign in ((a, one, 1), (b, other, -1)):
            opt.zero_grad()
            backward(model, seed, scale=sign)
            opt.step()
    assert same(a, b)


def test_groups_have_their_own_settings(optimizer):
    a, b = twins()
    one = optimizer(
        [{"params": a[0].parameters()}, {"params": a[1:].parameters(), "lr": 0.1, "b_init": 3.0}]
    )
    two = optimizer(b[0].parameters())
    three = optimizer(b[1:].parameters(), lr=0.1, b_init=3.0)
    for seed in range(3):
        one.zero_grad()
        b.zero_grad()
        backward(a, seed)
        backward(b, seed)
        for opt in (one, two, three):
            opt.step()
    assert same(a, b)


def test_a_group_added_late_starts_then(optimizer):
    a, b = twins()
    one = optimizer(a[0].parameters())
    train(a, one, 2)
    one.add_param_group({"params": list(a[4].parameters()), "lr": 0.3})
    train(a, one, 2, first=2)
    two, three = optimizer(b[0].parameters()), optimizer(b[4].parameters(), lr=0.3)
    train(b, two, 2)
    for seed in (2, 3):
        b.zero_grad()
        backward(b, seed)
        two.step()
        three.step()
    assert same(a, b)


def test_resuming_from_a_file_is_bit_exact(optimizer):
    a, b = twins()
    one, other = optimizer(a.parameters(), lr=0.7), optimizer(b.parameters(), lr=123.0)
    train(a, one, 5)
    file = io.BytesIO()
    torch.save((a.state_dict(), one.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    b.load_state_dict(weights)
    other.load_state_dict(state)
    assert same_state(one, other)
    train(a, one, 5, first=5)
    train(b, other, 5, first=5)
    assert same(a, b)
    assert same_state(one, other)


def test_a_resumed_run_is_the_run_that_was_never_stopped(optimizer):
    a, b = twins()
    whole, first = optimizer(a.parameters()), optimizer(b.parameters())
    train(a, whole, 10)
    train(b, first, 4)
    second = optimizer(b.parameters())
    second.load_state_dict(first.state_dict())
    train(b, second, 6, first=4)
    assert same(a, b)
    assert same_state(whole, second)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_b_keeps_its_type_and_bits_through_a_checkpoint(optimizer, dtype):
    p = nn.Parameter(torch.randn(4, 3).to(dtype))
    opt = optimizer([p])
    p.grad = torch.randn(4, 3).to(dtype)
    opt.step()
    other = optimizer([p])
    other.load_state_dict(pickle.loads(pickle.dumps(opt.state_dict())))
    assert same_state(opt, other)
    assert other.state[p]["b"].dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.float64])
@pytest.mark.parametrize("of_p", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checkpoint_cast_as_a_whole_gets_its_types_back(optimizer, dtype, of_p):
    p = nn.Parameter(torch.ones(4, 3, dtype=of_p))
    opt = optimizer([p], nonfinite="skip")
    p.grad = torch.ones(4, 3, dtype=of_p)
    opt.step()
    before = {key: opt.state[p][key] for key in ("b", "t", "skipped")}
    cast = copy.deepcopy(opt.state_dict())
    for key in before:
        cast["state"][0][key] = cast["state"][0][key].ceil().to(dtype)
    opt.load_state_dict(cast)
    for key, was in before.items():
        wide = key != "skipped" and dtype == torch.float64
        assert opt.state[p][key].dtype == (torch.float64 if wide else was.dtype)
        assert torch.equal(opt.state[p][key].double(), was.double().ceil())
    opt.step()


def test_loading_does_not_tie_two_optimizers_together(optimizer):
    a, b = twins()
    one, other = optimizer(a.parameters()), optimizer(b.parameters())
    train(a, one, 2)
    other.load_state_dict(one.state_dict())
    before = [v.clone() for v in flat_state(one)]
    train(b, other, 2)
    assert all(torch.equal(x, y) for x, y in zip(before, flat_state(one), strict=True))


def test_a_load_hook_of_the_user_is_respected(optimizer):
    model = network()
    opt = optimizer(model.parameters())
    train(model, opt, 2)

    def reset(_, state_dict):
        state_dict = copy.deepcopy(state_dict)
        for state in state_dict["state"].values():
            state["b"].fill_(7.0)
        return state_dict

    other = optimizer(model.parameters())
    other.register_load_state_dict_pre_hook(reset)
    other.load_state_dict(opt.state_dict())
    assert all((s["b"] == 7).all() for s in other.state.values())


def test_pickle_and_deepcopy_go_on_like_the_original(optimizer):
    model = network()
    opt = optimizer(model.parameters())
    train(model, opt, 3)
    pickled_model, pickled = pickle.loads(pickle.dumps((model, opt)))
    copied_model, copied = copy.deepcopy((model, opt))
    for m, o in ((model, opt), (pickled_model, pickled), (copied_model, copied)):
        train(m, o, 3, first=3)
    assert same(model, pickled_model)
    assert same(model, copied_model)


def test_a_scheduler_may_go_down_to_zero(optimizer):
    model = network()
    opt = optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=4)
    for seed in range(4):
        opt.zero_grad()
        backward(model, seed)
        opt.step()
        schedule.step()
    assert opt.param_groups[0]["lr"] == 0
    before = copy.deepcopy(model)
    b = [s["b"].clone() for s in opt.state.values()]
    train(model, opt, 2, first=4)
    assert same(model, before)
    assert all(torch.equal(x, s["b"]) for x, s in zip(b, opt.state.values(), strict=True))


def test_a_parameter_without_gradient_is_left_alone(optimizer):
    a, b = twins()
    for p in a[0].parameters():
        p.requires_grad_(False)
    opt = optimizer(a.parameters())
    train(a, opt, 2)
    assert same(a[0], b[0])
    assert not any(p in opt.state for p in a[0].parameters())
    for p in a[0].parameters():  # unfrozen, it takes part
        p.requires_grad_(True)
    train(a, opt, 1)
    assert not same(a[0], b[0])


def test_the_gradient_is_not_touched(optimizer):
    model = network()
    opt = optimizer(model.parameters(), weight_decay=0.1, maximize=True)
    backward(model)
    before = [p.grad.clone() for p in model.parameters()]
    pointers = [p.grad.data_ptr() for p in model.parameters()]
    opt.step()
    for p, g, at in zip(model.parameters(), before, pointers, strict=True):
        assert torch.equal(p.grad, g)
        assert p.grad.data_ptr() == at


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3, 0), (2, 0, 4), ()])
def test_empty_and_zero_dimensional_tensors(optimizer, shape):
    p = nn.Parameter(torch.ones(shape))
    q = nn.Parameter(torch.ones(2, 2))
    opt = optimizer([p, q])
    for _ in range(2):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        opt.step()
    assert torch.isfinite(q).all()
    assert (q < 1).all()
    assert (p < 1).all()


def test_complex_parameters_are_pairs_of_reals(optimizer):
    if optimizer.make is WNMuon:
        pytest.skip("a complex matrix is a vector to it, a real one is not")
    z = torch.randn(3, 2, dtype=torch.complex64)
    a, b = nn.Parameter(z.clone()), nn.Parameter(torch.view_as_real(z).clone())
    one, other = optimizer([a], hold_1d=False), optimizer([b], hold_1d=False)
    if one.defaults["per"] == "slice":
        other = optimizer([b], per="neuron", hold_1d=False)  # (out, re, im) is no kernel
    for _ in range(5):
        g = torch.randn(3, 2, dtype=torch.complex64)
        a.grad, b.grad = g, torch.view_as_real(g).clone()
        one.step()
        other.step()
    assert torch.equal(torch.view_as_real(a), b)


@pytest.mark.parametrize("shape", [(), (4,)])
def test_complex_scalars_and_vectors(optimizer, shape):
    p = nn.Parameter(torch.ones(shape, dtype=torch.complex64))
    opt = optimizer([p])
    p.grad = torch.full_like(p, 1 + 1j)
    opt.step()
    moved = torch.view_as_real(p.detach()) - torch.tensor([1.0, 0.0])
    assert (moved < 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_parameters_have_a_wide_b(optimizer, dtype):
    """One step is the float32 step, rounded once; b is the float32 b, bit for bit."""
    start, g = torch.randn(8, 5).to(dtype), torch.randn(8, 5).to(dtype)
    low, high = nn.Parameter(start.clone()), nn.Parameter(start.float())
    one, other = optimizer([low]), optimizer([high])
    low.grad, high.grad = g.clone(), g.float()
    one.step()
    other.step()
    assert torch.equal(low, high.to(dtype))
    assert one.state[low]["b"].dtype == torch.float32
    assert torch.equal(one.state[low]["b"], other.state[high]["b"])


def test_one_group_may_hold_several_types(optimizer):
    """Each parameter keeps its own; `per="model"` sums over them."""
    params = [
        nn.Parameter(torch.ones(3, 2, dtype=t))
        for t in (torch.float32, torch.float64, torch.bfloat16)
    ]
    opt = optimizer(params)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    first = params[1].detach()
    for p in params:
        torch.testing.assert_close(p.detach().double(), first, rtol=0.01, atol=0)


@pytest.mark.parametrize("nonfinite", ["propagate", "skip"])
@pytest.mark.parametrize("options", [{"joint": True}, {"per": "model"}], ids=str)
@pytest.mark.parametrize("wide", [torch.float64, torch.complex128])
def test_parameters_that_share_b_keep_it_in_the_widest_type_of_them(options, nonfinite, wide):
    """A b beyond float32 is a number for all of them, also after a checkpoint."""
    p, q = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2, dtype=wide))
    opt = WNGrad([p, q], nonfinite=nonfinite, **options)
    for k in range(3):
        p.grad = torch.ones(3, 2)
        q.grad = torch.full((3, 2), 1e30 if k else 1.0, dtype=wide)
        opt.step()
        if k == 1:
            opt.load_state_dict(pickle.loads(pickle.dumps(opt.state_dict())))
    of_p, of_q = opt.state[p]["b"], opt.state[q]["b"]
    assert of_p.dtype == of_q.dtype == torch.float64
    assert torch.equal(of_p, of_q)
    assert (of_p > 1e39).all()
    assert of_p.isfinite().all()
    assert p.isfinite().all()
    assert q.isfinite().all()
    assert opt.skipped() == 0


def test_a_narrow_b_in_a_checkpoint_of_parameters_that_share_it_is_widened():
    p, q = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3, 2).double())
    opt = WNGrad([p, q], joint=True)
    p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    opt.step()
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["b"] = saved["state"][0]["b"].float()
    opt.load_state_dict(saved)
    assert opt.state[p]["b"].dtype == torch.float64


def test_ten_differentiable_steps_have_the_gradient_finite_differences_give(optimizer):
    """With respect to the start and to λ."""
    if optimizer.options.get("finetune"):
        pytest.skip("the norm of the start is a constant to it")

    def trained(x0, lam):
        p = x0.clone()
        opt = optimizer([p], lr=lam, differentiable=True)
        for _ in range(10):
            q = p.clone()
            (p.grad,) = torch.autograd.grad((q**2).sum() + q.prod(), q, create_graph=True)
            opt.step()
        return p

    x0 = torch.tensor([[0.5, -1.0], [1.5, 0.7]], dtype=torch.float64, requires_grad=True)
    lam = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(trained, (x0, lam))


def test_the_checkpoint_loaders_dummy_step_latches_and_counts_nothing(optimizer):
    """`torch.distributed.checkpoint` makes state by a step with zero gradients and lr = 0."""
    a, b = twins()
    one, other = optimizer(a.parameters()), optimizer(b.parameters())
    for p in a.parameters():
        p.grad = torch.zeros_like(p)
    one.param_groups[0]["lr"] = 0.0
    one.step()
    assert same(a, b)
    assert all((s["t"] == 0).all() for s in one.state.values())
    shapes = [v.shape for v in flat_state(one)]
    one.param_groups[0]["lr"] = other.param_groups[0]["lr"]
    train(a, one, 5)
    train(b, other, 5)
    assert same(a, b)
    assert same_state(one, other)
    assert shapes == [v.shape for v in flat_state(one)]


def test_named_parameters_are_accepted(optimizer):
    a, b = twins()
    one, other = optimizer(a.named_parameters()), optimizer(b.parameters())
    train(a, one, 2)
    train(b, other, 2)
    assert same(a, b)


@pytest.mark.parametrize("per", ["neuron", "tensor", "model", "slice"])
def test_channels_last_and_non_contiguous_tensors_equal_contiguous_ones(per):
    start, g = torch.randn(4, 3, 2, 5), torch.randn(4, 3, 2, 5)
    layouts = [
        lambda t: t.clone(),
        lambda t: t.contiguous(memory_format=torch.channels_last),
        lambda t: t.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
        lambda t: torch.stack([t, t], -1)[..., 0],
    ]
    results = []
    for layout in layouts:
        for make, options in ((WNGrad, {"momentum": 0.9}), (WNAdam, {})):
            p = nn.Parameter(layout(start))
            opt = make([p], per=per, **options)
            for k in range(3):
                p.grad = layout(g * (k + 1))
                opt.step()
            results.append(p.detach().contiguous())
    for result in results[2:]:
        assert any(torch.equal(result, first) for first in results[:2])


def test_a_group_may_be_a_single_tensor(optimizer):
    a, b = nn.Parameter(torch.ones(4, 6)), nn.Parameter(torch.ones(4, 6))
    one, other = optimizer([{"params": a}]), optimizer([b])
    for p, opt in ((a, one), (b, other)):
        p.grad = torch.ones(4, 6)
        opt.step()
    assert torch.equal(a, b)
    zero = nn.Parameter(torch.zeros(()))
    assert optimizer([{"params": zero}]).param_groups[0]["params"] == [zero]


def test_a_step_at_rate_zero_changes_nothing_at_all(optimizer):
    """Real gradients, a number or a tensor for λ: parameters, b, buffers and counts stay."""
    model = network()
    opt = optimizer(model.parameters())
    train(model, opt, 3)
    for zero in (0.0, torch.tensor(0.0)):
        before = copy.deepcopy(model), [v.clone() for v in flat_state(opt)]
        opt.param_groups[0]["lr"] = zero
        train(model, opt, 2)
        assert same(model, before[0])
        assert all(torch.equal(x, y) for x, y in zip(before[1], flat_state(opt), strict=True))


@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_warm_up_from_zero_makes_no_wild_step(optimizer, as_tensor):
    """The blocks get their b when the rate leaves zero, and start from nothing else."""
    draw = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.zeros(1000, 1))
    opt = optimizer([p], lr=torch.tensor(0.0) if as_tensor else 0.0, weight_decay=0.0)
    for k in range(20):
        before = p.detach().clone()
        p.grad = torch.randn(1000, 1, generator=draw) * (0.01 if k > 2 else 1.0)
        lr = 0.0 if k < 3 else 1.0
        opt.param_groups[0]["lr"] = torch.tensor(lr) if as_tensor else lr
        opt.step()
        mu = opt.param_groups[0].get("momentum", 0.0)
        assert (p - before).abs().max() <= 0.5 / (1 - mu) * 1.001


def test_the_real_checkpoint_api_round_trips(optimizer):
    """`torch.distributed.checkpoint.state_dict`, plain and flattened, into a fresh optimizer."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model = network()
    opt = optimizer(model.parameters())
    train(model, opt, 3)
    model.zero_grad()  # With gradients around, torch's API does not make the state it loads into.
    for flatten in (False, True):
        options = StateDictOptions(flatten_optimizer_state_dict=flatten)
        saved = copy.deepcopy(get_optimizer_state_dict(model, opt, options=options))
        other = optimizer(model.parameters())
        set_optimizer_state_dict(model, other, saved, options=options)
        assert same_state(opt, other)
        assert other.param_groups[0]["lr"] == opt.param_groups[0]["lr"]


def test_a_checkpoint_is_matched_by_name_whatever_the_order():
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    model = network()
    opt = WNGrad(model.parameters(), per=lambda p: (1,) * p.dim())
    train(model, opt, 2)
    saved = get_optimizer_state_dict(model, opt)
    other = WNGrad(reversed(list(model.parameters())), per=lambda p: (1,) * p.dim())
    set_optimizer_state_dict(model, other, saved)
    for p in model.parameters():
        assert torch.equal(opt.state[p]["b"], other.state[p]["b"])
    train(model, other, 1)


def test_a_load_post_hook_of_the_user_has_the_last_word(optimizer):
    model = network()
    opt, other = optimizer(model.parameters()), optimizer(model.parameters())
    train(model, opt, 2)
    before = [v.clone() for v in flat_state(opt)]

    def fill(loaded):
        for state in loaded.state.values():
            state["b"].fill_(7.0)

    other.register_load_state_dict_post_hook(fill)
    other.load_state_dict(opt.state_dict())
    assert all((s["b"] == 7).all() for s in other.state.values())
    assert all(torch.equal(x, y) for x, y in zip(before, flat_state(opt), strict=True))


def test_an_optimizer_with_a_callable_per_can_be_pickled():
    p = nn.Parameter(torch.ones(4, 2))
    opt = WNGrad([p], per=lambda p: (2, 1))
    again = pickle.loads(pickle.dumps(opt))
    assert again.param_groups[0]["per"] == [(2, 1)]


def halves(p):
    return (2,) + (1,) * (p.dim() - 1)


def added(opt):
    opt.add_param_group({"params": [nn.Parameter(torch.ones(6, 2))]})
    return opt.param_groups[-1]["per"]


def by_pickle(opt):
    return pickle.loads(pickle.dumps(opt))


@pytest.mark.parametrize("copied", [by_pickle, copy.deepcopy, copy.copy])
def test_a_callable_per_is_kept_for_groups_added_to_a_copy(copied):
    opt = WNGrad([nn.Parameter(torch.ones(4, 2))], per=halves)
    assert added(copied(opt)) == [(2, 1)]
    assert added(copied(copied(opt))) == [(2, 1)]
    assert added(opt) == [(2, 1)]


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy])
def test_a_callable_per_that_cannot_be_pickled_is_kept_by_copies(copied):
    opt = WNGrad([nn.Parameter(torch.ones(4, 2))], per=lambda p: (2, 1))
    assert added(copied(opt)) == [(2, 1)]


def test_a_callable_per_that_cannot_be_pickled_must_be_given_again():
    def gone(p):
        return (2, 1)

    opt = WNGrad([nn.Parameter(torch.ones(4, 2))], per=gone)
    for again in (by_pickle(opt), by_pickle(by_pickle(opt)), copy.deepcopy(by_pickle(opt))):
        with pytest.raises(ValueError, match=r"^WNGrad: `per` must be given.*got no .*gone"):
            added(again)
        assert len(again.param_groups) == 1
        again.add_param_group({"params": [nn.Parameter(torch.ones(6, 2))], "per": "tensor"})


def test_a_callable_per_that_another_process_lacks_does_not_keep_the_pickle_from_loading(
    monkeypatch,
):
    saved = pickle.dumps(WNGrad([nn.Parameter(torch.ones(4, 2))], per=halves))
    monkeypatch.delattr(f"{__name__}.halves")
    again = pickle.loads(saved)
    with pytest.raises(ValueError, match=r"^WNGrad: `per` must be given.*got no .*halves"):
        added(again)


def test_what_others_keep_in_the_state_is_left_alone(optimizer):
    model = network()
    opt = optimizer(model.parameters())
    train(model, opt, 1)
    for state in opt.state.values():
        state["theirs"] = torch.ones(3)
    train(model, opt, 1)
    assert all((s["theirs"] == 1).all() for s in opt.state.values())


def test_a_conjugated_gradient_is_resolved(optimizer):
    a, b = (nn.Parameter(torch.ones(3, 2, dtype=torch.complex64)) for _ in range(2))
    g = torch.randn(3, 2, dtype=torch.complex64)
    a.grad, b.grad = g.conj(), g.conj().resolve_conj()
    for p in (a, b):
        optimizer([p]).step()
    assert torch.equal(a, b)


def test_hypergradients_are_finite_where_a_row_has_no_gradient():
    lam = torch.tensor(0.5, requires_grad=True)
    x = torch.ones(2, 2) + 0 * lam
    opt = WNGrad([x], lr=lam, b_init="gradient", differentiable=True)
    for _ in range(2):
        y = x.clone()
        (x.grad,) = torch.autograd.grad((y[0] ** 2).sum(), y, create_graph=True)
        opt.step()
    (slope,) = torch.autograd.grad((x**2).sum(), lam)
    assert slope.isfinite()


def test_a_step_inside_backward_is_the_step_after_it(optimizer):
    """Each parameter stepped and freed when its gradient is ready: exact where b is its own."""
    a, b = twins()
    one = optimizer([{"params": [p]} for p in a.parameters()])  # `per="model"`: a model of one
    inside = {p: optimizer([p]) for p in b.parameters()}

    def release(p):
        inside[p].step()
        p.grad = None

    for p in b.parameters():
        p.register_post_accumulate_grad_hook(release)
    for seed in range(3):
        one.zero_grad()
        backward(a, seed)
        one.step()
        backward(b, seed)
    assert same(a, b)
    assert all(p.grad is None for p in b.parameters())


def test_sparse_embeddings_train_like_dense_ones(optimizer):
    """Where every row is untouched but by its gradient; else a sparse gradient is refused."""
    dense, sparse = nn.Embedding(6, 3), nn.Embedding(6, 3, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    one, other = optimizer(dense.parameters()), optimizer(sparse.parameters())
    touches_all = one.direction(one.param_groups[0], dense.weight).touches_all
    touches_all |= one.defaults["weight_decay"] != 0
    for k in range(4):
        for layer in (dense, sparse):
            layer.zero_grad()
            layer(torch.tensor([k, 2, 2])).square().sum().backward()
        one.step()
        if touches_all:
            with pytest.raises(
                ValueError, match=r"a sparse `grad` does not go with `(mom|weig|ave)"
            ):
                other.step()
            return
        other.step()
    assert torch.equal(dense.weight, sparse.weight)
    assert torch.equal(one.state[dense.weight]["b"], other.state[sparse.weight]["b"])


def test_a_user_s_own_entry_in_the_state_is_left_alone(optimizer):
    """torch's optimizers allow it, and save it."""
    a, b = twins()
    ours, theirs = optimizer(a.parameters()), optimizer(b.parameters())
    ours.state["epoch"] = 3
    train(a, ours, 2)
    train(b, theirs, 2)
    assert same(a, b)
    assert ours.state_dict()["state"]["epoch"] == 3
    ours.load_state_dict(copy.deepcopy(ours.state_dict()))
    train(a, ours, 1, first=2)
    train(b, theirs, 1, first=2)
    assert same(a, b)


@pytest.mark.parametrize("file", sorted(KEPT.glob("*.pt")), ids=lambda path: path.stem)
def test_checkpoints_of_every_release_are_read_and_go_on(optimizer, file):
    """To float64's rounding: another machine may sum in another order."""
    kept = torch.load(file, weights_only=True)
    if (name := optimizer.name.removesuffix(" plain")) not in kept:
        pytest.skip("newer than that release")
    saved = kept[name]
    model = network().double()
    opt = optimizer(model.parameters())
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    train(model, opt, 2, first=3)
    count = len(list(model.parameters()))
    x, rest = saved["after"][:count], iter(saved["after"][count:])
    torch.testing.assert_close([p.detach() for p in model.parameters()], x, rtol=1e-11, atol=1e-12)
    groups, states = saved["optimizer"]["param_groups"], saved["optimizer"]["state"]
    for group, old in zip(opt.param_groups, groups, strict=True):
        for p, key in zip(group["params"], old["params"], strict=True):
            its = {name: next(rest) for name in sorted(states.get(key, {}))}
            torch.testing.assert_close(dict(opt.state[p]), its, rtol=1e-11, atol=1e-12)
