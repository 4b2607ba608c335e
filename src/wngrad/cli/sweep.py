"""`wngrad sweep`: a task of one's own over a grid of λ."""

from __future__ import annotations

import os
import shlex
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console
from rich.table import Table

from wngrad.cli import job as jobs
from wngrad.cli import options, starters
from wngrad.cli.messages import fail, warn
from wngrad.lab.optimizers import SWEPT, UNTUNED
from wngrad.lab.train.loader import did_you_mean
from wngrad.lab.train.naming import split
from wngrad.lab.train.spec import Kind, StopRule


def sweep(
    task: Annotated[
        str | None,
        typer.Argument(
            help="file.py with a `task` or a `train(trial)`; file.py:name; module:name."
        ),
    ] = None,
    optimizers: Annotated[
        str | None,
        typer.Option(
            help="With commas: names, module:Class, file.py:function; (setting=value) after each.",
            show_default=f"{', '.join(SWEPT)}; {', '.join(UNTUNED)} at its default",
        ),
    ] = None,
    lam_from: Annotated[float, typer.Option(help="The least λ of the grid.")] = 1e-4,
    lam_to: Annotated[float, typer.Option(help="The greatest.")] = 10.0,
    per_decade: Annotated[int, typer.Option(help="How many λ a decade.")] = 2,
    lam: Annotated[str | None, typer.Option(help="The grid itself, with commas.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs at each λ.")] = 3,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the task's.")] = None,
    device: options.Device = "auto",
    out: options.Out = None,
    lanes: options.Lanes = None,
    program: Annotated[
        str, typer.Option(help="auto, or how to run: stacked, branches or lone.")
    ] = "auto",
    note: options.Note = "",
    patience: options.Patience = None,
    save_every: options.SaveEvery = 30.0,
    workers: options.Workers = 1,
    ray: options.Ray = None,
    cpus: options.Cpus = 1,
    dry_run: options.DryRun = False,
    defaults: Annotated[
        bool, typer.Option(help="Run each optimizer at the λ of its signature, too.")
    ] = True,
    stop: Annotated[
        str, typer.Option(help="End runs that are lost: diverged, or median; none if not given.")
    ] = "none",
    init: Annotated[
        str | None,
        typer.Option(
            help="Write a file to start from: tensors, loaders or train; alone, lists them."
        ),
    ] = None,
) -> None:
    """How much does your own training depend on the learning rate? Trains, resumes and reports."""
    from wngrad.lab import sweep as sweeps
    from wngrad.lab.run.job import Job
    from wngrad.lab.run.places import is_address

    if init is not None:
        if task is not None and out is not None:
            fail(f"`--init` writes one file, got {task} and, as `--out`, {out}.")
        starters.write(init, task or out)
    if task is None:
        fail("`task` must be given: file.py or module:name; --init writes a file to start from.")
    here = os.getcwd()
    try:
        grid = _numbers("lam", lam) if lam else sweeps.grid(lam_from, lam_to, per_decade)
        plan = sweeps.plan(
            task,
            lam=grid,
            seeds=seeds,
            optimizers=None if optimizers is None else split(optimizers),
            epochs=epochs,
            device=device,
            program=_program(program),
            lanes=lanes,
            defaults=defaults,
            stop=_stop(stop),
        )
    except ValueError as error:
        fail(str(error))
    finally:
        os.chdir(here)  # the task has been called, and may have gone elsewhere
    usual = Path("out") / sweeps.folder(plan.sweep.name)
    for line in plan.how:
        print(line)
    job = Job(plan.sweep, out or usual, None, device, note, save_every, lanes is not None, cpus)
    if dry_run:
        jobs.plan(job, ray, workers)
    command = shlex.join(["wngrad", *sys.argv[1:]])
    opened = partial(sweeps.remember, plan, job.out, command)
    outcome, _ = jobs.train(job, patience, ray, workers, opened)
    show_report(job.out, usual if is_address(job.out) else Path(job.out))
    raise typer.Exit(outcome.status)


def show_report(home: Path | str, folder: Path) -> None:
    """Write the report of a sweep's records into a folder, and print its table."""
    from wngrad.lab import sweep as sweeps

    try:
        summary = sweeps.report(home, folder, warn)
    except (ValueError, OSError) as error:
        fail(str(error))
    table = Table()
    for head in summary.heads:
        table.add_column(head, overflow="fold", min_width=max(map(len, head.split())))
    for row in summary.rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table, markup=False)
    print(*summary.lines, sep="\n")


def _stop(text: str) -> StopRule:
    names = ("none", "diverged", "median")
    if text not in names:
        fail(f"`--stop` must be {', '.join(names)}, got {text!r}{did_you_mean(text, names)}")
    return "" if text == "none" else cast(StopRule, text)


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        fail(f"`--{name}` must be numbers with commas, got {text!r}.")


def _program(text: str) -> Kind | None:
    names = ("auto", "stacked", "branches", "lone")
    if text not in names:
        close = did_you_mean(text, names)
        fail(f"`--program` must be {', '.join(names)}, got {text!r}{close}")
    return None if text == "auto" else cast(Kind, text)
