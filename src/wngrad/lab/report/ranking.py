"""Who reaches the lowest loss, and who does so over the widest range of λ: two sentences."""

from __future__ import annotations

from collections.abc import Sequence

from wngrad.lab.report.cells import label, lam_text, lead
from wngrad.lab.report.dependence import Curves, Dependence, Row
from wngrad.lab.report.results import Best, Results


def ranking(results: Results, dependence: Dependence) -> str:
    """The sentences, with those that noise, or an end of the grid, keeps from being told apart."""
    rows = [(row, row.lowest) for row in dependence.rows if row.curves]
    pairs = [(row, best) for row, best in rows if best is not None]
    if not pairs:
        return _nothing(results, dependence)
    lowest = f"Lowest {results.label(results.sweep.best_by)}: {_lowest(pairs)}."
    ranges = {row.optimizer: row.curves for row, _ in pairs if row.curves and row.curves.has_range}
    return f"{lowest} {_widest(ranges)}" if ranges else lowest


def names(optimizers: Sequence[str]) -> str:
    """As a sentence lists them.

    >>> names(["sgd", "adam", "wngrad"])
    'SGD, Adam and WNGrad'
    """
    every = [label(name) for name in optimizers]
    return " and ".join([", ".join(every[:-1]), every[-1]] if len(every) > 1 else every)


def _nothing(results: Results, dependence: Dependence) -> str:
    """Why there is nobody to name."""
    lanes = sum(row.lanes for row in dependence.rows)
    if lanes and lanes == sum(row.diverged for row in dependence.rows):
        return "Every run diverged."
    if any(row.curves for row in dependence.rows):
        return "No optimizer has a λ at which no seed diverged."
    see = ": see what was left out" if results.left_out() else ""
    return f"No optimizer has a result at every λ{see}."


def _lowest(pairs: Sequence[tuple[Row, Best]]) -> str:
    row, low = min(pairs, key=lambda pair: pair[1].cell.cost)
    own = ", its default" if low is row.default else ""
    near = [b.optimizer for _, b in pairs if b is not low and lead(low.cell, b.cell).noise]
    level = f", within noise of {names(near)}" if near else ""
    return f"{label(low.optimizer)}, {low.cell} at λ = {lam_text(low.lam)}{own}{level}"


def _widest(ranges: dict[str, Curves]) -> str:
    first = max(ranges, key=lambda name: ranges[name].decades.value)
    widest = ranges.pop(first)
    if not widest.decades.value:
        return "No range of λ is usable."
    cut = [name for name, each in ranges.items() if each.decades.at_least]
    near = [name for name, each in ranges.items() if name not in cut and _level(widest, each)]
    level = f", within noise of {names(near)}" if near else ""
    ends = f"; {_open(cut, widest.decades.at_least)}" if cut else ""
    return f"Most usable decades: {label(first)}, {widest.decades}{level}{ends}."


def _open(optimizers: Sequence[str], too: bool) -> str:
    """That ranges may go on beyond the grid."""
    reach = "range reaches" if len(optimizers) == 1 else "ranges reach"
    also = ", too" if too else ""
    return f"of {names(optimizers)} the {reach} an end of the grid{also}, and may be wider"


def _level(widest: Curves, other: Curves) -> bool:
    """Whether the seeds cannot tell two widths apart."""
    return bool(lead(widest.decades_by_seed, other.decades_by_seed).noise)
