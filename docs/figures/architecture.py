"""Draws docs/figures/architecture.svg: python docs/figures/architecture.py"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

INK, SOFT = "#1c2430", "#5a6675"
BLUE, GREEN, ORANGE, GREY = "#dcebf5", "#dcf3e5", "#fbf0d9", "#eef0f3"


class Panel:
    """A part of the picture: boxes by name, and arrows between them."""

    def __init__(self, ax: Any, title: str) -> None:
        ax.set(xlim=(0, 100), ylim=(0, 100))
        ax.axis("off")
        ax.set_title(title, loc="left", fontsize=12, color=INK)
        self.ax, self.boxes = ax, dict[str, tuple[float, float, float, float]]()

    def box(self, name: str, text: str, x: float, y: float, w: float, h: float, color: str) -> None:
        """A box whose lower left corner is at (x, y): a name in bold, and a text below it."""
        self.boxes[name] = (x, y, w, h)
        style = "round,pad=0,rounding_size=1.2"
        self.ax.add_patch(FancyBboxPatch((x, y), w, h, style, facecolor=color, edgecolor=SOFT))
        lines = text.count("\n") + 1 if text else 0
        middle, up = (x + w / 2, y + h / 2), 5.6 * lines  # points
        place = {"xycoords": "data", "textcoords": "offset points", "ha": "center", "va": "center"}
        self.ax.annotate(name, middle, (0, up), weight="bold", fontsize=9.5, color=INK, **place)
        self.ax.annotate(text, middle, (0, -6.5), fontsize=8, color=SOFT, **place)

    def arrow(self, start: str, end: str, text: str = "", side: str = "down") -> None:
        """An arrow between the edges of two boxes: downwards, or to a side."""
        (x, y, w, h), (a, b, c, d) = self.boxes[start], self.boxes[end]
        if side == "right":
            ends = ((x + w, y + h / 2), (a, b + d / 2))
        elif side == "left":
            ends = ((x, y + h / 2), (a + c, b + d / 2))
        else:
            low, high = max(x, a), min(x + w, a + c)
            at = (low + high) / 2 if low < high else None
            ends = ((at or x + w / 2, y), (at or a + c / 2, b + d))
        line = {"arrowstyle": "-|>", "mutation_scale": 11, "color": SOFT, "linewidth": 1.1}
        self.ax.add_patch(FancyArrowPatch(*ends, shrinkA=0, shrinkB=1, **line))
        if text:
            middle = ((ends[0][0] + ends[1][0]) / 2, (ends[0][1] + ends[1][1]) / 2)
            offset = (0, 7) if side in ("right", "left") else (5, 0)
            ha = "center" if side in ("right", "left") else "left"
            self.ax.annotate(
                text, middle, offset, textcoords="offset points", ha=ha, va="center",
                fontsize=8, color=SOFT, style="italic",
            )  # fmt: skip


def rooms(panel: Panel) -> None:
    panel.box("cli", "one file a command", 0, 87, 31, 11, ORANGE)
    panel.box(
        "lab: recipes, sweep", "the paper's figures; a task of one's own", 0, 70, 64, 11, GREEN
    )
    panel.box("lab.run", "store, workers, pool, Ray", 0, 53, 31, 11, GREEN)
    panel.box("lab.report", "results, claims, figures, page", 33, 53, 31, 11, GREEN)
    panel.box("lab.train", "spec, task, data, models, programs", 0, 36, 42, 11, GREEN)
    panel.box("lab.optimizers", "one table", 47, 36, 17, 11, GREEN)
    panel.box("optim", "PyTorch: step, fused", 0, 19, 20, 11, BLUE)
    panel.box("batch", "minimize, bounds", 22, 19, 20, 11, BLUE)
    panel.box("transforms", "JAX, optax", 68, 19, 16, 11, BLUE)
    panel.box(
        "rule, guard", "the recursions; first, unset, overflow, not finite b", 0, 2, 84, 11, BLUE
    )
    panel.box("integrations", "callbacks for trainers", 68, 87, 32, 11, ORANGE)
    panel.box("experiments", "tournament, study; not in the wheel", 68, 70, 32, 11, GREY)
    panel.box("conformance", "judges any optimizer;\nimports nothing of ours", 68, 53, 32, 11, GREY)
    below = {
        "cli": ("lab: recipes, sweep",),
        "lab: recipes, sweep": ("lab.run", "lab.report"),
        "lab.run": ("lab.train",),
        "lab.report": ("lab.train", "lab.optimizers"),
        "lab.train": ("optim", "batch"),
        "lab.optimizers": ("rule, guard",),
        "optim": ("rule, guard",),
        "batch": ("rule, guard",),
        "transforms": ("rule, guard",),
    }
    for start, ends in below.items():
        for end in ends:
            panel.arrow(start, end)
    panel.arrow("lab.train", "lab.optimizers", side="right")


def gradient(panel: Panel) -> None:
    panel.box("p.grad", "after backward()", 0, 62, 14, 22, GREY)
    panel.box("settings", "of each group, checked\nrow by row", 19, 62, 17, 22, BLUE)
    panel.box("snapshot", "tensors and settings:\nthe cache key", 41, 62, 17, 22, BLUE)
    panel.box("cached launches", "cpu.c or Triton,\nnew addresses only", 77, 62, 23, 22, ORANGE)
    panel.box("collect", "plain tensors of a step;\nunits that share one b", 41, 12, 17, 24, BLUE)
    panel.box("plain step", "propose u → rule for b\n→ move x, over lists", 77, 12, 23, 24, GREEN)
    panel.arrow("p.grad", "settings", side="right")
    panel.arrow("settings", "snapshot", side="right")
    panel.arrow("snapshot", "cached launches", "seen before", side="right")
    panel.arrow("snapshot", "collect", "new")
    panel.arrow("collect", "plain step", "no kernel knows it", side="right")
    line = {"arrowstyle": "-|>", "mutation_scale": 11, "color": SOFT, "linewidth": 1.1}
    panel.ax.add_patch(FancyArrowPatch((58, 31), (77, 66), shrinkA=0, shrinkB=1, **line))
    panel.ax.annotate(
        "eligible: launches\nare made and cached", (70.5, 46), ha="left", va="center", fontsize=8,
        color=SOFT, style="italic",
    )  # fmt: skip


def sweep(panel: Panel) -> None:
    panel.box("recipe", "recipes.py", 0, 62, 14, 22, GREY)
    panel.box("task", "file.py:task", 0, 12, 14, 22, GREY)
    panel.box("Sweep", "optimizers × λ × seeds\n= lanes, cut into packs", 19, 36, 17, 24, GREEN)
    panel.box("pool", "of workers: processes,\nor tasks on Ray", 41, 36, 17, 24, GREEN)
    panel.box("store", "a record a lane,\ncheckpoints, locks", 63, 36, 15, 24, GREEN)
    panel.box("results", "means over the seeds", 83, 66, 17, 18, ORANGE)
    panel.box("report", "page, figure, summary", 83, 12, 17, 18, ORANGE)
    panel.arrow("recipe", "Sweep", side="right")
    panel.arrow("task", "Sweep", side="right")
    panel.arrow("Sweep", "pool", "packs", side="right")
    panel.arrow("pool", "store", "records", side="right")
    panel.arrow("store", "results", side="right")
    panel.arrow("results", "report", "PaperReport\nTaskReport")


def draw() -> Any:
    fig: Any = Figure(figsize=(11, 11.5), layout="constrained")
    parts = fig.subplots(3, 1, height_ratios=(5.8, 2.4, 2.4))
    rooms(Panel(parts[0], "The rooms. An arrow means: imports. Nothing imports upwards."))
    gradient(Panel(parts[1], "The way of a gradient through a step"))
    sweep(Panel(parts[2], "The way of a sweep through the lab"))
    return fig


if __name__ == "__main__":
    with matplotlib.rc_context({"svg.hashsalt": "wngrad", "svg.fonttype": "none"}):
        draw().savefig(Path(__file__).with_suffix(".svg"), metadata={"Date": None})
