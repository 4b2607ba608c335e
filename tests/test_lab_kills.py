"""F1, F6, F7, F8: processes that are killed, interrupted, hang, or share a folder.

Most trials are made by tests/kills.py, which forks its workers; some by processes as a user has
them; test_lab_pool.py has the pool alone. Every test takes the run that nothing disturbed as its
oracle, byte for byte. None depends on how fast the machine is: runs wait for a file, or hang while
only the test's own clock goes on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import small_lab
from small_lab import GATED, GOOD, LONG, MISBEHAVING, SWEEP, contents, job, visit
from wngrad.lab.report.results import Results
from wngrad.lab.run.store import Store
from wngrad.lab.run.supervisor import supervise
from wngrad.lab.train.spec import Lane

HERE = Path(__file__).parent
PACKS = LONG.cut(LONG.seeds)
GUARD = 600  # seconds: only what hangs takes longer


@pytest.fixture(autouse=True)
def _for_processes(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def trials(folder: Path, *words: str) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "kills.py"), *words, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * GUARD)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def kills(folder: Path, count: int, workers: int) -> None:
    found = trials(folder, "kills", str(count), "--workers", str(workers))
    assert found["failures"] == []
    assert found["trials"] == count
    assert found["aimed"] > count / 4


@pytest.mark.parametrize("workers", [1, 2])
def test_f1_thirty_kills_lose_nothing(tmp_path, workers):
    kills(tmp_path, 15, workers)


@pytest.mark.faults
@pytest.mark.parametrize(("count", "workers"), [(1000, 1), (200, 2)])
def test_f1_a_thousand_kills_lose_nothing(tmp_path, count, workers):
    kills(tmp_path, count, workers)


def share(folder: Path, processes: int, runs: int) -> None:
    found = trials(folder, "claims", str(runs), "--processes", str(processes))
    assert found["status"] == [0] * processes
    assert found["taken_twice"] == []
    assert found["taken"] == found["announced"] == found["records"] == runs


def test_f6_processes_that_share_a_folder_take_each_run_once(tmp_path):
    share(tmp_path, 4, 60)


@pytest.mark.faults
def test_f6_sixteen_processes_take_each_of_a_thousand_runs_once(tmp_path):
    share(tmp_path, 16, 1000)


def signals(folder: Path, count: int, workers: int, *words: str) -> dict[str, Any]:
    found = trials(folder, "signals", str(count), "--workers", str(workers), *words)
    assert found["failures"] == []
    assert found["trials"] == count
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_f7_ten_signals_lose_not_a_step(tmp_path, workers):
    signals(tmp_path, 5, workers)


@pytest.mark.faults
@pytest.mark.parametrize("workers", [1, 2])
def test_f7_a_hundred_signals_lose_not_a_step_within_five_seconds(tmp_path, workers):
    assert signals(tmp_path, 100, workers, "--limit", "5")["slowest"] < 5


def started(*code_and_words: str) -> subprocess.Popen[str]:
    """A process of a user, in a group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", *code_and_words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def command(folder: Path, workers: int) -> subprocess.Popen[str]:
    """`wngrad run` of GATED, from a module that does not load torch into the supervisor."""
    text = f"from wngrad.lab.train.spec import Sweep\nGATED = Sweep.from_json({GATED.to_json()!r})"
    (folder / "gated_sweep.py").write_text(text)
    code = "import sys; sys.path.append('.'); from wngrad.cli import main; main()"
    words = ("run", "gated_sweep:GATED", "--out", "out", "--device", "cpu", "--save-every", "0")
    return started(code, *words, "--workers", str(workers))


def supervisor(out: Path, name: str = "LONG", workers: int = 1) -> subprocess.Popen[str]:
    code = "import small_lab, sys; small_lab.supervised(*sys.argv[1:])"
    process = started(code, str(out), name, str(workers))
    assert process.stdout.readline() == "started\n"  # the worker is an interpreter that begins
    return process


def interrupted(process: subprocess.Popen[str], number: int, whom: str) -> int:
    """The exit status."""
    if process.poll() is None:
        send = os.killpg if whom == "group" else os.kill
        send(process.pid, number)
    _, errors = process.communicate(timeout=GUARD)
    assert "Traceback" not in errors, errors
    return process.returncode


STATUS = {signal.SIGKILL: -9, signal.SIGINT: 130, signal.SIGTERM: 143}


KILL = (signal.SIGKILL, "parent", 2)
INT = (signal.SIGINT, "group", 1)
TERM = (signal.SIGTERM, "parent", 2)


