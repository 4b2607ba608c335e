"""A sweep of a user's task: the checks before it, how each optimizer is run, and the report."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.func import vmap

from wngrad.lab.optimizers import OPTIMIZERS, SWEPT
from wngrad.lab.report import builder
from wngrad.lab.report.results import Results
from wngrad.lab.report.summary import Summary, summarize
from wngrad.lab.run.places import is_address
from wngrad.lab.run.store import Store
from wngrad.lab.train import loader, models, stack
from wngrad.lab.train.data import Data
from wngrad.lab.train.spec import Kind, Sweep
from wngrad.lab.train.task import Task, find

BRANCHES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep, and a line for each optimizer that says how it is run and why."""

    sweep: Sweep
    how: tuple[str, ...]


def plan(
    address: str,
    *,
    lam: Sequence[float],
    seeds: int = 3,
    optimizers: Sequence[str] = SWEPT,
    epochs: int | None = None,
    device: str = "cpu",
    program: Kind | None = None,
    lanes: int | None = None,
) -> Plan:
    """The sweep of a task: stacked where network and optimizer allow it, run as they are where not.

    Args:
        address: "file.py" (its `task`), "file.py:name" or "module:name".
        optimizers: names of `wngrad.lab.optimizers`, "module:Class" or "file.py:function";
            what is not a name is called as Class(params, lr=λ).
        device: "cpu", "cuda" or "auto".
        program: how to train side by side, instead of the choice made here.
        lanes: at most so many side by side, if memory is short.

    Raises:
        ValueError: there is no such task or optimizer, or the task does not work; in one line.
    """
    task = find(address)
    for name in optimizers:
        if name not in OPTIMIZERS:
            loader.load_callable(name, "optimizer", OPTIMIZERS)
    data = checked(task, address)
    chosen, why = (program, "") if program else _choose(task, data, device)
    alone = tuple(name for name in optimizers if name not in OPTIMIZERS and chosen != "lone")
    sweep = Sweep(
        name=task.name,
        claim="How much does the result depend on the learning rate?",
        dataset=task.name,
        model=task.name,
        optimizers=tuple(optimizers),
        lam=tuple(lam),
        epochs=task.epochs if epochs is None else epochs,
        seeds=tuple(range(seeds)),
        batch=task.batch,
        weight_decay=task.weight_decay,
        precision=task.precision,
        program=chosen,
        lanes_per_pack=lanes or (BRANCHES_AT_ONCE if chosen == "branches" else None),
        metrics=("test_loss", task.metric_key or "train_loss"),
        best_by="test_loss",
        task=address,
        metric_name=task.metric_name if task.metric else "",
        alone=alone,
    )
    return Plan(sweep, tuple(_how(sweep, name, why) for name in optimizers))


def grid(low: float, high: float, per_decade: int) -> tuple[float, ...]:
    """λ from `low` up to `high`, evenly spaced in log λ.

    >>> grid(0.01, 1, 2)
    (0.01, 0.0316228, 0.1, 0.316228, 1.0)
    """
    if not 0 < low <= high < math.inf or per_decade < 1:
        raise ValueError(
            "sweep: `lam` must go from a number > 0 up to a finite one, at least one a decade, "
            f"got {low!r}, {high!r} and {per_decade!r}."
        )
    steps = math.floor(per_decade * math.log10(high / low) + 1e-9)
    return tuple(float(f"{low * 10 ** (k / per_decade):.6g}") for k in range(steps + 1))


def folder(task: str) -> str:
    """A task's name as that of a folder."""
    return re.sub(r"[^\w.-]+", "-", task).strip("-.") or "task"


def report(
    plan: Plan, home: Path | str, usual: Path, command: str, warn: Callable[[str], None]
) -> Summary:
    """Write the report of a sweep from its records.

    Args:
        home: where they are; the report goes there, too, if it is a folder.
        usual: where the report goes if not.
        command: what the user typed; the report ends with it.
        warn: is called with a line for records that cannot be read.

    Raises:
        ValueError: there is no record of this sweep.
    """
    folder = usual if is_address(home) else Path(home)
    store = Store(home, warn=warn)
    records = store.records()
    results = Results(plan.sweep, records)
    written = builder.write(plan.sweep, records, folder, notes=plan.how, recipe=command)
    store.export(folder / "records.jsonl")
    return summarize(results, written)


# ------------------------------------------------------------------- checks of a task


