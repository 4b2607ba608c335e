"""Run a sweep on a Ray cluster: each pack of lanes is a task, and its records go to the one store.

The driver sends what has no record, passes on what the tasks tell, and sends a pack again whose
worker or node was lost: it goes on from its last checkpoint. Nothing is kept here that a new driver
would need; that is all in the store.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wngrad.lab import cluster_nodes, cluster_task, places
from wngrad.lab.cluster_nodes import Need, Node
from wngrad.lab.pack_size import Choice, Plan, choose, even, told
from wngrad.lab.spec import Kind, Pack
from wngrad.lab.store import Store
from wngrad.lab.supervisor import Job, Outcome
from wngrad.lab.worker import SIGNALS

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
            home = _absolute(job.out)
            with _sole(home), _board(home) as board:
                return _Driver(Site.open(job, cpus), board, tell, patience, signals).run()
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
    with cluster_nodes.connected(address):
        site = Site.open(job, cpus)
        lines, packs = site.settled()
        costs = site.measured(packs)
        done = frozenset(p.name for p in packs if not site.missing(p))
        nodes = ", ".join(f"{n} with {site.need.slots(n.resources)}" for n in site.nodes)
        found = Plan(site.job.sweep, packs, done, site.slots, str(site.need), costs)
        return [f"Places for packs: {nodes}.", *site.said, *lines, *found.lines()]


@dataclass(slots=True)
class Site:
    """A job on a cluster that has been looked at: all that is known before a pack is sent."""

    job: Job
    need: Need
    nodes: list[Node]
    conditions: dict[str, Any]
    cpus: int
    said: list[str]

    @classmethod
    def open(cls, job: Job, cpus: int) -> Site:
        """Look at every node.

        Raises:
            ValueError: something there does not fit; in one line.
        """
        need = cluster_nodes.need(job.device, cpus)
        here = replace(
            job,
            out=_absolute(job.out),
            data=job.data and Path(_absolute(job.data)),
            device="cuda" if need.gpus else "cpu",
        )
        nodes = cluster_nodes.fitting(cluster_nodes.alive(), need)
        found = cls(here, need, nodes, {}, cpus, [])
        found.conditions, found.said = cluster_nodes.looked_at(nodes, need, found.text())
        return found

    @property
    def slots(self) -> int:
        return sum(self.need.slots(node.resources) for node in self.nodes)

    @property
    def store(self) -> Store:
        return Store(self.job.out)

    def text(self) -> str:
        """The job, as a task is given it."""
        more = {
            "cwd": os.getcwd(),
            "cpus": self.cpus,
            "seen": str(cluster_nodes.nearest(self.job.out)),
        }
        return json.dumps({**json.loads(self.job.to_json({})), **more})

    def missing(self, pack: Pack) -> bool:
        settings = {**self.job.sweep.identity(), **self.conditions}
        return bool(self.store.missing(pack, settings, self.job.sweep.epochs))

    def settled(self) -> tuple[list[str], list[Pack]]:
        """Settle the size of the packs; why, in lines, and the packs."""
        sweep, before = self.job.sweep, self.store.cut()
        lines = []
        if before:
            size = max(len(pack.lanes) for pack in before)
            lines = [f"The packs of {self.job.out} hold: {len(before)} of at most {size} lanes."]
            sweep = replace(sweep, lanes_per_pack=size)
        elif not self.job.sized and sweep.program != "lone":
            choice, lines = self._chosen()
            sweep = replace(sweep, lanes_per_pack=choice)
        self.job = replace(self.job, sweep=sweep)
        return lines, self.store.packs(sweep, self.conditions)

    def _chosen(self) -> tuple[int, list[str]]:
        sweep = self.job.sweep
        together = [s for s in sweep.settings if s.optimizer not in sweep.alone]
        lanes = len(together) * len(sweep.seeds)
        answer = self._measure(sweep.lanes_per_pack, None)
        if "error" in answer:
            found = Choice(-(-lanes // self.slots), f"not measured: {answer['error']}")
            lines = []
        else:
            found = choose(answer["costs"], lanes, self.slots, sweep.epochs)
            lines = [f"Measured: {told(answer['costs'])}."]
        size = min(even(found.lanes, len(together)), sweep.lanes_per_pack or lanes)
        return size, [*lines, f"Packs of at most {size} lanes: {found.why}."]

    def measured(self, packs: list[Pack]) -> dict[Kind, Any]:
        """What the packs cost, for an estimate.

        Raises:
            ValueError: they cannot be run.
        """
        answer = self._measure(None, [(p.name, p.settings, p.seeds) for p in packs])
        if "error" in answer:
            raise ValueError(f"a pack cannot be measured: {answer['error']}.")
        costs: dict[Kind, Any] = answer["costs"]
        return costs

    def _measure(self, most: int | None, cut: list[Any] | None) -> dict[str, Any]:
        import ray

        task = cluster_nodes.remote(cluster_task.measure, self.need)
        try:
            answer: dict[str, Any] = ray.get(task.remote(self.text(), most, cut))
        except ray.exceptions.RayTaskError:
            raise
        except ray.exceptions.RayError as error:
            return {"error": f"its worker was lost ({type(error).__name__})"}
        return answer


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
        for line in self.site.said:
            self.tell({"kind": "warning", "text": line})
        lines, _ = self.site.settled()
        sweep = self.site.job.sweep
        packs = self.site.store.open(sweep, self.site.conditions)
        self.signals.begun = True
        lanes = sum(len(pack.lanes) for pack in packs)
        self.tell({"kind": "plan", "lanes": lanes, "epochs": sweep.epochs})
        for line in (*lines, self._where(packs)):
            self.tell({"kind": "warning", "text": line})
        for pack in packs:
            if self.site.missing(pack):
                self.queue.append((pack.name, ""))
            else:
                self.site.store.finish(pack)
                self.tell({"kind": "had", "pack": pack.name, "lanes": len(pack.lanes)})
        self._work()
        said = [f"{lane}: {reason}" for lane, reason in self.failed.items()]
        if self.error:
            return Outcome(2, self.error, said)
        if self.signals.count:
            return Outcome(128 + self.signals.last, failed=said)
        return Outcome(int(bool(said)), failed=said)

    def _where(self, packs: list[Pack]) -> str:
        site = self.site
        nodes = f"{len(site.nodes)} nodes" if len(site.nodes) > 1 else str(site.nodes[0])
        return f"{len(packs)} packs on {nodes}, {site.slots} at a time, {site.need} each"

    def _work(self) -> None:
        import ray

        run_pack = cluster_nodes.remote(cluster_task.run_pack, self.site.need)
        text = ray.put(self.site.text())
        ahead = 2 * self.site.slots + 64  # enough to keep every worker busy, and an autoscaler
        while self.queue or self.sent:
            if (self.signals.count or self.error) and not self.stopping:
                self._stop()
            if self.signals.count > 1:
                return
            while self.queue and len(self.sent) < ahead:
                pack, failed = self.queue.popleft()
                self.sent[run_pack.remote(text, pack, failed, self.board)] = pack
            ready, _ = ray.wait(list(self.sent), timeout=POLL)
            self._hear()
            for ref in ready:
                self._ended(ref, self.sent.pop(ref))
        self._hear(now=True)

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
        self.tell(event)

    def _ended(self, ref: Any, pack: str) -> None:
        import ray
        from ray.exceptions import NodeDiedError, RayError, RayTaskError

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
            self.heard.pop(pack, None)
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


class _Left(Exception):  # noqa: N818 - not an error
    """Asked to leave before a pack was sent."""

    def __init__(self, number: int) -> None:
        self.number = number


class _Signals:
    """Ctrl-C and SIGTERM are counted: at the first the packs save, at the second we leave."""

    def __init__(self) -> None:
        self.count, self.last = 0, 0
        self.begun = False  # whether there is something to save

    def __call__(self, number: int, frame: object) -> None:
        if not self.begun:
            raise _Left(number)
        self.count, self.last = self.count + 1, number

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
def _board(home: Path | str) -> Iterator[Any]:
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
            board = ray.remote(cluster_task.Board).options(**options).remote()
            break
        except ValueError as error:  # the name is taken
            if time.monotonic() > until:
                raise ValueError(
                    f"{home} is being worked on by another `wngrad … --ray` on this cluster."
                ) from error
            time.sleep(0.5)
    yield board
    ray.kill(board)


def _absolute(home: Path | str) -> Path | str:
    return home if places.is_address(home) else Path(home).absolute()


def _why(error: Exception) -> str:
    text = {
        "WorkerCrashedError": "killed, perhaps for want of memory",
        "OutOfMemoryError": "killed for want of memory",
    }
    return text.get(type(error).__name__, type(error).__name__)


def _from_ray(error: Exception) -> bool:
    return type(error).__module__.partition(".")[0] == "ray"
