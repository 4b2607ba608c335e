"""Checkpoints: what is loaded is checked whole, kept in its own types, and read if it is older."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from wngrad.optim import blocks, sharded, state

if TYPE_CHECKING:
    from wngrad.optim.optimizer import BlockOptimizer

State = dict[str, Any]
# By the name of a buffer of an earlier release: it, the parameter's whole state and λ, to v.
Readings = Mapping[str, Callable[[Tensor, State, Any], Tensor]]


def load(opt: BlockOptimizer, state_dict: State, load_as_torch: Callable[[State], None]) -> None:
    """Load a `state_dict` bit for bit; refused, before anything changes, if it does not fit."""
    given: State = {}

    def check(_: Optimizer, loaded: State) -> State:
        loaded = _in_todays_names(opt, loaded)
        _check(opt, loaded)
        given.update(loaded)
        return loaded

    def widen(_: Optimizer) -> None:
        # torch casts all state to its parameter's dtype, where b, t and the counts are wider
        # on purpose, and keeps what needs no cast, which would tie two optimizers together.
        for group, saved in zip(opt.param_groups, given["param_groups"], strict=True):
            for p, key in zip(group["params"], saved["params"], strict=True):
                for name, value in given["state"].get(key, {}).items():
                    if isinstance(value, Tensor):
                        dtype = state.dtype_of(group, name, p, value)
                        opt.state[p][name] = value.detach().to(p.device, dtype, copy=True)

    # Our check runs after the user's hooks of its kind, our cast before them.
    hooks = [
        opt.register_load_state_dict_pre_hook(check),
        opt.register_load_state_dict_post_hook(widen, prepend=True),
    ]
    blocks_of = [(group["per"], group["fused"]) for group in opt.param_groups]
    try:
        load_as_torch(state_dict)
    finally:
        for hook in hooks:
            hook.remove()
    for group, (per, fuse) in zip(opt.param_groups, blocks_of, strict=True):
        group["fused"] = fuse  # That is for the machine to say, not for the checkpoint.
        if isinstance(per, list):  # Shapes are in the order of our parameters, not the file's.
            group["per"] = per


def _check(opt: BlockOptimizer, state_dict: State) -> None:
    owner = type(opt).__name__
    for own, saved in zip(opt.param_groups, state_dict["param_groups"], strict=False):
        per = own["per"] if isinstance(own["per"], list) else saved.get("per", own["per"])
        group = {**own, **saved, "per": per, "params": own["params"]}
        for i, key in enumerate(saved["params"][: len(own["params"])]):
            loaded, p = state_dict["state"].get(key, {}), own["params"][i]
            shapes = state.wanted(group, i, opt.direction(group, p))
            state.check_values(owner, p, loaded, shapes, group["nonfinite"])
            state.check(owner, "`state_dict`", p, loaded, shapes)


# ------------------------------------------------------------------------ earlier releases


def _in_todays_names(opt: BlockOptimizer, state_dict: State) -> State:
    """The same with the buffers of an earlier release as velocities; nothing is written to."""
    states = dict(state_dict["state"])
    for saved in state_dict["param_groups"]:
        for key in saved["params"]:
            if key in states:
                states[key] = read(states[key], opt.earlier_state, saved.get("lr", 1.0))
    return {**state_dict, "state": states}


def read(its: State, earlier: Readings, lam: Any) -> State:
    """One parameter's state, with the buffers of an earlier release as its velocity.

    Those had no λ in them, as they were multiplied by the present one: by `lam`, of the step that
    comes next.
    """
    for name, reading in earlier.items():
        if isinstance(its.get(name), Tensor):
            rest = {key: value for key, value in its.items() if key != name}
            its = {**rest, "velocity": reading(its[name], its, lam)}
    return its


def sum_without_rate(buf: Tensor, its: State, lam: Any) -> Tensor:
    """λ·buf, of the sum buf ← μ·buf + g/b that 0.1 kept."""
    return _times(buf, torch.as_tensor(lam, dtype=torch.float64))


def mean_without_rate(m: Tensor, its: State, lam: Any) -> Tensor:
    """(λ/b)·m, of the mean m ← β·m + (1−β)·g that 0.1 kept; 0 where there is no b yet."""
    b = its.get("b")
    if not isinstance(b, Tensor) or b.dim() != m.dim():
        return m  # It will be refused.
    b = sharded.local(b).to(blocks.accumulator(b.device))
    rate = torch.as_tensor(lam, dtype=b.dtype).to(b.device) / torch.where(b == 0, torch.inf, b)
    return _times(m, rate)


def _times(buffer: Tensor, rate: Tensor) -> Tensor:
    """A copy of a buffer, times a rate for each of its blocks."""
    new = buffer.detach().clone()
    local = sharded.local(new)
    shape = (1,) * local.dim() if rate.numel() == 1 else tuple(rate.shape)
    if any(d % n if n else d for n, d in zip(shape, local.shape, strict=True)):
        return new  # It will be refused.
    split, at = blocks.split(local, shape)
    split.copy_(split.to(torch.promote_types(split.dtype, rate.dtype)) * rate.view(at))
    return new
