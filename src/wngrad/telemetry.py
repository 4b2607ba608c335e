"""The rates in use as plain numbers, for whichever logger you have."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wngrad.optim.optimizer import BlockOptimizer
from wngrad.optim.report import RateSummary, skips


def rate_metrics(opt: Any, prefix: str = "wngrad/") -> dict[str, float]:
    """The spread of the effective rates λ/b in each group, as metrics for any logger.

    `wngrad/<group>/rate_min`, `rate_median` and `rate_max`; with `nonfinite="skip"` also
    `wngrad/<group>/skipped`, the blocks left alone so far. A group is called by its "name", or
    `group0`, `group1`, …; the names suit W&B, MLflow and TensorBoard alike.

    Args:
        opt: WNGrad or WNAdam, or what Accelerate or Lightning wrapped around it. Of any other
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
    found = by_group(opt)
    names = _names(_unwrapped(opt).param_groups)
    return {
        f"{prefix}{name}/{key}": value
        for name, metrics in zip(names, found, strict=True)
        for key, value in metrics.items()
    }


def by_group(opt: Any) -> list[dict[str, float]]:
    """The same numbers without names, in the order of the groups."""
    opt = _unwrapped(opt)
    if not isinstance(opt, BlockOptimizer):
        return [{} for _ in opt.param_groups]
    pairs = zip(opt.param_groups, opt.rate_summary(), strict=True)
    measured = [dict(_measured(opt, group, summary)) for group, summary in pairs]
    tensors = [t for metrics in measured for t in metrics.values()]
    if not tensors:
        return [{} for _ in measured]
    numbers = iter(torch.stack([t.to(tensors[0].device) for t in tensors]).tolist())
    return [
        {key: value for key in metrics if math.isfinite(value := next(numbers))}
        for metrics in measured
    ]


def _measured(
    opt: BlockOptimizer, group: dict[str, Any], summary: RateSummary
) -> Iterator[tuple[str, Tensor]]:
    """What is known of a group, still on its device."""
    if any("b" in opt.state.get(p, {}) for p in group["params"]):
        for key, value in summary._asdict().items():
            yield f"rate_{key}", value
    if counts := skips(opt, group):
        yield "skipped", torch.stack([n.to(counts[0].device) for n in counts]).sum()


def _unwrapped(opt: Any) -> Any:
    while hasattr(opt, "optimizer"):  # Accelerate's and Lightning's wrappers, even a scheduler
        opt = opt.optimizer
    if not hasattr(opt, "param_groups"):
        raise TypeError(f"rate_metrics: `opt` must be an optimizer, got {type(opt).__name__}.")
    return opt


def _names(groups: list[dict[str, Any]]) -> list[str]:
    """Unique, and the same for as long as the run lasts, whatever groups are added."""
    names: list[str] = []
    for i, group in enumerate(groups):
        name = _tidy(str(group.get("name", ""))) or f"group{i}"
        while name in names:
            name = f"{name}-{i}"
        names.append(name)
    return names


def _tidy(name: str) -> str:
    """Only what every logger takes: ASCII letters, digits, _ - . and / between parts."""
    parts = re.sub(r"[^\w\-./]", "_", name, flags=re.ASCII).split("/")
    return "/".join(part for part in parts if part not in ("", ".", ".."))