def checked(task: Task, address: str) -> Data:
    """The task's data, once everything in it has been tried on one batch.

    Raises:
        ValueError: something in the task raises, or returns what it should not.
    """
    data = _call(address, "train", task.data) if callable(task.train) else task.data()

    def refuse(name: str, must: str, got: object) -> NoReturn:
        raise ValueError(f"{address}: `{name}` must {must}, got {got}.")

    if (count := len(data.train_y)) < task.batch:
        refuse("batch", f"be at most the {count} training examples", task.batch)
    x, y = _batch(task, data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _call(address, "model", task.model)
        if not isinstance(model, nn.Module) or not list(model.parameters()):
            refuse("model", "return a network with parameters", repr(model))
        output = _call(address, "model", model, x)
        if not isinstance(output, Tensor):
            refuse("model", "give a tensor", repr(output))
        loss = _call(address, "loss", task.loss, output, y)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            refuse("loss", "return one number with a gradient", _brief(loss))
        if task.metric is not None:
            value = _call(address, "metric", task.metric, output.detach(), y)
            if not isinstance(value, (int, float)) and getattr(value, "numel", int)() != 1:
                refuse("metric", "return one number", _brief(value))
    return data


def _batch(task: Task, data: Data) -> tuple[Tensor, Tensor]:
    x, y = data.train_x[: task.batch], data.train_y[: task.batch]
    return _float32(x), _float32(y)


def _float32(t: Tensor) -> Tensor:
    return t.float() if t.is_floating_point() else t


def _call(address: str, name: str, call: Any, *args: Any) -> Any:
    try:
        return call(*args)
    except ValueError as error:
        if str(error).startswith("Task: "):  # what we have to say ourselves
            raise
        raise _raised(address, name, error) from error
    except Exception as error:
        raise _raised(address, name, error) from error


def _raised(address: str, name: str, error: Exception) -> ValueError:
    file = loader.file_of(address)
    lines, trace = [], error.__traceback__
    while trace is not None:
        if file and Path(trace.tb_frame.f_code.co_filename) == Path(file).resolve():
            lines.append(trace.tb_lineno)
        trace = trace.tb_next
    where = f" at line {lines[-1]}" if lines else ""
    return ValueError(f"{address}: `{name}` raised{where}: {loader.error_text(error)}.")


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        frozen = "" if value.requires_grad else " without a gradient"
        return f"a tensor of shape {tuple(value.shape)}{frozen}"
    return repr(value)


# ---------------------------------------------------------------- how it is run


def _choose(task: Task, data: Data, device: str) -> tuple[Kind, str]:
    """The program for the optimizers that have a rule, and what keeps them from being stacked."""
    apart = why_not_at_once(task, data)
    why = why_not_stacked(task, data) or apart
    if why is None:
        return "stacked", ""
    cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    model = models.network(data.name, data, 0)
    scalars = any(p.ndim == 0 for p in model.parameters())
    if cuda and not apart and not scalars and models.why_not_together(model) is None:
        return "branches", why
    return "lone", why


def why_not_stacked(task: Task, data: Data) -> str | None:
    """What keeps the task's networks from being one stack, in words; None if nothing does.

    Asked of the layers first, and then of the arithmetic: on one batch the stack must give what
    the network gives.
    """
    model, (x, _) = models.network(data.name, data, 0).float(), _batch(task, data)
    if why := stack.why_not(model) or models.why_not_together(model):
        return f"the model cannot be stacked: {why}"
    try:
        with torch.no_grad():
            weights = [p[None, None] for p in model.parameters()]
            outputs = stack.Stack(cast(nn.Sequential, model))(weights, x[None])
            if _alike(outputs.movedim(2, 1)[0], model(x)):
                return None
    except (RuntimeError, IndexError):  # a shape that the stack does not know
        pass
    return f"the model cannot be stacked: not on inputs of shape {tuple(x.shape[1:])}"


def why_not_at_once(task: Task, data: Data) -> str | None:
    """What keeps the loss and the metric of many lanes from being taken as one; None: nothing."""
    x, y = _batch(task, data)
    with torch.no_grad():
        output = models.network(data.name, data, 0).float()(x)
        for name, measure in (("loss", task.loss), ("metric", task.metric)):
            if measure is None:
                continue
            try:
                alike = _alike(vmap(measure)(output[None], y[None])[0], measure(output, y))
                what = "" if alike else "another number"
            except Exception as error:  # whatever a user's function does with a batched tensor
                what = loader.error_text(error).split(". ")[0][:120]
            if what:
                return f"its {name} cannot be taken of many lanes at once ({what})"
    return None


def _alike(a: Any, b: Any) -> bool:
    a, b = torch.as_tensor(a).double(), torch.as_tensor(b).double()
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)


def _how(sweep: Sweep, name: str, why: str) -> str:
    """How an optimizer's lanes are run, in a sentence."""
    lanes = sum(setting.optimizer == name for setting in sweep.settings) * len(sweep.seeds)
    if name in sweep.alone:
        why = "it is run as it is, as the lab has no stacked form of it"
    because = f": {why}" if why else ""
    if sweep.program == "lone" or name in sweep.alone:
        return f"{name}: {lanes} separate runs{because}."
    if sweep.program == "branches":
        return f"{name}: {lanes} lanes, {sweep.lanes_per_pack} networks side by side{because}."
    together = sum(s.optimizer not in sweep.alone for s in sweep.settings) * len(sweep.seeds)
    return f"{name}: stacked, {lanes} of the {together} lanes that train as one program."
