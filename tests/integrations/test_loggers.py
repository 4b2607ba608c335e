"""Weights & Biases and MLflow, the real ones, on files."""

from __future__ import annotations

import mlflow
import pytest
import wandb

from conftest import network, train
from wngrad import RateHistory, WNAdam, WNGrad, neuron_groups, rate_metrics

STEPS = 3


@pytest.fixture(params=[WNGrad, WNAdam])
def run(request):
    """A model, its optimizer with groups of many names, and what it tells after each step."""
    model = network()
    groups = neuron_groups(model)
    groups[0]["name"] = "λ: the first/../layer"
    return model, request.param(groups, nonfinite="skip")


def test_mlflow_keeps_every_rate(run, tmp_path):
    model, opt = run
    mlflow.set_tracking_uri((tmp_path / "mlruns").as_uri())
    told = []
    with mlflow.start_run() as active:
        mlflow.log_metrics(rate_metrics(opt), step=0)  # nothing to tell yet
        for step in range(1, STEPS + 1):
            train(model, opt, 1, first=step)
            told.append(rate_metrics(opt))
            mlflow.log_metrics(told[-1], step=step)
    client = mlflow.MlflowClient()
    for name in told[0]:
        kept = client.get_metric_history(active.info.run_id, name)
        assert [(m.step, m.value) for m in kept] == [
            (step, metrics[name]) for step, metrics in enumerate(told, start=1)
        ]
    assert set(client.get_run(active.info.run_id).data.metrics) == set(told[0])


def test_wandb_keeps_every_rate(run, tmp_path):
    """Offline; its summary holds what was logged last."""
    model, opt = run
    with wandb.init(project="wngrad", dir=tmp_path, mode="offline") as log:
        for step in range(STEPS):
            log.log(rate_metrics(opt) | {"step": step})
            train(model, opt, 1, first=step)
        told = rate_metrics(opt)
        log.log(told | {"step": STEPS})
        assert log.step == STEPS + 1
        kept = {name: log.summary[name] for name in told}
    assert kept == told
    assert [path.stat().st_size > 0 for path in tmp_path.rglob("*.wandb")] == [True]


def test_wandb_keeps_the_picture(run, tmp_path):
    model, opt = run
    history = RateHistory(opt, model, every=1)
    train(model, opt, STEPS)
    with wandb.init(project="wngrad", dir=tmp_path, mode="offline") as log:
        history.log_image(log)
    (picture,) = tmp_path.rglob("*.png")
    assert picture.parent.name == "wngrad"
