"""A job on a Ray cluster: all that is settled before a pack is sent."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wngrad.lab.run import places
from wngrad.lab.run.cluster import node_tasks
from wngrad.lab.run.cluster import nodes as cluster_nodes
from wngrad.lab.run.cluster.nodes import Need, Node
from wngrad.lab.run.job import Job
from wngrad.lab.run.pack_size import Choice, Measured, Plan, choose, even, in_words
from wngrad.lab.run.store import Store
from wngrad.lab.train.spec import ONE_BY_ONE, Kind, Pack


@dataclass(slots=True)
class ClusterJob:
    """What to run, on which nodes, in packs of which size."""

    job: Job
    need: Need
    nodes: list[Node]
    check: Callable[[], None]  # called while waiting; may raise
    conditions: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # what a person should know
    costs: dict[Kind, list[Measured]] = field(default_factory=dict)

    @classmethod
    def open(cls, job: Job, check: Callable[[], None]) -> ClusterJob:
        """Probe every node that has room for a pack.

        Raises:
            ValueError: something there does not fit; in one line.
        """
        need = cluster_nodes.need(job.device, job.cpus)
        here = replace(
            job,
            out=absolute(job.out),
            data=job.data and Path(absolute(job.data)),
            device="cuda" if need.gpus else "cpu",
        )
        nodes = cluster_nodes.fitting(cluster_nodes.alive(), need)
        opened = cls(here, need, nodes, check)
        opened.conditions, opened.notes = cluster_nodes.probe_all(nodes, need, opened.text(), check)
        return opened

    @property
    def slots(self) -> int:
        """How many packs can run at the same time."""
        return sum(self.need.slots(node.resources) for node in self.nodes)

    @property
    def store(self) -> Store:
        return Store(self.job.out)

    def text(self) -> str:
        """The job, as a task is given it."""
        shared = str(cluster_nodes.nearest(self.job.out))
        return json.dumps({"job": self.job.to_json(), "cwd": os.getcwd(), "shared": shared})

    def left(self, packs: list[Pack]) -> list[Pack]:
        """The packs that still lack records."""
        sweep = self.job.sweep
        settings = {**sweep.identity(), **self.conditions}
        return self.store.unfinished(packs, settings, sweep.epochs)

    def cut(self) -> list[Pack]:
        """The packs, once their size is settled; the notes say why.

        Those that a store has been cut into hold. If nobody has said how many lanes a new one is to
        have, a measurement decides.
        """
        before, sweep = self.store.cut(), self.job.sweep
        together = sum(s.optimizer not in sweep.alone for s in sweep.settings)
        if before:
            self.notes.append(f"the {len(before)} packs of {self.job.out} hold")
        if together and sweep.program not in ONE_BY_ONE and not self.job.sized:
            size = max((len(pack.lanes) for pack in before), default=0)
            sweep = replace(sweep, lanes_per_pack=size or self._measured_size(together))
            self.job = replace(self.job, sweep=sweep)
        return self.store.packs(sweep, self.conditions)

    def _measured_size(self, settings: int) -> int:
        sweep = self.job.sweep
        lanes = sum(lane.optimizer not in sweep.alone for lane in sweep.lanes)
        answer = self._measure(sweep.lanes_per_pack, None)
        if "error" in answer:  # each lane will say so for itself
            choice = Choice(math.ceil(lanes / self.slots), f"not measured: {answer['error']}")
        else:
            self.costs[sweep.program] = answer["costs"]
            choice = choose(answer["costs"], lanes, self.slots, sweep.epochs)
            self.notes.append(f"measured: {in_words(answer['costs'])}")
        size = min(even(choice.lanes, settings), sweep.lanes_per_pack or lanes)
        self.notes.append(f"packs of at most {size} lanes: {choice.why}")
        return size

    def measure(self, packs: list[Pack]) -> None:
        """Find out what these packs cost, as far as that is not known.

        Raises:
            ValueError: they cannot be run.
        """
        if unknown := [p for p in packs if self.job.sweep.kind(p) not in self.costs]:
            answer = self._measure(None, [(p.name, p.settings, p.seeds) for p in unknown])
            if "error" in answer:
                raise ValueError(f"a pack cannot be measured: {answer['error']}.")
            self.costs |= answer["costs"]

    def plan(self, packs: list[Pack], left: list[Pack]) -> Plan | None:
        """What there is to do and what it takes; None if that has not been measured."""
        if not all(self.job.sweep.kind(pack) in self.costs for pack in left):
            return None
        done = frozenset(p.name for p in packs) - {p.name for p in left}
        return Plan(self.job.sweep, packs, done, self.slots, str(self.need), self.costs)

    def _measure(self, most: int | None, cut: list[Any] | None) -> dict[str, Any]:
        import ray
        from ray.exceptions import RayError, RayTaskError

        task = cluster_nodes.remote(node_tasks.measure, self.need).remote(self.text(), most, cut)
        cluster_nodes.wait_for([task], math.inf, self.check)
        try:
            answer: dict[str, Any] = ray.get(task)
        except RayTaskError:
            raise
        except RayError as error:
            return {"error": f"its worker was lost ({type(error).__name__})"}
        return answer


def absolute(home: Path | str) -> Path | str:
    return home if places.is_address(home) else Path(home).absolute()
