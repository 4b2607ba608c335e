"""What the lab compiles: few programs, the same numbers, and a cache that lasts."""

from __future__ import annotations

import importlib.util
import io
import os
import py_compile
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch._dynamo
from torch._dynamo.testing import CompileCounter

from small_lab import SWEEP, blobs, visit
from wngrad.lab.run import compiling
from wngrad.lab.run.progress import Watch
from wngrad.lab.run.store import Store
from wngrad.lab.train.programs import PROGRAMS, Program
from wngrad.lab.train.programs.base import Fused
from wngrad.lab.train.spec import Kind, Sweep

CASES: list[tuple[str, Kind, tuple[int, ...], int]] = [
    ("mlp", "stacked", (20,), 3),  # between the products; the loss; the step
    ("cnn", "stacked", (3, 16, 16), 10),  # five times between; patches of two, back of one
    ("small_lab:net", "branches", (4,), 3),  # the network in training and in testing; the step
]


def trained(sweep: Sweep, shape: tuple[int, ...]) -> Program:
    program = PROGRAMS[sweep.program](sweep, sweep.cut(sweep.seeds)[0], blobs(shape, 100), "cpu")
    program.advance(2)
    program._test()
    return program


@pytest.mark.parametrize(("model", "kind", "shape", "count"), CASES, ids=lambda v: str(v)[:8])
def test_a_training_step_and_a_test_compile_few_programs(monkeypatch, model, kind, shape, count):
    sweep = replace(
        SWEEP, model=model, program=kind, optimizers=("wngrad",), batch=20, precision="float64",
        lanes_per_pack=None,
    )  # fmt: skip
    # The test set is a whole number of batches, as it is in the paper's data
    plain, counter = trained(sweep, shape), CompileCounter()
    torch._dynamo.reset()
    monkeypatch.setattr(Fused, "compiles", property(lambda self: True))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter))
    compiled = trained(sweep, shape)
    assert counter.frame_count == count
    assert torch.equal(plain.total, compiled.total)
    for mine, other in zip(plain._test(), compiled._test(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=0)


def test_what_is_compiled_is_kept_in_the_users_cache_unless_told_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv(compiling.CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiling.keep_cache()
    assert os.environ[compiling.CACHE] == str(tmp_path / "wngrad" / "compiled")
    monkeypatch.setenv(compiling.CACHE, "elsewhere")
    compiling.keep_cache()
    assert os.environ[compiling.CACHE] == "elsewhere"


def test_bytecode_is_left_where_python_keeps_it(monkeypatch, tmp_path):
    module = _in_place_of_torch(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert compiling.bytecode_kept() == {}  # Python can write it there
    py_compile.compile(module)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert compiling.bytecode_kept() == {}  # and has


def test_where_python_keeps_no_bytecode_a_worker_does(monkeypatch, tmp_path):
    module = _in_place_of_torch(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def imported() -> str:
        words = [sys.executable, "-c", "import some; print(some.x)"]
        env = {**os.environ, **compiling.bytecode_kept(), "PYTHONPATH": str(module.parents[1])}
        return subprocess.check_output(words, env=env, text=True)

    assert imported() == "1\n"
    kept = (tmp_path / "cache" / "wngrad" / "bytecode").rglob("some/__init__.*.pyc")
    assert len(list(kept)) == 1
    assert not (module.parent / "__pycache__").exists()

    # Of the same size and time, so Python would take the old bytecode; but installed anew
    times = (module.stat().st_atime_ns, module.stat().st_mtime_ns)
    module.write_text("x = 2\n")
    os.utime(module, ns=times)
    assert imported() == "1\n"
    (module.parents[1] / "other").mkdir()
    assert imported() == "2\n"


def test_bytecode_is_kept_elsewhere_where_python_may_not_write(monkeypatch, tmp_path):
    _in_place_of_torch(monkeypatch, tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "PYTHONPYCACHEPREFIX" in compiling.bytecode_kept()


def _in_place_of_torch(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Path:
    """A package in a folder, which is taken for torch."""
    module = folder / "installed" / "some" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text("x = 1\n")
    spec = importlib.util.spec_from_file_location("some", module)
    monkeypatch.setattr(compiling, "find_spec", {"torch": spec}.get)
    return module


@pytest.mark.parametrize(
    ("device", "kind", "count"),
    [("cuda", "stacked", 1), ("cpu", "stacked", 0), ("cuda", "loop", 0)],
)
def test_the_compiler_is_loaded_beside_the_data_and_no_thread_stays(
    monkeypatch, device, kind, count
):
    loaded, before = [], threading.active_count()
    monkeypatch.setattr(compiling, "_load", loaded.append)
    with compiling.compiler_loading(replace(SWEEP, program=kind), device):
        pass
    assert (loaded, threading.active_count()) == ([device] * count, before)


def test_the_time_to_start_and_that_of_training_are_told_apart(tmp_path):
    events = [event for event in visit(tmp_path) if event["kind"] == "spent"]
    assert len(events) == 1
    assert set(events[0]) == {"kind", "pack", "start", "training"}
    assert events[0]["start"] > 0
    assert Store(tmp_path).sessions()[0]["start_seconds"] == events[0]["start"]
    watch = Watch("small", io.StringIO())
    for event in (
        {"kind": "plan", "lanes": 2, "epochs": 2},
        {"kind": "spent", "pack": "a", "start": 1.25, "training": 7.0},
        {"kind": "spent", "pack": "b", "start": 0.25, "training": 0.5},
    ):
        watch(event)
    assert watch.times() == "1.5 s to start, 7.5 s of training"
