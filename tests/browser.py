"""Pages of reports in a real browser: nothing may complain, nothing may be fetched."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import test_lab_report
import test_sweep_report
from wngrad.lab.report import builder, page
from wngrad.lab.report.results import Results

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRAWN = '() => document.querySelectorAll(".chart .plot-container").length === 4'
EVIL = "</script><script>window.broken = true</script>"


def paper_page() -> str:
    """The page of a figure of the paper, with a note that would break out of its place."""
    sweep = replace(test_lab_report.SMALL, metrics=("train_loss", "test_accuracy"))
    records = test_lab_report.records(sweep, final=test_lab_report.steep, note=EVIL)
    return page.render(builder.build(Results(sweep, records)))


def task_page() -> str:
    """The page of a task, with a metric whose name is HTML."""
    sweep = replace(test_sweep_report.SWEEP, metric_name="<b>R²</b>")
    return page.render(builder.build(Results(sweep, test_sweep_report.records())))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium to open a page in")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@contextmanager
def opened(browser: Any, html: str, folder: Path) -> Iterator[Any]:
    """A page with all its charts drawn, and the only address that it asked for: its own."""
    path = folder / "report.html"
    path.write_text(html, encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1366, "height": 900})
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: complaints.append(request.url))
    tab.goto(path.as_uri())
    tab.wait_for_function(DRAWN)
    yield tab
    assert complaints == [path.as_uri()]
    tab.close()
