"""The tournament's two pictures: the loss over λ at every task, and the ranks at the defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from experiments.tournament.contestants import CONTESTANTS
from experiments.tournament.tables import LOSS, Outcome, final
from wngrad.lab.optimizers import OPTIMIZERS

COLUMNS = 2
# Ours are drawn thick, per tensor dashed, in the lab's colours.
OURS = {name: OPTIMIZERS[name].style.color for name in ("wngrad", "wngrad-momentum", "wnadam")}
OURS["wnmuon"] = "#000000"
LAB = {name: OPTIMIZERS[name].style for name in ("sgd", "sgd-momentum", "adam")}
# fmt: off
STYLES = {name: (style.color, style.marker) for name, style in LAB.items()} | {
    "adamw": ("#a03000", "v"), "adagrad": ("#cc79a7", "<"), "adagrad-norm": ("#7b5ea7", ">"),
    "schedulefree-sgd": ("#b8a800", "*"), "schedulefree-adamw": ("#8c6d00", "p"),
    "momo-adam": ("#17a2b8", "h"),
    # Without a marker: no λ to move.
    "prodigy": ("#000000", ""), "dadapt-adam": ("#555555", ""), "dog": ("#8c564b", ""),
    "cocob": ("#c49c94", ""),
}
# fmt: on
DASHES: dict[str, Any] = {"prodigy": ":", "dadapt-adam": "-.", "dog": "--", "cocob": (0, (1, 3))}


def write(outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Draw curves.png and ranks.png into `folder`."""
    import matplotlib

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context({"font.size": 9}):
        for name, draw in (("curves", curves), ("ranks", ranks)):
            paths.append(folder / f"{name}.png")
            draw(outcomes).savefig(paths[-1], dpi=110)
    return paths


def curves(outcomes: Sequence[Outcome]) -> Any:
    """A panel for every task: the final test loss over λ, no higher than it was at the start."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(outcomes) / COLUMNS)
    fig: Any = Figure(figsize=(11.5, 3.7 * rows + 1.4), layout="constrained")
    axes = fig.subplots(rows, COLUMNS, squeeze=False).flat
    for ax, outcome in zip(axes, outcomes, strict=False):
        _panel(ax, outcome)
    for ax in list(axes)[len(outcomes) :]:
        ax.axis("off")
    fig.legend(handles=_handles(outcomes), loc="outside lower center", ncols=5, frameon=False)
    return fig


def _panel(ax: Any, outcome: Outcome) -> None:
    for name, curve in outcome.curves.items():
        mean, spread = curve.capped()
        ax.errorbar(curve.lam, mean, yerr=spread, elinewidth=0.7, **_style(name))
    for who in CONTESTANTS:
        level = None if who.moved else _level(outcome, outcome.target(who))
        if level is not None:
            ax.axhline(level, **_style(who.name))
    starts = [value for curve in outcome.curves.values() for value in curve.start]
    if starts:
        start = sum(starts) / len(starts)
        ax.axhline(start, color="#bbbbbb", linewidth=0.8)
        ax.set_ylim(top=start * 1.04)
    ax.set_xscale("log")
    ax.set_xlabel("λ")
    ax.set_title(f"{outcome.name}: final test loss")
    ax.grid(color="#e6e6e6", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _level(outcome: Outcome, target: str) -> float | None:
    """The mean final loss at the default of a method without a λ to move, capped as the curves."""
    records = [r for lane, r in outcome.default.items() if lane.optimizer == target]
    ends = [(final(r, LOSS), r.start.get(LOSS)) for r in records]
    good = [min(end, start) if math.isfinite(end) else start for end, start in ends if start]
    return sum(good) / len(good) if good else None


def _style(name: str) -> dict[str, Any]:
    base = name.removesuffix("-tensor")
    if base in OURS:
        dash = "--" if name != base else "-"
        return {"color": OURS[base], "linestyle": dash, "linewidth": 2.0}
    color, marker = STYLES[name]
    if not marker:
        return {"color": color, "linestyle": DASHES[name], "linewidth": 1.1}
    return {"color": color, "marker": marker, "markersize": 3.5, "linewidth": 0.9}


def _handles(outcomes: Sequence[Outcome]) -> list[Any]:
    from matplotlib.lines import Line2D

    ran = {name for outcome in outcomes for name in (*outcome.curves, *outcome.cells)}
    lines = [
        Line2D([], [], label=who.label, **_style(who.name))
        for who in CONTESTANTS
        if who.name in ran
    ]
    return [*lines, Line2D([], [], color="#bbbbbb", linewidth=0.8, label="the loss at the start")]


def ranks(outcomes: Sequence[Outcome]) -> Any:
    """Methods by tasks: the rank at the documented default, the best mean rank on top."""
    from matplotlib.figure import Figure

    tables = [outcome.ranks for outcome in outcomes]
    ran = [who for who in CONTESTANTS if any(who.name in table for table in tables)]
    rows = sorted(ran, key=lambda who: mean(t[who.name] for t in tables if who.name in t))
    size = (max(2.2 + 0.95 * len(outcomes), 5.0), 1.2 + 0.3 * len(rows))
    fig: Any = Figure(figsize=size, layout="constrained")
    ax = fig.subplots()
    values = [[table.get(who.name, math.nan) for table in tables] for who in rows]
    ax.imshow(values, cmap="YlGnBu_r", aspect="auto", vmin=1, vmax=max(len(rows), 2))
    for y, row in enumerate(values):
        for x, rank in enumerate(row):
            dark = rank < len(rows) / 2
            text = "–" if math.isnan(rank) else f"{rank:g}"
            ax.text(x, y, text, ha="center", va="center", color="white" if dark else "black")
    ax.set_xticks(range(len(outcomes)), [o.name for o in outcomes], rotation=30)
    ax.set_yticks(range(len(rows)), [who.label for who in rows])
    fig.suptitle("rank at the documented default (1: best)")
    return fig
