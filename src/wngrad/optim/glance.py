"""What a step depends on, at a glance.

A fused step whose parameters, state and choices are those of an earlier one finds its launches
ready, so this is all it costs the host. It is written for speed.
"""

from __future__ import annotations

import math
from functools import lru_cache, reduce
from itertools import chain
from operator import attrgetter, itemgetter, or_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from wngrad.optim import sharded
from wngrad.optim.tables import bits

if TYPE_CHECKING:
    from wngrad.optim.base import BlockOptimizer

_settings = itemgetter(
    "weight_decay",
    "b_init",
    "maximize",
    "decoupled_weight_decay",
    "hold_1d",
    "joint",
    "nonfinite",
    "differentiable",
    "fused",
    "stochastic_rounding",
)
_GRAD, _BYTES = attrgetter("grad"), attrgetter("nbytes")
_ADDRESS, _STRIDE, _DENSE = Tensor.data_ptr, Tensor.stride, Tensor.is_contiguous
_FLOATS = {torch.float32: 1, torch.float64: 2}


class Rate(NamedTuple):
    """λ as the kernel reads it."""

    word: int
    kind: int  # 0: the word is the number; 1, 2: it is where a float32 or float64 lies; -1: neither


class Glance(NamedTuple):
    """A step that is due."""

    simple: bool  # parameters, gradients and state are plain memory
    where: list[int]  # where parameters and state lie
    key: list[Any]  # all else that its plan depends on
    words: list[int]  # the numbers of each group, then where the gradients lie

    def frozen(self) -> tuple[Any, ...]:
        """The key as one for a dictionary."""
        parts = (self.where, *self.key)
        return tuple(tuple(part) if isinstance(part, list) else part for part in parts)

    def like(self, other: Glance) -> bool:
        """Whether one plan does for both."""
        return (self.where is other.where or self.where == other.where) and self.key == other.key


def glance(opt: BlockOptimizer, before: Glance | None) -> Glance | None:
    """The step that is due, or None if a setting must be put right first.

    What is as it was `before` is not looked at any further.
    """
    words: list[int] = []
    choices = []
    for group in opt.param_groups:
        per, lam, mu = group["per"], rate(group["lr"]), group[opt._fraction]
        settings = _settings(group)
        plain = type(mu) is type(settings[0]) is float and type(settings[1]) in (float, tuple)
        if lam is None or not plain:
            return None
        blocks = per if type(per) is str else tuple(per)
        if (found := _read(mu, *settings)) is None:
            return None
        numbers, choice = found
        words += lam
        words += numbers
        still = lam == (0, 0)  # A group without rate takes no part.
        far = group["lr"].device if lam.kind else None
        members = len(group["params"])
        choices.append((choice, blocks, members, opt._buffered(group), still, lam.kind, far))
    params = [p for group in opt.param_groups for p in group["params"]]
    grads, absent = list(map(_GRAD, params)), None
    kept = list(chain.from_iterable(map(dict.values, opt.state.values())))
    try:
        addresses = list(map(_ADDRESS, grads))
        where = list(map(_ADDRESS, params + kept))
        if before is not None and before.simple and where == before.where:
            where, simple = before.where, all(addresses)
        else:
            simple = all(addresses) and all(where)
        strides: list[Any] | None = None if all(map(_DENSE, grads)) else list(map(_STRIDE, grads))
        sizes: list[Any] = list(map(_BYTES, grads))
    except (RuntimeError, TypeError):
        simple = False
    # No gradient, a sparse one, a shard, an empty parameter, state of the user's own.
    if not simple:
        absent = [g is None for g in grads]
        grads = [g for g in grads if g is not None]
        addresses = list(map(_address, grads))
        where = list(map(_address, params + kept))
        strides = list(map(_layout, grads))
        sizes = [(g.dtype, g.numel()) for g in grads]
    # Loads are 16 bytes wide where all addresses allow it.
    odd = [a % 16 for a in addresses] if reduce(or_, addresses, 0) % 16 else None
    words += addresses
    # Strides and sizes say what shape a parameter has; another one may have come to lie there.
    who, shapes = list(map(id, params)), list(map(_STRIDE, params))
    return Glance(simple, where, [who, shapes, strides, sizes, absent, odd, choices], words)


def rate(lr: float | Tensor) -> Rate | None:
    """λ, or where it lies; None if it is not one number."""
    if not isinstance(lr, Tensor):
        return Rate(bits(float(lr) + 0.0), 0)  # −0 becomes 0
    if lr.numel() != 1 or lr.dim() > 2 or lr.is_complex():
        return None
    if lr.device.type == "cpu":
        return Rate(bits(lr.item() + 0.0), 0)
    return Rate(lr.data_ptr(), _FLOATS.get(lr.dtype, -1))


@lru_cache(maxsize=1024, typed=True)
def _read(
    mu: float, decay: float, start: Any, maximize: bool, *others: Any
) -> tuple[tuple[int, ...], tuple[Any, ...]] | None:
    """A group's numbers but λ, for a table; and all that a plan depends on. None if one is bad."""
    if not (0 <= mu < 1 and 0 <= decay < math.inf):
        return None
    log_mu = math.log2(mu) if mu > 0 else -math.inf
    c = start[1] if isinstance(start, tuple) else start
    sign = -1.0 if maximize else 1.0
    numbers = tuple(map(bits, (mu, log_mu, decay, c, sign, 0.0)))  # an even number, with λ's
    return numbers, (type(start), decay != 0, *others)


def _address(t: Any) -> int:
    """Where it lies: a shard's part on this rank; nowhere if it has no memory, or is no tensor."""
    if not isinstance(t, Tensor) or t.layout != torch.strided:
        return 0
    try:
        return sharded.local(t).data_ptr()
    except RuntimeError:  # one that torch.func has wrapped
        return 0


def _layout(g: Tensor) -> tuple[Any, ...]:
    if g.layout != torch.strided:
        return (g.layout,)
    return (sharded.local(g).stride(), getattr(g, "placements", None))
