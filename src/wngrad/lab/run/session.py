"""Run packs of a sweep into a store: what is done is left alone, what was interrupted goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from wngrad.lab.run import files
from wngrad.lab.run.environment import conditions, precision_on
from wngrad.lab.run.environment import environment as environment
from wngrad.lab.run.job import Tell, unfinished
from wngrad.lab.run.store import Store
from wngrad.lab.train.data import Data
from wngrad.lab.train.programs import PROGRAMS, Program
from wngrad.lab.train.spec import Lane, Pack, Record, Sweep

CHUNK_SECONDS = 0.5  # how long a program trains before it is asked whether to stop


class Interrupted(Exception):  # noqa: N818 - not an error: the work is saved
    """The run was asked to stop; everything so far is saved."""


@dataclass(slots=True)
class Session:
    """One visit to a store: what to run, on what, and whom to tell.

    Args:
        save_every: seconds between checkpoints.
        tell: called with an event (a dict with a `kind`) after everything that happens.
        stop: asked between any two steps whether to save and leave.
        wait: seconds to wait for a pack that another process has; then it is left to it.
    """

    sweep: Sweep
    data: Data
    store: Store
    device: str = "cpu"
    note: str = ""
    save_every: float = 30.0
    tell: Tell = lambda event: None
    stop: Callable[[], bool] = lambda: False
    wait: float = 0.0
    environment: dict[str, Any] = field(init=False)
    conditions: dict[str, Any] = field(init=False)  # what would change the numbers
    settings: dict[str, Any] = field(init=False)
    _packs: dict[str, Pack] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.sweep = replace(self.sweep, precision=precision_on(self.device, self.sweep))
        self.environment = environment(self.device)
        self.conditions = conditions(self.sweep, self.data, self.note, self.environment)
        self.settings = {**self.sweep.identity(), **self.conditions}

    def run(self) -> None:
        """Train what has no record yet.

        Raises:
            Interrupted: `stop` said so; the state is saved.
            Mismatch: the store holds a sweep made under other conditions.
            OSError: a file could not be written; it is named, and the last checkpoint is whole.
        """
        for pack in self.open():
            self.run_pack(pack.name)

    def open(self) -> list[Pack]:
        """Open the store: the packs that lack records."""
        return unfinished(self.store, self.sweep, self.conditions, self.tell)

    def run_pack(self, name: str, failed: str = "") -> None:
        """Train a pack of the store, or record that it has failed for the reason `failed`."""
        if name not in self._packs:
            packs = self.store.packs(self.sweep, self.conditions)
            self._packs = {pack.name: pack for pack in packs}
        pack = self._packs[name]
        if self.stop():
            raise Interrupted
        with self.store.claim(pack, self.wait) as claimed:
            if not claimed:
                self.tell({"kind": "busy", "pack": name, "lanes": len(pack.lanes)})
            elif failed:
                self._fail(pack, failed)
            elif missing := self._missing(pack):
                self._train_pack(pack, missing)
            else:  # another process was faster, and may not have come to this
                self.store.finish(pack)
                self.tell({"kind": "had", "pack": name, "lanes": len(pack.lanes)})

    def _missing(self, pack: Pack) -> list[Lane]:
        return self.store.missing(pack, self.settings, self.sweep.epochs)

    def _train_pack(self, pack: Pack, missing: Iterable[Lane]) -> None:
        self.tell({"kind": "start", "pack": pack.name, "lanes": len(pack.lanes)})
        began = time.perf_counter()
        try:
            with _run_errors():
                program = PROGRAMS[self.sweep.kind(pack)](self.sweep, pack, self.data, self.device)
            self._resume(program)
            first = program.epoch
            self._train(program)
            self._save(program)
        except _Failed as failure:
            self._fail(pack, str(failure))
            return
        records = _records(program, self.settings, self.environment)
        for lane, record in zip(pack.lanes, records, strict=True):
            if lane in missing:
                self._record(record, pack)
        self.store.finish(pack)
        self.store.log(
            {
                "pack": pack.name,
                "lanes": len(pack.lanes),
                "epochs": [first, program.epoch],
                "seconds": round(time.perf_counter() - began, 3),
                "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                **self.environment,
            }
        )

    def _record(self, record: Record, pack: Pack, write: bool = True) -> None:
        if write:
            self.store.write_record(record)
        what = {"lane": record.lane.name, "pack": pack.name, "status": record.status}
        reason = {"reason": record.reason} if record.reason else {}
        self.tell({"kind": "record", **what, **reason})

    def _fail(self, pack: Pack, reason: str) -> None:
        """Record that the lanes of a pack did not get through, and why."""
        for lane in self._missing(pack):
            before = self.store.record(lane)
            # A record of fewer epochs than asked for stays: it is true.
            write = before is None or before.status != "done"
            record = Record(lane, "failed", reason, None, {}, self.settings, self.environment)
            self._record(record, pack, write)

    def _resume(self, program: Program) -> None:
        saved = self.store.load(program.pack)
        if saved is None:
            return
        origin = self._origin(program)
        if not isinstance(saved, dict) or {key: saved.get(key) for key in origin} != origin:
            self.store.warn(f"The checkpoint of {program.pack.name} is of other lanes: not used.")
            return
        with _run_errors():
            program.load(saved["state"])
        self._tell_progress(program)

    def _train(self, program: Program) -> None:
        saved, steps = time.monotonic(), 1
        while program.epoch < self.sweep.epochs:
            if self.stop():
                self._save(program)
                raise Interrupted
            began = time.monotonic()
            with _run_errors():
                program.advance(steps)
            took = max(time.monotonic() - began, 1e-6)
            steps = max(1, min(2 * steps, int(steps * CHUNK_SECONDS / took)))
            self._tell_progress(program)
            if time.monotonic() - saved >= self.save_every:
                self._save(program)
                saved = time.monotonic()

    def _save(self, program: Program) -> None:
        with _run_errors():
            sealed = files.seal_tensors({**self._origin(program), "state": program.state()})
        self.store.save(program.pack, sealed)
        self.tell({"kind": "saved", "pack": program.pack.name})

    def _origin(self, program: Program) -> dict[str, Any]:
        """What a checkpoint says it is of."""
        return {"settings": self.settings, "lanes": [lane.name for lane in program.pack.lanes]}

    def _tell_progress(self, program: Program) -> None:
        self.tell(
            {
                "kind": "progress",
                "pack": program.pack.name,
                "lanes": len(program.pack.lanes),
                "epochs": program.epoch + program.step / program.steps,
                "diverged": sum(epoch is not None for epoch in program.diverged),
            }
        )


class _Failed(Exception):  # noqa: N818 - not an error of ours
    """A run has failed; the message is the reason."""


@contextmanager
def _run_errors() -> Iterator[None]:
    """Turns any exception raised here into a failed run; errors of the store propagate."""
    try:
        yield
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise _Failed(text.encode(errors="replace").decode()) from error


def _records(
    program: Program, settings: dict[str, Any], environment: dict[str, Any]
) -> list[Record]:
    return [
        Record(
            lane,
            "done",
            "",
            program.diverged[k],
            {name: [_finite(row[k]) for row in rows] for name, rows in program.curves.items()},
            settings,
            environment,
            {name: _finite(values[k]) for name, values in program.start.items()},
        )
        for k, lane in enumerate(program.pack.lanes)
    ]


def _finite(value: float) -> float | None:
    """Eight digits say all that float32 knows, and keep the records small."""
    return float(f"{value:.8g}") if math.isfinite(value) else None
