"""Sweeps of one's own training on a CUDA device: the ready-made loop, and `train(trial)`."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from wngrad.lab.report.costs import read as read_costs
from wngrad.lab.run.job import Event, Job
from wngrad.lab.run.store import Store
from wngrad.lab.run.supervisor import supervise
from wngrad.lab.sweep import plan, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOADERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from wngrad import LoaderTask


class Rows(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, k):
        x = torch.randn(64, generator=torch.Generator().manual_seed(k))
        return {"x": x + 0.1 * torch.randn(64), "y": (x[0] > 0).long()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.1)
        self.body = nn.Sequential(*layers, nn.Linear(512, 2))

    def forward(self, x, y):
        assert x.is_cuda and y.is_cuda
        return self.body(x)


def loaders():
    train = DataLoader(Rows(), 16, shuffle=True, num_workers=2, pin_memory=True)
    return train, DataLoader(Rows(), 256, pin_memory=True)


task = LoaderTask(
    "on-cuda", lambda: Net().cuda(), loaders, epochs=2, schedule="cosine", accumulate=2,
    clip=1.0, autocast="bfloat16", loss=lambda out, b: nn.functional.cross_entropy(out, b["y"]),
)
"""
ASSERTS = """
import torch


def train(trial):
    table = torch.nn.Embedding(4, 1).cuda()
    opt = trial.optimizer(table)
    rows = torch.tensor([9 if trial.lam == 0.01 else 1]).cuda()  # an assertion on the device
    for epoch in range(trial.epochs):
        opt.zero_grad()
        loss = table(rows).square().sum()
        loss.backward()
        opt.step()
        trial.report(epoch + 1, loss=loss)
"""


def planned(folder: Path, text: str, lam: list[float], optimizers: list[str]) -> Any:
    (folder / "mine.py").write_text(text)
    asked = {"seeds": 1, "defaults": False, "device": "cuda", "epochs": 2}
    return plan(str(folder / "mine.py"), lam=lam, optimizers=optimizers, **asked)


def starter() -> str:
    return files("wngrad.lab.sweep.starters").joinpath("train.py").read_text()


@pytest.mark.parametrize(("text", "least"), [(LOADERS, 4 * 35_330), (starter(), 4 * 354)])
def test_a_training_runs_on_the_device_and_its_memory_is_known(text, least, tmp_path):
    asked = planned(tmp_path, text, [0.01, 0.1], ["sgd", "adamw", "wngrad", "wnmuon"])
    results = run(asked, tmp_path / "out", "cuda")
    assert {r.status for r in Store(tmp_path / "out").records()} == {"done"}
    assert results.finished("adamw") == 2
    lines = (tmp_path / "out/sessions.jsonl").read_text().splitlines()
    costs = read_costs(map(json.loads, lines)).costs
    for name in ("sgd", "adamw"):
        assert costs[name].seconds > 0
    assert costs["adamw"].state >= 2 * least
    assert costs["sgd"].peak >= 2 * least  # the parameters and their gradients
    assert costs["adamw"].peak >= costs["sgd"].peak


def test_an_assertion_on_the_device_harms_no_other_run(tmp_path):
    asked = planned(tmp_path, ASSERTS, [0.01, 0.1, 1.0], ["sgd"])
    events: list[Event] = []
    outcome = supervise(Job(asked.sweep, tmp_path / "out", device="cuda"), events.append)
    ends = {r.lane.lam: r.status for r in Store(tmp_path / "out").records()}
    assert ends == {0.01: "failed", 0.1: "done", 1.0: "done"}, outcome
    assert not [event for event in events if event["kind"] == "warning"]
