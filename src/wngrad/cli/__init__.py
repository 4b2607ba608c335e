"""The command line: parse, call one function, print."""

from __future__ import annotations

import sys

from wngrad.install import MissingExtraError, OldLibraryError, naming_the_extra


def main() -> None:
    try:
        with naming_the_extra(f"`{' '.join(['wngrad', *sys.argv[1:2]])}`"):
            _run()
    except (MissingExtraError, OldLibraryError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _run() -> None:
    from wngrad.cli.commands import app

    try:
        app(prog_name="wngrad")
    except SystemExit as end:
        if "wngrad.lab.run" in sys.modules:
            leave(end)
        raise


def leave(end: SystemExit) -> None:
    """End at once, without what a task has left here, for which Python would wait."""
    from wngrad.cli.messages import warn
    from wngrad.lab.run import leftovers

    leftovers.stop_processes(warn)
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
    leftovers.leave(end.code if isinstance(end.code, int) else int(bool(end.code)), warn)
