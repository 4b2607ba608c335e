"""The process that trains, one pack after another. Its supervisor outlives what a run does to it.

    python -m wngrad.lab.run.worker COMMANDS EVENTS

Both are file descriptors, and carry lines of JSON. The first command is the job, every other a
pack to train; a pack without a name asks to open the store, and to tell which packs it lacks.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wngrad.lab.atomic import write_all
from wngrad.lab.run import compiling, leftovers
from wngrad.lab.run.job import Event, Job, Tell
from wngrad.lab.run.pool import SIGNALS

if TYPE_CHECKING:
    from wngrad.lab.run.environment import Trained
    from wngrad.lab.run.session import Session


class _Stop:
    """Whether to save and leave: a signal came, or the supervisor is gone."""

    def __init__(self) -> None:
        self.signal = 0
        self.busy = False  # whether there may be something to save
        self.alone = False
        self.parent = os.getppid()
        for number in SIGNALS:
            signal.signal(number, self._note)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the supervisor held them back

    def _note(self, number: int, frame: object) -> None:
        self.signal = number
        if not self.busy:  # An import or a download may take long, and may catch exceptions.
            os._exit(128 + number)

    def __call__(self) -> bool:
        return bool(self.signal) or self.alone or os.getppid() != self.parent


def open_session(job: Job, tell: Tell, stop: Callable[[], bool]) -> Session:
    """A session for a job, with its data loaded and its store at hand."""
    import torch

    from wngrad.lab.run.session import Session
    from wngrad.lab.run.store import Store

    device = job.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    compiling.keep_cache()
    with compiling.compiler_loading(job.sweep, device):
        data = _data(job.sweep.task, job.sweep.dataset, job.data)
    return Session(
        job.sweep,
        data,
        Store(_absolute(job.out), warn=lambda text: tell({"kind": "warning", "text": text})),
        device=device,
        note=job.note,
        save_every=job.save_every,
        tell=tell,
        stop=stop,
    )


def _absolute(out: Path | str) -> Path | str:
    """A folder by its whole name: a run may change the working folder."""
    from wngrad.lab.run.places import is_address

    return out if is_address(out) else Path(out).absolute()


@lru_cache(maxsize=1)  # for a process that has several sessions in turn
def _data(task: str, dataset: str, folder: Path | None) -> Trained:
    from wngrad.lab.train.data import load
    from wngrad.lab.train.task import task_data

    return task_data(task) if task else load(dataset, folder)


def main(commands: Iterable[str], events: int) -> int:
    """Obey the commands, and tell what happens on the file descriptor `events`."""
    stop = _Stop()  # first of all: a signal during the imports must not be lost

    failed: list[Event] = []

    def tell(event: Event) -> None:
        if event.get("status") == "failed":
            failed.append(event)
        try:
            write_all(events, (json.dumps(event) + "\n").encode())
        except BrokenPipeError:
            stop.alone = True
        except OSError as error:  # a run has closed what is not its own
            _warn(f"the worker can tell nothing more: {error.strerror}.")
            os._exit(1)

    def ended(status: int, how: str, **what: Any) -> int:
        """Told as well: who is hit by a signal as it shuts down has another exit status."""
        tell({"kind": "ended", "how": how, "status": status, **what})
        return status

    lines = map(json.loads, commands)
    if (plain := next(lines, None)) is None:
        return 0  # the supervisor is gone
    job = Job.from_json(plain)
    with _importing():
        import torch

        from wngrad.lab.run.session import Interrupted
        from wngrad.lab.train.cuda_stats import free

    torch.set_num_threads(job.cpus)
    try:
        with _importing():
            session = open_session(job, tell, stop)
        for command in lines:
            stop.busy = True
            if command["pack"]:
                session.run_pack(command["pack"], command["failed"])
            else:
                tell({"kind": "packs", "packs": [pack.name for pack in session.open()]})
            # An error on CUDA often stays with the process: the next run gets another one.
            leaves = bool(failed) and session.device != "cpu"
            if session.device != "cpu" and not leaves:
                free(session.device)  # others may share the GPU
            ended(0, "finished", **({"leaves": True} if leaves else {}))
            stop.busy = False
            if leaves:
                return 0
    except Interrupted:
        return ended(128 + (stop.signal or signal.SIGTERM), "interrupted")
    except (ValueError, OSError, RuntimeError) as error:
        return ended(2, "error", text=" ".join(str(error).split()))
    return 0


@contextmanager
def _importing() -> Iterator[None]:
    """No garbage is collected meanwhile: torch and its compiler are imported a fifth sooner."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _warn(text: str) -> None:
    print(f"wngrad: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    for descriptor in map(int, sys.argv[1:]):
        os.set_inheritable(descriptor, False)  # nor shall what a run starts keep them open
    status = main(os.fdopen(int(sys.argv[1])), int(sys.argv[2]))
    leftovers.stop_processes(_warn)
    leftovers.leave(status, _warn)
