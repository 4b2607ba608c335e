"""The tables of the page, written into its marked regions; what is around them is left alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean, median
from typing import Any

from experiments.finetune.methods import METHODS
from experiments.finetune.plan import MIDDLE
from experiments.finetune.tasks import STARTS, STEPS, TASKS
from experiments.untuned.page import fill
from experiments.untuned.plan import Run, read
from wngrad.lab.report.markdown import table

LLAMA = next(task.steps for task in TASKS.values() if task.mode.startswith("peft"))
Key = tuple[str, str, float, int]  # a task, a method, λ and steps
OURS = "finetune"
_OURS = (OURS, METHODS[OURS].defaults[0])


class Results:
    """The records by task, method, λ and length, each with its seeds."""

    def __init__(self, records: dict[Run, dict[str, Any]], starts: dict[str, Any]) -> None:
        self.records, self.starts = records, starts
        self.cells: dict[Key, dict[int, dict[str, Any]]] = {}
        for run, record in sorted(records.items()):
            key = (run.task, run.method, run.lam, run.steps)
            self.cells.setdefault(key, {})[run.seed] = record

    def value(self, key: Key, field: str = "loss") -> float | None:
        """The mean over the seeds; infinite where one diverged, None where there is none."""
        records = self.cells.get(key, {}).values()
        if not records:
            return None
        if any(r["diverged"] for r in records):
            return float("inf")
        return float(mean(r[field] for r in records))

    def best(self, task: str, method: str, steps: int) -> Key | None:
        """The key with the smallest loss of the first seed, which every λ has."""
        keys = [key for key in self.cells if (key[0], key[1], key[3]) == (task, method, steps)]
        scored = [(self.cells[key][0]["loss"], key) for key in keys if 0 in self.cells[key]]
        finite = [(loss, key) for loss, key in scored if loss is not None]
        return min(finite)[1] if finite else None

    def tasks(self, *modes: str, steps: int = STEPS[0]) -> list[str]:
        """The names of the tasks that have records of this length; all modes if none is given."""
        known = {key[0] for key in self.cells if key[3] == steps}
        return [
            name for name, t in TASKS.items() if name in known and (not modes or _mode(t) in modes)
        ]


def _llama(results: Results) -> list[str]:
    return [name for name in results.tasks(steps=LLAMA) if name.startswith("peft")]


def _texts(names: list[str]) -> list[str]:
    return [name for name in names if TASKS[name].context]


def _mode(task: Any) -> str:
    return f"{task.mode}{'-bf16' if task.half else ''}"


def write(out: Path, page: Path) -> list[Path]:
    """Fill the page's regions; those it does not have are added at its end.

    Raises:
        ValueError: there are no records.
    """
    paths = {name: out / "starts" / f"{name}.json" for name in STARTS}
    starts = {name: json.loads(p.read_text()) for name, p in paths.items() if p.is_file()}
    results = Results(read(out, TASKS), starts)
    if not results.records:
        raise ValueError(
            f"`--out` must be a folder with records, got {out}; "
            "`python -m experiments.finetune` makes them."
        )
    text = page.read_text(encoding="utf-8") if page.is_file() else "# Fine-tuning\n"
    for name, lines in regions(results).items():
        text = fill(text, name, "\n".join(lines))
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return [page]


def regions(results: Results) -> dict[str, list[str]]:
    """Every region's lines."""
    middle = _texts(results.tasks(*MIDDLE))
    images = [name for name in results.tasks() if not TASKS[name].context]
    half = [name for name in results.tasks() if TASKS[name].half]
    rest = [n for n in results.tasks() if n not in (*middle, *images, *half)]
    return {
        "ranks": _ranks(results),
        "defaults": _losses(results, middle),
        "tuned": _tuned(results, [*middle, *images]),
        "forgetting": _losses(results, middle, "first_loss"),
        "curve": _curve(results, middle),
        "images": _losses(results, images),
        "modes": _modes(results, rest),
        "peft": _losses(results, _llama(results), steps=LLAMA),
        "bf16": _half(results, half),
        **{f"steps-{n}": _losses(results, _texts(results.tasks(*MIDDLE, steps=n)), steps=n)
           for n in sorted(STEPS[1:])},
        "costs": _costs(results, middle),
        "runs": _runs(results),
    }  # fmt: skip


