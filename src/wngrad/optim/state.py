"""The state of a parameter: b, t, the direction's buffers and the count of skips.

`b` and `skipped` have one entry per block, and so has WNAdam's `t`; WNGrad's `t` is one number, its
count of steps, and `norm` another. Buffers have the parameter's shape and dtype.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from wngrad.optim import blocks, sharded, start
from wngrad.optim.directions import Direction

Group = dict[str, Any]

# Kept in these types whatever the parameter's dtype; all other state has the parameter's own.
PER_BLOCK = ("b", "t", "skipped")
AVERAGE = "average"  # of the parameter, in float32 or wider
NORM = "norm"  # of the parameter's neurons before its first step, where λ is in units of that


def shape_of(group: Group, i: int) -> blocks.Shape:
    """The shape of b for parameter `i`."""
    per = group["per"]
    return (
        tuple(per[i])
        if isinstance(per, list)
        else blocks.named_shape(group["params"][i].shape, per)
    )


def b_dtype(*params: Tensor) -> torch.dtype:
    """float32, or float64 for parameters of that precision, and those who share their b."""
    double = {p.dtype for p in params} & {torch.float64, torch.complex128}
    return torch.float64 if double else torch.float32


def shares(group: Group) -> bool:
    """Whether a group's parameters share their b, those apart that hold theirs."""
    return bool(group["joint"]) or group["per"] == "model"


def holds(group: Group, p: Tensor) -> bool:
    """Whether a parameter's b stays b₁."""
    return bool(group["hold_1d"]) and p.dim() == 1


def _b_dtype_in(group: Group, p: Tensor) -> torch.dtype:
    return b_dtype(*group["params"]) if shares(group) else b_dtype(p)


def wanted(group: Group, i: int, direction: Direction) -> dict[str, blocks.Shape]:
    """The keys of a parameter's state, and the shape of each."""
    per, shape = group["per"], group["params"][i].shape
    if isinstance(per, list):
        per = tuple(per[i])
    made = _wanted if torch.compiler.is_compiling() else _cached
    buffers = direction.buffers
    if group["average"] is not None:
        buffers = (*buffers, AVERAGE)
    skips, relative = group["nonfinite"] == "skip", bool(group.get("finetune"))
    return made(shape, per, buffers, direction.counts_blocks, skips, relative)


def _wanted(
    shape: blocks.Shape,
    per: Any,
    buffers: tuple[str, ...],
    counts_blocks: bool,
    skips: bool,
    relative: bool,
) -> dict[str, blocks.Shape]:
    b = per if isinstance(per, tuple) else blocks.named_shape(shape, per)
    keys = {"b": b, "t": b if counts_blocks else (), **dict.fromkeys(buffers, tuple(shape))}
    keys |= {"skipped": b} if skips else {}
    return {**keys, NORM: ()} if relative else keys


_cached = lru_cache(maxsize=4096)(_wanted)


def make(
    group: Group,
    p: Tensor,
    state: dict[str, Tensor],
    keys: dict[str, blocks.Shape],
    direction: Direction,
) -> None:
    """Add what the state lacks."""
    shape, dtype, one = keys["b"], _b_dtype_in(group, p), group["per"] == "model"
    for key in keys.keys() - state.keys():
        if key == "b":
            # 0 stands for "not yet": the first gradient will set it.
            first = 0.0 if isinstance(group["b_init"], (str, tuple)) else group["b_init"]
            state[key] = sharded.filled(p, shape, first, dtype, one=one)
        elif key == "t" and keys[key] == ():
            state[key] = torch.zeros((), dtype=torch.float32, device=p.device)
        elif key in PER_BLOCK:
            kind = torch.int32 if key == "skipped" else dtype
            state[key] = sharded.filled(p, shape, 0, kind, one=one)
        elif key == NORM:
            state[key] = start.norm(p, direction.neurons(p.shape))
        elif key == AVERAGE:
            state[key] = p.detach().to(dtype_of(group, key, p), copy=True)
        else:
            state[key] = torch.zeros_like(p, memory_format=torch.preserve_format)


def dtype_of(group: Group, key: str, p: Tensor, value: Tensor | None = None) -> torch.dtype:
    """The type in which a state is kept; of b and t, that of `value` where it is wider."""
    if key == "skipped":
        return torch.int32
    if key == NORM:
        return torch.float32
    if key in PER_BLOCK:
        count = key == "t" and value is not None and value.dim() == 0
        least = torch.float32 if count else _b_dtype_in(group, p)
        wide = value is not None and value.dtype == torch.float64
        return torch.float64 if wide else least
    # Small changes are lost in an average of 16 bits.
    return torch.promote_types(p.dtype, torch.float32) if key == AVERAGE else p.dtype


def check_values(
    owner: str, p: Tensor, state: dict[str, Any], keys: Iterable[str], nonfinite: str
) -> None:
    """Refuse a checkpoint's state that is no tensor, and a b that no step leaves.

    Waits for devices. 0 stands for a block that has no b yet. A NaN is what "propagate" leaves of
    a block that has diverged, and shows in the parameters; under the others none can be.
    """
    for key in (key for key in keys if key in state):
        value, kind = state[key], "a real tensor" if key in PER_BLOCK else "a tensor"
        tensor = isinstance(value, Tensor)
        odd = tensor and key in PER_BLOCK and (value.is_complex() or value.dtype == torch.bool)
        if odd or not tensor:
            raise ValueError(
                f"{owner}: `state_dict` must hold `{key}` as {kind}, got "
                f"{value.dtype if tensor else type(value).__name__} for a parameter of shape "
                f"{tuple(p.shape)}."
            )
    if "b" not in state or (b := sharded.local(state["b"])).is_meta:
        return
    bad = (b < 0) | b.isinf() | (b.isnan() & (nonfinite != "propagate"))
    if bool(bad.any()):
        raise ValueError(
            f"{owner}: `state_dict` must hold `b` >= 0 and finite (0 before a block's first), got "
            f"{b[bad][0].item()} for a parameter of shape {tuple(p.shape)}."
        )


def check(
    owner: str, what: str, p: Tensor, state: dict[str, Any], keys: dict[str, blocks.Shape]
) -> None:
    """Refuse state that does not fit its parameter."""
    for key, shape in keys.items():
        if key in state and state[key].shape != shape:
            raise ValueError(
                f"{owner}: {what} must fit the parameters, got `{key}` of shape "
                f"{tuple(state[key].shape)} instead of {shape} for a parameter of shape "
                f"{tuple(p.shape)}."
            )
    if state and "b" not in state:
        raise ValueError(
            f"{owner}: {what} must hold `b` for every parameter that has stepped, got "
            f"{sorted(state)} for a parameter of shape {tuple(p.shape)}."
        )
