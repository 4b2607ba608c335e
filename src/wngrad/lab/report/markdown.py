"""Tables and lists in Markdown, from text that may hold anything."""

from __future__ import annotations

from collections.abc import Sequence


def table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """The lines of a table."""
    return [_row(heads), "|---" * len(heads) + "|", *map(_row, rows)]


def bullets(items: Sequence[str]) -> list[str]:
    """The lines of a list."""
    return [f"- {plain(item)}" for item in items]


def plain(text: str) -> str:
    """One line, and no HTML."""
    return " ".join(text.split()).replace("<", "&lt;")


def _row(cells: Sequence[object]) -> str:
    texts = (plain(str(cell)).replace("|", r"\|") for cell in cells)
    return f"| {' | '.join(texts)} |"
