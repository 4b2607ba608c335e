"""Run a sweep in a process of its own, so that nothing a run does can take the others along.

A pack whose process is killed, or says nothing for longer than `patience`, is recorded as failed
with the reason, and the rest goes on in a new process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wngrad.lab.run.worker import SIGNALS
from wngrad.lab.train.spec import Sweep

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is to run."""

    sweep: Sweep
    out: Path | str  # a folder, or an address
    data: Path | None = None
    device: str = "auto"
    note: str = ""
    save_every: float = 30.0
    sized: bool = False  # whether someone has said how many lanes a pack has

    def to_json(self, failed: dict[str, str]) -> str:
        return json.dumps(
            {
                "sweep": self.sweep.to_json(),
                "out": str(self.out),
                "data": str(self.data) if self.data else None,
                "device": self.device,
                "note": self.note,
                "save_every": self.save_every,
                "failed": failed,
            }
        )


@dataclass(slots=True)
class Outcome:
    """How a sweep ended: an exit status and, if there is something to say, a sentence."""

    status: int
    text: str = ""
    failed: list[str] = field(default_factory=list)  # lanes, with reasons


def supervise(job: Job, tell: Callable[[Event], None], patience: float | None = None) -> Outcome:
    """Run the job to its end, in as many processes as it takes."""
    lost: dict[str, str] = {}
    failed: dict[str, str] = {}
    with _forwarding() as forwarded:
        while True:
            seen = _Seen(tell)
            status = _run_once(job, lost, seen, patience, forwarded)
            failed |= seen.failed
            said = [f"{lane}: {reason}" for lane, reason in failed.items()]
            if seen.status is not None:
                return Outcome(seen.status or int(bool(said)), seen.text, said)
            if forwarded.signal:
                return Outcome(128 + forwarded.signal, failed=said)
            if seen.pack is None or seen.pack in lost:
                return Outcome(1, f"The training process {_how(status)} before it had begun.")
            lost |= {seen.pack: f"its process {_how(status)}"} | seen.lost


@dataclass(slots=True)
class _Seen:
    """What a worker has said so far; passes it on."""

    tell: Callable[[Event], None]
    pack: str | None = None
    status: int | None = None  # with which it ends, if it has come to that
    text: str = ""
    failed: dict[str, str] = field(default_factory=dict)  # lanes, with reasons
    lost: dict[str, str] = field(default_factory=dict)  # their packs: not to be tried twice

    def __call__(self, event: Event) -> None:
        self.tell(event)
        kind = event["kind"]
        if kind == "start":
            self.pack = event["pack"]
        elif kind == "record" and event["status"] == "failed":
            self.failed[event["lane"]] = self.lost[event["pack"]] = event["reason"]
        elif kind in ("finished", "interrupted", "error"):
            self.status, self.text = event["status"], event.get("text", "")


def _run_once(
    job: Job,
    lost: dict[str, str],
    tell: Callable[[Event], None],
    patience: float | None,
    forwarded: _Forwarded,
) -> int | str:
    """One worker, from its start to its end: its exit status, or why it was ended."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as events:
        try:
            worker = forwarded.start(writing)
        except OSError as error:
            return f"could not be started ({error})"
        finally:
            os.close(writing)
        with worker:
            assert worker.stdin is not None
            with suppress(BrokenPipeError):  # it has ended already; its status says how
                worker.stdin.write(job.to_json(lost))
                worker.stdin.close()
            for line in _lines(events, patience):
                if line is None:
                    worker.kill()
                    worker.wait()
                    return f"said nothing for {patience:g} s"
                tell(json.loads(line))
            return worker.wait()


def _lines(events: Any, patience: float | None) -> Iterator[bytes | None]:
    """Lines as they come; None if, after the first, none comes for `patience` seconds."""
    held, waiting = b"", None  # to load torch and the data may take any time
    while True:
        ready, _, _ = select.select([events], [], [], waiting)
        if not ready:
            yield None
            return
        found = os.read(events.fileno(), 65536)
        if not found:
            return
        waiting = patience
        *whole, held = (held + found).split(b"\n")
        yield from whole


@dataclass(slots=True)
class _Forwarded:
    """Ctrl-C and SIGTERM go to the worker, which saves; we wait for it, unless asked twice."""

    signal: int = 0  # the last that came
    worker: subprocess.Popen[str] | None = None

    def __call__(self, number: int, frame: object) -> None:
        # A run that hangs would never leave; and what is on the disk is whole.
        send = signal.SIGKILL if self.signal else number
        self.signal = number
        if self.worker is not None:
            self.worker.send_signal(send)

    def start(self, events: int) -> subprocess.Popen[str]:
        """Start a worker: signals are held back here until it is known, there until it is ready."""
        command = [sys.executable, "-m", "wngrad.lab.run.worker", str(events)]
        held = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            self.worker = subprocess.Popen(
                command, stdin=subprocess.PIPE, pass_fds=[events], text=True
            )
            return self.worker
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held)


@contextmanager
def _forwarding() -> Iterator[_Forwarded]:
    forwarded = _Forwarded()
    before = [signal.signal(number, forwarded) for number in SIGNALS]
    try:
        yield forwarded
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def _how(status: int | str) -> str:
    if isinstance(status, str):
        return status
    if status == -signal.SIGKILL:
        return "was killed (SIGKILL: perhaps for want of memory)"
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
