"""From records to a report: a page, a picture and a summary. Nothing is trained here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wngrad.lab.report import figures, page, sweep_table
from wngrad.lab.report.cells import label, lam_text
from wngrad.lab.report.claims import Finding
from wngrad.lab.report.commands import commands
from wngrad.lab.report.results import USABLE, Results
from wngrad.lab.train.spec import Record, Sweep


def write(
    sweep: Sweep,
    records: Sequence[Record],
    out: Path,
    *,
    notes: Sequence[str] = (),
    recipe: str = "",
) -> list[Path]:
    """Write report.html, figure.png, figure.svg and summary.md into `out`.

    Args:
        sweep: what was to be run; its claims are judged.
        records: what was run. Lanes that are missing or failed are named, never invented.
        out: a folder; made if need be.
        notes: remarks to print beside those of the records.
        recipe: what the user calls the sweep on the command line, if not by its name.

    Returns:
        The files, the page first.

    Raises:
        ValueError: no record belongs to the sweep.
    """
    results = Results(sweep, records)
    findings = [claim.measure(results) for claim in sweep.claims]
    out.mkdir(parents=True, exist_ok=True)
    html, png, svg, summary = (
        out / name for name in ("report.html", "figure.png", "figure.svg", "summary.md")
    )
    html.write_text(page.render(results, findings, notes, recipe), encoding="utf-8")
    figures.write(results, notes, [png, svg])
    summary.write_text(markdown(results, findings, notes, recipe), encoding="utf-8")
    return [html, png, svg, summary]


def markdown(
    results: Results, findings: Sequence[Finding], notes: Sequence[str] = (), recipe: str = ""
) -> str:
    """The summary: claims, best λ, and what it all rests on."""
    if results.sweep.task:
        return _of_a_task(results, notes, recipe)
    sweep = results.sweep
    lines = [
        f"# {sweep.name}: {label(sweep.dataset)}, {label(sweep.model)}",
        "",
        f"{sweep.claim} {page.verdicts(results, findings)}",
        "",
        f"{results.facts()}. Every mean is over the seeds, ± one sample standard deviation; n is "
        "their number, or in the first table that of all lanes. Less than two standard errors of a "
        "difference is called noise.",
        "",
        "![Two metrics over λ and over the epochs](figure.png)",
        "",
        *(["## Claims", "", *_claims(findings), ""] if findings else []),
        *["## Best λ", "", *_bests(results), ""],
        *["## How it was made", "", *_made(results, notes, recipe), ""],
        *["## What was left out", "", *_list(results.left_out() or ["Nothing."]), ""],
    ]
    return "\n".join(lines)


def _of_a_task(results: Results, notes: Sequence[str], recipe: str) -> str:
    """The summary of a sweep of one's own."""
    found = sweep_table.rows(results)
    told = sweep_table.verdict(results, found) + page.provisional(results)
    rows = [sweep_table.texts(results, row) for row in found]
    lines = [
        *[f"# {_plain(results.sweep.name)}", "", f"{results.sweep.claim} {_plain(told)}", ""],
        *[f"{_plain(results.facts())}.", ""],
        *_table(sweep_table.heads(results), rows),
        *["", sweep_table.legend(results), ""],
        *["![Two metrics over λ and over the epochs](figure.png)", ""],
        *["## How it was made", "", *_made(results, notes, recipe), ""],
        *["## What was left out", "", *_list(results.left_out() or ["Nothing."]), ""],
    ]
    return "\n".join(lines)


def _claims(findings: Sequence[Finding]) -> list[str]:
    rows = [(f.text, f.source, f.measured, f.n or "–", f.rule, f.verdict) for f in findings]
    return _table(("claim", "source", "measured", "n", "how judged", "verdict"), rows)


def _bests(results: Results) -> list[str]:
    """Each optimizer at its best, and what it reaches there."""
    metrics, grid = results.sweep.metrics, len(results.sweep.lam)
    rows = []
    for name in results.sweep.optimizers:
        best, lost = results.best(name), results.diverged(name)
        ran = sum(lane.optimizer == name for lane in results.done)
        found: list[object] = ["–", *("–" for _ in metrics)]
        if best:
            found = [lam_text(best.lam), *(results.cell(name, best.lam, m) for m in metrics)]
        usable = f"{len(results.usable(name))} of {grid}"
        rows.append((label(name), *found, f"{lost} of {ran}", usable))
    there = [f"{label(metric)} there" for metric in metrics]
    heads = ("optimizer", "best λ", *there, "diverged lanes", "usable λ")
    return [
        *_table(heads, rows),
        "",
        f"The best λ is that of the best mean {label(results.sweep.best_by)} at epoch "
        f"{results.epochs}, among those at which no seed diverged. A λ is usable if its mean test "
        f"accuracy is within {100 * USABLE:g} points of the best of all optimizers.",
    ]


def _made(results: Results, notes: Sequence[str], recipe: str) -> list[str]:
    facts = [f"{key}: {value}" for key, value in results.provenance().items()]
    again = ["```sh", *commands(results, recipe), "```"]
    return [*_list([*facts, *results.notes(), *notes]), "", "To make it again:", "", *again]


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    rule = "|---" * len(heads) + "|"
    return [_row(heads), rule, *(_row(row) for row in rows)]


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(value: object) -> str:
    return _plain(str(value)).replace("|", r"\|")


def _list(items: Sequence[str]) -> list[str]:
    return [f"- {_plain(item)}" for item in items]


def _plain(text: str) -> str:
    """One line, and no HTML."""
    return " ".join(text.split()).replace("<", "&lt;")
