"""The figure of a report: two metrics over λ above, and the same two over the epochs below."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wngrad.lab import atomic
from wngrad.lab.optimizers import OPTIMIZERS, SPARE_STYLES, Style
from wngrad.lab.report.base import Axis, Report
from wngrad.lab.report.cells import Cell, label, lam_text
from wngrad.lab.report.results import Results
from wngrad.lab.train.spec import Metric

ROW = 0.032  # of a panel's height: one row of marks on its edge
DASHES = ("-", "--", ":", "-.")
COLUMNS = 4  # of the legend


def styles(optimizers: Sequence[str]) -> dict[str, Style]:
    """A style for every optimizer: its own, or one of the spare ones in turn."""
    others = [name for name in optimizers if name not in OPTIMIZERS]
    return {
        name: OPTIMIZERS[name].style if name in OPTIMIZERS else _spare(others.index(name))
        for name in optimizers
    }


def _spare(k: int) -> Style:
    """After the last, the colours come again with other markers."""
    n = len(SPARE_STYLES)
    return replace(SPARE_STYLES[(k + k // n) % n], color=SPARE_STYLES[k % n].color)


def write(report: Report, paths: Sequence[Path]) -> None:
    """Draw the figure into each of `paths`; the suffix chooses the format."""
    import matplotlib

    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "wngrad"}):
        fig = draw(report)
        for path in paths:
            undated = {"Date": None} if path.suffix == ".svg" else None
            drawn, kind = io.BytesIO(), path.suffix[1:]
            fig.savefig(drawn, format=kind, dpi=140, metadata=undated)
            atomic.write(path, drawn.getvalue())


def draw(report: Report) -> Any:
    """The figure, as matplotlib's object."""
    from matplotlib.figure import Figure  # Without pyplot, the user's backend is left alone.

    sweep, handles, foot = report.results.sweep, _handles(report.results), _footnote(report)
    legend, title = math.ceil(len(handles) / COLUMNS), _title(report)
    top = 0.05 + sum(0.017 * size for _, size in title)  # inches
    heights = (top + 0.12 + 0.19 * legend, 7.2, 0.2 + 0.145 * len(foot))
    fig: Any = Figure(figsize=(10.5, sum(heights)), layout="constrained")
    head, body, tail = fig.subfigures(3, 1, height_ratios=heights)
    at = 0.05
    for line, size in title:
        head.text(0.01, 1 - at / heights[0], line, va="top", size=size)
        at += 0.017 * size
    head.legend(handles=handles, loc="lower left", ncols=COLUMNS, frameon=False, borderpad=0.2)
    axes = body.subplots(2, len(sweep.metrics), squeeze=False)
    for column, metric in enumerate(sweep.metrics):
        on = report.axis(metric)
        _over_lam(axes[0][column], report.results, metric, on)
        _over_epochs(axes[1][column], report.results, metric, on)
    tail.text(0.01, 0.95, "\n".join(foot), va="top", size=7.5, color="#555555")
    return fig


def _over_lam(ax: Any, results: Results, metric: Metric, on: Axis) -> None:
    """A panel of the values at the last epoch over λ."""
    lams = sorted(filter(None, results.sweep.lam)) or [1.0]  # 0 has no place on the axis
    means = list[float]()
    marked = beyond = False
    rows = len(results.sweep.optimizers)
    for row, (name, style) in enumerate(styles(results.sweep.optimizers).items()):
        cells = {lam: results.cell(name, lam, metric) for lam in lams}
        line = _line_style(style, row, rows)
        if len(results.sweep.grid(name)) == 1:
            line["markersize"] = 7.0  # no line leads to it
        means += _means(ax, cells, on, line)
        marked |= _edge(ax, cells, on, row, style)
        beyond |= any(map(on.beyond, cells.values()))
    _limits(ax, on, means, rows if marked else 0, beyond)
    if on.usable is not None:
        ax.axhline(on.usable, color="#333333", linewidth=0.8, linestyle="--", zorder=0)
    ax.set_xscale("log")
    _plain(ax.xaxis)
    ax.set_xlim(lams[0] / 1.4, lams[-1] * 1.4)
    ax.set_xlabel("λ")
    ax.set_title(f"{results.label(metric)} at {results.last()}")


