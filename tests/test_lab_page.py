"""The pages of reports, opened in a real browser; tests/integrations/test_browser.py uses them."""

from __future__ import annotations

import pytest

from browser import browser, opened, paper_page, task_page

__all__ = ["browser"]


@pytest.mark.parametrize("html", [paper_page, task_page])
def test_every_chart_is_drawn_and_nothing_is_fetched(browser, html, tmp_path):
    with opened(browser, html(), tmp_path) as page:
        charts = page.locator(".chart")
        assert charts.count() == 4
        assert all(charts.nth(k).locator(".main-svg").count() >= 2 for k in range(4))
        assert all(charts.nth(k).locator(".scatterlayer .trace").count() >= 2 for k in range(4))
        assert page.evaluate("() => window.broken") is None
        assert page.locator("b").count() == 0  # a metric's name is text
