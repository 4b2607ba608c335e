"""`wngrad sweep --init`: files that work, to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import NoReturn

import typer

from wngrad.cli.messages import fail
from wngrad.lab.train.loader import did_you_mean

KINDS = ("tensors", "loaders", "train")


def write(kind: str, to: str | None) -> NoReturn:
    """Write the file of a kind, say how to go on, and leave."""
    if kind not in KINDS:
        fail(f"`--init` must be {', '.join(KINDS)}, got {kind!r}{did_you_mean(kind, KINDS)}")
    path = Path(to or f"my_{kind}.py")
    if path.exists():
        fail(f"`--init` writes a new file, and {path} is there already; name another one.")
    text = files("wngrad.lab.sweep.starters").joinpath(f"{kind}.py").read_text(encoding="utf-8")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"`--init` must be able to write {path}: {error.strerror}.")
    print(f"Wrote {path}, which runs as it is; make it yours. Next: wngrad sweep {path}")
    raise typer.Exit(0)
