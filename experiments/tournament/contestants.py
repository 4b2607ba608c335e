"""The contestants of the tournament as data: how each is made, and what its authors say of λ.

Every optimizer is the real class of its package, run as it is. What its documentation asks for
beside the class is done as well: DoG is evaluated at its averaged iterate, schedule-free at its
own, MoMo is given the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wngrad import rule
from wngrad.install import install_hint
from wngrad.lab.optimizers import OPTIMIZERS
from wngrad.lab.train.loader import did_you_mean
from wngrad.optim import WNAdam, WNGrad, WNMuon

T = TypeVar("T")
Params = Iterable[nn.Parameter]
Make = Callable[..., Any]  # (params, lr=λ) → an optimizer


@dataclass(frozen=True, slots=True)
class Contestant:
    """An optimizer as its authors say it is used."""

    name: str
    label: str  # as a report writes it
    default: float  # λ, where nothing is tuned
    source: str  # who says so
    moved: bool  # whether λ is meant to be moved by the user
    package: str = "torch"  # as pip knows it
    module: str = ""  # as Python imports it, if it is a peer's
    batch_norm: str = ""  # the function to use instead where the network normalizes batches

    def target(self, batch_norm: bool = False) -> str:
        """What a sweep calls it: a name that the lab knows, or "module:function"."""
        if self.name in OPTIMIZERS:
            return self.name
        function = self.batch_norm if batch_norm and self.batch_norm else self.name
        return f"{__name__}:{function.replace('-', '_')}"

    @property
    def version(self) -> str:
        """Of its package; empty if that is not installed."""
        if self.package == "torch":
            return str(torch.__version__)
        try:
            return version(self.package)
        except PackageNotFoundError:
            return ""

    def missing(self) -> str | None:
        """Why it cannot take part, in one line; None if it can."""
        try:
            if self.module:
                import_module(self.module)
        except ImportError:
            return (
                f"tournament: {self.label} needs {self.package}, which cannot be imported: "
                f"{install_hint('peers')}."
            )
        return None


# ------------------------------------------------------------------------- torch and ours

adamw: Make = torch.optim.AdamW
adagrad: Make = torch.optim.Adagrad
wngrad_tensor: Make = partial(WNGrad, per="tensor")
wngrad_momentum_tensor: Make = partial(WNGrad, momentum=0.9, per="tensor")
wnadam_tensor: Make = partial(WNAdam, per="tensor")
wnmuon: Make = WNMuon


class AdaGradNorm(Optimizer):
    """One b for all parameters, as its authors have it (Ward, Wu, Bottou 2019, Alg. 1).

    b_j² ← b_{j-1}² + λ²‖g‖²,  then  x_j ← x_{j-1} − λ g/b_j.  With b₁ = 1 this is their
    algorithm with η = 1 and b₀ = 1/λ: b₀ is what they move.

    Args:
        params: parameters or groups of them, each with a b of its own.
        lr: λ.
        b_init: b₁.

    >>> x = nn.Parameter(torch.tensor([3.0, 4.0]))
    >>> opt = AdaGradNorm([x], lr=1.0)
    >>> x.square().sum().backward()
    >>> opt.step()
    >>> round(float(opt.param_groups[0]["b"]), 4)  # √(1 + ‖(6, 8)‖²)
    10.0499
    """

    def __init__(self, params: Params, lr: float = 1.0, *, b_init: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "b": b_init})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            sq = torch.stack([p.grad.square().sum() for p in moved]).sum()
            b: Tensor = rule.adagrad_norm(torch.as_tensor(group["b"]).to(sq), sq, group["lr"])
            for p in moved:
                p.copy_(rule.descend(p, p.grad / b, group["lr"]))
            group["b"] = b
        return loss


adagrad_norm: Make = AdaGradNorm

# ---------------------------------------------------------------------------------- peers


def _peer(module: str, name: str) -> Make:
    """A peer's class, imported when an optimizer is built."""
    return lambda params, lr: getattr(import_module(module), name)(params, lr=lr)


schedulefree_sgd = _peer("schedulefree", "SGDScheduleFree")
schedulefree_adamw = _peer("schedulefree", "AdamWScheduleFree")
prodigy = _peer("prodigyopt", "Prodigy")
dadapt_adam = _peer("dadaptation", "DAdaptAdam")


def cocob(params: Params, lr: float) -> Any:
    """COCOB has no λ: it is entered as 1 and must stay there."""
    if lr != 1:
        raise ValueError(f"cocob: `lr` must be 1, as it has none, got {lr!r}.")
    return import_module("parameterfree").COCOB(params)


def momo_adam(params: Params, lr: float) -> Any:
    """MoMo-Adam; its checkpoints hold the two numbers that it keeps outside of its state."""
    opt = import_module("momo").MomoAdam(params, lr=lr)
    numbers = ("loss_avg", "_number_steps")

    def save(opt: Any, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"momo": [getattr(opt, name) for name in numbers]}

    def load(opt: Any, state: dict[str, Any]) -> None:
        for name, value in zip(numbers, state["momo"], strict=True):
            setattr(opt, name, value)

    opt.register_state_dict_post_hook(save)
    opt.register_load_state_dict_pre_hook(load)
    return opt


