"""The command line: parse, call one function, print."""

from __future__ import annotations

import sys
from typing import Annotated

from wngrad.install import install_hint

try:
    import rich  # noqa: F401
    import typer
except ImportError:  # pragma: no cover
    sys.exit(f"wngrad: the command line needs the extra `lab`: {install_hint('lab')}.")

import wngrad
from wngrad.cli import certify, example, moved, report, run, sweep
from wngrad.cli.list import list_
from wngrad.cli.messages import warn
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


def main() -> None:
    try:
        app(prog_name="wngrad")
    except SystemExit as end:
        if "wngrad.lab.run" in sys.modules:
            leave(end)
        raise


def leave(end: SystemExit) -> None:
    """End without what a task has left here, for which Python would wait."""
    from wngrad.lab.run import leftovers

    leftovers.stop_processes(warn)
    leftovers.leave_threads(end.code if isinstance(end.code, int) else 1, warn)
