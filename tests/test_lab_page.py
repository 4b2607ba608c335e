"""The page of a report, opened in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from test_lab_report import SMALL, records, steep
from wngrad.lab.report import builder

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium to open the page in")

EVIL = "</script><script>window.broken = true</script>"
VISIBLE = """() => [...document.querySelectorAll(".chart")].map(
    (chart) => chart.data.filter((trace) => trace.visible).length)"""
AXES = '() => [...document.querySelectorAll(".chart")].map((c) => c.layout.yaxis.type)'
WIDER = "() => document.documentElement.scrollWidth - window.innerWidth"
RESET = """() => {
    for (const box of document.querySelectorAll("#optimizers input")) box.checked = true;
    document.querySelector("#scale input").checked = true;
    document.querySelector("#at").value = "best";
    document.querySelector("#numbers").open = false;
    return drawAll().then(() => null);
}"""
DRAWN = '() => document.querySelectorAll(".chart .plot-container").length === 4'


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sweep = replace(SMALL, metrics=("train_loss", "test_accuracy"))
    found = records(sweep, final=steep, note=EVIL)
    return builder.write(sweep, found, tmp_path_factory.mktemp("page"))[0]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def opened(browser: Any, path: Path) -> Iterator[Any]:
    """The page, opened once; nothing may complain, nothing may be fetched."""
    page = browser.new_page(viewport={"width": 1366, "height": 900})
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: complaints.append(request.url))
    page.goto(path.as_uri())
    page.wait_for_function(DRAWN)
    yield page, complaints
    page.close()


@pytest.fixture
def page(opened: Any, path: Path) -> Iterator[Any]:
    """The page with every switch as it was at first."""
    page, complaints = opened
    page.evaluate(RESET)
    yield page
    assert complaints == [path.as_uri()]


def test_every_chart_is_drawn_and_nothing_is_fetched(page):
    charts = page.locator(".chart")
    assert charts.count() == 4
    assert all(charts.nth(k).locator(".main-svg").count() >= 2 for k in range(4))
    assert all(charts.nth(k).locator(".scatterlayer .trace").count() >= 2 for k in range(4))
    assert page.evaluate("() => window.broken") is None


def test_a_checkbox_hides_an_optimizer_in_every_chart(page):
    before = page.evaluate(VISIBLE)
    page.uncheck('#optimizers input[value="sgd"]')
    assert page.evaluate(VISIBLE) == [count // 2 for count in before]
    page.check('#optimizers input[value="sgd"]')
    assert page.evaluate(VISIBLE) == before


def test_all_optimizers_may_be_hidden(page):
    for name in SMALL.optimizers:
        page.uncheck(f'#optimizers input[value="{name}"]')
    assert page.evaluate(VISIBLE) == [0, 0, 0, 0]


def test_the_switch_changes_the_axis_of_the_losses_only(page):
    assert page.evaluate(AXES) == ["log", "linear", "log", "linear"]
    page.check('#scale input[value="linear"]')
    assert page.evaluate(AXES) == ["linear"] * 4


def test_the_curves_follow_the_chosen_lambda(page):
    assert "SGD 0.1" in page.inner_text("#told")
    page.select_option("#at", label="λ = 10")
    assert page.inner_text("#told") == "At λ = 10 (solid)."
    lost = page.evaluate('() => document.querySelectorAll(".chart")[2].data[1].x')
    assert lost == [3]  # the epoch at which SGD diverges there


def test_hovering_tells_optimizer_lambda_mean_spread_and_n(page):
    point = page.locator(".chart").first.locator(".points path").first
    point.hover(force=True)
    told = page.locator(".hoverlayer .hovertext").first
    told.wait_for()
    assert "λ = 0.01" in told.text_content()
    assert "train loss 0.602 ± 0.002 (n = 3)" in told.text_content()


@pytest.mark.parametrize("width", [1366, 390])
def test_the_page_is_no_wider_than_the_window(page, width):
    page.set_viewport_size({"width": width, "height": 844})
    page.click("#numbers summary")
    page.wait_for_function(f"() => document.querySelector('.chart svg').clientWidth < {width}")
    assert page.evaluate(WIDER) <= 0
    assert page.locator("#values").is_visible()


def test_verdicts_are_words_and_not_only_colours(page):
    assert page.locator("#claims .badge").all_inner_texts() == ["holds"]


def test_the_charts_follow_a_dark_scheme(page):
    ink = "() => document.querySelector('.chart').layout.font.color"
    light = page.evaluate(ink)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"() => ({ink})() !== '{light}'")
