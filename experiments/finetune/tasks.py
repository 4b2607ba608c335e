"""The tasks: a network that was trained on one text or on images, and goes on with others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from experiments.finetune import llama
from experiments.finetune.lora import add_lora
from experiments.tournament import tasks as tournament
from experiments.tournament.contestants import named
from experiments.untuned import tasks as untuned
from experiments.untuned.tasks import Split, Task
from wngrad.lab.train import data, models

WINDOWS = 1_024  # of a text that are evaluated
STEPS = (500, 100, 2_000)  # of fine-tuning, in the order of importance
LORA = tuple((rank, factor * rank) for rank in (8, 4, 32, 128) for factor in (1, 2))  # r, α
HEAD_FIRST = 0.2  # part of the steps that only the head is trained for


@dataclass(frozen=True, slots=True)
class FineTuning(Task):
    """A pre-trained network, what of it is trained, and the data it goes on with.

    Without a `source` it is the pre-training itself.
    """

    source: str = ""  # the task whose network it starts from
    mode: str = "full"  # "full", "head-first", "lora-RANK-ALPHA" or "peft-RANK-ALPHA"
    half: bool = False  # weights in bfloat16
    starts: Path | None = None  # the folder of the pre-trained networks
    first: Callable[[Path | None], Split] | None = None  # the source's data; of a source, another's

    @property
    def weight_decay(self) -> float:
        """What the rivals get: torch's default for AdamW."""
        return 0.01

    @property
    def betas(self) -> tuple[float, float]:
        return (0.9, 0.999)

    @property
    def metric(self) -> Literal["accuracy", "loss"]:
        return "loss"

    def head_only(self, steps: int) -> int:
        """For how many steps only the head is trained."""
        return round(HEAD_FIRST * steps) if self.mode == "head-first" else 0

    def network(self, seed: int) -> nn.Module:
        """The pre-trained network; the seed draws what is new, such as LoRA's A."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.model()
            if self.source:
                assert self.starts is not None
                state = torch.load(self.starts / f"{self.source}.pt", weights_only=True)
                model.load_state_dict(state)
            if self.mode.startswith(("lora", "peft")):
                kind, rank, alpha = self.mode.split("-")
                add = add_lora if kind == "lora" else llama.add_peft
                model = add(model, int(rank), int(alpha))
        return model.to(torch.bfloat16) if self.half else model


def head(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of the last linear layer."""
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    return list(layers[-1].parameters())


# ------------------------------------------------------------------------------------ data


@cache
def python(folder: Path | None, context: int = 128) -> Split:
    """Python's standard library, as `untuned` cuts it; fewer windows of its validation."""
    return _fewer(untuned.stdlib(folder, context))


@cache
def shakespeare(folder: Path | None, context: int = 128) -> Split:
    """Tiny Shakespeare as bytes: its first nine tenths to train, the rest for validation."""
    raw = np.frombuffer(tournament._text(folder), np.uint8)
    cut = len(raw) * 9 // 10
    return _fewer(untuned.text(raw[:cut], raw[cut:], context))


