"""A sweep of a user's task: what is to be run, how each optimizer is run, and the report."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wngrad.lab.optimizers import OPTIMIZERS, SWEPT, UNTUNED
from wngrad.lab.report import builder, costs
from wngrad.lab.report.cells import label
from wngrad.lab.report.results import Results
from wngrad.lab.report.summary import Summary, summarize
from wngrad.lab.run.job import Job
from wngrad.lab.run.stop_rules import WORDS
from wngrad.lab.run.store import Store
from wngrad.lab.run.worker import open_session
from wngrad.lab.sweep import page_source
from wngrad.lab.sweep.page_source import PageSource
from wngrad.lab.sweep.task_checks import checked as checked
from wngrad.lab.sweep.task_checks import checked_loaders, choose_program
from wngrad.lab.sweep.task_checks import why_not_at_once as why_not_at_once
from wngrad.lab.sweep.task_checks import why_not_stacked as why_not_stacked
from wngrad.lab.train.loader_task import LoaderTask
from wngrad.lab.train.naming import Choice, parse
from wngrad.lab.train.spec import ONE_BY_ONE, Kind, Setting, StopRule, Sweep
from wngrad.lab.train.task import AnyTask, Task, find
from wngrad.lab.train.words import counted

BRANCHES_AT_ONCE = 8
NEVER_ENDED = "Runs that train as one program are never ended: to stop one would save no time."
OWN: dict[str, str] = {  # why the runs of some tasks are separate
    "loop": "its batches come from loaders",
    "function": "its training is a function of its own",
}


@dataclass(frozen=True, slots=True)
class Plan:
    """A sweep, and a line for each optimizer that says how it is run and why."""

    sweep: Sweep
    how: tuple[str, ...]


def plan(
    address: str,
    *,
    lam: Sequence[float],
    seeds: int = 3,
    optimizers: Sequence[str] | None = None,
    epochs: int | None = None,
    device: str = "cpu",
    program: Kind | None = None,
    lanes: int | None = None,
    defaults: bool = True,
    stop: StopRule = "",
) -> Plan:
    """The sweep of a task: stacked where network and optimizer allow it, run as they are where not.

    Args:
        address: "file.py" (its `task`, or its `train`), "file.py:name" or "module:name".
        optimizers: names, "module:Class" or "file.py:function", each with settings in parentheses
            if need be; what is not a name is called as Class(params, lr=λ). None: SGD, Adam, WNGrad
            and WN-Adam, and WNMuon at its default alone, as it has nothing to tune.
        device: "cpu", "cuda" or "auto".
        program: how to train side by side, instead of the choice made here.
        lanes: at most so many side by side, if memory is short.
        defaults: run each optimizer at the λ of its signature, too.
        stop: which runs to end before their time.

    Raises:
        ValueError: there is no such task or optimizer, or the task does not work; in one line.
    """
    if not all(0 < each < math.inf for each in lam):
        raise ValueError(f"sweep: `lam` must be finite numbers > 0, got {tuple(lam)!r}.")
    task = find(address)
    over_lam = [parse(name) for name in (SWEPT if optimizers is None else optimizers)]
    untuned = [parse(name) for name in UNTUNED if optimizers is None and defaults]
    choices = [*over_lam, *untuned]
    for choice in choices:
        choice.function()
    names = tuple(choice.name for choice in over_lam)
    fields, why = _fields(task, address, device, program)
    chosen = fields["program"]
    sweep = Sweep(
        name=task.name,
        claim="How much does the result depend on the learning rate?",
        dataset=task.name,
        model=task.name,
        optimizers=names,
        lam=tuple(lam),
        epochs=task.epochs if epochs is None else epochs,
        seeds=tuple(range(seeds)),
        lanes_per_pack=lanes or (BRANCHES_AT_ONCE if chosen == "branches" else None),
        task=address,
        alone=tuple(
            choice.name
            for choice in choices
            if choice.name not in OPTIMIZERS and chosen not in ONE_BY_ONE
        ),
        defaults=_defaults(choices) if defaults else (),
        stop=stop,
        **fields,
    )
    if untuned:
        own = [each for each in sweep.defaults if each.optimizer not in names]
        grid = [Setting(name, each) for name in names for each in sweep.lam]
        sweep = replace(sweep, pairs=(*grid, *own))
    lines = [_how(sweep, name, why if name in names else None) for name in sweep.optimizers]
    if stop and set(names) - set(sweep.alone) and chosen not in ONE_BY_ONE:
        lines.append(f"--stop {stop}: {NEVER_ENDED[0].lower()}{NEVER_ENDED[1:]}")
    return Plan(sweep, tuple(lines))


def _fields(
    task: AnyTask, address: str, device: str, program: Kind | None
) -> tuple[dict[str, Any], str]:
    """What a sweep takes from a task, and why its runs are separate, if they are."""
    if isinstance(task, Task):
        data = checked(task, address)
        chosen, why = (program, "") if program else choose_program(task, data, device)
        part = "test" if data.validation is None else "valid"
        key = f"{part}_{task.metric_key.partition('_')[2]}" if task.metric_key else "train_loss"
        return {
            "batch": task.batch,
            "weight_decay": task.weight_decay,
            "precision": task.precision,
            "program": chosen,
            "metrics": (f"{part}_loss", key),
            "best_by": f"{part}_loss",
            "metric_name": task.metric_name if task.metric else "",
        }, why
    if program:
        raise ValueError(f"sweep: `program` must be auto for {address}, got {program!r}.")
    if not isinstance(task, LoaderTask):
        own = {"program": "function", "metrics": ("valid_loss",), "epochs_fixed": True}
        return {**own, "best_by": "valid_loss"}, OWN["function"]
    checked_loaders(task, address, device)
    return {
        "weight_decay": task.weight_decay,
        "program": "loop",
        "metrics": ("valid_loss", task.metric_key or "train_loss"),
        "best_by": "valid_loss",
        "metric_name": task.metric_name if task.metric else "",
        "epochs_fixed": task.epochs_fixed,
    }, OWN["loop"]


def _defaults(choices: Sequence[Choice]) -> tuple[Setting, ...]:
    lams = {choice.name: choice.default_lam() for choice in choices}
    return tuple(Setting(name, lam) for name, lam in lams.items() if lam is not None)


def grid(low: float, high: float, per_decade: int) -> tuple[float, ...]:
    """λ from `low` up to `high`, evenly spaced in log λ.

    >>> grid(0.01, 1, 2)
    (0.01, 0.0316228, 0.1, 0.316228, 1.0)
    """
    if not 0 < low <= high < math.inf or per_decade < 1:
        raise ValueError(
            "sweep: `lam` must go from a number > 0 up to a finite one, at least one a decade, "
            f"got {low!r}, {high!r} and {per_decade!r}."
        )
    steps = math.floor(per_decade * math.log10(high / low) + 1e-9)
    return tuple(float(f"{low * 10 ** (k / per_decade):.6g}") for k in range(steps + 1))


def folder(task: str) -> str:
    """A task's name as that of a folder."""
    return re.sub(r"[^\w.-]+", "-", task).strip("-.") or "task"


