"""The places a store can be in: a folder, or an address of fsspec such as `s3://bucket/sweep`.

A place has the functions of `files`, which is the place of all folders. What is written anywhere is
whole or not there.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, Protocol, cast

from wngrad.lab.run import files

# What is put there appears at once and whole, and a rename would be a copy.
OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "oss", "r2"})


class Place(Protocol):
    """What a store asks of the place it is in."""

    def read(self, path: Path, /) -> bytes | None: ...
    def write(self, path: Path, data: bytes, /) -> None: ...
    def append(self, path: Path, line: bytes, /) -> None: ...
    def move(self, path: Path, to: Path, /) -> None: ...
    def remove(self, path: Path, /) -> None: ...
    def names(self, folder: Path, /) -> list[str]: ...
    def exists(self, path: Path, /) -> bool: ...
    def is_folder(self, path: Path, /) -> bool: ...
    def make(self, folder: Path, /) -> None: ...
    def lock(self, path: Path, /, *, wait: bool) -> AbstractContextManager[bool]: ...


def is_address(home: Path | str) -> bool:
    return "://" in str(home)


def find(home: Path | str) -> tuple[Place, Path]:
    """The place of a folder or an address, and the folder's path in it.

    Raises:
        ValueError: no library that is installed knows such addresses.
    """
    if not is_address(home):
        return cast(Place, files), Path(home)
    from fsspec.core import url_to_fs

    try:
        fs, path = url_to_fs(str(home))
    except (ImportError, ValueError, OSError) as error:
        raise ValueError(f"lab: `out` {str(home)!r} cannot be reached: {error}.") from error
    return RemoteFiles(fs), Path(path)


class RemoteFiles:
    """The files at an address of fsspec. Locks hold among the processes of one machine only."""

    def __init__(self, fs: Any) -> None:
        self.fs = fs
        protocols = {fs.protocol} if isinstance(fs.protocol, str) else set(fs.protocol)
        self.at_once = bool(protocols & OBJECT_STORES)

    def read(self, path: Path) -> bytes | None:
        try:
            data: bytes = self.fs.cat_file(str(path))
        except FileNotFoundError:
            return None
        except IsADirectoryError as error:
            raise files.Damaged(f"{path} is a folder, not a file.") from error
        return data

    def write(self, path: Path, data: bytes) -> None:
        if self.at_once:
            self.fs.pipe_file(str(path), data)
            return
        new = files.beside(path)
        self.fs.pipe_file(str(new), data)
        self.fs.mv(str(new), str(path))

    def append(self, path: Path, line: bytes) -> None:
        """A file of its own in a folder of that name: such places cannot append."""
        folder = path.with_suffix("")
        self.make(folder)
        self.write(folder / f"{time.time_ns()}-{os.getpid()}{path.suffix}", line)

    def move(self, path: Path, to: Path) -> None:
        self.fs.mv(str(path), str(to))

    def remove(self, path: Path) -> None:
        if self.exists(path):
            self.fs.rm_file(str(path))

    def names(self, folder: Path) -> list[str]:
        self.fs.invalidate_cache()  # others write there, too
        try:
            return sorted(Path(path).name for path in self.fs.ls(str(folder), detail=False))
        except FileNotFoundError:
            return []

    def exists(self, path: Path) -> bool:
        self.fs.invalidate_cache()
        return bool(self.fs.exists(str(path)))

    def is_folder(self, path: Path) -> bool:
        return False  # an object store has none, and elsewhere `read` says so

    def make(self, folder: Path) -> None:
        self.fs.makedirs(str(folder), exist_ok=True)

    def lock(self, path: Path, *, wait: bool) -> AbstractContextManager[bool]:
        where = private_folder(Path(tempfile.gettempdir()) / f"wngrad-locks-{os.getuid()}")
        return files.lock(where / hashlib.sha256(str(path).encode()).hexdigest(), wait=wait)


def private_folder(path: Path) -> Path:
    """A folder in one that all may write to, made if need be, that no other user can write to.

    Raises:
        PermissionError: it is there already, and another user's, or not a folder.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    state = os.lstat(path)
    if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid():
        raise PermissionError(
            f"lab: {path} must be a folder of your own, got one that user {state.st_uid} has made; "
            "set TMPDIR to a folder of yours."
        )
    if state.st_mode & 0o077:
        path.chmod(0o700)
    return path
