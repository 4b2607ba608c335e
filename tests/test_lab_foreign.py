"""Sweep folders from somebody else: nothing in them is trusted, nothing outside them is touched."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from small_lab import LANE, ONE, PACK, contents, half_done, visit
from wngrad.lab.report import builder
from wngrad.lab.report.results import Results
from wngrad.lab.run import files, places
from wngrad.lab.run.store import Mismatch, Store, exported

pytestmark = pytest.mark.usefixtures("one_thread")

JUNK: tuple[Any, ...] = (
    None, True, -1, 1.5, 1e999, "", "..", "../../victim/model", "/etc/x", "pack-0001/../../x",
    "a\0b", [], [[]], {}, {"a": 1}, [None], "pack-0001\n", 10**400,
)  # fmt: skip


def sealed(path: Path) -> dict[str, Any]:
    return files.open_json(path.read_bytes(), "")


def outside(folder: Path) -> dict[str, Any]:
    """All files and links beside a sweep's folder."""
    found = {}
    for path in folder.parent.rglob("*"):
        if not path.is_relative_to(folder):
            found[str(path)] = path.read_bytes() if path.is_file() else None
    return found


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file that a hostile folder would like to change."""
    path = tmp_path / "victim" / "model.pt"
    path.parent.mkdir()
    path.write_bytes(b"precious")
    return path


def test_a_pack_is_no_path(tmp_path, victim, whole):
    out = half_done(tmp_path / "out" / "sweep")
    before = outside(out)
    plan = sealed(out / "sweep.json")
    plan["packs"][0]["name"] = "../../../victim/model"
    (out / "sweep.json").write_bytes(files.seal_json(plan))
    told = visit(out)
    assert any("sweep.json has a pack that is none of ours" in str(event) for event in told)
    assert outside(out) == before
    assert victim.read_bytes() == b"precious"
    assert {k: v for k, v in contents(out).items() if ".damaged-" not in k} == whole


def spoiled(plan: Any, draw: random.Random) -> Any:
    """A plan with one value in it replaced, or taken out, or another added."""
    plan = json.loads(json.dumps(plan))
    spots = [(plan, key) for key in plan]
    for pack in plan["packs"]:
        spots += [(pack, key) for key in pack]
        spots += [(pack[name], k) for name in ("settings", "seeds") for k in range(len(pack[name]))]
        spots += [(pair, k) for pair in pack["settings"] for k in range(2)]
    holder, key = draw.choice(spots)
    if draw.random() < 0.2 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = draw.choice(JUNK)
    return plan


def test_no_hostile_plan_leads_outside_or_to_a_traceback(tmp_path):
    hostile_plans(tmp_path, 150)


@pytest.mark.faults
def test_no_hostile_plan_of_a_thousand_leads_outside_or_to_a_traceback(tmp_path):
    hostile_plans(tmp_path, 1000)


def hostile_plans(tmp_path: Path, count: int) -> None:
    out = half_done(tmp_path / "a" / "b" / "out")
    before, plan, draw = outside(out), sealed(out / "sweep.json"), random.Random(16)
    conditions = {k: v for k, v in plan["settings"].items() if k not in ONE.identity()}
    warned: list[str] = []
    refusals: list[str] = []
    for _ in range(count):
        for aside in out.glob("sweep.json.damaged-*"):
            aside.unlink()
        (out / "sweep.json").write_bytes(files.seal_json(spoiled(plan, draw)))
        store = Store(out, warn=warned.append)
        try:
            packs = store.open(ONE, conditions)
        except Mismatch as refusal:
            refusals.append(str(refusal))
            continue
        for pack in packs:
            assert store.load(pack) is not None or pack != PACK
            for path in (store._checkpoint_path(pack), *map(store._record_path, pack.lanes)):
                assert path.resolve().is_relative_to(out)
    assert len(warned) > count / 2
    assert refusals
    assert not any("\n" in line for line in refusals + warned)
    assert outside(out) == before


def test_a_plan_names_no_optimizer_that_the_sweep_does_not(tmp_path):
    """Its module would be imported."""
    out = half_done(tmp_path / "out")
    plan = sealed(out / "sweep.json")
    plan["packs"][0]["settings"].append(["evil.py:function", 0.1])
    (out / "sweep.json").write_bytes(files.seal_json(plan))
    with pytest.raises(Mismatch, match=r"plans 'evil.py:function' at λ = 0.1"):
        visit(out)


@pytest.mark.parametrize("name", ["records", "checkpoints", "locks"])
def test_a_folder_of_a_store_is_no_link(tmp_path, victim, name):
    out = half_done(tmp_path / "out")
    (out / name).rename(out / "moved")
    (out / name).symlink_to(victim.parent)
    before = outside(out)
    with pytest.raises(ValueError, match=f"{name} must be a folder, got a link"):
        visit(out)
    assert outside(out) == before


@pytest.mark.parametrize(
    "name",
    [
        "locks/sweep",
        f"locks/{PACK.name}",
        "sessions.jsonl",
        "sweep.json",
        f"records/{LANE.name}.json",
        f"checkpoints/{PACK.name}.pt",
        f"checkpoints/{PACK.name}.pt.old",
    ],
)
@pytest.mark.parametrize("beside", [False, True])
def test_a_link_in_a_store_changes_nothing_where_it_leads(tmp_path, victim, name, beside):
    """Neither the file's own name, nor the one under which it is written before it is renamed."""
    out = half_done(tmp_path / "out")
    path = out / name
    if beside:
        path = files.beside(path)
    for target in (victim, victim.with_name("new")):
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        before = outside(out)
        with suppress(OSError):
            visit(out)
        assert outside(out) == before


