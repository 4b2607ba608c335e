"""A folder of records: what has been run, what is running, and where to go on.

    sweep.json            what the folder is for, and its packs; written once, grown, never changed
    records/LANE.json     one per lane, whole and sealed
    checkpoints/PACK.pt   the last state of a pack, and PACK.pt.old, the one before
    locks/                held while a pack is running
    sessions.jsonl        who worked here, when, and how fast (told apart from the records, which do
                          not depend on it)

Several processes may share a folder: each pack is run by the one that holds its lock.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from wngrad.lab import files
from wngrad.lab.spec import Lane, Pack, Record, Setting, Sweep


class Mismatch(ValueError):  # noqa: N818 - a state, and the name callers read
    """The folder holds another sweep, or one made under other conditions."""


class Store:
    """The records, checkpoints and locks of one sweep."""

    def __init__(self, folder: Path, warn: Callable[[str], None] = lambda message: None) -> None:
        self.folder, self.warn = Path(folder), warn
        self._written: set[Path] = set()  # checkpoints known to be whole: this process wrote them

    def open(self, sweep: Sweep, conditions: dict[str, Any]) -> list[Pack]:
        """The packs that hold the lanes of `sweep`; those that are new are added.

        Args:
            sweep: may have more epochs or seeds than before; nothing else may differ.
            conditions: what would change the numbers: precision, device, versions, data, note.
        """
        for name in ("records", "checkpoints", "locks"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        with files.lock(self.folder / "locks" / "sweep", wait=True):
            wanted = {**sweep.identity(), **conditions}
            known = self._manifest() or {"settings": self._recorded() or wanted, "packs": []}
            if known["settings"] != wanted:
                raise Mismatch(self._differences(known["settings"], wanted))
            planned = [_pack(entry) for entry in known["packs"]]
            added = _added(sweep, planned)
            if added or not planned:
                entries = [_entry(pack) for pack in (*planned, *added)]
                self._write(self.folder / "sweep.json", {**known, "packs": entries})
            asked = set(sweep.lanes)
            return [pack for pack in (*planned, *added) if asked & set(pack.lanes)]

    def record(self, lane: Lane) -> Record | None:
        """The lane's record; None if there is none that can be read."""
        return self._read_record(self._record_path(lane))

    def _read_record(self, path: Path) -> Record | None:
        try:
            data = files.read(path)
            return None if data is None else Record.from_json(files.open_json(data, str(path)))
        except files.Damaged as error:
            self._set_aside(path, error)
            return None

    def write_record(self, record: Record) -> None:
        self._write(self._record_path(record.lane), record.to_json())

    def records(self) -> list[Record]:
        """All records that can be read."""
        paths = sorted((self.folder / "records").glob("*.json"))
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
            os.replace(path, self._old(path))
        files.write(path, sealed)
        self._written.add(path)

    def load(self, pack: Pack) -> Any | None:
        """The last state of a pack that can be read, or None."""
        path, damaged = self._checkpoint_path(pack), False
        for candidate in (path, self._old(path)):
            try:
                data = files.read(candidate)
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
        self._old(self._checkpoint_path(pack)).unlink(missing_ok=True)

    @contextmanager
    def claim(self, pack: Pack) -> Iterator[bool]:
        """Whether this process may run the pack, for as long as the block lasts."""
        with files.lock(self.folder / "locks" / pack.name, wait=False) as mine:
            yield mine

    def log(self, entry: dict[str, Any]) -> None:
        """Add a line to `sessions.jsonl`."""
        line = (json.dumps(entry, ensure_ascii=False) + "\n").encode()
        files.append(self.folder / "sessions.jsonl", line)

    def _manifest(self) -> dict[str, Any] | None:
        path = self.folder / "sweep.json"
        try:
            data = files.read(path)
            return None if data is None else files.open_json(data, str(path))
        except files.Damaged as error:
            # The records and checkpoints say for themselves what they are of.
            self._set_aside(path, error)
            return None

    def _recorded(self) -> dict[str, Any] | None:
        """The settings the records speak of, for a folder that has lost its `sweep.json`."""
        return next((record.settings for record in self.records()), None)

    def _readable(self, path: Path) -> bool:
        """Whether `path` may become the fallback: a damaged file must not push out a good one."""
        try:
            data = files.read(path)
            return data is not None and files.open_tensors(data, str(path)) is not None
        except files.Damaged as error:
            self._set_aside(path, error)
            return False

    def _set_aside(self, path: Path, error: Exception) -> None:
        """Say that a file is damaged, and move it out of the way without losing it."""
        names = (path.with_name(f"{path.name}.damaged-{k}") for k in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        with suppress(FileNotFoundError):  # another process has just done it
            os.replace(path, aside)
        self.warn(f"{error} It is kept as {aside.name}.")

    def _old(self, path: Path) -> Path:
        """Where the state before is kept; a folder that lies there is moved out of the way."""
        old = path.with_name(path.name + ".old")
        if old.is_dir():
            self._set_aside(old, files.Damaged(f"{old} is a folder, not a file."))
        return old

    def _differences(self, before: dict[str, Any], now: dict[str, Any]) -> str:
        keys = [k for k in {**before, **now} if before.get(k) != now.get(k)]
        said = "; ".join(f"{k}: {before.get(k)!r} there, {now.get(k)!r} now" for k in keys)
        return (
            f"{self.folder} holds a sweep made under other conditions ({said}). "
            "Nothing was changed: choose another folder with --out."
        )

    def _write(self, path: Path, value: dict[str, Any]) -> None:
        files.write(path, files.seal_json(value))

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
    return [
        Record.from_json(files.open_json(line, f"{path}, line {k}"))
        for k, line in enumerate(lines, 1)
    ]


def _added(sweep: Sweep, planned: Sequence[Pack]) -> list[Pack]:
    """New packs for the lanes that are in none yet. Only seeds can be new."""
    seeds = {seed for pack in planned for seed in pack.seeds}
    new = [seed for seed in sweep.seeds if seed not in seeds]
    return sweep.cut(new, first=len(planned) + 1)


def _entry(pack: Pack) -> dict[str, Any]:
    settings = [[s.optimizer, s.lam] for s in pack.settings]
    return {"name": pack.name, "settings": settings, "seeds": list(pack.seeds)}


def _pack(entry: dict[str, Any]) -> Pack:
    settings = tuple(Setting(name, lam) for name, lam in entry["settings"])
    return Pack(entry["name"], settings, tuple(entry["seeds"]))
