"""Lightning: its own loop, clipping, checkpoints and loggers."""

from __future__ import annotations

import csv
import logging

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from conftest import same, same_state
from wngrad import WNAdam, WNGrad, neuron_groups, rate_metrics
from wngrad.integrations.lightning import RateMonitor

MAKERS = {
    "wngrad": WNGrad,
    "wngrad-momentum": lambda params: WNGrad(params, lr=0.5, momentum=0.9, nonfinite="skip"),
    "wngrad-gradient": lambda params: WNGrad(params, b_init="gradient"),
    "wnadam": WNAdam,
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


class Net(pl.LightningModule):
    """Sets its own seed, so that two of them are twins."""

    def __init__(self, make, *, schedule=True):
        super().__init__()
        torch.manual_seed(0)
        self.make, self.schedule = make, schedule
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        self.told: list[dict[str, float]] = []

    def training_step(self, batch, _):
        self.told.append(rate_metrics(self.optimizers()))  # what Lightning wrapped
        x, y = batch
        return nn.functional.cross_entropy(self.layers(x), y)

    def configure_optimizers(self):
        opt = self.make(self.layers.parameters())
        if not self.schedule:
            return opt
        plan = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": plan, "interval": "step"}}


def loader():
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(32, 3, generator=draw), torch.randint(2, (32,), generator=draw)
    return DataLoader(TensorDataset(x, y), batch_size=4)  # eight batches


def trainer(path, **options):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    settings = {"max_epochs": 2, "logger": False, "enable_checkpointing": False, **quiet}
    return pl.Trainer(default_root_dir=path, **{**settings, **options})


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_fit_is_a_plain_loop(make, clip, tmp_path):
    """Lightning hands `step` a closure that computes the loss and the gradients."""
    fitted = Net(make)
    run = trainer(tmp_path, gradient_clip_val=clip)
    run.fit(fitted, loader())
    net = Net(make)
    opt = make(net.layers.parameters())
    plan = torch.optim.lr_scheduler.StepLR(opt, 3, 0.5)
    for x, y in [*loader(), *loader()]:
        opt.zero_grad()
        nn.functional.cross_entropy(net.layers(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.layers.parameters(), clip)
        opt.step()
        plan.step()
    assert same(fitted.layers, net.layers)
    assert same_state(run.optimizers[0], opt)
    assert fitted.told[0] == {}
    assert rate_metrics(fitted.optimizers()) == rate_metrics(opt) != {}


def test_a_fit_resumed_from_a_checkpoint_is_bit_for_bit_the_whole_one(make, tmp_path):
    whole, half, again = Net(make), Net(make), Net(make)
    first = trainer(tmp_path)
    first.fit(whole, loader())
    stopped = trainer(tmp_path, max_epochs=1)
    stopped.fit(half, loader())
    stopped.save_checkpoint(tmp_path / "half.ckpt")
    with torch.no_grad():
        again.layers[0].weight.zero_()
    second = trainer(tmp_path)
    second.fit(again, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert second.global_step == first.global_step == 16
    assert same(whole.layers, again.layers)
    assert same_state(first.optimizers[0], second.optimizers[0])


def rows(path, name):
    """A column of what CSVLogger wrote, by step."""
    with (path / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
        return {int(r["step"]): float(r[name]) for r in csv.DictReader(file) if r.get(name)}


def test_the_monitor_shows_the_rate_in_use_where_lightnings_shows_lam(make, tmp_path):
    net = Net(make)
    log = CSVLogger(tmp_path)
    trainer(tmp_path, callbacks=[RateMonitor()], logger=log, log_every_n_steps=1).fit(net, loader())
    name = f"lr-{type(net.trainer.optimizers[0]).__name__}"
    told = {k: metrics for k, metrics in enumerate(net.told) if k > 0}
    for ending, key in (("", "median"), ("-min", "min"), ("-max", "max")):
        expected = {k: m[f"wngrad/group0/rate_{key}"] for k, m in told.items()}
        assert rows(tmp_path, name + ending) == pytest.approx(expected)
    start = net.trainer.optimizers[0].defaults["lr"]
    lam = rows(tmp_path, f"{name}-lambda")
    assert lam == pytest.approx({k: start * 0.5 ** (k // 3) for k in range(16)})


def test_lightnings_own_monitor_shows_lam(tmp_path):
    log = CSVLogger(tmp_path)
    monitor = LearningRateMonitor(logging_interval="step")
    run = trainer(tmp_path, callbacks=[monitor], logger=log, log_every_n_steps=1)
    run.fit(Net(WNGrad), loader())
    assert set(rows(tmp_path, "lr-WNGrad").values()) == {0.5**k for k in range(6)}


def test_the_monitor_keeps_the_rates_and_offers_them_to_callbacks(tmp_path):
    monitor = RateMonitor()
    net = Net(WNGrad, schedule=False)
    log = CSVLogger(tmp_path)
    run = trainer(tmp_path, callbacks=[monitor], logger=log, log_every_n_steps=4)
    run.fit(net, loader())
    expected = [net.told[k]["wngrad/group0/rate_median"] for k in (3, 7, 11, 15)]
    assert monitor.lrs["lr-WNGrad"] == expected
    assert float(run.callback_metrics["lr-WNGrad"]) == pytest.approx(expected[-1])


def test_the_monitor_logs_a_picture_when_the_training_ends(tmp_path):
    net = Net(WNGrad)
    logs = [TensorBoardLogger(tmp_path, name="tb", version=0), CSVLogger(tmp_path)]
    monitor = RateMonitor(picture=True)
    run = trainer(tmp_path, callbacks=[monitor], logger=logs, log_every_n_steps=1)
    run.fit(net, loader())
    events = EventAccumulator(logs[0].log_dir).Reload()
    (image,) = events.Images("wngrad/rates")
    assert image.step == run.global_step > 0


def test_tensorboard_shows_the_rates_of_every_layer(tmp_path):
    log = TensorBoardLogger(tmp_path)
    net = Net(lambda _: None)
    net.make = lambda _: WNAdam(neuron_groups(net.layers), nonfinite="skip")
    run = trainer(tmp_path, callbacks=[RateMonitor()], logger=log, log_every_n_steps=1)
    run.fit(net, loader())
    events = EventAccumulator(log.log_dir).Reload()
    for layer in ("0", "2"):
        kept = [(e.step, e.value) for e in events.Scalars(f"lr-WNAdam/{layer}")]
        key = f"wngrad/{layer}/rate_median"
        assert kept == [(k, metrics[key]) for k, metrics in enumerate(net.told) if k > 0]
        assert [e.value for e in events.Scalars(f"lr-WNAdam/{layer}-skipped")] == [0.0] * 15


class Pair(pl.LightningModule):
    """Two optimizers, stepped by hand; one of them is ours."""

    automatic_optimization = False

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def training_step(self, batch, _):
        x, y = batch
        self.manual_backward(nn.functional.cross_entropy(self.layers(x), y))
        for opt in self.optimizers():
            opt.step()
            opt.zero_grad()

    def configure_optimizers(self):
        first, _, last = self.layers
        return [WNGrad(first.parameters()), torch.optim.SGD(last.parameters(), lr=0.25)]


def test_an_optimizer_of_others_is_shown_as_ever(tmp_path):
    log = CSVLogger(tmp_path)
    monitor = RateMonitor(log_momentum=True, log_weight_decay=True)
    trainer(tmp_path, callbacks=[monitor], logger=log, log_every_n_steps=1).fit(Pair(), loader())
    assert set(rows(tmp_path, "lr-SGD").values()) == {0.25}
    assert len(set(rows(tmp_path, "lr-WNGrad").values())) > 1
    assert set(rows(tmp_path, "lr-WNGrad-lambda").values()) == {1.0}
    assert set(rows(tmp_path, "lr-WNGrad-momentum").values()) == {0.0}
