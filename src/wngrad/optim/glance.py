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
from torch import Tensor, nn

from wngrad.optim import sharded
from wngrad.optim.tables import bits

if TYPE_CHECKING:
    from wngrad.optim.base import BlockOptimizer

# The settings a plan depends on; λ, μ or β, the decay and C are numbers in a table.
_choices = itemgetter(
    "decoupled_weight_decay",
    "hold_1d",
    "joint",
    "nonfinite",
    "differentiable",
    "fused",
    "stochastic_rounding",
)
_is_sparse, _dtype = attrgetter("is_sparse"), attrgetter("dtype")
_PLAIN = {nn.Parameter, Tensor}
_FLOATS = {torch.float32: 1, torch.float64: 2}


class Rate(NamedTuple):
    """λ as the kernel reads it."""

    word: int
    kind: int  # 0: the word is the number; 1, 2: it is where a float32 or float64 lies; -1: neither


class Glance(NamedTuple):
    """A step that is due."""

    key: tuple[Any, ...]  # what its plan depends on
    grads: list[int]  # where the gradients lie
    settings: list[int]  # the numbers of each group


def glance(opt: BlockOptimizer) -> Glance | None:
    """The step that is due, or None if a setting must be put right first."""
    settings: list[int] = []
    choices = []
    for group in opt.param_groups:
        start, decay, per = group["b_init"], group["weight_decay"], group["per"]
        lam = rate(group["lr"])
        if lam is None or type(start) is str:
            return None
        settings += lam
        settings += _numbers(group[opt._fraction], decay, start, group["maximize"])
        blocks = per if type(per) is str else tuple(per)
        still = lam == (0, 0)  # A group without rate takes no part.
        choices.append((_choices(group), blocks, type(start), decay != 0, still, lam.kind))
    params = [p for group in opt.param_groups for p in group["params"]]
    grads = [p.grad for p in params]
    live = [g for g in grads if g is not None]
    states = opt.state.values()
    kept = list(chain.from_iterable(map(dict.values, states)))
    place: Any = Tensor.data_ptr
    strides: Any = Tensor.stride
    extra = None
    if not _PLAIN.issuperset(map(type, chain(params, kept))) or any(map(_is_sparse, live)):
        place, strides = _place, _strides
        extra = tuple((g.layout, getattr(g, "placements", None)) for g in live)
    addresses = list(map(place, live))
    odd = reduce(or_, addresses, 0) % 16 and tuple(a % 16 for a in addresses)
    key = (
        tuple(choices),
        tuple(map(id, params)),
        tuple(map(place, params)),
        tuple(map(Tensor.numel, params)),
        None if len(live) == len(grads) else tuple(g is None for g in grads),
        tuple(map(strides, live)),
        tuple(map(_dtype, live)),
        odd,
        tuple(map(id, states)),
        tuple(map(place, kept)),
        extra,
    )
    return Glance(key, addresses, settings)


def rate(lr: float | Tensor) -> Rate | None:
    """λ, or where it lies; None if it is not one number."""
    if not isinstance(lr, Tensor):
        return Rate(bits(float(lr)), 0)
    if lr.numel() != 1:
        return None
    if lr.device.type == "cpu":
        return Rate(bits(lr.item()), 0)
    return Rate(lr.data_ptr(), _FLOATS.get(lr.dtype, -1))


@lru_cache(maxsize=1024)
def _numbers(mu: float, decay: float, start: Any, maximize: bool) -> tuple[int, ...]:
    log_mu = math.log2(mu) if mu > 0 else -math.inf
    c = start[1] if isinstance(start, tuple) else start
    return tuple(map(bits, (mu, log_mu, decay, c, -1.0 if maximize else 1.0)))


def _place(t: Any) -> int:
    """Where it lies: a shard's part on this rank; nowhere if it is sparse, or no tensor."""
    whole = isinstance(t, Tensor) and t.layout == torch.strided
    return sharded.local(t).data_ptr() if whole else 0


def _strides(t: Tensor) -> tuple[int, ...]:
    return sharded.local(t).stride() if t.layout == torch.strided else ()