def _means(ax: Any, cells: dict[float, Cell], on: Axis, line: dict[str, Any]) -> list[float]:
    """Draw the means of one optimizer with their bars; hollow where a seed diverged.

    Returns:
        The ends of what has been drawn, which the axis is to hold.
    """
    drawn = {lam: cell for lam, cell in cells.items() if cell.mean is not None}
    y = [math.nan if on.beyond(cell) else on.height(cell) or 0.0 for cell in drawn.values()]
    up = [0.0 if on.beyond(cell) else on.bar(cell) for cell in drawn.values()]
    down = [0.0 if on.beyond(cell) else on.foot(cell) for cell in drawn.values()]
    ax.errorbar(list(drawn), y, yerr=(down, up), capsize=2, elinewidth=0.9, **line)
    partial = [k for k, cell in enumerate(drawn.values()) if cell.diverged]
    hollow = {"markerfacecolor": "white", "linestyle": "none", "zorder": 5}
    ax.plot([list(drawn)[k] for k in partial], [y[k] for k in partial], **line, **hollow)
    ends = zip(y, down, up, strict=True)
    return [end for v, d, u in ends if math.isfinite(v) for end in (v - d, v + u)]


def _line_style(style: Style, row: int, rows: int) -> dict[str, Any]:
    """Smaller from row to row: what lies beneath still shows where curves coincide."""
    size = 1.0 if rows < 3 else 1.35 - 0.6 * row / (rows - 1)
    bulk = {"markersize": 4.5 * size, "linewidth": 1.4 * size}
    return {"color": style.color, "marker": style.marker, **bulk}


def _edge(ax: Any, cells: dict[float, Cell], on: Axis, row: int, style: Style) -> bool:
    """Mark what has no place in the panel, each optimizer in a row of its own."""
    place = ROW * (row + 0.8) if on.higher else 1 - ROW * (row + 0.8)
    lost = [lam for lam, cell in cells.items() if cell.diverged]
    high = [lam for lam, cell in cells.items() if on.beyond(cell) and not cell.diverged]
    at = {"transform": ax.get_xaxis_transform(), "linestyle": "none", "color": style.color}
    ax.plot(lost, [place] * len(lost), marker="x", markersize=5, **at)
    hollow = {"markerfacecolor": "white", "markersize": 4.5}
    ax.plot(high, [place] * len(high), marker=style.marker, **hollow, **at)
    return bool(lost or high)