def _fewer(split: Split) -> Split:
    every = max(1, len(split.test_x) // WINDOWS)
    test = (part[::every][:WINDOWS].contiguous() for part in (split.test_x, split.test_y))
    return Split(split.train_x, split.train_y, *test)


@cache
def mnist(folder: Path | None) -> Split:
    return untuned.images("mnist", folder)


@cache
def digits(folder: Path | None, train: int = 300) -> Split:
    """scikit-learn's digits, made as large as MNIST's: few to train on, 397 for the test."""
    loaded = data.load("digits", folder)
    train_x, test_x = (_enlarged(x) for x in (loaded.train_x[:train], loaded.test_x))
    return Split(train_x, loaded.train_y[:train], test_x, loaded.test_y)


def _enlarged(x: torch.Tensor) -> torch.Tensor:
    images = F.interpolate(x.view(-1, 1, 8, 8), (20, 20), mode="bilinear")
    return F.pad(images, (4,) * 4, value=float(images.min()))  # MNIST's have such a margin


# ------------------------------------------------------------------------------- the table

_TEXTS = {"python": (python, 3_000), "shakespeare": (shakespeare, 1_200)}
_gpt = tournament.CharTransformer


def _of_text(size: str, width: int, layers: int, context: int, batch: int) -> list[FineTuning]:
    """All tasks of texts, with a GPT of one size."""
    model = partial(_gpt, width, layers, 4, letters=256, context=context)
    text = f"a GPT of bytes, {layers} layers, width {width}, context {context}, "
    loads = {name: partial(load, context=context) for name, (load, _) in _TEXTS.items()}
    tasks = []
    for name, (_, steps) in _TEXTS.items():
        other = next(each for each in _TEXTS if each != name)
        whole = FineTuning(
            f"{size}{name}", "choosing", f"{text}on {name}", model, loads[name], steps, batch,
            context=context, cuda=True, bfloat16=True, first=loads[other],
        )  # fmt: skip
        tasks.append(whole)
        base = replace(
            whole, load=loads[other], steps=STEPS[0], source=whole.name, first=loads[name],
            text=f"{text}from {name} to {other}",
        )  # fmt: skip
        tasks += _modes(base, f"{size}{name}-{other}", [f"lora-{r}-{a}" for r, a in LORA])
    return tasks


def _modes(base: FineTuning, name: str, more: list[str]) -> list[FineTuning]:
    """The ways to fine-tune one network."""
    modes = ["full", "head-first", *more]
    tasks = [replace(base, name=f"{name}.{mode}", mode=mode) for mode in modes]
    return [*tasks, replace(base, name=f"{name}.full-bf16", half=True)]


def _of_images() -> list[FineTuning]:
    model = partial(models.resnet18, (1, 28, 28), 10, 16)
    text = "ResNet-18 at a quarter of its width "
    whole = FineTuning(
        "mnist", "choosing", f"{text}on MNIST", model, mnist, 600, 100, cuda=True,
        batch_norm=True, first=digits,
    )  # fmt: skip
    base = replace(
        whole, load=digits, steps=STEPS[0], batch=32, source="mnist", first=mnist,
        text=f"{text}from MNIST to 300 of scikit-learn's digits",
    )  # fmt: skip
    return [whole, *_modes(base, "mnist-digits", [])[:2]]


def _of_llama(context: int = 64) -> list[FineTuning]:
    """LoRA as peft has it, on Hugging Face's Llama; for a core, since a GPU need not have them."""
    python_, other = (partial(load, context=context) for load, _ in _TEXTS.values())
    text = f"a Llama of bytes, 2 layers, width 64, context {context}, "
    whole = FineTuning(
        "peft-python", "choosing", f"{text}on python", llama.ByteLlama, python_, 500, 16,
        context=context, first=other,
    )  # fmt: skip
    base = replace(
        whole, load=other, steps=200, source=whole.name, first=python_,
        text=f"{text}from python to shakespeare",
    )  # fmt: skip
    modes = [f"peft-{rank}-{alpha}" for rank, alpha in ((8, 8), (8, 16))]
    name = "peft-python-shakespeare"
    return [whole, *(replace(base, name=f"{name}.{mode}", mode=mode) for mode in modes)]


_SMALL = ("tiny-", "peft-")  # tasks that are run when they are asked for
_ALL = [
    *_of_text("", 256, 4, 128, 32),
    *_of_images(),
    *_of_text("tiny-", 64, 2, 64, 16),
    *_of_llama(),
]
STARTS: dict[str, FineTuning] = {task.name: task for task in _ALL if not task.source}
TASKS: dict[str, FineTuning] = {task.name: task for task in _ALL if task.source}


def find(names: list[str]) -> list[FineTuning]:
    """The tasks called `names`; all of the ordinary size if there are none."""
    ordinary = {name: task for name, task in TASKS.items() if not name.startswith(_SMALL)}
    return named("tasks", names, TASKS) if names else list(ordinary.values())
