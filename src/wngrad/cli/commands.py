"""The commands of `wngrad`, one file each, as one application."""

from __future__ import annotations

from typing import Annotated

import typer

import wngrad
from wngrad.cli import certify, example, moved, report, run, sweep
from wngrad.cli.list import list_
from wngrad.cli.starters import InitCommand

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    suggest_commands=True,
    help="Gradient descent that learns its learning rate: check the theory, study the method.",
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"wngrad {wngrad.__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it and exit.")
    ] = False,
) -> None:
    pass


app.command()(certify.certify)
app.command("list")(list_)
app.command()(example.example)
app.command()(run.run)
app.command(cls=InitCommand)(sweep.sweep)
app.command()(report.report)
moved.add(app)
