"""The nodes of a Ray cluster: reached, counted, and probed before any work is begun."""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import wngrad
from wngrad.install import install_hint
from wngrad.lab.run import places
from wngrad.lab.run.cluster import node_tasks
from wngrad.lab.run.cluster.node_tasks import differences

ANSWER = 15.0  # seconds for a cluster to answer
TURN = 0.2  # seconds of a wait, after which a signal is noticed
PROBE = 120.0  # seconds for a node to load what it needs, and to answer
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # as all later versions, which do not warn
}


@dataclass(frozen=True, slots=True)
class Need:
    """What one pack takes of a node."""

    cpus: int = 1
    gpus: int = 0

    def __str__(self) -> str:
        return f"{self.gpus} GPU and {self.cpus} CPU" if self.gpus else f"{self.cpus} CPU"

    def slots(self, resources: Mapping[str, float]) -> int:
        """How many packs fit on a node at once."""
        each = [resources.get("CPU", 0) // self.cpus]
        each += [resources.get("GPU", 0) // self.gpus] if self.gpus else []
        return int(min(each))


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster."""

    key: str
    address: str
    resources: Mapping[str, float] = field(compare=False)

    def __str__(self) -> str:
        return f"{self.address} (node {self.key[:8]})"


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Be a driver of the cluster at `address`, or of one of our own, for as long as this lasts.

    Args:
        address: "local", "auto" (one that runs on this machine), or host:port.

    Raises:
        ValueError: there is no Ray, or it does not answer; in one line.
    """
    os.environ.update({name: os.environ.get(name, value) for name, value in QUIET.items()})
    try:
        import ray
    except ImportError as error:
        raise ValueError(
            f"`--ray` needs the extra `ray`: {install_hint('ray')} ({error})."
        ) from error
    if address not in ("local", "auto"):
        _check_address(address)
    silence = (
        f"`--ray` {address}: no Ray cluster has answered within {ANSWER:g} s; if it asks for a "
        "token, set RAY_AUTH_MODE=token."
    )
    try:
        with _time_limit(silence if address != "local" else ""):
            ray.init(
                address=address,
                namespace="wngrad",
                include_dashboard=False if address == "local" else None,
                log_to_driver=False,
                logging_level="error",
            )
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise ValueError(f"`--ray` {address}: {' '.join(str(error).split())}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Refuse an address at which nobody answers: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host:
        raise ValueError(f"`--ray` must be local, auto or HOST:PORT, got {address!r}.")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"`--ray` {address}: no Ray cluster answers there: {error}.") from error


@contextmanager
def _time_limit(text: str) -> Iterator[None]:
    """Say `text` and leave if the block takes too long: Ray's connecting cannot be interrupted.

    What it says of its own troubles is held back meanwhile.
    """
    if not text:
        yield
        return
    sys.stderr.flush()
    saved, void = os.dup(2), os.open(os.devnull, os.O_WRONLY)

    def leave() -> None:
        os.write(saved, f"wngrad: {text}\n".encode())
        os._exit(2)

    watch = threading.Timer(ANSWER, leave)
    watch.daemon = True
    os.dup2(void, 2)
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
        os.dup2(saved, 2)
        os.close(saved)
        os.close(void)


def alive() -> list[Node]:
    import ray

    nodes = [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(nodes, key=lambda node: (node.address, node.key))


def need(device: str, cpus: int) -> Need:
    """What a pack needs on `device`: a GPU, where the cluster has some, if it is "auto"."""
    has_gpu = any(node.resources.get("GPU", 0) >= 1 for node in alive())
    return Need(cpus, int(device.startswith("cuda") or (device == "auto" and has_gpu)))


def fitting(nodes: Sequence[Node], need: Need) -> list[Node]:
    """The nodes that have room for a pack.

    Raises:
        ValueError: there is none.
    """
    roomy = [node for node in nodes if need.slots(node.resources)]
    if not roomy:
        gpus, cpus = (sum(n.resources.get(name, 0) for n in nodes) for name in ("GPU", "CPU"))
        raise ValueError(
            f"a pack needs {need} on one node; the cluster has {gpus:g} GPU and {cpus:g} CPU on "
            f"{len(nodes)} nodes, and no node has enough."
        )
    return roomy


def probe_all(
    nodes: Sequence[Node], need: Need, text: str, check: Callable[[], None]
) -> tuple[dict[str, Any], list[str]]:
    """The conditions that all nodes have in common, and notes for a person.

    A node that is too busy to answer is probed by its first pack, which finds the same.

    Raises:
        ValueError: a node has other versions, another device or data, or does not see the folder.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    probe = remote(node_tasks.probe, need)
    with _nonce(json.loads(text)["shared"]) as nonce:
        tasks = {
            probe.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.key, soft=False)
            ).remote(text, nonce): node
            for node in nodes
        }
        ready, late = wait_for(list(tasks), PROBE, check)
        every = {tasks[task]: _answer(task, tasks[task]) for task in ready}
        answers = {node: answer for node, answer in every.items() if answer is not None}
    for task in late:
        ray.cancel(task, force=True)
    if not answers:
        raise ValueError(f"no node of the cluster was free within {PROBE:g} s.")
    _agree(answers)
    conditions = next(iter(answers.values()))["conditions"]
    notes = [f"{node} has gone: it is left out" for node in every.keys() - answers.keys()]
    notes += [f"{tasks[t]} is busy: it is looked at with its first pack" for t in late]
    return conditions, notes


def wait_for(
    tasks: list[Any], seconds: float, check: Callable[[], None]
) -> tuple[list[Any], list[Any]]:
    """The tasks that are ready, when all are or the time is over, and the others.

    In short turns, between which `check` may raise: in the middle of a wait Ray does not allow it.
    """
    import ray

    until = time.monotonic() + seconds
    while True:
        ready, late = ray.wait(tasks, num_returns=len(tasks), timeout=TURN)
        check()
        if not late or time.monotonic() > until:
            return ready, late


def remote(function: Any, need: Need) -> Any:
    """A function as a task that takes what a pack needs, in a worker that stays.

    Lost packs are sent again by the driver, not by Ray, which would count a node that has gone and
    a pack that kills its workers alike, and tell nobody.
    """
    import ray

    options: dict[str, Any] = {"num_cpus": need.cpus, "num_gpus": need.gpus}
    return ray.remote(max_calls=0, max_retries=0, **options)(function)


def _answer(task: Any, node: Node) -> dict[str, Any] | None:
    """What a node says of itself; None if it has gone: for a while Ray still lists it."""
    import ray

    try:
        answer: dict[str, Any] = ray.get(task)
    except (ray.exceptions.TaskUnschedulableError, ray.exceptions.NodeDiedError):
        return None
    except ray.exceptions.RayError as error:
        text = " ".join(str(error).split())[:300]
        raise ValueError(f"{node} cannot run wngrad: {text}") from error
    return answer


def _agree(answers: Mapping[Node, dict[str, Any]]) -> None:
    """Refuse nodes that cannot run the sweep, or would run it to other numbers."""
    here = {"python": platform.python_version(), "wngrad": wngrad.__version__}
    first: tuple[str, dict[str, Any]] = ("this machine", here)
    for node, answer in answers.items():
        if differ := differences(first, (str(node), answer["versions"])):
            raise ValueError(f"versions differ between nodes: {differ}.")
        if "torch" in answer["versions"]:
            first = (str(node), answer["versions"])
    for node, answer in answers.items():
        if error := answer.get("error", ""):
            verb = "" if error.startswith(("does not", "cannot")) else "cannot run this sweep: "
            raise ValueError(f"{node} {verb}{error}")
    each = [(str(node), answer["conditions"]) for node, answer in answers.items()]
    for other in each:
        if differ := differences(each[0], other):
            raise ValueError(
                f"nodes differ in what changes the numbers of a sweep: {differ}; "
                "leave one out of the cluster."
            )


@contextmanager
def _nonce(home: str) -> Iterator[str]:
    """A file that whoever sees `home` can read."""
    place, folder = places.find(home)
    name = f".seen-{secrets.token_hex(8)}"
    place.make(folder)
    place.write(folder / name, name.encode())
    try:
        yield name
    finally:
        with suppress(OSError):
            place.remove(folder / name)


def nearest(home: Path | str) -> Path | str:
    """A folder, or the nearest above it that is there already."""
    if places.is_address(home):
        return home
    path = Path(home).absolute()
    return next(each for each in (path, *path.parents) if each.is_dir())
