"""An optimizer under test: how it is made, called, saved and loaded."""

from __future__ import annotations

import inspect
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from wngrad.conformance.peers import PROFILES, Profile, Takes
from wngrad.conformance.verdicts import Failed, NotApplicable, described, first_line

Closure = Callable[[], Tensor]  # computes the loss and the gradients, and returns the loss


@dataclass(frozen=True, slots=True)
class Subject:
    """An optimizer as its authors say it is used: `make(params)`, `make.step(opt, closure)`."""

    cls: Callable[..., Any]
    kwargs: Mapping[str, Any]
    takes: Takes
    sharded: Mapping[str, Any]
    exempt: Mapping[str, str]

    def __call__(self, params: Any, **options: Any) -> Any:
        opt = self.cls(params, **{**self.kwargs, **options})
        self.train(opt)
        return opt

    def step(self, opt: Any, closure: Closure) -> Tensor:
        """A step of the documented kind on the loss and gradients of `closure`."""
        if self.takes == "closure":
            loss: Tensor = opt.step(closure)
            return loss
        loss = closure()
        if self.takes == "loss":
            opt.step(loss=loss)
        else:
            opt.step()
        return loss

    def train(self, opt: Any) -> None:
        if callable(getattr(opt, "train", None)):
            opt.train()

    def eval(self, opt: Any) -> None:
        if callable(getattr(opt, "eval", None)):
            opt.eval()

    def group(self) -> dict[str, Any]:
        """The settings it is made with."""
        return dict(self([nn.Parameter(torch.ones(2, 2))]).param_groups[0])

    def lr(self) -> float:
        if not isinstance(value := self.group().get("lr"), int | float):
            raise NotApplicable("it has no lr")
        return float(value)

    def options(self) -> list[dict[str, Any]]:
        """As it is made, and with weight decay where it has that."""
        return [{}, {"weight_decay": 0.01}] if "weight_decay" in self.group() else [{}]

    def saved(self, model: nn.Module, opt: Any) -> bytes:
        """A checkpoint, taken in evaluation mode where there is one."""
        file = io.BytesIO()
        self.eval(opt)
        torch.save((model.state_dict(), opt.state_dict()), file)
        self.train(opt)
        return file.getvalue()

    def load(self, model: nn.Module, opt: Any, saved: bytes) -> None:
        try:
            weights, state = torch.load(io.BytesIO(saved), weights_only=True)
        except pickle.UnpicklingError as error:
            raise Failed(
                "its state is not plain data: torch.load(weights_only=True), the default, "
                f"refuses it ({first_line(error)})"
            ) from None
        model.load_state_dict(weights)
        opt.load_state_dict(state)
        self.train(opt)

    def usage(self) -> str:
        """How it is made and called, in one line."""
        cls = self.cls
        given = ", ".join(["params", *(f"{key}={value!r}" for key, value in self.kwargs.items())])
        call = {"nothing": "step()", "loss": "step(loss=loss)", "closure": "step(closure)"}
        modes = ", train() and eval()" if hasattr(cls, "train") and hasattr(cls, "eval") else ""
        return f"{getattr(cls, '__qualname__', cls)}({given}), {call[self.takes]}{modes}"


def load_subject(target: str, kwargs: Mapping[str, Any] | None = None) -> Subject:
    """The optimizer at "module:Class"; with `kwargs`, or as its profile and signature say."""
    module, _, name = target.partition(":")
    try:
        cls = attrgetter(name)(import_module(module))
    except Exception as error:
        raise Failed(f"cannot be imported: {described(error)}") from error
    package = str(getattr(cls, "__module__", module)).partition(".")[0]
    profile = PROFILES.get(f"{package}:{name}", Profile())
    takes: Takes = "closure" if _required(getattr(cls, "step", None), "closure") else profile.takes
    if kwargs is None:
        kwargs = profile.kwargs or ({"lr": 0.01} if _required(cls, "lr") else {})
    return Subject(cls, dict(kwargs), takes, profile.sharded, profile.exempt)


def _required(call: Any, name: str) -> bool:
    try:
        parameter = inspect.signature(call).parameters.get(name)
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.default is parameter.empty
