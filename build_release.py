"""Builds the wheel and the sdist, and checks both: `make release` calls it, nothing is uploaded.

The wheel is built from the sdist, so that both are known to be complete. It is installed into an
empty environment, which torch is added to later, and into one more for each extra whose libraries
are small. Other extras are only resolved: pip says what it would install.
"""

from __future__ import annotations

import argparse
import email
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Callable
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).parent
# What must be in each archive, and what must not, by the ends and the beginnings of names.
WHEEL_HAS = (
    "wngrad/py.typed",
    "wngrad/optim/fused/libkernels.so",
    "wngrad/lab/report/page.html",
    "wngrad/lab/sweep/starters/train.py",
    "wngrad/examples/plain.py",
    ".dist-info/licenses/LICENSE",
    ".dist-info/entry_points.txt",
)
SDIST_HAS = ("pyproject.toml", "hatch_build.py", "README.md", "CHANGELOG.md", "CITATION.cff")
SDIST_HAS += ("LICENSE", "src/wngrad/optim/fused/cpu.c", "tests/paper.py")
NOT_IN_WHEEL = re.compile(r"\.c$|\.pyc$|^(tests|experiments|docs)/")
NOT_IN_SDIST = re.compile(r"\.so$|\.pyc$|/\.venv/|/out/")

CORE = """
import wngrad
from wngrad.batch import bounds, minimize_stochastic
from wngrad.problems import ZOO
booth = ZOO["booth"]()
res = wngrad.minimize(booth.f, booth.x0, jac=booth.grad, tol=1e-8)
assert res.success and res.certify(lipschitz=booth.lipschitz, f_star=booth.f_star).holds
"""
STEP = """
import torch, wngrad
p = torch.nn.Parameter(torch.ones(2, 3))
opt = wngrad.WNGrad([p], fused=True)  # raises if the C kernels were not built
p.grad = torch.ones(2, 3)
opt.step()
assert torch.equal(p, torch.full((2, 3), 0.75)), p
"""
WITHOUT_TORCH = """
import wngrad
try:
    wngrad.WNMuon
except ImportError as error:
    assert "WNMuon needs torch: pip install" in str(error) and "[torch]" in str(error), error
else:
    raise AssertionError("torch is installed")
"""
# What runs in the environment of an extra; "" is the package alone.
PROBES = {
    "": CORE,
    "torch": STEP,
    "jax": "import jax.numpy as jnp, wngrad.transforms as w; w.wnmuon().init(jnp.ones((3, 2)))",
    "lab": "import sys; sys.argv[1:] = ['list']; from wngrad.cli import main; main()",
}
NO_TORCH = ("", "jax")  # The others include it.


def disagreements(version: str, changelog: str, citation: str) -> list[str]:
    """What the version, the changelog and the citation say differently, in sentences.

    The newest section of the changelog has this version's number, or is called Unreleased and
    stands above an older one.
    """
    problems = []
    cited = re.search(r"^version: (\S+)$", citation, re.M)
    if not cited or cited[1] != version:
        problems.append(f"CITATION.cff has version {cited and cited[1]}, the package {version}.")
    day = re.search(r"^date-released: (\S+)$", citation, re.M)
    headings = re.findall(r"^## (.+)$", changelog, re.M)
    numbered = [m for m in (re.fullmatch(r"(\d\S*) - (\S+)", h) for h in headings) if m]
    if len(numbered) + ("Unreleased" in headings[:1]) != len(headings):
        problems.append("CHANGELOG.md has a heading other than `X.Y.Z - YYYY-MM-DD`.")
    if numbered and _order(numbered[0][1]) > _order(version):
        problems.append(f"CHANGELOG.md is at {numbered[0][1]}, the package at {version}.")
    if numbered and numbered[0][1] == version and (not day or day[1] != numbered[0][2]):
        problems.append(f"CITATION.cff says {day and day[1]}, CHANGELOG.md {numbered[0][2]}.")
    if "Unreleased" not in headings and (not numbered or numbered[0][1] != version):
        problems.append(f"CHANGELOG.md has no section for {version}.")
    return problems


def before_an_upload(version: str, changelog: str, wheel: str) -> list[str]:
    """What is still to be done by hand."""
    steps = []
    if not re.search(rf"^## {re.escape(version)} - ", changelog, re.M):
        steps.append(f"CHANGELOG.md: call the section Unreleased `{version} - YYYY-MM-DD`.")
    if "-linux_" in wheel:
        steps.append(f"{wheel}: registries want a manylinux tag; `auditwheel repair` sets it.")
    return steps


def missing_and_unwanted(
    names: list[str], wanted: tuple[str, ...], unwanted: re.Pattern[str]
) -> list[str]:
    """What an archive lacks, and what it should not have."""
    missing = [f"lacks {end}" for end in wanted if not any(name.endswith(end) for name in names)]
    return missing + [f"has {name}" for name in names if unwanted.search(name)]


