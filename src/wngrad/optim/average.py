"""The polynomial average of the parameters, which is evaluated and never trained on.

    x̄ ← x̄ + (η+1)/(k+η)·(x − x̄)   after the k-th step

weighs the j-th of k iterates by about (j/k)^η (Shamir, Zhang 2013): at η = 8 the last fifth of a
run counts most, however long the run is. `BlockOptimizer` keeps x̄ as `state[p]["average"]`; here is
how it gets into the model, and out of it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
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
    """The average of every parameter that has one, in the groups that still keep it."""
    groups = [group for group in opt.param_groups if group.get(AVERAGE) is not None]
    params = [p for group in groups for p in group["params"]]
    return {p: opt.state[p][AVERAGE] for p in params if AVERAGE in opt.state.get(p, {})}


def load(
    opt: Optimizer, owner: str, model: nn.Module | None, batches: Iterable[Any] | None
) -> None:
    """Copy every average into its parameter, and compute batch normalization's statistics."""
    _check(owner, model, batches)
    with nullcontext() if batches is None else _restored(_changed(opt, model), always=False):
        _load(opt, owner, model, batches)


def state_dict(
    opt: Optimizer, owner: str, model: nn.Module, batches: Iterable[Any] | None
) -> dict[str, Any]:
    """Copies of what is in `model.state_dict()`, the averages in place of the parameters."""
    means = averages(opt)
    if means and not any(p in means for p in model.parameters()):
        raise ValueError(f"{owner}: `model` must have parameters of this optimizer, and has none.")
    if batches is not None:
        with swapped(opt, owner, model, batches):
            return {name: _copied(value) for name, value in model.state_dict().items()}
    _check(owner, model, batches)
    named = {
        name: means[p] for name, p in model.named_parameters(remove_duplicate=False) if p in means
    }
    return {
        name: named[name].detach().to(value.dtype, copy=True) if name in named else _copied(value)
        for name, value in model.state_dict().items()
    }


@contextmanager
def swapped(
    opt: Optimizer, owner: str, model: nn.Module | None, batches: Iterable[Any] | None
) -> Iterator[None]:
    """The averages in the model, and everything put back as it was, bit for bit."""
    _check(owner, model, batches)
    with _restored(_changed(opt, model)):
        _load(opt, owner, model, batches)
        yield


def _changed(opt: Optimizer, model: nn.Module | None) -> list[Tensor]:
    """What putting the averages in place changes: training mode may change any buffer."""
    return [*averages(opt), *(() if model is None else model.buffers())]


@contextmanager
def _restored(tensors: list[Tensor], always: bool = True) -> Iterator[None]:
    """Puts tensors back as they were, bit for bit; if not `always`, only if something is raised."""
    with torch.no_grad():
        before = [t.detach().clone() for t in tensors]
    restore = True
    try:
        yield
        restore = always
    finally:
        if restore:
            with torch.no_grad():
                for t, value in zip(tensors, before, strict=True):
                    t.copy_(value)
            torch.clear_autocast_cache()  # It may hold what was there meanwhile.


def _load(
    opt: Optimizer, owner: str, model: nn.Module | None, batches: Iterable[Any] | None
) -> None:
    with torch.no_grad():
        for p, mean in averages(opt).items():
            p.copy_(mean)
    torch.clear_autocast_cache()  # It may hold the weights from before.
    if batches is not None and model is not None:
        _update_statistics(owner, model, batches)


def _check(owner: str, model: nn.Module | None, batches: Iterable[Any] | None) -> None:
    if batches is None and _with_statistics(model):
        raise ValueError(
            f"{owner}: `batches` must be given for a model with batch normalization, whose "
            f"statistics belong to the weights that training reads, got None; some batches of "
            f"training data, which are run through the model to find those of the average."
        )
    if batches is not None and model is None:
        raise ValueError(f"{owner}: `model` must be given with `batches`, got None.")


def _with_statistics(model: nn.Module | None) -> list[_BatchNorm]:
    norms = [] if model is None else [m for m in model.modules() if isinstance(m, _BatchNorm)]
    return [norm for norm in norms if norm.track_running_stats]


def _update_statistics(owner: str, model: nn.Module, batches: Iterable[Any]) -> None:
    """The statistics of batch normalization over some batches, as in torch's `update_bn`.

    Unlike that, it leaves every layer in the mode it was in, also if a batch raises, and the
    statistics of layers that are held in evaluation mode while the rest trains.
    """
    modes = [(module, module.training) for module in model.modules()]
    norms = [m for m in _with_statistics(model) if m.training or not model.training]
    held = [m for m in model.modules() if model.training and not m.training]
    momenta = [norm.momentum for norm in norms]
    device = next((p.device for p in model.parameters()), None)
    count = 0
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over all batches
        model.train()
        for module in held:
            module.training = False
        with torch.no_grad():
            for batch in batches:
                x = batch[0] if isinstance(batch, (list, tuple)) else batch
                model(x if device is None else x.to(device))
                count += 1
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, training in modes:
            module.training = training
    if not count:
        raise ValueError(
            f"{owner}: `batches` must hold some batches, and held none: an iterator can be used "
            f"once, a DataLoader or a list again."
        )


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
