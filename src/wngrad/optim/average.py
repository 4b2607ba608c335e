"""The polynomial average of the parameters, which is evaluated and never trained on.

    x̄ ← x̄ + (η+1)/(k+η)·(x − x̄)   after the k-th step

weighs the j-th of k iterates by about (j/k)^η (Shamir, Zhang 2013): at η = 8 the last fifth of a
run counts most, however long the run is. `BlockOptimizer` keeps x̄ as `state[p]["average"]`; here is
how it gets into the model, and out of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from wngrad import rule
from wngrad.optim.state import AVERAGE

T = TypeVar("T", float, Tensor)


def weight(eta: float, k: T) -> T:
    """(η+1)/(k+η): how much of the k-th iterate the average takes over; all of the first."""
    share: T = rule.polynomial_weight(eta, k)
    return share


def polynomial_average(eta: float = 8.0) -> Callable[[Tensor, Tensor, Any], Tensor]:
    """The same average as an `avg_fn` of `torch.optim.swa_utils.AveragedModel`.

    For those who keep averages there: `AveragedModel(model, avg_fn=polynomial_average())`, and an
    optimizer with `average=None`. Called after every step it holds what `average=eta` would.

    Example:
        >>> average = polynomial_average(eta=1.0)
        >>> average(torch.tensor(0.0), torch.tensor(3.0), 1)  # the second: 2/(2+1) of the way
        tensor(2.)
    """

    def avg_fn(averaged: Tensor, current: Tensor, num_averaged: Any) -> Tensor:
        w = torch.as_tensor(weight(eta, num_averaged + 1.0), dtype=averaged.dtype)
        return torch.lerp(averaged, current, w.to(averaged.device))

    return avg_fn


def averages(opt: Optimizer) -> dict[Tensor, Tensor]:
    """The average of every parameter that has one."""
    params = [p for group in opt.param_groups for p in group["params"]]
    return {p: opt.state[p][AVERAGE] for p in params if AVERAGE in opt.state.get(p, {})}


@torch.no_grad()
def load(opt: Optimizer) -> None:
    """Copy every average into its parameter."""
    for p, mean in averages(opt).items():
        p.copy_(mean)


def state_dict(opt: Optimizer, model: nn.Module) -> dict[str, Any]:
    """`model.state_dict()` with the averages in place of the parameters."""
    means = averages(opt)
    named = {
        name: means[p] for name, p in model.named_parameters(remove_duplicate=False) if p in means
    }
    whole = model.state_dict()
    return {
        name: named[name].detach().to(value.dtype, copy=True) if name in named else value
        for name, value in whole.items()
    }


@contextmanager
def swapped(
    opt: Optimizer, owner: str, model: nn.Module | None, batches: Iterable[Any] | None
) -> Iterator[None]:
    """The averages in the model, and everything put back as it was, bit for bit."""
    norms = [] if model is None else [m for m in model.modules() if isinstance(m, _BatchNorm)]
    norms = [m for m in norms if m.track_running_stats]
    if norms and batches is None:
        raise ValueError(
            f"{owner}: `batches` must be given for a model with batch normalization, whose "
            f"statistics belong to the weights that training reads, got None; some batches of "
            f"training data, which are run through the model to find those of the average."
        )
    if batches is not None and model is None:
        raise ValueError(f"{owner}: `model` must be given with `batches`, got None.")
    buffers = [buffer for norm in norms for buffer in norm.buffers()]
    with torch.no_grad():
        before = [(t, t.detach().clone()) for t in (*averages(opt), *buffers)]
    try:
        load(opt)
        if batches is not None and model is not None:
            torch.optim.swa_utils.update_bn(batches, model, _device(model))
        yield
    finally:
        with torch.no_grad():
            for t, value in before:
                t.copy_(value)


def _device(model: nn.Module) -> torch.device | None:
    return next((p.device for p in model.parameters()), None)
