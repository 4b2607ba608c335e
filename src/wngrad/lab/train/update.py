"""One step of every optimizer, on parameters that carry their lanes in front.

A parameter of shape (out, in) becomes one tensor (seeds, settings, out, in); λ is one number per
setting. The recursions are `wngrad.rule`'s, the baselines those of `torch.optim`; a test holds
every row of `RULES` to the real class.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wngrad import rule
from wngrad.lab.train.spec import Setting

MU, BETA, BETA2, EPS = 0.9, 0.9, 0.999, 1e-8  # the paper's, and torch's defaults
State = dict[str, Tensor]
# (x, g, state, λ, t) -> (new x, new state)
Rule = Callable[[Tensor, Tensor, State, Tensor, Tensor], tuple[Tensor, State]]


def sgd(x: Tensor, g: Tensor, s: State, lam: Tensor, t: Tensor) -> tuple[Tensor, State]:
    return rule.descend(x, g, lam), s  # Alg. 5


def sgd_momentum(x: Tensor, g: Tensor, s: State, lam: Tensor, t: Tensor) -> tuple[Tensor, State]:
    buf = rule.momentum(s["buf"], g, 1, MU)
    return rule.descend(x, buf, lam), {"buf": buf}


def adam(x: Tensor, g: Tensor, s: State, lam: Tensor, t: Tensor) -> tuple[Tensor, State]:
    m, v = rule.running_mean(s["m"], g, BETA), rule.running_mean(s["v"], g * g, BETA2)
    direction = rule.unbiased(m, BETA, t) / (rule.unbiased(v, BETA2, t).sqrt() + EPS)
    return rule.descend(x, direction, lam), {"m": m, "v": v}


def wngrad(x: Tensor, g: Tensor, s: State, lam: Tensor, t: Tensor) -> tuple[Tensor, State]:
    b = _next_b(s["b"], g, lam)  # b_j ← b_{j-1} + λ²‖g‖²/b_{j-1}
    return rule.descend(x, g / b, lam), {"b": b}  # x_j ← x_{j-1} − λ g/b_j


def wngrad_momentum(x: Tensor, g: Tensor, s: State, lam: Tensor, t: Tensor) -> tuple[Tensor, State]:
    b = _next_b(s["b"], g, lam)
    buf = rule.momentum(s["buf"], g, b, MU)
    return rule.descend(x, buf, lam), {"b": b, "buf": buf}


def wnadam(x: Tensor, g: Tensor, s: State, lam: Tensor, t: Tensor) -> tuple[Tensor, State]:
    m, b = rule.running_mean(s["m"], g, BETA), _next_b(s["b"], g, lam)
    return rule.descend(x, rule.unbiased(m, BETA, t) / b, lam), {"m": m, "b": b}


def wngrad_gradient(x: Tensor, g: Tensor, s: State, lam: Tensor, t: Tensor) -> tuple[Tensor, State]:
    """WNGrad from b₁ = λ‖g₁‖ (Remark 2.2); a block that has met no gradient yet stays put."""
    b = torch.where(s["b"] == 0, rule.first_b(_sq_norm(g).sqrt(), lam, 1), s["b"])
    unset = b == 0
    b = torch.where(unset, b, _next_b(torch.where(unset, 1, b), g, lam))
    return rule.descend(x, g / torch.where(unset, 1, b), lam), {"b": b}


RULES: dict[str, Rule] = {
    "sgd": sgd,
    "sgd-momentum": sgd_momentum,
    "adam": adam,
    "wngrad": wngrad,
    "wngrad-momentum": wngrad_momentum,
    "wnadam": wnadam,
    "wngrad-gradient": wngrad_gradient,
}
# What each keeps: name → what it starts from. "b" has one entry per neuron, the others one per
# weight.
KEEPS: dict[str, dict[str, float]] = {
    "sgd": {},
    "sgd-momentum": {"buf": 0},
    "adam": {"m": 0, "v": 0},
    "wngrad": {"b": 1},
    "wngrad-momentum": {"b": 1, "buf": 0},
    "wnadam": {"m": 0, "b": 1},
    "wngrad-gradient": {"b": 0},
}


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
        unknown = {s.optimizer for s in self.settings} - RULES.keys()
        if unknown:
            raise ValueError(
                f"lab: `optimizers` must be of {', '.join(RULES)}, or any class with `program` = "
                f"'lone', got {', '.join(sorted(unknown))}."
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
                x, g_ = p[:, part], g[:, part]
                if self.weight_decay:
                    g_ = g_ + self.weight_decay * x
                lam = self.lam[part].view(1, -1, *[1] * (p.ndim - 2))
                new, after = RULES[name](x, g_, state, lam, self.t)
                x.copy_(new)
                for key, value in after.items():
                    state[key].copy_(value)

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint needs to go on from here."""
        found = {"t": self.t}
        found |= {f"p{i}": p for i, p in enumerate(self.params)}
        for run, states in self.state.items():
            for i, state in enumerate(states):
                found |= {f"{run}.{i}.{key}": value for key, value in state.items()}
        return found

    @staticmethod
    def _key(name: str, part: slice) -> str:
        return f"{name}@{part.start}"


def _fresh(name: str, x: Tensor) -> State:
    shapes = {"b": (*x.shape[:3], *[1] * (x.ndim - 3))}
    return {key: x.new_full(shapes.get(key, x.shape), v) for key, v in KEEPS[name].items()}


def _sq_norm(g: Tensor) -> Tensor:
    """‖g‖² of each neuron: one number per lane and index of the parameter's first dimension."""
    return g * g if g.ndim == 3 else (g * g).sum(tuple(range(3, g.ndim)), keepdim=True)


def _next_b(b: Tensor, g: Tensor, lam: Tensor) -> Tensor:
    new: Tensor = rule.next_b(b, _sq_norm(g), lam)
    # As in WNGrad itself: an infinite b would freeze the neuron in silence, NaN shows.
    return torch.where(torch.isinf(new), torch.nan, new)
