"""`wngrad run`: train a recipe."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from wngrad.cli import job as jobs
from wngrad.cli import options
from wngrad.cli.messages import fail
from wngrad.cli.report import report


def run(
    recipe: options.Recipe,
    data: options.Data = None,
    device: options.Device = "auto",
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    out: options.Out = None,
    lanes: options.Lanes = None,
    packs: options.Packs = None,
    note: options.Note = "",
    patience: options.Patience = None,
    save_every: options.SaveEvery = 30.0,
    workers: options.Workers = 1,
    ray: options.Ray = None,
    cpus: options.Cpus = 1,
    dry_run: options.DryRun = False,
) -> None:
    """Train every lane of a recipe. What is done is left alone; what was interrupted goes on."""
    from wngrad.lab import recipes
    from wngrad.lab.run.job import Job
    from wngrad.lab.run.places import is_address

    try:
        sweep = recipes.find(recipe).scaled(epochs=epochs, seeds=seeds)
    except ValueError as error:
        fail(str(error))
    if lanes is not None:
        sweep = replace(sweep, lanes_per_pack=lanes)
    folder = out or f"out/{sweep.name}"
    job = Job(sweep, folder, data, device, note, save_every, lanes is not None, cpus, packs)
    if dry_run:
        jobs.plan(job, ray, workers)
    outcome, progress = jobs.train(job, patience, ray, workers)
    where = [] if out is None else ["--records" if is_address(out) else "--out", out]
    following = shlex.join(["wngrad", "report", recipe, *where])
    print(f"{progress}. Records are in {folder}; next: {following}")
    for lane in outcome.failed:
        print(f"Failed: {lane}")
    if packs is not None:
        records = folder if is_address(folder) else None
        report(recipe, records, None if records else Path(folder))
    if outcome.left:
        again = shlex.join(["wngrad", *sys.argv[1:]])
        left = "1 pack is" if outcome.left == 1 else f"{outcome.left} packs are"
        print(f"{left} left. Go on with: {again}")
    raise typer.Exit(outcome.status)
