"""Interrupt small sweeps over and over, and say what went wrong as one line of JSON.

    python tests/kills.py kills 1000 FOLDER     SIGKILL, half of them in the middle of a write (F1)
    python tests/kills.py signals 100 FOLDER    SIGINT and SIGTERM (F7)
    python tests/kills.py claims 1000 FOLDER    16 processes share 1,000 runs (F6)
    python tests/kills.py DEADLY 2 FOLDER       a sweep of small_lab with 2 workers (F8)

With `--workers 2` each of the interrupted is a supervisor with two workers. A program of its own:
it forks its workers, so that none of them has to load torch again, and forking is safe only where
nothing has used torch's threads yet.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch._dynamo  # which every fork would load at its first step

import small_lab
from wngrad.lab.run import files, supervisor, worker
from wngrad.lab.run.pool import SIGNALS, Signals
from wngrad.lab.run.session import Session
from wngrad.lab.run.store import Store
from wngrad.lab.run.supervisor import supervise
from wngrad.lab.train.programs import PROGRAMS

LONG = 600.0  # seconds: only what hangs takes longer


def forked(work: Callable[[], int]) -> int:
    """Start `work` in a process and a group of its own; its exit status is what it returns.

    As under the supervisor, it begins with the signals held back until it can take them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            os.setpgid(0, 0)
            status = work()
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    os.setpgid(pid, pid)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def ended(pid: int, seconds: float) -> int | None:
    """The exit status of a process that ends within so many seconds, minus the signal's number."""
    until = time.monotonic() + seconds
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(0.001)


def gone(out: Path, seconds: float = 60.0) -> None:
    """Wait for workers that were killed with their supervisor, and may not have noticed yet."""
    until = time.monotonic() + seconds
    for path in (out / "locks").glob("*"):
        free = False
        while not free and time.monotonic() < until:
            with files.lock(path, wait=False) as free:
                pass
            time.sleep(0 if free else 0.001)


class ForkedProcess(supervisor._Process):
    """A worker of a supervisor that is forked."""

    others: ClassVar[list[int]] = []  # the supervisor's own descriptors

    def _start(self, commands: int, events: int) -> Any:
        self.others.extend((self.commands, self.events))
        pid = os.fork()
        if pid == 0:
            for descriptor in self.others:
                with suppress(OSError):
                    os.close(descriptor)
            os._exit(worker.main(os.fdopen(commands), events))
        return Forked(pid)


