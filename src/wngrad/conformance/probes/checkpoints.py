"""Checkpoints: a run that goes on is the run that was not interrupted."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from wngrad.conformance.compare import apart, held, same
from wngrad.conformance.registry import probe
from wngrad.conformance.subject import Subject
from wngrad.conformance.training import fresh, ones, pull, repeat, train
from wngrad.conformance.verdicts import Failed, NotApplicable


def _resumed(make: Subject, dtype: torch.dtype) -> None:
    (model, opt), (other, again) = fresh(make, 0, dtype), fresh(make, 7, dtype)
    train(make, model, opt, 8)
    make.load(other, again, make.saved(model, opt))
    train(make, model, opt, 8, first=8)
    train(make, other, again, 8, first=8)
    if not same(model, other):
        raise Failed(f"eight steps after resuming, parameters differ by {apart(model, other)}")
    for a, b in zip(*(tree_leaves(o.state_dict()) for o in (opt, again)), strict=True):
        if isinstance(a, Tensor) and (a.dtype != b.dtype or not torch.equal(a, b)):
            raise Failed(f"state comes back rounded: {a.dtype} was saved, {b.dtype} is loaded")


@probe("resume")
def resume(make: Subject) -> None:
    _resumed(make, torch.float32)


@probe("resume in bfloat16")
def resume_bfloat16(make: Subject) -> None:
    _resumed(make, torch.bfloat16)


def _goes_on(make: Subject, copied: Callable[[Any], Any]) -> None:
    model, opt = fresh(make)
    train(make, model, opt, 3)
    other, again = copied((model, opt))
    train(make, model, opt, 3, first=3)
    train(make, other, again, 3, first=3)
    if not same(model, other):
        raise Failed(f"three steps later its copy is apart by {apart(model, other)}")


@probe("pickle")
def pickled(make: Subject) -> None:
    _goes_on(make, lambda pair: pickle.loads(pickle.dumps(pair)))


@probe("deepcopy")
def deepcopied(make: Subject) -> None:
    _goes_on(make, copy.deepcopy)


@probe("mismatched state")
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
