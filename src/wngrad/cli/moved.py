"""Commands that have become experiments, outside the package: each says what to type now."""

from __future__ import annotations

from collections.abc import Callable

import typer

from wngrad.cli.messages import fail

MOVED = ("study", "tournament")


def add(app: typer.Typer) -> None:
    """Register the old names, with whatever options they had."""
    ignored = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
    for name in MOVED:
        app.command(name, hidden=True, context_settings=ignored)(_command(name))


def _command(name: str) -> Callable[[], None]:
    def command() -> None:
        fail(f"`wngrad {name}` is now `python -m experiments.{name}`, from a checkout of wngrad.")

    return command
