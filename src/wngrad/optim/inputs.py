"""Checks of parameters and gradients: what an optimizer is handed, and what a step finds there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from wngrad.optim import memory

_PLAIN_TENSORS = {Tensor, nn.Parameter}


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


def gradient(owner: str, p: Tensor, g: Tensor, *, dense: list[str]) -> None:
    """A gradient the step can take; checked for all parameters before any of them changes.

    Args:
        dense: what moves entries that have no gradient, and so takes no sparse one.
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
    if g.is_sparse and dense:
        raise ValueError(
            f"{owner}: a sparse `grad` does not go with {' and '.join(dense)}, which would have to "
            f"touch every row; got one for a parameter of shape {tuple(p.shape)}. Use WNGrad "
            f"without `momentum`, `weight_decay` and `average`, or a dense gradient."
        )
