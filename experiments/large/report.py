"""The report: the loss over steps and over seconds as two pictures, and all runs as a table."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from experiments.large import plan
from experiments.large.plan import DECAY, RATES, RIVALS, Records
from wngrad.lab.report.markdown import table

LABELS = {"wnmuon": "WNMuon, nothing set", "muon": "Muon", "adamw": "AdamW"}
COLORS = {"wnmuon": "#0072b2", "muon": "#009e73", "adamw": "#d55e00"}
TRAIN_WINDOW = 5  # points of the training loss that a picture draws as their mean
TOP = 2.0  # of the pictures, times the smallest loss

Run = dict[str, Any]  # a record


def write(out: Path, figures: Path, steps: int) -> list[Path]:
    """Draw steps.png and seconds.png into `figures` and write table.md into `out`.

    Raises:
        ValueError: there are no records of this length.
    """
    records = {run: r for run, r in plan.read(out).items() if run.steps == steps}
    if not records:
        raise ValueError(f"`--out` must hold records of {steps} steps, got {out} without.")
    figures.mkdir(parents=True, exist_ok=True)
    paths = [figures / f"{axis}.png" for axis in ("steps", "seconds")]
    for path in paths:
        _draw(best(records), tried(records), path)
    page = out / "table.md"
    page.write_text("\n".join(lines(records)) + "\n", encoding="utf-8")
    return [page, *paths]


def best(records: Records) -> dict[str, list[Run]]:
    """The finished runs of every method over its seeds, a rival's at its best rate."""
    chosen = {}
    for method in ("wnmuon", *RIVALS):
        steps = next(iter(records)).steps
        rate = plan.best_rate(records, method, steps)
        runs = [
            record
            for run, record in sorted(records.items(), key=lambda item: item[0].seed)
            if (run.method, run.rate) == (method, rate) and run.decay in (None, DECAY)
        ]
        if finished := [record for record in runs if not record["diverged"]]:
            chosen[method] = finished
    return chosen


def lines(records: Records) -> list[str]:
    """The table of all runs, and what it means for seconds and for the grids."""
    order = list(LABELS)
    rows = sorted(
        records.values(), key=lambda r: (order.index(r["method"]), r["rate"] or 0, r["decay"] or 0)
    )
    cells = []
    for (method, rate, decay), group in groupby(
        rows, key=lambda r: (r["method"], r["rate"], r["decay"])
    ):
        runs = list(group)
        settings = ["–" if value is None else f"{value:g}" for value in (rate, decay)]
        step_ms = mean(1e3 * r["seconds"] / r["train"][-1][0] for r in runs)
        cells.append((LABELS[method], *settings, _loss(runs), len(runs), f"{step_ms:.1f}"))
    heads = ("method", "rate", "decay", "test loss, nats a byte", "n", "ms a step")
    return [
        *table(heads, cells),
        "",
        *_sentences(best(records), tried(records)),
        *_conditions(rows),
    ]


def _loss(runs: Sequence[Run]) -> str:
    """The final test loss, and its standard deviation over the seeds."""
    losses = [r["loss"] for r in runs if not r["diverged"]]
    lost = len(runs) - len(losses)
    spread = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
    reached = [f"{mean(losses):.4f}{spread}"] if losses else []
    return ", ".join([*reached, *([f"{lost} diverged"] if lost else [])])


def tried(records: Records) -> dict[str, list[float]]:
    """The rates at which each rival has run with its usual decay."""
    keys = [(run.method, run.rate) for run in records if run.decay == DECAY]
    return {
        rival: sorted({rate for method, rate in keys if method == rival and rate is not None})
        for rival in RIVALS
    }


