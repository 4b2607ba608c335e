"""The checks of a task before anything is trained, and which program can train it."""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.func import vmap

from wngrad.lab.train import loader, models, seeding, stack
from wngrad.lab.train.data import Data
from wngrad.lab.train.loader_task import LoaderTask
from wngrad.lab.train.programs.loop import moved
from wngrad.lab.train.spec import Kind
from wngrad.lab.train.task import Task


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
        if str(error).startswith(("Task: ", "LoaderTask: ")):  # what we say ourselves
            raise
        raise _raised(address, name, error) from error
    except Exception as error:
        raise _raised(address, name, error) from error


def _raised(address: str, name: str, error: Exception) -> ValueError:
    line = loader.line_of(error, loader.resolved(loader.file_of(address)))
    where = "" if line is None else f" at line {line}"
    return ValueError(f"{address}: `{name}` raised{where}: {loader.error_text(error)}.")


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        frozen = "" if value.requires_grad else " without a gradient"
        return f"a tensor of shape {tuple(value.shape)}{frozen}"
    return repr(value)


def checked_loaders(task: LoaderTask, address: str, device: str = "cpu") -> None:
    """Try everything in a task on a batch of its training data, where it is to be trained.

    Raises:
        ValueError: something in the task raises, or returns what it should not.
    """

    def refuse(name: str, must: str, got: object) -> NoReturn:
        raise ValueError(f"{address}: `{name}` must {must}, got {got}.")

    train, *_ = _call(address, "loaders", task.data)
    with torch.random.fork_rng(devices=[]):
        seeding.seed_all(0)
        _call(address, "loaders", task.steps_of, train)
        batch = _call(address, "loaders", lambda: next(iter(train), None))
        if batch is None:
            refuse("loaders", "give some training batches", "none")
        model = _call(address, "model", task.model)
        if not isinstance(model, nn.Module) or not list(model.parameters()):
            refuse("model", "return a network with parameters", repr(model))
        where = torch.device("cpu" if not on_cuda(device) else device.replace("auto", "cuda"))
        _call(address, "model", model.to, where)
        here = _call(address, "loaders", moved, batch, where)
        output, target = _call(address, "model", task.output_and_target, model, here)
        loss = _call(address, "loss", task.loss_of, output, target)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            refuse("loss", "return one number with a gradient", _brief(loss))
        if task.metric is not None:
            with torch.no_grad():
                value = _call(address, "metric", task.metric, output, target)
            if not isinstance(value, (int, float)) and getattr(value, "numel", int)() != 1:
                refuse("metric", "return one number", _brief(value))


def choose_program(task: Task, data: Data, device: str) -> tuple[Kind, str]:
    """The program for the optimizers that have a rule, and what keeps them from being stacked."""
    apart = why_not_at_once(task, data)
    why = why_not_stacked(task, data) or apart
    if why is None:
        return "stacked", ""
    cuda = device.startswith("cuda") or on_cuda(device)
    model = models.network(data.name, data, 0)
    scalars = any(p.ndim == 0 for p in model.parameters())
    if cuda and not apart and not scalars and models.why_not_together(model) is None:
        return "branches", why
    return "lone", why


def on_cuda(device: str) -> bool:
    """True if there is a CUDA device, and "auto" or a name asks for it."""
    return (device == "auto" or device.startswith("cuda")) and torch.cuda.is_available()


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
