"""Run the tournament: workers share the lab's stores, and records are exported as they come.

Whoever is free goes where most is left to do. Each worker is a supervisor with its process, so that
nothing a run does can take others along.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.tournament.plan import Part
from experiments.tournament.records import read
from wngrad.lab.run import files
from wngrad.lab.run.store import Store
from wngrad.lab.train.spec import Record

ROOT = Path(__file__).parents[2]  # of the checkout: workers import the experiments from it
SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXPORT_EVERY = 10.0  # seconds
SAY_EVERY = 15.0
FIRST = 40.0  # The defaults are few, and must not be what is missing when time is up.


@dataclass(slots=True)
class Slot:
    """A worker at a part."""

    part: Part
    process: subprocess.Popen[str]


@dataclass(slots=True)
class Tournament:
    """One call: what is missing is run, what is there is left alone.

    Args:
        out: a folder for the exported records, NAME.jsonl for each part.
        work: a folder for the stores, with checkpoints: large, and of use only until the end.
        known: folders with exported records to go on from, beside `out`, where they fit.
        limit: seconds after which to stop, export and leave.
    """

    parts: Sequence[Part]
    out: Path
    work: Path
    workers: int = 2
    limit: float | None = None
    known: Sequence[Path] = ()
    note: str = ""
    say: Callable[[str], None] = print
    slots: list[Slot] = field(default_factory=list)
    closed: set[str] = field(default_factory=set)  # parts without a run that is free
    errors: dict[str, str] = field(default_factory=dict)  # why a part could not be run
    sizes: dict[str, int] = field(default_factory=dict)  # records at the last export
    here: dict[str, dict[str, Any]] = field(default_factory=dict)  # by device
    signal: int = 0

    def run(self) -> int:
        """Run to the end, the limit or a signal; the exit status."""
        before = [signal.signal(n, self._note) for n in SIGNALS]
        try:
            for each in self.parts:
                self._import(each)
                self._forget(each)
            if there := sum(map(self.done, self.parts)):
                self.say(f"{there} runs have been made before")
            self._loop()
        finally:
            self._stop()
            self.sizes.clear()  # a run that failed before may have come through
            self.export()
            for number, handler in zip(SIGNALS, before, strict=True):
                signal.signal(number, handler)
        return 128 + self.signal if self.signal else int(bool(self.errors))

    def _loop(self) -> None:
        """Keep the workers busy until nothing is left, the limit or a signal."""
        began = exported_at = time.monotonic()
        said_at = 0.0
        while not self._over(began):
            self._reap()
            while len(self.slots) < self.workers and (part := self._next()):
                self.slots.append(Slot(part, self._start(part)))
            if not self.slots:
                return
            now = time.monotonic()
            if now - said_at >= SAY_EVERY:
                said_at = now
                self.say(self.text())
            if now - exported_at >= EXPORT_EVERY:
                exported_at = now
                self.export()
            time.sleep(0.2)

    def export(self) -> None:
        """Write the records of every part that has new ones."""
        self.out.mkdir(parents=True, exist_ok=True)
        for part in self.parts:
            if (n := self.done(part)) and n != self.sizes.get(part.name):
                self._store(part).export(self.out / f"{part.name}.jsonl")
                self.sizes[part.name] = n

    def done(self, part: Part) -> int:
        """Runs that have a record."""
        folder = self._store(part).folder / "records"
        try:
            return sum(name.endswith(".json") for name in os.listdir(folder))
        except FileNotFoundError:
            return 0

    def text(self) -> str:
        total = sum(len(part.sweep.lanes) for part in self.parts)
        done = sum(map(self.done, self.parts))
        at = ", ".join(sorted({slot.part.name for slot in self.slots})) or "nothing"
        return f"{done} of {total} runs; now at {at}"

    def _store(self, part: Part) -> Store:
        return Store(self.work / part.name, warn=self.say)

    def _import(self, part: Part) -> None:
        """Take over exported records: of `known` only those that would be made the same way here.

        What lies in `out` is taken whole: a store refuses what another machine or version made,
        so that it is not overwritten.
        """
        store, name = self._store(part), f"{part.name}.jsonl"
        for folder in dict.fromkeys((*self.known, self.out)):
            whole = folder.resolve() == self.out.resolve()
            records = read(folder / name) if (folder / name).is_file() else []
            done = [r for r in records if r.status == "done" and r.lane in set(part.sweep.lanes)]
            taken = [r for r in done if whole or self._same(r, part)]
            before = store.records()[:1] if taken else []
            if before and before[0].settings != taken[0].settings:
                raise ValueError(
                    f"tournament: {store.folder} holds runs made under other conditions than "
                    f"{folder / name}; choose another folder as --work, or as --out."
                )
            for record in taken:
                _put(record, store)

    def _forget(self, part: Part) -> None:
        """A run that was stopped starts anew: they are short, and not every peer's checkpoint is
        whole (on CUDA, DoG's puts half of its state on the CPU)."""
        for path in (self._store(part).folder / "checkpoints").glob("*.pt*"):
            path.unlink(missing_ok=True)

    def _same(self, record: Record, part: Part) -> bool:
        if part.device not in self.here:
            self.here[part.device] = _environment(part.device)
        here = {key: self.here[part.device][key] for key in ("torch", "wngrad", "device")}
        wanted = {**here, **part.sweep.identity(), "note": self.note}
        return {key: record.settings.get(key) for key in wanted} == wanted

    def _over(self, began: float) -> bool:
        late = self.limit is not None and time.monotonic() - began >= self.limit
        return late or bool(self.signal)

    def _next(self) -> Part | None:
        """Where most is left to do for each worker that is there."""
        workers = Counter(slot.part.name for slot in self.slots)

        def left(part: Part) -> float:
            lanes = len(part.sweep.lanes) - self.done(part) - workers[part.name]
            first = FIRST if part.question == "default" else 1.0
            return max(lanes, 0) * part.lane_s * first / (1 + workers[part.name])

        free = [part for part in self.parts if part.name not in self.closed and left(part) > 0]
        return max(free, key=left, default=None)

    def _start(self, part: Part) -> subprocess.Popen[str]:
        job = {
            "sweep": part.sweep.to_json(),
            "out": str(self.work / part.name),
            "device": part.device,
            "note": self.note,
        }
        one = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # many workers share
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.tournament.slot"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **one, "PYTHONPATH": path},
            start_new_session=True,  # Ctrl-C is for us; we pass it on
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()  # and left open: a worker whose pipe ends knows that we are gone
        return process

    def _reap(self) -> None:
        for slot in [slot for slot in self.slots if slot.process.poll() is not None]:
            self._ended(slot)

    def _ended(self, slot: Slot) -> None:
        process = slot.process
        with process:  # stdin is closed last: its end would be a second signal
            assert process.stdout is not None
            error = process.stdout.read().strip()
            process.wait()
        self.slots.remove(slot)
        if not self.signal:
            self.closed.add(slot.part.name)
        if error:
            if slot.part.name not in self.errors:
                self.say(f"{slot.part.name}: {error}")
            self.errors[slot.part.name] = error

    def _stop(self) -> None:
        for slot in self.slots:
            slot.process.terminate()
        for slot in list(self.slots):
            self._ended(slot)

    def _note(self, number: int, frame: object) -> None:
        self.signal = number


def _put(record: Record, store: Store) -> None:
    """Into the store, if it is not there: one of thousands, sealed, and hence not synced."""
    place = store.folder / "records" / f"{record.lane.name}.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    if not place.exists():
        place.write_bytes(files.seal_json(record.to_json()))


def _environment(device: str) -> dict[str, Any]:
    import torch

    from wngrad.lab.run.session import environment

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return environment(device)
