"""The processes that a probe has started: found and stopped, whatever session they are in."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE = 5.0  # seconds for killed processes to be gone


def adopt_orphans() -> None:
    """Let descendants whose parents end become children of this process, where Linux can."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int) -> list[int]:
    """The children of a process, and theirs, as far as /proc tells."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # PID (NAME) STATE PARENT …, where a name may hold anything
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found, new = [], [pid]
    while new:
        new = [child for each in new for child in children.get(each, [])]
        found += new
    return found


def stop(pid: int) -> None:
    """Kill a process, its group, and all it has started."""
    others = descendants(pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for each in (pid, *others):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)


def stop_children() -> None:
    """Kill and reap all that descends from this process, until there is nothing left."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until and (left := descendants(os.getpid())):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)
