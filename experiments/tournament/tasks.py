"""The tasks of the tournament: small networks on real data, each a `Task` like a user's own.

A worker finds a task by its `address`, which also holds the folder of the data and the scale: the
part of every training and test set that is used, to try things out.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from wngrad.lab.train import data, models
from wngrad.lab.train.task import Pair, Task

Both = tuple[Pair, Pair]  # train, test
Folder = Path | None
TEXT, TEXT_MD5 = "tinyshakespeare.txt", "6fb458f1232090904fb40fe944165e91"
TEXT_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
CONTEXT = 64  # characters that the transformer sees
LETTERS = 65  # different characters in the text


@dataclass(frozen=True, slots=True)
class Event:
    """A task of the tournament, over which λ, and what it costs."""

    task: Task
    text: str  # data, network and scale, in a line
    steps: int  # of one run
    lam: tuple[float, ...]
    cuda: bool = False  # whether a GPU is quicker than a core
    batch_norm: bool = False
    step_ms: float = 1.0  # on a core, or on a GPU that others use as well; for the estimate

    @property
    def seeds(self) -> dict[str, int]:
        """For each question: at least three, and five where runs are cheap and few."""
        return {"default": 3 if self.cuda else 5, "grid": 3}


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).float().mean()


# -------------------------------------------------------------------------------- networks


def deep_mlp(inputs: int = 784, classes: int = 10, width: int = 100, layers: int = 8) -> nn.Module:
    """Fully connected layers with ReLU between them, and nothing that would normalize."""
    sizes = [inputs, *[width] * (layers - 1), classes]
    parts: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(sizes):
        parts += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


class CharTransformer(nn.Module):
    """A small GPT: characters in, the logits of the next one out, as (batch, letters, context)."""

    def __init__(
        self,
        width: int = 96,
        layers: int = 3,
        heads: int = 4,
        *,
        letters: int = LETTERS,
        context: int = CONTEXT,
    ) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(letters, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, letters, bias=False)
        for part in self.modules():
            if isinstance(part, (nn.Linear, nn.Embedding)):
                nn.init.normal_(part.weight, std=0.02)  # as GPT-2
        self.register_buffer("order", torch.arange(context), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.letters(x) + self.places(self.order)
        logits: Tensor = self.head(self.norm(self.blocks(h)))
        return logits.transpose(1, 2)


class _Block(nn.Module):
    """Attention to what came before, then a layer for every character; both around a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = (
            self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        )
        q, k, v = parts.unbind()
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------ data


def check_scale(scale: float) -> None:
    if not 0 < scale <= 1:
        raise ValueError(f"tournament: `scale` must be > 0 and <= 1, got {scale!r}.")


def _part(pair: Pair, n: int, scale: float, least: int = 1) -> Pair:
    """The first `n` examples, or what the scale leaves of them."""
    check_scale(scale)
    n = min(max(round(n * scale), least), len(pair[1]))
    return pair[0][:n], pair[1][:n]


def images(name: str, train: int, test: int, *, scale: float = 1.0, folder: Folder = None) -> Both:
    """The first examples of one of the lab's own data sets."""
    loaded = data.load(name, folder)
    pairs = (loaded.train_x, loaded.train_y), (loaded.test_x, loaded.test_y)
    return _part(pairs[0], train, scale, 100), _part(pairs[1], test, scale)


