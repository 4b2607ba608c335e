"""What the commands of the lab share: run a job under a bar, tell its plan, fail in one line."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import NoReturn, cast, get_args

import typer

from wngrad.lab.run.places import is_address
from wngrad.lab.run.supervisor import Job, Outcome, supervise
from wngrad.lab.train.spec import Kind


def trained(job: Job, patience: float | None, ray: str | None, cpus: int) -> tuple[Outcome, str]:
    """Run a job under a bar; leaves if it was stopped, or could not begin."""
    from wngrad.lab.run.progress import Watch

    if not is_address(job.out):
        make(Path(job.out))
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


def numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        fail(f"`--{name}` must be numbers with commas, got {text!r}.")


def kind(text: str) -> Kind | None:
    if text not in ("auto", *get_args(Kind)):
        fail(f"`--program` must be auto, {', '.join(get_args(Kind))}, got {text!r}.")
    return None if text == "auto" else cast(Kind, text)


def fail(message: str) -> NoReturn:
    """A user's mistake: one line, exit code 2."""
    print(f"wngrad: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(2)


def warn(text: str) -> None:
    print(f"wngrad: {text}", file=sys.stderr)


def make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"`--out` must be a folder that can be written, got {folder}: {error.strerror}.")
