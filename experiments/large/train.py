"""The trainer: one network, compiled once, that all runs of a process train in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import wngrad
from experiments.large.corpus import Corpus
from experiments.large.plan import Run
from experiments.tournament.tasks import CharTransformer
from experiments.untuned.methods import WARMUP, schedule, split
from wngrad.lab.run.environment import environment

BETAS = (0.9, 0.95)
CLIPPED = 1.0  # the norm of all gradients, at most
STD = 0.02
POINTS = 100  # of the curve of the training loss
TESTS = 10  # in a run
WARM_UP = 6  # steps of a run's optimizer that are taken back: kernels are chosen and compiled

Step = Callable[[int], None]  # of the step's number
Averaged = Callable[[], AbstractContextManager[None]]  # where the loss is measured


@dataclass(frozen=True)
class Size:
    """Of the network and of a batch: 85.8 million parameters unless said otherwise."""

    width: int = 768
    layers: int = 12
    heads: int = 12
    context: int = 512
    batch: int = 64


class Trainer:
    """A GPT of bytes (its head is not tied to its table), the text, and the loss on both.

    Args:
        size: of the network and the batch.
        corpus: the text.
        device: "cpu" or "cuda".
        test_bytes: how many of the bytes held out are tested on, in windows spread evenly.
        compiled: whether the loss goes through torch.compile; the optimizers' steps never do.
    """

    def __init__(
        self, size: Size, corpus: Corpus, device: str, *, test_bytes: int, compiled: bool
    ) -> None:
        begun = time.perf_counter()
        torch.set_float32_matmul_precision("high")
        self.size, self.device, self.cuda = size, device, device != "cpu"
        self.model = CharTransformer(
            size.width, size.layers, size.heads, letters=256, context=size.context
        ).to(device)
        self.text = corpus.train.to(device)
        self.places = torch.arange(size.context + 1, device=device)
        count = min(test_bytes, len(corpus.test) - 1) // (size.context * size.batch) * size.batch
        if not count:
            raise ValueError(
                f"large: the text held out must fill a batch of {size.batch} × {size.context} "
                f"bytes, got {len(corpus.test)}."
            )
        starts = torch.arange(count) * ((len(corpus.test) - 1) // count)
        windows = corpus.test[starts[:, None] + torch.arange(size.context + 1)].to(device)
        self.tests = torch.split(windows, size.batch)
        self.loss = torch.compile(self._loss, dynamic=False) if compiled else self._loss
        self.loss(self.tests[0]).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            self.loss(self.tests[0])
        self.facts = {  # that every record repeats
            "size": asdict(size),
            "corpus": corpus.facts,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "precision": "bfloat16" if self.cuda else "float32",
            "compiled": compiled,
            "tested_bytes": count * size.context,
            "environment": environment(device),
        }
        self._wait()
        self.facts["compile_seconds"] = round(time.perf_counter() - begun, 3)

    def train(self, run: Run) -> dict[str, Any]:
        """Train once; what a record says of it, its key apart.

        Raises:
            ValueError: the text is too short for one pass.
        """
        begun = time.perf_counter()
        starts = self._starts(run)
        self._initialize(run.seed)
        step, averaged = build(self.model, run)
        for t in range(WARM_UP):
            self._train(starts[t], step, t)
        self._test(averaged)
        self._initialize(run.seed)
        step, averaged = build(self.model, run)
        self._wait()
        warmup_seconds = time.perf_counter() - begun
        losses = torch.full((run.steps,), math.nan, device=self.device)
        every = max(run.steps // POINTS, 1)
        ends, clocks, tests = [], [], []
        for first in range(0, run.steps, every):
            last = min(first + every, run.steps)
            start = self._clock()
            for t in range(first, last):
                losses[t] = self._train(starts[t], step, t)
            clocks.append((start, self._clock()))
            ends.append(last)
            if last == run.steps or len(ends) % (POINTS // TESTS) == 0:
                tests.append(self._test(averaged))
                if not math.isfinite(tests[-1]):
                    break
        self._wait()
        seconds = [round(total, 4) for total in accumulate(_seconds(*pair) for pair in clocks)]
        parts = torch.split(losses.cpu(), every)[: len(ends)]
        means = [part.mean().item() for part in parts]
        at_tests = [
            k for k, end in enumerate(ends, 1) if end == run.steps or k % (POINTS // TESTS) == 0
        ]
        return {
            "loss": _finite(tests[-1]),
            "diverged": not math.isfinite(tests[-1]),
            "train": [
                [end, _finite(loss), total]
                for end, loss, total in zip(ends, means, seconds, strict=True)
            ],
            "test": [
                [ends[k - 1], _finite(loss), seconds[k - 1]]
                for k, loss in zip(at_tests, tests, strict=True)
            ],
            "seconds": seconds[-1],
            "warmup_seconds": round(warmup_seconds, 3),
            "wall_seconds": round(time.perf_counter() - begun, 3),
            **self.facts,
        }

    def _starts(self, run: Run) -> Tensor:
        """Where the windows of every batch begin: windows side by side, none of them twice."""
        size, needed = self.size, run.steps * self.size.batch
        count = (len(self.text) - 1) // size.context
        if count < needed:
            raise ValueError(
                f"large: one pass of {run.steps} steps must have {needed * size.context + 1} bytes "
                f"to train on, got {len(self.text)}."
            )
        order = torch.randperm(count, generator=torch.Generator().manual_seed(run.seed))
        return (order[:needed] * size.context).view(run.steps, size.batch).to(self.device)

    @torch.no_grad()
    def _initialize(self, seed: int) -> None:
        """The first weights of a seed, in place: the same ones on every device."""
        rng = torch.Generator().manual_seed(seed)
        for layer in self.model.modules():
            if isinstance(layer, (nn.Linear, nn.Embedding)):
                layer.weight.copy_(torch.empty(layer.weight.shape).normal_(std=STD, generator=rng))
            if isinstance(layer, nn.Linear) and layer.bias is not None:
                layer.bias.zero_()
            if isinstance(layer, nn.LayerNorm):
                layer.reset_parameters()
        self.model.zero_grad()

    def _loss(self, windows: Tensor) -> Tensor:
        """The mean cross-entropy of the next byte, in nats."""
        codes = windows.long()
        kind = "cuda" if self.cuda else "cpu"
        with torch.autocast(kind, torch.bfloat16, enabled=self.cuda):
            logits = self.model(codes[:, :-1]).transpose(1, 2)
        return F.cross_entropy(logits.flatten(0, 1).float(), codes[:, 1:].flatten())

    def _train(self, starts: Tensor, step: Step, t: int) -> Tensor:
        loss: Tensor = self.loss(self.text[starts[:, None] + self.places])
        loss.backward()  # type: ignore[no-untyped-call]
        step(t)
        self.model.zero_grad()
        return loss.detach()

    def _test(self, averaged: Averaged) -> float:
        with averaged(), torch.no_grad():
            total = sum(self.loss(windows) for windows in self.tests)
        return float(total) / len(self.tests)

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _clock(self) -> Any:
        """Now, in the order of the device's work; nothing is waited for."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _seconds(start: Any, end: Any) -> float:
    return float(end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def build(model: nn.Module, run: Run) -> tuple[Step, Averaged]:
    """A run's optimizer as its step, and the context in which its loss is measured.

    WNMuon is made from the network and nothing else. The rivals have a warm-up, a linear fall to 0
    and clipped gradients; Muon takes the hidden matrices and leaves all else to AdamW.
    """
    if run.method == "wnmuon":
        ours = wngrad.WNMuon(model)
        return (lambda t: ours.step()), ours.averaged
    top = run.rate
    assert top is not None  # a rival's always is one
    params = list(model.parameters())
    hidden, rest = split(model) if run.method == "muon" else ([], params)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in rest if p.ndim >= 2], "weight_decay": run.decay},
        {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    parts: list[Any] = [torch.optim.AdamW(groups, lr=top, betas=BETAS, fused=True)]
    if hidden:
        shared: dict[str, Any] = {"lr": top, "weight_decay": run.decay}
        parts.append(torch.optim.Muon(hidden, adjust_lr_fn="match_rms_adamw", **shared))

    def step(t: int) -> None:
        nn.utils.clip_grad_norm_(params, CLIPPED)
        rate = top * schedule(t, run.steps, round(WARMUP * run.steps), True)
        for part in parts:
            for group in part.param_groups:
                group["lr"] = rate
            part.step()

    return step, nullcontext
