"""The site: built without a warning, and opened in a browser with no network."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from browser import browser
from test_docs import ROOT, blocks
from test_site import NAV, NOTEBOOK

__all__ = ["browser"]

WIDER = "() => document.documentElement.scrollWidth - window.innerWidth"
BROKEN = "() => [...document.images].filter((i) => !i.naturalWidth).map((i) => i.src)"
# The theme's script puts every table into a box that scrolls.
BOXED = """() => [...document.querySelectorAll(".md-typeset table:not([class])")]
    .every((table) => table.closest(".md-typeset__scrollwrap"))"""
# A block of code, a table or a picture that is wider than the text must scroll in its own box.
OUTSIDE = """() => [...document.querySelectorAll(".md-content :is(p, li, img, h1, h2, h3)")]
    .filter((e) => e.getBoundingClientRect().right > window.innerWidth + 1 && !e.closest("table"))
    .map((e) => e.textContent.slice(0, 60) || e.src)"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab that may ask for files only, and in which nothing may complain."""
    tab = browser.new_page(viewport={"width": 1280, "height": 844})
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
    tab.on(
        "request",
        lambda request: (
            None
            if request.url.startswith(("file:", "data:", "blob:"))
            else complaints.append(request.url)
        ),
    )
    yield tab
    tab.close()
    assert complaints == []


@pytest.mark.parametrize("width", [1280, 390])
def test_every_page_opens_and_fits_a_desktop_and_a_phone(site, tab, width):
    tab.set_viewport_size({"width": width, "height": 844})
    wrong = []
    for page in pages(site):
        tab.goto(page.as_uri())
        tab.wait_for_function(BOXED)
        found = tab.evaluate(BROKEN), tab.evaluate(WIDER), tab.evaluate(OUTSIDE)
        if found[0] or found[1] > 0 or found[2]:
            wrong.append((page.name, *found))
    assert wrong == []


def pages(site: Path) -> list[Path]:
    """All but 404.html, which is meant for a server: its links begin at the root."""
    return sorted(page for page in site.rglob("*.html") if page.name != "404.html")


class Links(HTMLParser):
    """The addresses and the anchors of a page."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []  # by the page itself, not by a click
        self.anchors: set[str] = {""}
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        its = {key: value or "" for key, value in attrs}
        self.anchors |= {its[key] for key in ("id", "name") if key in its}
        if "src" in its or (tag == "link" and its.get("rel") != "canonical"):
            self.loaded.append(its.get("src") or its["href"])
        elif "href" in its:
            self.links.append(its["href"])


def test_no_link_is_dead_and_nothing_is_loaded_from_elsewhere(site):
    parsed = {page: Links(page) for page in pages(site)}
    assert len(parsed) == len(NAV)
    dead = []
    for page, found in parsed.items():
        for link in [*found.links, *found.loaded]:
            parts = urlsplit(link)
            if parts.scheme in ("https", "data") and link not in found.loaded:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            anchors = parsed[target].anchors if target in parsed else {parts.fragment}
            if parts.scheme or not target.is_file() or unquote(parts.fragment) not in anchors:
                dead.append((page.name, link))
    assert dead == []


def test_the_search_finds_a_word_without_a_server(site, tab):
    tab.goto((site / "index.html").as_uri())
    tab.click(".md-search__input")
    tab.keyboard.type("orthogonalized")
    found = tab.locator(".md-search-result__link[href*='wnmuon.html?h=orthogonalized']")
    found.first.click(timeout=20_000)
    tab.wait_for_url("**/wnmuon.html?h=orthogonalized*")
    assert "rthogonalized" in tab.locator("mark").first.inner_text()


def test_the_notebook_runs_and_draws_as_many_pictures(tmp_path):
    import nbclient
    import nbformat

    book, before = nbformat.read(NOTEBOOK, 4), nbformat.read(NOTEBOOK, 4)
    # The kernel sees no setting of the tests, and writes nothing beside the notebook.
    nbclient.execute(book, cwd=str(tmp_path), record_timing=False, timeout=300)
    assert [kinds(cell) for cell in book.cells] == [kinds(cell) for cell in before.cells]


def kinds(cell: Any) -> list[list[str]]:
    """What a cell has put out: for each output the kinds it can be shown as."""
    return [sorted(output.get("data", ["text"])) for output in cell.get("outputs", [])]


def test_the_careless_optimizer_fails_the_probes_that_its_page_lists(tmp_path):
    page = ROOT / "docs" / "judge-your-optimizer.md"
    (tmp_path / "careless.py").write_text(blocks(page, "python")[0])
    command = [sys.executable, "-m", "wngrad.conformance", "careless:Careless"]
    run = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "300"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    failed = [line.split("✗")[1].strip() for line in run.stdout.splitlines() if "✗" in line]
    rows = [
        line.strip("| ").split(" | ") for line in page.read_text().splitlines() if " | " in line
    ]
    listed = [row for row in rows if row[0] != "probe"]
    assert len(failed) == len(listed)
    for line, (probe, says) in zip(failed, listed, strict=True):
        assert line.startswith(probe)
        assert says in line
