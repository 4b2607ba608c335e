"""F5: files that were cut, changed or replaced are noticed, and the last good ones used.

The oracle is the run that nothing disturbed, byte for byte.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from small_lab import LANE, ONE, PACK, contents, data, half_done, visit
from wngrad.lab.run import files
from wngrad.lab.run.session import _records
from wngrad.lab.run.store import Store
from wngrad.lab.train.programs import PROGRAMS, Program
from wngrad.lab.train.spec import Sweep

pytestmark = pytest.mark.usefixtures("one_thread")


def warnings(events: list[Any]) -> str:
    return "\n".join(event["text"] for event in events if event["kind"] == "warning")


def sound(folder: Path) -> dict[str, bytes]:
    """The contents, apart from damaged files that were kept."""
    return {name: data for name, data in contents(folder).items() if ".damaged-" not in name}


def flipped(data: bytes, draw: random.Random) -> bytes:
    bit = draw.randrange(8 * len(data))
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def cut(data: bytes, draw: random.Random) -> bytes:
    return data[: draw.randrange(len(data))]


def damage(out: Path, change: Callable[[bytes, random.Random], bytes], count: int) -> None:
    """Half of the times a record, half of the times a checkpoint that has one before it."""
    draw, warned = random.Random(5), []
    store = Store(half_done(out), warn=warned.append)
    store.write_record(_records(program_of(ONE), {}, {})[0])
    record, checkpoint = out / f"records/{LANE.name}.json", out / f"checkpoints/{PACK.name}.pt"
    before = files.open_tensors(files.read(Path(f"{checkpoint}.old")), "")["state"]
    for path in (record, checkpoint):
        good = path.read_bytes()
        for _ in range(count // 2):
            path.write_bytes(change(good, draw))
            if path == record:
                assert store.record(LANE) is None
            else:
                state = store.load(PACK)["state"]
                assert (state["epoch"], state["step"]) == (before["epoch"], before["step"])
                assert "goes on from pack-0001.pt.old" in warned.pop()
            assert f"{path} " in warned.pop()
            assert not warned
            assert not path.exists()
            Path(f"{path}.damaged-1").unlink()


def program_of(sweep: Sweep) -> Program:
    program = PROGRAMS["stacked"](sweep, PACK, data(), "cpu")
    program.advance(10)
    return program


@pytest.mark.parametrize("change", [flipped, cut])
def test_f5_every_change_is_noticed_and_the_state_before_is_used(tmp_path, change):
    damage(tmp_path / "out", change, 200)


@pytest.mark.faults
@pytest.mark.parametrize(("change", "count"), [(flipped, 10_000), (cut, 1_000)])
def test_f5_ten_thousand_bits_and_a_thousand_cuts(tmp_path, change, count):
    damage(tmp_path / "out", change, count)


def test_f5_a_record_cut_at_any_length_is_noticed(tmp_path):
    store = Store(tmp_path)
    (tmp_path / "records").mkdir()
    store.write_record(_records(program_of(ONE), {}, {})[0])
    data = (tmp_path / f"records/{LANE.name}.json").read_bytes()
    for length in range(len(data)):
        with pytest.raises(files.Damaged, match=r"not a whole record|does not match"):
            files.open_json(data[:length], "it")


class Bomb:
    """What a pickle can do to whoever opens it."""

    def __init__(self, crater: Path) -> None:
        self.crater = str(crater)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.crater,)


def sealed(body: bytes) -> bytes:
    return files._MAGIC + hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def bombs(crater: Path, path: Path) -> dict[str, bytes]:
    good = torch.load  # what a victim would call
    torch.save({"state": Bomb(crater)}, path)
    body, plain = path.read_bytes(), pickle.dumps(Bomb(crater))
    good(path, weights_only=False)  # it is one
    crater.rmdir()
    return {"bomb": body, "sealed bomb": sealed(body), "sealed pickle": sealed(plain)}


@pytest.mark.parametrize("what", ["bomb", "sealed bomb", "sealed pickle"])
@pytest.mark.parametrize("where", ["records", "checkpoints"])
def test_f5_no_code_is_run_from_a_file(tmp_path, whole, what, where):
    out, crater = half_done(tmp_path / "out"), tmp_path / "crater"
    name = LANE.name + ".json" if where == "records" else PACK.name + ".pt"
    (out / where / name).write_bytes(bombs(crater, tmp_path / "bomb")[what])
    events = visit(out)
    assert not crater.exists()
    assert f"{name}.damaged-1" in warnings(events)
    assert sound(out) == whole


def spoil(path: Path, how: str) -> None:
    data = path.read_bytes() if path.exists() else b""
    path.unlink(missing_ok=True)
    if how == "a folder":
        path.mkdir()
        (path / "inside").touch()
    else:
        path.write_bytes({"empty": b"", "cut": data[:-1], "flipped": b"\0" + data[1:]}[how])


SPOILS = ("empty", "cut", "flipped", "a folder")


@pytest.mark.parametrize("how", SPOILS)
@pytest.mark.parametrize("which", ["the last", "the one before", "both"])
def test_f5_a_run_with_a_damaged_checkpoint_says_so_and_ends_the_same(tmp_path, whole, how, which):
    out = half_done(tmp_path / "out")
    last = out / "checkpoints" / f"{PACK.name}.pt"
    for path in (last, Path(f"{last}.old")):
        if which == "both" or (which == "the last") == (path == last):
            spoil(path, how)
    said = warnings(visit(out))
    assert sound(out) == whole
    assert ("goes on from pack-0001.pt.old" in said) == (which == "the last")
    assert ("starts anew" in said) == (which == "both")


def test_f5_a_damaged_checkpoint_never_takes_the_place_of_the_good_one_before(tmp_path):
    last = half_done(tmp_path) / "checkpoints" / f"{PACK.name}.pt"
    good, before = last.read_bytes(), Path(f"{last}.old").read_bytes()
    spoil(last, "cut")
    Store(tmp_path).save(PACK, good)
    assert (last.read_bytes(), Path(f"{last}.old").read_bytes()) == (good, before)


@pytest.mark.parametrize("how", SPOILS)
@pytest.mark.parametrize("name", ["sweep.json", f"records/{LANE.name}.json"])
def test_f5_a_damaged_record_or_plan_is_made_again(tmp_path, whole, how, name):
    visit(tmp_path)
    spoil(tmp_path / name, how)
    assert f"{tmp_path / name} " in warnings(visit(tmp_path))
    assert sound(tmp_path) == whole
    kept = tmp_path / f"{name}.damaged-1"
    assert kept.is_dir() if how == "a folder" else kept.is_file()


def test_f5_a_whole_checkpoint_of_something_else_is_not_used(tmp_path, whole):
    for value in ([torch.ones(2)], {"state": 1}, {"settings": {}, "lanes": [], "state": {}}):
        out = half_done(tmp_path / "out")
        (out / f"checkpoints/{PACK.name}.pt").write_bytes(files.seal_tensors(value))
        assert "is of other lanes: not used" in warnings(visit(out))
        assert contents(out) == whole
        shutil.rmtree(out)


def test_f5_a_state_that_could_not_be_read_again_is_not_written():
    for value in (torch.torch_version.TorchVersion("2"), Bomb(Path("crater"))):
        with pytest.raises(TypeError, match="must be tensors and plain data, got "):
            files.seal_tensors({"state": value})
