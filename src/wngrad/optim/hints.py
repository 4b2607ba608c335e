"""A hint that is given once: λ is so small that b has nothing to do, or nothing moves."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch.optim import Optimizer

from wngrad.optim import diagnosis
from wngrad.optim.directions import Momentum

AFTER = 100  # steps: enough for b to grow where λ lets it, and one wait for a device is no cost
_SMALL = 1e-2  # of λ = 1, at which b₁ is the only limit of the first step
_SMALL_SUMMED = 2e-3  # with momentum, which is started from 0.01 to 0.1
_STILL = 1.1  # b that has grown less than this many times does not limit the rate
_SHORT = 1e-3  # of λ where the rule does not see it: steps 300 times shorter than the default's


class SmallRateWarning(UserWarning):
    """λ is so small that WNGrad is plain gradient descent at that rate, or WNMuon stands still."""


def small_rate(opt: Optimizer) -> None:
    """Warn if λ/b has stayed far below 1/b₁, as with the rates that trainers hand over."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return  # It must not wait.
    for group in opt.param_groups:
        lam = _largest(group)
        if 0 < lam <= _SHORT and not _in_rule(opt, group):
            warnings.warn(
                f"{type(opt).__name__}: in {AFTER} steps at `lr` = {lam:g} hardly anything has "
                f"moved. `lr` is the length of a step in units of a neuron, not a learning rate as "
                f"Adam's: use {_default(opt)}, the default, whatever your trainer's is.",
                SmallRateWarning,
                stacklevel=5,
            )
            return
        summed = _has_momentum(opt, group)
        small = _SMALL_SUMMED if summed else _SMALL
        if 0 < lam <= small and diagnosis.is_still(opt, group, _STILL):
            start = (
                "lr=0.03, as momentum asks for" if summed else f"lr={_default(opt)}, the default"
            )
            warnings.warn(
                f"{type(opt).__name__}: in {AFTER} steps at `lr` = {lam:g} b has hardly grown, so "
                f"that this is plain gradient descent at that rate. b lowers the rate by itself: "
                f"start from {start}, whatever your trainer's is.",
                SmallRateWarning,
                stacklevel=5,
            )
            return


def _default(opt: Optimizer) -> Any:
    """The λ of the optimizer's signature."""
    return inspect.signature(type(opt)).parameters["lr"].default


def _has_momentum(opt: Any, group: dict[str, Any]) -> bool:
    """True for WNGrad's momentum, which adds up steps; a running mean does not."""
    return any(isinstance(opt.direction(group, p), Momentum) for p in group["params"])


def _in_rule(opt: Any, group: dict[str, Any]) -> bool:
    return all(opt.direction(group, p).rate_in_rule for p in group["params"])


def _largest(group: dict[str, Any]) -> float:
    """λ as it is, or as a schedule will have it at most."""
    names = ("lr", "initial_lr", "max_lr")
    return max(float(group[name]) for name in names if group.get(name) is not None)
