"""A job of `wngrad run` or `wngrad sweep`: train it under a progress bar, or print its plan."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import NoReturn

import typer

from wngrad.cli.messages import fail, make_folder
from wngrad.lab.run.places import is_address
from wngrad.lab.run.supervisor import Job, Outcome, supervise


def train(job: Job, patience: float | None, ray: str | None, cpus: int) -> tuple[Outcome, str]:
    """Run a job under a bar; leaves if it was stopped, or could not begin."""
    from wngrad.lab.run.progress import Watch

    if not is_address(job.out):
        make_folder(Path(job.out))
    with Watch(job.sweep.name) as watch:
        if ray is None:
            outcome = supervise(job, watch, patience)
        else:
            from wngrad.lab.run.cluster import driver

            outcome = driver.run(job, watch, ray, cpus=cpus, patience=patience)
    if outcome.status in (130, 143):
        again = shlex.join(["wngrad", *sys.argv[1:]])
        print(f"Stopped; everything so far is saved in {job.out}. Go on with: {again}")
        raise typer.Exit(outcome.status)
    if outcome.text:
        fail(outcome.text)
    return outcome, watch.text()


def plan(job: Job, ray: str | None, cpus: int) -> NoReturn:
    """Say what would be done, and leave."""
    try:
        if ray is None:
            from wngrad.lab.run import timing

            lines = timing.plan(job)
        else:
            from wngrad.lab.run.cluster import driver

            lines = driver.plan(job, ray, cpus=cpus)
    except (ValueError, OSError, RuntimeError) as error:
        fail(str(error))
    print(*lines, sep="\n")
    raise typer.Exit(0)
