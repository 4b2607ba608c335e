"""What is known of optimizers by name: how each is used, and which of them the page is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Takes = Literal["nothing", "loss", "closure"]  # by `step`


@dataclass(frozen=True, slots=True)
class Profile:
    """What its authors say about the use of an optimizer, where `cls(params)` is not enough."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    takes: Takes = "nothing"
    sharded: Mapping[str, Any] = field(default_factory=dict)  # more kwargs, for sharded parameters
    exempt: Mapping[str, str] = field(default_factory=dict)  # probe: why it does not apply


_FSDP = {"fsdp_in_use": True}
_DENSE = {"sparse": "its README: only the AdaGrad version takes sparse gradients"}
_WHOLE = "its code: it does not support sharded parameters"
_CLIPPED = "its README: only with gradients clipped to norm 1"
_AVERAGES = {"scheduler to 0": "it averages its iterates, which by design goes on at lr = 0"}
_START = "lr is only where its own step sizes start"

# By package and class. Whether an optimizer has train() and eval() is seen from the class.
PROFILES = {
    "dadaptation:DAdaptAdaGrad": Profile(
        exempt=dict.fromkeys(("FSDP2 even", "FSDP2 uneven", "2 → 4 resharding"), _WHOLE)
    ),
    "dadaptation:DAdaptAdam": Profile(sharded=_FSDP, exempt=_DENSE),
    "dadaptation:DAdaptAdan": Profile(exempt=_DENSE),
    "dadaptation:DAdaptLion": Profile(sharded=_FSDP),
    "dadaptation:DAdaptSGD": Profile(sharded=_FSDP, exempt=_DENSE),
    "momo:Momo": Profile(takes="loss"),
    "momo:MomoAdam": Profile(takes="loss"),
    "parameterfree:KT": Profile(exempt=dict.fromkeys(("gradient spike", "loss scale"), _CLIPPED)),
    "prodigyopt:Prodigy": Profile(sharded=_FSDP),
    "schedulefree:AdamWScheduleFree": Profile(exempt=_AVERAGES),
    "schedulefree:RAdamScheduleFree": Profile(exempt=_AVERAGES),
    "schedulefree:SGDScheduleFree": Profile(exempt=_AVERAGES),
    "torch:Rprop": Profile(exempt={"lr = 0 group": _START, "scheduler to 0": _START}),
    "torch:SGD": Profile({"lr": 0.1}),  # as in its documentation
}


def _of(module: str, names: str) -> tuple[str, ...]:
    return tuple(f"{module}:{name}" for name in names.split("; "))


# Whom the published table is about. Left out of torch.optim: Muon (takes matrices only) and
# SparseAdam (takes sparse gradients only).
EVERYONE = {
    "wngrad": _of("wngrad", "WNGrad; WNGrad(momentum=0.9); WNAdam; WNMuon"),
    "torch.optim": _of(
        "torch.optim",
        "SGD; SGD(lr=0.1, momentum=0.9); Adam; AdamW; Adagrad; RMSprop; NAdam; RAdam",
    ),
    "torch.optim, less common": _of(
        "torch.optim", "Adadelta; Adafactor; Adamax; ASGD; LBFGS; Rprop"
    ),
    "schedule-free, Prodigy": (
        *_of("schedulefree", "SGDScheduleFree; AdamWScheduleFree; RAdamScheduleFree"),
        *("prodigyopt:Prodigy", "pytorch_optimizer:Prodigy"),
    ),
    "D-Adaptation": _of(
        "dadaptation", "DAdaptSGD; DAdaptAdaGrad; DAdaptAdam; DAdaptAdan; DAdaptLion"
    ),
    "DoG, MoMo, coin betting": (
        *_of("dog", "DoG; LDoG"),
        *_of("momo", "Momo; MomoAdam"),
        *_of("parameterfree", "COCOB; KT"),
    ),
}
