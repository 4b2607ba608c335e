"""The docs are run: every Python block, every command, every link to a file."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


# The second kind needs libraries that only `make test-integrations` installs; it runs both.
KINDS = ("python", "python integrations")


def blocks(page: Path, *kinds: str) -> list[str]:
    fenced = re.findall(r"^```([^\n]*)\n(.*?)^```$", page.read_text(), re.S | re.M)
    return [code for kind, code in fenced if kind in kinds]


def run_blocks(page: Path, *kinds: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From top to bottom, in one namespace; what is said to be a file is written, too."""
    names: dict[str, object] = {"__name__": "page"}
    for block in blocks(page, *kinds):
        if file := re.match(r"# file: (\w+\.py)\n", block):
            Path(file[1]).write_text(block)
        exec(compile(block, str(page), "exec", dont_inherit=True), names)
        printed = capsys.readouterr().out
        shown = re.findall(r"^# (.*)$", block, re.M)  # what a block says it prints, at its end
        if "print(" in block and shown:
            assert printed.rstrip("\n").split("\n") == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_the_python_on_a_page_runs_from_top_to_bottom(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(page, "python", capsys=capsys)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_block_of_python_is_of_a_kind_that_is_run(page):
    fences = re.findall(r"^ *[`~]{3,} *(py.*)$", page.read_text(), re.M | re.I)
    assert set(fences) <= set(KINDS)
    assert len(fences) == len(blocks(page, *KINDS))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_file_a_page_links_to_is_there(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_name_on_the_paper_map_exists():
    """Functions by their dotted names, tests by file and name."""
    text = "".join((ROOT / "docs" / page).read_text() for page in ("paper-map.md", "faults.md"))
    names = re.findall(r"`(wngrad(?:\.\w+)+)`", text)
    tests = re.findall(r"`(tests/\w+\.py)::(\w+)`", text)
    assert len(names) > 30
    assert len(tests) > 25
    for name in names:
        assert resolve(name) is not None, name
    for file, test in tests:
        assert f"def {test}(" in (ROOT / file).read_text(), test


def resolve(name: str) -> object:
    found: object = importlib.import_module("wngrad")
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            importlib.import_module(f"{found.__name__}.{part}")
        found = getattr(found, part)
    return found


def test_every_make_target_the_pages_name_exists():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {
        name
        for page in PAGES
        for name in re.findall(r"(?:^|`)make ([\w-]+)", page.read_text(), re.M)
    }
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_a_page_installs_the_package_as_it_can_be_installed_now(page):
    """`wngrad.install` says how; a release changes it, and this names the lines to follow."""
    from wngrad.install import install_command

    for command, extras in re.findall(r"(pip install '[\w.]+\[([\w,]+)\]')", page.read_text()):
        assert command == install_command(*extras.split(","))


@pytest.mark.parametrize("page", ["README.md", "docs/getting-started.md"])
def test_a_page_clones_from_where_the_package_says(page):
    from wngrad.install import REPOSITORY

    assert f"\ngit clone {REPOSITORY} wngrad\n" in (ROOT / page).read_text()


def test_a_release_changes_what_every_message_says(monkeypatch):
    from wngrad import install

    assert install.install_hint("lab").startswith("pip install '.[lab]' in a clone, or 'FILE.whl")
    monkeypatch.setattr(install, "RELEASED", True)
    assert install.install_hint("lab", "ray") == "pip install 'wngrad[lab,ray]'"


def test_no_message_names_the_package_index_by_itself():
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")]
    said = [file.name for file in files if "pip install 'wngrad" in file.read_text()]
    assert said == []


@pytest.mark.parametrize("name", ["figure-1", "figure-2", "figure-3"])
def test_the_figures_pages_are_what_the_records_say(name):
    from wngrad.lab.recipes import RECIPES
    from wngrad.lab.report.paper import PaperReport
    from wngrad.lab.report.results import Results
    from wngrad.lab.run.store import exported

    report = PaperReport(Results(RECIPES[name], exported(ROOT / "results" / f"{name}.jsonl")))
    page = ROOT / "docs" / "figures" / name / "summary.md"
    assert page.read_text() == report.markdown()
    held = sum(finding.holds is True and not finding.look for finding in report.findings)
    link = f"]({page.relative_to(ROOT / 'docs')})"
    row = next(line for line in (ROOT / "docs/lab.md").read_text().splitlines() if link in line)
    assert f"{held} of {len(report.findings)}" in row
    assert report.provisional() == ""
    assert RECIPES[name].reproduced.startswith(f"whole: {held} of {len(report.findings)} claims")
