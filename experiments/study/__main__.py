"""`python -m experiments.study`: run the study, and write its report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from experiments.study import study
from wngrad.cli.messages import make_folder

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="A folder for the report.")] = Path("out/study"),
) -> None:
    """WNGrad over twelve decades of b₁ against constant steps and AdaGrad-Norm."""
    make_folder(out)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("running", total=study.size())
        rows = study.run(lambda: progress.advance(task))
    for path in study.write(rows, out):
        print(f"Wrote {path}.")


if __name__ == "__main__":
    app(prog_name="python -m experiments.study")
