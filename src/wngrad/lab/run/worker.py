"""The process that trains. Its supervisor outlives whatever a run does to it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wngrad.lab.train.spec import Sweep

if TYPE_CHECKING:
    from wngrad.lab.run.session import Session
    from wngrad.lab.train.data import Data

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Stop:
    """Whether to leave, and with which exit status: a signal came, or the supervisor is gone."""

    def __init__(self) -> None:
        self.signal = 0
        self.begun = False  # whether there may be something to save
        self.alone = False
        self.parent = os.getppid()
        for number in SIGNALS:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the supervisor held them back

    def _note(self, number: int, frame: object) -> None:
        self.signal = number
        if not self.begun:  # An import or a download may take long, and may catch exceptions.
            os._exit(128 + number)

    def __call__(self) -> bool:
        return bool(self.signal) or self.alone or os.getppid() != self.parent


def session(
    job: dict[str, Any], tell: Callable[[dict[str, Any]], None], stop: Callable[[], bool]
) -> Session:
    """What a job asks for, with its data loaded and its store at hand."""
    import torch

    from wngrad.lab.run.session import Session
    from wngrad.lab.run.store import Store

    device = job["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    sweep = Sweep.from_json(job["sweep"])
    return Session(
        sweep,
        _data(sweep.task, sweep.dataset, job["data"]),
        Store(job["out"], warn=lambda text: tell({"kind": "warning", "text": text})),
        device=device,
        note=job["note"],
        save_every=job["save_every"],
        tell=tell,
        stop=stop,
        failed=job["failed"],
    )


@lru_cache(maxsize=1)  # for a process that has several sessions in turn
def _data(task: str, dataset: str, folder: str | None) -> Data:
    from wngrad.lab.train.data import load
    from wngrad.lab.train.task import task_data

    return task_data(task) if task else load(dataset, Path(folder) if folder else None)


def main(events: int, job: dict[str, Any]) -> int:
    """Run a job; tell what happens as lines of JSON on the file descriptor `events`."""
    stop = _Stop()  # first of all: a signal during the imports must not be lost

    def tell(event: dict[str, Any]) -> None:
        try:
            os.write(events, (json.dumps(event) + "\n").encode())
        except BrokenPipeError:
            stop.alone = True

    def last(status: int, kind: str, **what: str) -> int:
        """Said as well: who is hit by a signal as it shuts down has another exit status."""
        tell({"kind": kind, "status": status, **what})
        return status

    from wngrad.lab.run.session import Interrupted

    try:
        found = session(job, tell, stop)
        stop.begun = True
        found.run()
    except Interrupted:
        return last(128 + (stop.signal or signal.SIGTERM), "interrupted")
    except (ValueError, OSError, RuntimeError) as error:
        return last(2, "error", text=" ".join(str(error).split()))
    return last(0, "finished")


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), json.load(sys.stdin)))