def dog(params: Params, lr: float, reps_rel: float = 1e-6) -> Any:
    """DoG with its package's averager: trained at the iterate, evaluated at the average."""
    package, weights = import_module("dog"), list(params)
    opt = package.DoG(weights, lr=lr, reps_rel=reps_rel)
    averager = package.PolynomialDecayAverager(nn.ParameterList(weights))
    iterate: list[Tensor] = []  # where training goes on; empty while it does

    @torch.no_grad()
    def evaluate() -> None:
        if not iterate:
            iterate.extend(p.clone() for p in weights)
            for p, mean in zip(weights, averager.averaged_model, strict=True):
                p.copy_(mean)

    @torch.no_grad()
    def train() -> None:
        for p, last in zip(weights, iterate, strict=bool(iterate)):
            p.copy_(last)
        iterate.clear()

    def save(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return state | {"mean": averager.state_dict(), "iterate": list(iterate)}

    def load(_: Any, state: dict[str, Any]) -> None:
        averager.load_state_dict(state["mean"])
        iterate[:] = state["iterate"]

    opt.register_step_post_hook(lambda *_: averager.step())
    opt.register_state_dict_post_hook(save)
    opt.register_load_state_dict_pre_hook(load)
    opt.train, opt.eval = train, evaluate
    return opt


dog_batch_norm: Make = partial(dog, reps_rel=1e-4)

# -------------------------------------------------------------------------------- the table

_TORCH, _OURS = "torch's signature", "wngrad's signature"
_TUNED = "its signature; its README: “does require tuning”"


def _known(name: str, default: float, source: str, package: str = "torch") -> Contestant:
    return Contestant(name, OPTIMIZERS[name].label, default, source, True, package)


# fmt: off
CONTESTANTS: tuple[Contestant, ...] = (
    _known("sgd", 1e-3, _TORCH),
    _known("sgd-momentum", 1e-3, f"{_TORCH}, momentum 0.9"),
    _known("adam", 1e-3, _TORCH),
    Contestant("adamw", "AdamW", 1e-3, f"{_TORCH}, weight decay 0.01", True),
    Contestant("adagrad", "Adagrad", 1e-2, _TORCH, True),
    Contestant("adagrad-norm", "AdaGrad-Norm", 1.0,
               "Ward, Wu, Bottou (2019): η = 1; they move b₀, here 1/λ", True, "wngrad"),
    Contestant("wnmuon", "WNMuon", 0.3, f"{_OURS}, evaluated at its average", True, "wngrad"),
    _known("wngrad", 1.0, _OURS, "wngrad"),
    Contestant("wngrad-tensor", "WNGrad per tensor", 1.0, _OURS, True, "wngrad"),
    _known("wngrad-momentum", 1.0, f"{_OURS}, momentum 0.9", "wngrad"),
    Contestant("wngrad-momentum-tensor", "WNGrad-Momentum per tensor", 1.0,
               f"{_OURS}, momentum 0.9", True, "wngrad"),
    _known("wnadam", 1.0, _OURS, "wngrad"),
    Contestant("wnadam-tensor", "WN-Adam per tensor", 1.0, _OURS, True, "wngrad"),
    Contestant("schedulefree-sgd", "schedule-free SGD", 1.0, _TUNED, True,
               "schedulefree", "schedulefree"),
    Contestant("schedulefree-adamw", "schedule-free AdamW", 0.0025, _TUNED, True,
               "schedulefree", "schedulefree"),
    Contestant("momo-adam", "MoMo-Adam", 1e-2,
               "its signature and README; made for “a wide range of learning rates”", True,
               "momo-opt", "momo"),
    Contestant("prodigy", "Prodigy", 1.0,
               "its README: “we recommend using lr=1. (default) for all networks”", False,
               "prodigyopt", "prodigyopt"),
    Contestant("dadapt-adam", "D-Adapt Adam", 1.0,
               "its README: “Set the LR parameter to 1.0”", False, "dadaptation", "dadaptation"),
    Contestant("dog", "DoG, averaged", 1.0,
               "its docstring: lr 1, reps_rel 1e-6 (1e-4 with batch normalization); its README: "
               "with PolynomialDecayAverager", False, "dog-optimizer", "dog", "dog-batch-norm"),
    Contestant("cocob", "COCOB", 1.0, "its signature: no λ, alpha 100", False,
               "parameterfree", "parameterfree"),
)
# fmt: on


def find(names: Iterable[str]) -> list[Contestant]:
    """The contestants called `names`; all of them if there are none."""
    return named("contestants", names, {c.name: c for c in CONTESTANTS})


def named(argument: str, names: Iterable[str], known: Mapping[str, T]) -> list[T]:
    """The values that are known by `names`, or all; a ValueError calls the names `argument`."""
    wanted = list(names) or list(known)
    for name in wanted:
        if name not in known:
            raise ValueError(
                f"tournament: `{argument}` must be of {', '.join(known)}, got {name!r}"
                f"{did_you_mean(name, known)}"
            )
    return [known[name] for name in wanted]
