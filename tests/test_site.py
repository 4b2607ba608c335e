"""The site, as far as it can be judged without building it; tests/integrations has the rest."""

from __future__ import annotations

import doctest
import importlib
import json
import re

import pytest

import mkdocs_hooks
from test_docs import PAGES, ROOT

DOCS = ROOT / "docs"
FRAGMENTS = {"tournament-verdict.md"}  # a part of another page
NAV = re.findall(r"^ +- [^#\n]*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
NOTEBOOK = DOCS / "digits.ipynb"


def test_the_navigation_has_every_page_once():
    pages = [path.relative_to(DOCS) for path in DOCS.rglob("*.md")]
    pages += [path.relative_to(DOCS).with_suffix(".md") for path in DOCS.rglob("*.ipynb")]
    assert sorted(NAV) == sorted(page.as_posix() for page in pages if page.name not in FRAGMENTS)


@pytest.mark.parametrize("name", [name for name in NAV if (DOCS / name).exists()])
def test_a_page_has_a_title_and_only_one(name):
    text = re.sub(r"^```.*?^```$", "", (DOCS / name).read_text(), flags=re.S | re.M)
    assert text.startswith("# ")
    assert len(re.findall(r"^# ", text, re.M)) == 1


def anchors(page):
    """Those of a page's headings, as code hosts and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.S | re.M)
    heads = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_heading_that_a_page_links_to_is_there(page):
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", page.read_text()):
        assert anchor in anchors((page.parent / target) if target else page), f"{target}#{anchor}"


def test_the_reference_has_every_public_name():
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = re.findall(r"^::: (\S+)$", pages, re.M)
    assert len(documented) == len(set(documented))
    last = {name.rpartition(".")[2] for name in documented if name.startswith("wngrad.")}
    for module in ("wngrad", "wngrad.batch", "wngrad.lab"):
        assert set(importlib.import_module(module).__all__) - {"__version__"} <= last
    for module in ("wngrad.transforms", "wngrad.conformance"):
        names = {f"{module}.{name}" for name in importlib.import_module(module).__all__}
        assert names <= set(documented)


def test_links_fences_and_lists_are_as_the_site_needs_them():
    assert doctest.testmod(mkdocs_hooks).failed == 0
    text = "[a](x/../b.ipynb#c), ![d](e.png)\n```python integrations\n[f](../g.py)\n```\n"
    assert mkdocs_hooks.site_markdown(text, "a.md", "") == (
        "[a](x/../b.md#c), ![d](e.png)\n```python\n[f](../g.py)\n```\n"
    )
    assert mkdocs_hooks.site_markdown("- a\n  - b\n  c\n", "a.md", "") == "- a\n    - b\n  c\n"


def test_the_notebook_is_small_and_has_its_outputs():
    assert NOTEBOOK.stat().st_size < 400_000
    text, pictures = mkdocs_hooks.notebook_page(json.loads(NOTEBOOK.read_text()), "digits")
    assert len(pictures) == 2
    assert all(picture.startswith(b"\x89PNG") for picture in pictures.values())
    assert text.count("\n```text\n") == 4
    assert "![](" not in text  # every picture says in words what it shows
    links = re.findall(r"\]\(([\w/-]+\.md)\)", text)
    assert all((DOCS / link).exists() for link in links)


def test_which_optimizer_has_the_numbers_of_the_tournament():
    text = (DOCS / "tournament.md").read_text()
    table = text.split("## At the documented default")[1].split("\n\n")[1]
    rows = {
        cells[0]: cells for cells in (line.strip("| ").split(" | ") for line in table.splitlines())
    }
    head = rows["method"]
    names = ("WNMuon", "WN-Adam", "WNGrad per tensor", "AdamW")

    def numbers(column):
        cells = [rows[name][head.index(column)] for name in names]
        return [float(re.search(r"[\d.]+", cell)[0]) for cell in cells]

    page = (DOCS / "which-optimizer.md").read_text()
    first, third, other, adamw = numbers("mean rank")
    assert f"| {first:g}, the first | {third:g}, the third | {other:g} |" in page
    places = sorted(float(cells[head.index("mean rank")]) for cells in list(rows.values())[2:])
    assert (places[0], places[2], len(places)) == (first, third, 20)
    *ours, its_cnn = (f"{value:.1f} %" for value in numbers("cifar-cnn"))
    assert f"accuracy | {' | '.join(ours)} |" in page
    *ours, its_text = (f"{value:g}" for value in numbers("shakespeare"))
    assert f"test loss | {' | '.join(ours)} |" in page
    assert f"mean rank of {adamw:.1f}, {its_cnn} on the CNN and {its_text} on the" in page