def test_a_lock_that_is_a_link_is_named(tmp_path, victim):
    out = half_done(tmp_path / "out")
    (out / "locks" / "sweep").unlink()
    (out / "locks" / "sweep").symlink_to(victim)
    with pytest.raises(OSError, match="locks/sweep could not be written"):
        visit(out)


def test_locks_in_a_shared_folder_are_ones_own(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pytest.importorskip("fsspec")
    place, folder = places.find("memory://sweep")
    with place.lock(folder / "locks" / "sweep", wait=False) as claimed:
        assert claimed
    (made,) = tmp_path.iterdir()
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o777)
    place.lock(folder / "x", wait=False)
    assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("what", ["another user's", "a link", "a file"])
def test_locks_that_another_user_made_are_refused(tmp_path, monkeypatch, what):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    pytest.importorskip("fsspec")
    place, folder = places.find("memory://sweep")
    locks = tmp_path / f"wngrad-locks-{os.getuid()}"
    if what == "another user's":
        locks.mkdir()
        state = list(os.lstat(locks))
        state[4] = os.getuid() + 1
        monkeypatch.setattr(os, "lstat", lambda path: os.stat_result(state))
    elif what == "a link":
        (tmp_path / "theirs").mkdir()
        locks.symlink_to(tmp_path / "theirs")
    else:
        locks.touch()
    with pytest.raises(PermissionError, match=r"must be a folder of your own, .*TMPDIR"):
        place.lock(folder / "x", wait=False)


# ---------------------------------------------------------------- records


