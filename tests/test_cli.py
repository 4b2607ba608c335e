"""The command line: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import wngrad
from experiments.study import study
from experiments.study.__main__ import app as study_app
from wngrad.cli.commands import app
from wngrad.lab.run.environment import environment


def call(*words: str):
    return CliRunner().invoke(app, list(words), env={"COLUMNS": "200"})


@pytest.mark.parametrize("name", ["booth", "rosenbrock", "mccormick", "absolute"])
def test_certify_prints_a_table_and_writes_a_picture(name, tmp_path):
    done = call("certify", name, "--out", str(tmp_path), "--max-steps", "500")
    assert done.exit_code == 0, done.output
    assert "claims held" in done.output
    picture = tmp_path / f"certify-{name}.png"
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_tolerance_of_zero_is_drawn_without_a_line_and_without_a_warning(tmp_path):
    done = call("certify", "booth", "--tol", "0", "--max-steps", "50", "--out", str(tmp_path))
    assert done.exit_code == 0, done.output
    assert "Wrote" in done.output


def test_certify_takes_several_b1(tmp_path):
    done = call(
        "certify", "booth", "--b1", "2", "--b1", "0.5L", "--b1", "L", "--out", str(tmp_path)
    )
    assert done.exit_code == 0
    for text in ("│ 2 ", "│ 0.5L", "│ L "):
        assert text in done.output


def test_certify_takes_a_function_of_yours(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(x):\n    return float(x @ x)\ndef both(x):\n    return x @ x, 2 * x\n")
    for name in ("f", "both"):
        done = call(
            "certify", f"{file}:{name}", "--x0", "3,-4", "--lipschitz", "2", "--f-star", "0",
            "--b1", "gradient", "--b1", "20L", "--out", str(tmp_path),
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        assert "converged" in done.output


def test_a_claim_that_fails_is_printed_and_is_exit_code_one(tmp_path):
    done = call("certify", "booth", "--lipschitz", "1", "--b1", "gradient", "--out", str(tmp_path))
    assert done.exit_code == 1
    assert "the run contradicts" in done.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["certify", "nonsense"], "`problem` must be one of"),
        (["certify", "missing.py:f", "--x0", "1"], "not there"),
        (["certify", "missing.py:f"], "missing.py is not there"),
        (["certify", "wngrad.problems:booth"], "`--x0` must be given"),
        (["certify", "booth", "--b1", "many"], "`--b1` must be a number"),
        (["certify", "booth", "--b1", "-1"], "`b_init` must be a number > 0"),
        (["certify", "booth", "--x0", "1,a"], "`--x0` must be numbers"),
        (["certify", "booth", "--x0", "1,2,3"], "`--x0` must have 2 numbers"),
        (["certify", "rosenbrock", "--b1", "L"], "needs an L"),
        (["certify", "booth", "--tol", "-1"], "`tol` must be >= 0"),
        (["certify", "booth", "--lipschitz", "-1"], "`--lipschitz` must be > 0"),
        (["certify", "booth", "--f-star", "nan"], "`--f-star` must be finite"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(words, message, tmp_path):
    done = call(*words, "--out", str(tmp_path))
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(x: return 1", "cannot be imported: SyntaxError"),
        ("import nothing_of_that_name", "cannot be imported: No module named"),
        ("g = 3", "has no attribute 'f'"),
        ("def f(x):\n    raise KeyError('w')", "raised KeyError"),
        ("def f(x):\n    return (1.0,)", "must return a value, or (value, gradient)"),
        ("def f(x):\n    return 1.0, [1.0, 2.0]", "must return a value, or (value, gradient)"),
    ],
)
def test_a_file_with_an_error_in_it_is_one_line(text, message, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(text)
    done = call("certify", f"{file}:f", "--x0", "1", "--out", str(tmp_path))
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_file_may_import_its_neighbours_and_return_lists(tmp_path):
    (tmp_path / "neighbour.py").write_text("two = 2.0")
    (tmp_path / "mine.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from neighbour import two\n@dataclass\nclass C:\n    a: float = two\n"
        "def f(x):\n    return float(x @ x), [C().a * x[0]]\n"
    )
    words = ["certify", f"{tmp_path}/mine.py:f", "--x0", "1", "--b1", "1"]
    done = call(*words, "--out", str(tmp_path))
    assert done.exit_code == 0, done.output


def test_an_out_that_is_a_file_is_said_before_any_work(tmp_path):
    (tmp_path / "taken").write_text("")
    done = call("certify", "booth", "--out", str(tmp_path / "taken"))
    assert done.exit_code == 2
    assert "`--out` must be a folder" in done.stderr


def test_the_study_writes_records_a_table_and_a_picture(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "MAX_STEPS", 60)
    monkeypatch.setattr(study, "TOL", 1e-1)
    done = CliRunner().invoke(study_app, ["--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "study.json").read_text())["rows"]
    assert len(rows) == study.size()
    table = (tmp_path / "study.md").read_text()
    assert table.count("\n| ") == 1 + 9 * 5
    assert (tmp_path / "study.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", ["study", "tournament"])
def test_a_command_that_became_an_experiment_says_what_to_type_now(name):
    done = call(name, "--out", "anywhere", "--report")
    assert done.exit_code == 2
    assert f"python -m experiments.{name}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_version_is_printed():
    assert call("--version").stdout == f"wngrad {wngrad.__version__}\n"


def test_the_package_is_a_command():
    command = [sys.executable, "-m", "wngrad", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"wngrad {wngrad.__version__}\n"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["certfy"], "certify"),
        (["certify", "boot"], "booth"),
        (["run", "figure1"], "figure-1"),
        (["report", "digit"], "digits"),
        (["swep"], "sweep"),
        (["sweep", "examples/diabetes_task.py", "--optimizers", "wngard"], "wngrad"),
        (["sweep", "examples/diabetes_task.py", "--program", "stackd"], "stacked"),
        (["sweep", "examples/diabetes_task.py:tsak"], "task"),
    ],
)
def test_a_name_that_is_nearly_right_is_answered_with_the_right_one(words, name):
    done = call(*words)
    assert done.exit_code == 2
    assert f"Did you mean '{name}'?" in done.stderr


def test_an_option_or_a_device_that_is_nearly_right_is_answered_alike():
    assert "(Possible options: --workers)" in call("run", "digits", "--worker", "2").stderr
    with pytest.raises(ValueError, match=r"got 'cdua'. Did you mean 'cuda'\?"):
        environment("cdua")
