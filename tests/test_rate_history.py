"""The rates and b of each layer over a training: what is kept, what is said, what is drawn."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from conftest import network, train
from wngrad import RateHistory, WNGrad, WNMuon
from wngrad.rate_history import _MOST


def trained(model, opt, steps, spike=None, every=1):
    """A history of a small training, and its losses; one batch may be a spike."""
    history, losses = RateHistory(opt, model, every=every), []
    for step in range(steps):
        x = torch.randn(16, 6)
        opt.zero_grad()
        loss = cross_entropy(model(1000 * x if step == spike else x), x[:, :3].argmax(1))
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    return history, losses


def mlp(depth=1, activation=nn.ReLU):
    hidden = [layer for _ in range(depth) for layer in (activation(), nn.Linear(16, 16))]
    return nn.Sequential(nn.Linear(6, 16), *hidden, activation(), nn.Linear(16, 3))


def test_it_keeps_the_numbers_of_the_optimizer(optimizer):
    model = network()
    opt = optimizer(model.parameters())
    history = RateHistory(opt, model, every=2)
    train(model, opt, 5)
    assert {tuple(layer.steps) for layer in history.layers()} == {(1, 2, 4)}
    train(model, opt, 1)
    rates = opt.rates()
    params = dict(model.named_parameters())
    for layer in history.layers():
        p = params.get(f"{layer.name}.weight", params.get(f"{layer.name}.bias"))
        b = opt.state[p]["b"].float()
        assert layer.rate[-1].tolist() == [
            rates[p].min(),
            rates[p].float().median(),
            rates[p].max(),
        ]
        assert layer.b[-1].tolist() == [b.min(), b.median(), b.max()]


def test_layers_are_named_by_the_model_or_by_the_optimizer_or_by_their_shapes():
    model = mlp()
    names = ["0", "2", "4"]
    for opt in (WNGrad(model.parameters()), WNMuon(model)):
        assert [layer.name for layer in trained(model, opt, 1)[0].layers()] == names
    opt = WNGrad(model.named_parameters())
    assert [layer.name for layer in trained(model, opt, 1)[0].layers()] == names
    history = RateHistory(opt)
    opt.step()
    assert [layer.name for layer in history.layers()] == names
    history = RateHistory(plain := WNGrad(model.parameters()))
    plain.step()
    assert history.layers()[0].name == "0: (16, 6)"


def test_a_long_training_is_thinned_out_and_not_forgotten():
    p = nn.Parameter(torch.ones(2, 3))
    opt = WNGrad([p])
    history = RateHistory(opt, every=1)
    for _ in range(2 * _MOST + 50):
        p.grad = torch.ones(2, 3)
        opt.step()
    (layer,) = history.layers()
    assert _MOST // 2 <= len(layer.steps) <= _MOST
    assert layer.steps[0] == 1
    assert layer.steps == sorted(layer.steps)
    assert layer.steps[-1] >= 2 * _MOST
    history.remove()
    opt.step()
    assert history.layers()[0].steps == layer.steps


def test_a_healthy_run_has_no_troubles():
    torch.manual_seed(0)
    model = mlp(activation=nn.Tanh)  # no unit of which is ever dead
    history, losses = trained(model, WNMuon(model), 60)
    assert history.troubles(losses) == []


def test_losses_that_are_not_finite_are_troubles_and_what_is_usual_beside_them_is_not():
    history = RateHistory(WNGrad([nn.Parameter(torch.ones(2))]))
    bad = "loss: 1 of 41 are not finite, the first at index 40"
    for losses in (range(40, 0, -1), [0.0] * 40):  # that fall, that lie close to zero
        (line,) = history.troubles([*map(float, losses), math.nan])
        assert line.startswith(bad)
        assert "median" not in line


def test_a_spike_is_found_with_its_step():
    torch.manual_seed(0)
    model = mlp()
    history, losses = trained(model, WNGrad(model.parameters()), 60, spike=40, every=2)
    (leap,) = [line for line in history.troubles(losses) if "spike" in line]
    assert "between steps 40 and 42" in leap
    assert "of 2 more layers" in leap


def test_a_network_that_does_not_learn_is_told_by_losses_and_b():
    torch.manual_seed(0)
    model = mlp(depth=12)
    history, losses = trained(model, WNGrad(model.parameters()), 60, every=5)
    loss, group, *_ = history.troubles(losses)
    assert loss.startswith("loss: does not fall")
    assert "hardly any gradient reaches them" in group
    assert "b has grown" not in group.split(";")[0]  # what is as it should be is left out


def test_a_layer_far_below_the_others_is_named():
    params = [nn.Parameter(torch.ones(2, 3)) for _ in range(4)]
    opt = WNGrad([{"params": params[:3]}, {"params": params[3:], "b_init": 1e6}])
    history = RateHistory(opt, every=1)
    for p in params:
        p.grad = torch.ones(2, 3)
    opt.step()
    (line,) = [line for line in history.troubles() if "median layer's" in line]
    assert "`3: (2, 3)` (1 of 4 layers)" in line


@pytest.mark.parametrize("depth", [1, 20])
def test_the_figure_has_a_line_a_layer_and_the_words(depth):
    model = mlp(depth)
    history, losses = trained(model, WNGrad(model.parameters()), 3)
    figure = history.figure(losses)
    upper, lower = figure.subfigs
    rates, b, loss = upper.axes
    assert len(rates.lines) == len(b.lines) == len(history.layers()) == depth + 2
    assert loss.lines[0].get_ydata().tolist() == [x.item() for x in losses]
    assert np.array_equal(b.lines[0].get_ydata(), history.layers()[0].b[:, 1])
    assert len(upper.legends[0].get_texts()) <= 12
    (text,) = lower.texts
    assert text.get_text() == "Nothing looks wrong."
    assert len(history.figure().subfigs[0].axes) == 2  # no losses, no panel


def test_the_words_of_the_figure_are_the_troubles():
    torch.manual_seed(0)
    model = mlp()
    history, losses = trained(model, WNGrad(model.parameters()), 60, spike=40)
    (text,) = history.figure(losses).subfigs[1].texts
    for line in history.troubles(losses):
        assert " ".join(line.split()) in " ".join(text.get_text().split())


def test_the_picture_is_written_and_logged(tmp_path, monkeypatch):
    model = mlp()
    history, losses = trained(model, WNGrad(model.parameters()), 3)
    history.save(tmp_path / "rates.png", losses)
    assert (tmp_path / "rates.png").read_bytes()[:4] == b"\x89PNG"
    seen = {}

    class Writer:
        def add_image(self, tag, image, step, dataformats):
            seen[tag] = image.shape, image.dtype, step, dataformats

    history.log_image(Writer())
    (shape, dtype, step, layout) = seen["wngrad/rates"]
    assert shape[1:] == (1200, 3)
    assert (dtype, step, layout) == (np.uint8, 3, "HWC")
    wandb = ModuleType("wandb")
    wandb.Image = lambda array: array.shape
    wandb.log = seen.update
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    history.log_image(wandb, step=7)
    assert seen["wngrad/rates"][1:] == (1200, 3)
    assert seen["wngrad/rates_step"] == 7


def test_tensorboard_keeps_the_image(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    model = mlp()
    history, _ = trained(model, WNGrad(model.parameters()), 3)
    with SummaryWriter(tmp_path) as writer:
        history.log_image(writer)
    events = EventAccumulator(str(tmp_path)).Reload()
    (image,) = events.Images("wngrad/rates")
    assert (image.step, image.width) == (3, 1200)


def test_a_group_that_was_removed_is_unknown_from_then_on():
    model = mlp()
    opt = WNGrad([{"params": layer.parameters()} for layer in (model[0], model[2])])
    history, _ = trained(model, opt, 2)
    del opt.param_groups[0]
    model[2].weight.grad = torch.ones_like(model[2].weight)
    opt.step()
    gone, there = (torch.as_tensor(layer.rate[-1]) for layer in history.layers()[:2])
    assert gone.isnan().all()
    assert there.isfinite().all()


def test_bad_arguments_are_named_in_the_message():
    opt = WNGrad([nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="RateHistory: `every` must be an int >= 1, got 0"):
        RateHistory(opt, every=0)
    sgd = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match="`opt` must be one of wngrad's, got SGD"):
        RateHistory(sgd)
    with pytest.raises(TypeError, match="`opt` must be an optimizer, got int"):
        RateHistory(3)
    with pytest.raises(ValueError, match="must have a step to show"):
        RateHistory(opt).figure()
    with pytest.raises(TypeError, match="`logger` must be a SummaryWriter or a run of W&B"):
        RateHistory(opt).log_image(SimpleNamespace(log=print))
