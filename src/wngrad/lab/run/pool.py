"""The pool that runs packs: it hands them to workers, and fails those that take workers along.

The workers are processes of this machine (`supervisor`) or tasks on a Ray cluster (`cluster`).
Nothing is kept here that the next run would need: that is all in the store.
"""

from __future__ import annotations

import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal, Protocol

from wngrad.lab.run.job import Event, Outcome, Tell

SIGNALS = (signal.SIGINT, signal.SIGTERM)
POLL = 0.25  # seconds a pool waits for its workers before it looks at signals and silent packs


class Stopped(KeyboardInterrupt):
    """A signal came before the first pack was sent: there is nothing to save."""

    def __init__(self, number: int) -> None:
        self.number = number


class Signals:
    """A counter of Ctrl-C and SIGTERM: at the first the packs save, at the second we leave.

    Nothing is raised where they come, which may be in the middle of Ray's own code.
    """

    def __init__(self) -> None:
        self.count, self.last = 0, 0

    def __call__(self, number: int, frame: object) -> None:
        self.count, self.last = self.count + 1, number

    def check(self) -> None:
        """Leave, where there is nothing to save."""
        if self.count:
            raise Stopped(self.last)

    def __enter__(self) -> Signals:
        self.before = [signal.signal(number, self) for number in SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(SIGNALS, self.before, strict=True):
            signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a pack's run, whatever came of it.

    An "error" ends the job, with `status` and `text`; a "lost" pack has lost its worker, and
    `text` says how.
    """

    pack: str
    how: Literal["finished", "interrupted", "error", "lost"] = "finished"
    text: str = ""
    status: int = 2
    blameless: bool = False  # the pack cannot have caused the loss of its worker


class Workers(Protocol):
    """Whoever trains packs, one at a time each."""

    limit: int  # how many packs may be sent that have not ended
    tries: int  # how many workers a pack may take along before it is recorded as failed

    def send(self, pack: str, failed: str, /) -> None:
        """Have a pack trained, or recorded as failed for the reason `failed`."""

    def wait(self, seconds: float, /) -> Iterable[Event | Ended]:
        """What has happened, as soon as something has, or after so many seconds."""

    def stop(self) -> Iterable[str]:
        """Ask all to save and leave; the packs that had not begun, and do not end."""

    def kill(self, pack: str, /) -> None:
        """End the worker of a pack that no longer tells anything."""


@dataclass(slots=True)
class Pool:
    """Sends packs to workers, and hears of them, until all have ended.

    Args:
        patience: seconds without an event, once a pack has begun, after which it is called hung.
        clock: what `patience` is measured by.
    """

    workers: Workers
    tell: Tell
    signals: Signals
    patience: float | None = None
    clock: Callable[[], float] = time.monotonic
    queue: deque[tuple[str, str]] = field(default_factory=deque)  # packs, and why they failed
    running: set[str] = field(default_factory=set)
    heard: dict[str, float] = field(default_factory=dict)  # when packs that have begun last told
    silent: set[str] = field(default_factory=set)  # packs whose workers were killed for that
    lost: Counter[str] = field(default_factory=Counter)  # workers that packs have taken along
    failed: dict[str, str] = field(default_factory=dict)  # lanes, with reasons
    error: Ended | None = None
    stop_status: int = 0  # once the workers have been asked to stop
    undone: bool = False  # whether a pack was left for the next time

    def run(self, packs: Iterable[str]) -> Outcome:
        """Run these packs, of which each is sent once, and again if its worker is lost."""
        self.queue.extend((pack, "") for pack in packs)
        while (self.queue or self.running) and self.signals.count < 2:
            if self.signals.count:
                self._stop(128 + self.signals.last)
            while self.queue and len(self.running) < self.workers.limit:
                pack, failed = self.queue.popleft()
                self.running.add(pack)
                self.workers.send(pack, failed)
            for message in self.workers.wait(POLL) if self.running else ():
                if isinstance(message, Ended):
                    self._ended(message)
                else:
                    self._heard(message)
            self._kill_silent()
        return self._outcome()

    def _outcome(self) -> Outcome:
        failed = [f"{lane}: {reason}" for lane, reason in self.failed.items()]
        if self.error:
            return Outcome(self.error.status, self.error.text, failed)
        if self.undone or self.running:
            return Outcome(self.stop_status or 128 + self.signals.last, failed=failed)
        return Outcome(int(bool(failed)), failed=failed)

    def _heard(self, event: Event) -> None:
        if event.get("pack") in self.running:
            self.heard[event["pack"]] = self.clock()
        if event["kind"] == "record" and event["status"] == "failed":
            self.failed[event["lane"]] = event["reason"]
        self.tell(event)

    def _ended(self, ended: Ended) -> None:
        self.running.discard(ended.pack)
        self.heard.pop(ended.pack, None)
        if ended.how == "lost" and not self.stop_status:
            self._send_again(ended)
        elif ended.how == "error":
            self.error = self.error or ended
            self._stop(ended.status)
        elif ended.how != "finished":
            self.undone = True
            self._stop(ended.status)

    def _send_again(self, ended: Ended) -> None:
        """Send a lost pack once more, or have it recorded as failed."""
        pack, reason = ended.pack, ""
        self.lost[pack] += not ended.blameless
        if pack in self.silent:
            reason = f"its process said nothing for {self.patience:g} s"
        elif self.lost[pack] >= self.workers.tries:
            times = f", {self.workers.tries} times" if self.workers.tries > 1 else ""
            reason = f"{ended.text}{times}"
        else:
            self.tell({"kind": "warning", "text": f"{pack}: {ended.text}; it goes on elsewhere"})
        self.queue.appendleft((pack, reason))

    def _kill_silent(self) -> None:
        now = self.clock()
        for pack, since in list(self.heard.items()):
            if self.patience is not None and now - since > self.patience:
                if pack not in self.silent:
                    self.workers.kill(pack)
                self.silent.add(pack)

    def _stop(self, status: int) -> None:
        """Let who has begun save and leave; the others do not begin."""
        if self.stop_status:
            return
        self.stop_status = status
        left = [pack for pack, _ in self.queue]
        self.queue.clear()
        for pack in self.workers.stop():
            self.running.discard(pack)
            left.append(pack)
        self.undone = self.undone or bool(left)
