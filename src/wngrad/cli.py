"""The command line: parse, call one function, print."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeAlias

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError:  # pragma: no cover
    sys.exit("wngrad: the command line needs the extra `lab`: pip install 'wngrad[lab]'.")

from wngrad import cli_certify, cli_run
from wngrad.batch import EvaluationError, Result, minimize
from wngrad.problems import ZOO

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Gradient descent that learns its learning rate: check the theory, study the method.",
)


Ray: TypeAlias = Annotated[
    str | None, typer.Option(help="Run on a Ray cluster: HOST:PORT, auto, or local.")
]
Cpus: TypeAlias = Annotated[int, typer.Option(min=1, help="Cores of a pack, with --ray.")]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Print packs, resources and time; train nothing.")
]
Out: TypeAlias = Annotated[
    str | None, typer.Option(help="A folder, or an address as s3://…; out/NAME if not given.")
]


@app.callback()
def _root() -> None:
    pass


@app.command()
def certify(
    problem: Annotated[str, typer.Argument(help=f"One of {', '.join(ZOO)}; or path.py:function.")],
    b1: Annotated[
        list[str] | None,
        typer.Option("--b1", help="b₁: a number, a multiple of L (0.1L), gradient or lipschitz."),
    ] = None,
    tol: Annotated[float, typer.Option(help="ε, on the squared gradient norm.")] = 1e-8,
    max_steps: Annotated[int, typer.Option(help="A limit on steps.")] = 100_000,
    lipschitz: Annotated[float | None, typer.Option(help="L, if the problem has none.")] = None,
    f_star: Annotated[float | None, typer.Option(help="A lower bound on f.")] = None,
    x0: Annotated[str | None, typer.Option(help="The start, as numbers with commas.")] = None,
    out: Annotated[Path, typer.Option(help="A folder for the picture.")] = Path("out"),
) -> None:
    """Run Algorithm 1 from several b₁ and set every bound of the paper beside what was measured."""
    try:
        what, exact = cli_certify.problem(problem, x0, lipschitz, f_star)
    except ValueError as error:
        cli_run.fail(str(error))
    cli_run.make(out)
    named: list[tuple[str, Result]] = []
    for text in b1 or cli_certify.choices(what):
        try:
            res = minimize(
                what.f,
                what.x0,
                jac=what.grad,
                b_init=cli_certify.b1(text, what),
                tol=tol,
                max_steps=max_steps,
                trace=True,
            )
        except (ValueError, TypeError, EvaluationError) as error:
            if b1 is None and text == "lipschitz":
                print(f"No run from b₁ = lipschitz: {error}")
                continue
            cli_run.fail(str(error))
        named.append((text, res))
    held = cli_certify.show(what, named, None if exact else 1e-6)
    path = out / f"certify-{Path(what.name).stem}.png"
    from wngrad.batch import picture

    picture.runs(named, what.name, what.lipschitz, what.f_star, path)
    print(f"Wrote {path}.")
    raise typer.Exit(0 if held else 1)


@app.command()
def study(
    out: Annotated[Path, typer.Option(help="A folder for the report.")] = Path("out/study"),
) -> None:
    """WNGrad over twelve decades of b₁ against constant steps and AdaGrad-Norm."""
    from rich.progress import Progress

    from wngrad.batch import study as study_

    cli_run.make(out)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("running", total=study_.size())
        rows = study_.run(lambda: progress.advance(task))
    for path in study_.write(rows, out):
        print(f"Wrote {path}.")


@app.command("list")
def list_() -> None:
    """The recipes: what each claims and what it costs."""
    from wngrad.lab.recipes import RECIPES

    table = Table()
    for column in ("recipe", "what it claims", "data, network", "runs", "cost"):
        table.add_column(column, justify="right" if column == "runs" else "left")
    for sweep in RECIPES.values():
        runs = f"{len(sweep.lanes)} × {sweep.epochs} epochs"
        table.add_row(sweep.name, sweep.claim, f"{sweep.dataset}, {sweep.model}", runs, sweep.cost)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="See `wngrad list`; or module:sweep.")],
    data: Annotated[
        Path | None,
        typer.Option(help="A folder with the data (or set WNGRAD_DATA); else it is downloaded."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    out: Out = None,
    lanes: Annotated[
        int | None, typer.Option(min=1, help="At most so many at once, if memory is short.")
    ] = None,
    note: Annotated[str, typer.Option(help="What a reader of the report must know.")] = "",
    patience: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds of silence (compilation is silent) to call a hang."),
    ] = None,
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 30.0,
    ray: Ray = None,
    cpus: Cpus = 1,
    dry_run: DryRun = False,
) -> None:
    """Train every lane of a recipe. What is done is left alone; what was interrupted goes on."""
    from wngrad.lab import recipes
    from wngrad.lab.run.places import is_address
    from wngrad.lab.run.supervisor import Job

    try:
        sweep = recipes.find(recipe).scaled(epochs=epochs, seeds=seeds)
    except ValueError as error:
        cli_run.fail(str(error))
    if lanes is not None:
        sweep = replace(sweep, lanes_per_pack=lanes)
    folder = out or f"out/{sweep.name}"
    job = Job(sweep, folder, data, device, note, save_every, sized=lanes is not None)
    if dry_run:
        cli_run.plan(job, ray, cpus)
    outcome, told = cli_run.trained(job, patience, ray, cpus)
    where = [] if out is None else ["--records" if is_address(out) else "--out", out]
    following = shlex.join(["wngrad", "report", recipe, *where])
    print(f"{told}. Records are in {folder}; next: {following}")
    for lane in outcome.failed:
        print(f"Failed: {lane}")
    raise typer.Exit(outcome.status)


@app.command()
def sweep(
    task: Annotated[str, typer.Argument(help="file.py with a `task`; file.py:name; module:name.")],
    optimizers: Annotated[
        str, typer.Option(help="With commas: names, module:Class, or file.py:function.")
    ] = "sgd,adam,wngrad,wnadam",
    lam_from: Annotated[float, typer.Option(help="The least λ of the grid.")] = 1e-4,
    lam_to: Annotated[float, typer.Option(help="The greatest.")] = 10.0,
    per_decade: Annotated[int, typer.Option(help="How many λ a decade.")] = 2,
    lam: Annotated[str | None, typer.Option(help="The grid itself, with commas.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs at each λ.")] = 3,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the task's.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    out: Out = None,
    lanes: Annotated[
        int | None, typer.Option(min=1, help="At most so many at once, if memory is short.")
    ] = None,
    program: Annotated[
        str, typer.Option(help="auto, or how to run: stacked, branches or lone.")
    ] = "auto",
    note: Annotated[str, typer.Option(help="What a reader of the report must know.")] = "",
    patience: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds of silence (compilation is silent) to call a hang."),
    ] = None,
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 30.0,
    ray: Ray = None,
    cpus: Cpus = 1,
    dry_run: DryRun = False,
) -> None:
    """How much does your own training depend on the learning rate? Trains, resumes and reports."""
    from wngrad.lab import sweep
    from wngrad.lab.run.supervisor import Job

    try:
        grid = cli_run.numbers("lam", lam) if lam else sweep.grid(lam_from, lam_to, per_decade)
        plan = sweep.plan(
            task,
            lam=grid,
            seeds=seeds,
            optimizers=[name.strip() for name in optimizers.split(",") if name.strip()],
            epochs=epochs,
            device=device,
            program=cli_run.kind(program),
            lanes=lanes,
        )
    except ValueError as error:
        cli_run.fail(str(error))
    usual = Path("out") / sweep.folder(plan.sweep.name)
    for line in plan.how:
        print(line)
    job = Job(plan.sweep, out or usual, None, device, note, save_every, sized=lanes is not None)
    if dry_run:
        cli_run.plan(job, ray, cpus)
    outcome, _ = cli_run.trained(job, patience, ray, cpus)
    try:
        told = sweep.report(
            plan, job.out, usual, shlex.join(["wngrad", *sys.argv[1:]]), cli_run.warn
        )
    except ImportError as error:
        cli_run.fail(f"reports need the extra `lab`: pip install 'wngrad[lab]' ({error}).")
    except (ValueError, OSError) as error:
        cli_run.fail(str(error))
    table = Table()
    for head in told.heads:
        table.add_column(head, overflow="fold")
    for row in told.rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table, markup=False)
    print(*told.lines, sep="\n")
    raise typer.Exit(outcome.status)


@app.command()
def report(
    recipe: Annotated[str, typer.Argument(help="See `wngrad list`; or module:sweep.")],
    records: Annotated[
        str | None,
        typer.Option(help="The folder or address of a run, or a .jsonl file of records."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A folder; out/RECIPE if not given.")] = None,
) -> None:
    """Write the page, the figure and the summary of a sweep from its records. Never trains."""
    from wngrad.lab import recipes
    from wngrad.lab.report import builder as report_
    from wngrad.lab.run.files import Damaged
    from wngrad.lab.run.places import is_address
    from wngrad.lab.run.store import Store, exported

    try:
        sweep = recipes.find(recipe)
        folder = out or Path("out") / sweep.name
        source = records or folder
        store = Store(source, warn=cli_run.warn)
        one_file = records is not None and not is_address(records) and not Path(records).is_dir()
        found = exported(Path(source)) if one_file else store.records()
        written = report_.write(sweep, found, folder, recipe=recipe)
        if not one_file:
            store.export(folder / "records.jsonl")
        for path in written:
            print(f"Wrote {path}.")
    except ImportError as error:
        cli_run.fail(f"reports need the extra `lab`: pip install 'wngrad[lab]' ({error}).")
    except (ValueError, Damaged, OSError) as error:
        cli_run.fail(str(error))


@app.command()
def tournament(
    data: Annotated[
        Path | None,
        typer.Option(help="A folder with the data (or set WNGRAD_DATA); else it is downloaded."),
    ] = None,
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
    from wngrad.lab import tournament as plans
    from wngrad.lab.tournament_run import Tournament

    os.environ["WNGRAD_SCALE"] = str(scale)  # the workers read it, too
    who = [name for name in contestants.split(",") if name]
    try:
        if report:
            from wngrad.lab import tournament_report

            for path in tournament_report.write(out, page):
                print(f"Wrote {path}.")
            return
        parts = plans.plan([name for name in tasks.split(",") if name], who, seeds, device)
    except ImportError as error:
        cli_run.fail(f"reports need the extra `lab`: pip install 'wngrad[lab]' ({error}).")
    except (ValueError, OSError) as error:
        cli_run.fail(str(error))
    for line in plans.absent(who):
        print(line, file=sys.stderr)
    print(f"{plans.estimate(parts, workers)}.", flush=True)
    known, said = [Path("results/tournament")], plans.note(who, note)
    games = Tournament(parts, out, work, data, workers, limit, known, said, _say)
    try:
        status = games.run()
    except (ValueError, OSError) as error:
        cli_run.fail(str(error))
    print(f"{games.text()}. Records are in {out}; next: wngrad tournament --report")
    raise typer.Exit(status)


def _say(text: str) -> None:
    print(f"tournament: {text}", file=sys.stderr, flush=True)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