def run(plan: Plan, home: Path | str, device: str = "cpu") -> Results:
    """Train what a folder lacks of a sweep, in this process, and read all that is there.

    For programs that choose λ by themselves, as a study of Optuna does; `wngrad sweep` does the
    same in processes of its own, which a run cannot take along.
    """
    job = Job(plan.sweep, home, device=device)
    session = open_session(job, lambda event: None, lambda: False)
    packs = session.open()
    remember(plan, home, "")
    for pack in packs:
        session.run_pack(pack.name)
    return results(home)


def results(home: Path | str, warn: Callable[[str], None] = lambda text: None) -> Results:
    """The results of all that a folder holds.

    Raises:
        ValueError: there is no record of a sweep.
    """
    store = Store(home, warn=warn)
    source = page_source.read(store)
    if source is None:
        raise ValueError(f"report: {home} must hold the records of `wngrad sweep`, got none.")
    return _results(store, source)


def _results(store: Store, source: PageSource) -> Results:
    records = store.records()
    planned = {lane for pack in store.cut() for lane in pack.lanes}
    found = Results(source.sweep, records, planned)
    return Results(_with_metrics(source.sweep, found), records, planned)


def remember(plan: Plan, home: Path | str, command: str) -> None:
    """Write down, beside the records, what a page of all that is there is made from."""
    page_source.add(Store(home), PageSource(plan.sweep, plan.how, (command,) * bool(command)))


