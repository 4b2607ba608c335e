"""How robust is my training to the learning rate? From DataLoaders, by the ready-made loop.

wngrad sweep FILE --workers 2
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from wngrad import LoaderTask


def model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 4 * 4, 10),
    )  # fmt: skip


def loaders():
    """Yours: (train, validation) or (train, validation, test)."""
    draw = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 1, 8, 8, generator=draw)
    y = torch.randint(10, (1200,), generator=draw)
    x = centres[y] + 1.5 * torch.randn(1200, 1, 8, 8, generator=draw)
    parts = [TensorDataset(x[a:b], y[a:b]) for a, b in ((0, 800), (800, 1000), (1000, 1200))]
    train, validation, test = (DataLoader(part, 50, shuffle=k == 0) for k, part in enumerate(parts))
    return train, validation, test


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


task = LoaderTask(
    "my-loaders",
    model,
    loaders,
    loss=nn.functional.cross_entropy,  # (output, target); left out for Hugging Face models
    metric=accuracy,
    metric_name="accuracy",
    epochs=4,
    schedule="cosine",  # or "constant", "linear"
    warmup=0.1,
    clip=1.0,
)
