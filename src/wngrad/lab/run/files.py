"""The files of a store on this machine's disk: sealed by checksums, and locks.

A sealed file that was cut, or in which one bit has changed, is not read but reported as `Damaged`.
Nothing is unpickled before its checksum is right, and then only as plain data and tensors.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from wngrad.lab import atomic
from wngrad.lab.atomic import append as append
from wngrad.lab.atomic import beside as beside
from wngrad.lab.atomic import write as write

_MAGIC = b"wngrad-checkpoint-1\n"


class Damaged(ValueError):  # noqa: N818 - a state, and the name callers read
    """A file whose contents are not what was written; the message names it and says why."""


def seal_json(value: dict[str, Any]) -> bytes:
    """`value` as one line of JSON that ends in its own checksum."""
    body = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    seal = hashlib.sha256(body.encode()).hexdigest()
    return f'{body[:-1]}{"," if len(body) > 2 else ""}"sha256":"{seal}"}}\n'.encode()


def open_json(data: bytes, name: str) -> dict[str, Any]:
    """What `seal_json` sealed, byte for byte, or Damaged."""
    try:
        value: dict[str, Any] = json.loads(data)
        value.pop("sha256")
        matches = seal_json(value) == data
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise Damaged(f"{name} is not a whole record: {error}.") from error
    if not matches:
        raise Damaged(f"{name} does not match its checksum.")
    return value


class _ByValue:
    """Pickle, such that equal values have equal bytes.

    By itself it abbreviates an object that it has met before, but not another of equal value: a
    run that was read back from a file would be saved in other bytes than one that never stopped.
    """

    class Pickler(pickle.Pickler):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.fast = True


def seal_tensors(value: Any) -> bytes:
    """Containers of tensors and numbers as bytes, behind their checksum.

    Raises:
        TypeError: there is something else in it, which `open_tensors` would refuse.
    """
    import torch
    from torch.serialization import get_unsafe_globals_in_checkpoint

    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_ByValue)
    body = buffer.getvalue()
    if others := get_unsafe_globals_in_checkpoint(io.BytesIO(body)):
        raise TypeError(f"lab: a state must be tensors and plain data, got {', '.join(others)}.")
    return _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def open_tensors(data: bytes, name: str) -> Any:
    """What `seal_tensors` sealed, on the CPU, or Damaged. Runs no code from the file."""
    import torch

    head = len(_MAGIC) + 65
    body = data[head:]
    expected = _MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n"
    if data[:head] != expected:
        raise Damaged(f"{name} does not match its checksum.")
    try:
        return torch.load(io.BytesIO(body), map_location="cpu", weights_only=True)
    except Exception as error:  # the checksum is right, but it is none of our files
        what = type(error).__name__
        raise Damaged(f"{name} holds something other than tensors ({what}).") from error


def read(path: Path) -> bytes | None:
    """The bytes at `path`, or None if there is nothing; Damaged if it is not a file."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except IsADirectoryError as error:
        raise Damaged(f"{path} is a folder, not a file.") from error


def move(path: Path, to: Path) -> None:
    """Give a file another name, in place of what may have had it."""
    os.replace(path, to)


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


def names(folder: Path) -> list[str]:
    """What lies in a folder, sorted; nothing if it is not there."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def exists(path: Path) -> bool:
    return path.exists()


def is_folder(path: Path) -> bool:
    return path.is_dir()


def make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def lock(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold `path` for this process alone; yields whether that was possible.

    The operating system lets go of it when the process ends, however it ends: nothing is ever left
    marked as running. A link is no lock: what it leads to may be somebody else's.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        raise atomic.unwritten(path, error) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        yield False
        return
    _held.add(descriptor)
    try:
        yield True
    finally:
        _held.discard(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # for copies in forked processes, too
        os.close(descriptor)


_held: set[int] = set()  # descriptors of the locks that this process holds


def _let_go() -> None:
    """In a forked process, which would hold its parent's locks for as long as it stays."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