def _sentences(chosen: dict[str, list[Run]], rates: dict[str, list[float]]) -> list[str]:
    """When WNMuon is below what a rival ends at; whether a rival's best is an end of its grid."""
    made = []
    for method in RIVALS:
        if method not in chosen:
            continue
        runs = chosen[method]
        if missing := sorted(set(RATES) - set(rates[method])):
            listed = ", ".join(f"{rate:g}" for rate in missing)
            made.append(f"{LABELS[method]} has not run at {listed}.")
        if runs[0]["rate"] in (rates[method][0], rates[method][-1]):
            made.append(f"{LABELS[method]}'s best rate is an end of those that ran.")
        final, seconds = (mean(r[key] for r in runs) for key in ("loss", "seconds"))
        curve = _curve(chosen.get("wnmuon", []), "test")
        below = next((point for point in curve if point[1] <= final), None)
        label = f"{LABELS[method]}'s final loss, {final:.4f}"
        if below is None:
            made.append(f"WNMuon does not reach {label}.")
        else:
            part = f"{below[0]:g} steps and {100 * below[2] / seconds:.0f} % of its seconds"
            made.append(f"WNMuon is tested below {label}, after {part}.")
    return made


def _conditions(runs: Sequence[Run]) -> list[str]:
    """What was trained, on what and where, for every setting that occurs."""
    made = []
    for r in runs:
        size, text, machine = r["size"], r["corpus"], r["environment"]
        versions = ", ".join(f"{name} {machine[name]}" for name in ("torch", "python", "commit"))
        made.append(
            f"{r['parameters']:,} parameters, {r['steps']:,} steps of {size['batch']} × "
            f"{size['context']} bytes, {r['precision']}, compiled: {r['compiled']}; the text: "
            f"{text['train_bytes']:,} bytes ({text['files']:,} files, {text['sha256']}), tested on "
            f"{r['tested_bytes']:,}; {machine['device']}, {versions}."
        )
    return [
        "",
        f"The rivals' rates are {', '.join(f'{rate:g}' for rate in sorted(RATES))}, chosen at seed "
        "0 on the test loss itself, which favours them. Muon takes the hidden matrices, queries, "
        "keys and values as one, and AdamW the rest at the same rate.",
        *dict.fromkeys(made),
    ]


def _curve(runs: Sequence[Run], kind: str) -> list[tuple[float, float, float]]:
    """(steps, loss, seconds), means over the seeds."""
    points = zip(*(r[kind] for r in runs), strict=True)
    return [tuple(mean(values) for values in zip(*point, strict=True)) for point in points]


def _draw(chosen: dict[str, list[Run]], rates: dict[str, list[float]], path: Path) -> None:
    """Test losses as lines with points, training losses behind; the file is named by its axis."""
    from matplotlib.figure import Figure

    column = {"steps": 0, "seconds": 2}[path.stem]
    fig: Any = Figure(figsize=(7.2, 4.6), layout="constrained")
    ax = fig.subplots()
    lowest = min((r["loss"] for runs in chosen.values() for r in runs), default=1.0)
    for method, runs in chosen.items():
        rate = runs[0]["rate"]
        label = LABELS[method]
        if rate is not None:
            label += f" at {rate:g}, the best of {len(rates[method])}"
        train, test = (_curve(runs, kind) for kind in ("train", "test"))
        windows = [train[k : k + TRAIN_WINDOW] for k in range(0, len(train), TRAIN_WINDOW)]
        smooth = [(window[-1][column], mean(point[1] for point in window)) for window in windows]
        style = {"color": COLORS[method]}
        ax.plot(*zip(*smooth, strict=True), alpha=0.35, linewidth=1, **style)
        x, y = [point[column] for point in test], [point[1] for point in test]
        ax.plot(x, y, marker="o", markersize=4, label=f"{label} (n = {len(runs)})", **style)
    ax.set_ylim(0.96 * lowest, TOP * lowest)
    names = {"steps": "steps", "seconds": "seconds of training, tests and compilation apart"}
    ax.set_xlabel(names[path.stem])
    ax.set_ylabel("test loss, nats a byte (pale: training loss)")
    ax.grid(color="#e6e6e6", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    fig.savefig(path, dpi=130)
