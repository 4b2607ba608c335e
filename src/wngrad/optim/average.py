"""The polynomial average of the parameters, which is evaluated and never trained on.

    x̄ ← x̄ + (η+1)/(k+η)·(x − x̄)   after the k-th step

weighs the j-th of k iterates by about (j/k)^η (Shamir, Zhang 2013): at η = 8 the last fifth of a
run counts most, however long the run is. `BlockOptimizer` keeps x̄ as `state[p]["average"]`; here is
how it gets into the model, and out of it again; and how batch normalization gets statistics that
belong to it, which the lab uses, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from wngrad import rule
from wngrad.optim.state import AVERAGE


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
        w = torch.as_tensor(rule.polynomial_weight(eta, num_averaged + 1.0), dtype=averaged.dtype)
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
    restore = snapshot(owner, () if batches is None else _changing(opt, model))
    try:
        _put_in_place(opt, owner, model, batches)
    except BaseException:
        restore()
        raise


def state_dict(
    opt: Optimizer, owner: str, model: nn.Module, batches: Iterable[Any] | None
) -> dict[str, Any]:
    """Copies of what is in `model.state_dict()`, the averages in place of the parameters."""
    means = averages(opt)
    if means and not any(p in means for p in model.parameters()):
        raise ValueError(f"{owner}: `model` must have parameters of this optimizer, and has none.")
    _check(owner, model, batches)
    named = model.named_parameters(remove_duplicate=False)
    means_by_name = {name: means[p] for name, p in named if p in means}
    with nullcontext() if batches is None else swapped(opt, owner, model, batches):
        return {
            name: means_by_name.get(name, value).detach().to(value.dtype, copy=True)
            if isinstance(value, Tensor)
            else value
            for name, value in model.state_dict().items()
        }


@contextmanager
def swapped(
    opt: Optimizer, owner: str, model: nn.Module | None, batches: Iterable[Any] | None
) -> Iterator[None]:
    """The averages in the model, and everything put back as it was, bit for bit."""
    _check(owner, model, batches)
    restore = snapshot(owner, _changing(opt, model))
    try:
        _put_in_place(opt, owner, model, batches)
        yield
    finally:
        restore()


def snapshot(owner: str, tensors: Iterable[tuple[str, Tensor]]) -> Callable[[], None]:
    """Copies of named tensors; the function that it returns puts them back, bit for bit.

    One that cannot be put back, because it has got another shape, say, does not keep that function
    from putting back the others: it raises a RuntimeError at the end, with the names.
    """
    before = [(name, t, t.detach().clone()) for name, t in tensors]

    @torch.no_grad()
    def restore() -> None:
        lost = []
        for name, t, value in before:
            try:
                if t.shape != value.shape:  # into which it might broadcast
                    was, now = tuple(value.shape), tuple(t.shape)
                    raise ValueError(f"of shape {was} before, {now} now")
                t.copy_(value)
            except Exception as error:
                lost.append(f"`{name}` ({error})")
        torch.clear_autocast_cache()  # It may hold what was there meanwhile.
        if lost:
            raise RuntimeError(
                f"{owner}: everything is put back as it was but {', '.join(lost)}; parameters and "
                f"buffers must keep their shapes meanwhile."
            )

    return restore


def _changing(opt: Optimizer, model: nn.Module | None) -> list[tuple[str, Tensor]]:
    """What putting the averages in place changes: training mode may change any buffer."""
    names: dict[Tensor, str] = {}
    for k, group in enumerate(opt.param_groups):
        names.update((p, f"params[{i}] of group {k}") for i, p in enumerate(group["params"]))
        names.update(zip(group["params"], group.get("param_names") or (), strict=False))
    if model is not None:
        names.update((p, name) for name, p in model.named_parameters())
    buffers = () if model is None else model.named_buffers()
    return [*((names[p], p) for p in averages(opt)), *buffers]


def _put_in_place(
    opt: Optimizer, owner: str, model: nn.Module | None, batches: Iterable[Any] | None
) -> None:
    with torch.no_grad():
        for p, mean in averages(opt).items():
            p.copy_(mean)
    torch.clear_autocast_cache()  # It may hold the weights from before.
    if batches is None or model is None:
        return
    device, count = next((p.device for p in model.parameters()), None), 0
    with batch_statistics(model, anew=True):
        for batch in batches:
            x = batch[0] if isinstance(batch, (list, tuple)) else batch
            model(x if device is None else x.to(device))
            count += 1
    if not count:
        raise ValueError(
            f"{owner}: `batches` must hold some batches, and held none: an iterator can be used "
            f"once, a DataLoader or a list again."
        )


def _check(owner: str, model: nn.Module | None, batches: Iterable[Any] | None) -> None:
    if batches is None and model is not None and batch_norms(model):
        raise ValueError(
            f"{owner}: `batches` must be given for a model with batch normalization, whose "
            f"statistics belong to the weights that training reads, got None; some batches of "
            f"training data, which are run through the model to find those of the average."
        )
    if batches is not None and model is None:
        raise ValueError(f"{owner}: `model` must be given with `batches`, got None.")


def batch_norms(model: nn.Module) -> list[_BatchNorm]:
    """Layers of batch normalization whose statistics follow the training.

    Not those that are frozen: held in evaluation mode while the rest of the model trains.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    return [norm for norm in norms if norm.training or not model.training]


@contextmanager
def batch_statistics(model: nn.Module, *, anew: bool = False) -> Iterator[None]:
    """Batches that are run through the model inside give batch normalization its statistics.

    As torch's `update_bn`; but that resets frozen layers, too, and lets them train, and after a
    batch that raises it leaves the model in training mode and without its momenta.

    Args:
        anew: the plain mean over the batches; else the running mean goes on from where it is.
    """
    modes = [(module, module.training) for module in model.modules()]
    norms = batch_norms(model)
    momenta = [norm.momentum for norm in norms]
    frozen = [module for module, training in modes if model.training and not training]
    try:
        for norm in norms if anew else ():
            norm.reset_running_stats()
            norm.momentum = None
        model.train()
        for module in frozen:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        for module, training in modes:
            module.training = training
