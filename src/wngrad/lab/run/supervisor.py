"""Run a job in processes of its own, so that nothing a run does can take the others along.

A pack whose process is killed, or tells nothing for longer than `patience`, is recorded as failed
with the reason, and the rest goes on in a new process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

from wngrad.lab.atomic import write_all
from wngrad.lab.run.compiling import bytecode_kept
from wngrad.lab.run.job import Event, Outcome, Tell
from wngrad.lab.run.job import Job as Job
from wngrad.lab.run.pool import POLL, SIGNALS, Ended, Pool, Signals, Stopped

GRACE = 10.0  # seconds for a worker without work to leave
_CAUSES = {  # what most often sends a process these signals
    "SIGKILL": ": perhaps for want of memory",
    "SIGILL": ": an instruction that this processor does not allow",
    "SIGSEGV": ": compiled code has read what is not its own",
}


def supervise(
    job: Job,
    tell: Tell,
    patience: float | None = None,
    *,
    workers: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Run the job to its end in `workers` processes at a time, and as many in all as it takes."""
    try:
        with Signals() as signals, Processes(job, workers) as processes:
            if error := processes.open(tell, signals.check):
                return Outcome(error.status, error.text)
            outcome = Pool(processes, tell, signals, patience, clock).run(
                processes.packs[: job.packs]
            )
            return replace(outcome, left=len(processes.packs[job.packs :]) if job.packs else 0)
    except Stopped as stopped:
        return Outcome(128 + stopped.number)


class Processes:
    """Workers of this machine: processes that stay from pack to pack. A context manager."""

    tries = 1

    def __init__(self, job: Job, limit: int) -> None:
        self.job, self.limit = job, limit
        self.packs: list[str] = []  # known when the store has been opened
        self._gpus = gpus(job.device) if limit > 1 else []
        self._processes: list[_Process] = []
        self._not_started: list[Ended] = []

    def open(self, tell: Tell, check: Callable[[], None]) -> Ended | None:
        """Have a first worker load the data and open the store; what went wrong, or None.

        Args:
            check: called while waiting; may raise.
        """
        self.send("", "")
        while True:
            check()
            for message in self.wait(POLL):
                if isinstance(message, Ended):
                    return None if message.how == "finished" else message
                tell(message)

    def send(self, pack: str, failed: str) -> None:
        idle = next((p for p in self._processes if p.pack is None and not p.leaves), None)
        try:
            process = idle or _Process(self.job, self._gpu())
        except OSError as error:
            self._not_started.append(_not_begun(pack, f"could not be started ({error})"))
            return
        if idle is None:
            self._processes.append(process)
        process.pack = pack
        process.write({"pack": pack, "failed": failed})

    def _gpu(self) -> str:
        """The GPU that the fewest workers have; empty if there is none to choose."""
        taken = [process.gpu for process in self._processes]
        return min(self._gpus, key=taken.count, default="")

    def wait(self, seconds: float) -> list[Event | Ended]:
        messages: list[Event | Ended] = [*self._not_started]
        self._not_started.clear()
        dead = [p for p in self._processes if p.popen.poll() is not None]
        pipes = [p.events for p in self._processes]
        ready = select.select(pipes, [], [], 0 if messages or dead else seconds)[0]
        for process in list(self._processes):
            if process in dead or process.events in ready:
                messages += [self._message(process, event) for event in process.read()]
            if process in dead or process.closed:
                self._processes.remove(process)
                status = process.end(GRACE)
                if process.pack is not None:
                    messages.append(_end_of(process, process.pack, status))
        return [m for m in messages if isinstance(m, Ended) or m["kind"] != "packs"]

    def _message(self, process: _Process, event: Event) -> Event | Ended:
        if event["kind"] == "packs":
            self.packs = event["packs"]
        if event["kind"] != "ended":
            process.begun = process.begun or "pack" in event
            return event
        pack, process.pack = process.pack or "", None
        process.begun, process.served, process.leaves = False, True, bool(event.get("leaves"))
        what = {key: value for key, value in event.items() if key not in ("kind", "leaves")}
        return Ended(pack, **what)

    def stop(self) -> list[str]:
        for process in self._processes:
            process.popen.terminate()
        return []

    def kill(self, pack: str) -> None:
        for process in self._processes:
            if process.pack == pack:
                process.popen.kill()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.end(GRACE if process.pack is None else 0)


class _Process:
    """A worker: an interpreter that is sent packs and tells events, each a line of JSON."""

    def __init__(self, job: Job, gpu: str = "") -> None:
        self.gpu = gpu
        commands, self.commands = os.pipe()
        self.events, events = os.pipe()
        # Signals are held back there until the worker can take them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self.popen = self._start(commands, events)
        except OSError:
            os.close(self.commands)
            os.close(self.events)
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            os.close(commands)
            os.close(events)
        self.pack: str | None = None  # which it trains; empty: it opens the store
        self.begun = False  # whether it has told of that pack
        self.served = False  # whether it has come to the end of one
        self.leaves = False  # whether it takes no other pack
        self.closed = False
        self._rest = b""
        self.write(job.to_json())

    def _start(self, commands: int, events: int) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "wngrad.lab.run.worker", str(commands), str(events)]
        seen = {"CUDA_VISIBLE_DEVICES": self.gpu} if self.gpu else {}
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            pass_fds=(commands, events),
            env={**os.environ, **bytecode_kept(), **seen},
        )

    def write(self, command: Any) -> None:
        with suppress(BrokenPipeError):  # it has ended already; its status says how
            write_all(self.commands, (json.dumps(command) + "\n").encode())

    def read(self) -> Iterator[Event]:
        """The events that have come."""
        while not self.closed and select.select([self.events], [], [], 0)[0]:
            data = os.read(self.events, 65536)
            self.closed = not data
            *lines, self._rest = (self._rest + data).split(b"\n")
            yield from map(json.loads, lines)

    def end(self, seconds: float) -> int:
        """Its exit status; it is killed if it does not leave in so many seconds."""
        os.close(self.commands)
        os.close(self.events)
        if not seconds:
            self.popen.kill()
        try:
            return self.popen.wait(seconds or None)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            return self.popen.wait()


def gpus(device: str) -> list[str]:
    """The GPUs that workers share, as CUDA_VISIBLE_DEVICES calls them; empty if there is one.

    Only those that are called like the first: records of one folder are made on one kind.
    """
    if device not in ("auto", "cuda"):  # the CPU, or one that the user has named
        return []
    import torch

    if (count := torch.cuda.device_count()) < 2:
        return []
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = listed if len(listed) == count else [str(k) for k in range(count)]
    kinds = [torch.cuda.get_device_name(k) for k in range(count)]
    return [name for name, kind in zip(names, kinds, strict=True) if kind == kinds[0]]


def _end_of(process: _Process, pack: str, status: int) -> Ended:
    """What has become of a pack whose process is gone."""
    if status in [128 + number for number in SIGNALS]:
        return Ended(pack, "interrupted", status=status)
    if not process.begun and not process.served:
        return _not_begun(pack, _how(status))
    return Ended(pack, "lost", f"its process {_how(status)}", blameless=not process.begun)


def _not_begun(pack: str, how: str) -> Ended:
    return Ended(pack, "error", f"The training process {how} before it had begun.", status=1)


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed ({name}{_CAUSES.get(name, '')})"
