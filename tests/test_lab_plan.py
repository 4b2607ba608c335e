"""From measurements to packs, plans and places: what the lab decides before it trains on Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from small_lab import ONE, PACK, STEPS, SWEEP, contents, data, session, visit
from wngrad.cli.commands import app
from wngrad.install import install_hint
from wngrad.lab.run import places, timing
from wngrad.lab.run.cluster.nodes import Need, Node, _agree, fitting
from wngrad.lab.run.files import Damaged
from wngrad.lab.run.job import Job
from wngrad.lab.run.pack_size import (
    Measured,
    Plan,
    choose,
    clock,
    enough,
    even,
    in_words,
    makespan,
    seconds,
)
from wngrad.lab.run.store import Store
from wngrad.lab.run.supervisor import supervise
from wngrad.lab.train.spec import packs

# Lanes, and the milliseconds of a step: a GPU that is full from 16 lanes on, and a processor that
# is full with one.
GPU = ((1, 1.0), (4, 1.1), (16, 2.0), (64, 8.0))
CPU = ((1, 1.0), (4, 4.0))
WORSE = ((1, 1.0), (4, 2.0), (16, 12.0))


def table(rows: tuple[tuple[int, float], ...], start: float = 10.0) -> list[Measured]:
    """An epoch is 1,000 steps, and a test takes as long as ten."""
    return [Measured(n, start, ms / 1e3, ms / 100, 1000) for n, ms in rows]


@pytest.mark.parametrize(
    ("rows", "lanes", "slots", "epochs", "size", "why"),
    [
        (GPU, 10_000, 8, 10, 64, "the best rate that was measured"),
        (GPU, 10_000, 8, 100, 16, "more are not trained at a better rate, and take over 10:00"),
        (
            GPU,
            10_000,
            8,
            999,
            16,
            "fewer are trained at a lower rate, though these take over 10:00",
        ),
        (GPU, 100, 64, 10, 2, "so that all 64 slots have work"),
        (CPU, 10_000, 8, 100, 4, "the best rate that was measured"),
        (CPU, 10_000, 8, 500, 1, "more are not trained at a better rate, and take over 10:00"),
        (WORSE, 10_000, 8, 1, 4, "the best rate that was measured"),
        (CPU, 3, 8, 1, 1, "so that all 8 slots have work"),
    ],
)
def test_the_size_of_a_pack_fills_a_gpu_and_keeps_a_lost_one_cheap(
    rows, lanes, slots, epochs, size, why
):
    choice = choose(table(rows), lanes, slots, epochs)
    assert (choice.lanes, choice.why) == (size, why)


def test_measuring_ends_where_more_lanes_no_longer_pay():
    grown = [enough(table(GPU)[:n]) for n in range(1, 5)]
    assert grown == [False, False, False, True]
    assert enough(table(CPU))


def test_a_pack_costs_what_was_measured_and_is_linear_between_and_beyond():
    found = table(GPU)
    assert seconds(found, 16, 3) == pytest.approx(10 + 3 * (2.0 + 0.02))
    assert seconds(found, 40, 1) == pytest.approx(10 + (2.02 + 8.08) / 2)
    assert seconds(found, 128, 1) == pytest.approx(10 + 2 * 8.08)
    assert seconds(found[1:], 1, 1) == seconds(found[1:], 4, 1)  # nothing is known below


def test_packs_are_cut_alike():
    assert [even(size, 20) for size in (1, 7, 16, 19, 20, 40)] == [1, 7, 10, 10, 20, 40]
    cut = packs(SWEEP.settings, range(10), 9)  # four settings: two seeds fit in nine lanes
    assert [len(pack.lanes) for pack in cut] == [8] * 5


def test_whoever_is_free_takes_the_next_pack():
    assert makespan([4, 1, 1, 1, 3], slots=2) == 6
    assert makespan([], slots=3) == 0
    assert makespan([2] * 10, slots=64) == 2


@pytest.mark.parametrize(
    ("value", "text"), [(0.04, "0.0 s"), (42, "42 s"), (185, "3:05"), (7800, "2:10:00")]
)
def test_a_time_is_told_as_a_person_reads_it(value, text):
    assert clock(value) == text


def test_a_plan_says_packs_lanes_resources_time_and_what_is_done():
    sweep = replace(SWEEP, lam=(0.01, 0.1, 1.0), lanes_per_pack=4, epochs=4, alone=("sgd",))
    cut = sweep.cut(sweep.seeds)
    costs = {"stacked": table(((1, 1.0), (4, 2.0)), 1.0), "lone": table(((1, 3.0),), 0.5)}
    plan = Plan(sweep, cut, frozenset({"pack-0001"}), 2, "1 GPU and 1 CPU", costs)
    assert plan.lines() == [
        "pack-0001: 3 lanes, done",
        "pack-0002: 3 lanes, 1 GPU and 1 CPU, about 7.7 s",
        "pack-0003 to pack-0008: 1 lane each, 1 GPU and 1 CPU, about 13 s",
        "12 lanes of 4 epochs in 8 packs, 1 of them done, 2 at a time, about 46 s in all.",
    ]
    assert in_words(costs["stacked"]) == (
        "a step of 1 lane 1 ms, 4 lanes 2 ms; 20 ms a test, 1.0 s to begin"
    )


@pytest.mark.parametrize("kind", ["stacked", "branches", "lone"])
def test_real_programs_are_measured(kind):
    sweep = replace(SWEEP, program=kind, lanes_per_pack=None)
    found = timing.growing(sweep, data(), "cpu", None)
    lanes = [m.lanes for m in found]
    assert lanes == sorted({1, 4, 8} & set(lanes))
    assert lanes[0] == 1
    assert all(m.steps == STEPS and m.start > 0 and m.step > 0 and m.test > 0 for m in found)
    by_kind = timing.sizes(sweep, sweep.cut(sweep.seeds), data(), "cpu")
    assert list(by_kind) == [kind]


def test_a_program_that_does_not_fit_in_memory_ends_the_measuring(monkeypatch):
    real = timing.one

    def one(sweep, pack, data, device):
        if len(pack.lanes) > 1:
            raise torch.OutOfMemoryError
        return real(sweep, pack, data, device)

    monkeypatch.setattr(timing, "one", one)
    assert [m.lanes for m in timing.growing(SWEEP, data(), "cpu", 4)] == [1]
    monkeypatch.setattr(timing, "one", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError):
        timing.growing(SWEEP, data(), "cpu", 4)


def test_a_plan_of_a_local_run_counts_what_is_done_and_writes_nothing(tmp_path):
    job = Job(SWEEP, tmp_path / "out", device="cpu")
    fresh = timing.plan(job)
    assert not (tmp_path / "out").exists()
    assert "8 lanes of 2 epochs in 4 packs, 1 at a time, about " in fresh[-1]
    visit(tmp_path / "out", SWEEP)
    before = contents(tmp_path / "out")
    longer = replace(job, sweep=replace(SWEEP, seeds=(0, 1, 2)))
    assert "12 lanes of 2 epochs in 6 packs, 4 of them done" in timing.plan(longer)[-1]
    assert contents(tmp_path / "out") == before


def test_a_dry_run_prints_the_plan(tmp_path):
    words = ["run", "digits", "--epochs", "1", "--lanes", "91", "--device", "cpu", "--dry-run"]
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "Measured here: stacked, a step of 91 lanes " in done.output
    assert "273 lanes of 1 epoch in 3 packs, 1 at a time, about " in done.output
    assert not list(tmp_path.iterdir())
    bad = CliRunner().invoke(app, [*words, "--device", "tpu"])
    assert (bad.exit_code, "device" in bad.output) == (2, True)


# ------------------------------------------------------------------------------- nodes


def said(**versions: str) -> dict[str, object]:
    from wngrad import __version__

    same = {"wngrad": __version__, "torch": "2.13.0", "device": "H200", **versions}
    return {"versions": {k: same[k] for k in ("wngrad", "torch")}, "conditions": same}


def test_nodes_must_agree_in_versions_and_in_all_that_changes_the_numbers():
    a, b = Node("a" * 56, "10.0.0.1", {}), Node("b" * 56, "10.0.0.2", {})
    _agree({a: said(), b: said()})
    with pytest.raises(ValueError, match=r"versions differ between nodes: torch is 2.13.0 on 10"):
        _agree({a: said(), b: said(torch="2.11.0")})
    with pytest.raises(ValueError, match=r"device is H200 on 10.0.0.1 .*, H100 on 10.0.0.2"):
        _agree({a: said(), b: said(device="H100")})
    with pytest.raises(ValueError, match=r"wngrad is .* on this machine, 0.0.1 on 10.0.0.1"):
        _agree({a: said(wngrad="0.0.1"), b: said(wngrad="0.0.1")})
    with pytest.raises(ValueError, match=r"10.0.0.2 \(node bbbbbbbb\) cannot run this sweep: gone"):
        _agree({a: said(), b: {**said(), "error": "gone"}})


@pytest.mark.parametrize(
    ("need", "slots"), [(Need(1), 8), (Need(3), 2), (Need(1, 1), 2), (Need(8, 2), 1)]
)
def test_a_pack_takes_its_gpus_and_cores_of_a_node(need, slots):
    big, small = Node("a", "one", {"CPU": 8.0, "GPU": 2.0}), Node("b", "two", {"CPU": 0.0})
    assert need.slots(big.resources) == slots
    assert fitting([big, small], need) == [big]
    with pytest.raises(ValueError, match="the cluster has 0 GPU and 0 CPU on 1 nodes, and no node"):
        fitting([small], need)


def test_without_ray_its_option_is_one_line(tmp_path: Path):
    code = "import sys; sys.modules['ray'] = None; from wngrad.cli import main; main()"
    words = ["run", "digits", "--ray", "local", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"wngrad: `--ray` needs the extra `ray`: {install_hint('ray')} (")
    assert done.stderr.count("\n") == 1


# ------------------------------------------------------------------------------ places


@pytest.mark.parametrize("object_store", [False, True])
def test_an_address_holds_the_files_of_a_folder(tmp_path, whole, object_store):
    """All but the log, which is a file for each entry there."""
    home = (tmp_path / "away").as_uri()
    visitor, events = session(tmp_path / "unused")
    visitor.store = Store(home, warn=lambda text: events.append({"kind": "warning", "text": text}))
    visitor.store.place.at_once = object_store  # type: ignore[attr-defined]
    visitor.run()
    logged = list((tmp_path / "away/sessions").iterdir())
    assert len(logged) == 1
    logged[0].unlink()
    assert contents(tmp_path / "away") == whole
    assert len(Store(home).records()) == len(PACK.lanes)
    visitor.run()
    assert events[-1] == {"kind": "had", "pack": PACK.name, "lanes": len(PACK.lanes)}


def test_a_worker_runs_into_an_address_and_goes_on_there(tmp_path, one_thread, monkeypatch):
    paths = (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    job = Job(ONE, (tmp_path / "away").as_uri(), device="cpu", save_every=0)
    told: list[dict[str, object]] = []
    assert supervise(job, told.append).status == 0
    longer = replace(job, sweep=replace(ONE, epochs=3))
    assert supervise(longer, told.append).status == 0
    assert [r.epochs for r in Store(job.out).records()] == [3, 3]


def test_a_damaged_file_at_an_address_is_set_aside_and_said(tmp_path):
    home, warned = (tmp_path / "away").as_uri(), list[str]()
    visitor, _ = session(tmp_path / "unused")
    visitor.store = Store(home, warn=warned.append)
    visitor.run()
    lane = PACK.lanes[0]
    path = tmp_path / f"away/records/{lane.name}.json"
    path.write_bytes(path.read_bytes()[:-9])
    assert visitor.store.record(lane) is None
    assert "It is kept as" in warned[0]
    assert not path.exists()
    place, folder = places.find(home)
    with pytest.raises(Damaged, match="is a folder"):
        place.read(folder / "records")
    assert place.names(folder / "nothing") == []


def test_an_address_of_an_unknown_kind_is_one_line():
    with pytest.raises(ValueError, match="`out` 'nothing://x' cannot be reached: "):
        Store("nothing://x")


def test_a_pack_that_is_taken_is_waited_for_but_not_for_ever(tmp_path):
    (tmp_path / "locks").mkdir()
    mine, its = Store(tmp_path), ExitStack()
    assert its.enter_context(Store(tmp_path).claim(PACK))
    with mine.claim(PACK, patience=0.1) as had:
        assert not had
    threading.Timer(0.2, its.close).start()
    with mine.claim(PACK, patience=60) as had:
        assert had


def test_one_process_leads_a_store(tmp_path):
    with Store(tmp_path).lead() as first, Store(tmp_path).lead() as second:
        assert (first, second) == (True, False)
