"""A small regression: how far a disease has gone after a year, from ten measurements.

wngrad sweep examples/diabetes_task.py
"""

import torch
from sklearn.datasets import load_diabetes
from torch import nn

from wngrad import Task

x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
train, test = order[:342], order[342:]
x = (x - x[train].mean(0)) / x[train].std(0)
y = (y - y[train].mean()) / y[train].std()


def r2(output, target):
    return 1 - (output[:, 0] - target).square().mean() / target.var(correction=0)


task = Task(
    name="diabetes",
    model=lambda: nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)),
    train=(x[train], y[train]),
    test=(x[test], y[test]),
    loss=lambda output, target: (output[:, 0] - target).square().mean(),
    metric=r2,
    metric_name="R²",
    epochs=20,
    batch=32,
)
