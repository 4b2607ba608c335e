"""The state of a parameter: b, t, the direction's buffers and the count of skips.

`b` and `skipped` have one entry per block, and so has WNAdam's `t`; WNGrad's `t` is one number, its
count of steps, and `norm` another. Buffers have the parameter's shape and dtype. A checkpoint is
checked whole before anything changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wngrad.muon_numbers import FRESH, LEAST
from wngrad.optim import blocks, settings, sharded
from wngrad.optim.directions import Direction
from wngrad.optim.settings import Group

if TYPE_CHECKING:
    from wngrad.optim.optimizer import BlockOptimizer

# Kept in these types whatever the parameter's dtype; all other state has the parameter's own.
PER_BLOCK = ("b", "t", "skipped")
AVERAGE = "average"  # of the parameter, in float32 or wider
NORM = "norm"  # of the parameter's neurons before its first step, where λ is in units of that
_NOT_NEGATIVE = {"b", "t", "rms", "skipped", NORM}


def shape_of(group: Group, i: int) -> blocks.Shape:
    """The shape of b for parameter `i`."""
    per = group["per"]
    if isinstance(per, list):
        return tuple(per[i])
    return blocks.named_shape(group["params"][i].shape, per)


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
    names = direction.buffers
    if group["average"] is not None:
        names = (*names, AVERAGE)
    skips, relative = group["nonfinite"] == "skip", bool(group.get("finetune"))
    return made(shape, per, names, direction.counts_blocks, skips, relative)


def _wanted(
    shape: blocks.Shape,
    per: Any,
    names: tuple[str, ...],
    counts_blocks: bool,
    skips: bool,
    relative: bool,
) -> dict[str, blocks.Shape]:
    b = per if isinstance(per, tuple) else blocks.named_shape(shape, per)
    keys = {"b": b, "t": b if counts_blocks else (), **dict.fromkeys(names, tuple(shape))}
    keys |= {"skipped": b} if skips else {}
    return {**keys, NORM: ()} if relative else keys


_cached = lru_cache(maxsize=4096)(_wanted)


def make(
    group: Group,
    p: Tensor,
    kept: dict[str, Tensor],
    keys: dict[str, blocks.Shape],
    direction: Direction,
) -> None:
    """Add what the state lacks."""
    shape, one = keys["b"], group["per"] == "model"
    for key in [key for key in keys if key not in kept]:
        if key == "t" and keys[key] == ():
            kept[key] = torch.zeros((), dtype=torch.float32, device=p.device)
        elif key in PER_BLOCK:
            # b = 0 stands for "not yet": the first gradient will set it.
            start = group["b_init"] if key == "b" and isinstance(group["b_init"], float) else 0
            kept[key] = sharded.filled(p, shape, start, dtype_of(group, key, p), one=one)
        elif key == NORM:
            kept[key] = norm(p, direction.neurons(p.shape))
        elif key == AVERAGE:
            kept[key] = p.detach().to(dtype_of(group, key, p), copy=True)
        else:
            kept[key] = torch.zeros_like(p, memory_format=torch.preserve_format)


@torch.no_grad()
def norm(p: Tensor, neurons: int) -> Tensor:
    """√(‖p‖²/neurons), at least 0.1, or 1/√3 where that is 0; over all ranks of a shard.

    Weights that were trained before are changed in proportion to it. What starts at zero, such as
    B of LoRA, has none; it takes that of a neuron as torch starts it. What is nearly zero must not
    be stuck there.
    """
    part = sharded.local(p.detach())
    wide = blocks.accumulator(part.device)
    values = torch.view_as_real(part) if part.is_complex() else part
    total: Tensor = torch.linalg.vector_norm(values, dtype=wide).square()
    if sharded.is_sharded(p):
        dims = [dim for dim, _ in sharded.cut_by(p)]
        total = sharded.sum_over_ranks(total, sharded.groups(p, dims))
    mean = (total / max(1, neurons)).sqrt()
    return torch.where(mean == 0, FRESH, mean.clamp(min=LEAST)).to(torch.float32)


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


def check(
    owner: str, what: str, p: Tensor, kept: dict[str, Any], keys: dict[str, blocks.Shape]
) -> None:
    """Refuse state that does not fit its parameter."""
    for key, shape in keys.items():
        if key in kept and kept[key].shape != shape:
            raise ValueError(
                f"{owner}: {what} must fit the parameters, got `{key}` of shape "
                f"{tuple(kept[key].shape)} instead of {shape} for a parameter of shape "
                f"{tuple(p.shape)}."
            )
    if kept and "b" not in kept:
        raise ValueError(
            f"{owner}: {what} must hold `b` for every parameter that has stepped, got "
            f"{sorted(kept)} for a parameter of shape {tuple(p.shape)}."
        )


# ----------------------------------------------------------------------------- checkpoints


def load(
    opt: BlockOptimizer, given: dict[str, Any], load_as_torch: Callable[[dict[str, Any]], None]
) -> None:
    """Load a `state_dict` bit for bit; refused, before anything changes, if it does not fit."""
    loaded: dict[str, Any] = {}

    def checked(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        loaded.update(_checked(opt, state_dict))
        return loaded

    def widen(_: Optimizer) -> None:
        # torch casts all state to its parameter's dtype, where b, t and the counts are wider
        # on purpose, and keeps what needs no cast, which would tie two optimizers together.
        for group, saved in zip(opt.param_groups, loaded["param_groups"], strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                for name, value in loaded["state"].get(key, {}).items():
                    if isinstance(value, Tensor):
                        dtype = dtype_of(group, name, p, value)
                        opt.state[p][name] = value.detach().to(p.device, dtype, copy=True)

    # Our check runs after the user's hooks of its kind, our cast before them.
    hooks = [
        opt.register_load_state_dict_pre_hook(checked),
        opt.register_load_state_dict_post_hook(widen, prepend=True),
    ]
    try:
        load_as_torch(given)
    finally:
        for hook in hooks:
            hook.remove()


def _checked(opt: BlockOptimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The same with its settings checked, and in the place of some of them the optimizer's own.

    Those are for the machine or the model to say, not for the checkpoint, and so are shapes of b,
    which are in the order of our parameters, not the file's.
    """
    owner, kind = type(opt).__name__, type(opt).Settings
    pairs = list(zip(opt.param_groups, state_dict["param_groups"], strict=False))
    if [len(g["params"]) for g in opt.param_groups] != [
        len(saved["params"]) for saved in state_dict["param_groups"]
    ]:
        return state_dict  # torch says so
    groups = []
    for group, saved in pairs:
        merged = {**group, **saved, "params": group["params"]}
        settings.rename(owner, kind, merged)
        merged |= settings.plain(owner, kind, merged)
        merged |= {name: group[name] for name, row in kind.rows.items() if not row.loaded}
        if isinstance(group["per"], list):
            merged["per"] = group["per"]
        settings.read(owner, kind, merged, {})
        for i, key in enumerate(saved["params"]):
            p, values = group["params"][i], state_dict["state"].get(key, {})
            keys = wanted(merged, i, opt.direction(merged, p))
            _check_values(owner, merged, p, values, keys, opt.state.get(p, {}))
            check(owner, "`state_dict`", p, values, keys)
        groups.append({**merged, "params": saved["params"]})
    return {**state_dict, "param_groups": groups}


