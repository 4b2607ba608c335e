"""The docs are run: every Python block, every command, every link to a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_python_on_a_page_runs_from_top_to_bottom(page, capsys):
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)
        printed = capsys.readouterr().out
        shown = re.findall(r"^# (.*)$", block, re.M)  # what a block says it prints
        if "print(" in block and shown:
            assert printed.rstrip("\n").split("\n") == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_file_a_page_links_to_is_there(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_make_target_the_pages_name_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {name for page in PAGES for name in re.findall(r"\bmake ([\w-]+)", page.read_text())}
    assert named <= targets


def test_the_versions_agree():
    import wngrad

    assert f"version: {wngrad.__version__}\n" in (ROOT / "CITATION.cff").read_text()
