"""Checks of settings: each refusal names owner, argument, rule and value.

Those of parameters and gradients are in `inputs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from numbers import Real
from operator import is_, itemgetter
from typing import Any, Literal, NoReturn, TypedDict, cast, get_args

import torch
from torch import Tensor

from wngrad.b_init import parse_b_init
from wngrad.optim import sharded
from wngrad.optim.blocks import NAMES, Per, Shape, named_shape, resolve

Nonfinite = Literal["propagate", "skip", "raise"]
BInit = float | Literal["gradient"] | tuple[Literal["gradient"], float]
Check = Callable[[str, str, object], Any]  # of (owner, name, value): the value as plain data

_MAX_RATE = torch.finfo(torch.float32).max  # x moves in float32, or wider
_B_INIT = '`b_init` must be a number, "gradient" or ("gradient", C)'


def real(owner: str, name: str, value: object) -> float:
    """`value` as a float; booleans, strings and arrays are refused."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{owner}: `{name}` must be a number, got {value!r}.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{owner}: `{name}` must be finite, got a number too large.") from None


def finite(owner: str, name: str, value: object, *, above: float | None = None) -> float:
    """A finite number ≥ 0, or > `above` where that is given."""
    x = real(owner, name, value)
    if above is not None and not (x > above and math.isfinite(x)):
        raise ValueError(f"{owner}: `{name}` must be > {above:g} and finite, got {value!r}.")
    if not (x >= 0 and math.isfinite(x)):  # also catches nan
        raise ValueError(f"{owner}: `{name}` must be >= 0 and finite, got {value!r}.")
    return x


def item(value: object) -> object:
    """What a tensor of one element holds; all else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def fraction(owner: str, name: str, value: object) -> float:
    """A number in [0, 1), or a tensor of one element that holds it."""
    x = real(owner, name, value := item(value))
    if not 0 <= x < 1:
        raise ValueError(f"{owner}: `{name}` must be in [0, 1), got {value!r}.")
    return x


def _decay(owner: str, name: str, value: object) -> float:
    return finite(owner, name, item(value))


def flag(owner: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: `{name}` must be True or False, got {value!r}.")
    return value


def one_of(owner: str, name: str, value: object, names: tuple[str, ...], more: str = "") -> str:
    if not isinstance(value, str) or value not in names:
        listed = ", ".join(map(repr, names))
        raise ValueError(f"{owner}: `{name}` must be one of {listed}{more}, got {value!r}.")
    return str(value)


def rate(owner: str, value: object) -> float | Tensor:
    """λ: a number ≥ 0, or a tensor of one element."""
    number = scalar(owner, value).item() if isinstance(value, Tensor) else value
    if finite(owner, "lr", number) > _MAX_RATE:
        raise ValueError(f"{owner}: `lr` must be <= {_MAX_RATE:g}, got {value!r}.")
    return value if isinstance(value, Tensor) else real(owner, "lr", value)


def rate_now(owner: str, lr: object) -> None:
    """λ as it was set after the start: a finite number, or a tensor, of which a step reads more."""
    if isinstance(lr, Tensor) or (type(lr) is float and -_MAX_RATE <= lr <= _MAX_RATE):
        return
    if not abs(real(owner, "lr", lr)) <= _MAX_RATE:  # also catches nan
        raise ValueError(f"{owner}: `lr` must be finite and <= {_MAX_RATE:g}, got {lr!r}.")


def scalar(owner: str, lr: Tensor) -> Tensor:
    """A tensor λ without its dimensions."""
    if lr.numel() != 1 or lr.dim() > 2 or lr.is_complex():
        raise ValueError(
            f"{owner}: `lr` as a tensor must have one real element in 0 to 2 dimensions (Tensor lr "
            f"must be 1-element), got shape {tuple(lr.shape)} and dtype {lr.dtype}."
        )
    return lr.reshape(())


def b_init(owner: str, name: str, value: object) -> BInit:
    """b₁: a number, or ("gradient", C) for b₁ = C·λ·‖g₁‖."""
    word, number = parse_b_init(owner, value, _B_INIT)
    return number if word == "number" else ("gradient", number)


def _nonfinite(owner: str, name: str, value: object) -> str:
    return one_of(owner, name, value, get_args(Nonfinite))


def flag_or_none(owner: str, name: str, value: object) -> bool | None:
    return None if value is None else flag(owner, name, value)


def _finite_or_none(owner: str, name: str, value: object) -> float | None:
    return None if value is None else finite(owner, name, value)


def _per(owner: str, name: str, value: object) -> object:
    """A name, or the shapes that `blocks.resolve` has made of a callable or a list."""
    if isinstance(value, list):
        if not all(isinstance(shape, (tuple, list)) for shape in value):
            raise TypeError(
                f"{owner}: `{name}` must hold a shape for each parameter, got {value!r}."
            )
        return tuple(map(tuple, value))
    return one_of(owner, name, value, NAMES, " or a callable")


# ----------------------------------------------------------------------- a group's settings


class Options(TypedDict, total=False):
    """The keyword arguments that every optimizer takes; `WNGrad` says what each of them does."""

    weight_decay: float
    decoupled_weight_decay: bool
    b_init: BInit
    per: Per
    hold_1d: bool
    joint: bool
    nonfinite: Nonfinite
    maximize: bool
    differentiable: bool
    fused: bool | None
    stochastic_rounding: bool
    average: float | None
    foreach: bool | None  # for torch's sake; the plain step is over lists anyway


DEFAULTS: Options = {
    "weight_decay": 0.0,
    "decoupled_weight_decay": False,
    "b_init": 1.0,
    "per": "neuron",
    "hold_1d": False,
    "joint": False,
    "nonfinite": "propagate",
    "maximize": False,
    "differentiable": False,
    "fused": None,
    "stochastic_rounding": False,
    "average": None,
}
_CHECKS: dict[str, Check] = {
    "weight_decay": _decay,
    "decoupled_weight_decay": flag,
    "b_init": b_init,
    "hold_1d": flag,
    "joint": flag,
    "nonfinite": _nonfinite,
    "maximize": flag,
    "differentiable": flag,
    "fused": flag_or_none,
    "stochastic_rounding": flag,
    "average": _finite_or_none,
    "per": _per,
}
_PLAIN = {float, bool, str, tuple, type(None)}


@dataclass(frozen=True, slots=True, eq=False)
class Settings:
    """The settings that every optimizer has, checked: what a step of a group depends on.

    Equal settings are one object, as far as they are cached.
    """

    weight_decay: float
    decoupled_weight_decay: bool
    b_init: float | tuple[str, float]
    hold_1d: bool
    joint: bool  # the parameters share their b, block by block
    nonfinite: str
    maximize: bool
    differentiable: bool
    fused: bool | None
    stochastic_rounding: bool
    average: float | None  # η of the polynomial average
    per: str | tuple[Shape, ...]

    @property
    def c(self) -> float | None:
        """C of b₁ = C·λ·‖g₁‖; None where b₁ is a number."""
        return self.b_init[1] if isinstance(self.b_init, tuple) else None

    @property
    def shares(self) -> bool:
        """Whether a group's parameters share their b."""
        return self.joint or self.per == "model"

    @property
    def choices(self) -> tuple[object, ...]:
        """All but numbers that a kernel reads anew in each step."""
        numbers = (self.weight_decay != 0, self.b_init if self.c is None else None)
        flags = (self.decoupled_weight_decay, self.hold_1d, self.joint, self.nonfinite)
        rest = (self.differentiable, self.fused, self.stochastic_rounding, self.per)
        return (*numbers, *flags, *rest, self.average is None)


