"""N9, N10: random sequences over every engine, against an independent step; and under sanitizers.

`sequences.py` says what happens in one. A seed that fails here is run alone by
`python tests/sequences.py ENGINE SEED 1`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import hatch_build  # noqa: E402
from sequences import sequences  # noqa: E402
from wngrad.optim.fused import cpu, eligibility, launch_key  # noqa: E402

HAS_C = not torch.cuda.is_available() and cpu.why_not() is None
needs_c = pytest.mark.skipif(not HAS_C, reason="needs C, no GPU")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_compiler = pytest.mark.skipif(hatch_build.compiler() is None, reason="needs a C compiler")


@pytest.fixture
def triton(monkeypatch):
    """Triton's interpreter in the place of a GPU."""
    pytest.importorskip("triton", minversion="3.4")
    monkeypatch.setattr(eligibility, "_may", lambda p: True)
    for module in (launch_key, eligibility):
        monkeypatch.setattr(module, "runs_native", lambda p, settings: False)
    with np.errstate(all="ignore"):  # NumPy runs the interpreter, over NaN and inf on purpose
        yield


def check(first: int, count: int, fused: bool | None, device: str = "cpu") -> None:
    counts = sequences(first, count, fused, device)
    assert counts["steps"] + counts["refused"] >= 6 * count
    assert counts["refused"] > count
    assert (counts["fused"] > counts["steps"] / 3) == (fused is None)


def test_random_sequences_of_plain_steps_equal_an_independent_one():
    check(0, 60, fused=False)


@needs_c
def test_random_sequences_in_c_equal_an_independent_one(monkeypatch):
    monkeypatch.setattr(launch_key, "interpreted", lambda: False)
    check(0, 60, fused=None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
def test_random_sequences_in_triton_equal_an_independent_one(triton):
    check(0, 8, fused=None)


@needs_cuda
@pytest.mark.gpu
def test_random_sequences_on_cuda_equal_an_independent_one():
    check(0, 30, fused=None, device="cuda")


@needs_cuda
@pytest.mark.gpu
@pytest.mark.faults
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_n9_a_thousand_sequences_on_cuda(first):
    check(first, 250, fused=None, device="cuda")


@pytest.mark.faults
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_n9_ten_thousand_sequences_of_plain_steps(first):
    check(first, 1000, fused=False)


@needs_c
@pytest.mark.faults
@pytest.mark.parametrize("first", range(0, 10_000, 1000))
def test_n9_ten_thousand_sequences_in_c(first, monkeypatch):
    monkeypatch.setattr(launch_key, "interpreted", lambda: False)
    check(first, 1000, fused=None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs no GPU")
@pytest.mark.faults
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_n9_a_thousand_sequences_in_triton(first, triton):
    check(first, 250, fused=None)


@needs_compiler
@pytest.mark.faults
def test_n10_ten_thousand_sequences_under_address_and_undefined_behaviour_sanitizers(tmp_path):
    """The C kernels, instrumented: a read or a write outside a tensor ends the process."""
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1"]
    assert hatch_build.build(tmp_path / "libkernels.so", *flags) is None
    cc = hatch_build.compiler()
    run = {"capture_output": True, "text": True}
    preload = subprocess.run([*cc, "-print-file-name=libasan.so"], **run).stdout.strip()
    sanitizer = {
        "LD_PRELOAD": preload,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
        "TRITON_INTERPRET": "0",
    }
    words = [sys.executable, str(ROOT / "tests/sequences.py"), "c", "0", "10000", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, **sanitizer}, **run)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "'fused'" in done.stdout
