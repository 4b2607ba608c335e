"""A report as one HTML file: plotly and the numbers inside, nothing to fetch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from wngrad.lab.cells import ACCURACY, Cell, label, lam_text
from wngrad.lab.claims import Finding
from wngrad.lab.figures import CEILING, MARKS, above, bar, height, looks
from wngrad.lab.recipes import commands
from wngrad.lab.results import Results
from wngrad.lab.spec import METRICS, Metric

GLYPHS = {  # plotly's symbols as text
    "circle": "●",
    "square": "■",
    "triangle-up": "▲",
    "diamond": "◆",
    "triangle-down": "▼",
    "cross": "✚",
    "x": "✖",
    "pentagon": "⬟",
    "hexagon": "⬢",
    "star": "★",
    "triangle-left": "◀",
}


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
        "run": escape(commands(results, recipe)[0]),
        "report": escape(commands(results, recipe)[1]),
        "marks": escape(MARKS),
        "verdicts": escape(verdicts(results, findings)),
        "findings": "".join(_finding(found) for found in findings),
        "optimizers": "".join(map(_optimizer, _optimizers(results))),
        "choices": _choices(results),
        "charts_over_lam": "".join(_chart("lam", metric) for metric in sweep.metrics),
        "charts_over_epochs": "".join(_chart("epochs", metric) for metric in sweep.metrics),
        "columns": "".join(f'<th scope="col">{label(metric)}</th>' for metric in METRICS),
        "values": "".join(_rows(results)),
        "remarks": "".join(f"<li>{escape(text)}</li>" for text in remarks),
        "provenance": "".join(_row([k, v]) for k, v in results.provenance().items()),
        "data": embedded(_data(results)),
        "plotly": get_plotlyjs(),
    }
    template = files("wngrad.lab").joinpath("page.html").read_text(encoding="utf-8")
    # One pass: what a record says is never taken for a place to fill.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def verdicts(results: Results, findings: Sequence[Finding]) -> str:
    """How many of the claims hold, and whether that is the last word."""
    good, bad, unknown = (sum(f.holds is way for f in findings) for way in (True, False, None))
    rest = [
        f"{bad} {'does' if bad == 1 else 'do'} not" if bad else "",
        f"{unknown} cannot be judged" if unknown else "",
    ]
    first = f"{good} of {len(findings)} claims hold"
    text = "; ".join(part for part in (first, *rest) if part) + "."
    seeds, sweep = len({lane.seed for lane in results.done}), results.sweep
    if results.epochs < sweep.epochs or seeds < len(sweep.seeds):
        text += (
            f" Provisional: {results.epochs} of {sweep.epochs} epochs, "
            f"{seeds} of {len(sweep.seeds)} seeds."
        )
    return text


def embedded(value: Any) -> str:
    """JSON that may stand inside a script element, whatever text is in it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _finding(found: Finding) -> str:
    kind = {True: "good", False: "bad", None: "open"}[found.holds]
    n = str(found.n) if found.n else "–"
    cells = {
        "claim": escape(found.text),
        "source": escape(found.source),
        "measured": _unbroken(escape(found.measured)),
        "n (lanes)": n,
        "how judged": escape(found.rule),
        "verdict": f'<span class="badge {kind}">{found.verdict}</span>',
    }
    row = "".join(f'<td data-head="{head}">{cell}</td>' for head, cell in cells.items())
    return f"<tr>{row}</tr>\n"


def _unbroken(text: str) -> str:
    """Keep `n = 5` and `0.1 ± 0.02` on one line."""
    return text.replace(" = ", "\u00a0=\u00a0").replace(" ± ", "\u00a0±\u00a0")


def _optimizers(results: Results) -> list[dict[str, Any]]:
    found = []
    for name, look in looks(results.sweep.optimizers).items():
        best = results.best(name)
        where = sorted(results.sweep.lam).index(best.lam) if best else None
        style = {"color": look.color, "symbol": look.symbol, "best": where}
        found.append({"name": name, "label": label(name), **style})
    return found


def _optimizer(found: dict[str, Any]) -> str:
    box = f'<input type="checkbox" checked value="{escape(found["name"])}">'
    glyph = GLYPHS[found["symbol"]]
    swatch = f'<span style="color:{found["color"]}" aria-hidden="true">{glyph}</span>'
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


def _chart(kind: str, metric: Metric) -> str:
    head = f'<h3 id="head-{kind}-{metric}">{label(metric)}</h3>'
    attributes = f'data-kind="{kind}" data-metric="{metric}" role="img"'
    div = f'<div class="chart" {attributes} aria-labelledby="head-{kind}-{metric}"></div>'
    return f"<figure>{head}{div}</figure>\n"


def _rows(results: Results) -> Iterable[str]:
    """A row of final values for each optimizer and λ."""
    for name in results.sweep.optimizers:
        for lam in sorted(results.sweep.lam):
            cells = [str(results.cell(name, lam, metric)) for metric in METRICS]
            yield _row([label(name), lam_text(lam), *cells])


def _row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>\n"


def _data(results: Results) -> dict[str, Any]:
    names, grid = results.sweep.optimizers, sorted(results.sweep.lam)
    return {
        "optimizers": _optimizers(results),
        "lam": grid,
        "lamText": [lam_text(lam) for lam in grid],
        "metrics": {
            metric: {"label": label(metric), "percent": metric == ACCURACY}
            for metric in results.sweep.metrics
        },
        "ceiling": CEILING,
        "final": {
            metric: {
                name: _columns([results.cell(name, lam, metric) for lam in grid]) for name in names
            }
            for metric in results.sweep.metrics
        },
        "curves": {
            metric: {
                name: [_columns(results.curve(name, lam, metric)) for lam in grid] for name in names
            }
            for metric in results.sweep.metrics
        },
    }


def _columns(cells: Sequence[Cell]) -> dict[str, list[Any]]:
    """Cells as the page draws them: what has no mean is null, and said in words."""
    return {
        "mean": [None if (h := height(cell)) is None else _digits(h) for cell in cells],
        "sd": [_digits(bar(cell)) for cell in cells],
        "text": [str(cell) for cell in cells],
        "lost": [cell.diverged for cell in cells],
        "above": [above(cell) for cell in cells],
    }


def _digits(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None
