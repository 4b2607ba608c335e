"""The tasks: four on which the defaults were chosen, nine that judge them.

A task is a network, data and a length; a seed gives the first weights and all batches, the same
for every method.
"""

from __future__ import annotations

import math
import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from experiments.tournament import tasks as tournament
from experiments.tournament.contestants import named
from wngrad.lab.train import data, models

PAD = 4  # pixels around an image that is cropped at random
SEPARATOR = b"\0"  # between two files of the standard library


@dataclass(frozen=True, slots=True)
class Split:
    """Training and test data as tensors; a text's training data is the text itself, as bytes."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor

    def to(self, device: str) -> Split:
        return Split(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Task:
    """A network, its data, and how long it is trained."""

    name: str
    group: Literal["choosing", "judging"]
    text: str  # network and data, in a line
    model: Callable[[], nn.Module]
    load: Callable[[Path | None], Split]
    steps: int
    batch: int
    context: int = 0  # characters or bytes that a network of text sees; 0 where there are classes
    cuda: bool = False  # whether a GPU is quicker than a core
    bfloat16: bool = False  # autocast on CUDA
    compiled: bool = False  # whether torch.compile pays on CUDA
    augmented: bool = False  # random crops and flips
    batch_norm: bool = False
    hidden: bool = True  # whether there is a matrix for Muon

    @property
    def metric(self) -> Literal["accuracy", "loss"]:
        """What λ is chosen by and methods are compared in, on the test set."""
        return "loss" if self.context else "accuracy"

    @property
    def weight_decay(self) -> float:
        """What the tuned rivals get."""
        return 0.1 if self.context else 0.01

    @property
    def betas(self) -> tuple[float, float]:
        """AdamW's, tuned."""
        return (0.9, 0.95) if self.context else (0.9, 0.999)

    def network(self, seed: int) -> nn.Module:
        """The network as the seed starts it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.model()

    def draws(self, n: int, steps: int, seed: int) -> Tensor:
        """What every step is made of, (steps, batch, 1): the indices of its examples.

        Permutations of all `n` examples, one after another; places in the text, if it is one.
        Where images are augmented two shifts and a flip follow, (steps, batch, 4).
        """
        rng = torch.Generator().manual_seed(1_000_003 + seed)
        size = (steps, self.batch, 1)
        if self.context:
            return torch.randint(n - self.context, size, generator=rng)
        epochs = math.ceil(steps * self.batch / n)
        order = torch.cat([torch.randperm(n, generator=rng) for _ in range(epochs)])
        draws = order[: steps * self.batch].view(size)
        if self.augmented:
            shifts = torch.randint(2 * PAD + 1, (*size[:2], 2), generator=rng)
            draws = torch.cat([draws, shifts, torch.randint(2, size, generator=rng)], 2)
        return draws

    def examples(self, split: Split, draw: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs and targets of a step, on the data's device."""
        index = draw[:, 0]
        if self.context:
            places = torch.arange(self.context + 1, device=draw.device)
            windows = split.train_x[index[:, None] + places].long()
            return windows[:, :-1], windows[:, 1:]
        if self.augmented:
            return crops(split.train_x, draw), split.train_y[index]
        return split.train_x[index], split.train_y[index]

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """The mean cross-entropy in float32."""
        if self.context:  # (batch, letters, context)
            output, target = output.transpose(1, 2).flatten(0, 1), target.flatten()
        return F.cross_entropy(output.float(), target)


def crops(padded: Tensor, draw: Tensor) -> Tensor:
    """Windows of padded images, moved and mirrored as `draw` says: (index, down, right, flip)."""
    index, down, right, flip = (part[:, None] for part in draw.unbind(1))
    places = torch.arange(padded.shape[-1] - 2 * PAD, device=draw.device)
    rows, columns = down + places, right + torch.where(flip == 1, places.flip(0), places)
    images = padded[index[:, :, None], :, rows[:, :, None], columns[:, None, :]]
    return images.permute(0, 3, 1, 2)  # the channels are last in memory


# ------------------------------------------------------------------------------------ data


def images(name: str, folder: Path | None, *, pad: int = 0) -> Split:
    """All of one of the lab's data sets."""
    loaded = data.load(name, folder)
    train_x = F.pad(loaded.train_x, (pad,) * 4) if pad else loaded.train_x
    return Split(train_x, loaded.train_y, loaded.test_x, loaded.test_y)


