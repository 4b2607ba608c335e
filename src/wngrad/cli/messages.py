"""Messages of the command line: a mistake is one line on stderr, and exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import typer


def fail(message: str) -> NoReturn:
    """A user's mistake: one line, exit code 2."""
    print(f"wngrad: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(2)


def warn(text: str) -> None:
    print(f"wngrad: {text}", file=sys.stderr)


def make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"`--out` must be a folder that can be written, got {folder}: {error.strerror}.")
