"""The progress of a sweep for a person: a bar on a terminal, plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from wngrad.lab.run.pack_size import minutes
from wngrad.lab.train.words import counted

LINE_EVERY = 10.0  # seconds between two plain lines


class Watch:
    """Turns a session's events into a bar or lines, on stderr. Use it as a context manager."""

    def __init__(self, name: str, stream: TextIO | None = None) -> None:
        self.name, self.stream = name, stream or sys.stderr
        self.lanes, self.epochs = 0, 0
        self.done: dict[str, float] = {}  # pack → lanes × epochs
        self.diverged: dict[str, int] = {}
        self.failed: set[str] = set()  # lanes
        self.since: tuple[float, float] | None = None  # when training began, and what was done
        self.spent = {"start": 0.0, "training": 0.0}  # seconds of all packs
        self.printed = 0.0  # when the last line was
        self.bar = _bar(Console(file=self.stream)) if self.stream.isatty() else None
        self.task = self.bar.add_task(name, total=None, text="starting") if self.bar else None

    def __enter__(self) -> Watch:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar:
            self.bar.stop()

    def __call__(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "plan":
            self.lanes, self.epochs = event["lanes"], event["epochs"]
            self._line(f"{counted(self.lanes, 'lane')}, {counted(self.epochs, 'epoch')}")
        elif kind == "had":
            self.done[event["pack"]] = event["lanes"] * self.epochs
        elif kind == "start" and event["lanes"] > 1:  # of lone runs the progress is enough
            self._line(f"{event['pack']}: {event['lanes']} lanes at once")
        elif kind == "busy":
            self._line(f"{event['pack']} is being run by another process: left to it")
        elif kind == "progress":
            self._progress(event)
        elif kind == "record" and event["status"] == "failed":
            if event["lane"] not in self.failed:
                self._line(f"{event['lane']} failed: {event['reason']}")
            self.failed.add(event["lane"])
        elif kind == "spent":
            self.spent = {key: seconds + event[key] for key, seconds in self.spent.items()}
        elif kind == "warning":
            self._line(event["text"])
        self._show()

    def text(self) -> str:
        """Epochs, lanes per second, time left, and how many lanes have diverged or failed."""
        total, done = self.lanes * self.epochs, sum(self.done.values())
        parts = [f"{done / max(self.lanes, 1):.1f}/{self.epochs} epochs"]
        if self.since and done > self.since[1]:
            rate = (done - self.since[1]) / max(time.monotonic() - self.since[0], 1e-9)
            parts.append(f"{rate / max(self.epochs, 1):.3g} lanes/s")
            parts.append(f"{minutes((total - done) / rate)} left")
        if diverged := sum(self.diverged.values()):
            parts.append(f"{diverged} diverged")
        if self.failed:
            parts.append(f"{len(self.failed)} failed")
        return " · ".join(parts)

    def times(self) -> str:
        """What the packs took until their first step, which is compilation, and from then on."""
        return f"{self.spent['start']:.1f} s to start, {self.spent['training']:.1f} s of training"

    def _progress(self, event: dict[str, Any]) -> None:
        self.done[event["pack"]] = event["lanes"] * min(event["epochs"], self.epochs)
        self.diverged[event["pack"]] = event["diverged"]
        if self.since is None:
            self.since = (time.monotonic(), sum(self.done.values()))
        if self.bar is None and time.monotonic() - self.printed >= LINE_EVERY:
            self._line(self.text())

    def _show(self) -> None:
        if self.bar is not None and self.task is not None:
            total, done = self.lanes * self.epochs, sum(self.done.values())
            self.bar.update(self.task, total=total or None, completed=done, text=self.text())

    def _line(self, text: str) -> None:
        self.printed = time.monotonic()
        if self.bar:
            self.bar.console.print(f"{self.name}: {text}", highlight=False, markup=False)
        else:
            print(f"{self.name}: {text}", file=self.stream, flush=True)


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeElapsedColumn(),
        console=console,
    )
