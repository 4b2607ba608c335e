"""The examples that take longer, each in processes of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from test_examples import call, numbers

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize(
    ("name", "words", "first", "last"),
    [("fsdp", TORCHRUN, 1.2, 0.5), ("transformer", [], 4.0, 2.3), ("jax", [], 1.0, 0.1)],
)
def test_an_example_runs_and_its_loss_falls(name, words, first, last, tmp_path):
    path = tmp_path / "example.py"
    assert call(name, "--out", str(path)).exit_code == 0
    command = [sys.executable, *words, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-6000:]
    losses = numbers(done.stdout, "loss")
    assert losses[0] > first
    assert losses[-1] < last