class Forked:
    """The part of Popen that a supervisor needs."""

    def __init__(self, pid: int) -> None:
        self.pid, self.status = pid, None

    def wait(self, seconds: float | None = None) -> int | None:
        if self.status is None:
            self.status = ended(self.pid, LONG if seconds is None else seconds)
        return self.status

    def poll(self) -> int | None:
        return self.wait(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


class ReadySignals(Signals):
    """What was held back comes once the supervisor can take it; before, it would end a Python."""

    def __enter__(self) -> Signals:
        signals = super().__enter__()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        return signals


def training(
    out: Path, events: Path, workers: int, kill: tuple[int, str] | None = None
) -> Callable[[], int]:
    """A worker, or a supervisor of several; with `kill`, its group dies at that write."""

    def work() -> int:
        told = os.open(events, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        with small_lab.stopped(*(kill or (0, "")), lambda *_: os.killpg(0, signal.SIGKILL)):
            if workers == 1:
                return worker.main(small_lab.commands(out), told)
            supervisor._Process = ForkedProcess  # type: ignore[misc]
            supervisor.Signals = ReadySignals  # type: ignore[misc]
            job = small_lab.job(out)
            return supervise(job, lambda event: tell(told, event), workers=workers).status

    return work


def tell(descriptor: int, event: dict[str, Any]) -> None:
    os.write(descriptor, (json.dumps(event) + "\n").encode())


def read(events: Path) -> list[dict[str, Any]]:
    """The events that were told whole."""
    data = events.read_bytes() if events.exists() else b""
    return [json.loads(line) for line in data.split(b"\n")[:-1]]


class Interruptions:
    """Sweeps, each interrupted until it is through."""

    def __init__(self, count: int, folder: Path, seed: int, workers: int, limit: float) -> None:
        self.count, self.folder, self.draw = count, folder, random.Random(seed)
        self.workers, self.limit = workers, limit
        self.trials, self.aimed, self.sweeps = 0, 0, 0
        self.slowest = 0.0  # from the signal to the end of the process
        self.failures: list[str] = []
        began = time.monotonic()
        done = ended(forked(training(folder / "whole", folder / "events", workers)), LONG)
        assert done == 0, f"the uninterrupted sweep ended with {done}"
        self.seconds = time.monotonic() - began
        self.whole = small_lab.contents(folder / "whole")

    def run(self, visit: Callable[[Path, Path], int]) -> dict[str, Any]:
        while self.trials < self.count and not self.failures:
            self.sweep(visit)
            self.sweeps += 1
        names = ("trials", "aimed", "sweeps", "slowest", "failures")
        return {name: getattr(self, name) for name in names}

    def sweep(self, visit: Callable[[Path, Path], int]) -> None:
        out, events, told = self.folder / "out", self.folder / "events", Counter[str]()
        status = -1
        while status != 0 and not self.failures:
            events.unlink(missing_ok=True)
            if self.trials < self.count:
                status = visit(out, events)
            else:
                status = ended(forked(training(out, events, self.workers)), LONG)
                self.fails(status != 0, f"the last visit ended with {status}")
            told.update(self.check(out, read(events), stopped=status != 0))
            self.trials += status != 0
        self.fails(max(told.values(), default=0) > 1, f"announced twice: {told}")
        if not self.failures:
            self.fails(
                small_lab.contents(out) != self.whole, f"other files: {self.differences(out)}"
            )
        shutil.rmtree(out, ignore_errors=True)

    def check(self, out: Path, events: list[dict[str, Any]], stopped: bool) -> list[str]:
        """Nothing announced is lost, and nothing is left as if it were running."""
        saved, lanes = small_lab.announced(events)
        self.fails(any(e["kind"] in ("busy", "warning", "error") for e in events), f"{events}")
        for lane in lanes:
            file = f"records/{lane}.json"
            self.fails((out / file).read_bytes() != self.whole[file], f"{lane} is another")
        if stopped and saved:
            store = Store(out, warn=self.failures.append)
            packs = {pack.name: pack for pack in store.open(small_lab.SWEEP, conditions(out))}
            for name, at in saved.items():
                there = small_lab.position(store, packs[name])
                self.fails(there is None or there < at, f"{name} is at {there}, not at {at}")
        return lanes

    def differences(self, out: Path) -> list[str]:
        found = small_lab.contents(out)
        return [k for k in {**found, **self.whole} if found.get(k) != self.whole.get(k)]

    def fails(self, wrong: bool, text: str) -> None:
        if wrong:
            self.failures.append(f"trial {self.trials}: {text}")

    def kill(self, out: Path, events: Path) -> int:
        """SIGKILL for the whole group, at a write or at any time."""
        if self.draw.random() < 0.5:
            at = (self.draw.randint(1, 100), self.draw.choice(("before", "half-way", "after")))
            status = ended(forked(training(out, events, self.workers, at)), LONG)
            self.aimed += status != 0
        else:
            pid = forked(training(out, events, self.workers))
            status = ended(pid, self.draw.uniform(0, self.seconds))
            if status is None:
                os.killpg(pid, signal.SIGKILL)
                status = ended(pid, LONG)
        gone(out)
        self.fails(status not in (0, -signal.SIGKILL), f"ended with {status}")
        return status

    def signal(self, out: Path, events: Path) -> int:
        """SIGINT or SIGTERM at any time: everything trained so far is saved."""
        number = self.draw.choice((signal.SIGINT, signal.SIGTERM))
        pid = forked(training(out, events, self.workers))
        status = ended(pid, self.draw.uniform(0, self.seconds))
        if status is None:
            os.killpg(pid, number)
            began = time.monotonic()
            status = ended(pid, self.limit)
            self.slowest = max(self.slowest, time.monotonic() - began)
        if status is None:
            os.killpg(pid, signal.SIGKILL)
            ended(pid, LONG)
        self.fails(status not in (0, 128 + number), f"ended with {status} after {number.name}")
        known = [e for e in read(events) if e["kind"] in ("start", "progress")]
        reached = {event["pack"]: event.get("epochs", 0.0) for event in known}
        saved = small_lab.announced(read(events))[0]
        self.fails(reached != saved, f"reached {reached}, saved {saved}")
        return status


def conditions(out: Path) -> dict[str, Any]:
    """Those of the folder itself: we only look."""
    known = json.loads((out / "sweep.json").read_bytes())["settings"]
    return {k: v for k, v in known.items() if k not in small_lab.SWEEP.identity()}


class Trivial:
    """A program that has nothing to do."""

    def __init__(self, sweep: Any, pack: Any, data: Any, device: str) -> None:
        self.pack, self.epoch, self.step, self.steps = pack, 0, 0, 1
        self.diverged = [None] * len(pack.lanes)
        self.curves: dict[str, list[list[float]]] = {"train_loss": []}
        self.start: dict[str, list[float]] = {}

    def advance(self, steps: int) -> None:
        self.epoch += 1
        self.curves["train_loss"].append([float(lane.seed) for lane in self.pack.lanes])

    def state(self) -> dict[str, Any]:
        return {"epoch": self.epoch}


def claims(runs: int, folder: Path, processes: int) -> dict[str, Any]:
    """Many processes in one folder; each says which runs it has taken."""
    PROGRAMS["stacked"] = Trivial  # type: ignore[assignment]
    small = replace(small_lab.SWEEP, optimizers=("sgd",), lam=(0.1,), lanes_per_pack=1, epochs=1)
    sweep, data = replace(small, seeds=tuple(range(runs))), small_lab.data()
    told = os.open(folder / "taken", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def tell(event: dict[str, Any]) -> None:
        if event["kind"] in ("start", "record"):
            os.write(told, f"{os.getpid()} {event['kind']} {event.get('pack')}\n".encode())

    def work() -> int:
        Session(sweep, data, Store(folder / "out"), tell=tell).run()
        return 0

    pids = [forked(work) for _ in range(processes)]
    status = [ended(pid, LONG) for pid in pids]
    lines = [line.split() for line in (folder / "taken").read_text().splitlines()]
    taken = Counter(pack for _, kind, pack in lines if kind == "start")
    records = Store(folder / "out").records()
    return {
        "status": status,
        "taken": len(taken),
        "taken_twice": [pack for pack, times in taken.items() if times > 1],
        "announced": sum(kind == "record" for _, kind, _ in lines),
        "records": len({record.lane for record in records if record.status == "done"}),
        "shares": sorted(Counter(pid for pid, kind, _ in lines if kind == "start").values()),
    }


def supervised(name: str, workers: int, folder: Path, real: bool) -> dict[str, Any]:
    """A sweep as it is; only runs that hang are silent."""
    if not real:
        supervisor._Process = ForkedProcess  # type: ignore[misc]
    os.chdir(folder)
    events: list[Any] = []
    job = small_lab.job(folder / "out", getattr(small_lab, name))
    outcome = supervise(job, events.append, 5, workers=workers, clock=small_lab.hung_clock)
    starts = [event["pack"] for event in events if event["kind"] == "start"]
    return {"status": outcome.status, "failed": outcome.failed, "starts": starts}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("kills", "signals", "claims", "MISBEHAVING", "DEADLY"))
    parser.add_argument("count", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--limit", type=float, default=LONG, help="seconds to leave in")
    parser.add_argument("--real", action="store_true", help="do not fork: start interpreters")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.what == "claims":
        found = claims(asked.count, asked.folder, asked.processes)
    elif asked.what.isupper():
        found = supervised(asked.what, asked.count, asked.folder, asked.real)
    else:
        trials = Interruptions(asked.count, asked.folder, asked.seed, asked.workers, asked.limit)
        found = trials.run(trials.kill if asked.what == "kills" else trials.signal)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
