"""Checkpoints: a run that goes on is the run that was not interrupted."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from wngrad.conformance.subject import (
    Failed,
    NotApplicable,
    Subject,
    apart,
    held,
    network,
    ones,
    probe,
    pull,
    repeat,
    same,
    train,
)


def _resumed(make: Subject, dtype: torch.dtype) -> None:
    model, other = network(0, dtype), network(7, dtype)
    opt, again = make(model.parameters()), make(other.parameters())
    train(make, model, opt, 8)
    make.load(other, again, make.saved(model, opt))
    train(make, model, opt, 8, first=8)
    train(make, other, again, 8, first=8)
    if not same(model, other):
        raise Failed(f"eight steps after resuming, parameters differ by {apart(model, other)}")
    kept, found = (tree_leaves(o.state_dict()) for o in (opt, again))
    for a, b in zip(kept, found, strict=True):
        if isinstance(a, Tensor) and (a.dtype != b.dtype or not torch.equal(a, b)):
            raise Failed(f"state comes back rounded: {a.dtype} was saved, {b.dtype} is loaded")


@probe(
    "resume",
    does="Saves, loads into a fresh pair with weights_only=True, compares bit for bit.",
    why="Every long run is interrupted.",
    failing="A jump in the loss after a restart: something was not in the state_dict.",
)
def resume(make: Subject) -> None:
    _resumed(make, torch.float32)


@probe(
    "resume in bfloat16",
    does="The same with bfloat16 parameters.",
    why="load_state_dict casts state to the parameter's dtype, unless the optimizer sees to it.",
    failing="Float32 statistics come back rounded to 8 bits.",
)
def resume_bfloat16(make: Subject) -> None:
    _resumed(make, torch.bfloat16)


def _goes_on(make: Subject, model: nn.Module, opt: Any, other: nn.Module, again: Any) -> None:
    train(make, model, opt, 3, first=3)
    train(make, other, again, 3, first=3)
    if not same(model, other):
        raise Failed(f"three steps later its copy is apart by {apart(model, other)}")


@probe(
    "pickle",
    does="Pickles model and optimizer together, and trains both pairs on.",
    why="Spawned workers, Ray, whole-trainer snapshots.",
    failing="A PicklingError, or a copy that goes its own way.",
)
def pickled(make: Subject) -> None:
    model = network()
    opt = make(model.parameters())
    train(make, model, opt, 3)
    _goes_on(make, model, opt, *pickle.loads(pickle.dumps((model, opt))))


@probe(
    "deepcopy",
    does="Deep-copies model and optimizer together, and trains both pairs on.",
    why="Best-so-far snapshots, population training, a look ahead.",
    failing="The copy still moves the original, or has lost its state.",
)
def deepcopied(make: Subject) -> None:
    model = network()
    opt = make(model.parameters())
    train(make, model, opt, 3)
    _goes_on(make, model, opt, *copy.deepcopy((model, opt)))


@probe(
    "mismatched state",
    does="Loads the state of a (1, 3) parameter for a (4, 3) one, and steps.",
    why="The checkpoint of another model must be an error, at the latest at the next step.",
    failing="Shapes broadcast, and training goes on with another layer's statistics.",
)
def mismatched_state(make: Subject) -> str:
    small, large = ones(1, 3), ones(4, 3, value=2.0)
    opt, other = make([small]), make([large])
    repeat(make, opt, pull(small), 2)
    if not held(opt):
        raise NotApplicable("it keeps no state")
    try:
        other.load_state_dict(opt.state_dict())
    except Exception:
        return "refused at the load"
    make.train(other)
    try:
        make.step(other, pull(large))
    except Exception:
        return "refused at the next step"
    raise Failed("state of another shape is accepted, and the next step says nothing")
