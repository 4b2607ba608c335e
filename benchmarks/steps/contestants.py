"""Who steps: every optimizer in every implementation it has, and the passes it cannot avoid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

LR = 1e-4  # Small, so that parameters stay where they are.
WAYS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "plain": {"fused": False},
    "default": {},  # what one gets without asking
}
MOMENTUM = {"lr": LR, "momentum": 0.9}
BARE: dict[str, Any] = {}
CAPTURABLE = {"capturable": True}


@dataclass(frozen=True)
class Contestant:
    """An optimizer in one of its implementations.

    Args:
        passes: how often the parameters' bytes are read or written at least: the gradient and each
            state once, what changes twice.
        graph: what it must be told to be captured in a CUDA graph; None if it cannot be.
    """

    name: str
    way: str
    passes: int
    where: str  # module:class
    options: dict[str, Any]
    graph: dict[str, Any] | None
    again: bool = False

    @property
    def label(self) -> str:
        return f"{self.name} {self.way}" + " (again)" * self.again

    def make(self, params: list[Tensor], **more: Any) -> Optimizer:
        module, _, name = self.where.partition(":")
        build: Callable[..., Optimizer] = getattr(import_module(module), name)
        optimizer = build(params, **self.options, **WAYS[self.way], **more)
        if hasattr(optimizer, "train"):  # schedule-free steps in this mode only
            optimizer.train()
        return optimizer


OURS = [  # name, passes, where, options, graph
    ("WNGrad", 3, "wngrad:WNGrad", {"lr": LR}, BARE),
    ("WNGrad-momentum", 5, "wngrad:WNGrad", MOMENTUM, BARE),
    ("WNAdam", 5, "wngrad:WNAdam", {"lr": LR}, BARE),
    ("WNMuon", 7, "wngrad:WNMuon", {"lr": LR}, BARE),
    ("WNMuon-last", 5, "wngrad:WNMuon", {"lr": LR, "average": None}, BARE),
]
TORCH = [
    ("SGD", 3, "torch.optim:SGD", {"lr": LR}, BARE),
    ("SGD-momentum", 5, "torch.optim:SGD", MOMENTUM, BARE),
    ("Adam", 7, "torch.optim:Adam", {"lr": LR}, CAPTURABLE),
    ("AdamW", 7, "torch.optim:AdamW", {"lr": LR}, CAPTURABLE),
    ("Adagrad", 5, "torch.optim:Adagrad", {"lr": LR}, None),
]
MATRICES = [("Muon", 5, "torch.optim:Muon", {"lr": LR}, BARE)]  # takes nothing else
PEERS = [
    ("ScheduleFree-SGD", 5, "schedulefree:SGDScheduleFree", {"lr": LR}, None),
    ("ScheduleFree-AdamW", 7, "schedulefree:AdamWScheduleFree", {"lr": LR}, None),
    ("Prodigy", 10, "prodigyopt:Prodigy", BARE, None),  # reads g, p, p₀, m, v, s; writes 4 of them
    ("DoG", 4, "dog:DoG", BARE, None),  # reads g, p, p₀; writes p
]
NAMES = [name for name, *_ in OURS + TORCH + MATRICES + PEERS]


def contestants(
    kind: str, names: list[str] | None = None, ways: list[str] | None = None
) -> list[Contestant]:
    """Everyone on a device of this kind; SGD's fused step comes twice, to show the noise."""
    found = [
        c
        for c in _everyone(kind)
        if (names is None or c.name in names) and (ways is None or c.way in ways)
    ]
    return found + [
        Contestant(c.name, c.way, c.passes, c.where, c.options, c.graph, again=True)
        for c in found
        if c.label == "SGD fused"
    ]


def _everyone(kind: str) -> Iterator[Contestant]:
    ours = ("fused", "plain") if kind == "cuda" else ("default", "plain")
    theirs = ("fused", "foreach", "default")
    only = ("default",)
    for table, ways in ((OURS, ours), (TORCH, theirs), (MATRICES, only), (PEERS, only)):
        for name, passes, where, options, graph in table:
            for way in ways:
                yield Contestant(name, way, passes, where, options, graph)
