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
from wngrad.optim.look import Look
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
_GRAD, _KIND = attrgetter("grad"), attrgetter("dtype", "shape")
_ADDRESS, _STRIDE = Tensor.data_ptr, Tensor.stride
_PENDING = Tensor.is_neg  # Its sign is still to be turned.
_FLOATS = {torch.float32: 1, torch.float64: 2}


class Glance(NamedTuple):
    """A step that is due."""

    simple: bool  # parameters, gradients and state are plain memory
    where: list[int]  # where parameters and state lie
    kinds: list[Any]  # which parameters there are; types, shapes and strides
    choices: list[Any]  # all else that its plan depends on
    words: list[int]  # the numbers of each group, then where the gradients lie

    def frozen(self) -> tuple[Any, ...]:
        """All but the words, for a dictionary."""
        parts = (self.where, *self.kinds, self.choices)
        return tuple(tuple(part) if isinstance(part, list) else part for part in parts)

    def like(self, other: Glance) -> bool:
        """Whether one plan does for both."""
        return self[1:4] == other[1:4]


def glance(opt: BlockOptimizer, before: Glance | None, look: Look | None) -> Glance | None:
    """The step that is due, or None if a setting must be put right first.

    Args:
        before: a step whose plan may do for this one, too.
        look: tells whether all tensors are as they were then.
    """
    words: list[int] = []
    choices: list[Any] = []
    for group in opt.param_groups:
        per, lr, mu, settings = group["per"], group["lr"], group[opt._fraction], _settings(group)
        plain = type(mu) is type(settings[0]) is float and type(settings[1]) in (float, tuple)
        if not plain or (lam := rate(lr)) is None or (found := _read(mu, *settings)) is None:
            return None
        numbers, choice = found
        words += lam
        words += numbers
        blocks = per if type(per) is str else tuple(per)
        still = lam == (0, 0)  # A group without rate takes no part.
        far = lr.device if lam[1] else None
        members = len(group["params"])
        choices.append((choice, blocks, members, opt._buffered(group), still, lam[1], far))
    params = [p for group in opt.param_groups for p in group["params"]]
    addresses = look(params, opt.state) if before is not None and look is not None else None
    if before is None or addresses is None:
        return _thorough(params, opt.state, choices, words)
    if (words := words + addresses) == before.words:
        words, odd = before.words, before.choices[-1]
    else:
        odd = _odd(addresses)
    choices.append(odd)
    return Glance(True, before.where, before.kinds, choices, words)


def _thorough(
    params: list[Tensor], state: dict[Tensor, Any], choices: list[Any], words: list[int]
) -> Glance:
    """The same, tensor by tensor."""
    grads = list(map(_GRAD, params))
    live = [g for g in grads if g is not None]
    kept = list(chain.from_iterable(map(dict.values, state.values())))
    try:
        addresses = list(map(_ADDRESS, live))
        where = list(map(_ADDRESS, params + kept))
        simple = all(addresses) and all(where)
    except (RuntimeError, TypeError):
        simple = False
    if not simple:  # a sparse gradient, a shard, an empty parameter, state of the user's own
        addresses = list(map(_address, live))
        where = list(map(_address, params + kept))
    absent = None if len(live) == len(grads) else [g is None for g in grads]
    choices.append(_odd(addresses))
    # Another parameter may have come to lie where one lay, or another view of it.
    every = params + live + kept
    found = (
        zip(map(_KIND, every), map(_STRIDE, every), strict=True) if simple else map(_kind, every)
    )
    kinds = [list(map(id, params)), list(found), absent, list(map(_PENDING, live))]
    return Glance(simple, where, kinds, choices, words + addresses)


def _odd(addresses: list[int]) -> tuple[int, ...] | None:
    """Loads are 16 bytes wide where all addresses allow it."""
    return tuple(a % 16 for a in addresses) if reduce(or_, addresses, 0) % 16 else None


def rate(lr: float | Tensor) -> tuple[int, int] | None:
    """λ as the kernel reads it, a word and its kind; None if it is not one number.

    Kind 0: the word is λ; 1 and 2: it is where a float32 or a float64 lies; -1: something else.
    """
    if not isinstance(lr, Tensor):
        return bits(float(lr) + 0.0), 0  # −0 becomes 0
    if lr.numel() != 1 or lr.dim() > 2 or lr.is_complex():
        return None
    if lr.device.type == "cpu":
        return bits(lr.item() + 0.0), 0
    return lr.data_ptr(), _FLOATS.get(lr.dtype, -1)


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


def _kind(t: Any) -> tuple[Any, ...]:
    """Its type, shape and strides: a shard's on this rank. State of the user's own has none."""
    if not isinstance(t, Tensor):
        return ()
    if t.layout != torch.strided:
        return t.dtype, t.shape, t.layout
    return t.dtype, t.shape, sharded.local(t).stride(), getattr(t, "placements", None)
