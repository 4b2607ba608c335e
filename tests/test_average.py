"""The average that training never reads: into the model, out of it, and through checkpoints."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from conftest import backward, network, same, same_state, train, twins
from wngrad import WNAdam, WNGrad, WNMuon, polynomial_average
from wngrad.rule import polynomial_weight as weight

MAKE = {
    "wnmuon": WNMuon,
    "wngrad": lambda params: WNGrad(params, average=3.0, momentum=0.9),
    "wnadam": lambda params: WNAdam(params, average=8.0),
}


@pytest.fixture(params=MAKE)
def make(request):
    return MAKE[request.param]


def batches(n=3):
    torch.manual_seed(7)
    return [torch.randn(5, 2, 4, 4) for _ in range(n)]


def test_the_weights_of_the_iterates_are_those_of_a_polynomial():
    """(j/k)^η, nearly, and they sum to 1: by unrolling the recursion."""
    eta, k = 8.0, 400
    weights = [0.0] * k
    for j in range(1, k + 1):
        w = weight(eta, j)
        weights = [v * (1 - w) for v in weights]
        weights[j - 1] = w
    assert sum(weights) == pytest.approx(1)
    assert weights[0] < 1e-12
    for j in (100, 200, 300, 399):
        assert weights[j - 1] / weights[-1] == pytest.approx((j / k) ** eta, rel=0.25)


def test_training_never_reads_the_average(make):
    a, b = twins()
    ours, theirs = make(a.parameters()), make(b.parameters())
    for group in theirs.param_groups:
        group["average"] = None
    train(a, ours, 5)
    train(b, theirs, 5)
    assert same(a, b)
    assert not any("average" in state for state in theirs.state.values())


def test_evaluation_sees_the_average_and_training_goes_on_where_it_was(make):
    a, b = twins()
    ours, theirs = make(a.parameters()), make(b.parameters())
    train(a, ours, 4)
    train(b, theirs, 4)
    places = [p.data_ptr() for p in a.parameters()]
    with ours.averaged():
        for p in a.parameters():
            assert torch.equal(p, ours.state[p]["average"])
        assert not same(a, b)
        assert [p.data_ptr() for p in a.parameters()] == places
    assert same(a, b)
    train(a, ours, 3, first=4)
    train(b, theirs, 3, first=4)
    assert same(a, b)
    assert same_state(ours, theirs)


def test_an_evaluation_that_raises_puts_everything_back(make):
    a, b = twins()
    opt = make(a.parameters())
    train(a, opt, 2)
    train(b, make(b.parameters()), 2)
    with pytest.raises(ZeroDivisionError), opt.averaged():
        raise ZeroDivisionError
    assert same(a, b)
    train(a, opt, 1)  # and steps are allowed again


def test_what_cannot_be_put_back_is_named_beside_the_error_inside():
    model, opt = after(1, normalized())
    before = copy.deepcopy(model.state_dict())
    refused = pytest.raises(RuntimeError, match=r"`0\.bias` .*\(3,\) .*`1\.running_var`.* mean")
    with refused as error, opt.averaged(model, batches=batches()):
        model[0].bias.data = torch.zeros(2, 3)  # into which three numbers would broadcast
        model[1].running_var.resize_(2)
        raise ZeroDivisionError
    assert isinstance(error.value.__context__, ZeroDivisionError)
    lost = "0.bias", "1.running_var"
    rest = {name: t for name, t in model.state_dict().items() if name not in lost}
    assert all(torch.equal(t, before[name]) for name, t in rest.items())


def test_no_step_and_no_second_entry_within():
    model = network()
    opt = WNMuon(model)
    train(model, opt, 1)
    backward(model)
    with opt.averaged():
        with pytest.raises(RuntimeError, match="`step` must not be taken within `averaged`"):
            opt.step()
        with pytest.raises(RuntimeError, match="`step` must not be taken within `averaged`"):
            opt.step(lambda: pytest.fail("the closure was called"))
        with pytest.raises(RuntimeError, match="must not be entered twice"), opt.averaged():
            pass
        with pytest.raises(RuntimeError, match="`load_average` must not be called within"):
            opt.load_average()
    opt.step()


def test_before_the_first_step_the_average_is_the_model_itself():
    a, b = twins()
    with WNMuon(a).averaged():
        assert same(a, b)


def test_the_average_for_good_and_as_a_state_dict(make):
    model = network()
    opt = make(model.parameters())
    train(model, opt, 3)
    own = {name: value.clone() for name, value in model.state_dict().items()}
    means = opt.average_state_dict(model)
    assert means.keys() == own.keys()
    assert all(torch.equal(model.state_dict()[name], own[name]) for name in own)
    with opt.averaged():
        assert all(torch.equal(model.state_dict()[name], means[name]) for name in own)
    opt.load_average()
    assert all(torch.equal(model.state_dict()[name], means[name]) for name in own)


def test_tied_weights_are_averaged_under_both_names():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    opt = WNMuon(model)
    for _ in range(3):
        opt.zero_grad()
        model(torch.tensor([1, 2])).square().sum().backward()
        opt.step()
    means = opt.average_state_dict(model)
    assert torch.equal(means["0.weight"], means["1.weight"])
    assert torch.equal(means["0.weight"], opt.state[model[0].weight]["average"])


def test_swa_utils_holds_the_same_average():
    a, b = twins()
    ours, theirs = WNMuon(a), WNMuon(b, average=None)
    swa = AveragedModel(b, avg_fn=polynomial_average(8.0))
    for seed in range(6):
        train(a, ours, 1, first=seed)
        train(b, theirs, 1, first=seed)
        swa.update_parameters(b)
    with ours.averaged():
        for p, q in zip(a.parameters(), swa.module.parameters(), strict=True):
            assert torch.allclose(p, q, atol=1e-6)


def normalized(*more):
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4)
    return nn.Sequential(*layers, *more)


def after(steps, model):
    """A network that has been trained a little, and its optimizer."""
    opt = WNMuon(model)
    for x in batches(steps):
        opt.zero_grad()
        model(x).square().sum().backward()
        opt.step()
    return model, opt


def test_statistics_of_batch_normalization_are_found_again_and_put_back():
    model, opt = after(6, normalized())
    before = copy.deepcopy(model.state_dict())
    model.eval()
    with opt.averaged(model, batches=batches()):
        activations = model[0](torch.cat(batches()))
        found = model[1].running_mean
        assert torch.allclose(found, activations.mean((0, 2, 3)), atol=1e-5)
        assert not model.training
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


def test_a_batch_that_raises_leaves_batch_normalization_as_it_was():
    model, opt = after(2, normalized(nn.BatchNorm1d(4, track_running_stats=False)))
    before = copy.deepcopy(model.state_dict())
    model.eval()
    with pytest.raises(RuntimeError), opt.averaged(model, batches=[*batches(1), torch.ones(1, 5)]):
        raise AssertionError
    assert (model[1].momentum, model[4].momentum) == (0.1, 0.1)
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


def test_a_frozen_batch_normalization_stays_frozen():
    model, opt = after(1, normalized())
    model.train()
    model[1].eval()
    mean = model[1].running_mean.clone()
    with opt.averaged(model, batches=batches()):
        assert torch.equal(model[1].running_mean, mean)
    assert model.training
    assert not model[1].training


@pytest.mark.parametrize("batches", [[], iter([])])
def test_no_batch_at_all_is_an_error_and_changes_nothing(batches):
    model, opt = after(1, normalized())
    before = copy.deepcopy(model.state_dict())
    with (
        pytest.raises(ValueError, match=r"averaged: `batches` must hold some batches"),
        opt.averaged(model, batches=batches),
    ):
        raise AssertionError
    with pytest.raises(ValueError, match=r"load_average: `batches` must hold some batches"):
        opt.load_average(model, batches=batches)
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)


def test_autocast_sees_the_average_within_and_the_weights_after():
    torch.manual_seed(0)
    model, x = nn.Linear(6, 4), torch.randn(3, 6)
    opt = WNMuon(model)
    for _ in range(4):
        opt.zero_grad()
        model(x).square().sum().backward()
        opt.step()

    def fresh():
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).detach()

    weights = fresh()
    with opt.averaged():
        means = fresh()
    assert not torch.equal(means, weights)
    with torch.autocast("cpu", torch.bfloat16):
        model(x)  # autocast keeps the weights in bfloat16 until its block ends
        with opt.averaged():
            assert torch.equal(model(x), means)
        assert torch.equal(model(x), weights)


def test_an_average_that_is_kept_no_more_is_not_used():
    model = network()
    opt = WNMuon(model)
    train(model, opt, 2)
    for group in opt.param_groups:
        group["average"] = None
    train(model, opt, 2)
    own = copy.deepcopy(model.state_dict())
    with opt.averaged():
        assert all(torch.equal(model.state_dict()[name], own[name]) for name in own)


@pytest.mark.parametrize("fused", [None, False])
def test_a_plain_mean_that_is_kept_no_more_stays_as_it_was(fused):
    """η = 0 is a mean, and not the same as none."""
    model = network()
    opt = WNMuon(model, average=0.0, fused=fused)
    train(model, opt, 2)
    means = [opt.state[p]["average"].clone() for p in model.parameters()]
    for group in opt.param_groups:
        group["average"] = None
    train(model, opt, 2)
    kept = [opt.state[p]["average"] for p in model.parameters()]
    assert all(map(torch.equal, kept, means))


def test_a_state_dict_holds_copies_and_belongs_to_this_model():
    model, opt = after(1, normalized())
    saved = opt.average_state_dict(model, batches=batches())
    assert not {t.data_ptr() for t in saved.values()} & {
        t.data_ptr() for t in model.state_dict().values()
    }
    with pytest.raises(ValueError, match="`model` must have parameters of this optimizer"):
        opt.average_state_dict(network())


def test_saved_and_loaded_averages_have_statistics_of_their_own():
    model, opt = after(6, normalized())
    before = copy.deepcopy(model.state_dict())
    with opt.averaged(model, batches=batches()):
        expected = copy.deepcopy(model.state_dict())
    saved = opt.average_state_dict(model, batches=batches())
    assert all(torch.equal(model.state_dict()[name], before[name]) for name in before)
    opt.load_average(model, batches=batches())
    for name, value in expected.items():
        assert torch.equal(saved[name], value)
        assert torch.equal(model.state_dict()[name], value)


def test_stale_statistics_are_refused():
    model = normalized()
    with (
        pytest.raises(ValueError, match=r"WNMuon.averaged: `batches` must be given for a model"),
        WNMuon(model).averaged(model),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"WNMuon.averaged: `model` must be given with `batches`"),
        WNMuon(model).averaged(batches=batches()),
    ):
        pass
    for name in ("load_average", "average_state_dict"):
        with pytest.raises(ValueError, match=rf"WNMuon.{name}: `batches` must be given"):
            getattr(WNMuon(model), name)(model)
    assert WNMuon(network())  # without such layers no batches are needed
    with WNMuon(network()).averaged(network()):
        pass


def test_the_average_survives_a_checkpoint_bit_for_bit(make):
    a, b = twins()
    ours, theirs = make(a.parameters()), make(b.parameters())
    train(a, ours, 4)
    b.load_state_dict(a.state_dict())
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    assert same_state(ours, theirs)
    train(a, ours, 2, first=4)
    train(b, theirs, 2, first=4)
    assert same(a, b)
    assert same_state(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_average_of_half_precision_weights_is_wider_than_they_are(dtype):
    """Late in a run the average moves by less than 16 bits can tell."""
    p = nn.Parameter(torch.ones(2, 3, dtype=dtype))
    opt = WNMuon([p])
    for _ in range(3):
        p.grad = torch.randn(2, 3).to(dtype)
        opt.step()
    assert opt.state[p]["average"].dtype == torch.float32
    other = WNMuon([p])
    other.load_state_dict(opt.state_dict())
    assert torch.equal(other.state[p]["average"], opt.state[p]["average"])
    before = p.detach().clone()
    with opt.averaged():
        assert torch.equal(p, opt.state[p]["average"].to(dtype))
    assert torch.equal(p, before)


def test_a_skipped_block_and_a_step_without_rate_leave_the_average_alone():
    p = nn.Parameter(torch.randn(3, 4))
    opt = WNGrad([p], average=8.0, nonfinite="skip")
    p.grad = torch.randn(3, 4)
    opt.step()
    before = opt.state[p]["average"].clone()
    p.grad[1] = torch.nan
    opt.step()
    changed = (opt.state[p]["average"] != before).any(1)
    assert changed.tolist() == [True, False, True]
    for lr in (0.0, torch.tensor(0.0)):
        opt.param_groups[0]["lr"] = lr
        p.grad = torch.randn(3, 4)
        before = opt.state[p]["average"].clone()
        opt.step()
        assert torch.equal(opt.state[p]["average"], before)
