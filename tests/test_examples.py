"""The examples of `wngrad example`: written by the command, short, and run as they are."""

from __future__ import annotations

import re
import runpy

import pytest
from typer.testing import CliRunner

from test_docs import ROOT
from wngrad.cli.commands import app
from wngrad.cli.example import EXAMPLES, text_of


def call(*words):
    return CliRunner().invoke(app, ["example", *words], env={"COLUMNS": "200"})


def numbers(text, before):
    """The numbers that follow a word."""
    return [float(x) for x in re.findall(rf"{before} ([\d.e-]+)", text)]


# What each must print to have learned anything.
LEARNED = {
    "plain": lambda out: numbers(out, "accuracy")[0] > 0.95,
    "images": lambda out: numbers(out, "accuracy")[0] > 0.95,
    "lora": lambda out: numbers(out, "first,")[0] < 0.01 < 0.1 < numbers(out, "loss")[1],
    "certificate": lambda out: (
        out.startswith("The tolerance was reached.") and out.rstrip().endswith("all claims hold")
    ),
}


@pytest.mark.parametrize("name", LEARNED)
def test_an_example_runs_and_learns(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert call(name).exit_code == 0
    runpy.run_path(f"my_{name}.py", run_name="__main__")
    assert LEARNED[name](capsys.readouterr().out)


def test_every_other_example_is_run_elsewhere():
    """By tests/integrations/test_example_programs.py, and by test_sweep_own.py."""
    assert set(EXAMPLES) - set(LEARNED) == {"fsdp", "transformer", "jax", "sweep"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_short_and_says_how_to_run_it(name, tmp_path):
    assert len(text_of(name).splitlines()) < 60
    done = call(name, "--out", str(tmp_path / "a.py"))
    command = f"{EXAMPLES[name][2]} {tmp_path / 'a.py'}"
    assert command in done.output.replace("\n", "")
    assert command in (tmp_path / "a.py").read_text()


def test_the_list_and_the_docs_have_every_example():
    listed, page = call().output, (ROOT / "docs/getting-started.md").read_text()
    for name, (words, _, command) in EXAMPLES.items():
        assert re.search(rf"wngrad example {name} +{re.escape(words)}", listed)
        assert f"| `{name}` | {words} | `{command} my_{name}.py` |" in page


def test_a_file_is_never_overwritten_and_a_name_is_suggested(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("mine")
    done = call("plain", "--out", str(path))
    assert (done.exit_code, path.read_text()) == (2, "mine")
    assert "is there already" in done.output
    done = call("lorra")
    assert done.exit_code == 2
    assert "'lora'" in done.output or "`lora`" in done.output
