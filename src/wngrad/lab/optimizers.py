"""The table of the optimizers the lab knows: how each is written, drawn, stepped and built.

A rule takes one step on parameters that carry their lanes in front: a parameter of shape (out, in)
is one tensor (seeds, settings, out, in), and λ is one number per setting. The recursions are
`wngrad.rule`'s, the baselines those of `torch.optim`; a test holds every rule to the real class.
torch is imported when an optimizer is built: a report needs only labels and styles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

from wngrad import rule

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer as TorchOptimizer

    State: TypeAlias = dict[str, Tensor]
    # (x, g, state, λ, t) -> (new x, new state)
    Rule: TypeAlias = Callable[[Tensor, Tensor, State, Tensor, Tensor], tuple[Tensor, State]]

MU, BETA, BETA2, EPS = 0.9, 0.9, 0.999, 1e-8  # the paper's, and torch's defaults


@dataclass(frozen=True, slots=True)
class Style:
    """How an optimizer is drawn, on paper and on the page."""

    color: str
    marker: str  # matplotlib's
    symbol: str  # plotly's
    glyph: str  # the symbol as text


@dataclass(frozen=True, slots=True)
class Optimizer:
    """A row of the table."""

    name: str
    label: str  # as a report writes it
    style: Style
    rule: Rule
    # What it keeps: name → first value. "b" has one entry per neuron, the others one per weight.
    state: Mapping[str, float]
    target: str  # the real class, as "module:Class"
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self, params: Any, **options: Any) -> TorchOptimizer:
        """The real optimizer, as anyone would build it."""
        module, _, name = self.target.partition(":")
        built: TorchOptimizer = getattr(import_module(module), name)(
            params, **self.options, **options
        )
        return built


def sgd(x: Tensor, g: Tensor, s: State, lam: Tensor, t: Tensor) -> tuple[Tensor, State]:
    return rule.descend(x, g, lam), s  # Alg. 5


def sgd_momentum(x: Tensor, g: Tensor, s: State, lam: Tensor, t: Tensor) -> tuple[Tensor, State]:
    buf = MU * s["buf"] + g  # as in torch, without λ
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
    v = rule.momentum(s["velocity"], g, b, MU, lam)
    return x - v, {"b": b, "velocity": v}


def wnadam(x: Tensor, g: Tensor, s: State, lam: Tensor, t: Tensor) -> tuple[Tensor, State]:
    b = _next_b(s["b"], g, lam)
    v = rule.mean_step(s["velocity"], g, s["b"], b, BETA, lam)
    return x - rule.unbiased(v, BETA, t), {"b": b, "velocity": v}


def wngrad_gradient(x: Tensor, g: Tensor, s: State, lam: Tensor, t: Tensor) -> tuple[Tensor, State]:
    """WNGrad from b₁ = λ‖g₁‖ (Remark 2.2); a block that has met no gradient yet stays put."""
    first: Tensor = rule.first_b(_sq_norm(g).sqrt(), lam, 1)
    b = first.where(s["b"] == 0, s["b"])
    unset = b == 0
    b = b.where(unset, _next_b(b.masked_fill(unset, 1), g, lam))
    return rule.descend(x, g / b.masked_fill(unset, 1), lam), {"b": b}


def _sq_norm(g: Tensor) -> Tensor:
    """‖g‖² of each neuron: one number per lane and index of the parameter's first dimension."""
    return g * g if g.ndim == 3 else (g * g).sum(tuple(range(3, g.ndim)), keepdim=True)


def _next_b(b: Tensor, g: Tensor, lam: Tensor) -> Tensor:
    new: Tensor = rule.next_b(b, _sq_norm(g), lam)
    # As in WNGrad itself: an infinite b would freeze the neuron in silence, NaN shows.
    return new.masked_fill(new.isinf(), float("nan"))


