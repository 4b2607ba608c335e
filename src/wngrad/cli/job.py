"""A job of `wngrad run` or `wngrad sweep`: train it under a progress bar, or print its plan."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import typer

from wngrad.cli.messages import fail, make_folder, warn
from wngrad.lab.run.job import Event, Job, Outcome
from wngrad.lab.run.places import is_address
from wngrad.lab.run.supervisor import supervise


def train(
    job: Job,
    patience: float | None,
    ray: str | None,
    workers: int,
    opened: Callable[[], None] = lambda: None,
) -> tuple[Outcome, str]:
    """Run a job under a progress bar; leaves if it was stopped, or could not begin.

    Args:
        opened: called once the store is known to be that of this job.
    """
    from wngrad.lab.run.progress import Watch

    _check(job, ray, workers)
    if not is_address(job.out):
        make_folder(Path(job.out))
    with Watch(job.sweep.name) as watch:

        def tell(event: Event) -> None:
            if event["kind"] == "plan":
                opened()
            watch(event)

        if ray is None:
            outcome = supervise(job, tell, patience, workers=workers)
        else:
            from wngrad.lab.run.cluster import driver

            outcome = driver.run(job, tell, ray, patience=patience)
    if outcome.status in (130, 143):
        again = shlex.join(["wngrad", *sys.argv[1:]])
        print(f"Stopped; everything so far is saved in {job.out}. Go on with: {again}")
        raise typer.Exit(outcome.status)
    if outcome.text:
        fail(outcome.text)
    return outcome, f"{watch.text()}; {watch.times()}"


def plan(job: Job, ray: str | None, workers: int) -> NoReturn:
    """Print what would be done, and leave."""
    _check(job, ray, workers)
    try:
        if ray is None:
            from wngrad.lab.run import timing

            lines = timing.plan(job, workers)
        else:
            from wngrad.lab.run.cluster import driver

            lines = driver.plan(job, ray)
    except (ValueError, OSError, RuntimeError) as error:
        fail(str(error))
    print(*lines, sep="\n")
    raise typer.Exit(0)


def _check(job: Job, ray: str | None, workers: int) -> None:
    if ray is not None and workers > 1:
        fail(f"`--workers` must be left out with `--ray`, whose nodes have theirs, got {workers}.")
    packs = len(job.sweep.cut_lanes())
    if packs < workers:
        warn(f"{packs} of {workers} workers have a pack to train; --lanes cuts smaller ones.")