@pytest.mark.integrations
@pytest.mark.parametrize(
    "stops",
    [(KILL, INT), pytest.param((TERM, KILL, INT, TERM), marks=pytest.mark.faults)],
    ids=["small", "full"],
)
def test_f7_the_command_is_interrupted_and_its_supervisor_killed_and_it_ends_the_same(
    tmp_path, monkeypatch, stops
):
    """With one worker and with two, in turn: the files do not depend on it."""
    monkeypatch.chdir(tmp_path)
    gate, out = Path("gate"), Path("out")
    for number, whom, workers in stops:
        process = command(tmp_path, workers)
        wait_for(lambda n=workers: len(list(tmp_path.glob("begun-*"))) == n)
        process.send_signal(number) if whom == "parent" else os.killpg(process.pid, number)
        if number == signal.SIGKILL:
            process.wait()
        gate.touch()
        _, errors = process.communicate(timeout=GUARD)
        assert process.returncode == STATUS[number]
        assert "Traceback" not in errors, errors
        wait_until_free(out)
        assert len(list(out.glob("records/*"))) < len(GATED.lanes)  # not at its end
        for file in (gate, *tmp_path.glob("begun-*")):
            file.unlink()
    gate.touch()
    last = command(tmp_path, 2)
    printed, errors = last.communicate(timeout=GUARD)
    assert last.returncode == 0, errors
    assert "2.0/2 epochs" in printed
    visit(tmp_path / "whole", GATED)
    assert contents(out) == contents(tmp_path / "whole")


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + GUARD
    while not true():
        assert time.monotonic() < until, "it did not come to that"
        time.sleep(0.01)


def test_f7_a_signal_before_the_worker_is_ready_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = supervisor(tmp_path, "GATED")
    os.killpg(process.pid, signal.SIGINT)
    Path("gate").touch()
    _, errors = process.communicate(timeout=GUARD)
    assert process.returncode == 130
    assert "Traceback" not in errors, errors
    assert not list(tmp_path.glob("records/*"))


@pytest.mark.faults
def test_f7_asked_twice_the_supervisor_does_not_wait_for_a_run_that_hangs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = supervisor(tmp_path / "out", "HUNG")
    wait_for((tmp_path / "hanging").exists)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    assert interrupted(process, signal.SIGINT, "parent") == 130
    assert Store(tmp_path / "out", warn=pytest.fail).load(PACKS[0]) is not None


@pytest.mark.faults
@pytest.mark.parametrize("workers", [1, 2])
def test_f1_f7_forty_real_processes_are_killed_or_interrupted_at_any_time(tmp_path, workers):
    """From the moment the supervisor starts its worker; the parent alone, or the whole group."""
    visit(tmp_path / "whole", LONG)
    draw, visits, sweeps = random.Random(8), 0, 0
    while visits < 20:
        out, status = tmp_path / f"{sweeps}", -1
        while status != 0:
            number, whom = draw.choice(list(STATUS)), draw.choice(("parent", "group"))
            process = supervisor(out, workers=workers)
            time.sleep(draw.uniform(0.001, 3))
            status = interrupted(process, number, whom)
            assert status in (0, STATUS[number])
            visits += status != 0
            wait_until_free(out)
        assert contents(out) == contents(tmp_path / "whole")
        sweeps += 1


def wait_until_free(out: Path) -> None:
    """A worker that has lost its supervisor saves and leaves, as the locks show."""
    for pack in PACKS if (out / "locks").exists() else ():  # those of GATED have the same names
        with Store(out).claim(pack, GUARD) as free:
            assert free


REASONS = {
    small_lab.RAISES: "ArithmeticError: no such root",
    small_lab.MISSES: "FileNotFoundError: no table ?",
    small_lab.HANGS: "its process said nothing for 5 s",
    small_lab.KILLED: "its process was killed (SIGKILL: perhaps for want of memory)",
    small_lab.LEAVES: "SystemExit: 0",
    small_lab.UNSAVED: "local object",
    small_lab.NONE: "AttributeError: 'NoneType' object has no attribute 'zero_grad'",
    small_lab.TEXT: "AttributeError: 'str' object has no attribute 'zero_grad'",
}


REAL = pytest.param("--real", marks=pytest.mark.faults)  # interpreters, which load torch anew


