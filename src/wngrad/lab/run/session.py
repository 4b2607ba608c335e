"""Run a sweep into a store: what is done is left alone, what was interrupted goes on."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import wngrad
from wngrad.lab.run import files
from wngrad.lab.run.store import Store
from wngrad.lab.train import models
from wngrad.lab.train.data import Data
from wngrad.lab.train.loader import fingerprint
from wngrad.lab.train.programs import PROGRAMS, Program
from wngrad.lab.train.spec import Lane, Pack, Record, Sweep

Event = dict[str, Any]
CHUNK_SECONDS = 0.5  # how long a program trains between two looks at the clock


class Interrupted(Exception):  # noqa: N818 - not an error: the work is saved
    """The run was asked to stop; everything so far is saved."""


@dataclass(slots=True)
class Session:
    """One visit to a store: what to run, on what, and whom to tell.

    Args:
        save_every: seconds between checkpoints.
        tell: called with an event (a dict with a `kind`) after everything that happens.
        stop: asked between any two steps whether to save and leave.
        failed: packs not to try, as they have just taken a process with them, and how.
        wait: seconds to wait for a pack that another process has; then it is left to it.
    """

    sweep: Sweep
    data: Data
    store: Store
    device: str = "cpu"
    note: str = ""
    save_every: float = 30.0
    tell: Callable[[Event], None] = lambda event: None
    stop: Callable[[], bool] = lambda: False
    failed: Mapping[str, str] = field(default_factory=dict)
    wait: float = 0.0
    settings: dict[str, Any] = field(init=False)
    environment: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.sweep = replace(self.sweep, precision=_precision(self.sweep, self.device))
        self.environment = environment(self.device)
        self.settings = {**self.sweep.identity(), **conditions(self)}

    def run(self, only: Collection[str] | None = None) -> None:
        """Train what has no record yet.

        Args:
            only: names of packs, if the others are left to others.

        Raises:
            Interrupted: `stop` said so; the state is saved.
            Mismatch: the store holds a sweep made under other conditions.
            OSError: a file could not be written; it is named, and the last checkpoint is whole.
        """
        packs = self.store.open(self.sweep, conditions(self))
        lanes = sum(len(pack.lanes) for pack in packs)
        self.tell({"kind": "plan", "lanes": lanes, "epochs": self.sweep.epochs})
        for pack in packs:
            if only is not None and pack.name not in only:
                continue
            if self.stop():
                raise Interrupted
            with self.store.claim(pack, self.wait) as mine:
                if not mine:
                    self.tell({"kind": "busy", "pack": pack.name, "lanes": len(pack.lanes)})
                elif pack.name in self.failed:
                    self.fail(pack, self.failed[pack.name])
                elif missing := self._missing(pack):
                    self._run_pack(pack, missing)
                else:
                    self.store.finish(pack)  # whoever wrote the last record may not have come to it
                    self.tell({"kind": "had", "pack": pack.name, "lanes": len(pack.lanes)})

    def _missing(self, pack: Pack) -> list[Lane]:
        return self.store.missing(pack, self.settings, self.sweep.epochs)

    def _run_pack(self, pack: Pack, missing: Iterable[Lane]) -> None:
        self.tell({"kind": "start", "pack": pack.name, "lanes": len(pack.lanes)})
        began = time.perf_counter()
        try:
            with _blamed():
                program = PROGRAMS[self.sweep.kind(pack)](self.sweep, pack, self.data, self.device)
            self._resume(program)
            first = program.epoch
            self._train(program)
            self._save(program)
        except _Failed as failure:
            self.fail(pack, str(failure))
            return
        records = _records(program, self.settings, self.environment)
        for lane, record in zip(pack.lanes, records, strict=True):
            if lane in missing:
                self.store.write_record(record)
                self.tell({"kind": "record", "lane": lane.name, "status": record.status})
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

    def fail(self, pack: Pack, reason: str) -> None:
        """Record that the lanes of a pack did not get through, and why."""
        for lane in self._missing(pack):
            before = self.store.record(lane)
            if before is None or before.status != "done":  # fewer epochs than asked for are true
                self.store.write_record(
                    Record(lane, "failed", reason, None, {}, self.settings, self.environment)
                )
            what = {"lane": lane.name, "pack": pack.name, "status": "failed", "reason": reason}
            self.tell({"kind": "record", **what})

    def _resume(self, program: Program) -> None:
        saved = self.store.load(program.pack)
        if saved is None:
            return
        of = self._of(program)
        if not isinstance(saved, dict) or {key: saved.get(key) for key in of} != of:
            self.store.warn(f"The checkpoint of {program.pack.name} is of other lanes: not used.")
            return
        with _blamed():
            program.load(saved["state"])
        self._told(program)

    def _train(self, program: Program) -> None:
        saved, steps = time.monotonic(), 1
        while program.epoch < self.sweep.epochs:
            if self.stop():
                self._save(program)
                raise Interrupted
            began = time.monotonic()
            with _blamed():
                program.advance(steps)
            took = max(time.monotonic() - began, 1e-6)
            steps = max(1, min(2 * steps, int(steps * CHUNK_SECONDS / took)))
            self._told(program)
            if time.monotonic() - saved >= self.save_every:
                self._save(program)
                saved = time.monotonic()

    def _save(self, program: Program) -> None:
        with _blamed():
            sealed = files.seal_tensors({**self._of(program), "state": program.state()})
        self.store.save(program.pack, sealed)
        self.tell({"kind": "saved", "pack": program.pack.name})

    def _of(self, program: Program) -> dict[str, Any]:
        """What a checkpoint says it is of."""
        return {"settings": self.settings, "lanes": [lane.name for lane in program.pack.lanes]}

    def _told(self, program: Program) -> None:
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
def _blamed() -> Iterator[None]:
    """What is raised inside is the run's own fault, and fails it; what a store raises is not."""
    try:
        yield
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        raise _Failed(text.encode(errors="replace").decode()) from error


