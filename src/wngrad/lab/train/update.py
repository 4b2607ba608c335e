"""One step of every lane of a pack, each by the rule of its optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from wngrad.lab.optimizers import OPTIMIZERS
from wngrad.lab.train.loader import did_you_mean
from wngrad.lab.train.spec import Setting

State = dict[str, Tensor]


@dataclass(slots=True)
class Update:
    """The settings of a pack, and what their optimizers remember."""

    params: list[Tensor]  # each (seeds, settings, *shape); moved in place
    settings: Sequence[Setting]
    weight_decay: float = 0.0
    lam: Tensor = field(init=False)
    t: Tensor = field(init=False)
    runs: list[tuple[str, slice]] = field(init=False)  # neighbours with one optimizer
    state: dict[str, list[State]] = field(init=False)  # for each run, for each parameter

    def __post_init__(self) -> None:
        unknown = {s.optimizer for s in self.settings} - OPTIMIZERS.keys()
        if unknown:
            raise ValueError(
                f"lab: `optimizers` must be of {', '.join(OPTIMIZERS)}, or any class with "
                f"`program` = 'lone', got {', '.join(sorted(unknown))}"
                f"{did_you_mean(min(unknown), OPTIMIZERS)}"
            )
        like = self.params[0]
        self.lam = like.new_tensor([s.lam for s in self.settings])
        self.t = like.new_zeros(())
        self.runs, start = [], 0
        for name, members in itertools.groupby(s.optimizer for s in self.settings):
            stop = start + len(list(members))
            self.runs.append((name, slice(start, stop)))
            start = stop
        self.state = {
            self._key(name, part): [_fresh(name, p[:, part]) for p in self.params]
            for name, part in self.runs
        }

    def __call__(self, grads: Sequence[Tensor]) -> None:
        """One step of every lane."""
        self.t += 1
        for name, part in self.runs:
            states = self.state[self._key(name, part)]
            for p, g, state in zip(self.params, grads, states, strict=True):
                x, g_ = p[:, part], g[:, part].to(p.dtype)
                if self.weight_decay:
                    g_ = g_ + self.weight_decay * x
                lam = self.lam[part].view(1, -1, *[1] * (p.ndim - 2))
                new, after = OPTIMIZERS[name].rule(x, g_, state, lam, self.t)
                x.copy_(new)
                for key, value in after.items():
                    state[key].copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs to go on from here."""
        tensors = {"t": self.t} | {f"p{i}": p for i, p in enumerate(self.params)}
        for run, states in self.state.items():
            for i, state in enumerate(states):
                tensors |= {f"{run}.{i}.{key}": value for key, value in state.items()}
        return tensors

    @staticmethod
    def _key(name: str, part: slice) -> str:
        return f"{name}@{part.start}"


def _fresh(name: str, x: Tensor) -> State:
    shapes = {"b": (*x.shape[:3], *[1] * (x.ndim - 3))}
    return {
        key: x.new_full(shapes.get(key, x.shape), v) for key, v in OPTIMIZERS[name].state.items()
    }
