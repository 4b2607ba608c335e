"""Processes and threads that a task has started and left: Python waits for them when it ends."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

GRACE = 2.0  # seconds between SIGTERM and SIGKILL


def stop_processes(warn: Callable[[str], None]) -> None:
    """Stop what `multiprocessing` has started here and would join at the end."""
    left = [child for child in multiprocessing.active_children() if not child.daemon]
    for child in left:
        warn(f"a process that the task had started ({child.pid}) was still there: it was stopped.")
        child.terminate()
    until = time.monotonic() + GRACE
    for child in left:
        child.join(max(0.0, until - time.monotonic()))
        child.kill()


def leave(status: int, warn: Callable[[str], None]) -> NoReturn:
    """End this process: what was registered for its end is done, a thread that is left is not.

    Python would take torch and its compiler apart, object by object, which takes a second.
    """
    main = threading.main_thread()
    left = [each.name for each in threading.enumerate() if each is not main and not each.daemon]
    if left:
        warn(f"a thread that the task had started ({left[0]}) was still running: it was left.")
    else:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    os._exit(status)
