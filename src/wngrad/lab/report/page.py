"""A report as one HTML file: plotly and the numbers inside, nothing to fetch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from wngrad.lab.report import sweep_table
from wngrad.lab.report.axes import Axis, axis, marks
from wngrad.lab.report.cells import Cell, label, lam_text
from wngrad.lab.report.claims import Finding
from wngrad.lab.report.commands import commands
from wngrad.lab.report.figures import styles
from wngrad.lab.report.results import Results
from wngrad.lab.train.spec import Metric

CLAIMS = ("claim", "source", "measured (mean ± sd)", "n (lanes)", "how judged", "verdict")


def render(
    results: Results, findings: Sequence[Finding], notes: Sequence[str], recipe: str = ""
) -> str:
    """The page, as text."""
    from plotly.offline import get_plotlyjs

    sweep = results.sweep
    remarks = [*results.notes(), *notes, *results.left_out()]
    parts = {
        "name": escape(sweep.name),
        "claim": escape(sweep.claim),
        "facts": escape(results.facts()),
        "epoch": str(results.epochs),
        "commands": " and ".join(map(_code, commands(results, recipe))),
        "marks": escape(marks(results)),
        **(_dependence(results) if sweep.task else _claims(results, findings)),
        "optimizers": "".join(map(_optimizer, _optimizers(results))),
        "choices": _choices(results),
        "charts_over_lam": "".join(_chart(results, "lam", metric) for metric in sweep.metrics),
        "charts_over_epochs": "".join(_chart(results, "epochs", m) for m in sweep.metrics),
        "columns": "".join(_head(results.label(metric)) for metric in results.metrics),
        "values": "".join(_rows(results)),
        "remarks": "".join(f"<li>{escape(text)}</li>" for text in remarks),
        "provenance": "".join(_row([k, v]) for k, v in results.provenance().items()),
        "data": embedded(_data(results)),
        "plotly": get_plotlyjs(),
    }
    template = files("wngrad.lab.report").joinpath("page.html").read_text(encoding="utf-8")
    # One pass: what a record says is never taken for a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _claims(results: Results, findings: Sequence[Finding]) -> dict[str, str]:
    """The first section of the paper's figures."""
    return {
        "head": "What is claimed, and what was measured",
        "verdicts": escape(verdicts(results, findings)),
        "table": "claims",
        "heads": "".join(map(_head, CLAIMS)),
        "rows": "".join(_finding(found) for found in findings),
        "legend": "",
    }


def _dependence(results: Results) -> dict[str, str]:
    """The first section of a sweep of one's own."""
    found = sweep_table.rows(results)
    heads = sweep_table.heads(results)
    return {
        "head": "How much each optimizer depends on λ",
        "verdicts": escape(sweep_table.verdict(results, found) + provisional(results)),
        "table": "dependence",
        "heads": "".join(map(_head, heads)),
        "rows": "".join(_carded(heads, sweep_table.texts(results, row)) for row in found),
        "legend": escape(sweep_table.legend(results)),
    }


def _carded(heads: Sequence[str], cells: Sequence[str]) -> str:
    first, *rest = (_unbroken(escape(cell)) for cell in cells)
    both = zip(map(escape, heads[1:]), rest, strict=True)
    tds = "".join(f'<td data-head="{head}">{cell}</td>' for head, cell in both)
    return f"<tr><td>{first}</td>{tds}</tr>\n"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def verdicts(results: Results, findings: Sequence[Finding]) -> str:
    """How many of the claims hold, and whether that is the last word."""
    good, bad, unknown = (sum(f.holds is way for f in findings) for way in (True, False, None))
    rest = [
        f"{bad} {'does' if bad == 1 else 'do'} not" if bad else "",
        f"{unknown} cannot be judged" if unknown else "",
    ]
    first = f"{good} of {len(findings)} claims hold"
    return "; ".join(part for part in (first, *rest) if part) + "." + provisional(results)


def provisional(results: Results) -> str:
    """What is still to come, if anything is."""
    seeds, sweep = len({lane.seed for lane in results.done}), results.sweep
    if results.epochs == sweep.epochs and seeds == len(sweep.seeds):
        return ""
    return (
        f" Provisional: {results.epochs} of {sweep.epochs} epochs, "
        f"{seeds} of {len(sweep.seeds)} seeds."
    )


