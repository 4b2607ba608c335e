"""The figures: AdamW over its learning rate, WNMuon as the level that needs none; its settings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from experiments.tournament.contestants import named
from experiments.untuned.methods import METHODS, RHO, C
from experiments.untuned.tables import Results
from experiments.untuned.tasks import TASKS, Task
from wngrad.lab.report.cells import Cell

COLUMNS = 3
OURS, ADAMW, MUON, FREE = "#0072b2", "#d55e00", "#009e73", "#8c6d00"
POINTS = {"muon": (MUON, "D"), "schedulefree-adamw": (FREE, "s")}


def write(results: Results, folder: Path, front: str) -> list[Path]:
    """Draw front.png, one task, panels.png, all of them, and flat.png into `folder`.

    Raises:
        ValueError: there is no task called `front`.
    """
    import matplotlib

    (task,) = named("front", [front], TASKS)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.png" for name in ("front", "panels", "flat")]
    with matplotlib.rc_context({"font.size": 10}):
        _front(results, task).savefig(paths[0], dpi=140)
        _panels(results).savefig(paths[1], dpi=110)
        _flat(results).savefig(paths[2], dpi=130)
    return paths


def _front(results: Results, task: Task) -> Any:
    from matplotlib.figure import Figure

    fig: Any = Figure(figsize=(7.2, 5.0), layout="constrained")
    ax = fig.subplots()
    panel(ax, results, task)
    ax.set_title(f"{task.name}: AdamW over its learning rate, WNMuon with nothing set")
    fig.legend(loc="outside lower center", ncols=2, frameon=False)
    return fig


def _panels(results: Results) -> Any:
    from matplotlib.figure import Figure

    tasks = results.tasks
    rows = math.ceil(len(tasks) / COLUMNS)
    fig: Any = Figure(figsize=(12.5, 3.3 * rows + 0.6), layout="constrained")
    axes = list(fig.subplots(rows, COLUMNS, squeeze=False).flat)
    handles: dict[str, Any] = {}
    for ax, task in zip(axes, tasks, strict=False):
        panel(ax, results, task)
        ax.set_title(task.name)
        lines, labels = ax.get_legend_handles_labels()
        for line, label in zip(lines, labels, strict=True):
            handles.setdefault(label, line)
    for ax in axes[len(tasks) :]:
        ax.axis("off")
    fig.legend(
        handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False
    )
    return fig


def _flat(results: Results) -> Any:
    """What it costs to move ρ or C, on the tasks that they were chosen on."""
    from matplotlib.figure import Figure

    fig: Any = Figure(figsize=(9.6, 4.0), layout="constrained")
    axes = fig.subplots(1, 2, sharey=True)
    moved = (("wnmuon-rho", RHO, "ρ"), ("wnmuon-c", C, "C"))
    for ax, (method, default, letter) in zip(axes, moved, strict=True):
        for task in (task for task in results.tasks if task.group == "choosing"):
            curve = worse(results, task, method, default)
            settings, costs = [x for x, _ in curve], [y for _, y in curve]
            ax.plot(settings, costs, marker="o", markersize=4, label=task.name)
        ax.axhspan(-2, 2, color="#e6e6e6", alpha=0.6, linewidth=0)
        ax.set_xscale("log")
        ax.set_xlabel(f"{letter} (default {default:g})")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("worse than at the default, %")
    axes[0].legend(frameon=False)
    return fig


def worse(results: Results, task: Task, method: str, default: float) -> list[tuple[float, float]]:
    """(setting, by how many per cent loss rises or accuracy falls), from the records there are."""
    cells = {lam: results.cell(task, method, lam) for lam in results.lams(task, method)}
    ours = results.best(task, "wnmuon")
    if ours is None or ours[1].mean is None:
        return []
    means = {default: ours[1].mean} | {
        lam: cell.mean for lam, cell in cells.items() if cell.mean is not None
    }
    sign = -1 if ours[1].metric == "test_accuracy" else 1
    return [(lam, 100 * sign * (means[lam] / ours[1].mean - 1)) for lam in sorted(means)]


def panel(ax: Any, results: Results, task: Task) -> None:
    """The final metric over the learning rate: the loss of a text, the error in per cent."""
    cells = {lam: results.cell(task, "adamw", lam) for lam in results.lams(task, "adamw")}
    curve = [(lam, *shown(cell)) for lam, cell in cells.items() if math.isfinite(cell.cost)]
    levels = [value for _, value, _ in curve]
    lost = [lam for lam, cell in cells.items() if not math.isfinite(cell.cost)]
    if lost:
        above = {"transform": ax.get_xaxis_transform(), "linestyle": "", "marker": "x"}
        ax.plot(lost, [0.97] * len(lost), color=ADAMW, label="AdamW diverged", **above)
    if curve:
        lams, values, spreads = zip(*curve, strict=True)
        style = {"color": ADAMW, "marker": "o", "markersize": 4, "capsize": 2}
        ax.errorbar(lams, values, yerr=spreads, label="AdamW, warm-up and decay", **style)
    for name, (color, marker) in POINTS.items():
        best = results.best(task, name)
        if best and math.isfinite(best[1].cost):
            value, spread = shown(best[1])
            style = {"color": color, "marker": marker, "markersize": 7, "capsize": 2}
            label = f"{METHODS[name].label}, at its best λ"
            ax.errorbar([best[0]], [value], yerr=[spread], linestyle="", label=label, **style)
            levels.append(value)
    ours = results.best(task, "wnmuon")
    if ours and math.isfinite(ours[1].cost):
        value, spread = shown(ours[1])
        ax.axhline(value, color=OURS, linewidth=2, label="WNMuon, nothing set")
        ax.axhspan(value - spread, value + spread, color=OURS, alpha=0.15, linewidth=0)
        levels += [value - spread, value + spread]
    _frame(ax, levels, "validation loss" if task.context else "test error, %")


def shown(cell: Cell) -> tuple[float, float]:
    """Mean and standard deviation as drawn: a loss, or an error in per cent."""
    assert cell.mean is not None
    spread = cell.sd or 0.0
    if cell.metric == "test_accuracy":
        return 100 * (1 - cell.mean), 100 * spread
    return cell.mean, spread


def _frame(ax: Any, levels: list[float], label: str) -> None:
    """Axes from a little below the best to three times as far as the better half reaches."""
    ax.set_xscale("log")
    ax.set_xlabel("learning rate λ")
    ax.set_ylabel(label)
    if levels:
        low, middle = min(levels), sorted(levels)[len(levels) // 2]
        room = max(3 * (middle - low), 0.05 * low, 1e-3)
        top = min(max(levels), low + room)
        ax.set_ylim(low - 0.12 * (top - low) - 1e-9, top + 0.08 * (top - low) + 1e-9)
    ax.grid(color="#e6e6e6", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
