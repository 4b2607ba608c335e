"""Time a few steps of a sweep's real programs: what `pack_size` decides by."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from wngrad.lab.run.pack_size import Measured, Plan, enough, told
from wngrad.lab.run.supervisor import Job
from wngrad.lab.train.data import Data
from wngrad.lab.train.programs import PROGRAMS, Program
from wngrad.lab.train.spec import Kind, Pack, Sweep

STEPS = 20  # timed of each program, or an epoch if that is shorter
SECONDS = 2.0  # after which fewer steps must do
TIMES = 4  # as many lanes in the next program: on a GPU each has to be compiled
BUDGET = 180.0  # seconds after which no larger program is tried


def growing(sweep: Sweep, data: Data, device: str, most: int | None) -> list[Measured]:
    """Programs of 1, 4, 16, … lanes, up to `most` or until more no longer pay or fit in memory."""
    began, found = time.monotonic(), list[Measured]()
    for pack in _growing(sweep, most):
        try:
            found.append(one(sweep, pack, data, device))
        except torch.OutOfMemoryError:
            if not found:
                raise
            break
        finally:
            free(device)
        if enough(found) or time.monotonic() - began > BUDGET:
            break
    return found


def sizes(
    sweep: Sweep, packs: Sequence[Pack], data: Data, device: str
) -> dict[Kind, list[Measured]]:
    """What each kind and size among these packs costs."""
    alike = {(sweep.kind(pack), len(pack.lanes)): pack for pack in packs}
    found: dict[Kind, list[Measured]] = {}
    for (kind, _), pack in sorted(alike.items(), key=lambda item: item[0]):
        found.setdefault(kind, []).append(one(sweep, pack, data, device))
        free(device)
    return found


def plan(job: Job) -> list[str]:
    """What a run on this machine would do, in lines; trains nothing and writes no store.

    Raises:
        ValueError: it could not be run, in one line.
    """
    from wngrad.lab.run.session import conditions
    from wngrad.lab.run.worker import session

    found = session(json.loads(job.to_json({})), lambda event: None, lambda: False)
    packs = found.store.packs(found.sweep, conditions(found))
    left = {p.name for p in packs if found.store.missing(p, found.settings, found.sweep.epochs)}
    costs = sizes(found.sweep, packs, found.data, found.device)
    done = frozenset(p.name for p in packs) - left
    what = found.environment["device"]
    lines = [f"Measured here: {kind}, {told(each)}." for kind, each in costs.items()]
    return [*lines, *Plan(found.sweep, packs, done, 1, what, costs).lines()]


def one(sweep: Sweep, pack: Pack, data: Data, device: str) -> Measured:
    """What a program for this pack costs."""
    began = time.perf_counter()
    program = PROGRAMS[sweep.kind(pack)](sweep, pack, data, device)
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
        if size >= limit or sweep.kind(pack) == "lone":  # which trains one lane after another
            return
        size *= TIMES


def _timed(program: Program, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if program.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def free(device: str) -> None:
    """Let go of what the last program held."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
