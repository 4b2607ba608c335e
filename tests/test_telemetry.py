"""The rates in use, as metrics for a logger."""

from __future__ import annotations

import math
import posixpath
import re
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from conftest import network, train
from wngrad import WNAdam, WNGrad, WNMuon, neuron_groups, rate_metrics, show_rates


class MLflow:
    """`mlflow.log_metrics`, by the rules of its documentation."""

    def __init__(self):
        self.seen: dict[str, list[tuple[int, float]]] = {}

    def log_metrics(self, metrics, step):
        for key, value in metrics.items():
            assert re.fullmatch(r"[A-Za-z0-9_\-. /]{1,250}", key), key
            assert posixpath.normpath(key) == key, key  # a name may become a file's
            assert not key.startswith(("/", "..")), key
            assert type(value) is float
            self.seen.setdefault(key, []).append((step, value))


class WandB:
    """`wandb.log`: a dictionary with string keys, of which NaN would break every chart."""

    def __init__(self):
        self.history: list[dict[str, float]] = []

    def log(self, metrics):
        assert all(type(key) is str for key in metrics)
        assert all(math.isfinite(value) for value in metrics.values())
        self.history.append(metrics)


def stepped(g, **options):
    p = nn.Parameter(torch.zeros_like(g))
    opt = WNGrad([p], **options)
    p.grad = g
    opt.step()
    return opt


def test_the_numbers_are_those_of_the_summary(optimizer):
    model = network()
    parts = [{"params": model[0].parameters()}, {"params": model[1:].parameters(), "name": "rest"}]
    opt = optimizer(parts, lr=0.5)
    train(model, opt, 3)
    seen = rate_metrics(opt)
    for name, summary in zip(("group0", "rest"), opt.rate_summary(), strict=True):
        for key, value in zip(("min", "median", "max"), summary.floats(), strict=True):
            assert seen.pop(f"wngrad/{name}/rate_{key}") == value
    assert set(seen) <= {"wngrad/group0/skipped", "wngrad/rest/skipped"}
    assert bool(seen) == (opt.defaults["nonfinite"] == "skip")


def test_before_the_first_step_nothing_is_known(optimizer):
    assert rate_metrics(optimizer(network().parameters())) == {}


def test_what_is_not_known_or_nan_is_left_out():
    nothing_yet = stepped(torch.tensor([0.0, 0.0]), b_init="gradient")
    assert rate_metrics(nothing_yet) == {}
    assert rate_metrics(stepped(torch.tensor([math.nan, math.inf]))) == {}
    half = rate_metrics(stepped(torch.tensor([math.nan, 1.0])))
    assert set(half.values()) == {0.5}
    assert all(math.isfinite(x) for x in half.values())


def test_a_group_that_has_not_stepped_says_nothing():
    model = network()
    opt = WNGrad([{"params": [p]} for p in model.parameters()])
    model[0].requires_grad_(False)
    train(model, opt, 1)
    told = {name.split("/")[1] for name in rate_metrics(opt)}
    assert told == {f"group{i}" for i in range(2, 6)}


def test_names_are_unique_and_taken_by_every_logger():
    names = ["head", "head", "", "λ: the rate", "/a//../b/", "..", "head-1", 7]
    params = [nn.Parameter(torch.ones(2)) for _ in names]
    opt = WNGrad([{"params": [p], "name": n} for p, n in zip(params, names, strict=True)])
    for p in params:
        p.grad = torch.ones(2)
    opt.step()
    seen = rate_metrics(opt)
    MLflow().log_metrics(seen, step=0)
    found = list(dict.fromkeys(name.removeprefix("wngrad/").rpartition("/")[0] for name in seen))
    assert found == [*("head", "head-1", "group2", "___the_rate", "a/b", "group5", "head-1-6", "7")]
    assert len(seen) == 3 * len(names)
    assert all(name.startswith("optim.") for name in rate_metrics(opt, prefix="optim."))


def test_a_name_made_unique_does_not_take_another_group_s():
    names, params = ["head-2", "head", "head"], [nn.Parameter(torch.ones(2)) for _ in range(3)]
    opt = WNGrad([{"params": [p], "name": n} for p, n in zip(params, names, strict=True)])
    for p in params:
        p.grad = torch.ones(2)
    opt.step()
    found = {name.split("/")[1] for name in rate_metrics(opt)}
    assert found == {"head-2", "head", "head-2-2"}


def test_a_name_does_not_change_when_a_group_is_added():
    model = network()
    opt = WNGrad(model[0].parameters())
    train(model, opt, 1)
    before = set(rate_metrics(opt))
    opt.add_param_group({"params": list(model[4].parameters())})
    train(model, opt, 1)
    assert before < set(rate_metrics(opt))


@pytest.mark.parametrize("options", [{}, {"per": "model"}, {"hold_1d": True}], ids=str)
@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_skipped_blocks_are_counted_once(make, options):
    model = network()
    groups = model.parameters() if options else neuron_groups(model)
    opt = make(groups, nonfinite="skip", **options)
    for k in range(2):
        train(model, opt, 1, first=k)
        model[0].weight.grad.fill_(math.nan)
        opt.step()
    counted = sum(v for key, v in rate_metrics(opt).items() if key.endswith("/skipped"))
    assert counted == opt.skipped() == 2 * (1 if options.get("per") == "model" else 3)


