"""What a person sees while a sweep runs."""

from __future__ import annotations

import io
import re

import pytest

from small_lab import SWEEP, visit
from wngrad.lab.run import progress
from wngrad.lab.run.pack_size import minutes
from wngrad.lab.run.progress import Watch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def event(kind: str, **what: object) -> dict[str, object]:
    return {"kind": kind, **what}


def training(epochs: float, pack: str = "a", diverged: int = 0) -> dict[str, object]:
    return event("progress", pack=pack, lanes=3, epochs=epochs, diverged=diverged)


def failed(lane: str, reason: str) -> dict[str, object]:
    return event("record", lane=lane, pack="c", status="failed", reason=reason)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_lines_say_epochs_lanes_per_second_what_is_left_and_what_diverged(clock):
    out = io.StringIO()
    with Watch("small", out) as watch:
        watch(event("plan", lanes=6, epochs=4))
        watch(event("start", pack="a", lanes=3))
        watch(training(0.0))
        clock[0] += 2
        watch(training(1.0))  # three lane-epochs in two seconds, and too soon for a line
        clock[0] += 10
        watch(training(2.0, diverged=1))
    assert out.getvalue().splitlines() == [
        "small: 6 lanes, 4 epochs",
        "small: a: 3 lanes at once",
        "small: 1.0/4 epochs · 0.125 lanes/s · 0:36 left · 1 diverged",
    ]


def test_what_was_done_before_counts_but_not_for_the_speed(clock):
    watch = Watch("small", io.StringIO())
    watch(event("plan", lanes=6, epochs=4))
    watch(event("had", pack="a", lanes=3))
    watch(training(2.0, "b"))
    assert watch.text() == "3.0/4 epochs"
    clock[0] += 1
    watch(training(4.0, "b"))
    assert watch.text() == "4.0/4 epochs · 1.5 lanes/s · 0:00 left"


def test_a_failure_is_said_and_counted_once_with_its_reason():
    out = io.StringIO()
    watch = Watch("small", out)
    for _ in range(2):  # a second worker repeats what the first has lost
        watch(event("plan", lanes=6, epochs=4))
        watch(failed("sgd-1", "it was Monday"))
    watch(event("warning", text="x.json is damaged."))
    watch(event("busy", pack="b", lanes=3))
    said = out.getvalue()
    assert said.count("small: sgd-1 failed: it was Monday\n") == 1
    assert "small: x.json is damaged.\n" in said
    assert "small: b is being run by another process: left to it\n" in said
    assert watch.text() == "0.0/4 epochs · 1 failed"


def test_a_terminal_gets_a_bar():
    out = Terminal()
    with Watch("small", out) as watch:
        watch(event("plan", lanes=6, epochs=4))
        watch(training(2.0))
    assert re.search(r"small.*1\.0/4 epochs", out.getvalue())


def test_a_whole_sweep_ends_with_all_its_epochs(tmp_path):
    watch = Watch("small", io.StringIO())
    for told in (*visit(tmp_path, SWEEP), *visit(tmp_path, SWEEP)):
        watch(told)
    assert watch.text().startswith("2.0/2 epochs")
    assert "0:00 left" in watch.text()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3600, "1:00:00")]
)
def test_time_is_written_as_a_clock(seconds, text):
    assert minutes(seconds) == text
