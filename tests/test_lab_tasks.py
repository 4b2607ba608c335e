"""F11: tasks that disturb their sweep. It ends, says what happened, and loses nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import wngrad.lab

TASK = """
import multiprocessing, os, shutil, threading, time
import torch
from torch import nn
from wngrad import Task

x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
y = x.sum(1, keepdim=True)


def model():
    {does}
    return nn.Linear(3, 1)


task = Task(name="odd", model=model, train=(x, y), test=(x, y), loss=nn.functional.mse_loss,
            epochs=2, batch=8)
"""
FORK = "multiprocessing.get_context('fork').Process(target=time.sleep, args=(3600,)).start()"
THREAD = "threading.Thread(target=time.sleep, args=(3600,)).start()"
STAYS = "os.fork() or (time.sleep(120), os._exit(0))"
FLOOD = "print('x' * (1 << 22), flush=True)"
GOES = "os.makedirs('elsewhere', exist_ok=True); os.chdir('elsewhere')"
HARMLESS = {"process": FORK, "thread": THREAD, "fork": STAYS, "flood": FLOOD, "folder": GOES}
SAID = {"process": "a process that the task had started", "thread": "a thread that the task had"}


def sweep(folder: Path, does: str) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(TASK.format(does=does))
    words = ["sweep", "mine.py", "--lam", "0.1", "--seeds", "1", "--optimizers", "sgd"]
    words += ["--no-defaults"]
    with open(folder / "stdout", "w+") as out, open(folder / "stderr", "w+") as err:
        done = subprocess.run(  # into files: a process that stays would hold a pipe open
            [sys.executable, "-m", "wngrad", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            env={**os.environ, "COLUMNS": "120"},
            timeout=600,
        )
    texts = ((folder / name).read_text() for name in ("stdout", "stderr"))
    return subprocess.CompletedProcess(done.args, done.returncode, *texts)


def check_harmless(folder: Path, names: tuple[str, ...]) -> None:
    done = sweep(folder, "; ".join(HARMLESS[name] for name in names))
    assert done.returncode == 0, done.stderr
    assert (folder / "out/odd/report.html").exists()
    assert len(list((folder / "out/odd/records").glob("*.json"))) == 1
    assert not (folder / "elsewhere/out").exists()
    for name in names:
        assert SAID.get(name, "") in done.stderr
    assert "Traceback" not in done.stderr


def test_the_lab_has_its_tasks_by_name():
    for name in ("Task", "LoaderTask", "FunctionTask", "Trial", "Data", "Sweep"):
        assert name in wngrad.lab.__all__
        assert getattr(wngrad.lab, name) is getattr(wngrad, name, getattr(wngrad.lab, name))


@pytest.mark.integrations
def test_a_task_that_leaves_processes_and_threads_is_swept_and_the_sweep_ends(tmp_path):
    check_harmless(tmp_path, ("flood", "folder", "process", "thread"))


@pytest.mark.faults
@pytest.mark.parametrize("name", HARMLESS)
def test_f11_a_task_that_disturbs_is_swept_all_the_same(tmp_path, name):
    check_harmless(tmp_path, (name,))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("os.closerange(3, 256)", "The training process ended with status 1"),
        ("shutil.rmtree('out', ignore_errors=True)", "could not be written: No such file"),
    ],
    ids=["closes descriptors", "removes the folder"],
)
def test_f11_a_task_that_takes_what_a_sweep_needs_ends_it_in_lines(tmp_path, does, said):
    done = sweep(tmp_path, does)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("before", "said"),
    [
        ("atexit.register(print, 'bye')", "bye"),
        ("atexit.register(1 .__truediv__, 0); atexit.register(print, 'bye')", "bye"),
        (THREAD, "a thread that the task had started"),
        ("print('read', flush=True); sys.stderr.close()", "read"),
    ],
    ids=["registered", "registered, and fails", "thread", "a closed stream"],
)
def test_who_leaves_does_what_was_registered_and_waits_for_no_thread(before, said):
    code = "import atexit, sys, threading, time; from wngrad.lab.run import leftovers\n"
    code += f"{before}\nsys.stdout.write('not flushed. ')\nleftovers.leave(3, print)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3
    assert "not flushed." in done.stdout
    assert said in done.stdout
