"""Run packs of a sweep into a store: what is done is left alone, what was interrupted goes on."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wngrad.lab.run import files, process_settings, step_costs, stop_rules
from wngrad.lab.run.environment import Trained, conditions, precision_on
from wngrad.lab.run.environment import environment as environment
from wngrad.lab.run.job import Tell, unfinished
from wngrad.lab.run.store import Store
from wngrad.lab.train import loader
from wngrad.lab.train.programs import Run, make
from wngrad.lab.train.spec import Lane, Pack, Record, Sweep

CHUNK_SECONDS = 0.5  # how long a program trains before it is asked whether to stop


class Interrupted(BaseException):
    """The run was asked to stop; everything so far is saved.

    It passes through a user's own code, whose `except Exception` must not hold it up.
    """


class _StoreError(BaseException):
    """An error of the store on its way through a user's code, which is not to blame for it."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


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
    data: Trained
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
    _peers: dict[Lane, Record] = field(init=False, default_factory=dict)
    _process: int = field(init=False, default_factory=os.getpid)
    _file: str = field(init=False)  # of the task; a run may go to another folder
    _saved: float = field(init=False, default=0.0)  # when the run was last saved
    _ready: float = field(init=False, default=0.0)  # when the first step was done

    def __post_init__(self) -> None:
        self.sweep = replace(self.sweep, precision=precision_on(self.device, self.sweep))
        self.environment = environment(self.device)
        self.conditions = conditions(self.sweep, self.data, self.note, self.environment)
        self.settings = {**self.sweep.identity(), **self.conditions}
        self._file = loader.resolved(loader.file_of(self.sweep.task))

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
            with process_settings.restored():
                program, first = self._trained(pack)
        except _Failed as failure:
            self._fail(pack, str(failure))
            return
        except _StoreError as carried:
            raise carried.error from None
        records = _records(program, self.settings, self.environment)
        for lane, record in zip(pack.lanes, records, strict=True):
            if lane in missing:
                self._record(record, pack)
        self.store.finish(pack)
        if not program.keeps_checkpoint:
            self.store.discard(pack)
        spent = {"start": self._ready - began, "training": time.perf_counter() - self._ready}
        spent = {key: round(seconds, 3) for key, seconds in spent.items()}
        self.tell({"kind": "spent", "pack": pack.name, **spent})
        self.store.log(
            {
                "pack": pack.name,
                "lanes": len(pack.lanes),
                **step_costs.measured(program, self.sweep, self.data, self.device),
                **self._saved_time(program, first, time.perf_counter() - began),
                "epochs": [first, program.epoch],
                "seconds": round(time.perf_counter() - began, 3),
                "start_seconds": spent["start"],  # until the first step: building, compiling
                "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                **self.environment,
            }
        )

    def _trained(self, pack: Pack) -> tuple[Run, int]:
        """The finished program of a pack, and the epoch that it went on from."""
        with _run_errors(self._file):
            program = make(self.sweep.kind(pack), self.sweep, pack, self.data, self.device)
        self._resume(program)
        first = program.epoch
        self._train(program)
        if program.keeps_checkpoint:
            self._save(program)
        return program, first

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

    def _resume(self, program: Run) -> None:
        saved = self.store.load(program.pack)
        if saved is None:
            return
        origin = self._origin(program)
        if not isinstance(saved, dict) or {key: saved.get(key) for key in origin} != origin:
            self.store.warn(f"The checkpoint of {program.pack.name} is of other lanes: not used.")
            return
        with _run_errors(self._file):
            program.load(saved["state"])
        self._tell_progress(program)

    def _train(self, program: Run) -> None:
        self._saved, steps = time.monotonic(), 1
        self._ready = time.perf_counter()
        program.between, first = (lambda: self._reported(program)), True
        while not program.finished:
            if self.stop():
                self._save(program)
                raise Interrupted
            began, epoch = time.monotonic(), program.epoch
            try:
                with _run_errors(self._file):
                    program.advance(steps)
            except _Lost as lost:
                program.ended = str(lost)
            took = max(time.monotonic() - began, 1e-6)
            if first:
                self._ready, first = time.perf_counter(), False
            steps = max(1, min(2 * steps, int(steps * CHUNK_SECONDS / took)))
            self._tell_progress(program)
            self._save_if_due(program)
            if program.epoch > epoch:
                program.ended = program.ended or self._lost(program)

    def _reported(self, program: Run) -> None:
        """A user's function has reported: what is done between steps for other runs."""
        if os.getpid() != self._process:  # a child that it has forked, and that goes on
            os._exit(1)
        try:
            self._tell_progress(program)
            if self.stop():
                self._save(program)
                raise Interrupted
            self._save_if_due(program)
            if lost := self._lost(program):
                raise _Lost(lost)
        except OSError as error:
            raise _StoreError(error) from error

    def _lost(self, program: Run) -> str:
        """Why a run should be ended by the sweep's rule; empty if it should not."""
        if not self.sweep.stop or len(program.pack.lanes) > 1:
            return ""
        losses = [row[0] for row in program.curves.get(self.sweep.best_by, ())]
        peers = self._finished() if self.sweep.stop == "median" else []
        return stop_rules.lost(
            self.sweep.stop, losses, self.sweep.epochs, peers, self.sweep.best_by
        )

    def _finished(self) -> list[Record]:
        """The runs of this sweep that are done, each read once."""
        for lane in self.sweep.lanes:
            if lane not in self._peers and self.store.has_record(lane):
                record = self.store.record(lane)
                if record is not None and record.settings == self.settings:
                    self._peers[lane] = record
        return [record for record in self._peers.values() if record.status == "done"]

    def _saved_time(self, program: Run, first: int, seconds: float) -> dict[str, Any]:
        """What a rule has saved, if an epoch takes as long as those before."""
        if not program.ended.startswith("stopped"):
            return {}
        each = seconds / max(program.epoch - first, 1)
        left = self.sweep.epochs - program.epoch
        return {"stopped": program.ended, "saved_seconds": round(each * left, 3)}

    def _save_if_due(self, program: Run) -> None:
        if time.monotonic() - self._saved >= self.save_every:
            self._save(program)
            self._saved = time.monotonic()

    def _save(self, program: Run) -> None:
        with _run_errors(self._file):
            sealed = files.seal_tensors({**self._origin(program), "state": program.state()})
        self.store.save(program.pack, sealed)
        self.tell({"kind": "saved", "pack": program.pack.name})

    def _origin(self, program: Run) -> dict[str, Any]:
        """What a checkpoint says it is of."""
        return {"settings": self.settings, "lanes": [lane.name for lane in program.pack.lanes]}

    def _tell_progress(self, program: Run) -> None:
        self.tell(
            {
                "kind": "progress",
                "pack": program.pack.name,
                "lanes": len(program.pack.lanes),
                "epochs": program.epoch + program.step / program.steps,
                "diverged": sum(epoch is not None for epoch in program.diverged),
            }
        )


class _Lost(BaseException):
    """A rule has ended the run; the message says which."""


class _Failed(Exception):  # noqa: N818 - not an error of ours
    """A run has failed; the message is the reason."""


@contextmanager
def _run_errors(file: str) -> Iterator[None]:
    """Turns any exception raised here into a failed run; errors of the store propagate.

    Args:
        file: the user's, of which the reason says the line.
    """
    process = os.getpid()
    try:
        yield
    except _Failed:
        raise
    except (Exception, SystemExit) as error:
        line = loader.line_of(error, file)
        where = "" if line is None else f"at line {line} of {Path(file).name}: "
        text = f"{where}{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise _Failed(text.encode(errors="replace").decode()) from error
    finally:
        if os.getpid() != process:  # a child that the run has forked, and that has come back
            os._exit(1)


def _records(program: Run, settings: dict[str, Any], environment: dict[str, Any]) -> list[Record]:
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
            program.ended,
            list(program.steps_reported),
        )
        for k, lane in enumerate(program.pack.lanes)
    ]


def _finite(value: float) -> float | None:
    """Eight digits say all that float32 knows, and keep the records small."""
    return float(f"{value:.8g}") if math.isfinite(value) else None
