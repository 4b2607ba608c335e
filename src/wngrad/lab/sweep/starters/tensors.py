"""How robust is my training to the learning rate? From tensors that fit in memory.

    wngrad sweep FILE

Many runs are trained at once, as one program, where the model is a plain Sequential.
"""

import torch
from torch import nn

from wngrad import Task

draw = torch.Generator().manual_seed(0)
x = torch.randn(1500, 8, generator=draw)  # yours: inputs …
y = torch.sin(x[:, :3]).sum(1, keepdim=True) + 0.1 * torch.randn(1500, 1, generator=draw)  # …


def error(output, target):
    return (output - target).abs().mean()


task = Task(
    name="my-tensors",
    model=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)),
    train=(x[:1000], y[:1000]),
    validation=(x[1000:1250], y[1000:1250]),  # λ is chosen here …
    test=(x[1250:], y[1250:]),  # … and judged here
    loss=nn.functional.mse_loss,
    metric=error,
    metric_name="absolute error",
    higher_is_better=False,
    epochs=10,
    batch=50,
)