@pytest.mark.parametrize("how", [None, REAL])
def test_f8_runs_that_misbehave_fail_alone_and_are_tried_again(tmp_path, monkeypatch, how):
    found = trials(tmp_path, "MISBEHAVING", "1", *filter(None, [how]))
    assert len(found["starts"]) == len(set(found["starts"])) == len(MISBEHAVING.lam)  # once each
    assert found["status"] == 1
    assert len(found["failed"]) == len(REASONS)
    out = tmp_path / "out"
    records = {record.lane.lam: record for record in Store(out).records()}
    for lam, reason in REASONS.items():
        assert records[lam].status == "failed"
        assert reason in records[lam].reason
        assert any(reason in line for line in found["failed"])

    # Without them the others are the same, but for the list of λ that every record carries.
    visit(tmp_path / "without", replace(MISBEHAVING, lam=GOOD))
    for record in Store(tmp_path / "without").records():
        mine = records[record.lane.lam]
        assert replace(mine, settings={**mine.settings, "lam": list(GOOD)}) == record

    # NaN is no failure, but never the best.
    assert records[small_lab.SPOILS].diverged_at == 1
    results = Results(MISBEHAVING, list(records.values()))
    for metric in ("train_loss", "test_loss", "test_accuracy"):
        assert results.best("small_lab:misbehaving", metric).lam in GOOD

    # What failed is tried again, and what was done is not touched.
    monkeypatch.setenv("BEHAVE", "1")
    visit(out, MISBEHAVING)
    visit(tmp_path / "whole", MISBEHAVING)
    spoiled = Lane("small_lab:misbehaving", small_lab.SPOILS, 0)
    number = MISBEHAVING.lam.index(small_lab.SPOILS) + 1
    own = {f"records/{spoiled.name}.json", f"checkpoints/pack-{number:04d}.pt"}
    a, b = contents(out), contents(tmp_path / "whole")
    assert {k: v for k, v in a.items() if k not in own} == {
        k: v for k, v in b.items() if k not in own
    }


@pytest.mark.parametrize("how", [None, REAL])
def test_f8_with_two_workers_the_files_are_the_same_and_the_killed_one_fails_alone(tmp_path, how):
    found = []
    for workers in ("1", "2"):
        (tmp_path / workers).mkdir()
        found.append(trials(tmp_path / workers, "DEADLY", workers, *filter(None, [how])))
    assert found[0]["status"] == found[1]["status"] == 1
    assert sorted(found[0]["failed"]) == sorted(found[1]["failed"])
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    records = {record.lane.lam: record for record in Store(tmp_path / "2/out").records()}
    failed = {lam: record.reason for lam, record in records.items() if record.status == "failed"}
    assert failed == {lam: REASONS[lam] for lam in (small_lab.KILLED, small_lab.RAISES)}


@pytest.mark.parametrize("model", ["says_none", "says_text", "is_none"])
def test_f8_a_network_that_is_none_or_answers_nonsense_fails(tmp_path, model):
    events = visit(tmp_path, replace(SWEEP, program="lone", model=f"small_lab:{model}"))
    told = [event for event in events if event["kind"] == "record"]
    assert [event["status"] for event in told] == ["failed"] * len(SWEEP.lanes)
    assert all(record.reason.startswith("AttributeError: ") for record in Store(tmp_path).records())


def test_f8_a_network_that_answers_nan_is_never_the_best(tmp_path):
    sweep = replace(SWEEP, program="lone", model="small_lab:says_nan")
    visit(tmp_path, sweep)
    results = Results(sweep, Store(tmp_path).records())
    assert results.diverged("sgd") == 4
    assert results.best_of_all("test_accuracy") is None


def test_f8_a_run_that_fails_as_it_is_prolonged_keeps_its_record_and_says_so(tmp_path, monkeypatch):
    short = replace(MISBEHAVING, lam=(small_lab.RAISES,))
    monkeypatch.setenv("BEHAVE", "1")
    visit(tmp_path, short)
    before = contents(tmp_path / "records")
    monkeypatch.delenv("BEHAVE")
    events = visit(tmp_path, replace(short, epochs=4))
    assert contents(tmp_path / "records") == before
    assert [e["reason"] for e in events if e["kind"] == "record"] == [REASONS[small_lab.RAISES]]


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("/nowhere/python", "could not be started"),
        ("/bin/false", "The training process ended with status 1 before it had begun"),
    ],
)
def test_a_worker_that_cannot_start_is_told_in_a_sentence(tmp_path, monkeypatch, program, said):
    monkeypatch.setattr(sys, "executable", program)
    outcome = supervise(job(tmp_path), lambda event: None)
    assert outcome.status == 1
    assert said in outcome.text


def test_a_worker_that_dies_after_its_last_word_has_done_its_work(tmp_path, monkeypatch):
    """A signal, or the end of a library, may hit it as it shuts down."""
    last = b'{"kind": "ended", "how": "interrupted", "status": 143}\n'
    code = f"os.write(int(sys.argv[4]), {last!r}); os.kill(os.getpid(), 9)"
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\nimport os, sys; {code}\n")
    fake.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(fake))
    assert supervise(job(tmp_path), lambda event: None).status == 143


def test_an_error_of_the_folder_ends_the_sweep_and_is_told(tmp_path):
    visit(tmp_path)
    outcome = supervise(job(tmp_path), lambda event: None)
    assert outcome.status == 2
    assert "holds a sweep made under other conditions (optimizers:" in outcome.text
