"""The controls of a report's page, its sizes and its colours, in a real browser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from browser import browser, opened, paper_page, task_page
from test_lab_report import SMALL

__all__ = ["browser"]

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


@pytest.fixture(scope="module")
def paper_tab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened(browser, paper_page(), tmp_path_factory.mktemp("paper")) as tab:
        yield tab


@pytest.fixture(scope="module")
def task_tab(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened(browser, task_page(), tmp_path_factory.mktemp("task")) as tab:
        yield tab


@pytest.fixture
def page(paper_tab: Any) -> Any:
    """The page of a figure of the paper, with every switch as it was at first."""
    paper_tab.evaluate(RESET)
    return paper_tab


@pytest.fixture
def task(task_tab: Any) -> Any:
    """The page of a task, with every switch as it was at first."""
    task_tab.evaluate(RESET)
    return task_tab


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
@pytest.mark.parametrize("kind", ["page", "task"])
def test_a_page_is_no_wider_than_the_window(request, kind, width):
    page = request.getfixturevalue(kind)
    page.set_viewport_size({"width": width, "height": 844})
    page.click("#numbers summary")
    page.wait_for_function(  # every chart is drawn anew for the new width
        f"() => [...document.querySelectorAll('.chart svg')].every(s => s.clientWidth < {width})"
    )
    assert page.evaluate(WIDER) <= 0
    assert page.locator("#values").is_visible()


def test_the_dotted_line_stands_at_the_worst_that_is_drawn_to_scale(task):
    shapes = task.evaluate('() => document.querySelectorAll(".chart")[0].layout.shapes')
    assert [shape["y0"] for shape in shapes if shape["line"].get("dash") == "dot"] == [12]
    low, high = task.evaluate('() => document.querySelectorAll(".chart")[0].layout.yaxis.range')
    strip = next(shape for shape in shapes if shape["type"] == "rect")
    assert (math.log10(12) - low) / (high - low) == pytest.approx(strip["y0"])


def test_verdicts_are_words_and_not_only_colours(page):
    assert page.locator("#claims .badge").all_inner_texts() == ["holds"]


def test_the_charts_follow_a_dark_scheme(page):
    ink = "() => document.querySelector('.chart').layout.font.color"
    light = page.evaluate(ink)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"() => ({ink})() !== '{light}'")


def test_the_page_has_a_row_for_each_optimizer(task):
    rows = task.locator("#dependence tbody tr")
    assert rows.count() == 3
    assert rows.nth(1).locator("td").first.inner_text() == "WNGrad"
    assert "≥ 2.1" in rows.nth(1).inner_text()


def test_the_page_draws_where_a_lambda_is_usable_and_what_is_beyond(task):
    shapes = task.evaluate('() => document.querySelectorAll(".chart")[0].layout.shapes')
    assert [shape["y0"] for shape in shapes if shape["line"].get("dash") == "dash"] == [
        pytest.approx(1.16, abs=0.01)
    ]
    assert task.evaluate(AXES) == ["log", "linear", "log", "linear"]
