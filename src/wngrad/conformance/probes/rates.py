"""Groups and rates: every lr counts, wherever it comes from."""

from __future__ import annotations

import torch

from wngrad.conformance.compare import copies, finite
from wngrad.conformance.registry import probe
from wngrad.conformance.subject import Subject
from wngrad.conformance.training import batch, fresh, ones, pull, repeat, train
from wngrad.conformance.verdicts import Failed, unless_refused


@probe("lr = 0 group")
def lr_zero_group(make: Subject) -> None:
    make.lr()
    still, free = ones(4, 3), ones(4, 3)
    with unless_refused("group"):
        opt = make([{"params": [free]}, {"params": [still], "lr": 0.0}])
    repeat(make, opt, pull(free, still))
    if not torch.equal(still, ones(4, 3)):
        raise Failed("the group with lr = 0 has moved")
    if torch.equal(free, ones(4, 3)):
        raise Failed("the other group does not move")


@probe("per-group lr")
def per_group_lr(make: Subject) -> str:
    lr = make.lr() / 1000  # Where lr is a cap, small enough to be one.
    fast, slow = ones(4, 3), ones(4, 3)
    with unless_refused("lr", "learning rate", "group"):
        opt = make([{"params": [fast], "lr": lr}, {"params": [slow], "lr": lr / 4}])
        repeat(make, opt, pull(fast, slow))
    far, near = (float((1 - p).detach().norm()) for p in (fast, slow))
    if not 0 < near < far:
        raise Failed(f"at a quarter of the lr a group moves {near:.2g}, the other one {far:.2g}")
    return f"a quarter of the lr moves {near / far:.2g} × as far"


@probe("scheduler to 0")
def scheduler_to_zero(make: Subject) -> None:
    make.lr()
    model, opt = fresh(make)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.0, total_iters=4)
    for seed in range(4):
        make.step(opt, batch(model, seed))
        schedule.step()
    before = copies(model.parameters())
    train(make, model, opt, 2, first=4)
    if not all(map(torch.equal, before, model.parameters())):
        raise Failed("the parameters move although the scheduler has taken lr to 0")


@probe("tensor lr")
def tensor_lr(make: Subject) -> None:
    lr = make.lr()
    p, q = ones(4, 3), ones(4, 3)
    rate = torch.tensor(lr, dtype=torch.float64)
    with unless_refused("lr", "learning rate"):
        opt, other = make([p], lr=rate), make([q])
    for value in (lr, lr / 2):
        other.param_groups[0]["lr"] = value
        opt.param_groups[0]["lr"].fill_(value)
        repeat(make, opt, pull(p))
        repeat(make, other, pull(q))
        if float(opt.param_groups[0]["lr"]) != value:
            raise Failed("a step changes the lr tensor")
    if not finite([p]):
        raise Failed("NaN with a tensor lr")
    if not (p - q).detach().norm() <= 1e-6 * (1 - q).detach().norm():
        raise Failed("a tensor lr gives other steps than the same number")


@probe("late group")
def late_group(make: Subject) -> None:
    first, late = ones(4, 3), ones(4, 3)
    opt = make([first])
    repeat(make, opt, pull(first), 3)
    with unless_refused("group"):
        opt.add_param_group({"params": [late]})
        make.train(opt)
        repeat(make, opt, pull(first, late))
    if torch.equal(late, ones(4, 3)):
        raise Failed("the added group never moves")
    if not finite([first, late]):
        raise Failed("NaN after a group was added")
