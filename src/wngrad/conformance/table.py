"""The report of a run: as a table to read, as JSON to keep, and as Markdown to publish."""

from __future__ import annotations

import ast
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from wngrad.conformance.runner import PROBES, Outcome

MARKS = {"pass": "✓", "fail": "✗", "not applicable": "–", "not run": "·"}


@dataclass(frozen=True, slots=True)
class Row:
    """An optimizer and what the probes say about it."""

    name: str  # as it was asked for
    outcomes: list[Outcome]
    part: str = ""  # of the published table

    def count(self, status: str) -> int:
        return sum(outcome.status == status for outcome in self.outcomes)

    def summary(self) -> str:
        return ", ".join(f"{n} {status}" for status in MARKS if (n := self.count(status)))


def parse(text: str) -> tuple[str, dict[str, Any] | None]:
    """ "module:Class" or "module:Class(key=value)": the target and its keyword arguments."""
    match = re.fullmatch(r"([\w.]+:[\w.]+)(?:\((.*)\))?", text.strip(), re.S)
    try:
        if match is None:
            raise ValueError
        target, inside = match.groups()
        call = ast.parse(f"f({inside or ''})", mode="eval").body
        assert isinstance(call, ast.Call)
        if call.args or any(k.arg is None for k in call.keywords):
            raise ValueError
        kwargs = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(
            f"an optimizer must be module:Class or module:Class(key=value), got {text!r}."
        ) from None
    return target, (kwargs or None)


# --------------------------------------------------------------------- on the terminal


def show(row: Row) -> None:
    """A table on the terminal; with colours where rich is installed."""
    lines = [(o.status, o.probe, o.detail) for o in row.outcomes]
    usage = next((o.usage for o in row.outcomes if o.usage), "")
    title = f"{row.name}: {row.summary()}\n{usage}".rstrip()
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        print(title)
        for status, name, detail in lines:
            print(f"  {MARKS[status]} {name:<30}{detail or status}")
        return
    console = Console(emoji=False)  # a class may be called as one: zoo:Tiger
    console.print(title, markup=False, highlight=False, soft_wrap=True)
    table = Table(show_header=False, box=None)
    colours = {"pass": "green", "fail": "red", "not applicable": "dim", "not run": "dim"}
    for status, name, detail in lines:
        table.add_row(MARKS[status], name, escape(detail or status), style=colours[status])
    console.print(table)


def explained() -> Iterator[str]:
    for probe in PROBES.values():
        yield f"{probe.name}\n  {probe.does}\n  Why: {probe.why}\n  Failing: {probe.failing}"


# ------------------------------------------------------------------------------- JSON


def record(rows: list[Row], command: str) -> dict[str, Any]:
    """All of it as plain data, with date, command, machine and versions."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": command,
        "machine": f"{_processor()}, Python {platform.python_version()}",
        "versions": dict(sorted({_version(row.name) for row in rows} | {_version("torch:")})),
        "optimizers": [
            {
                "name": row.name,
                "part": row.part,
                "usage": next((o.usage for o in row.outcomes if o.usage), ""),
                "outcomes": [
                    {"probe": o.probe, "status": o.status, "detail": o.detail} for o in row.outcomes
                ],
            }
            for row in rows
        ],
    }


def _version(name: str) -> tuple[str, str]:
    module = name.partition(":")[0].partition(".")[0]
    names = metadata.packages_distributions().get(module, [module])
    try:
        return names[0], metadata.version(names[0])
    except metadata.PackageNotFoundError:
        return names[0], "not installed"


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"model name\s*: (.*)", text)
    return match[1].strip() if match else platform.processor() or platform.machine()


# --------------------------------------------------------------------------- Markdown

BEGIN, END = "<!-- made by `make conformance` -->\n", "<!-- until here -->\n"


def markdown(report: dict[str, Any]) -> str:
    """The published tables, the measurements and the reasons, from a record."""
    versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
    parts: dict[str, list[Any]] = {}
    for optimizer in report["optimizers"]:
        parts.setdefault(optimizer["part"], []).append(optimizer)
    where = f"on {report['machine']}, with {versions}"
    text = [f"Made on {report['date']} by `{report['command']}`, {where}.\n"]
    for part, optimizers in parts.items():
        text += [f"### {part}\n", *_grid(optimizers), ""]
    text += ["### Measured\n", *_measured(report["optimizers"]), ""]
    text += ["### Every ✗\n", *_reasons(report["optimizers"], "fail"), ""]
    text += ["### Every –\n", *_reasons(report["optimizers"], "not applicable"), ""]
    text += ["### How each was made and called\n"]
    text += [f"- `{o['name']}`: `{o['usage']}`" for o in report["optimizers"]]
    text += ["", "### The probes\n", *_probes()]
    return "\n".join(text) + "\n"


def _grid(optimizers: list[dict[str, Any]]) -> Iterator[str]:
    yield f"| | {' | '.join(_heading(o) for o in optimizers)} |"
    yield f"|---|{':-:|' * len(optimizers)}"
    columns = [[MARKS[outcome["status"]] for outcome in o["outcomes"]] for o in optimizers]
    names = [outcome["probe"] for outcome in optimizers[0]["outcomes"]]
    for name, *marks in zip(names, *columns, strict=True):
        yield f"| {name} | {' | '.join(marks)} |"
    totals = [f"**{column.count('✓')} of {len(column) - column.count('–')}**" for column in columns]
    yield f"| **passed of applicable** | {' | '.join(totals)} |"


def _heading(optimizer: dict[str, Any]) -> str:
    module, _, name = optimizer["name"].partition(":")
    return name if module in ("wngrad", "torch.optim") else f"{module}<br>{name}"


MEASURED = ("state size", "per-group lr", "compile", "NaN gradient", "bfloat16", "gradient spike")


def _measured(optimizers: list[dict[str, Any]]) -> Iterator[str]:
    yield f"| | {' | '.join(MEASURED)} |"
    yield f"|---|{'---|' * len(MEASURED)}"
    for optimizer in optimizers:
        outcomes = {o["probe"]: o for o in optimizer["outcomes"]}
        cells = [_measurement(outcomes.get(name)) for name in MEASURED]
        yield f"| {_heading(optimizer)} | {' | '.join(cells)} |"


def _measurement(outcome: dict[str, Any] | None) -> str:
    if outcome is None or outcome["status"] not in ("pass", "fail"):
        return MARKS[outcome["status"] if outcome else "not run"]
    return _cell(f"{'✗ ' * (outcome['status'] == 'fail')}{outcome['detail']}")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _reasons(optimizers: list[dict[str, Any]], status: str) -> Iterator[str]:
    for optimizer in optimizers:
        outcomes = [o for o in optimizer["outcomes"] if o["status"] == status]
        if outcomes:
            yield f"- `{optimizer['name']}`"
            yield from (f"  - {o['probe']}: {_cell(o['detail'])}" for o in outcomes)


def _probes() -> Iterator[str]:
    yield "| | what it does | why | failing looks like |"
    yield "|---|---|---|---|"
    for probe in PROBES.values():
        yield f"| {probe.name} | {_cell(probe.does)} | {probe.why} | {probe.failing} |"


def publish(page: Path, report: dict[str, Any]) -> None:
    """Replaces what lies between the page's two marks."""
    head, tail = halves(page)
    page.write_text(f"{head}{BEGIN}\n{markdown(report)}\n{END}{tail}")


def halves(page: Path) -> tuple[str, str]:
    """What stands before and after the marks of a page."""
    head, begin, rest = page.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} must have the lines {BEGIN.strip()!r} and {END.strip()!r}.")
    return head, tail