def table(name: str, batch: int = 32, *, scale: float = 1.0, folder: Folder = None) -> Both:
    """One of scikit-learn's tables, standardized: four fifths to train, the rest to test."""
    x, y = getattr(data._needed("sklearn.datasets"), f"load_{name}")(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    cut = 4 * len(y) // 5
    train, test = order[:cut], order[cut:]
    x = (x - x[train].mean(0)) / x[train].std(0)
    pairs = [
        (torch.from_numpy(x[part]).float(), torch.from_numpy(y[part]).long())
        for part in (train, test)
    ]
    return _part(pairs[0], cut, scale, batch), _part(pairs[1], len(test), scale)


def characters(train: int, test: int, *, scale: float = 1.0, folder: Folder = None) -> Both:
    """Windows of the text and the same moved by one character: its last tenth is for the test."""
    raw = np.frombuffer(_text(folder), np.uint8)
    codes = torch.from_numpy(np.searchsorted(np.unique(raw), raw)).long()
    cut = len(codes) * 9 // 10
    windows = [_windows(part) for part in (codes[:cut], codes[cut:])]
    return _part(windows[0], train, scale, 64), _part(windows[1], test, scale)


def _windows(codes: Tensor) -> Pair:
    n = (len(codes) - 1) // CONTEXT
    x, y = codes[: n * CONTEXT].view(n, -1), codes[1 : n * CONTEXT + 1].view(n, -1)
    order = np.random.default_rng(0).permutation(n)  # so that a part is of the whole text
    return x[order], y[order]


def _text(folder: Folder) -> bytes:
    """The published text: from `folder`, from the folder that WNGRAD_DATA names, or downloaded."""
    if named := folder or os.environ.get("WNGRAD_DATA"):
        path = Path(named).expanduser() / TEXT
        if not path.is_file():
            raise data.DataError(
                f"{path} is not there; correct --data or WNGRAD_DATA, or leave both out to "
                "download it."
            )
    else:
        path = _downloaded()
    content = path.read_bytes()
    if hashlib.md5(content, usedforsecurity=False).hexdigest() != TEXT_MD5:
        raise data.DataError(f"{path}: expected md5 {TEXT_MD5}; delete it and fetch it again.")
    return content


def _downloaded() -> Path:
    pooch = data._needed("pooch", ", or give a folder with the file as --data")
    try:
        cache, bar = pooch.os_cache("wngrad") / "text", sys.stderr.isatty()
        return Path(pooch.retrieve(TEXT_URL, f"md5:{TEXT_MD5}", TEXT, cache, progressbar=bar))
    except (OSError, ValueError) as error:
        raise data.DataError(
            f"{TEXT_URL}: not downloaded, {data._why(error)}; try again, or fetch it by hand, call "
            f"it {TEXT} and give its folder as --data."
        ) from error


# ------------------------------------------------------------------------------- the tasks


def _classes(name: str, model: Callable[[], Any], load: Callable[[], Both], **more: Any) -> Task:
    measures: dict[str, Any] = {"loss": F.cross_entropy, "metric": accuracy}
    return Task(name, model, load, **measures, metric_name="accuracy", **more)


breast_cancer = _classes(
    "breast-cancer", partial(nn.Linear, 30, 2), partial(table, "breast_cancer"), epochs=20, batch=32
)
wine = _classes("wine", partial(nn.Linear, 13, 3), partial(table, "wine", 16), epochs=20, batch=16)
digits_mlp = _classes(
    "digits-mlp", partial(models.mlp, (64,), 10), partial(images, "digits", 1400, 397), epochs=15
)
mnist_mlp = _classes(
    "mnist-mlp", partial(models.mlp, (784,), 10), partial(images, "mnist", 20_000, 4_000), epochs=4
)
mnist_deep = _classes("mnist-deep", deep_mlp, partial(images, "mnist", 20_000, 4_000), epochs=4)
cifar_cnn = _classes(
    "cifar-cnn",
    partial(models.cnn, (3, 32, 32), 10),
    partial(images, "cifar10", 20_000, 4_000),
    epochs=2,
)
cifar_resnet = _classes(
    "cifar-resnet",
    partial(models.resnet18, (3, 32, 32), 10, 16),
    partial(images, "cifar10", 10_000, 2_000),
    epochs=2,
)
shakespeare = Task(
    "shakespeare",
    CharTransformer,
    partial(characters, 6_400, 1_000),
    loss=F.cross_entropy,
    epochs=3,
    batch=64,
)

HALVES = tuple(float(f"{10 ** (-5 + k / 2):.3g}") for k in range(17))  # 10⁻⁵ to 10³
WHOLES = HALVES[::2]

# fmt: off
_EVENTS = (
    Event(breast_cancer, "logistic regression on scikit-learn's breast cancer table "
          "(455 + 114 rows)", 280, HALVES, step_ms=0.4),
    Event(wine, "logistic regression on scikit-learn's wine table (142 + 36 rows)",
          160, HALVES, step_ms=0.4),
    Event(digits_mlp, "a two-layer network, 64-100-10, on scikit-learn's digits "
          "(1,400 + 397 images)", 210, HALVES, step_ms=0.6),
    Event(mnist_mlp, "a two-layer network, 784-100-10, on MNIST (the first 20,000 + 4,000 images)",
          800, HALVES, step_ms=0.8),
    Event(mnist_deep, "eight layers of 100 without normalization on MNIST "
          "(the first 20,000 + 4,000 images)", 800, HALVES, step_ms=1.6),
    Event(cifar_cnn, "the paper's five-layer CNN on CIFAR-10 (20,000 + 4,000 images)",
          400, WHOLES, cuda=True, step_ms=3.0),
    Event(shakespeare, "a character transformer (3 layers, width 96, context 64) on tiny "
          "Shakespeare (6,400 + 1,000 windows)", 300, WHOLES, cuda=True, step_ms=8.0),
    Event(cifar_resnet, "ResNet-18 at a quarter of its width (16) on CIFAR-10 "
          "(10,000 + 2,000 images)", 200, WHOLES, cuda=True, batch_norm=True, step_ms=14.0),
)
# fmt: on
EVENTS: dict[str, Event] = {event.task.name: event for event in _EVENTS}


def address(task: Task, scale: float = 1.0, folder: Folder = None) -> str:
    """Where a worker finds a task and its options, as `wngrad.lab.train.loader` reads it."""
    options: dict[str, Any] = {"scale": scale} if scale < 1 else {}
    options |= {"folder": folder.resolve()} if folder else {}
    query = f"?{urlencode(options)}" if options else ""
    return f"{__name__}:{task.name.replace('-', '_')}{query}"


def __getattr__(name: str) -> Task:
    """A task with options, by the name that it has in an `address`."""
    attribute, _, query = name.partition("?")
    task, options = globals().get(attribute), dict(parse_qsl(query))
    if not isinstance(task, Task) or not options:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    load: Any = task.train
    folder = Path(options["folder"]) if "folder" in options else None
    return replace(task, train=partial(load, scale=float(options.get("scale", 1)), folder=folder))
