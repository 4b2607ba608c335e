"""A report as one HTML file: plotly and the numbers inside, nothing to fetch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from wngrad.lab.report.base import Axis, Report
from wngrad.lab.report.cells import Cell, label, lam_text
from wngrad.lab.report.figures import styles
from wngrad.lab.report.results import Results
from wngrad.lab.train.spec import Metric


def render(report: Report) -> str:
    """The page, as text."""
    from plotly.offline import get_plotlyjs

    results, sweep = report.results, report.results.sweep
    optimizers = _optimizers(results)
    parts = {
        "name": escape(sweep.name),
        "claim": escape(report.headline()),
        "facts": escape(results.facts()),
        "last": escape(results.last()),
        "times": "epochs" if results.time[0] == "epoch" else f"{results.time[0]}s",
        "commands": ", then ".join(f"<code>{escape(text)}</code>" for text in report.commands()),
        "marks": escape(report.marks()),
        "head": report.HEAD,
        "verdicts": escape(report.verdict()),
        "table": report.TABLE,
        "heads": "".join(map(_head, report.heads())),
        "rows": "".join(report.cards()),
        "legend": escape(report.legend()),
        "optimizers": "".join(map(_checkbox, optimizers)),
        "choices": _choices(results),
        "charts_over_lam": "".join(_chart(results, "lam", metric) for metric in sweep.metrics),
        "charts_over_epochs": "".join(_chart(results, "epochs", m) for m in sweep.metrics),
        "columns": "".join(_head(results.label(metric)) for metric in results.metrics),
        "values": "".join(map(_row, _values(results))),
        "remarks": "".join(f"<li>{escape(text)}</li>" for text in report.remarks()),
        "provenance": "".join(map(_row, results.provenance().items())),
        "data": embedded({"optimizers": optimizers, **_data(report)}),
        "plotly": get_plotlyjs(),
    }
    template = files("wngrad.lab.report").joinpath("page.html").read_text(encoding="utf-8")
    # One pass: text of a record is never taken for a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def card(first: str, cells: Mapping[str, str], last: str = "") -> str:
    """A row of the first table, whose cells stand below each other on a narrow screen.

    Args:
        first: the text of the first cell.
        cells: the texts of the others, by their heads.
        last: a cell as HTML.
    """
    tds = "".join(
        f'<td data-head="{escape(head)}">{_unbroken(escape(cell))}</td>'
        for head, cell in cells.items()
    )
    return f"<tr><td>{escape(first)}</td>{tds}{last}</tr>\n"


def embedded(value: Any) -> str:
    """JSON that may stand inside a script element, whatever text is in it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _unbroken(text: str) -> str:
    """Keep `n = 5` and `0.1 ± 0.02` on one line."""
    return text.replace(" = ", "\u00a0=\u00a0").replace(" ± ", "\u00a0±\u00a0")


def _head(text: str) -> str:
    return f'<th scope="col">{escape(text)}</th>'


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"


def _values(results: Results) -> list[list[str]]:
    """A row of final values for each optimizer and λ."""
    return [
        [label(name), lam_text(lam), *(str(results.cell(name, lam, m)) for m in results.metrics)]
        for name in results.sweep.optimizers
        for lam in sorted({s.lam for s in results.sweep.settings if s.optimizer == name})
    ]


def _optimizers(results: Results) -> list[dict[str, Any]]:
    rows, lams = [], sorted(results.sweep.lam)
    for name, style in styles(results.sweep.optimizers).items():
        best = results.best(name)
        where = lams.index(best.lam) if best else None
        grid = [lams.index(lam) for lam in results.sweep.grid(name)]
        drawn = {"color": style.color, "symbol": style.symbol, "glyph": style.glyph}
        rows.append({"name": name, "label": label(name), "best": where, "grid": grid, **drawn})
    return rows


def _checkbox(optimizer: dict[str, Any]) -> str:
    box = f'<input type="checkbox" checked value="{escape(optimizer["name"])}">'
    glyph, color = optimizer["glyph"], optimizer["color"]
    swatch = f'<span style="color:{color}" aria-hidden="true">{glyph}</span>'
    return f"<label>{box}{swatch}{escape(optimizer['label'])}</label>\n"


def _choices(results: Results) -> str:
    """The λ of the curves: as the sweep names them, each one's best, or any of the grid."""
    grid = sorted(results.sweep.lam)
    texts = {str(k): f"λ = {lam_text(lam)}" for k, lam in enumerate(grid)}
    named = [grid.index(results.nearest(lam)) for lam in results.sweep.curves_at]
    text = " and ".join(lam_text(grid[k]) for k in named)
    first = [(",".join(map(str, named)), f"λ = {text}")] if named else []
    options = [*first, ("best", "the best λ of each"), *texts.items()]
    return "".join(f'<option value="{value}">{text}</option>' for value, text in options)


def _chart(results: Results, kind: str, metric: Metric) -> str:
    head = f'<h3 id="head-{kind}-{metric}">{escape(results.label(metric))}</h3>'
    attributes = f'data-kind="{kind}" data-metric="{metric}" role="img"'
    div = f'<div class="chart" {attributes} aria-labelledby="head-{kind}-{metric}"></div>'
    return f"<figure>{head}{div}</figure>\n"


def _data(report: Report) -> dict[str, Any]:
    """The numbers that the page draws."""
    results, grid = report.results, sorted(report.results.sweep.lam)
    names, metrics = results.sweep.optimizers, results.sweep.metrics
    data: dict[str, Any] = {"lam": grid, "lamText": [lam_text(lam) for lam in grid]}
    data |= dict(zip(("time", "x"), results.time, strict=True))
    data |= {"metrics": {}, "final": {}, "curves": {}}
    for metric in metrics:
        on = report.axis(metric)
        data["metrics"][metric] = {
            "label": escape(results.label(metric)),
            "percent": on.percent,
            "higher": on.higher,
            "log": on.log,
            "worst": _digits(on.worst),
            "usable": None if on.usable is None else _digits(on.usable),
        }
        data["final"][metric] = {
            name: _columns([results.cell(name, lam, metric) for lam in grid], on) for name in names
        }
        data["curves"][metric] = {
            name: [_columns(results.curve(name, lam, metric), on) for lam in grid] for name in names
        }
    return data


def _columns(cells: Sequence[Cell], on: Axis) -> dict[str, list[Any]]:
    """Cells as the page draws them: what has no mean is null, and said in words."""
    return {
        "mean": [None if (h := on.height(cell)) is None else _digits(h) for cell in cells],
        "sd": [_digits(on.bar(cell)) for cell in cells],
        "foot": [_digits(on.foot(cell)) for cell in cells],
        "text": [str(cell) for cell in cells],
        "lost": [cell.diverged for cell in cells],
        "above": [on.beyond(cell) for cell in cells],
    }


def _digits(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