def report(home: Path | str, folder: Path, warn: Callable[[str], None]) -> Summary:
    """Write the report of all that a folder holds.

    Args:
        home: where the records are.
        folder: where the report goes.
        warn: is called with a line for records that cannot be read.

    Raises:
        ValueError: there is no record of a sweep.
    """
    store = Store(home, warn=warn)
    source = page_source.read(store)
    if source is None:
        raise ValueError(f"report: {home} must hold the records of `wngrad sweep`, got none.")
    results = _results(store, source)
    log = costs.read(store.sessions())
    notes = [*source.notes, *_notes(results, log)]
    written = builder.write_results(results, folder, notes, "\n".join(source.commands), log)
    store.export(folder / "records.jsonl")
    return summarize(results, written, log)


def _with_metrics(sweep: Sweep, results: Results) -> Sweep:
    """The sweep with the metrics to draw; of a function's they are known when it has reported."""
    if sweep.program != "function":
        return sweep
    losses = ("valid_loss", "test_loss", "train_loss")
    others = [m for m in results.metrics if m not in losses] + ["train_loss"]
    second = [m for m in others if m in results.recorded][:1]
    return replace(sweep, metrics=("valid_loss", *second))


def _notes(results: Results, log: costs.Log) -> list[str]:
    sweep, notes = results.sweep, list[str]()
    if sweep.best_by == "test_loss":
        notes.append(
            "λ was chosen on the test data, as the task has no validation data: the result at the "
            "best λ is a little too good."
        )
    if sweep.program == "function" and not results.has_starts:
        notes.append(
            "No run reported at step 0: the loss at the start is taken to be the highest first "
            "report at the least λ of an optimizer."
        )
    if ends := [name for name in sweep.optimizers if _at_an_end(results, name)]:
        notes.append(
            f"The best λ of {', '.join(map(label, ends))} is at an end of the grid: a longer one "
            "(--lam-from, --lam-to, in the same folder) may find a better."
        )
    if sweep.stop:
        together = f" {NEVER_ENDED}" if sweep.program not in ONE_BY_ONE else ""
        notes.append(f"Stopping rule: {WORDS[sweep.stop]}. {log.saved()}{together}")
    return notes


def _at_an_end(results: Results, optimizer: str) -> bool:
    best, grid = results.best(optimizer), results.sweep.grid(optimizer)
    return best is not None and len(grid) > 1 and best.lam in (grid[0], grid[-1])


def _how(sweep: Sweep, name: str, why: str | None) -> str:
    """How an optimizer's lanes are run, and why, in a sentence; None: its λ is not swept."""
    lanes = sum(setting.optimizer == name for setting in sweep.settings) * len(sweep.seeds)
    if why is None:
        why = "at its default alone, as it has nothing to tune"
    elif name in sweep.alone:
        why = "it is run as it is, as the lab has no stacked form of it"
    because = f": {why}" if why else ""
    if sweep.program in ONE_BY_ONE or name in sweep.alone:
        return f"{name}: {counted(lanes, 'separate run')}{because}."
    if sweep.program == "branches":
        return f"{name}: {lanes} lanes, {sweep.lanes_per_pack} networks side by side{because}."
    together = sum(s.optimizer not in sweep.alone for s in sweep.settings) * len(sweep.seeds)
    return f"{name}: stacked, {lanes} of the {together} lanes that train as one program."