Own = tuple[tuple[str, Check], ...]  # the settings that one optimizer adds, each with its check


def plain(owner: str, group: Mapping[str, Any], own: Own) -> dict[str, Any]:
    """Every setting of a new group but `per`, checked and as plain data.

    A tensor that stands for a number stays: it may change in place, and is read in each step.
    """
    every = {**_CHECKS, **dict(own)}
    del every["per"]
    settings = {name: check(owner, name, group[name]) for name, check in every.items()}
    tensors = {name: group[name] for name in settings if isinstance(group[name], Tensor)}
    return {"lr": rate(owner, group["lr"]), **settings, **tensors}


def defaults(owner: str, settings: dict[str, Any], own: Own) -> None:
    """Check what an optimizer is made with, before it looks at its parameters."""
    plain(owner, settings, own)
    if isinstance(settings["per"], str):
        _per(owner, "per", settings["per"])
    flag_or_none(owner, "foreach", settings.get("foreach"))


def numbers(group: dict[str, Any]) -> dict[str, Any]:
    """The group with numbers in the place of tensors but λ; itself where there are none."""
    tensors = [name for name, v in group.items() if isinstance(v, Tensor) and name != "lr"]
    return {**group, **{name: item(group[name]) for name in tensors}} if tensors else group


_MEMORIZED = 256
# By a group's id: its values, who has to fit them, and the settings.
Memo = dict[int, tuple[tuple[Any, ...], tuple[int, ...], Settings]]


