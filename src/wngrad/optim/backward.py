"""A step inside backward: each parameter moves when its gradient is there, and frees it.

A block's b asks for the gradient of that block alone, so nothing is gained by waiting for the
others, and the gradients of the whole model need never be in memory at once.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from wngrad.optim import report, sharded
from wngrad.optim.optimizer import BlockOptimizer
from wngrad.optim.orthogonal_sharded import is_cut
from wngrad.optim.settings import Group
from wngrad.optim.state import shape_of

_OWNER = "step_in_backward"


class Released:
    """The hooks of `step_in_backward`; `remove`, or the end of a `with`, takes them off."""

    def __init__(self, hooks: list[RemovableHandle]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Back to the ordinary loop; what has stepped keeps its state."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __enter__(self) -> Released:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def step_in_backward(optimizer: BlockOptimizer) -> Released:
    """Step every parameter as soon as its gradient is complete, and free the gradient.

    The training loop stays as it is. Its `optimizer.step()` takes the step of whatever `backward`
    has left: parameters added or unfrozen later, and those of a `joint` group one of which has had
    no gradient. Rule, state and checkpoints are those of the ordinary loop, bit for bit.

    Args:
        optimizer: one of ours, but neither `per="model"` nor `nonfinite="raise"`, which need every
            gradient first.

    Returns:
        A handle with `remove()`, which is a context manager, too.

    Note:
        One `backward` is one step: to sum up the gradients of several, use it around the last. What
        looks at all gradients between `backward` and `step` (clipping by the norm of the whole, a
        `GradScaler`, DistributedDataParallel) comes too late. FSDP2 does not.

    Example:
        >>> from wngrad import WNGrad
        >>> model = torch.nn.Linear(3, 2)
        >>> opt = WNGrad(model.parameters())
        >>> with step_in_backward(opt):
        ...     model(torch.ones(1, 3)).sum().backward()
        >>> model.weight.grad is None, opt.rates()[model.bias]  # b = 1 + 1²/1
        (True, tensor([0.5000, 0.5000]))
    """
    if not isinstance(optimizer, BlockOptimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"{_OWNER}: `optimizer` must be one of wngrad's, got {kind}.")
    _refuse_scaler(optimizer)
    for group in optimizer.param_groups:
        _check_settings(group)
        _check_places(optimizer, group)
    hooks = [optimizer.register_step_pre_hook(_refuse_scaler)]
    for number, group in enumerate(optimizer.param_groups):
        every = list(range(len(group["params"])))
        for places in [every] if group["joint"] else [[i] for i in every]:
            part = Part(optimizer, number, places)
            trained = [p for p in part.params if p.requires_grad]  # those that can have a hook
            hooks += [p.register_post_accumulate_grad_hook(part) for p in trained]
    return Released(hooks)


class Part:
    """Parameters that step together: one alone, or all of a `joint` group.

    Args:
        number: of their group.
        places: theirs in its "params".
    """

    def __init__(self, optimizer: BlockOptimizer, number: int, places: list[int]) -> None:
        self._optimizer, self.number, self.places = optimizer, number, places
        self.params = [optimizer.param_groups[number]["params"][i] for i in places]
        self.engine = optimizer._engine.of_part()
        self._steps = 0  # of `step_alone`

    def __call__(self, _: Tensor) -> None:
        """The hook: step, unless another's gradient is still to come, and free the gradients."""
        if any(p.grad is None and p.requires_grad for p in self.params):
            return
        if self.take():
            for p in self.params:
                p.grad = None

    def take(self) -> bool:
        """Step those that have a gradient; False if they are no longer the optimizer's."""
        groups = self._optimizer.param_groups
        params = groups[self.number]["params"] if self.number < len(groups) else []
        pairs = zip(self.places, self.params, strict=True)
        if not all(i < len(params) and params[i] is p for i, p in pairs):  # groups were changed
            for number, group in enumerate(groups):
                place_of = {id(p): i for i, p in enumerate(group["params"])}
                if all(id(p) in place_of for p in self.params):
                    self.number, self.places = number, [place_of[id(p)] for p in self.params]
                    break
            else:
                return False
        _check_settings(groups[self.number])
        self._optimizer._take(only=self)
        return True

    def step_alone(self) -> None:
        """Step, and warn of a small rate where nobody calls the optimizer's `step`, which does."""
        self._steps += 1
        if self._steps > report.WARN_AFTER >= self._optimizer._steps:
            self._optimizer._steps = report.WARN_AFTER + 1
            report.warn_of_small_rate(self._optimizer)
        self.take()


