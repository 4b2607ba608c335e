"""What runs on the nodes of a Ray cluster: a look around, a measurement, a pack of lanes.

The driver is in `driver`. A worker process keeps torch, the data and the session from one task to
the next. This module is imported by every worker; torch is loaded only by those that train.
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

if TYPE_CHECKING:
    from wngrad.lab.run.session import Session

Event = dict[str, Any]
SAY_EVERY = 0.5  # seconds between two messages of a pack
CLAIM = 60.0  # seconds to wait for a pack that the tasks of a killed driver may still hold


class Board:
    """Where packs say how they are, and read whether to stop. An actor beside the driver."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.begun: set[str] = set()
        self.stopped = False

    def begin(self, pack: str) -> bool:
        """Whether a task may begin."""
        if not self.stopped:
            self.begun.add(pack)
        return not self.stopped

    def tell(self, events: list[Event]) -> bool:
        """Take what a pack has to say; whether it is to save and leave."""
        self.events += events
        return self.stopped

    def take(self) -> list[Event]:
        taken, self.events = self.events, []
        return taken

    def stop(self) -> set[str]:
        """From now on no task begins; those that have, by the names of their packs."""
        self.stopped = True
        return self.begun


class _Line:
    """A task's line to the board: it says what there is to say every half second, in one call.

    Answers are taken as futures: while a task waits in `ray.get`, Ray gives its cores to another.
    """

    def __init__(self, board: Any) -> None:
        self.board, self.left = board, list[Event]()
        self.said = time.monotonic()
        self.answer: Any = None
        self.stopped = False

    def tell(self, event: Event) -> None:
        if event["kind"] == "plan":  # of the whole sweep; the driver has told it
            return
        if event["kind"] == "progress":  # only the last one matters
            self.left = [e for e in self.left if e["kind"] != "progress"]
        self.left.append(event)
        if event["kind"] == "start" or time.monotonic() - self.said >= SAY_EVERY:
            self._say()

    def begin(self, pack: str) -> bool:
        """Whether the task may begin."""
        answer: bool = self.board.begin.remote(pack).future().result()
        return answer

    def stop(self) -> bool:
        if time.monotonic() - self.said >= SAY_EVERY:
            self._say()
        if self.answer is not None and self.answer.done():
            self.stopped, self.answer = self.answer.result(), None
        return self.stopped

    def rest(self) -> list[Event]:
        """What has not been said, once the rest is on the board."""
        if self.answer is not None:
            self.answer.result()
        return self.left

    def _say(self) -> None:
        self.said, taken, self.left = time.monotonic(), self.left, []
        self.answer = self.board.tell.remote(taken).future()


def look(job: str, nonce: str) -> dict[str, Any]:
    """What a node has and can reach: versions, the store, the data, the device."""
    import ray

    asked = json.loads(job)
    found: dict[str, Any] = {
        "versions": {
            "python": platform.python_version(),
            "ray": ray.__version__,
            "wngrad": wngrad.__version__,
        }
    }
    try:
        if reason := _unseen(asked["seen"], nonce):
            return found | {"error": reason}
        session = _session(job)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        return found | {"error": " ".join(str(error).split())}
    from wngrad.lab.run.session import conditions

    found["versions"]["torch"] = session.environment["torch"]
    return found | {"conditions": conditions(session)}


def _unseen(home: str, nonce: str) -> str:
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


def differing(a: tuple[str, Mapping[str, Any]], b: tuple[str, Mapping[str, Any]]) -> str:
    """What two nodes, each with its name, do not have in common; empty if they agree."""
    (one, mine), (other, its) = a, b
    keys = [key for key in mine if key in its and mine[key] != its[key]]
    return "; ".join(f"{key} is {mine[key]} on {one}, {its[key]} on {other}" for key in keys)


def measure(job: str, most: int | None, cut: list[Any] | None) -> dict[str, Any]:
    """What packs cost here: those of `cut` if they are settled, growing ones if not."""
    from wngrad.lab.run import timing
    from wngrad.lab.train.spec import Pack

    session = _session(job)
    sweep, data, device = session.sweep, session.data, session.device
    try:
        if cut is not None:
            return {"costs": timing.sizes(sweep, [Pack(*each) for each in cut], data, device)}
        return {"costs": timing.growing(sweep, data, device, most)}
    except Exception as error:  # of the user's code, say; the packs will record it for themselves
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"}


def run_pack(
    job: str, pack: str, failed: str, expected: dict[str, Any], board: Any
) -> dict[str, Any]:
    """Train a pack, or record that it has `failed`: how it ended, and what is left to tell.

    Args:
        expected: the conditions of the sweep; a node that joined later may have others.
    """
    import ray

    line = _Line(board)
    if not line.begin(pack):
        return {"kind": "interrupted", "events": []}
    try:
        from wngrad.lab.run import timing
        from wngrad.lab.run.session import Interrupted, conditions

        session = _session(job)
        mine = (f"{ray.util.get_node_ip_address()}, which joined later", conditions(session))
        if differs := differing(("the other nodes", expected), mine):
            return {"kind": "error", "text": f"nodes differ: {differs}.", "events": []}
        session.tell, session.stop, session.wait = line.tell, line.stop, CLAIM
        session.store.warn = lambda text: line.tell({"kind": "warning", "text": text})
        session.failed = {pack: failed} if failed else {}
        try:
            session.run(only=(pack,))
        except Interrupted:
            return {"kind": "interrupted", "events": line.rest()}
        finally:
            if session.device != "cpu":  # the worker lives on, and a GPU's memory is short
                timing.free(session.device)
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        return {"kind": "error", "text": " ".join(str(error).split()), "events": line.rest()}
    return {"kind": "finished", "events": line.rest()}


@lru_cache(maxsize=1)
def _session(job: str) -> Session:
    asked = json.loads(job)
    if Path(asked["cwd"]).is_dir():
        os.chdir(asked["cwd"])  # names of files are as the user typed them
    import torch

    from wngrad.lab.run.worker import session

    torch.set_num_threads(asked["cpus"])
    return session(asked, lambda event: None, lambda: False)
