"""Sweep folders from somebody else: nothing in them is trusted, nothing outside them is touched."""

from __future__ import annotations

import json
import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from small_lab import LANE, ONE, PACK, contents, half_done, visit
from wngrad.lab.run import files, places
from wngrad.lab.run.store import Mismatch, Store

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
