"""Comparisons of parameters, and the tensors that an optimizer holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def copies(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def same(a: nn.Module, b: nn.Module) -> bool:
    """Bit for bit."""
    return all(map(torch.equal, a.parameters(), b.parameters()))


def apart(a: nn.Module, b: nn.Module) -> str:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return f"{max(float((p - q).detach().abs().max()) for p, q in pairs):.2g}"


def finite(params: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in params)


def held(opt: Any) -> list[Tensor]:
    """Every tensor an optimizer holds on to, parameters and their gradients apart."""
    seen = {id(t) for g in opt.param_groups for p in g["params"] for t in (p, p.grad)}
    return list(_tensors(vars(opt), seen))


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _tensors(value, seen)
    elif isinstance(thing, list | tuple | set):
        for value in thing:
            yield from _tensors(value, seen)
