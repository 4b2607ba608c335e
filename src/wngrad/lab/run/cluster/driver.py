"""Run a sweep on a Ray cluster: each pack of lanes is a task, and its records go to the one store.

The driver sends what has no record, passes on what the tasks tell, and sends a pack again whose
worker or node was lost: it goes on from its last checkpoint. Nothing is kept here that a new driver
would need; that is all in the store.
"""

from __future__ import annotations

import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wngrad.lab.run.cluster import node_tasks
from wngrad.lab.run.cluster import nodes as cluster_nodes
from wngrad.lab.run.cluster.site import Site, absolute
from wngrad.lab.run.pack_size import clock
from wngrad.lab.run.store import Store
from wngrad.lab.run.supervisor import Job, Outcome
from wngrad.lab.run.worker import SIGNALS
from wngrad.lab.train.spec import Pack

Event = dict[str, Any]
Tell = Callable[[Event], None]
POLL = 0.25  # seconds between two looks at the board
TRIES = 3  # workers a pack may take along before it is recorded as failed
NAME = 30.0  # seconds for the board of a killed driver to be gone


def run(
    job: Job, tell: Tell, address: str, *, cpus: int = 1, patience: float | None = None
) -> Outcome:
    """Run the job to its end on the cluster at `address`."""
    try:
        with cluster_nodes.connected(address), _Signals() as signals:
            home = absolute(job.out)
            with _sole(home), _board(home, signals.check) as board:
                site = Site.open(job, cpus, signals.check)
                return _Driver(site, board, tell, patience, signals).run()
    except _Left as left:
        return Outcome(128 + left.number)
    except (ValueError, OSError) as error:
        return Outcome(2, str(error))
    except Exception as error:
        if not _from_ray(error):
            raise
        return Outcome(2, f"Ray: {' '.join(str(error).split())[:300]}")


def plan(job: Job, address: str, *, cpus: int = 1) -> list[str]:
    """What `run` would do, in lines; trains nothing and writes no store.

    Raises:
        ValueError: the cluster cannot run it, in one line.
    """
    with cluster_nodes.connected(address), _Signals() as signals:
        site = Site.open(job, cpus, signals.check)
        packs = site.settle()
        left = site.left(packs)
        site.measure(left)
        found = site.plan(packs, left)
        assert found is not None
        nodes = [f"{node}: {site.need.slots(node.resources)} at a time" for node in site.nodes]
        return [*nodes, *site.said, *found.lines()]


