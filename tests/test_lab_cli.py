"""The lab's commands, as a user types them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wngrad.cli import app

SWEEP = """
from wngrad.lab.train.spec import Sweep
TINY = Sweep(
    name="tiny", claim="It runs.", dataset="digits", model="mlp", optimizers=("sgd", "wngrad"),
    lam=(0.1, 1e9), epochs=2, seeds=(0, 1),
)
"""


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "sweeps.py").write_text(SWEEP)
    return tmp_path


def wngrad(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """A real process: the worker it starts must not see pytest."""
    command = [sys.executable, "-c", "from wngrad.cli import main; main()", *words]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "WNGRAD_DATA": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_run_trains_report_tells_and_a_second_run_has_nothing_to_do(here: Path) -> None:
    first = wngrad(here, "run", "sweeps:TINY", "--epochs", "1")
    assert first.returncode == 0, first.stderr
    assert "8 lanes, 1 epochs" in first.stderr
    assert "1.0/1 epochs" in first.stdout
    assert len(list((here / "out/tiny/records").glob("*.json"))) == 8
    told = wngrad(here, "report", "sweeps:TINY")
    assert told.returncode == 0, told.stderr
    assert (here / "out/tiny/report.html").exists()
    assert "All numbers are at epoch 1" in (here / "out/tiny/summary.md").read_text()
    longer = wngrad(here, "run", "sweeps:TINY")
    assert longer.returncode == 0, longer.stderr
    assert "diverged" in longer.stdout
    again = wngrad(here, "run", "sweeps:TINY")
    assert "8 lanes at once" not in again.stderr
    assert "2.0/2 epochs" in again.stdout


def test_a_report_can_be_made_from_the_file_of_another(here: Path) -> None:
    wngrad(here, "run", "sweeps:TINY", "--epochs", "1", "--seeds", "1")
    wngrad(here, "report", "sweeps:TINY")
    file = here / "out/tiny/records.jsonl"
    done = wngrad(here, "report", "sweeps:TINY", "--records", str(file), "--out", "elsewhere")
    assert done.returncode == 0, done.stderr
    assert (here / "elsewhere/summary.md").read_text() == (here / "out/tiny/summary.md").read_text()
    file.write_bytes(file.read_bytes().replace(b"0.1", b"0.2", 1))
    bad = wngrad(here, "report", "sweeps:TINY", "--records", str(file))
    assert bad.returncode == 2
    assert "records.jsonl, line 1 does not match its checksum" in bad.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "nothing"), "`recipe` must be one of figure-1, figure-2, figure-3, digits"),
        (("run", "no.such:SWEEP"), "cannot be imported"),
        (("run", "sweeps:Sweep"), "`recipe` must be one of"),
        (("run", "figure-1", "--data", "nowhere"), "nowhere"),
        (("run", "digits", "--device", "tpu"), "device"),
        (("run", "digits", "--device", "cuda"), "CUDA"),
        (("run", "digits", "--epochs", "0"), "epochs"),
        (("run", "digits", "--out", "sweeps.py"), "`--out` must be a folder"),
        (("report", "digits"), "must hold a lane of the sweep"),
        (("report", "digits", "--records", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(here: Path, words, said: str) -> None:
    done = wngrad(here, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_list_shows_every_recipe_with_its_claim_and_cost() -> None:
    done = CliRunner().invoke(app, ["list"], env={"COLUMNS": "200"})
    assert done.exit_code == 0
    for text in ("figure-1", "figure-2", "figure-3", "digits", "200 × 30 epochs", "H200"):
        assert text in done.output
