"""`wngrad sweep --init`: files that work, to start from."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

from wngrad.cli.messages import fail
from wngrad.lab.train.loader import did_you_mean

KINDS = {
    "tensors": "your data are tensors that fit in memory: runs are trained together if they can be",
    "loaders": "your data come from DataLoaders: a ready-made loop trains your model",
    "train": "you have a training loop of your own: a function train(trial)",
}
ASKED = ""  # the kind of a bare `--init`


class InitCommand(TyperCommand):
    """A command whose `--init` may stand alone, which asks for the kinds of files."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--init" in args:
            after = args.index("--init") + 1
            if after == len(args) or args[after].startswith("-"):
                args = [*args[:after], ASKED, *args[after:]]
        return super().parse_args(ctx, args)


def write(kind: str, to: str | None) -> NoReturn:
    """Write the file of a kind, say how to go on, and leave."""
    if kind == ASKED:
        print("`--init` writes a file to start from, of one of three kinds:")
        for each, words in KINDS.items():
            print(f"  wngrad sweep --init {each:8} {words}")
        raise typer.Exit(0)
    if kind not in KINDS:
        fail(f"`--init` must be {', '.join(KINDS)}, got {kind!r}{did_you_mean(kind, KINDS)}")
    path = Path(to or f"my_{kind}.py")
    text = files("wngrad.lab.sweep.starters").joinpath(f"{kind}.py").read_text(encoding="utf-8")
    write_new("`--init`", path, text)
    print(f"Wrote {path}, which runs as it is; make it yours. Next: wngrad sweep {path}")
    raise typer.Exit(0)


def write_new(owner: str, path: Path, text: str) -> None:
    """Write a file that is not there yet, or say why that cannot be done, and leave."""
    if path.exists():
        fail(f"{owner} writes a new file, and {path} is there already; name another one.")
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        fail(f"{owner} must be able to write {path}: {error.strerror}.")