def table(name: str, folder: Path | None) -> Split:
    """One of scikit-learn's tables, as the tournament cuts it."""
    train, test = tournament.table(name)
    return Split(*train, *test)


def shakespeare(folder: Path | None, context: int = 128) -> Split:
    """Tiny Shakespeare: its first nine tenths to train, the rest for validation."""
    raw = np.frombuffer(tournament._text(folder), np.uint8)
    codes = np.searchsorted(np.unique(raw), raw).astype(np.uint8)
    cut = len(codes) * 9 // 10
    return text(codes[:cut], codes[cut:], context)


def stdlib(folder: Path | None, context: int = 256) -> Split:
    """The source of Python's standard library: 95 % of its files to train, 5 % for validation."""
    home = Path(sysconfig.get_path("stdlib"))
    apart = {"site-packages", "dist-packages"}
    paths = sorted(p for p in home.rglob("*.py") if not apart & set(p.relative_to(home).parts))
    random.Random(0).shuffle(paths)
    cut = len(paths) * 95 // 100
    parts = [SEPARATOR.join(p.read_bytes() for p in some) for some in (paths[:cut], paths[cut:])]
    train, test = (np.frombuffer(part, np.uint8) for part in parts)
    return text(train, test, context)


def text(train: Any, test: Any, context: int) -> Split:
    """Codes to train on, and windows side by side to validate on."""
    codes, last = (torch.from_numpy(part.copy()) for part in (train, test))
    end = (len(last) - 1) // context * context
    x, y = (part.view(-1, context).long() for part in (last[:end], last[1 : end + 1]))
    return Split(codes, codes[:0], x, y)


# ------------------------------------------------------------------------------- the table

_digits, _mnist = partial(images, "digits"), partial(images, "mnist")
_small, _large = partial(models.mlp, (64,), 10), partial(models.mlp, (784,), 10)
_image = ((3, 32, 32), 10)
_gpt = tournament.CharTransformer
_DIGITS, _MNIST = "64-100-10 on scikit-learn's digits", "784-100-10 on MNIST"

# fmt: off
TASKS: dict[str, Task] = {task.name: task for task in (
    Task("digits-mlp", "choosing", _DIGITS, _small, _digits, 600, 100),
    Task("mnist-mlp", "choosing", _MNIST, _large, _mnist, 1_200, 100),
    Task("shakespeare", "choosing", "a character transformer, 4 layers, width 256, context 128, on "
         "tiny Shakespeare", partial(_gpt, 256, 4, 4, context=128), shakespeare, 600, 64,
         context=128, cuda=True, bfloat16=True),
    Task("stdlib", "choosing", "a GPT of bytes, 6 layers, width 384, context 256, on the source of "
         "Python's standard library", partial(_gpt, 384, 6, 6, letters=256, context=256), stdlib,
         2_000, 64, context=256, cuda=True, bfloat16=True, compiled=True),
    Task("mnist-deep", "judging", "eight layers of 100 without normalization on MNIST",
         tournament.deep_mlp, _mnist, 1_800, 100),
    Task("cifar-cnn", "judging", "the paper's five-layer CNN on CIFAR-10",
         partial(models.cnn, *_image), partial(images, "cifar10"), 2_000, 100, cuda=True),
    Task("cifar-resnet", "judging", "ResNet-18 on CIFAR-10 with random crops and flips",
         partial(models.resnet18, *_image), partial(images, "cifar10", pad=PAD), 3_906, 128,
         cuda=True, bfloat16=True, compiled=True, augmented=True, batch_norm=True),
    Task("breast-cancer", "judging", "logistic regression on scikit-learn's breast cancer table",
         partial(nn.Linear, 30, 2), partial(table, "breast_cancer"), 280, 32, hidden=False),
    Task("wine", "judging", "logistic regression on scikit-learn's wine table",
         partial(nn.Linear, 13, 3), partial(table, "wine"), 160, 16, hidden=False),
    Task("digits-16", "judging", _DIGITS, _small, _digits, 1_750, 16),
    Task("digits-1000", "judging", _DIGITS, _small, _digits, 84, 1_000),
    Task("mnist-16", "judging", _MNIST, _large, _mnist, 7_500, 16),
    Task("mnist-1000", "judging", _MNIST, _large, _mnist, 720, 1_000),
)}
# fmt: on


def find(names: list[str]) -> list[Task]:
    """The tasks called `names`; all of them if there are none."""
    return named("tasks", names, TASKS)