def _over_epochs(ax: Any, results: Results, metric: Metric, on: Axis) -> None:
    """A panel of the means over the epochs; where a seed diverges a line ends in a cross."""
    every, (word, times) = styles(results.sweep.optimizers), results.time
    means: list[float] = []
    lost: list[tuple[int, str]] = []
    beyond = False
    for name, lam, dash in _lines(results):
        cells = results.curve(name, lam, metric)
        # Beyond, the mean would be that of the other seeds.
        end = next((k for k, cell in enumerate(cells) if cell.mean is None or cell.diverged), None)
        y = [h for cell in cells[:end] if (h := on.height(cell)) is not None]
        beyond |= any(map(on.beyond, cells[:end]))
        row, step = list(every).index(name), max(1, results.epochs // 6)
        apart = (row * step // len(every), step)  # markers that do not hide each other
        line = _line_style(every[name], row, len(every))
        ax.plot(times[: len(y)], y, linestyle=dash, markevery=apart, **line)
        means += y
        if end is not None and cells[end].diverged:
            lost.append((times[end], every[name].color))
    place = ROW / 2 if on.higher else 1 - ROW / 2
    for epoch, color in lost:
        at = {"transform": ax.get_xaxis_transform(), "clip_on": False}
        ax.plot([epoch], [place], marker="x", color=color, markersize=5, **at)
    _limits(ax, on, means, 1 if lost or beyond else 0, beyond)
    ax.set_xlim(0, max([*times, 1]) * 1.02)
    ax.set_xlabel(word)
    named = " and ".join(lam_text(lam) for lam, _ in _named(results))
    where = f"λ = {named}" if named else "the best λ of each"
    ax.set_title(f"{results.label(metric)} over the {word}s, at {where}")


def _named(results: Results) -> list[tuple[float, str]]:
    """The λ that the sweep names for its curves, each with a dash."""
    every = enumerate(results.sweep.curves_at)
    return [(results.nearest(lam), DASHES[k % len(DASHES)]) for k, lam in every]


def _lines(results: Results) -> list[tuple[str, float, str]]:
    """The curves that are drawn: at the named λ, or at each optimizer's best."""
    if named := _named(results):
        return [(name, lam, dash) for lam, dash in named for name in results.sweep.optimizers]
    bests = [results.best(name) for name in results.sweep.optimizers]
    return [(best.optimizer, best.lam, DASHES[0]) for best in bests if best]


def _limits(ax: Any, on: Axis, values: Sequence[float], rows: int, beyond: bool) -> None:
    """Fit the axis to the values, with a strip for `rows` of marks on the edge of what is bad.

    If something is `beyond` the worst that is drawn, the strip begins there, at a dotted line.
    """
    strip = 0.02 + ROW * rows
    share = strip + (0.0 if beyond else 0.025)
    room = 1.05 * share / (1 - share)  # beyond the values, in their reach
    near = [max(v, on.worst) if on.higher else min(v, on.worst) for v in values]
    near += [on.worst] if beyond else []
    if not on.log:
        low, high = min(near, default=0.0), max(near, default=100.0 if on.percent else 1.0)
        reach = max(high - low, 5.0 if on.percent else 1e-9)
        ends = (0.05, room) if not on.higher else (room, 0.05)
        ax.set_ylim(low - reach * ends[0], high + reach * ends[1])
        ax.yaxis.set_major_formatter("{x:g} %" if on.percent else "{x:g}")
    else:
        low, high = min(near, default=0.1), max(near, default=min(on.worst, 10.0))
        reach = max(math.log10(high / low), 0.3)
        ax.set_yscale("log", nonpositive="clip")
        ax.set_ylim(low / 10 ** (reach * 0.05), high * 10 ** (reach * room))
        _plain(ax.yaxis)
    if rows:
        low, high = (0, strip) if on.higher else (1 - strip, 1)
        edge = {"color": "#f2f2f2", "linewidth": 0, "transform": ax.transAxes, "zorder": 0}
        ax.fill_between([0, 1], low, high, **edge)
    if beyond:
        ax.axhline(on.worst, color="#aaaaaa", linewidth=0.8, linestyle=":")
    ax.grid(color="#e6e6e6", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _plain(axis: Any) -> None:
    """0.01 instead of 10⁻²; on a short axis the marks between have their numbers too."""

    def between(value: float, position: int | None = None) -> str:
        low, high = axis.get_view_interval()
        digits = "23456789" if high < 2.2 * low else "235" if high < 20 * low else "25"
        return f"{value:g}" if high < 100 * low and f"{value:e}"[0] in digits else ""

    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(between)


def _title(report: Report) -> list[tuple[str, int]]:
    """The headline, and below it what came of it: lines, each with the size of its letters."""
    head = textwrap.wrap(f"{report.results.sweep.name}: {report.headline()}", 115)
    below = textwrap.wrap(report.verdict(), 150)
    return [*((line, 12) for line in head), *((line, 9) for line in below)]


def _footnote(report: Report) -> list[str]:
    results = report.results
    provenance = {
        key: value if len(value) < 60 else f"{value[:12]}…"
        for key, value in results.provenance().items()
    }
    made = ", ".join(f"{key} {value}" for key, value in provenance.items())
    facts = f"{results.facts()}. Mean over the seeds; bars: one standard deviation, none for n = 1."
    lines = [facts, report.marks(), f"{made}." if made else "", *report.remarks()]
    return [part for line in lines for part in textwrap.wrap(line, 170)]


def _handles(results: Results) -> list[Any]:
    """The legend: optimizers, with their best λ, or with a dash for each named λ."""
    from matplotlib.lines import Line2D

    handles: list[tuple[str, dict[str, Any]]] = []
    for name, style in styles(results.sweep.optimizers).items():
        best = None if results.sweep.curves_at else results.best(name)
        where = f" (best λ = {lam_text(best.lam)})" if best else ""
        line = {"color": style.color, "marker": style.marker, "markersize": 5}
        handles.append((f"{label(name)}{where}", line))
    for lam, dash in _named(results):
        handles.append((f"λ = {lam_text(lam)}", {"color": "#333333", "linestyle": dash}))
    return [Line2D([], [], label=text, **line) for text, line in handles]
