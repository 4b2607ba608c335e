"""`wngrad sweep`, as a user types it, from his file to the report."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from small_lab import wngrad

EXAMPLES = Path(__file__).parents[1] / "examples"
MINE = '''
import torch
from torch import nn
from wngrad import Task

x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Not a Sequential: it cannot be stacked."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(3, 1)

    def forward(self, x):
        return self.inner(x)


def picky(params, lr):
    if lr > 0.05:
        raise ArithmeticError("no such λ")
    return torch.optim.SGD(params, lr=lr)


def ratio(output, target):
    return (output - target).mean() / 0.0 * 0.0


task = Task(
    name="my own: a/b",
    model=Net,
    train=(x, x.sum(1, keepdim=True)),
    test=(x, x.sum(1, keepdim=True)),
    loss=nn.functional.mse_loss,
    metric=ratio,
    metric_name="ratio",
    epochs=2,
    batch=8,
)
'''


def test_the_regression_from_a_file_to_a_report_and_again_with_nothing_to_do(tmp_path: Path):
    words = ["sweep", str(EXAMPLES / "diabetes_task.py"), "--lam", "0.001,0.1,1000"]
    words += ["--seeds", "2", "--optimizers", "sgd,wngrad,torch.optim:RMSprop", "--device", "cpu"]
    done = wngrad(tmp_path, *words, "--epochs", "2")
    assert done.exit_code == 0, done.stderr
    assert "sgd: stacked, 6 of the 14 lanes that train as one program." in done.stdout
    assert "torch.optim:RMSprop: 8 separate runs: it is run as it is" in done.stdout
    # No λ of this grid comes near what RMSprop reaches at its default, which is not on it.
    assert "Lowest test loss: torch.optim:RMSprop, " in done.stdout
    assert "at λ = 0.01, its default. No range of λ is usable." in done.stdout
    out = tmp_path / "out/diabetes"
    files = ("report.html", "figure.png", "figure.svg", "summary.md", "records.jsonl")
    assert all((out / name).exists() for name in files)
    summary = (out / "summary.md").read_text()
    assert "test R² there" in summary
    assert "diabetes; n = 2 seeds, 2 epochs, 22 of 22 lanes" in summary
    records = [json.loads(path.read_text()) for path in (out / "records").glob("*.json")]
    assert len(records) == 22  # of which 4 are of defaults that are not on the grid
    assert all(len(record["curves"]["test_score"]) == 2 for record in records)
    assert all(record["start"]["test_loss"] > 0 for record in records)
    before = {path: path.read_bytes() for path in (out / "records").iterdir()}
    again = wngrad(tmp_path, *words, "--epochs", "2")
    assert again.exit_code == 0, again.stderr
    assert "at once" not in again.stderr
    assert {path: path.read_bytes() for path in (out / "records").iterdir()} == before
    longer = wngrad(tmp_path, *words, "--epochs", "3")
    assert "n = 2 seeds, 3 epochs" in longer.stdout, longer.stderr


def test_the_transformer_with_an_optimizer_of_its_own_file(tmp_path: Path):
    file = EXAMPLES / "tiny_transformer_task.py"
    done = wngrad(
        tmp_path, "sweep", str(file), "--lam", "0.01,0.1", "--seeds", "1", "--epochs", "1",
        "--optimizers", f"wngrad,{file}:clipped_adam", "--out", "here", "--device", "cpu",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "2 separate runs: the model cannot be stacked: it is a Sorter" in done.stdout
    summary = (tmp_path / "here/summary.md").read_text()
    assert "| clipped_adam |" in summary
    assert "test accuracy there" in summary


def test_what_goes_wrong_in_a_run_is_one_line_each_and_harms_no_other_lane(tmp_path: Path):
    (tmp_path / "mine.py").write_text(MINE)
    words = ["sweep", "mine.py", "--lam", "0.01,0.1", "--seeds", "2", "--device", "cpu"]
    done = wngrad(tmp_path, *words, "--optimizers", "sgd,mine.py:picky", "--no-defaults")
    assert done.exit_code == 1, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert any("sgd: 4 separate runs: the model cannot be stacked: it is a Net" in x for x in lines)
    nan = [line for line in lines if "test ratio is not a finite number" in line]
    assert len(nan) == 1
    assert "in 6 of 6 lanes" in nan[0]
    failed = [line for line in lines if "lanes failed" in line]
    assert failed == [
        "2 of 8 lanes failed: mine.py:picky, λ = 0.1, seed 0; mine.py:picky, λ = 0.1, seed 1 "
        "(at line 22 of mine.py: ArithmeticError: no such λ)."
    ]
    found = [json.loads(p.read_text()) for p in (tmp_path / "out/my-own-a-b/records").glob("*")]
    assert sum(record["status"] == "done" for record in found) == 6
    curves = {(r["optimizer"], r["lam"], r["seed"]): r["curves"] for r in found}
    for seed in (0, 1):  # picky is SGD where it runs
        mine, its = curves["mine.py:picky", 0.01, seed], curves["sgd", 0.01, seed]
        assert mine["train_loss"] == its["train_loss"]


def test_a_folder_of_another_version_of_the_task_is_refused(tmp_path: Path):
    (tmp_path / "mine.py").write_text(MINE)
    words = ["sweep", "mine.py", "--lam", "0.01", "--seeds", "1", "--optimizers", "sgd"]
    assert wngrad(tmp_path, *words, "--device", "cpu").exit_code == 0
    (tmp_path / "mine.py").write_text(MINE.replace("mse_loss", "l1_loss"))
    done = wngrad(tmp_path, *words, "--device", "cpu")
    assert done.exit_code == 2
    assert "holds a sweep made under other conditions (source: " in done.stderr


@pytest.mark.integrations
def test_a_sweep_that_is_stopped_says_how_to_go_on_and_goes_on(tmp_path: Path):
    """Real processes; the run waits in its first step until the signal has been sent."""
    text = MINE.replace("    return torch.optim.SGD", GATE + "    return torch.optim.SGD")
    (tmp_path / "mine.py").write_text(text)
    words = ["sweep", "mine.py", "--lam", "0.01", "--seeds", "1", "--optimizers", "mine.py:picky"]
    words += ["--device", "cpu", "--save-every", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "wngrad", *words], cwd=tmp_path, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while process.poll() is None and not (tmp_path / "begun").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    (tmp_path / "gate").touch()
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert "Go on with: wngrad sweep mine.py" in out
    done = wngrad(tmp_path, *words)
    assert done.exit_code == 0, done.stderr
    assert "n = 1 seed, 2 epochs, 1 of 1 lanes" in done.stdout


GATE = """
    import pathlib, time
    pathlib.Path("begun").touch()
    while not pathlib.Path("gate").exists():
        time.sleep(0.01)
"""
