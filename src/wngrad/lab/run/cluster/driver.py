"""Run a job on a Ray cluster: each pack of lanes is a task, and its records go to the one store.

A pack whose worker or node was lost is sent again, and goes on from its last checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from wngrad.lab.run.cluster import node_tasks
from wngrad.lab.run.cluster import nodes as cluster_nodes
from wngrad.lab.run.cluster.cluster_job import ClusterJob, absolute
from wngrad.lab.run.job import Event, Job, Outcome, Tell, unfinished
from wngrad.lab.run.pack_size import clock
from wngrad.lab.run.pool import Ended, Pool, Signals, Stopped
from wngrad.lab.run.store import Store
from wngrad.lab.train.spec import Pack

NAME = 30.0  # seconds for the board of a killed driver to be gone
LOST = {  # Ray's exceptions, in words
    "WorkerCrashedError": "killed, perhaps for want of memory",
    "OutOfMemoryError": "killed for want of memory",
}


def run(job: Job, tell: Tell, address: str, *, patience: float | None = None) -> Outcome:
    """Run the job to its end on the cluster at `address`."""
    try:
        with cluster_nodes.connected(address), Signals() as signals:
            home = absolute(job.out)
            with _only_driver(home), _board(home, signals.check) as board:
                cluster_job = ClusterJob.open(job, signals.check)
                packs = [pack.name for pack in _open_store(cluster_job, tell)]
                workers = RayWorkers(cluster_job, board)
                outcome = Pool(workers, tell, signals, patience).run(packs[: job.packs])
                return replace(outcome, left=len(packs[job.packs :]) if job.packs else 0)
    except Stopped as stopped:
        return Outcome(128 + stopped.number)
    except (ValueError, OSError) as error:
        return Outcome(2, str(error))
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "ray":
            raise
        return Outcome(2, f"Ray: {' '.join(str(error).split())[:300]}")


def plan(job: Job, address: str) -> list[str]:
    """What `run` would do, in lines; trains nothing and writes no store.

    Raises:
        ValueError: the cluster cannot run it, in one line.
    """
    with cluster_nodes.connected(address), Signals() as signals:
        cluster_job = ClusterJob.open(job, signals.check)
        packs = cluster_job.cut()
        left = cluster_job.left(packs)
        if job.sweep.program == "function":
            from wngrad.lab.run.timing import unknown

            return [*cluster_job.notes, unknown(len(left), cluster_job.slots)]
        cluster_job.measure(left)
        plan = cluster_job.plan(packs, left)
        assert plan is not None
        slots = cluster_job.need.slots
        nodes = [f"{node}: {slots(node.resources)} at a time" for node in cluster_job.nodes]
        return [*nodes, *cluster_job.notes, *plan.lines()]


def _open_store(job: ClusterJob, tell: Tell) -> list[Pack]:
    """The packs to be sent, once a person has been told where they go."""
    packs = job.cut()
    left = unfinished(job.store, job.job.sweep, job.conditions, tell)
    nodes = f"{len(job.nodes)} nodes" if len(job.nodes) > 1 else str(job.nodes[0])
    plan = job.plan(packs, left) if left else None
    took = f", about {clock(plan.seconds)} in all" if plan else ""
    where = f"{len(packs)} packs on {nodes}, {job.slots} at a time, {job.need} each{took}"
    for line in (*job.notes, where):
        tell({"kind": "warning", "text": line})
    return left


class RayWorkers:
    """Workers of a cluster: Ray starts them, and keeps them from task to task."""

    tries = 3

    def __init__(self, job: ClusterJob, board: Any) -> None:
        import ray

        self.limit = 2 * job.slots + 64  # enough to keep every worker busy, and an autoscaler
        self.board, self.conditions = board, job.conditions
        self._text = ray.put(job.text())
        self._run_pack = cluster_nodes.remote(node_tasks.run_pack, job.need)
        self._packs: dict[Any, str] = {}  # by their tasks

    def send(self, pack: str, failed: str) -> None:
        task = self._run_pack.remote(self._text, pack, failed, self.conditions, self.board)
        self._packs[task] = pack

    def wait(self, seconds: float) -> Iterator[Event | Ended]:
        import ray

        ready, _ = ray.wait(list(self._packs), timeout=seconds)
        yield from map(_quiet, ray.get(self.board.take.remote()))
        for task in ready:
            yield from _end_of(task, self._packs.pop(task))

    def stop(self) -> list[str]:
        import ray

        begun = ray.get(self.board.stop.remote())
        waiting = {task: pack for task, pack in self._packs.items() if pack not in begun}
        for task in waiting:
            ray.cancel(task)
            del self._packs[task]
        return list(waiting.values())

    def kill(self, pack: str) -> None:
        import ray

        for task, name in self._packs.items():
            if name == pack:
                ray.cancel(task, force=True)


def _quiet(event: Event) -> Event:
    """An event for a person: packs may be thousands, and then nobody reads of their starts."""
    return {**event, "kind": "begun"} if event["kind"] == "start" else event


def _end_of(task: Any, pack: str) -> Iterator[Event | Ended]:
    """What a task that is over has left to tell."""
    import ray
    from ray.exceptions import NodeDiedError, RayError, RayTaskError

    try:
        answer = ray.get(task)
    except RayTaskError as error:
        yield Ended(pack, "error", f"{pack}: {' '.join(str(error).split())[-300:]}")
    except NodeDiedError:
        yield Ended(pack, "lost", "its node was lost", blameless=True)
    except RayError as error:
        name = type(error).__name__
        yield Ended(pack, "lost", f"its process was lost ({LOST.get(name, name)})")
    else:
        yield from map(_quiet, answer["events"])
        yield Ended(pack, answer["how"], answer.get("text", ""))


@contextmanager
def _only_driver(home: Path | str) -> Iterator[None]:
    """Hold the store's lock for drivers."""
    with Store(home).lead() as first:
        if not first:
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
