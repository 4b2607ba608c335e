"""Atomic files: written beside, synced, renamed; each is whole or not there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write(path: Path, data: bytes) -> None:
    """Put `data` at `path`: whatever happens, the old contents or the new, never a mixture.

    Raises:
        OSError: there is no room, or the folder cannot be written; it names `path`.
    """
    new = beside(path)
    try:
        if new.is_symlink():  # in a folder from somebody else: it may lead anywhere
            new.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        descriptor = os.open(new, flags, 0o666)
        try:
            write_all(descriptor, data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(new, path)
        _sync_folder(path.parent)
    except OSError as error:
        new.unlink(missing_ok=True)
        raise unwritten(path, error) from error


def beside(path: Path) -> Path:
    """Where a file is written before it is renamed.

    A short name: one longer than `path` might not be allowed. The same name every time: what a
    killed process left is overwritten by the next. Writers of one path hold a common lock.
    """
    return path.with_name(f".{hashlib.sha256(path.name.encode()).hexdigest()[:16]}")


def append(path: Path, line: bytes) -> None:
    """Add a line in one write: lines of several processes stay whole."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o666)
        try:
            write_all(descriptor, line)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise unwritten(path, error) from error


def unwritten(path: Path, error: OSError) -> OSError:
    """The same error, with the name of the file that was to be written."""
    return OSError(error.errno, f"{path} could not be written: {error.strerror}")


def write_all(descriptor: int, data: bytes) -> None:
    """Write to a descriptor as often as it takes."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _sync_folder(folder: Path) -> None:
    """Make a rename last through a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