def conditions(session: Session) -> dict[str, Any]:
    """What would change the numbers, the sweep's own settings apart."""
    return {
        "precision": session.sweep.precision,
        "data": session.data.fingerprint,
        "network": _network(session.sweep, session.data),
        "note": session.note,
        "wngrad": session.environment["wngrad"],
        "torch": session.environment["torch"],
        "device": session.environment["device"],
        **({"source": said} if (said := fingerprint(session.sweep.task)) else {}),
    }


def _network(sweep: Sweep, data: Data) -> str:
    """A fingerprint of the network: its layers as it prints them, and their shapes."""
    try:
        model = models.network(sweep.model, data, 0)
        said = f"{model} {[tuple(p.shape) for p in model.parameters()]}"
    except Exception as error:  # each lane will say so for itself
        said = type(error).__name__
    return hashlib.sha256(said.encode()).hexdigest()[:16]


def environment(device: str) -> dict[str, Any]:
    """Where and with what a run was made."""
    name = torch.cuda.get_device_name(device) if _on_cuda(device) else _processor()
    return {
        "wngrad": wngrad.__version__,
        "torch": str(torch.__version__),  # a class of its own, which no checkpoint may hold
        "python": platform.python_version(),
        "commit": _commit(),
        "device": name,
        "threads": torch.get_num_threads(),
    }


def _on_cuda(device: str) -> bool:
    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", device):
        raise ValueError(f"lab: `device` must be cpu, cuda or cuda:0, 1, …, got {device!r}.")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"lab: `device` must be cpu: torch finds no CUDA device for {device!r}.")
    return device != "cpu"


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


def _precision(sweep: Sweep, device: str) -> Any:
    return (
        sweep.precision if device.startswith("cuda") or sweep.precision == "float64" else "float32"
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The commit of the source this runs from, with a + if it was changed since.

    Where there is no repository the environment variable WNGRAD_COMMIT may say it.
    """
    if said := os.environ.get("WNGRAD_COMMIT"):
        return said
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # not a repository around us
        return _git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
