"""The pool, with workers that do as they are told and a clock that is set by hand."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest

from small_lab import SWEEP
from wngrad.lab.run import supervisor
from wngrad.lab.run.job import Job
from wngrad.lab.run.pool import Ended, Pool, Signals
from wngrad.lab.run.supervisor import Processes

PACKS = ("a", "b", "c")


class Scripted:
    """Workers that answer each send of a pack with the next line of its script."""

    def __init__(self, script: dict[str, list[Any]], limit: int = 1, tries: int = 1) -> None:
        self.script = {pack: deque(lines) for pack, lines in script.items()}
        self.limit, self.tries = limit, tries
        self.sent: list[tuple[str, str]] = []
        self.messages: deque[list[Any]] = deque()
        self.running, self.most = set[str](), 0
        self.killed: list[str] = []
        self.waiting: list[str] = []  # packs that have not begun
        self.stops = 0

    def send(self, pack: str, failed: str) -> None:
        self.sent.append((pack, failed))
        self.running.add(pack)
        self.most = max(self.most, len(self.running))
        if failed:
            event = {"kind": "record", "status": "failed", "pack": pack, "reason": failed}
            self.messages.append([event | {"lane": f"lane of {pack}"}, Ended(pack)])
            return
        answer = self.script.get(pack, deque())
        self.messages.append([begun(pack), *(answer.popleft() if answer else [Ended(pack)])])

    def wait(self, seconds: float) -> list[Any]:
        messages = self.messages.popleft() if self.messages else []
        for message in messages:
            if callable(message):
                message()
            elif isinstance(message, Ended):
                self.running.discard(message.pack)
        return [message for message in messages if not callable(message)]

    def stop(self) -> list[str]:
        self.stops += 1
        ending = [p for p in self.running if p not in self.waiting]
        self.messages.append([Ended(p, "interrupted") for p in ending])
        return self.waiting

    def kill(self, pack: str) -> None:
        self.killed.append(pack)
        self.messages.append([Ended(pack, "lost", "its process was killed")])


def begun(pack: str) -> dict[str, Any]:
    return {"kind": "start", "pack": pack}


def lost(pack: str, **what: Any) -> Ended:
    return Ended(pack, "lost", "its process was lost", **what)


def pool(workers: Scripted, **options: Any) -> tuple[Pool, list[Any]]:
    events: list[Any] = []
    return Pool(workers, events.append, options.pop("signals", Signals()), **options), events


def test_each_pack_is_sent_once_in_order_and_no_more_at_a_time_than_there_are_workers():
    for limit in (1, 2, 9):
        workers = Scripted({}, limit)
        outcome = pool(workers)[0].run(PACKS)
        assert (outcome.status, outcome.failed) == (0, [])
        assert [pack for pack, _ in workers.sent] == list(PACKS)
        assert workers.most == min(limit, len(PACKS))


def test_a_pack_that_takes_its_worker_along_is_recorded_as_failed_and_the_others_go_on():
    workers = Scripted({"b": [[lost("b")]]})
    outcome = pool(workers)[0].run(PACKS)
    assert workers.sent == [("a", ""), ("b", ""), ("b", "its process was lost"), ("c", "")]
    assert outcome.status == 1
    assert outcome.failed == ["lane of b: its process was lost"]


def test_where_a_pack_has_several_tries_it_goes_on_elsewhere_first():
    workers = Scripted({"b": [[lost("b")]] * 3}, tries=3)
    runner, events = pool(workers)
    assert runner.run(PACKS).failed == ["lane of b: its process was lost, 3 times"]
    assert Counter(workers.sent)["b", ""] == 3
    warnings = [event["text"] for event in events if event["kind"] == "warning"]
    assert warnings == ["b: its process was lost; it goes on elsewhere"] * 2


def test_a_loss_that_is_no_fault_of_the_pack_is_not_counted():
    workers = Scripted({"b": [[lost("b", blameless=True)]] * 5})
    assert pool(workers)[0].run(PACKS).status == 0
    assert Counter(workers.sent)["b", ""] == 6


def test_a_pack_that_tells_nothing_for_longer_than_the_patience_is_killed_once():
    now = [0.0]

    def later() -> None:
        now[0] += 6

    progress = {"kind": "progress", "pack": "a"}
    quiet = [later, progress, Ended("a")]  # it took long, but has told something since
    workers = Scripted({"a": [quiet], "b": [[], [later]]})
    workers.messages.append([])
    runner, _ = pool(workers, patience=5, clock=lambda: now[0])

    def wait(seconds: float, real: Any = workers.wait) -> list[Any]:
        if not workers.messages and workers.running == {"b"} and not workers.killed:
            later()
        return real(seconds)

    workers.wait = wait
    outcome = runner.run(PACKS)
    assert workers.killed == ["b"]
    assert outcome.failed == ["lane of b: its process said nothing for 5 s"]
    assert workers.sent[-1] == ("c", "")


def test_what_has_not_begun_is_not_silent():
    now, workers = [0.0], Scripted({})
    workers.send = lambda pack, failed: workers.messages.extend([[]] * 20 + [[Ended(pack)]])

    def clock() -> float:
        now[0] += 100
        return now[0]

    assert pool(workers, patience=5, clock=clock)[0].run(PACKS).status == 0
    assert workers.killed == []


def test_an_error_stops_the_others_and_ends_the_job_with_its_status_and_text():
    bad = Ended("a", "error", "the disk is full", status=2)
    workers = Scripted({"a": [[bad]], "b": [[]]}, limit=2)
    outcome = pool(workers)[0].run(PACKS)
    assert (outcome.status, outcome.text) == (2, "the disk is full")
    assert (workers.stops, [pack for pack, _ in workers.sent]) == (1, ["a", "b"])


@pytest.mark.parametrize(("number", "status"), [(2, 130), (15, 143)])
def test_at_the_first_signal_packs_save_and_no_other_begins(number, status):
    signals = Signals()
    workers = Scripted({"a": [[lambda: signals(number, None)]]})
    outcome = pool(workers, signals=signals)[0].run(PACKS)
    assert outcome.status == status
    assert (workers.stops, workers.sent) == (1, [("a", "")])


def test_packs_that_were_sent_and_had_not_begun_are_not_waited_for():
    signals = Signals()
    workers = Scripted({"a": [[lambda: signals(2, None)]], "b": [[]]}, limit=2)
    workers.waiting = ["b"]
    assert pool(workers, signals=signals)[0].run(PACKS[:2]).status == 130


def test_a_signal_after_the_last_pack_changes_nothing():
    signals = Signals()
    workers = Scripted({"c": [[lambda: signals(2, None), Ended("c")]]})
    assert pool(workers, signals=signals)[0].run(PACKS).status == 0


def test_at_the_second_signal_nobody_is_waited_for():
    signals = Signals()
    workers = Scripted({"a": [[lambda: signals(2, None)]]})
    workers.stop = lambda: signals(2, None) or []
    assert pool(workers, signals=signals)[0].run(PACKS).status == 130


def test_a_worker_that_is_interrupted_by_somebody_else_stops_the_job():
    workers = Scripted({"a": [[Ended("a", "interrupted", status=143)]]})
    assert pool(workers)[0].run(PACKS).status == 143
    assert workers.sent == [("a", "")]


# --------------------------------------------------------------- processes of this machine


class Worker:
    """A process of a worker, as far as `Processes` asks it anything; it never starts."""

    def __init__(self, job: Any, gpu: str = "") -> None:
        self.gpu, self.pack, self.written = gpu, None, list[Any]()
        self.leaves = self.begun = self.served = False

    def write(self, command: Any) -> None:
        self.written.append(command)


@pytest.fixture
def processes(monkeypatch) -> Callable[..., Processes]:
    monkeypatch.setattr(supervisor, "_Process", Worker)
    return lambda device, limit: Processes(Job(SWEEP, "out", device=device), limit)


def test_workers_share_the_gpus_of_one_kind(processes, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    monkeypatch.setattr("torch.cuda.get_device_name", ["H200", "A4", "H200"].__getitem__)
    several = processes("auto", 3)
    for pack in PACKS:
        several.send(pack, "")
    assert [worker.gpu for worker in several._processes] == ["4", "7", "4"]
    for device, limit in (("cuda:1", 3), ("cpu", 3), ("cuda", 1)):  # named, none, and all to one
        alone = processes(device, limit)
        alone.send("a", "")
        assert [worker.gpu for worker in alone._processes] == [""]


def test_a_worker_that_leaves_is_sent_nothing_more(processes):
    one = processes("cpu", 1)
    one.send("a", "")
    (worker,) = one._processes
    ended = {"kind": "ended", "how": "finished", "status": 0}
    assert one._message(worker, ended | {"leaves": True}) == Ended("a", status=0)
    one.send("b", "")
    assert [each.pack for each in one._processes] == [None, "b"]
    one._message(one._processes[1], ended)
    one.send("c", "")
    assert [each.pack for each in one._processes] == [None, "c"]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (3, "ended with status 3"),
        (-9, "was killed (SIGKILL: perhaps for want of memory)"),
        (-4, "was killed (SIGILL: an instruction that this processor does not allow)"),
        (-6, "was killed (SIGABRT)"),
        (-63, "was killed (signal 63)"),
    ],
)
def test_the_end_of_a_process_is_told_in_words(status, said):
    assert supervisor._how(status) == said
