"""Timing of a few steps of a sweep's real programs: what `pack_size` decides by."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from wngrad.lab.run.environment import Trained
from wngrad.lab.run.job import Job
from wngrad.lab.run.pack_size import Measured, Plan, enough, in_words
from wngrad.lab.run.worker import open_session
from wngrad.lab.train.cuda_stats import free, synchronize
from wngrad.lab.train.programs import LoopRun, Program, make
from wngrad.lab.train.spec import ONE_BY_ONE, Kind, Pack, Sweep

STEPS = 20  # timed of each program, or an epoch if that is shorter
SECONDS = 2.0  # after which fewer steps must do
TIMES = 4  # as many lanes in the next program: on a GPU each has to be compiled
BUDGET = 180.0  # seconds after which no larger program is tried


def growing(sweep: Sweep, data: Trained, device: str, most: int | None) -> list[Measured]:
    """Programs of 1, 4, 16, … lanes, up to `most` or until more no longer pay or fit in memory."""
    began, costs = time.monotonic(), list[Measured]()
    for pack in _growing(sweep, most):
        try:
            costs.append(one(sweep, pack, data, device))
        except torch.OutOfMemoryError:
            if not costs:
                raise
            break
        finally:
            free(device)
        if enough(costs) or time.monotonic() - began > BUDGET:
            break
    return costs


def sizes(
    sweep: Sweep, packs: Sequence[Pack], data: Trained, device: str
) -> dict[Kind, list[Measured]]:
    """What each kind and size among these packs costs."""
    alike = {(sweep.kind(pack), len(pack.lanes)): pack for pack in packs}
    costs: dict[Kind, list[Measured]] = {}
    for (kind, _), pack in sorted(alike.items(), key=lambda item: item[0]):
        costs.setdefault(kind, []).append(one(sweep, pack, data, device))
        free(device)
    return costs


def plan(job: Job, workers: int = 1) -> list[str]:
    """What a run on this machine would do, in lines; trains nothing and writes no store.

    Raises:
        ValueError: it could not be run, in one line.
    """
    with _threads(job.cpus):
        session = open_session(job, lambda event: None, lambda: False)
        packs = session.store.packs(session.sweep, session.conditions)
        if session.sweep.program == "function":
            return [unknown(len(packs), workers)]
        costs = sizes(session.sweep, packs, session.data, session.device)
    left = session.store.unfinished(packs, session.settings, session.sweep.epochs)
    done = {pack.name for pack in packs} - {pack.name for pack in left}
    device = session.environment["device"]
    lines = [f"Measured here: {kind}, {in_words(each)}." for kind, each in costs.items()]
    return [*lines, *Plan(session.sweep, packs, frozenset(done), workers, device, costs).lines()]


def unknown(runs: int, at_once: int) -> str:
    """What is said of runs whose time only their function knows."""
    return f"{runs} runs of a function, {at_once} at a time: how long one takes is not known."


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads of torch, as a worker has, for as long as this lasts."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one(sweep: Sweep, pack: Pack, data: Trained, device: str) -> Measured:
    """What a program for this pack costs."""
    began = time.perf_counter()
    program = make(sweep.kind(pack), sweep, pack, data, device)
    assert isinstance(program, (Program, LoopRun))
    program.advance(1)
    start = time.perf_counter() - began
    test = _timed(program, program._test)
    done, took, until = 0, 0.0, min(STEPS, program.steps)
    while done < until and took < SECONDS:
        epoch, count = program.epoch, 1 if took == 0 else max(1, (until - done) // 2)
        count = min(count, program.steps - program.step)
        spent = _timed(program, lambda n=count: program.advance(n))  # type: ignore[misc]
        took += max(spent - (test if program.epoch > epoch else 0.0), 1e-9)
        done += count
    return Measured(len(pack.lanes), start, took / done, test, program.steps)


def _growing(sweep: Sweep, most: int | None) -> Iterator[Pack]:
    """The first packs of the cuts at 1, 4, 16, … lanes, each size once."""
    tried, size = set[int](), 1
    limit = min(most or len(sweep.lanes), len(sweep.lanes))
    while True:
        pack = replace(sweep, lanes_per_pack=min(size, limit)).cut(sweep.seeds)[0]
        if len(pack.lanes) not in tried:
            yield pack
        tried.add(len(pack.lanes))
        if size >= limit or sweep.kind(pack) in ONE_BY_ONE:  # which trains one lane after another
            return
        size *= TIMES


def _timed(program: Program | LoopRun, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    synchronize(program.device)
    return time.perf_counter() - began
