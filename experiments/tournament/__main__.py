"""`python -m experiments.tournament`: run the tournament, or write its page."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from experiments.tournament import page as pages
from experiments.tournament import plan as plans
from experiments.tournament.run import Tournament
from wngrad.cli.messages import fail
from wngrad.cli.options import Data
from wngrad.install import install_hint

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    data: Data = None,
    device: Annotated[
        str, typer.Option(help="For the tasks that gain from a GPU: cpu, cuda, or auto.")
    ] = "auto",
    workers: Annotated[int, typer.Option(min=1, help="Processes at once.")] = 2,
    tasks: Annotated[str, typer.Option(help="With commas; all if not given.")] = "",
    contestants: Annotated[str, typer.Option(help="With commas; all if not given.")] = "",
    seeds: Annotated[int | None, typer.Option(min=1, help="Instead of each task's own.")] = None,
    scale: Annotated[
        float, typer.Option(help="The part of every data set to use: less than 1 to try it out.")
    ] = 1.0,
    limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which to stop, and export.")
    ] = None,
    out: Annotated[Path, typer.Option(help="A folder for the exported records.")] = Path(
        "results/tournament"
    ),
    work: Annotated[Path, typer.Option(help="A folder for what is under way; may be large.")] = (
        Path("out/tournament")
    ),
    note: Annotated[str, typer.Option(help="What a reader of the page must know.")] = "",
    report: Annotated[
        bool, typer.Option("--report", help="Write the page from the records; train nothing.")
    ] = False,
    page: Annotated[Path, typer.Option(help="The page that --report writes.")] = Path(
        "docs/tournament.md"
    ),
) -> None:
    """WNGrad among its rivals: at their defaults, and over the decades of λ. Goes on where it was.

    Records already in OUT or in results/tournament are not run again.
    """
    names, who = ([name for name in text.split(",") if name] for text in (tasks, contestants))
    try:
        if report:
            for path in pages.write(out, page):
                print(f"Wrote {path}.")
            return
        parts = plans.plan(names, who, seeds, device, scale=scale, folder=data)
    except ImportError as error:
        fail(f"the tournament's page needs the extra `lab`: {install_hint('lab')} ({error}).")
    except (ValueError, OSError) as error:
        fail(str(error))
    for line in plans.absent(who):
        print(line, file=sys.stderr)
    print(f"{plans.estimate(parts, workers)}.", flush=True)
    remark, known = plans.note(who, note, scale), [Path("results/tournament")]
    games = Tournament(parts, out, work, workers, limit, known, remark, _say)
    try:
        status = games.run()
    except (ValueError, OSError) as error:
        fail(str(error))
    print(f"{games.text()}. Records are in {out}; next: python -m experiments.tournament --report")
    raise typer.Exit(status)


def _say(text: str) -> None:
    print(f"tournament: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    app(prog_name="python -m experiments.tournament")
