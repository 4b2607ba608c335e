"""The C kernels are built with the package; no step starts a process."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
import hatch_build  # noqa: E402
from wngrad import WNGrad  # noqa: E402
from wngrad.optim.fused import launch_key, library  # noqa: E402

needs_compiler = pytest.mark.skipif(hatch_build.compiler() is None, reason="needs a C compiler")


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where the library is loaded from; nothing is there yet."""
    monkeypatch.setattr(library, "_FOLDER", tmp_path)
    monkeypatch.delenv("WNGRAD_NATIVE", raising=False)
    library.cpu.cache_clear()
    yield tmp_path
    library.cpu.cache_clear()


def reason():
    """Why a step is plain, after it was taken all the same."""
    p = nn.Parameter(torch.ones(2, 3))
    opt = WNGrad([p])
    p.grad = torch.ones(2, 3)
    opt.step()
    assert torch.equal(p, torch.full((2, 3), 0.75))  # 1 − 1/(1 + 3)
    return opt.why_plain().get(p)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The library, built once, and in a hurry."""
    path = tmp_path_factory.mktemp("build") / "libkernels.so"
    assert hatch_build.build(path, "-O0") is None
    return path


def use(made, folder):
    shutil.copy(made, folder)
    library.cpu.cache_clear()


@needs_compiler
def test_what_is_built_is_loaded_and_steps(made, folder):
    use(made, folder)
    assert reason() is None


def test_without_the_library_the_plain_path_steps_and_says_why(folder, monkeypatch):
    assert reason() == "wngrad was built without its C kernels: there was no C compiler"
    monkeypatch.setattr(launch_key, "interpreted", lambda: False)  # Triton, as the tests have it
    with pytest.raises(ValueError, match=r"`fused` is True.*built without its C kernels"):
        WNGrad([nn.Parameter(torch.ones(2, 3))], fused=True)
    monkeypatch.setenv("WNGRAD_NATIVE", "0")
    library.cpu.cache_clear()
    assert reason() == "WNGRAD_NATIVE is 0"


def test_a_library_that_cannot_be_loaded_is_no_crash(folder):
    for content in (b"", b"\x7fELF", bytes(4096)):
        (folder / "libkernels.so").write_bytes(content)
        library.cpu.cache_clear()
        assert reason().startswith("its C kernels cannot be loaded (")


@needs_compiler
def test_a_library_of_other_sources_or_other_records_is_not_used(made, folder, monkeypatch):
    use(made, folder)
    for name in library._SOURCES:
        (folder / name).write_text("another")
    library.cpu.cache_clear()
    assert reason() == "its C kernels are of another version: install wngrad again"
    for name in library._SOURCES:
        (folder / name).unlink()
    monkeypatch.setattr(library, "C_RECORDS", library.C_RECORDS[::-1])
    library.cpu.cache_clear()
    assert reason() == "its C kernels are of another version: install wngrad again"


@needs_compiler
def test_without_openmp_one_thread_steps(made, folder, monkeypatch):
    use(made, folder)
    monkeypatch.setattr(library, "parallel", lambda: 0)
    p, q = (nn.Parameter(torch.ones(300, 300)) for _ in "pq")
    for x, fused in ((p, None), (q, False)):
        x.grad = torch.ones_like(x)
        WNGrad([x], fused=fused).step()
    assert torch.equal(p, q)


def test_the_build_says_what_went_wrong(tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "/nowhere/cc")
    assert hatch_build.build(tmp_path / "x.so") == "there was no C compiler (cc)"
    fails = tmp_path / "cc"
    fails.write_text("#!/bin/sh\necho 'no luck today' >&2; exit 1\n")
    fails.chmod(0o700)
    monkeypatch.setenv("CC", f"{fails} -m64")  # it may be several words
    assert "no luck today" in hatch_build.build(tmp_path / "x.so")
    assert not (tmp_path / "x.so").exists()


def test_an_installed_package_starts_no_process_for_a_step(monkeypatch):
    """Neither a compiler nor a shell, whatever the environment says."""

    def forbidden(*_, **__):
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", forbidden)
    monkeypatch.setenv("CC", "/nowhere/cc")
    library.cpu.cache_clear()
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        p = nn.Parameter(torch.ones(4, 3, dtype=dtype))
        opt = WNGrad([p])
        for _ in range(2):
            p.grad = torch.ones_like(p)
            opt.step()


@needs_compiler
@pytest.mark.faults
@pytest.mark.parametrize("sanitizer", ["undefined"])
def test_the_kernels_under_a_sanitizer(sanitizer, tmp_path):
    """The battery of test_engines again, with a library that stops at what C leaves undefined."""
    flags = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all", "-g"]
    assert hatch_build.build(tmp_path / "libkernels.so", *flags) is None
    ctypes.CDLL(str(tmp_path / "libkernels.so"))
    code = (
        "import sys, pathlib; from wngrad.optim.fused import library; "
        f"library._FOLDER = pathlib.Path({str(tmp_path)!r}); "
        "import pytest; sys.exit(pytest.main(['-q', '-k', 'c and not triton', "
        f"{str(ROOT / 'tests/test_engines.py')!r}, '-m', 'not faults']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
