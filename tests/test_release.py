"""A release: what must agree, what the archives must hold, and that CI runs what we say it runs."""

from __future__ import annotations

import re
from email.message import Message
from pathlib import Path

import pytest

import build_release as release

ROOT = Path(__file__).parents[1]


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def test_version_changelog_and_citation_agree():
    import wngrad

    assert release.version_of(read("src/wngrad/__init__.py")) == wngrad.__version__
    texts = read("CHANGELOG.md"), read("CITATION.cff")
    assert release.disagreements(wngrad.__version__, *texts) == []


CITATION = "version: 0.2.0\ndate-released: 2027-01-02\n"


@pytest.mark.parametrize(
    ("changelog", "says"),
    [
        ("## Unreleased\n## 0.3.0 - 2027-02-02\n", "is at 0.3.0, the package at 0.2.0"),
        ("## 0.2.0 - 2027-01-03\n", "CITATION.cff says 2027-01-02, CHANGELOG.md 2027-01-03"),
        ("## 0.1.0 - 2026-11-15\n", "no section for 0.2.0"),
        ("## Version 0.2.0\n## Unreleased\n", "a heading other than"),
    ],
)
def test_a_disagreement_is_told(changelog, says):
    (problem, *_) = release.disagreements("0.2.0", changelog, CITATION)
    assert says in problem


@pytest.mark.parametrize(
    "changelog",
    ["## Unreleased\n", "## Unreleased\n## 0.1.0 - 2026-11-15\n", "## 0.2.0 - 2027-01-02\n"],
)
def test_a_changelog_that_is_ahead_or_at_the_version_agrees(changelog):
    assert release.disagreements("0.2.0", changelog, CITATION) == []
    assert (
        "CITATION.cff has version 0.2.0" in release.disagreements("0.2.1", changelog, CITATION)[0]
    )


def test_what_is_left_to_do_by_hand_is_told():
    left = release.before_an_upload(
        "0.2.0", "## Unreleased\n", "wngrad-0.2.0-py3-none-linux_x86_64.whl"
    )
    assert [word in step for word, step in zip(("Unreleased", "manylinux"), left, strict=True)]
    tagged = "wngrad-0.2.0-py3-none-manylinux_2_17_x86_64.whl"
    assert release.before_an_upload("0.2.0", "## 0.2.0 - 2027-01-02\n", tagged) == []


def test_an_archive_that_lacks_a_file_or_has_one_too_many_is_told():
    wanted, unwanted = release.WHEEL_HAS, release.NOT_IN_WHEEL
    names = [f"wngrad-0.2.0{end}" if end.startswith(".") else end for end in wanted]
    assert release.missing_and_unwanted(names, wanted, unwanted) == []
    wrong = [*names[1:], "wngrad/optim/fused/cpu.c"]
    assert release.missing_and_unwanted(wrong, wanted, unwanted) == [
        "lacks wngrad/py.typed",
        "has wngrad/optim/fused/cpu.c",
    ]


def test_metadata_that_is_wrong_is_told():
    metadata = Message()
    for key, value in [
        ("Name", "wngrad"),
        ("Version", "0.2.0"),
        ("License-Expression", "MIT"),
        ("Description-Content-Type", "text/markdown"),
        ("Requires-Python", ">=3.10"),
        ("Provides-Extra", "lab"),
    ]:
        metadata[key] = value
    metadata.set_payload("# wngrad")
    assert release.metadata_problems(metadata, "0.2.0", {"lab"}) == []
    assert len(release.metadata_problems(metadata, "0.2.1", {"lab", "jax"})) == 2


def test_every_extra_that_is_tried_exists():
    extras = release.extras_of(read("pyproject.toml"))
    assert {"torch", "jax", "lab", "dev", "ray"} <= extras
    assert set(release.PROBES) - {""} <= extras


@pytest.mark.parametrize("extra", ["", "torch", "jax"])
def test_a_release_runs_what_the_package_promises(extra):
    exec(release.PROBES[extra], {})


def test_the_sdist_has_no_library_that_was_built_here():
    """A hook of all targets would put it there, whatever `exclude` says."""
    assert "[tool.hatch.build.targets.wheel.hooks.custom]" in read("pyproject.toml")
    assert "[tool.hatch.build.hooks" not in read("pyproject.toml")


def test_the_workflows_run_what_we_run():
    yaml = pytest.importorskip("yaml")
    check = yaml.safe_load(read(".github/workflows/check.yml"))
    commands = [step.get("run") for job in check["jobs"].values() for step in job["steps"]]
    assert {".ci/run", "make release"} <= set(commands)
    gpu = read(".github/workflows/gpu.yml")
    assert gpu.startswith("# NEVER RUN YET")
    assert yaml.safe_load(gpu)["jobs"]["gpu"]["steps"][-1] == {"run": "make test-gpu"}
    targets = re.findall(r"^([\w-]+):", read("Makefile"), re.M)
    assert {"release", "test-gpu"} <= set(targets)


def test_the_hooks_before_a_commit_are_the_tools_of_make_check():
    yaml = pytest.importorskip("yaml")
    (repo,) = yaml.safe_load(read(".pre-commit-config.yaml"))["repos"]
    check = read("Makefile").split("\ncheck:")[1].split("\n\n")[0]
    for hook in repo["hooks"]:
        tool = hook["entry"].removeprefix(".venv/bin/python ")
        assert f"$(RUN) {tool}" in check