def test_wrappers_are_looked_through():
    opt = stepped(torch.ones(2))
    around = SimpleNamespace(optimizer=SimpleNamespace(optimizer=opt))
    assert rate_metrics(around) == rate_metrics(opt) != {}
    assert rate_metrics(torch.optim.lr_scheduler.ConstantLR(opt)) == rate_metrics(opt)


def test_of_other_optimizers_there_is_nothing_to_tell_and_of_a_model_still_less():
    model = network()
    assert rate_metrics(torch.optim.Adam(model.parameters())) == {}
    with pytest.raises(TypeError, match="`opt` must be an optimizer, got Sequential"):
        rate_metrics(model)


def test_the_device_is_waited_for_once(optimizer, monkeypatch):
    class Waits(TorchDispatchMode):
        """Refuses `item`, `bool` and `float` of a tensor."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert func is not torch.ops.aten._local_scalar_dense.default
            return func(*args, **(kwargs or {}))

    model = network()
    opt = optimizer([{"params": [p]} for p in model.parameters()])
    train(model, opt, 1)
    waits = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: waits.append(1) or tolist(t))
    with Waits():
        assert rate_metrics(opt)
    assert waits == [1]


def test_the_optimizer_is_left_as_it_was(optimizer):
    model = network()
    opt = optimizer(model.parameters())
    for p in list(model.parameters())[2:]:
        p.requires_grad_(False)
    train(model, opt, 1)
    known = set(opt.state)
    rate_metrics(opt)
    assert set(opt.state) == known


def test_fake_loggers_take_a_run(optimizer):
    model, mlflow, wandb = network(), MLflow(), WandB()
    opt = optimizer(neuron_groups(model) if optimizer.name == "wngrad" else model.parameters())
    for step in range(3):
        wandb.log(rate_metrics(opt))
        mlflow.log_metrics(rate_metrics(opt), step=step)
        train(model, opt, 1, first=step)
    assert wandb.history[0] == {}
    assert wandb.history[2].keys() == mlflow.seen.keys() != set()
    assert all([step for step, _ in values] == [1, 2] for values in mlflow.seen.values())


def test_tensorboard_has_the_rates_of_every_step(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model, told = network(), []
    opt = WNGrad(neuron_groups(model), lr=0.5)
    with SummaryWriter(tmp_path) as writer:
        for step in range(4):
            train(model, opt, 1, first=step)
            told.append(rate_metrics(opt))
            for name, value in told[-1].items():
                writer.add_scalar(name, value, step)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == set(told[0])
    for name in told[0]:
        kept = [(e.step, e.value) for e in events.Scalars(name)]
        assert kept == [(step, metrics[name]) for step, metrics in enumerate(told)]


# ------------------------------------------------------------------- rates shown in the groups


def train_on(opt, model, steps=1):
    for _ in range(steps):
        opt.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        opt.step()


@pytest.mark.parametrize("options", [{}, {"finetune": True}], ids=str)
def test_groups_show_the_median_rate_and_what_it_is_a_multiple_of(options):
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    opt = WNMuon(model, lr=0.25, **options)
    show_rates(opt, every=1)
    train_on(opt, model, 3)
    for group, summary in zip(opt.param_groups, opt.rate_summary(), strict=True):
        assert group["effective_lr"] == pytest.approx(summary.median.item())
        assert group["d"] * group["lr"] == pytest.approx(group["effective_lr"])
        assert group["lr"] == 0.25
        assert {type(group[name]) for name in ("d", "effective_lr")} == {float}


def test_a_scheduler_and_a_checkpoint_do_not_mind():
    def run(shown):
        torch.manual_seed(0)
        model = nn.Linear(3, 4)
        opt = WNMuon(model)
        schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=4)
        if shown:
            show_rates(opt, every=2)
        for _ in range(3):
            train_on(opt, model)
            schedule.step()
        again = WNMuon(model)
        again.load_state_dict(opt.state_dict())
        train_on(again, model, 2)
        return model, [group["lr"] for group in opt.param_groups]

    (one, rates), (other, theirs) = run(True), run(False)
    assert all(map(torch.equal, one.parameters(), other.parameters()))
    assert rates == theirs


def test_rates_are_looked_at_as_often_as_was_said_until_the_handle_is_removed():
    model, values = nn.Linear(3, 4), []
    opt = WNMuon(model)
    handle = show_rates(SimpleNamespace(optimizer=opt), every=3)
    for _ in range(7):
        train_on(opt, model)
        values.append(opt.param_groups[0]["effective_lr"])
    assert [a == b for a, b in pairwise(values)] == [True, True, False] * 2
    handle.remove()
    train_on(opt, model, 3)
    assert opt.param_groups[0]["effective_lr"] == values[-1]


def test_before_a_rate_is_known_nothing_is_shown():
    model = nn.Linear(3, 4)
    opt = WNGrad(model.parameters())
    show_rates(opt)
    opt.step()
    assert "d" not in opt.param_groups[0]


@pytest.mark.parametrize("every", [0, 1.5, True])
def test_bad_arguments_of_show_rates_are_named(every):
    with pytest.raises(ValueError, match="show_rates: `every` must be an int >= 1"):
        show_rates(WNGrad(nn.Linear(2, 2).parameters()), every=every)
    with pytest.raises(TypeError, match="show_rates: `opt` must be one of wngrad's, got SGD"):
        show_rates(torch.optim.SGD(nn.Linear(2, 2).parameters()))
