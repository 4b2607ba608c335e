"""Three trainings of users' own, as docs/sweep.md prints them, in real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from small_lab import contents
from test_docs import KINDS, ROOT, blocks

FILES = {
    match[1]: code
    for code in blocks(ROOT / "docs/sweep.md", *KINDS)
    if (match := re.match(r"# file: (\w+\.py)\n", code))
}
ENVIRONMENT = {**os.environ, "WNGRAD_COMMIT": "test", "OMP_NUM_THREADS": "1"}


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "wngrad", *words], cwd=folder, text=True, env=ENVIRONMENT,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def wngrad(folder: Path, *words: str) -> str:
    process = start(folder, *words)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (out / "records").glob("*.json")]


def test_the_page_prints_three_cases():
    assert FILES.keys() == {"digits_loaders.py", "gpt2_task.py", "own_training.py"}


@pytest.mark.parametrize(
    ("file", "lam"),
    [
        ("digits_loaders.py", "0.01,0.1"),
        ("gpt2_task.py", "0.01,1"),
        ("own_training.py", "0.01,0.1"),
    ],
)
def test_a_case_runs_as_it_is_printed(file, lam, tmp_path):
    (tmp_path / file).write_text(FILES[file])
    words = ["--lam", lam, "--seeds", "1", "--epochs", "2", "--workers", "2", "--device", "cpu"]
    printed = wngrad(tmp_path, "sweep", file, *words, "--optimizers", "adamw,wnmuon")
    assert "Most usable decades" in printed
    (out,) = (tmp_path / "out").iterdir()
    assert {record["status"] for record in records(out)} == {"done"}
    assert len(records(out)) == 6  # and each at its default
    page = (out / "report.html").read_bytes()
    wngrad(tmp_path, "report", str(out))
    assert (out / "report.html").read_bytes() == page


@pytest.mark.parametrize("file", ["digits_loaders.py", "gpt2_task.py", "own_training.py"])
def test_a_case_that_is_killed_and_goes_on_leaves_what_it_would_have_left(file, tmp_path):
    """With worker processes that augment, with dropout and with a schedule; byte for byte."""
    (tmp_path / file).write_text(FILES[file])
    words = ["sweep", file, "--lam", "0.1", "--seeds", "1", "--optimizers", "wnmuon"]
    words += ["--no-defaults", "--device", "cpu", "--save-every", "0"]
    wngrad(tmp_path, *words, "--out", "whole")
    process = start(tmp_path, *words, "--out", "stopped")
    saved = tmp_path / "stopped/checkpoints/pack-0001.pt"
    while process.poll() is None and not saved.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate()
    wngrad(tmp_path, *words, "--out", "stopped")

    def kept(name: str) -> dict[str, bytes]:
        """Records and checkpoints; a page also shows times, and the command."""
        every = contents(tmp_path / name)
        return {k: v for k, v in every.items() if k.startswith(("records/", "checkpoints/"))}

    assert kept("stopped") == kept("whole")


@pytest.mark.parametrize("kind", ["tensors", "loaders", "train"])
def test_a_file_to_start_from_becomes_a_picture(kind, tmp_path):
    wngrad(tmp_path, "sweep", "--init", kind)
    words = ["--seeds", "1", "--lam", "0.01,0.1,1", "--workers", "2", "--device", "cpu"]
    wngrad(tmp_path, "sweep", f"my_{kind}.py", *words)
    (out,) = (tmp_path / "out").iterdir()
    assert (out / "figure.png").stat().st_size > 10_000


HANGS = """
import os, time


def train(trial):
    trial.report(1, loss=1.0)
    if trial.lam == 0.1:
        time.sleep(600)
    if trial.lam == 0.2:
        os.kill(os.getpid(), 9)
    trial.report(2, loss=0.5)
"""


def test_a_run_that_hangs_or_is_killed_fails_alone(tmp_path):
    (tmp_path / "mine.py").write_text(HANGS)
    words = ["sweep", "mine.py", "--lam", "0.01,0.1,0.2,1", "--seeds", "1", "--no-defaults"]
    words += ["--optimizers", "sgd", "--patience", "8", "--workers", "2", "--device", "cpu"]
    process = start(tmp_path, *words)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    ends = {r["lam"]: (r["status"], r["reason"]) for r in records(tmp_path / "out/mine")}
    assert ends[0.01] == ends[1.0] == ("done", "")
    assert ends[0.1] == ("failed", "its process said nothing for 8 s")
    assert "was killed" in ends[0.2][1]