def settings(owner: str, group: dict[str, Any], own: Own, memo: Memo | None = None) -> Settings:
    """The settings of a group as they are now, checked before each step.

    The check and the key under which a fused step is cached are one and the same record, so that
    neither can know of a setting that the other does not.

    Args:
        memo: what was checked before; the same objects need no second check. None for a compiler,
            which knows neither `itemgetter` nor caches.
    """
    if memo is None:
        return _checked(owner, own, tuple(group[name] for name in (*_CHECKS, *dict(own))))
    values, fitting = _values(own)(group), _fitting(group)
    known = memo.get(id(group))
    if known is not None and fitting == known[1] and all(map(is_, values, known[0])):
        return known[2]
    checked = _now(owner, group, own, values)
    _fit(owner, group)
    if any(isinstance(value, Tensor) for value in values):  # which may change in place
        return checked
    if len(memo) >= _MEMORIZED:  # of groups that may be gone
        memo.clear()
    memo[id(group)] = _values(own)(group), fitting, checked
    return checked


def _fitting(group: dict[str, Any]) -> tuple[int, ...]:
    """The ids of the parameters that must fit `per` or `joint`: a group may be edited."""
    each_its_own = not group["joint"] and not isinstance(group["per"], list)
    return () if each_its_own else tuple(map(id, group["params"]))


@cache
def _values(own: Own) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """A function that reads a group's settings, those that one optimizer adds at the end."""
    return itemgetter(*_CHECKS, *dict(own))


def _now(owner: str, group: dict[str, Any], own: Own, values: tuple[Any, ...]) -> Settings:
    if isinstance(group["b_init"], str) or not _PLAIN.issuperset(map(type, values)):
        for name, check in (*_CHECKS.items(), *own):
            # `per` stays a list of shapes, and a tensor what it is.
            if name != "per" and not isinstance(group[name], Tensor):
                group[name] = check(owner, name, group[name])
        values = tuple(map(item, _values(own)(group)))
    try:
        return _cached(owner, own, values)
    except TypeError:  # perhaps a tuple of something that cannot be a key
        return _checked(owner, own, values)


def _fit(owner: str, group: dict[str, Any]) -> None:
    """Refuse shapes in `per`, or a `joint`, that do not fit the group's parameters."""
    params, per = group["params"], group["per"]
    if isinstance(per, list):
        shapes = cast(list[Shape], resolve(owner, per, params))
    elif group["joint"]:
        shapes = [named_shape(tuple(p.shape), per) for p in params]
    if group["joint"]:
        sharded.check_joint(owner, params, shapes)


def _checked(owner: str, own: Own, values: tuple[Any, ...]) -> Settings:
    pairs = zip((*_CHECKS.items(), *own), values, strict=True)
    checked = [check(owner, name, value) for (name, check), value in pairs]
    return Settings(*checked[: len(_CHECKS)])


_cached = lru_cache(maxsize=1024, typed=True)(_checked)


# ------------------------------------------------------------------------------- refusals


_INSTEAD = {  # of arguments that torch's optimizers take
    "beta": "use `momentum`",
    "betas": "use `momentum` (`beta` of WNAdam) for the first; b takes no second",
    "eps": "leave it out, since b is never 0",
    "nesterov": "leave it out, and use `momentum` alone",
    "dampening": "leave it out, and use `momentum` alone",
    "amsgrad": "leave it out, since b never decreases",
    "capturable": "leave it out, since any step can be captured in a CUDA graph",
    "lr_decay": "leave it out, since b decreases the rate",
    "initial_accumulator_value": "use `b_init`",
    # and that learning-rate-free ones take
    "decouple": "use `decoupled_weight_decay`",
    "d0": "leave it out, since there is no distance to find",
    "d_coef": "use `lr`",
    "use_bias_correction": "leave it out, since means are unbiased already",
    "safeguard_warmup": "leave it out, since a warm-up may multiply `lr` as it likes",
    "warmup_steps": "leave it out, or use a scheduler",
}


def refuse_argument(owner: str, name: str, value: object) -> NoReturn:
    """An argument that no optimizer here has, perhaps one of torch's."""
    instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise TypeError(f"{owner}: `{name}` is not an argument, got {value!r}{instead}.")


def refuse_nonfinite(owner: str, p: Tensor, count: int) -> NoReturn:
    """`nonfinite="raise"` has met a gradient that it must not step on."""
    raise ValueError(
        f"{owner}: `nonfinite` is 'raise', and the gradient of {count} blocks or more of "
        f"a parameter of shape {tuple(p.shape)} is not finite or too large. Nothing was "
        f"changed."
    )


def representable(owner: str, start: object, dtype: torch.dtype) -> None:
    """b₁ as a number must be one in b's type."""
    info = torch.finfo(dtype)
    if isinstance(start, float) and not info.tiny <= start <= info.max:
        raise ValueError(
            f"{owner}: `b_init` must be within {info.tiny:.3g} and {info.max:.3g}, the range of "
            f"{dtype}, got {start!r}."
        )