def _check_values(
    owner: str,
    group: Group,
    p: Tensor,
    values: dict[str, Any],
    keys: Iterable[str],
    present: dict[str, Any],
) -> None:
    """Refuse a checkpoint's state that is no tensor of its kind, and numbers that no step leaves.

    Waits for devices. 0 stands for a block that has no b yet. A NaN is what "propagate" leaves of
    a block that has diverged, and shows in the parameters; under the others none can be, unless
    the optimizer has it already. Nothing bounds a step whose b is held, or keeps float16 from
    overflowing.
    """
    guarded = group["nonfinite"] != "propagate"
    bounded = guarded and not holds(group, p) and p.dtype.itemsize > 2
    for key in (key for key in keys if key in values):
        value = values[key]
        if value is present.get(key):
            continue
        real = key in PER_BLOCK or not p.is_complex()
        tensor = isinstance(value, Tensor)
        if not tensor or value.dtype == torch.bool or (real and value.is_complex()):
            kind = "a real tensor" if real else "a tensor"
            raise ValueError(
                f"{owner}: `state_dict` must hold `{key}` as {kind}, got "
                f"{value.dtype if tensor else type(value).__name__} for a parameter of shape "
                f"{tuple(p.shape)}."
            )
        numbers = sharded.local(value)
        if numbers.is_meta:
            continue
        bad = torch.zeros_like(numbers, dtype=torch.bool)
        if key in _NOT_NEGATIVE:
            bad |= numbers < 0
        if bounded or key in PER_BLOCK:
            bad |= numbers.isinf()
        if bounded or key == "t" or (guarded and key in PER_BLOCK):
            bad |= numbers.isnan()
        if bool(bad.any()):
            least = ">= 0 and finite" if key in _NOT_NEGATIVE else "finite"
            note = " (0 before a block's first)" if key == "b" else ""
            raise ValueError(
                f"{owner}: `state_dict` must hold `{key}` {least}{note}, got "
                f"{numbers[bad][0].item()} for a parameter of shape {tuple(p.shape)}."
            )
