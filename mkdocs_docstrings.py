"""How mkdocstrings reads our docstrings."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.M)
_PAGE = re.compile(r"`?docs/([a-z-]+)\.md`?")


class Doctests(griffe.Extension):
    """Shows a doctest as code. The lines of one would otherwise run together, as a quotation.

    Our section is called `Example:`, the one that griffe knows is `Examples:`. A doctest outside of
    any section is put between fences. The path of a page becomes a link to it.
    """

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            text = obj.docstring.value.replace("\nExample:\n", "\nExamples:\n")
            text = _PAGE.sub(_linked, text)
            obj.docstring.value = _DOCTEST.sub(r"```pycon\n\g<0>\n```", text)


def _linked(path: re.Match[str]) -> str:
    """A link from a page in docs/api."""
    return f"[{path[1].replace('-', ' ')}](../{path[1]}.md)"