def metadata_problems(metadata: Message, version: str, extras: set[str]) -> list[str]:
    problems = []
    expected = {"Name": "wngrad", "Version": version, "License-Expression": "MIT"}
    expected["Description-Content-Type"] = "text/markdown"
    for key, value in expected.items():
        if metadata[key] != value:
            problems.append(f"{key} is {metadata[key]!r}, not {value!r}")
    if not metadata["Requires-Python"]:
        problems.append("Requires-Python is missing")
    if (given := set(metadata.get_all("Provides-Extra") or ())) != extras:
        problems.append(f"the extras are {sorted(given)}, not {sorted(extras)}")
    if "# " not in str(metadata.get_payload()):
        problems.append("the README is not in it")
    return problems


def version_of(source: str) -> str:
    found = re.search(r'^__version__ = "(.+)"$', source, re.M)
    assert found, "src/wngrad/__init__.py has no version"
    return found[1]


def extras_of(pyproject: str) -> set[str]:
    """The names of the extras. (Python 3.10 has no TOML reader.)"""
    table = pyproject.split("[project.optional-dependencies]")[1].split("\n[")[0]
    return set(re.findall(r"^([\w-]+) = ", table, re.M))


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _run(*words: str | Path, cwd: Path = ROOT) -> None:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*map(str, words)], cwd=cwd, env=env, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        sys.exit(f"release: `{' '.join(map(str, words))[:200]}` failed.")


def build(folder: Path) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    for old in folder.glob("wngrad-*"):
        old.unlink()
    _run(sys.executable, "-m", "build", "--outdir", folder, ".")
    (sdist,), (wheel,) = folder.glob("wngrad-*.tar.gz"), folder.glob("wngrad-*.whl")
    _run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    return sdist, wheel


def check_archives(sdist: Path, wheel: Path, version: str) -> list[str]:
    with tarfile.open(sdist) as archive:
        names = archive.getnames()
    problems = [f"{sdist.name} {p}" for p in missing_and_unwanted(names, SDIST_HAS, NOT_IN_SDIST)]
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        (name,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(packed.read(name))
    found = missing_and_unwanted(names, WHEEL_HAS, NOT_IN_WHEEL)
    found += metadata_problems(metadata, version, extras_of(_read("pyproject.toml")))
    return problems + [f"{wheel.name} {p}" for p in found]


def try_installs(wheel: Path, extras: set[str], say: Callable[[str], None] = print) -> None:
    """Install the wheel alone, add torch, then each extra; run what it promises."""
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch, "base")
        for extra in ["", "torch", *sorted(extras - {"torch"})]:
            if extra not in PROBES:
                _install(base, f"{wheel}[{extra}]", "--dry-run")
                say(f"  [{extra}] can be resolved")
                continue
            home = base if extra in ("", "torch") else Path(scratch, extra)
            if extra != "torch":  # which is installed later than the package
                venv.create(home, with_pip=True)
            if home != base and extra not in NO_TORCH:  # It and pip see torch, which is large.
                (_packages(home) / "base.pth").write_text(f"{_packages(base)}\n")
            _install(home, f"{wheel}[{extra}]" if extra else str(wheel))
            for code in [PROBES[extra], *([WITHOUT_TORCH] if extra in NO_TORCH else [])]:
                _run(home / "bin/python", "-c", code, cwd=Path(scratch))
            say(f"  {f'[{extra}]' if extra else 'alone'}: installed, and runs")


def _install(home: Path, target: str, *options: str) -> None:
    pip = (home / "bin/python", "-m", "pip", "install", "--quiet", *options)
    _run(*pip, target, "-c", ROOT / "constraints.txt")


def _packages(home: Path) -> Path:
    (folder,) = home.glob("lib/python*/site-packages")
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description="Build and check a release; uploads nothing.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the archives go")
    parser.add_argument("--no-install", action="store_true", help="check the archives only")
    options = parser.parse_args()
    version = version_of(_read("src/wngrad/__init__.py"))
    changelog = _read("CHANGELOG.md")
    problems = disagreements(version, changelog, _read("CITATION.cff"))
    sdist, wheel = build(options.out)
    problems += check_archives(sdist, wheel, version)
    if problems:
        sys.exit("release: " + "\n         ".join(problems))
    print(f"{sdist.name} and {wheel.name}: contents and metadata are right.", flush=True)
    if not options.no_install:
        try_installs(wheel, extras_of(_read("pyproject.toml")))
    for step in before_an_upload(version, changelog, wheel.name):
        print(f"Before an upload: {step}")


if __name__ == "__main__":
    main()
