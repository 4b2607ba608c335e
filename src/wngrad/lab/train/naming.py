"""Optimizers by the names that people type: "adamw", "sgd(momentum=0.9)", "module:Class(…)"."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from wngrad.lab.optimizers import NAMED, OPTIMIZERS
from wngrad.lab.train import loader

_SPELLINGS = {
    "schedule-free": "schedulefree",
    "schedulefree-adamw": "schedulefree",
    "schedule-free-adamw": "schedulefree",
    "schedule-free-sgd": "schedulefree-sgd",
    "sgd-schedulefree": "schedulefree-sgd",
    "wn-adam": "wnadam",
    "wn-grad": "wngrad",
    "wn-muon": "wnmuon",
    "d-adaptation": "dadapt-adam",
    "dadaptation": "dadapt-adam",
    "momentum": "sgd-momentum",
}
_TAKES_MODEL = ("wngrad:WNMuon", "wngrad.optim:WNMuon")


@dataclass(frozen=True, slots=True)
class Choice:
    """An optimizer as a user has named it."""

    name: str  # in one spelling, with its settings: what records call it
    target: str  # "module:Class", or "file.py:function"
    settings: Mapping[str, Any]
    package: str = ""  # what pip calls it
    takes_model: bool = False

    def function(self) -> Callable[..., Any]:
        """What makes the optimizer.

        Raises:
            ValueError: it cannot be imported, or does not take λ or a setting; in one line, with
                the package to install or the setting that was meant.
        """
        function = self._load()
        taken = _parameters(function)
        any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in taken.values())
        for name in () if any_name or not taken else self.settings:
            if name not in taken:
                raise ValueError(
                    f"lab: `optimizer` {self.name!r} has no setting {name!r}"
                    f"{loader.did_you_mean(name, taken)}"
                )
        if said := loader.refused(function, None, lr=1.0, **self.settings):
            raise ValueError(
                f"lab: `optimizer` {self.name!r} must be callable as (params, lr=λ), got {said}."
            )
        return function

    def _load(self) -> Callable[..., Any]:
        try:
            return loader.load_callable(self.target, "optimizer", known())
        except ValueError as error:
            if not self.package:
                raise
            raise ValueError(
                f"lab: `optimizer` {self.name!r} needs {self.package}: pip install {self.package} "
                f"({error.__cause__})."
            ) from error

    def default_lam(self) -> float | None:
        """The λ in its signature; None if there is none."""
        lr = _parameters(self.function()).get("lr")
        number = lr is not None and type(lr.default) in (int, float) and lr.default > 0
        return float(lr.default) if lr is not None and number else None

    def build(self, params: Any, lam: float, **options: Any) -> Any:
        """The optimizer of a model, of parameters, or of groups of them.

        Args:
            options: settings for every optimizer; those in the name come before them.
        """
        if hasattr(params, "parameters") and not self.takes_model:
            params = [p for p in params.parameters() if p.requires_grad]
        return self.function()(params, lr=lam, **{**options, **self.settings})


@lru_cache(maxsize=256)
def parse(text: str) -> Choice:
    """The optimizer that `text` names.

    >>> parse("AdamW(weight_decay=0.1)").name
    'adamw(weight_decay=0.1)'
    """
    home, settings = _call(text.strip())
    written = ", ".join(f"{key}={value!r}" for key, value in settings.items())
    if ":" in home:
        takes_model = home in _TAKES_MODEL
        return Choice(_name(home, written), home, settings, takes_model=takes_model)
    short = home.lower().replace("_", "-")
    short = _SPELLINGS.get(short, short)
    if row := OPTIMIZERS.get(short):
        return Choice(_name(short, written), row.target, {**row.options, **settings})
    if named := NAMED.get(short):
        name = _name(short, written)
        return Choice(name, named.target, settings, named.package, named.takes_model)
    loader.load(home, "optimizer", known())  # says what is known, and what is near
    raise AssertionError  # a name without a colon leads nowhere


def split(text: str) -> list[str]:
    """The names in a list with commas, of which some may stand in parentheses.

    >>> split("sgd, adamw(eps=1, betas=(0.9, 0.99)),prodigy")
    ['sgd', 'adamw(eps=1, betas=(0.9, 0.99))', 'prodigy']
    """
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def known() -> Iterable[str]:
    return (*OPTIMIZERS, *NAMED)


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Of a signature, by name; none if it cannot be read."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return {}


def _name(home: str, written: str) -> str:
    return f"{home}({written})" if written else home


def _call(text: str) -> tuple[str, dict[str, Any]]:
    """What stands before the parentheses, and the settings in them."""
    match = re.fullmatch(r"(.*?)\((.*)\)", text, re.S)
    if match is None:
        return text, {}
    try:
        call = ast.parse(f"f({match[2]})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            raise ValueError("settings have names")
        settings = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise ValueError(
            f"lab: `optimizer` must be a name, or name(setting=value, …) with plain values, got "
            f"{text!r}."
        ) from error
    if "lr" in settings:
        raise ValueError(f"lab: `optimizer` must leave `lr` to the sweep, got {text!r}.")
    return match[1].strip(), settings
