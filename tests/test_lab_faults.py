"""Part one of the fault table: F2, F3, F4, F5, F9. F1, F6, F7, F8 are in test_lab_kills.py.

Every test takes the run that nothing disturbed as its oracle, byte for byte.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import wngrad
from small_lab import (
    ONE,
    PACK,
    SWEEP,
    Stop,
    announced,
    blobs,
    contents,
    data,
    half_done,
    halt,
    position,
    session,
    stopped,
    visit,
)  # fmt: skip
from wngrad.lab.run import files
from wngrad.lab.run.session import _records
from wngrad.lab.run.store import Mismatch, Store
from wngrad.lab.train.programs import PROGRAMS, Program
from wngrad.lab.train.spec import Sweep, packs

pytestmark = pytest.mark.usefixtures("one_thread")


def test_f2_a_stop_at_any_write_leaves_the_last_announced_checkpoint_or_the_new(tmp_path, whole):
    with stopped(0, "", halt) as made:
        visit(tmp_path / "counted")
    assert len(made) > 30
    for call, name in enumerate(made, 1):
        for when in ("before", "half-way", "after"):
            if when == "half-way" and name != "write":
                continue  # there is no half of an fsync or of a rename
            out = tmp_path / f"{call}-{when}"
            visitor, events = session(out)
            with pytest.raises(Stop), stopped(call, when, halt):
                visitor.run()
            saved, lanes = announced(events)
            at = [event["epochs"] for event in events if event["kind"] == "progress"]
            there = position(Store(out, warn=pytest.fail), PACK)
            assert there in (saved.get(PACK.name), *at[-1:])
            for record in (f"records/{lane}.json" for lane in lanes):
                assert (out / record).read_bytes() == whole[record]
            visit(out)
            assert contents(out) == whole


def test_f2_bytes_are_on_the_disk_before_their_name_and_the_name_before_the_announcement(tmp_path):
    """What a loss of power would need, which no test can bring about: the order of the calls."""
    visitor, _ = session(tmp_path)
    with stopped(0, "", halt) as made:
        visitor.tell = lambda event: made.append(event["kind"])
        visitor.run()
    # "r": the checkpoint steps back; then write, fsync, rename, fsync of the folder, announcement.
    short = {"write": "w", "fsync": "f", "replace": "r", "saved": "S", "record": "R"}
    letters = "".join(short.get(name, "") for name in made)
    assert re.fullmatch(r"wfrf" r"(r?wfrfS)+" r"(wfrfR){2}" r"w", letters)


KINDS = {"stacked": "small_lab:net", "branches": "small_lab:net", "lone": "small_lab:dropping"}


def resumes(kind: str, sweep: Sweep, data: Any, steps: list[int], draw: random.Random) -> None:
    """Go on from the sealed state after each of `steps`, in chunks of any size, to the last."""
    sweep = replace(sweep, program=kind, model=KINDS[kind], optimizers=("adam", "wngrad-momentum"))
    pack = packs(sweep.settings, sweep.seeds, None)[0]

    def fresh() -> Program:
        return PROGRAMS[kind](sweep, pack, data, "cpu")

    def end(program: Program) -> list[str]:
        records = [files.seal_json(r.to_json()) for r in _records(program, {}, {})]
        sealed = [files.seal_tensors(program.state()), *records]
        return [hashlib.sha256(part).hexdigest() for part in sealed]

    first = fresh()
    states = {}
    for step in range(201):
        if step in steps:
            states[step] = files.seal_tensors(first.state())
        if step < 200:
            first.advance(1)
    assert (first.epoch, first.step) == (sweep.epochs, 0)
    expected, before = end(first), torch.get_rng_state()
    for step in steps:
        torch.manual_seed(draw.getrandbits(32))  # nothing may depend on the global generator
        program = fresh()
        program.load(files.open_tensors(states[step], "state"))
        while program.epoch < sweep.epochs:
            program.advance(draw.randint(1, 30))
        assert end(program) == expected, step
    torch.set_rng_state(before)


def one_epoch(kind: str, steps: list[int]) -> None:
    sweep = replace(ONE, lam=(0.03,), epochs=1)
    resumes(kind, sweep, blobs((4,), n=4000), steps, random.Random(1))


def shuffled(kind: str, steps: list[int]) -> None:
    resumes(kind, replace(ONE, lam=(0.03,), epochs=20), data(), steps, random.Random(2))


@pytest.mark.parametrize("kind", KINDS)
def test_f3_a_run_goes_on_from_a_step_as_if_it_had_never_stopped(kind):
    """Some steps of a run of 200, and of one that is shuffled anew every 10 steps."""
    one_epoch(kind, [0, 1, 100, 200] if kind == "stacked" else [150])
    shuffled(kind, random.Random(0).sample(range(100, 201), 3))


@pytest.mark.faults
@pytest.mark.parametrize("kind", KINDS)
def test_f3_a_run_goes_on_from_every_step(kind):
    """All 201 states of a run of 200 steps, and 100 of the shuffled one."""
    one_epoch(kind, list(range(201)))
    shuffled(kind, random.Random(0).sample(range(201), 100))


@contextmanager
def room_for(size: int) -> Iterator[None]:
    """A disk that takes `size` bytes more, and is full then, as write(2) says it."""
    real, left = os.write, size

    def write(descriptor: int, data: Any) -> int:
        nonlocal left
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = real(descriptor, data[:left])
        left -= done
        return done

    os.write = write
    try:
        yield
    finally:
        os.write = real


def fill_the_disk(tmp_path: Path, whole: dict[str, bytes], count: int) -> None:
    """At `count` places among all bytes that a run writes; goes on with the same session."""
    written, real = [0], os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda d, b: written.append(len(b)) or real(d, b))
        visit(tmp_path / "counted")
    for size in random.Random(4).sample(range(sum(written)), count):
        out = tmp_path / "out"
        visitor, events = session(out)
        with room_for(size), pytest.raises(OSError, match=re.escape(str(out))) as caught:
            visitor.run()
        assert caught.value.errno == errno.ENOSPC
        saved, _ = announced(events)
        assert position(Store(out, warn=pytest.fail), PACK) in (None, saved.get(PACK.name))
        assert not [name for name in contents(out) if "/." in name]  # room is given back
        visitor.run()
        assert contents(out) == whole
        shutil.rmtree(out)


def test_f4_a_full_disk_costs_nothing_but_time(tmp_path, whole):
    fill_the_disk(tmp_path, whole, 25)


@pytest.mark.faults
def test_f4_a_full_disk_at_500_offsets(tmp_path, whole):
    fill_the_disk(tmp_path, whole, 500)


def test_f4_an_error_of_the_disk_at_any_write_names_the_file(tmp_path, whole):
    def broken(*args: object) -> None:
        named = [str(arg) for arg in args if isinstance(arg, Path)]  # as the system does
        raise OSError(errno.EIO, os.strerror(errno.EIO), *named[:1])

    with stopped(0, "", halt) as made:
        visit(tmp_path / "counted")
    for call in range(1, len(made) + 1):
        out = tmp_path / f"{call}"
        visitor, _ = session(out)
        with pytest.raises(OSError, match=f"{out}/"), stopped(call, "before", broken):
            visitor.run()
        visitor.run()
        assert contents(out) == whole


@pytest.mark.parametrize("folder", ["/proc/wngrad", "/proc/self/wngrad", "/dev/null/wngrad"])
def test_f4_a_folder_that_not_even_root_can_make_is_named(folder):
    with pytest.raises(OSError, match=folder):
        visit(Path(folder))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only folders")
def test_f4_a_folder_that_became_read_only_is_named_and_left_alone(tmp_path):
    out = half_done(tmp_path / "out")
    before = contents(out)
    (out / "checkpoints").chmod(0o500)
    with pytest.raises(OSError, match=re.escape(str(out / "checkpoints"))):
        visit(out)
    (out / "checkpoints").chmod(0o700)
    assert contents(out) == before


@pytest.mark.parametrize(
    "name", ["n" * 255, "ü λ 数据 🙂", os.fsdecode(b"\xff\xfe"), "two\nlines", "link"]
)
def test_f4_any_folder_will_do(tmp_path, whole, name):
    out = tmp_path / name
    if name == "link":
        (tmp_path / "elsewhere").mkdir()
        out.symlink_to(tmp_path / "elsewhere")
    half_done(out)
    visit(out)
    assert contents(out) == whole


EDITS: dict[str, dict[str, Any]] = {
    "lam": {"lam": (0.01, 0.2)},
    "batch": {"batch": 8},
    "weight_decay": {"weight_decay": 0.0},
    "model": {"model": "small_lab:dropping"},
    "optimizers": {"optimizers": ("sgd",)},
    "program": {"program": "branches"},
    "dataset": {"dataset": "small_lab:other"},
    "precision": {"precision": "float64"},
    "name": {"name": "another"},
}


def snapshot(folder: Path) -> dict[str, Any]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in folder.rglob("*")
    }


def refused(out: Path, key: str, sweep: Sweep, **options: Any) -> None:
    before = snapshot(out)
    with pytest.raises(Mismatch, match=rf"other conditions \({key}: .* there, .* now\)"):
        visit(out, sweep, **options)
    assert snapshot(out) == before


@pytest.mark.parametrize("key", EDITS)
@pytest.mark.parametrize("state", ["half done", "done"])
def test_f9_another_recipe_is_refused_with_the_difference(tmp_path, key, state):
    half_done(tmp_path)
    if state == "done":
        visit(tmp_path)
    refused(tmp_path, key, replace(ONE, **EDITS[key]))


@pytest.mark.parametrize("library", [wngrad, torch], ids=["wngrad", "torch"])
def test_f9_another_version_of_a_library_is_refused(tmp_path, monkeypatch, library):
    half_done(tmp_path)
    monkeypatch.setattr(library, "__version__", "9.9")
    refused(tmp_path, library.__name__, ONE)


def test_f9_other_data_another_device_or_note_are_refused(tmp_path, monkeypatch):
    half_done(tmp_path)
    refused(tmp_path, "data", ONE, data=blobs((4,), seed=1))
    refused(tmp_path, "note", ONE, note="on a rainy day")
    monkeypatch.setattr("wngrad.lab.run.environment._processor", lambda: "another")
    refused(tmp_path, "device", ONE)


def test_f9_a_folder_that_lost_its_plan_still_knows_what_it_is_of(tmp_path):
    visit(tmp_path)
    (tmp_path / "sweep.json").unlink()
    refused(tmp_path, "lam", replace(ONE, lam=(0.01, 0.2)))


def test_f9_records_without_a_plan_are_not_trained_again_beside_new_ones(tmp_path):
    whole = replace(SWEEP, lanes_per_pack=len(SWEEP.lanes))
    visit(tmp_path, replace(whole, seeds=(0,)))
    (tmp_path / "sweep.json").unlink()
    shutil.rmtree(tmp_path / "checkpoints")
    before = snapshot(tmp_path / "records")
    events = visit(tmp_path, whole)
    assert {each["pack"] for each in events if each["kind"] == "progress"} == {"pack-0002"}
    assert [pack.seeds for pack in Store(tmp_path).cut()] == [(0,), (1,)]
    after = snapshot(tmp_path / "records")
    assert len(after) == len(whole.lanes)
    assert {path: after[path] for path in before} == before


@pytest.mark.parametrize("half", [False, True])
def test_f9_more_epochs_go_on_and_equal_a_run_that_was_longer_from_the_start(tmp_path, half):
    longer = replace(SWEEP, epochs=5)
    visit(tmp_path / "longer", longer)
    (half_done if half else visit)(tmp_path / "grown", SWEEP)
    before = {r.lane: r.curves for r in Store(tmp_path / "grown").records()}
    events = visit(tmp_path / "grown", longer)
    for lane, curves in before.items():
        after = Store(tmp_path / "grown").record(lane).curves
        assert {name: values[:2] for name, values in after.items()} == curves
    assert contents(tmp_path / "grown") == contents(tmp_path / "longer")
    went_on = [event["epochs"] for event in events if event["kind"] == "progress"]
    assert half or min(went_on) == 2


def test_f9_more_seeds_are_added_and_nothing_there_is_touched(tmp_path):
    visit(tmp_path / "grown", replace(SWEEP, seeds=(0,)))
    before = snapshot(tmp_path / "grown/records") | snapshot(tmp_path / "grown/checkpoints")
    visit(tmp_path / "grown", SWEEP)
    after = snapshot(tmp_path / "grown")
    assert {path: after[path] for path in before} == before
    visit(tmp_path / "whole", SWEEP)
    assert contents(tmp_path / "grown") == contents(tmp_path / "whole")


def test_f9_fewer_epochs_than_there_are_leave_everything_alone(tmp_path, whole):
    visit(tmp_path / "out")
    events = visit(tmp_path / "out", replace(ONE, epochs=1))
    assert [event["kind"] for event in events] == ["plan", "had"]
    assert contents(tmp_path / "out") == whole


def test_two_sessions_in_a_folder_leave_each_other_their_packs(tmp_path):
    visit(tmp_path / "whole", SWEEP)
    out = tmp_path / "out"
    plan, _ = session(out, SWEEP)
    taken = plan.store.open(plan.sweep, {k: plan.settings[k] for k in CONDITIONS})[1]
    with Store(out).claim(taken) as mine:
        assert mine
        events = visit(out, SWEEP)
    assert [e["pack"] for e in events if e["kind"] == "busy"] == [taken.name]
    assert [e["pack"] for e in events if e["kind"] == "start"] == [
        f"pack-000{k}" for k in (1, 3, 4)
    ]
    assert [e["pack"] for e in visit(out, SWEEP) if e["kind"] == "start"] == [taken.name]
    assert contents(out) == contents(tmp_path / "whole")


CONDITIONS = ("precision", "data", "network", "note", "wngrad", "torch", "device")