def spoiled_record(plain: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    plain = json.loads(json.dumps(plain))
    spots: list[tuple[Any, Any]] = [(plain, key) for key in plain]
    for name in ("curves", "settings", "environment", "start"):
        spots += [(plain[name], key) for key in plain[name]]
    spots += [(curve, k) for curve in plain["curves"].values() for k in range(len(curve))]
    holder, key = draw.choice(spots)
    if draw.random() < 0.2 and isinstance(holder, dict):
        del holder[key]
    else:
        holder[key] = draw.choice(JUNK)
    return plain


def hostile_records(tmp_path: Path, count: int) -> None:
    """Of each, the folder's and the exported file's reports are written or refused in a line."""
    out = tmp_path / "out"
    visit(out)
    path, draw = out / f"records/{LANE.name}.json", random.Random(17)
    good, damaged = sealed(path), 0
    for _ in range(count):
        path.write_bytes(files.seal_json(spoiled_record(good, draw)))
        line = path.read_bytes()
        warned: list[str] = []
        records = Store(out, warn=warned.append).records()
        builder.build(Results(ONE, records)).markdown()
        assert len(records) + len(warned) == 2
        assert not any("\n" in text for text in warned)
        assert all(f"{path} " in text for text in warned)
        damaged += len(warned)
        for aside in path.parent.glob("*.damaged-*"):
            aside.unlink()
        (tmp_path / "exported.jsonl").write_bytes(line)
        with suppress(files.Damaged):
            exported(tmp_path / "exported.jsonl")
    assert damaged > count / 3


def test_no_hostile_record_ends_in_a_traceback(tmp_path):
    hostile_records(tmp_path, 150)


@pytest.mark.faults
def test_no_hostile_record_of_a_thousand_ends_in_a_traceback(tmp_path):
    hostile_records(tmp_path, 1000)


def test_a_whole_record_that_is_none_of_ours_is_set_aside_and_made_again(tmp_path, whole):
    for plain in ({}, {"hello": 1}, {"optimizer": "sgd", "lam": 0.1, "seed": 0, "status": "done"}):
        out = tmp_path / str(len(plain))
        visit(out)
        path = out / f"records/{LANE.name}.json"
        path.write_bytes(files.seal_json(plain))
        told = visit(out)
        assert any("is no record of a lane: `" in str(event) for event in told)
        assert {k: v for k, v in contents(out).items() if ".damaged-" not in k} == whole


def test_a_record_under_another_lanes_name_is_set_aside(tmp_path, whole):
    visit(tmp_path)
    one, other = (tmp_path / f"records/{lane.name}.json" for lane in PACK.lanes)
    one.write_bytes(other.read_bytes())
    told = visit(tmp_path)
    assert any("is the record of another lane" in str(event) for event in told)
    assert {k: v for k, v in contents(tmp_path).items() if ".damaged-" not in k} == whole


@pytest.mark.parametrize("name", ["report.html", "figure.png", "figure.svg", "summary.md"])
def test_a_full_disk_names_the_file_of_a_report_and_leaves_the_old_one_whole(
    tmp_path, monkeypatch, name
):
    visit(tmp_path)
    records = Store(tmp_path).records()
    builder.write(ONE, records, tmp_path)
    before, real = contents(tmp_path), os.write
    new = files.beside(tmp_path / name)

    def full(descriptor: int, data: Any) -> int:
        if Path(os.readlink(f"/proc/self/fd/{descriptor}")) == new:
            real(descriptor, data[:10])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=f"{tmp_path / name} could not be written: No space left"):
        builder.write(ONE, records, tmp_path)
    after = contents(tmp_path)
    assert after.keys() == before.keys()  # nothing half-written lies about
    assert after[name] == before[name]


# ---------------------------------------------------------------- processes that stay


FORKS = """
import os, sys
from pathlib import Path
from wngrad.lab.run import files

path = Path(sys.argv[1])
read, write = os.pipe()
with files.lock(path, wait=False):
    if (child := os.fork()) == 0:
        os.read(read, 1)
        os._exit(0)
with files.lock(path, wait=False) as claimed:
    print("claimed" if claimed else "held")
os.write(write, b".")
os.waitpid(child, 0)
"""


def test_a_forked_process_holds_no_lock_of_its_parent(tmp_path):
    """In a process without threads, which a process that forks should not have."""
    command = [sys.executable, "-c", FORKS, str(tmp_path / "lock")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "claimed\n", done.stderr
