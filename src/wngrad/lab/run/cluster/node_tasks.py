"""The tasks that run on the nodes of a Ray cluster: a probe, a measurement, a pack of lanes.

A worker process keeps torch, the data and the session from one task to the next. This module is
imported by every worker; torch is loaded only by those that train.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import wngrad
from wngrad.lab.run import places
from wngrad.lab.run.job import Event, Job

if TYPE_CHECKING:
    from wngrad.lab.run.session import Session

SEND_EVERY = 0.5  # seconds between two messages of a pack
CLAIM = 60.0  # seconds to wait for a pack that the tasks of a killed driver may still hold


class Board:
    """An actor beside the driver, to which packs send events, and which tells them to stop."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.begun: set[str] = set()
        self.stopped = False

    def begin(self, pack: str) -> bool:
        """Whether a task may begin."""
        if not self.stopped:
            self.begun.add(pack)
        return not self.stopped

    def put(self, events: list[Event]) -> bool:
        """Take the events of a pack; whether it is to save and leave."""
        self.events += events
        return self.stopped

    def take(self) -> list[Event]:
        taken, self.events = self.events, []
        return taken

    def stop(self) -> set[str]:
        """From now on no task begins; those that have, by the names of their packs."""
        self.stopped = True
        return self.begun


class BoardClient:
    """A task's connection to the board: it sends all new events every half second, in one call.

    Answers are taken as futures: while a task waits in `ray.get`, Ray gives its cores to another.
    """

    def __init__(self, board: Any) -> None:
        self.board, self.events = board, list[Event]()
        self.sent = time.monotonic()
        self.answer: Any = None
        self.stopped = False

    def tell(self, event: Event) -> None:
        if event["kind"] == "progress":  # only the last one matters
            self.events = [e for e in self.events if e["kind"] != "progress"]
        self.events.append(event)
        if event["kind"] == "start" or time.monotonic() - self.sent >= SEND_EVERY:
            self._send()

    def begin(self, pack: str) -> bool:
        """Whether the task may begin."""
        answer: bool = self.board.begin.remote(pack).future().result()
        return answer

    def stop(self) -> bool:
        if time.monotonic() - self.sent >= SEND_EVERY:
            self._send()
        if self.answer is not None and self.answer.done():
            self.stopped, self.answer = self.answer.result(), None
        return self.stopped

    def unsent(self) -> list[Event]:
        """The events that are left, once the others are on the board."""
        if self.answer is not None:
            self.answer.result()
        return self.events

    def _send(self) -> None:
        self.sent, events, self.events = time.monotonic(), self.events, []
        self.answer = self.board.put.remote(events).future()


def probe(text: str, nonce: str) -> dict[str, Any]:
    """What a node has and can reach: versions, the store, the data, the device."""
    import ray

    versions = {
        "python": platform.python_version(),
        "ray": ray.__version__,
        "wngrad": wngrad.__version__,
    }
    try:
        if reason := _unreachable(json.loads(text)["shared"], nonce):
            return {"versions": versions, "error": reason}
        session = _session(text)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        return {"versions": versions, "error": " ".join(str(error).split())}
    versions["torch"] = session.environment["torch"]
    return {"versions": versions, "conditions": session.conditions}


def _unreachable(home: str, nonce: str) -> str:
    """Why the driver's folder is not this node's, too; empty if it is, and can be written."""
    try:
        place, folder = places.find(home)
        if place.read(folder / nonce) != nonce.encode():
            return f"does not see {home}: `--out` must be a folder or an address that all share"
        place.write(folder / f"{nonce}-{os.getpid()}", b"")
        place.remove(folder / f"{nonce}-{os.getpid()}")
    except (ValueError, OSError) as error:
        return f"cannot write to {home}: {' '.join(str(error).split())}"
    return ""


def differences(a: tuple[str, Mapping[str, Any]], b: tuple[str, Mapping[str, Any]]) -> str:
    """What two nodes, each with its name, do not have in common; empty if they agree."""
    (first, mine), (second, its) = a, b
    keys = [key for key in mine if key in its and mine[key] != its[key]]
    return "; ".join(f"{key} is {mine[key]} on {first}, {its[key]} on {second}" for key in keys)


def measure(text: str, most: int | None, cut: list[Any] | None) -> dict[str, Any]:
    """What packs cost here: those of `cut` if they are settled, growing ones if not."""
    from wngrad.lab.run import timing
    from wngrad.lab.train.spec import Pack

    session = _session(text)
    sweep, data, device = session.sweep, session.data, session.device
    try:
        if cut is not None:
            return {"costs": timing.sizes(sweep, [Pack(*each) for each in cut], data, device)}
        return {"costs": timing.growing(sweep, data, device, most)}
    except Exception as error:  # of the user's code, say; the packs will record it for themselves
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def run_pack(
    text: str, pack: str, failed: str, expected: dict[str, Any], board: Any
) -> dict[str, Any]:
    """Train a pack, or record that it has `failed`: how it ended, and events not yet sent.

    Args:
        expected: the conditions of the sweep; a node that joined later may have others.
    """
    import ray

    client = BoardClient(board)
    if not client.begin(pack):
        return {"how": "interrupted", "events": []}
    try:
        from wngrad.lab.run.session import Interrupted
        from wngrad.lab.train.cuda_stats import free

        session = _session(text)
        node = f"{ray.util.get_node_ip_address()}, which joined later"
        if differ := differences(("the other nodes", expected), (node, session.conditions)):
            return {"how": "error", "text": f"nodes differ: {differ}.", "events": []}
        session.tell, session.stop, session.wait = client.tell, client.stop, CLAIM
        session.store.warn = lambda text: client.tell({"kind": "warning", "text": text})
        try:
            session.run_pack(pack, failed)
        except Interrupted:
            return {"how": "interrupted", "events": client.unsent()}
        finally:
            if session.device != "cpu":  # the worker lives on, and a GPU's memory is short
                free(session.device)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        return {"how": "error", "text": " ".join(str(error).split()), "events": client.unsent()}
    return {"how": "finished", "events": client.unsent()}


@lru_cache(maxsize=1)
def _session(text: str) -> Session:
    plain = json.loads(text)
    if Path(plain["cwd"]).is_dir():
        os.chdir(plain["cwd"])  # names of files are as the user typed them
    import torch

    from wngrad.lab.run.worker import open_session

    job = Job.from_json(plain["job"])
    torch.set_num_threads(job.cpus)
    return open_session(job, lambda event: None, lambda: False)