# ---------------------------------------------------------------------------------- tables


def _defaults(results: Results, names: Iterable[str], steps: int) -> list[tuple[str, float]]:
    """The methods and the λ that are run untuned, of those with any record."""
    pairs = [(m.name, lam) for m in METHODS.values() for lam in m.defaults]
    return [p for p in pairs if any((n, *p, steps) in results.cells for n in names)]


def _label(method: str, lam: float) -> str:
    row = METHODS[method]
    return f"{row.label}, {lam:g}" if len(row.defaults) > 1 else row.label


def _losses(
    results: Results, names: list[str], field: str = "loss", steps: int = STEPS[0]
) -> list[str]:
    """Every untuned method's loss, the best of each task in bold."""
    rows = []
    pairs = _defaults(results, names, steps)
    for pair in pairs:
        cells = [_text(results, (name, *pair, steps), field, pairs) for name in names]
        rows.append((_label(*pair), *cells))
    heads = [f"{name}{_before(results, name, field)}" for name in names]
    return table(("at its default", *heads), rows)


def _before(results: Results, name: str, field: str) -> str:
    """What the network had reached before, if that is known."""
    start = results.starts.get(TASKS[name].source)
    if start is None:
        return ""
    value = start.get("loss" if field == "first_loss" else "first_loss")
    return "" if value is None else f" (before: {value:.3f})"


def _text(results: Results, key: Key, field: str, rivals: list[tuple[str, float]]) -> str:
    value = results.value(key, field)
    if value is None:
        return "–"
    if value == float("inf"):
        return "diverged"
    others = [results.value((key[0], *pair, key[3]), field) for pair in rivals]
    text = f"{value:.3f} (n = {len(results.cells[key])})"
    best = bool(others) and value <= min(other for other in others if other is not None)
    return f"**{text}**" if best else text


def _modes(results: Results, names: list[str]) -> list[str]:
    """The same with a line for each task, of which there are many."""
    pairs = _defaults(results, names, STEPS[0])
    rows = [
        (name, *(_text(results, (name, *pair, STEPS[0]), "loss", pairs) for pair in pairs))
        for name in names
    ]
    return table(("task", *(_label(*pair) for pair in pairs)), rows)


def _tuned(results: Results, names: list[str]) -> list[str]:
    """The best λ of every method that has several, beside ours with nothing set."""
    first = [_text(results, (name, *_OURS, STEPS[0]), "loss", []) for name in names]
    rows = [("WNMuon, `finetune=True`, nothing tuned", *first)]
    for method in (m for m in METHODS.values() if len(m.lams) > 1):
        keys = [results.best(name, method.name, STEPS[0]) for name in names]
        if any(keys):
            cells = [_at(results, key) for key in keys]
            rows.append((f"{method.label}, best of {len(method.lams)}", *cells))
    return table(("", *names), rows)


def _at(results: Results, key: Key | None) -> str:
    if key is None:
        return "–"
    return f"{results.value(key):.3f} at {key[2]:g} (n = {len(results.cells[key])})"


def _curve(results: Results, names: list[str]) -> list[str]:
    """ρ moved by √10 and by 10, with `finetune` and without."""
    rows = []
    for method in (OURS, "wnmuon"):
        for name in names:
            cells = [results.value((name, method, lam, STEPS[0])) for lam in METHODS[method].lams]
            texts = ["–" if cell is None else f"{cell:.3f}" for cell in cells]
            rows.append((name, METHODS[method].label, *texts))
    heads = [f"ρ = {lam:g}" for lam in METHODS[OURS].lams]
    return table(("task", "", *heads), rows)


