"""The methods: WNMuon, and rivals as their documentation says for fine-tuning, or tuned."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from experiments.finetune.lora import plus_groups
from experiments.tournament.contestants import CONTESTANTS, Contestant
from experiments.untuned import methods as untuned
from experiments.untuned.methods import WARMUP, Method, half_decades
from experiments.untuned.tasks import Task
from wngrad import WNMuon, matrix_groups

RHO = 0.3  # WNMuon's default
ADAMW = (1e-5, 1e-4, 1e-3)  # what people start with
LION_DECAY = 10.0  # times AdamW's, as Lion's authors say


@dataclass(frozen=True, slots=True)
class FineTuner(Method):
    """A method, and at which of its λ it is run where nothing is tuned."""

    defaults: tuple[float, ...] = ()
    cosine: bool = False  # λ falls to 0 along a cosine
    only: str = ""  # what the name of a task must hold

    def factor(self, step: int, steps: int) -> float:
        if self.cosine:
            return (1 + math.cos(math.pi * step / steps)) / 2
        return Method.factor(self, step, steps)


class Lion(Optimizer):
    """x ← x·(1 − λw) − λ·sign(β₁ m + (1−β₁) g),  m ← β₂ m + (1−β₂) g  (Chen et al. 2023)."""

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            for p in params:
                self.state[p].setdefault("m", torch.zeros_like(p))
            m = [self.state[p]["m"] for p in params]
            lam, (beta1, beta2) = group["lr"], group["betas"]
            if params:
                u = torch._foreach_lerp(grads, m, beta1)
                torch._foreach_sign_(u)
                torch._foreach_mul_(params, 1 - lam * group["weight_decay"])
                torch._foreach_add_(params, u, alpha=-lam)
                torch._foreach_lerp_(m, grads, 1 - beta2)
        return loss


# -------------------------------------------------------------------------------- builders


def trained(model: nn.Module) -> list[Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


def ours(model: nn.Module, task: Task, lam: float, steps: int, **settings: Any) -> Any:
    """WNMuon; weights in bfloat16 are rounded at random unless told otherwise."""
    settings = {"stochastic_rounding": bool(getattr(task, "half", False)), **settings}
    return WNMuon(model, lr=lam, **settings)


def matrices_alone(model: nn.Module, task: Task, lam: float, steps: int) -> Any:
    """`finetune` for matrices and embeddings, and vectors as ever."""
    groups = [{**group, "finetune": group["role"] != "vector"} for group in matrix_groups(model)]
    return WNMuon(groups, lr=lam)


def lora_plus(model: nn.Module, task: Task, lam: float, steps: int) -> Any:
    return WNMuon(plus_groups(model, lam), finetune=True)


def adamw(model: nn.Module, task: Task, lam: float, steps: int) -> Any:
    return untuned._adamw(trained(model), task, lam)


def prodigy(model: nn.Module, task: Task, lam: float, steps: int) -> Any:
    """With the flags that its README recommends."""
    flags = {"use_bias_correction": True, "safeguard_warmup": True}
    package = import_module("prodigyopt")
    return package.Prodigy(trained(model), lr=lam, weight_decay=task.weight_decay, **flags)


def dadapt(model: nn.Module, task: Task, lam: float, steps: int) -> Any:
    flags = {"decouple": True, "weight_decay": task.weight_decay}
    return import_module("dadaptation").DAdaptAdam(trained(model), lr=lam, **flags)


def schedule_free(model: nn.Module, task: Task, lam: float, steps: int) -> Any:
    settings = {"warmup_steps": round(WARMUP * steps), "weight_decay": task.weight_decay}
    return import_module("schedulefree").AdamWScheduleFree(trained(model), lr=lam, **settings)


def lion(model: nn.Module, task: Task, lam: float, steps: int) -> Any:
    return Lion(trained(model), lam, weight_decay=LION_DECAY * task.weight_decay)


# ------------------------------------------------------------------------------- the table


def _package(name: str) -> Contestant:
    return next(who for who in CONTESTANTS if who.name == name)


_PRODIGY, _DADAPT, _FREE = map(_package, ("prodigy", "dadapt-adam", "schedulefree-adamw"))
_finetune = partial(ours, finetune=True)
_nearest = partial(ours, finetune=True, stochastic_rounding=False)
_plain = partial(ours, finetune=True, average=None)
_still = partial(ours, finetune=True, weight_decay=0.0)
_ONE, _GRID = (1.0,), half_decades(1e-3, 4)

# fmt: off
METHODS: dict[str, FineTuner] = {method.name: method for method in (
    FineTuner("finetune", "WNMuon, `finetune=True`", _finetune, half_decades(RHO, 2), "ours",
              captured=True, defaults=(RHO,)),
    FineTuner("wnmuon", "WNMuon", ours, half_decades(RHO, 2), "ours", captured=True,
              defaults=(RHO,)),
    FineTuner("matrices", "WNMuon, `finetune=True` for matrices alone", matrices_alone, (RHO,),
              "ours", captured=True, defaults=(RHO,)),
    FineTuner("no-decay", "WNMuon, `finetune=True`, no decay", _still, (RHO,), "ours",
              captured=True, defaults=(RHO,)),
    FineTuner("prodigy", "Prodigy", prodigy, _ONE, "tuned", decays=True, cosine=True,
              contestant=_PRODIGY, defaults=_ONE),
    FineTuner("prodigy-constant", "Prodigy, constant", prodigy, _ONE, "tuned",
              contestant=_PRODIGY, defaults=_ONE),
    FineTuner("dadapt", "D-Adapt Adam", dadapt, _ONE, "tuned", decays=True, cosine=True,
              contestant=_DADAPT, defaults=_ONE),
    FineTuner("schedulefree", "schedule-free AdamW", schedule_free, half_decades(2.5e-3, 3),
              "tuned", contestant=_FREE, defaults=(2.5e-3,)),
    FineTuner("adamw", "AdamW", adamw, _GRID, "tuned", WARMUP, True, defaults=ADAMW),
    FineTuner("lion", "Lion", lion, half_decades(1e-4, 3), "tuned", WARMUP, True,
              defaults=(1e-4,)),
    FineTuner("muon", "Muon", untuned.MuonAdamW, half_decades(1e-3, 3), "tuned", WARMUP, True,
              defaults=(1e-3,)),
    FineTuner("lora-plus", "WNMuon, `finetune=True`, B at 16 ρ", lora_plus,
              (RHO / 16, RHO / 4, RHO), "ours", captured=True, only=".lora"),
    FineTuner("no-average", "WNMuon, `finetune=True`, no average", _plain, (RHO,), "ours",
              captured=True, defaults=(RHO,)),
    FineTuner("nearest", "WNMuon, `finetune=True`, rounded to nearest", _nearest, (RHO,), "half",
              captured=True, only="bf16"),
)}
# fmt: on
