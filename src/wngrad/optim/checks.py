"""Checks of values, parameters and gradients: a refusal names owner, argument, rule and value."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from wngrad.optim import memory
from wngrad.values import BInit, parse_b_init
from wngrad.values import finite as finite
from wngrad.values import flag as flag
from wngrad.values import real as real

Check = Callable[[str, str, object], Any]  # of (owner, name, value): the value as plain data

MAX_RATE = torch.finfo(torch.float32).max  # x moves in float32, or wider
_B_INIT = '`b_init` must be a number, "gradient" or ("gradient", C)'
_PLAIN_TENSORS = {Tensor, nn.Parameter}


# ---------------------------------------------------------------------------------- values


def item(value: object) -> object:
    """What a tensor of one element holds; all else as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def finite_item(owner: str, name: str, value: object) -> float:
    """A finite number ≥ 0, or a tensor of one element that holds it."""
    return finite(owner, name, item(value))


def fraction(owner: str, name: str, value: object) -> float:
    """A number in [0, 1), or a tensor of one element that holds it."""
    x = real(owner, name, value := item(value))
    if not 0 <= x < 1:
        raise ValueError(f"{owner}: `{name}` must be in [0, 1), got {value!r}.")
    return x


def or_none(check: Check) -> Check:
    """The same check of a setting that may also be None."""

    def checked(owner: str, name: str, value: object) -> Any:
        return None if value is None else check(owner, name, value)

    return checked


def one_of(owner: str, name: str, value: object, names: tuple[str, ...], more: str = "") -> str:
    if not isinstance(value, str) or value not in names:
        listed = ", ".join(map(repr, names))
        raise ValueError(f"{owner}: `{name}` must be one of {listed}{more}, got {value!r}.")
    return str(value)


def choice(names: tuple[str, ...]) -> Check:
    """A check that a setting is one of these words."""
    return lambda owner, name, value: one_of(owner, name, value, names)


def b_init(owner: str, name: str, value: object) -> BInit:
    """b₁: a number, or ("gradient", C) for b₁ = C·λ·‖g₁‖."""
    word, number = parse_b_init(owner, value, _B_INIT)
    return number if word == "number" else ("gradient", number)


_WIDE = {torch.float64, torch.complex128}


def representable(owner: str, start: object, dtype: torch.dtype) -> None:
    """b₁ as a number must be one in the type of b, for parameters of this type."""
    dtype = torch.float64 if dtype in _WIDE else torch.float32
    info = torch.finfo(dtype)
    if isinstance(start, float) and not info.tiny <= start <= info.max:
        raise ValueError(
            f"{owner}: `b_init` must be within {info.tiny:.3g} and {info.max:.3g}, the range of "
            f"{dtype}, got {start!r}."
        )


# --------------------------------------------------------------------------------------- λ


def rate(owner: str, value: object) -> float | Tensor:
    """λ: a number ≥ 0, or a tensor of one element."""
    number = scalar(owner, value).item() if isinstance(value, Tensor) else value
    if finite(owner, "lr", number) > MAX_RATE:
        raise ValueError(f"{owner}: `lr` must be <= {MAX_RATE:g}, got {value!r}.")
    return value if isinstance(value, Tensor) else real(owner, "lr", value)


def rate_now(owner: str, lr: object) -> None:
    """λ as a number that was set after the start: finite."""
    if not abs(real(owner, "lr", lr)) <= MAX_RATE:  # also catches nan
        raise ValueError(f"{owner}: `lr` must be finite and <= {MAX_RATE:g}, got {lr!r}.")


def scalar(owner: str, lr: Tensor) -> Tensor:
    """A tensor λ without its dimensions."""
    if lr.numel() != 1 or lr.dim() > 2 or lr.is_complex():
        raise ValueError(
            f"{owner}: `lr` as a tensor must have one real element in 0 to 2 dimensions (Tensor lr "
            f"must be 1-element), got shape {tuple(lr.shape)} and dtype {lr.dtype}."
        )
    return lr.reshape(())


# -------------------------------------------------------------------- parameters, gradients


def iterable(owner: str, params: Any) -> None:
    """Parameters or groups; a model must be asked for its own."""
    if isinstance(params, nn.Module) and not isinstance(params, nn.ParameterList):
        kind = type(params).__name__
        raise TypeError(
            f"{owner}: `params` must be parameters or groups of them, got a model of class {kind}; "
            f"use `model.parameters()`."
        )
    if not isinstance(params, Iterable):
        raise TypeError(f"{owner}: `params` must be parameters or groups of them, got {params!r}.")


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


def gradient(owner: str, p: Tensor, g: Tensor, *, dense: dict[str, bool]) -> None:
    """A gradient the step can take; checked for all parameters before any of them changes.

    Args:
        dense: what moves entries that have no gradient, and so takes no sparse one, if it is used.
    """
    if g.shape != p.shape or g.device != p.device:
        raise ValueError(
            f"{owner}: `grad` must have the shape and device of its parameter, got "
            f"{tuple(g.shape)} on {g.device} for a parameter of shape {tuple(p.shape)} on "
            f"{p.device}."
        )
    solid = not torch.compiler.is_compiling() and type(p) in _PLAIN_TENSORS
    if solid and type(g) is Tensor and not g.is_sparse and memory.overlap_in_part(p, g):
        raise ValueError(
            f"{owner}: `grad` must not overlap its parameter in memory, got one that does for a "
            f"parameter of shape {tuple(p.shape)}; clone it first."
        )
    if g.is_sparse and any(dense.values()):
        used = " and ".join(name for name, is_used in dense.items() if is_used)
        raise ValueError(
            f"{owner}: a sparse `grad` does not go with {used}, which would have to "
            f"touch every row; got one for a parameter of shape {tuple(p.shape)}. Use WNGrad "
            f"without `momentum`, `weight_decay` and `average`, or a dense gradient."
        )


def refuse_nonfinite(owner: str, p: Tensor, count: int) -> NoReturn:
    """`nonfinite="raise"` has met a gradient that it must not step on."""
    raise ValueError(
        f"{owner}: `nonfinite` is 'raise', and the gradient of {count} blocks or more of "
        f"a parameter of shape {tuple(p.shape)} is not finite or too large. Nothing was "
        f"changed."
    )