# Okabe and Ito's colours, which the colour-blind can tell apart; each has its own marker too.
# fmt: off
_ROWS = (
    Optimizer("sgd", "SGD", Style("#7a7a7a", "o", "circle", "●"),
              sgd, {}, "torch.optim:SGD"),
    Optimizer("sgd-momentum", "SGD-Momentum", Style("#e69f00", "s", "square", "■"),
              sgd_momentum, {"buf": 0}, "torch.optim:SGD", {"momentum": MU}),
    Optimizer("adam", "Adam", Style("#d55e00", "^", "triangle-up", "▲"),
              adam, {"m": 0, "v": 0}, "torch.optim:Adam"),
    Optimizer("wngrad", "WNGrad", Style("#0072b2", "D", "diamond", "◆"),
              wngrad, {"b": 1}, "wngrad.optim:WNGrad"),
    Optimizer("wngrad-momentum", "WNGrad-Momentum", Style("#56b4e9", "v", "triangle-down", "▼"),
              wngrad_momentum, {"b": 1, "velocity": 0}, "wngrad.optim:WNGrad", {"momentum": MU}),
    Optimizer("wnadam", "WN-Adam", Style("#009e73", "P", "cross", "✚"),
              wnadam, {"b": 1, "velocity": 0}, "wngrad.optim:WNAdam"),
    Optimizer("wngrad-gradient", "WNGrad, b₁ = λ‖g₁‖", Style("#cc79a7", "X", "x", "✖"),
              wngrad_gradient, {"b": 0}, "wngrad.optim:WNGrad", {"b_init": "gradient"}),
)
# fmt: on
OPTIMIZERS: dict[str, Optimizer] = {row.name: row for row in _ROWS}


@dataclass(frozen=True, slots=True)
class Named:
    """An optimizer that people call by a name, and that is run as it is."""

    label: str  # as a report writes it
    target: str  # "module:Class"
    package: str = ""  # what pip calls it, if it comes with neither torch nor wngrad
    takes_model: bool = False  # instead of parameters


_PEERS = "pytorch_optimizer"
NAMED: dict[str, Named] = {
    "adamw": Named("AdamW", "torch.optim:AdamW"),
    "wnmuon": Named("WNMuon", "wngrad.optim:WNMuon", takes_model=True),
    "muon": Named("Muon + AdamW", "wngrad.lab.train.muon:MuonAdamW", takes_model=True),
    "schedulefree": Named("schedule-free AdamW", "schedulefree:AdamWScheduleFree", "schedulefree"),
    "schedulefree-sgd": Named("schedule-free SGD", "schedulefree:SGDScheduleFree", "schedulefree"),
    "prodigy": Named("Prodigy", "prodigyopt:Prodigy", "prodigyopt"),
    "dadapt-adam": Named("D-Adapt Adam", "dadaptation:DAdaptAdam", "dadaptation"),
    "lion": Named("Lion", f"{_PEERS}:Lion", _PEERS),
    "soap": Named("SOAP", f"{_PEERS}:SOAP", _PEERS),
    "nadam": Named("NAdam", "torch.optim:NAdam"),
    "radam": Named("RAdam", "torch.optim:RAdam"),
    "rmsprop": Named("RMSprop", "torch.optim:RMSprop"),
    "adagrad": Named("Adagrad", "torch.optim:Adagrad"),
    "adadelta": Named("Adadelta", "torch.optim:Adadelta"),
    "adamax": Named("Adamax", "torch.optim:Adamax"),
    "adafactor": Named("Adafactor", "torch.optim:Adafactor"),
    "lbfgs": Named("L-BFGS", "torch.optim:LBFGS"),
}
SPARE_STYLES = (  # for optimizers of one's own
    Style("#8c564b", "p", "pentagon", "⬟"),
    Style("#7b5ea7", "h", "hexagon", "⬢"),
    Style("#b8a800", "*", "star", "★"),
    Style("#17a2b8", "<", "triangle-left", "◀"),
)
# By `wngrad sweep`, unless others are named: over λ, and at its own λ alone.
SWEPT, UNTUNED = ("sgd", "adam", "wngrad", "wnadam"), ("wnmuon",)
