"""The weights that an optimizer wants tested, in a network that is ready for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from wngrad.optim.average import batch_norms, batch_statistics, snapshot


@contextmanager
def evaluation(
    model: nn.Module | None,
    optimizers: Sequence[Any],
    recompute: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Testing, and then training as before.

    The network is in evaluation mode and nothing is differentiated. An optimizer with methods
    `train` and `eval` (schedule-free ones) is switched; of one that keeps an average of the
    weights (WNMuon), the average is in their place.

    Args:
        recompute: runs training batches through the network, where batch normalization's
            statistics belong to other weights than those to be tested; they are put back.
    """
    modes = [] if model is None else [(m, m.training) for m in model.modules()]
    with ExitStack() as stack:
        moved = [_enter(opt, stack) for opt in optimizers]
        if any(moved) and model is not None and recompute is not None:
            _take_statistics(model, recompute, stack)
        try:
            if model is not None:
                model.eval()
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training


def to_train(opt: Any) -> Any:
    """An optimizer in its training mode, if it has modes: schedule-free ones begin in neither."""
    if _switches(opt):
        opt.train()
    return opt


def keeps_average(opt: Any) -> bool:
    """True if the optimizer has an average of the weights to show."""
    states = getattr(opt, "state", {}).values()
    return hasattr(opt, "averaged") and any("average" in state for state in states)


def has_test_weights(opt: Any) -> bool:
    """True if the weights to be tested are not those that training moves."""
    return _switches(opt) or keeps_average(opt)


def _switches(opt: Any) -> bool:
    return hasattr(opt, "eval") and hasattr(opt, "train")


def _enter(opt: Any, stack: ExitStack) -> bool:
    """Bring an optimizer's test weights in; True if they are not those that training moves."""
    other = has_test_weights(opt)
    if _switches(opt):
        opt.eval()
        stack.callback(opt.train)
    if keeps_average(opt):
        stack.enter_context(opt.averaged())
    return other


def _take_statistics(model: nn.Module, recompute: Callable[[], None], stack: ExitStack) -> None:
    """Of the weights that are in the model now, until the end of the test."""
    if batch_norms(model):
        stack.callback(snapshot("evaluation", model.named_buffers()))
        with batch_statistics(model):
            recompute()


def state_bytes(optimizers: Iterable[Any]) -> int:
    """What optimizers keep beside the parameters, in bytes."""
    members = [m for opt in optimizers for m in getattr(opt, "members", [opt])]
    states = [state for opt in members for state in getattr(opt, "state", {}).values()]
    tensors = [t for state in states for t in _tensors(state)]
    return sum(t.numel() * t.element_size() for t in tensors)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
