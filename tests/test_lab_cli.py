"""The lab's commands, as a user types them: once as real processes, and else in this one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from small_lab import SWEEP as SMALL
from small_lab import contents, session, wngrad

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


def test_run_trains_report_tells_and_a_second_run_has_nothing_to_do(here: Path) -> None:
    words = ["run", "sweeps:TINY", "--lanes", "4", "--workers", "2"]
    first = subprocess.run(
        [sys.executable, "-m", "wngrad", *words, "--epochs", "1"],
        cwd=here,
        env={**os.environ, "PYTHONPATH": str(here), "WNGRAD_DATA": ""},
        capture_output=True,
        text=True,
    )
    assert first.returncode == 0, first.stderr
    assert "8 lanes, 1 epoch\n" in first.stderr
    assert "pack-0002: 4 lanes at once" in first.stderr
    assert "1.0/1 epochs" in first.stdout
    assert len(list((here / "out/tiny/records").glob("*.json"))) == 8
    report = wngrad(here, "report", "sweeps:TINY")
    assert report.exit_code == 0, report.stderr
    assert (here / "out/tiny/report.html").exists()
    assert "All numbers are at epoch 1" in (here / "out/tiny/summary.md").read_text()
    longer = wngrad(here, *words)
    assert longer.exit_code == 0, longer.stderr
    assert "diverged" in longer.stdout
    again = wngrad(here, *words)
    assert "4 lanes at once" not in again.stderr
    assert "2.0/2 epochs" in again.stdout


def test_a_report_can_be_made_from_the_file_of_another(here: Path) -> None:
    assert wngrad(here, "run", "sweeps:TINY", "--epochs", "1", "--seeds", "1").exit_code == 0
    wngrad(here, "report", "sweeps:TINY")
    file = here / "out/tiny/records.jsonl"
    done = wngrad(here, "report", "sweeps:TINY", "--records", str(file), "--out", "elsewhere")
    assert done.exit_code == 0, done.stderr
    assert (here / "elsewhere/summary.md").read_text() == (here / "out/tiny/summary.md").read_text()
    file.write_bytes(file.read_bytes().replace(b"0.1", b"0.2", 1))
    bad = wngrad(here, "report", "sweeps:TINY", "--records", str(file))
    assert bad.exit_code == 2
    assert "records.jsonl, line 1 does not match its checksum" in bad.stderr


def test_more_workers_than_packs_are_told_how_to_have_work(here: Path) -> None:
    done = wngrad(here, "run", "sweeps:TINY", "--epochs", "1", "--workers", "3")
    assert done.exit_code == 0, done.stderr
    assert "wngrad: 1 of 3 workers have a pack to train; --lanes cuts smaller ones." in done.stderr


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
        (("run", "digits", "--workers", "0"), "workers"),
        (("run", "digits", "--workers", "2", "--ray", "auto"), "`--workers` must be left out with"),
        (("run", "digits", "--out", "sweeps.py"), "`--out` must be a folder"),
        (("report", "digits"), "must hold a lane of the sweep"),
        (("report", "digits", "--records", "nowhere.jsonl"), "nowhere.jsonl"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(here: Path, words, said: str) -> None:
    done = wngrad(here, *words)
    assert done.exit_code == 2, done.stdout + done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_list_shows_every_recipe_with_its_claim_its_cost_and_what_is_reproduced(here: Path) -> None:
    done = wngrad(here, "list")
    assert done.exit_code == 0
    for text in ("figure-1", "figure-2", "figure-3", "digits", "200 × 30 epochs", "H200", "whole"):
        assert text in done.output


PIECES = """
from dataclasses import replace
from small_lab import SWEEP
PIECES = replace(SWEEP, claim="It can be cut.")  # four packs
"""


def test_a_run_cut_in_pieces_is_one_run_to_the_byte(here: Path) -> None:
    (here / "pieces.py").write_text(PIECES)
    whole = wngrad(here, "run", "pieces:PIECES", "--out", "whole")
    assert whole.exit_code == 0, whole.stderr
    words = ("run", "pieces:PIECES", "--out", "parts", "--packs", "3")
    first = wngrad(here, *words)
    assert first.exit_code == 0, first.stderr
    assert len(list((here / "parts/records").glob("*.json"))) == 6
    assert "1 pack is left. Go on with: wngrad run pieces:PIECES --out parts --packs 3" in (
        first.stdout
    )
    assert "2 of 8 lanes have not been run" in (here / "parts/summary.md").read_text()
    shutil.rmtree(here / "parts/checkpoints")  # as on a machine that was given the records alone
    second = wngrad(here, *words)
    assert "Go on with" not in second.stdout
    assert wngrad(here, "report", "pieces:PIECES", "--out", "whole").exit_code == 0
    made, cut = (contents(here / name) for name in ("whole", "parts"))
    # Only what is new has a checkpoint; a layout of matplotlib's may differ by a millionth.
    pairs = [(made[name], cut[name]) for name in made if not name.startswith(("check", "figure"))]
    assert len(pairs) == 8 + 4  # records, and the plan, the page, the summary, the export
    assert all(one == other for one, other in pairs)


def test_a_pack_that_failed_does_not_stand_before_the_others(tmp_path: Path) -> None:
    visitor, _ = session(tmp_path, SMALL)
    first, *others = [pack.name for pack in visitor.open()]
    visitor.run_pack(first, failed="out of memory")
    assert [pack.name for pack in visitor.open()] == [*others, first]