def step_parameter(optimizer: BlockOptimizer, p: Tensor, group: Group, i: int) -> None:
    """The step of one parameter; see `BlockOptimizer.step_parameter`."""
    numbers = [n for n, listed in enumerate(optimizer.param_groups) if listed is group]
    owner = type(optimizer).__name__
    if not numbers or not 0 <= i < len(group["params"]) or group["params"][i] is not p:
        raise ValueError(
            f"{owner}: `step_parameter` must be given one of the optimizer's groups and the place "
            f"of `p` in it, got a parameter of shape {tuple(p.shape)} and i = {i!r}."
        )
    _refuse_scaler(optimizer)
    if group["joint"]:
        _refuse("`joint` must be False for a step of one parameter; use `step_in_backward`.")
    part = optimizer._single_parts.get((numbers[0], i))
    if part is None or part.params[0] is not p:
        _check_places(optimizer, group)
        part = optimizer._single_parts[numbers[0], i] = Part(optimizer, numbers[0], [i])
    part.step_alone()


# ------------------------------------------------------------------------------ checks


def _refuse(rule: str) -> None:
    raise ValueError(f"{_OWNER}: {rule}")


def _check_settings(group: Group) -> None:
    """Looked at again in every hook, since a group's settings may change."""
    if group["per"] == "model":
        _refuse(
            "`per` must not be 'model', whose one b for the whole group needs every gradient "
            "first; use 'tensor' or 'neuron'."
        )
    if group["nonfinite"] == "raise":
        _refuse(
            "`nonfinite` must not be 'raise', which changes nothing before every gradient has "
            "been looked at; use 'skip'."
        )
    if group["differentiable"]:
        _refuse("`differentiable` must be False, since a gradient is freed once it is used.")


def _check_places(optimizer: BlockOptimizer, group: Group) -> None:
    params: list[Tensor] = group["params"]
    if group["joint"] and len({p.device for p in params}) > 1:
        _refuse(
            f"`joint` parameters must be on one device, whose backward is one thread, got "
            f"{[str(p.device) for p in params]}."
        )
    for i, p in enumerate(params):
        if sharded.is_sharded(p):
            direction = optimizer.direction(group, p)
            if direction.orthogonalizes and is_cut(p, cast(Any, direction).layout):
                _refuse(
                    f"`params` that are orthogonalized must have their matrices whole on a rank, "
                    f"or backward would wait for other ranks, got one of shape {tuple(p.shape)} "
                    f"that is cut; step after backward."
                )
            if sharded.is_cut(p, shape_of(group, i)):
                _refuse(
                    f"`per` must leave blocks whole on a rank, or backward would wait for other "
                    f"ranks, got {group['per']!r} for a sharded parameter of shape "
                    f"{tuple(p.shape)}; use 'neuron'."
                )
        elif torch.distributed.is_available() and torch.distributed.is_initialized():
            _refuse(
                f"`params` must be sharded (FSDP2) where there is a process group, since "
                f"DistributedDataParallel averages gradients after the step, got one of shape "
                f"{tuple(p.shape)} that is not."
            )


def _refuse_scaler(optimizer: Optimizer, *_: Any) -> None:
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        _refuse(
            "a GradScaler must not be used, since it looks at every gradient before the first "
            "step; use bfloat16, or `nonfinite` = 'skip' without a scaler."
        )