@dataclass(slots=True)
class _Driver:
    """Sends packs, and hears of them, until all are done."""

    site: Site
    board: Any
    tell: Tell
    patience: float | None
    signals: _Signals
    queue: deque[tuple[str, str]] = field(default_factory=deque)  # packs, and why they have failed
    sent: dict[Any, str] = field(default_factory=dict)  # tasks, and their packs
    lost: Counter[str] = field(default_factory=Counter)  # workers that packs have taken along
    heard: dict[str, float] = field(default_factory=dict)  # packs that have begun: when they spoke
    silent: set[str] = field(default_factory=set)  # packs that were ended for their silence
    failed: dict[str, str] = field(default_factory=dict)  # lanes, with reasons
    error: str = ""
    stopping: bool = False
    looked: float = 0.0

    def run(self) -> Outcome:
        site = self.site
        site.settle()
        sweep = site.job.sweep
        packs = site.store.open(sweep, site.conditions)
        lanes = sum(len(pack.lanes) for pack in packs)
        self.tell({"kind": "plan", "lanes": lanes, "epochs": sweep.epochs})
        left = site.left(packs)
        for line in (*site.said, self._where(packs, left)):
            self.tell({"kind": "warning", "text": line})
        names = {pack.name for pack in left}
        for pack in packs:
            if pack.name in names:
                self.queue.append((pack.name, ""))
            else:
                site.store.finish(pack)
                self.tell({"kind": "had", "pack": pack.name, "lanes": len(pack.lanes)})
        self._work()
        said = [f"{lane}: {reason}" for lane, reason in self.failed.items()]
        if self.error:
            return Outcome(2, self.error, said)
        if self.signals.count:
            return Outcome(128 + self.signals.last, failed=said)
        return Outcome(int(bool(said)), failed=said)

    def _where(self, packs: list[Pack], left: list[Pack]) -> str:
        site = self.site
        nodes = f"{len(site.nodes)} nodes" if len(site.nodes) > 1 else str(site.nodes[0])
        plan = site.plan(packs, left) if left else None
        took = f", about {clock(plan.seconds)} in all" if plan else ""
        return f"{len(packs)} packs on {nodes}, {site.slots} at a time, {site.need} each{took}"

    def _work(self) -> None:
        import ray

        run_pack = cluster_nodes.remote(node_tasks.run_pack, self.site.need)
        text = ray.put(self.site.text())
        ahead = 2 * self.site.slots + 64  # enough to keep every worker busy, and an autoscaler
        while self.queue or self.sent:
            if (self.signals.count or self.error) and not self.stopping:
                self._stop()
            if self.signals.count > 1:
                return
            while self.queue and len(self.sent) < ahead:
                pack, failed = self.queue.popleft()
                ref = run_pack.remote(text, pack, failed, self.site.conditions, self.board)
                self.sent[ref] = pack
            if not self.sent:
                continue
            ready, _ = ray.wait(list(self.sent), timeout=POLL)
            self._hear()
            for ref in ready:
                self._ended(ref, self.sent.pop(ref))

    def _hear(self, now: bool = False) -> None:
        """Pass on what there is on the board, and end who says nothing any more."""
        import ray

        if not now and time.monotonic() - self.looked < POLL:
            return
        self.looked = time.monotonic()
        for event in ray.get(self.board.take.remote()):
            self._pass_on(event)
        for ref, pack in self.sent.items():
            since = time.monotonic() - self.heard.get(pack, self.looked)
            if self.patience is not None and since > self.patience and pack not in self.silent:
                self.silent.add(pack)
                ray.cancel(ref, force=True)

    def _pass_on(self, event: Event) -> None:
        if "pack" in event:
            self.heard[event["pack"]] = time.monotonic()
        if event["kind"] == "record" and event["status"] == "failed":
            self.failed[event["lane"]] = event["reason"]
        if event["kind"] != "start":  # they may be thousands
            self.tell(event)

    def _ended(self, ref: Any, pack: str) -> None:
        import ray
        from ray.exceptions import NodeDiedError, RayError, RayTaskError

        self._hear(now=True)
        self.heard.pop(pack, None)
        try:
            found = ray.get(ref)
        except RayTaskError as error:
            self.error = f"{pack}: {' '.join(str(error).split())[-300:]}"
        except NodeDiedError:
            self._again(pack, "its node was lost")
        except RayError as error:
            self.lost[pack] += 1
            self._again(pack, f"its process was lost ({_why(error)})")
        else:
            for event in found["events"]:
                self._pass_on(event)
            self.heard.pop(pack, None)
            if found["kind"] == "error":
                self.error = found["text"]

    def _again(self, pack: str, what: str) -> None:
        """Send a lost pack once more, or have it recorded as failed."""
        if self.stopping:
            return
        if pack in self.silent:
            self.queue.appendleft((pack, f"its process said nothing for {self.patience:g} s"))
        elif self.lost[pack] >= TRIES:
            self.queue.appendleft((pack, f"{what}, {TRIES} times"))
        else:
            self.tell({"kind": "warning", "text": f"{pack}: {what}; it goes on elsewhere"})
            self.queue.appendleft((pack, ""))

    def _stop(self) -> None:
        """Let who has begun save and leave; the others do not begin."""
        import ray

        self.stopping = True
        self.queue.clear()
        begun = ray.get(self.board.stop.remote())
        for ref, pack in list(self.sent.items()):
            if pack not in begun:
                ray.cancel(ref)
                del self.sent[ref]


class _Left(KeyboardInterrupt):
    """Asked to leave before a pack was sent."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Signals:
    """Ctrl-C and SIGTERM are counted: at the first the packs save, at the second we leave.

    Nothing is raised where they come, which may be in the middle of Ray's own code.
    """

    def __init__(self) -> None:
        self.count, self.last = 0, 0

    def __call__(self, number: int, frame: object) -> None:
        self.count, self.last = self.count + 1, number

    def check(self) -> None:
        """Leave, where there is nothing to save."""
        if self.count:
            raise _Left(self.last)

    def __enter__(self) -> _Signals:
        self.before = [signal.signal(number, self) for number in SIGNALS]
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in zip(SIGNALS, self.before, strict=True):
            signal.signal(number, handler)


@contextmanager
def _sole(home: Path | str) -> Iterator[None]:
    """Be the one driver of a store."""
    with Store(home).lead() as mine:
        if not mine:
            raise ValueError(f"{home} is being worked on by another `wngrad … --ray`.")
        yield


@contextmanager
def _board(home: Path | str, check: Callable[[], None]) -> Iterator[Any]:
    """The board, on this node; its name is that of the store, so that there is one driver for it.

    Raises:
        ValueError: another driver of this cluster works on the store.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    options = {"name": f"board of {home}", "num_cpus": 0, "scheduling_strategy": here}
    until = time.monotonic() + NAME
    while True:
        try:
            board = ray.remote(node_tasks.Board).options(**options).remote()
            break
        except ValueError as error:  # the name is taken
            if time.monotonic() > until:
                raise ValueError(
                    f"{home} is being worked on by another `wngrad … --ray` on this cluster."
                ) from error
            check()
            time.sleep(0.5)
    yield board
    ray.kill(board)


def _why(error: Exception) -> str:
    text = {
        "WorkerCrashedError": "killed, perhaps for want of memory",
        "OutOfMemoryError": "killed for want of memory",
    }
    return text.get(type(error).__name__, type(error).__name__)


def _from_ray(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] == "ray"