def _half(results: Results, names: list[str]) -> list[str]:
    """Weights in bfloat16 beside those in float32."""
    rows = []
    for name in names:
        whole = name.removesuffix("-bf16")
        for method, lam in _defaults(results, [name], STEPS[0]):
            keys = [(each, method, lam, STEPS[0]) for each in (name, whole)]
            values = [results.value(key) for key in keys]
            bytes_ = [results.value(key, "state_bytes") for key in keys]
            cells = ["–" if v is None else f"{v:.4f}" for v in values]
            sizes = ["–" if b is None else f"{b / 1e6:.1f}" for b in bytes_]
            rows.append((name, _label(method, lam), *cells, *sizes))
        key = (name, "nearest", METHODS["nearest"].lams[0], STEPS[0])
        if (value := results.value(key)) is not None:
            rows.append((name, METHODS["nearest"].label, f"{value:.4f}", "–", "–", "–"))
    heads = ("loss, bfloat16", "loss, float32", "state, MB", "state in float32, MB")
    return table(("task", "method", *heads), rows)


def _ranks(results: Results) -> list[str]:
    """Mean ranks at defaults, where every rival was run: ours is ranked against rivals alone."""
    ranks: dict[tuple[str, float], list[tuple[bool, int]]] = {}
    every = _defaults(results, results.tasks(), STEPS[0])
    rivals = [pair for pair in every if METHODS[pair[0]].part == "tuned"]
    for steps in sorted(STEPS):
        for name in (n for n in results.tasks(steps=steps) if not TASKS[n].half):
            costs = {pair: results.value((name, *pair, steps)) for pair in every}
            if any(costs.get(pair) is None for pair in (*rivals, _OURS)):
                continue
            for pair, cost in costs.items():
                others = [*rivals, _OURS] if pair in rivals else rivals
                if cost is not None:
                    better = sum((costs[other] or 0.0) < cost for other in others)
                    ranks.setdefault(pair, []).append((TASKS[name].context > 0, 1 + better))
    rows = []
    for pair, each in ranks.items():
        parts = [each, [r for r in each if r[0]], [r for r in each if not r[0]]]
        means = [mean(rank for _, rank in part) if part else 0.0 for part in parts]
        cells = [f"{m:.1f} ({len(p)})" for m, p in zip(means, parts, strict=True)]
        rows.append((means[0], (_label(*pair), *cells)))
    heads = ("at its default", "mean rank (cases)", "texts", "images")
    return table(heads, [row for _, row in sorted(rows)])


def _costs(results: Results, names: list[str]) -> list[str]:
    """Bytes of state for each trained parameter's, and milliseconds of an optimizer's step."""
    rows = []
    for pair in _defaults(results, names, STEPS[0]):
        cells: list[str] = []
        for name in names:
            records = results.cells.get((name, *pair, STEPS[0]), {}).values()
            kept = [r for r in records if not r["diverged"]]
            size = f"{kept[0]['state_bytes'] / 1e6:.2f} MB" if kept else "–"
            time = f"{median(r['optimizer_ms'] for r in kept):.2f} ms" if kept else "–"
            cells.append(f"{size}, {time}")
        rows.append((_label(*pair), *cells))
    return table(("state, optimizer's step", *names), rows)


def _runs(results: Results) -> list[str]:
    """What was run, where and with what."""
    records = list(results.records.values())
    made = {f"{k} {r['environment'][k]}" for r in records for k in ("wngrad", "torch", "commit")}
    devices = sorted({f"{r['environment']['device']}, {r['precision']}" for r in records})
    steps = sum(run.steps for run in results.records)
    return [
        f"{len(records)} runs, {steps:,} steps, on {'; '.join(devices)}; "
        f"{sum(r['diverged'] for r in records)} diverged. Made with {', '.join(sorted(made))}."
    ]
