"""What is said of a run: a table for each set and dtype, the targets, a picture. It only reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

Result = dict[str, Any]
COLOURS = {"ours": "#c8451b", "fused": "#1f5fa8", "foreach": "#6fa3d8", "default": "#b9cfe6"}
COLOURS |= {"peers": "#8a8a8a", "plain": "#eab39c"}
TICKS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
HEAD = {
    "step": "step, {}",
    "over": "over floor",
    "wall": "wall, {}",
    "moved": "gradients moved, {}",
    "graph": "in a graph, {}",
    "extra": "peak extra, MB",
    "state": "state, B/param",
}


def document(results: list[Result], judged: list[dict[str, Any]], machine: dict[str, Any]) -> str:
    """Everything that was measured, as Markdown."""
    parts = [machine_line(machine), *map(table, results)]
    return "\n\n".join([*parts, targets(judged)] if judged else parts)


def machine_line(machine: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in machine.items() if value is not None) + "."


def table(result: Result) -> str:
    """A set in one dtype: medians with quartiles, one row for each contestant."""
    unit, factor = _unit(result)
    copy = result["bandwidth"]
    lines = [
        f"### {result['set']}, {result['dtype']}",
        "",
        f"{result['parameters']:,} parameters in {result['tensors']} tensors; memory moves "
        f"{copy['median'] / 1e9:,.0f} GB/s ({copy['low'] / 1e9:,.0f} to {copy['high'] / 1e9:,.0f}, "
        f"n = {copy['n']}); {result['rounds']} rounds; medians and quartiles.{noise(result)}",
        "",
        "| | " + " | ".join(h.format(unit) for h in HEAD.values()) + " | n |",
        "|---|" + "---:|" * (len(HEAD) + 1),
    ]
    return "\n".join(lines + [_line(row, factor) for row in result["rows"]] + graphless(result))


def graphless(result: Result) -> list[str]:
    """Who was not captured in a graph, and why, a line for each reason."""
    why: dict[str, list[str]] = {}
    for row in result["rows"]:
        if row["no graph"] and not row["failed"]:
            why.setdefault(row["no graph"], []).append(row["label"])
    return [f"\nNo graph of {', '.join(who)}: {reason}." for reason, who in why.items()]


def noise(result: Result) -> str:
    """How far apart two runs of the same contestant are."""
    rows = {row["label"]: row for row in result["rows"] if "step" in row}
    again = next((label for label in rows if label.endswith(" (again)")), None)
    first = again and rows.get(again.removesuffix(" (again)"))
    if not again or not first:
        return ""
    kinds = {"step": "", "wall": " on the wall", "moved": " with moved gradients"}
    ratios = [
        f"{rows[again][m]['median'] / first[m]['median']:.3f}{words}"
        for m, words in kinds.items()
        if m in first and m in rows[again]
    ]
    return f" Noise: {again} / {first['label']} = {', '.join(ratios)}."


def targets(judged: list[dict[str, Any]]) -> str:
    lines = ["### Targets", "", "| target | measured | |", "|---|---:|---|"]
    for one in judged:
        ratio = "–" if one["ratio"] is None else f"{one['ratio']:.3f}"
        lines.append(f"| {one['target']} | {ratio} | {one['verdict']} |")
    return "\n".join(lines)


def _unit(result: Result) -> tuple[str, float]:
    fastest = min((r["step"]["median"] for r in result["rows"] if "step" in r), default=1.0)
    return ("ms", 1e3) if fastest > 5e-4 else ("µs", 1e6)


def _line(row: dict[str, Any], factor: float) -> str:
    if row["failed"]:
        return f"| {row['label']} | {row['failed'].replace('|', '/')} |" + " |" * len(HEAD)
    times = {m: _time(row.get(m), factor) for m in ("step", "wall", "moved", "graph")}
    extra, over = row["extra bytes"], row["over floor"]
    cells = {
        **times,
        "over": "–" if over is None else f"{over:.2f}",
        "extra": "–" if extra is None else f"{extra / 1e6:,.1f}",
        "state": f"{row['state bytes per parameter'] or 0:.3g}",
    }
    n = row["step"]["n"]
    return f"| {row['label']} | " + " | ".join(cells[key] for key in HEAD) + f" | {n} |"


def _time(found: dict[str, float] | None, factor: float) -> str:
    if found is None:
        return "–"
    middle, low, high = (_digits(found[k] * factor) for k in ("median", "low", "high"))
    return f"{middle} ({low}–{high})"


def _digits(value: float) -> str:
    """Three digits at least, and no more behind the point than say something."""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 20 else 2}f}"


def picture(results: list[Result], machine: dict[str, Any], path: Path) -> None:
    """Bars of the time over the floor: a row for each set, a column for each dtype."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    sets = list(dict.fromkeys(r["set"] for r in results))
    dtypes = list(dict.fromkeys(r["dtype"] for r in results))
    most = max(len(r["rows"]) for r in results)
    size = (1.0 + 5.5 * len(dtypes), 0.8 + (0.21 * most + 0.7) * len(sets))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(sets), len(dtypes), squeeze=False)
    for ax in axes.flat:
        ax.set_visible(False)
    for result in results:
        _panel(axes[sets.index(result["set"])][dtypes.index(result["dtype"])], result)
    figure.suptitle(f"Time of a step over its bytes' floor: {machine['device']}", fontsize=12)
    figure.savefig(path, dpi=110)


def _panel(ax: Any, result: Result) -> None:
    rows = [r for r in result["rows"] if r["over floor"] and not r["failed"]]
    if not rows:
        return
    places, (unit, factor) = _places(rows), _unit(result)
    over = [r["over floor"] for r in rows]
    left = min(0.5, 0.8 * min(over))
    ax.set_visible(True)
    ax.barh(places, over, color=[_colour(r) for r in rows], height=0.85)
    for place, row in zip(places, rows, strict=True):
        said = f" {row['over floor']:.2f}  ({_digits(row['step']['median'] * factor)} {unit})"
        ax.text(row["over floor"], place, said, va="center", fontsize=7)
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set_xscale("log")
    ticks = [t for t in TICKS if left <= t <= max(1.0, *over)]
    ax.set_xticks(ticks, [f"{t:g}" for t in ticks], fontsize=7)
    ax.set_xticks([], minor=True)
    ax.set_xlim(left, 4 * max(1.0, *over))
    ax.set_yticks(places, [r["label"] for r in rows], fontsize=7)
    ax.margins(y=0.01)
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)
    millions = result["parameters"] / 1e6
    ax.set_title(f"{result['set']}, {result['dtype']} ({millions:,.1f} M parameters)", fontsize=9)


def _places(rows: list[dict[str, Any]]) -> list[float]:
    """Where the bars lie: those of one optimizer side by side, a gap before the next."""
    places, last = [0.0], ""
    for row in rows:
        places.append(places[-1] + (1.0 if row["name"] == last else 1.5))
        last = row["name"]
    return places[1:]


def _colour(row: dict[str, Any]) -> str:
    if row["name"].startswith("WN"):
        return COLOURS["plain" if row["way"] == "plain" else "ours"]
    torchs = ("SGD", "SGD-momentum", "Adam", "AdamW", "Adagrad")
    return COLOURS[row["way"] if row["name"] in torchs else "peers"]
