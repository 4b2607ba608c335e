"""The methods as rows: how each is made, over which λ, and on which schedule.

WNMuon is made from the network and nothing else. AdamW, Muon and schedule-free AdamW are given
what their users tune. Every contestant of the tournament runs at its documented default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import wngrad
from experiments.tournament.contestants import CONTESTANTS, Contestant, schedulefree_adamw
from experiments.untuned.tasks import Task
from wngrad.lab.optimizers import OPTIMIZERS
from wngrad.lab.train.loader import load_callable

RHO, C = 0.3, 10.0  # WNMuon's defaults of `lr` and `b_init`, moved below by 3 and by 10
WARMUP = 0.05  # of the steps

Build = Callable[[nn.Module, Task, float, int], Any]  # (network, task, λ, steps) → an optimizer


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train: an optimizer, the λ that it is tried at, and their schedule."""

    name: str
    label: str
    build: Build
    lams: tuple[float, ...]  # one, if nothing is tuned
    part: str  # of the experiment
    warmup: float = 0.0  # part of the steps over which λ grows from 0
    decays: bool = False  # whether λ then falls to 0
    captured: bool = False  # whether its step may be replayed as a CUDA graph
    contestant: Contestant | None = None

    def factor(self, step: int, steps: int) -> float:
        """What λ is multiplied by at a step, from 0; after the last it is 0 if λ decays."""
        return schedule(step, steps, round(self.warmup * steps), self.decays)

    def missing(self) -> str | None:
        """Why it cannot be run, in one line; None if it can."""
        return self.contestant.missing() if self.contestant else None

    @property
    def version(self) -> str:
        return self.contestant.version if self.contestant else str(torch.__version__)


def schedule(step: int, steps: int, warmup: int, decays: bool) -> float:
    """A linear warm-up, then 1 or a linear fall that reaches 0 at `steps`.

    >>> [schedule(t, 10, 2, True) for t in (0, 1, 2, 6, 10)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step < warmup:
        return (step + 1) / warmup
    return (steps - step) / (steps - warmup) if decays else 1.0


def half_decades(middle: float, each_side: int) -> tuple[float, ...]:
    """`middle` and its neighbours, √10 apart, to three digits.

    >>> half_decades(0.01, 1)
    (0.00316, 0.01, 0.0316)
    """
    return tuple(float(f"{middle * 10 ** (k / 2):.3g}") for k in range(-each_side, each_side + 1))


# -------------------------------------------------------------------------------- builders


def ours(model: nn.Module, **settings: float) -> Any:
    """WNMuon, from the network alone unless a setting is moved."""
    return wngrad.WNMuon(model, **settings)  # type: ignore[arg-type]


def wnmuon(model: nn.Module, task: Task, lam: float, steps: int) -> Any:
    return ours(model)


def wnmuon_rho(model: nn.Module, task: Task, lam: float, steps: int) -> Any:
    return ours(model, lr=lam)


def wnmuon_c(model: nn.Module, task: Task, lam: float, steps: int) -> Any:
    return ours(model, b_init=lam)


def adamw(model: nn.Module, task: Task, lam: float, steps: int) -> Any:
    return _adamw(model.parameters(), task, lam)


def _adamw(params: Iterable[Tensor], task: Task, lam: float) -> Any:
    """AdamW as it is mostly used: matrices decay, biases and gains do not."""
    every = list(params)
    groups = [
        {"params": [p for p in every if p.ndim >= 2], "weight_decay": task.weight_decay},
        {"params": [p for p in every if p.ndim < 2], "weight_decay": 0.0},
    ]
    full = [group for group in groups if group["params"]]
    return torch.optim.AdamW(full, lr=lam, betas=task.betas, fused=True)


def schedule_free(model: nn.Module, task: Task, lam: float, steps: int) -> Any:
    opt = schedulefree_adamw(model.parameters(), lr=lam)
    for group in opt.param_groups:
        group["weight_decay"], group["warmup_steps"] = task.weight_decay, round(WARMUP * steps)
    return opt


def rival(who: Contestant, model: nn.Module, task: Task, lam: float, steps: int) -> Any:
    """A contestant of the tournament, as it is made there."""
    target, params = who.target(task.batch_norm), list(model.parameters())
    if target in OPTIMIZERS:
        return OPTIMIZERS[target].build(params, lr=lam)
    return load_callable(target, "contestant")(params, lr=lam)


class MuonAdamW:
    """Muon for the hidden matrices and AdamW for the rest, as one optimizer with one λ.

    Muon's steps are scaled to AdamW's size (`match_rms_adamw`), so that one λ serves both. torch's
    Muon takes 2-D parameters alone: a convolution is handed to it as (out, in·height·width), over
    the same memory. The order of those columns follows the memory and changes nothing: Muon's
    step turns with them.
    """

    def __init__(self, model: nn.Module, task: Task, lam: float, steps: int = 0) -> None:
        hidden, rest = split(model)
        self._views = [(p, nn.Parameter(_matrix(p.detach(), p))) for p in hidden]
        for p, view in self._views:
            assert view.data_ptr() == p.data_ptr()
        shared: dict[str, Any] = {"lr": lam, "weight_decay": task.weight_decay}
        views = [view for _, view in self._views]
        scaled = torch.optim.Muon(views, adjust_lr_fn="match_rms_adamw", **shared)
        self._parts = [scaled, *([_adamw(rest, task, lam)] if rest else [])]
        self.param_groups = [group for part in self._parts for group in part.param_groups]

    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        for p, view in self._views:
            view.grad = None if p.grad is None else _matrix(p.grad, p)
        for part in self._parts:
            part.step()
        return None if closure is None else closure()


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The weights of all linear layers and convolutions but the last, and all other parameters.

    Frozen ones are left out.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    hidden: list[Any] = [layer.weight for layer in layers[:-1] if layer.weight.requires_grad]
    known = {id(p) for p in hidden}
    return hidden, [p for p in model.parameters() if p.requires_grad and id(p) not in known]


def _matrix(x: Tensor, param: Tensor) -> Tensor:
    """A weight or its gradient as (out, all else), the columns as `param` has them in memory."""
    order = (0, 2, 3, 1) if param.ndim == 4 and not param.is_contiguous() else range(param.ndim)
    return x.permute(*order).reshape(len(x), -1)


# ------------------------------------------------------------------------------- the table

_FREE = next(who for who in CONTESTANTS if who.name == "schedulefree-adamw")
_default = partial(Method, part="rivals")

# fmt: off
METHODS: dict[str, Method] = {method.name: method for method in (
    Method("wnmuon", "WNMuon", wnmuon, (RHO,), "default", captured=True),
    Method("adamw", "AdamW", adamw, half_decades(1e-2, 4), "tuned", WARMUP, True),
    Method("muon", "Muon", MuonAdamW, half_decades(1e-2, 3), "tuned", decays=True),
    Method("schedulefree-adamw", "schedule-free AdamW", schedule_free, half_decades(2.5e-3, 2),
           "tuned", contestant=_FREE),
    *(_default(f"default-{who.name}", who.label, partial(rival, who), (who.default,),
               contestant=who) for who in CONTESTANTS if who.name != "wnmuon"),
    Method("wnmuon-rho", "WNMuon, other ρ", wnmuon_rho, (0.1, 0.9), "flatness",
           captured=True),
    Method("wnmuon-c", "WNMuon, other C", wnmuon_c, (1.0, 100.0), "flatness", captured=True),
)}
# fmt: on
