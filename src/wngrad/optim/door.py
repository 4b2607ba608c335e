"""What may come in: every check of an argument, in one form of words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Nonfinite = Literal["propagate", "skip", "raise"]
BInit = float | Literal["gradient"] | tuple[Literal["gradient"], float]

_MAX_RATE = 1e150  # λ² must be a number.
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


def fraction(owner: str, name: str, value: object) -> float:
    """A number in [0, 1)."""
    x = real(owner, name, value)
    if not 0 <= x < 1:
        raise ValueError(f"{owner}: `{name}` must be in [0, 1), got {value!r}.")
    return x


def flag(owner: str, name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{owner}: `{name}` must be True or False, got {value!r}.")
    return value


def rate(owner: str, value: object) -> float | Tensor:
    """λ: a number ≥ 0, or a tensor of one element."""
    number = scalar(owner, value).item() if isinstance(value, Tensor) else value
    if finite(owner, "lr", number) > _MAX_RATE:
        raise ValueError(f"{owner}: `lr` must be <= {_MAX_RATE:g}, got {value!r}.")
    return value if isinstance(value, Tensor) else real(owner, "lr", value)


def scalar(owner: str, lr: Tensor) -> Tensor:
    """A tensor λ without its dimensions."""
    if lr.numel() != 1 or lr.dim() > 2 or lr.is_complex():
        raise ValueError(
            f"{owner}: `lr` as a tensor must have one real element in 0 to 2 dimensions, "
            f"got shape {tuple(lr.shape)} and dtype {lr.dtype}."
        )
    return lr.reshape(())


def b_init(owner: str, value: object) -> BInit:
    """b₁: a number, or ("gradient", C) for b₁ = C·λ·‖g₁‖."""
    if isinstance(value, str) and value == "gradient":
        return ("gradient", 1.0)
    if isinstance(value, str):
        raise ValueError(f"{owner}: {_B_INIT}, got {value!r}.")
    if isinstance(value, Sequence):
        if len(value) != 2 or value[0] != "gradient":
            raise ValueError(f"{owner}: {_B_INIT}, got {value!r}.")
        return ("gradient", finite(owner, "b_init", value[1], above=0))
    return finite(owner, "b_init", value, above=0)


def nonfinite(owner: str, value: object) -> str:
    if not isinstance(value, str) or value not in get_args(Nonfinite):
        names = ", ".join(map(repr, get_args(Nonfinite)))
        raise ValueError(f"{owner}: `nonfinite` must be one of {names}, got {value!r}.")
    return str(value)


def common(owner: str, group: dict[str, Any]) -> dict[str, Any]:
    """The settings both optimizers have, checked and as plain data."""
    flags = ["decoupled_weight_decay", "hold_1d", "joint", "maximize", "differentiable"]
    flags.append("stochastic_rounding")
    return {
        "lr": rate(owner, group["lr"]),
        "b_init": b_init(owner, group["b_init"]),
        "weight_decay": finite(owner, "weight_decay", group["weight_decay"]),
        "nonfinite": nonfinite(owner, group["nonfinite"]),
        "fused": None if group["fused"] is None else flag(owner, "fused", group["fused"]),
        **{name: flag(owner, name, group[name]) for name in flags},
    }


def settings(owner: str, group: dict[str, Any], part: str) -> None:
    """What may have been changed in a group since, looked at before each step.

    Args:
        part: the name of μ or β.
    """
    group["b_init"] = b_init(owner, group["b_init"])
    nonfinite(owner, group["nonfinite"])
    group["weight_decay"] = finite(owner, "weight_decay", group["weight_decay"])
    group[part] = fraction(owner, part, group[part])


def representable(owner: str, start: BInit, dtype: torch.dtype) -> None:
    """b₁ as a number must be one in b's type."""
    info = torch.finfo(dtype)
    if isinstance(start, float) and not info.tiny <= start <= info.max:
        raise ValueError(
            f"{owner}: `b_init` must be within {info.tiny:.3g} and {info.max:.3g}, the range of "
            f"{dtype}, got {start!r}."
        )


def listed(owner: str, group: Any) -> Any:
    """The parameters of a group as a list; a set is left for torch to refuse."""
    if not isinstance(group, dict):
        raise TypeError(f"{owner}: `param_group` must be a dict, got {type(group).__name__}.")
    if "params" not in group:
        raise ValueError(f"{owner}: `params` must be in every group, got {sorted(group)}.")
    params = group["params"]
    if isinstance(params, Tensor):
        return [params]
    return params if isinstance(params, set) else list(params)


def parameters(owner: str, params: Any) -> list[Tensor]:
    """The tensors of a group, each of a type that can be trained; torch checks the rest."""
    tensors = [p[1] if isinstance(p, tuple) and len(p) == 2 else p for p in params]
    for p in tensors:
        if not isinstance(p, Tensor):
            raise TypeError(f"{owner}: `params` must hold tensors, got {p!r}.")
        if not (p.is_floating_point() or p.is_complex()):
            raise TypeError(
                f"{owner}: `params` must be of a floating-point or complex type, got {p.dtype} "
                f"for a parameter of shape {tuple(p.shape)}."
            )
    return tensors


def gradient(owner: str, p: Tensor, g: Tensor, *, touches_all: bool) -> None:
    """A gradient the step can take; checked for all parameters before any of them changes."""
    if g.is_sparse and touches_all:
        raise ValueError(
            f"{owner}: a sparse `grad` works without `momentum` and `weight_decay` only: both "
            f"touch every row; got one for a parameter of shape {tuple(p.shape)}. Use WNGrad "
            f"without them, or a dense gradient."
        )
