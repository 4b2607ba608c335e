"""The store of a sweep: a folder of records, checkpoints and locks.

    sweep.json            what the folder is for, and its packs; written once, grown, never changed
    records/LANE.json     one per lane, whole and sealed
    checkpoints/PACK.pt   the last state of a pack, and PACK.pt.old, the one before
    locks/                held while a pack is running
    sessions.jsonl        who worked here, when, and how fast (the records do not depend on it)

Several processes may share a folder: each pack is run by the one that holds its lock. The folder
may be anywhere that `places` can reach.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from wngrad.lab.run import files, manifest, places
from wngrad.lab.train.spec import Lane, Pack, Record, Sweep


class Mismatch(ValueError):  # noqa: N818 - a state, and the name callers read
    """The folder holds another sweep, or one made under other conditions."""


class Store:
    """The records, checkpoints and locks of one sweep."""

    def __init__(
        self, home: Path | str, warn: Callable[[str], None] = lambda message: None
    ) -> None:
        self.home, self.warn = home, warn
        self.place, self.folder = places.find(home)
        self._written: set[Path] = set()  # checkpoints known to be whole: this process wrote them

    def open(self, sweep: Sweep, conditions: dict[str, Any]) -> list[Pack]:
        """The packs that hold the lanes of `sweep`; those that are new are added.

        Args:
            sweep: may have more epochs or seeds than before; nothing else may differ.
            conditions: what would change the numbers: precision, device, versions, data, note.
        """
        for name in ("records", "checkpoints", "locks"):
            self._make(name)
        with self.place.lock(self.folder / "locks" / "sweep", wait=True):
            known, planned, added = self._planned(sweep, conditions)
            if added or not planned:
                entries = manifest.entries((*planned, *added))
                self._write(self.folder / "sweep.json", {**known, "packs": entries})
            return _asked(sweep, (*planned, *added))

    def packs(self, sweep: Sweep, conditions: dict[str, Any]) -> list[Pack]:
        """What `open` would return; nothing is written."""
        _, planned, added = self._planned(sweep, conditions)
        return _asked(sweep, (*planned, *added))

    def cut(self) -> list[Pack]:
        """The packs that are settled already."""
        return self._manifest()[1]

    def _planned(
        self, sweep: Sweep, conditions: dict[str, Any]
    ) -> tuple[dict[str, Any], list[Pack], list[Pack]]:
        wanted = {**sweep.identity(), **conditions}
        plan, planned = self._manifest()
        # A folder that has lost its plan: its records say what they are of.
        records = [] if plan else self.records()
        known = plan or {"settings": next((r.settings for r in records), None) or wanted}
        if known["settings"] != wanted:
            raise Mismatch(self._differences(known["settings"], wanted))
        strange = {s for pack in planned for s in pack.settings} - set(sweep.settings)
        if strange and not sweep.task:  # to a task's sweep others may have been added
            first = min(strange, key=str)
            raise Mismatch(
                f"{self.home} plans {first.optimizer!r} at λ = {first.lam:g}, which is no part of "
                "its sweep. Nothing was changed: choose another folder with --out."
            )
        have = {lane for pack in planned for lane in pack.lanes}
        # In packs of their own, lanes with such records are not trained again beside new ones.
        done = {r.lane for r in records if r.status == "done"}
        there = sweep.cut_lanes(set(sweep.lanes) - done)
        new = sweep.cut_lanes(have | done, first=len(planned) + len(there) + 1)
        return known, planned, there + new

    def missing(self, pack: Pack, settings: dict[str, Any], epochs: int) -> list[Lane]:
        """The lanes of a pack that have no record of so many epochs under these settings."""

        def done(record: Record | None) -> bool:
            if record is None or record.status != "done" or record.settings != settings:
                return False
            return record.epochs >= epochs or bool(record.ended)

        return [lane for lane in pack.lanes if not done(self.record(lane))]

    def unfinished(
        self, packs: Sequence[Pack], settings: dict[str, Any], epochs: int
    ) -> list[Pack]:
        """The packs of which lanes are missing."""
        return [pack for pack in packs if self.missing(pack, settings, epochs)]

    def record(self, lane: Lane) -> Record | None:
        """The lane's record; None if there is none that can be read."""
        return self._read_record(self._record_path(lane))

    def has_record(self, lane: Lane) -> bool:
        return self.place.exists(self._record_path(lane))

    def _read_record(self, path: Path) -> Record | None:
        try:
            data = self.place.read(path)
            return None if data is None else _opened(data, str(path), path.stem)
        except files.Damaged as error:
            self._set_aside(path, error)
            return None

    def write_record(self, record: Record) -> None:
        self._write(self._record_path(record.lane), record.to_json())

    def records(self) -> list[Record]:
        """All records that can be read."""
        folder = self.folder / "records"
        paths = [folder / name for name in self.place.names(folder) if name.endswith(".json")]
        return [record for path in paths if (record := self._read_record(path)) is not None]

    def export(self, path: Path) -> None:
        """All records as one file of lines, each sealed: small enough to keep and to send."""
        lines = [files.seal_json(record.to_json()) for record in self.records()]
        files.write(path, b"".join(lines))

    def save(self, pack: Pack, sealed: bytes) -> None:
        """Keep a pack's sealed state; the one before stays until this one is whole."""
        path = self._checkpoint_path(pack)
        if path in self._written or self._readable(path):
            self._written.discard(path)  # if the new one cannot be written, there is none
            self.place.move(path, self._old(path))
        self.place.write(path, sealed)
        self._written.add(path)

    def load(self, pack: Pack) -> Any | None:
        """The last state of a pack that can be read, or None."""
        path, damaged = self._checkpoint_path(pack), False
        for candidate in (path, self._old(path)):
            try:
                data = self.place.read(candidate)
                if data is None:
                    continue
                state = files.open_tensors(data, str(candidate))
            except files.Damaged as error:
                self._set_aside(candidate, error)
                damaged = True
                continue
            if damaged:
                self.warn(f"{pack.name} goes on from {candidate.name}, the state before.")
            return state
        if damaged:
            self.warn(f"{pack.name} has no other checkpoint: it starts anew.")
        return None

    def finish(self, pack: Pack) -> None:
        """Drop what only an interrupted pack needs."""
        self.place.remove(self._old(self._checkpoint_path(pack)))

    @contextmanager
    def claim(self, pack: Pack, patience: float = 0.0) -> Iterator[bool]:
        """Whether this process may run the pack, for as long as the block lasts.

        Args:
            patience: seconds to wait for another process that has it.
        """
        until = time.monotonic() + patience
        while True:
            with self.place.lock(self.folder / "locks" / pack.name, wait=False) as claimed:
                if claimed or time.monotonic() >= until:
                    yield claimed
                    return
            time.sleep(0.05)

    @contextmanager
    def lead(self) -> Iterator[bool]:
        """Whether this process may give out the packs to others, for as long as the block lasts."""
        self._make("locks")
        with self.place.lock(self.folder / "locks" / "driver", wait=False) as first:
            yield first

    def discard(self, pack: Pack) -> None:
        """Drop the checkpoint of a run that will never go on."""
        self.place.remove(self._checkpoint_path(pack))

    def sessions(self) -> list[dict[str, Any]]:
        """The lines of `sessions.jsonl` that can be read."""
        path = self.folder / "sessions.jsonl"
        folder = path.with_suffix("")  # where places that cannot append keep a file for each line
        paths = [path, *(folder / name for name in self.place.names(folder))]
        lines = [line for each in paths for line in (self.place.read(each) or b"").splitlines()]
        entries = []
        for line in lines:
            with suppress(ValueError):
                entries.append(json.loads(line))
        return [entry for entry in entries if isinstance(entry, dict)]

    def log(self, entry: dict[str, Any]) -> None:
        """Add a line to `sessions.jsonl`."""
        line = (json.dumps(entry, ensure_ascii=False) + "\n").encode()
        self.place.append(self.folder / "sessions.jsonl", line)

    def _manifest(self) -> tuple[dict[str, Any] | None, list[Pack]]:
        """The plan in `sweep.json`, None if there is none that can be read, and its packs."""
        path = self.folder / "sweep.json"
        try:
            data = self.place.read(path)
            if data is None:
                return None, []
            plan = files.open_json(data, str(path))
            return plan, manifest.packs_of(plan, str(path))
        except files.Damaged as error:
            # The records and checkpoints say for themselves what they are of.
            self._set_aside(path, error)
            return None, []

    def _make(self, name: str) -> None:
        """A folder of the store, which is no way out of it."""
        if self.place is files and (self.folder / name).is_symlink():
            raise ValueError(
                f"lab: {self.folder / name} must be a folder, got a link to another: a store "
                "writes to its own folder alone."
            )
        self.place.make(self.folder / name)

    def _readable(self, path: Path) -> bool:
        """Whether `path` may become the fallback: a damaged file must not push out a good one."""
        try:
            data = self.place.read(path)
            return data is not None and files.open_tensors(data, str(path)) is not None
        except files.Damaged as error:
            self._set_aside(path, error)
            return False

    def _set_aside(self, path: Path, error: Exception) -> None:
        """Say that a file is damaged, and move it out of the way without losing it."""
        names = (path.with_name(f"{path.name}.damaged-{k}") for k in itertools.count(1))
        aside = next(name for name in names if not self.place.exists(name))
        with suppress(FileNotFoundError):  # another process has just done it
            self.place.move(path, aside)
        self.warn(f"{error} It is kept as {aside.name}.")

    def _old(self, path: Path) -> Path:
        """Where the state before is kept; a folder that lies there is moved out of the way."""
        old = path.with_name(path.name + ".old")
        if self.place.is_folder(old):
            self._set_aside(old, files.Damaged(f"{old} is a folder, not a file."))
        return old

    def _differences(self, before: dict[str, Any], now: dict[str, Any]) -> str:
        keys = [k for k in {**before, **now} if before.get(k) != now.get(k)]
        text = "; ".join(f"{k}: {before.get(k)!r} there, {now.get(k)!r} now" for k in keys)
        return (
            f"{self.home} holds a sweep made under other conditions ({text}). "
            "Nothing was changed: choose another folder with --out."
        )

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        self.place.write(path, files.seal_json(value))

    def _record_path(self, lane: Lane) -> Path:
        return self.folder / "records" / f"{lane.name}.json"

    def _checkpoint_path(self, pack: Pack) -> Path:
        return self.folder / "checkpoints" / f"{pack.name}.pt"


def exported(path: Path) -> list[Record]:
    """The records of a file that `Store.export` wrote; every line must be whole."""
    data = files.read(path)
    if data is None:
        raise FileNotFoundError(f"{path} is not there.")
    lines = data.splitlines(keepends=True)
    return [_opened(line, f"{path}, line {k}") for k, line in enumerate(lines, 1)]


def _opened(data: bytes, name: str, lane: str | None = None) -> Record:
    """The record in a sealed line, of this lane where one is given, or Damaged."""
    plain = files.open_json(data, name)
    try:
        record = Record.from_json(plain)
    except ValueError as error:  # the checksum is right, but it is none of our records
        raise files.Damaged(f"{name} is no record of a lane: {error}") from error
    if lane is not None and record.lane.name != lane:
        raise files.Damaged(f"{name} is the record of another lane, {str(record.lane)!r}.")
    return record


def _asked(sweep: Sweep, packs: Sequence[Pack]) -> list[Pack]:
    lanes = set(sweep.lanes)
    return [pack for pack in packs if lanes & set(pack.lanes)]
