"""A worker of the tournament: it imports little, and trains in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from wngrad.lab.run.supervisor import Job, supervise
from wngrad.lab.train.spec import Sweep


def slot() -> int:
    """A worker's process: supervise one part, and leave when the tournament is gone."""
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    threading.Thread(target=_watch, daemon=True).start()
    job = Job(
        Sweep.from_json(order["sweep"]),
        Path(order["out"]),
        device=order["device"],
        note=order["note"],
        save_every=120.0,
    )
    outcome = supervise(job, lambda event: None)
    if outcome.text:
        print(outcome.text, flush=True)
    return outcome.status


def _watch() -> None:
    """Wait for the end of the pipe, which is the end of the tournament."""
    while os.read(sys.stdin.fileno(), 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(slot())