def embedded(value: Any) -> str:
    """JSON that may stand inside a script element, whatever text is in it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _finding(found: Finding) -> str:
    kind = {True: "good", False: "bad", None: "open"}[found.holds]
    n = str(found.n) if found.n else "–"
    cells = {
        "source": escape(found.source),
        "measured": _unbroken(escape(found.measured)),
        "n (lanes)": n,
        "how judged": escape(found.rule),
    }
    row = "".join(f'<td data-head="{head}">{cell}</td>' for head, cell in cells.items())
    badge = f'<span class="badge {kind}">{found.verdict}</span>'
    return f"<tr><td>{escape(found.text)}</td>{row}<td>{badge}</td></tr>\n"


def _unbroken(text: str) -> str:
    """Keep `n = 5` and `0.1 ± 0.02` on one line."""
    return text.replace(" = ", "\u00a0=\u00a0").replace(" ± ", "\u00a0±\u00a0")


def _optimizers(results: Results) -> list[dict[str, Any]]:
    found = []
    for name, style in styles(results.sweep.optimizers).items():
        best = results.best(name)
        where = sorted(results.sweep.lam).index(best.lam) if best else None
        drawn = {"color": style.color, "symbol": style.symbol, "glyph": style.glyph}
        found.append({"name": name, "label": label(name), "best": where, **drawn})
    return found


def _optimizer(found: dict[str, Any]) -> str:
    box = f'<input type="checkbox" checked value="{escape(found["name"])}">'
    swatch = f'<span style="color:{found["color"]}" aria-hidden="true">{found["glyph"]}</span>'
    return f"<label>{box}{swatch}{escape(found['label'])}</label>\n"


def _choices(results: Results) -> str:
    """The λ of the curves: as the sweep names them, each one's best, or any of the grid."""
    grid = sorted(results.sweep.lam)
    named = [grid.index(results.nearest(lam)) for lam in results.sweep.curves_at]
    said = " and ".join(lam_text(grid[k]) for k in named)
    first = [(",".join(map(str, named)), f"λ = {said}")] if named else []
    every = [(str(k), f"λ = {lam_text(lam)}") for k, lam in enumerate(grid)]
    options = [*first, ("best", "the best λ of each"), *every]
    return "".join(f'<option value="{value}">{text}</option>' for value, text in options)


def _head(text: str) -> str:
    return f'<th scope="col">{escape(text)}</th>'


def _chart(results: Results, kind: str, metric: Metric) -> str:
    head = f'<h3 id="head-{kind}-{metric}">{escape(results.label(metric))}</h3>'
    attributes = f'data-kind="{kind}" data-metric="{metric}" role="img"'
    div = f'<div class="chart" {attributes} aria-labelledby="head-{kind}-{metric}"></div>'
    return f"<figure>{head}{div}</figure>\n"


def _rows(results: Results) -> Iterable[str]:
    """A row of final values for each optimizer and λ."""
    for name in results.sweep.optimizers:
        for lam in sorted(results.sweep.lam):
            cells = [str(results.cell(name, lam, metric)) for metric in results.metrics]
            yield _row([label(name), lam_text(lam), *cells])


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"


def _data(results: Results) -> dict[str, Any]:
    names, grid = results.sweep.optimizers, sorted(results.sweep.lam)
    axes = {metric: axis(results, metric) for metric in results.sweep.metrics}
    return {
        "optimizers": _optimizers(results),
        "lam": grid,
        "lamText": [lam_text(lam) for lam in grid],
        "metrics": {
            metric: {
                "label": escape(results.label(metric)),
                "percent": on.percent,
                "higher": on.higher,
                "log": on.log,
                "worst": _digits(on.worst),
                "usable": None if on.usable is None else _digits(on.usable),
            }
            for metric, on in axes.items()
        },
        "final": {
            metric: {
                name: _columns([results.cell(name, lam, metric) for lam in grid], on)
                for name in names
            }
            for metric, on in axes.items()
        },
        "curves": {
            metric: {
                name: [_columns(results.curve(name, lam, metric), on) for lam in grid]
                for name in names
            }
            for metric, on in axes.items()
        },
    }


def _columns(cells: Sequence[Cell], on: Axis) -> dict[str, list[Any]]:
    """Cells as the page draws them: what has no mean is null, and said in words."""
    return {
        "mean": [None if (h := on.height(cell)) is None else _digits(h) for cell in cells],
        "sd": [_digits(on.bar(cell)) for cell in cells],
        "text": [str(cell) for cell in cells],
        "lost": [cell.diverged for cell in cells],
        "above": [on.beyond(cell) for cell in cells],
    }


def _digits(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
