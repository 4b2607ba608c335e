"""With NumPy alone: what works, and what says which extra to install."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import build_release
import wngrad
from wngrad.install import EXTRA_OF, OLDEST, OldLibraryError, install_hint, naming_the_extra

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
# A Python in which some libraries cannot be imported, whatever is installed.
REFUSE = """
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {libraries}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Refuse())
"""
MAIN = "from wngrad.cli import main; main()"


def without(
    libraries: list[str], code: str, *words: str, cwd: Path | None = None
) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", REFUSE.format(libraries=libraries) + code, *words]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


numpy_alone = partial(without, sorted(EXTRA_OF))


def test_the_core_works():
    """What a release runs in an environment that has nothing but the package and NumPy."""
    done = numpy_alone(build_release.PROBES[""])
    assert done.returncode == 0, done.stderr


def test_every_public_name_is_there_or_names_the_extra():
    code = """
import json, wngrad
said = {}
for name in wngrad.__all__:
    try:
        said[name] = bool(getattr(wngrad, name)) and None
    except ImportError as error:
        said[name] = str(error)
print(json.dumps(said))
"""
    done = numpy_alone(code)
    said = json.loads(done.stdout)
    numpy = {"wngrad.batch", "wngrad.lab.report.sensitivity"}
    for name, home in wngrad._HOMES.items():
        needs_torch = f"wngrad: {name} needs torch: {install_hint('torch')}."
        assert said[name] == (None if home in numpy else needs_torch)


@pytest.mark.parametrize(
    ("module", "library"),
    [
        ("wngrad.optim", "torch"),
        ("wngrad.optim.wnadam", "torch"),
        ("wngrad.transforms", "jax"),
        ("wngrad.integrations.lightning", "lightning"),
        ("wngrad.integrations.transformers", "transformers"),
    ],
)
def test_a_module_that_is_imported_by_its_name_says_the_same(module, library):
    owner = module.removesuffix(".wnadam")
    done = numpy_alone(f"import {module}")
    line = f"wngrad: {owner} needs {library}: {install_hint(EXTRA_OF[library])}."
    assert done.stderr.rstrip().endswith(f"MissingExtraError: {line}")
    assert "During handling" not in done.stderr


@pytest.mark.parametrize("words", [[], ["certify", "booth"], ["example", "plain"], ["--version"]])
def test_the_command_line_says_it_in_one_line(words, tmp_path):
    done = numpy_alone(MAIN, *words, cwd=tmp_path)
    assert done.returncode == 2
    owner = " ".join(["wngrad", *words[:1]])
    assert done.stderr == f"wngrad: `{owner}` needs typer: {install_hint('lab')}.\n"
    assert not any(tmp_path.iterdir())


def test_a_certificate_on_the_command_line_needs_no_torch(tmp_path):
    done = without(["torch", "jax"], MAIN, "certify", "booth", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out/certify-booth.png").is_file()


def test_a_command_that_needs_torch_says_so_in_one_line(tmp_path):
    done = without(["torch"], MAIN, "sweep", "mine.py", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"wngrad: `wngrad sweep` needs torch: {install_hint('torch')}.\n"


def test_the_conformance_kit_says_what_it_needs():
    done = numpy_alone("import wngrad.conformance")
    assert done.stderr.rstrip().endswith("wngrad.conformance needs torch: pip install torch.")


def test_another_library_that_is_missing_is_left_as_it_is():
    with pytest.raises(ModuleNotFoundError) as raised, naming_the_extra("this"):
        import nowhere  # noqa: F401
    assert type(raised.value) is ModuleNotFoundError
    assert str(raised.value) == "No module named 'nowhere'"


def test_a_library_that_is_too_old_is_refused_by_its_version(monkeypatch):
    monkeypatch.setattr("jax.__version__", "0.4.29.dev1+cpu")
    with pytest.raises(OldLibraryError) as raised, naming_the_extra("this", "jax"):
        pass
    told = f"wngrad: this needs jax 0.4.30 or later, found 0.4.29.dev1+cpu: {install_hint('jax')}."
    assert str(raised.value) == told
    for version in ("0.4.30", "0.5.0a1", "0.10.2", "1.0"):
        monkeypatch.setattr("jax.__version__", version)
        with naming_the_extra("this", "jax"):
            pass


def extras() -> dict[str, str]:
    """Every extra, and the text of its requirements."""
    table = PROJECT.split("[project.optional-dependencies]")[1].split("\n[")[0]
    return dict(re.findall(r"^([\w-]+) = (.*)$", table, re.M))


def test_the_extras_bring_what_the_messages_promise():
    named = {"sklearn": "scikit-learn"}
    for library, extra in EXTRA_OF.items():
        assert f'"{named.get(library, library)}>={OLDEST.get(library, "")}' in extras()[extra]


def test_numpy_is_all_that_the_package_needs_by_itself():
    (line,) = re.findall(r"^dependencies = (.*)$", PROJECT, re.M)
    assert re.findall(r'"(\w+)', line) == ["numpy"]


def test_every_library_that_is_imported_comes_with_an_extra():
    """Triton and fsspec come with torch; SciPy is there when `scipy_method` is called, by SciPy."""
    imported = set()
    for file in (ROOT / "src").rglob("*.py"):
        if {"examples", "starters"} & set(file.parts):  # their first lines say what they need
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
    ours = {"wngrad", "numpy", "typing_extensions", "triton", "fsspec", "scipy"}
    assert imported - set(sys.stdlib_module_names) - ours <= set(EXTRA_OF)
