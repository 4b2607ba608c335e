"""The rates in use as plain numbers, for whichever logger you have."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from wngrad.optim import lists, report
from wngrad.optim.optimizer import BlockOptimizer


def rate_metrics(opt: Any, prefix: str = "wngrad/") -> dict[str, float]:
    """The spread of the effective rates λ/b in each group, as metrics for any logger.

    `wngrad/<group>/rate_min`, `rate_median` and `rate_max`; with `nonfinite="skip"` also
    `wngrad/<group>/skipped`, the blocks left alone so far. A group is called by its "name", or
    `group0`, `group1`, …; the names suit W&B, MLflow and TensorBoard alike.

    Args:
        opt: one of wngrad's, or what Accelerate or Lightning wrapped around it. Of any other
            optimizer there is nothing to tell, so that one script can serve them all.
        prefix: comes before every name.

    Returns:
        Finite numbers only: what is not known yet, or is NaN, is left out. Waits for the device
        once. Of sharded parameters, this rank's.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> opt = WNGrad([{"params": model.parameters(), "name": "head"}])
        >>> rate_metrics(opt)  # no step yet
        {}
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> opt.step()
        >>> rate_metrics(opt)
        {'wngrad/head/rate_min': 0.25, 'wngrad/head/rate_median': 0.25, 'wngrad/head/rate_max': 0.5}
    """
    groups, names = by_group(opt), _names(unwrapped(opt).param_groups)
    return {
        f"{prefix}{name}/{key}": value
        for name, metrics in zip(names, groups, strict=True)
        for key, value in metrics.items()
    }


def by_group(opt: Any) -> list[dict[str, float]]:
    """The same numbers without names, in the order of the groups."""
    opt = unwrapped(opt)
    if not isinstance(opt, BlockOptimizer):
        return [{} for _ in opt.param_groups]
    measured = []
    for group, summary in zip(opt.param_groups, opt.rate_summary(), strict=True):
        metrics = {f"rate_{key}": rate for key, rate in summary._asdict().items()}
        if (skips := report.skip_count(opt, group)) is not None:
            metrics["skipped"] = skips
        measured.append(metrics)
    tensors = [tensor for metrics in measured for tensor in metrics.values()]
    numbers = iter(lists.stacked(tensors).tolist())
    return [
        {key: value for key in metrics if math.isfinite(value := next(numbers))}
        for metrics in measured
    ]


def show_rates(opt: Any, *, every: int = 10) -> RemovableHandle:
    """Write the rates in use into the groups, for trainers and plots that read them there.

    `group["effective_lr"]` is the median of λ/b over the group's blocks, and `group["d"]` the same
    without λ, as Prodigy's and D-Adaptation's users plot `d*lr`. `group["lr"]` stays what the user
    or a scheduler has set. They are plain numbers: a checkpoint may keep them, and no step reads
    them. No step waits for a device: on one, a number shows up some steps after it was asked for.

    Args:
        opt: WNGrad, WNAdam or WNMuon, or what Accelerate or Lightning wrapped around it.
        every: how many steps go by between two looks.

    Returns:
        A handle with `remove()`.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> opt = WNGrad(model.parameters(), lr=0.5)
        >>> handle = show_rates(opt)
        >>> model(torch.ones(1, 3)).sum().backward()
        >>> opt.step()
        >>> group = opt.param_groups[0]  # b = 1 + λ²·3 for weights, 1 + λ²·1 for biases
        >>> round(group["effective_lr"], 4), round(group["d"], 4), group["lr"]
        (0.2857, 0.5714, 0.5)
    """
    return wngrad_optimizer("show_rates", opt, every).register_step_post_hook(_Shown(every))


class _Shown:
    """The hook of `show_rates`: asks for medians, and writes those that have arrived."""

    def __init__(self, every: int) -> None:
        self._every, self._steps = every, 0
        self._medians: Tensor | None = None  # on the host, once `_copied` has happened
        self._copied: Any = None  # a CUDA event; None where nothing is copied

    def __call__(self, opt: Any, *_: Any) -> None:
        if report.is_capturing():
            return
        if self._steps % self._every == 0 and self._medians is None:
            medians = [report.median_without_lr(opt, group) for group in opt.param_groups]
            asked = lists.stacked(medians)
            self._medians, self._copied = asked.to("cpu", non_blocking=True), None
            if asked.is_cuda:
                self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._copied.record(torch.cuda.current_stream(asked.device))
        self._steps += 1
        if self._medians is not None and (self._copied is None or self._copied.query()):
            for group, d in zip(opt.param_groups, self._medians.tolist(), strict=False):
                if math.isfinite(d):
                    group["d"], group["effective_lr"] = d, d * float(group["lr"])
            self._medians = None


def unwrapped(opt: Any, owner: str = "rate_metrics") -> Any:
    """The optimizer itself, out of what a trainer's library wrapped around it."""
    while hasattr(opt, "optimizer"):  # Accelerate's and Lightning's wrappers, even a scheduler
        opt = opt.optimizer
    if not hasattr(opt, "param_groups"):
        raise TypeError(f"{owner}: `opt` must be an optimizer, got {type(opt).__name__}.")
    return opt


def wngrad_optimizer(owner: str, opt: Any, every: int) -> BlockOptimizer:
    """The optimizer that a hook is to look at, once in so many steps, if it is one of wngrad's."""
    opt = unwrapped(opt, owner)
    if not isinstance(opt, BlockOptimizer):
        raise TypeError(f"{owner}: `opt` must be one of wngrad's, got {type(opt).__name__}.")
    if type(every) is not int or every < 1:
        raise ValueError(f"{owner}: `every` must be an int >= 1, got {every!r}.")
    return opt


def _names(groups: list[dict[str, Any]]) -> list[str]:
    """Unique, and the same for as long as the run lasts, whatever groups are added."""
    names: list[str] = []
    for i, group in enumerate(groups):
        # Only what every logger takes: ASCII letters, digits, _ - . and / between parts.
        parts = re.sub(r"[^\w\-./]", "_", str(group.get("name", "")), flags=re.ASCII).split("/")
        name = "/".join(part for part in parts if part not in ("", ".", "..")) or f"group{i}"
        while name in names:
            name = f"{name}-{i}"
        names.append(name)
    return names
