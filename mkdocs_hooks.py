"""What MkDocs does to the pages of docs/, which are written to be read on a code host, too.

A link that leaves the site (to results/, to a source file) leads to the repository, and is plain
text as long as the repository has no address. A notebook becomes a page, with its pictures beside.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
from typing import TYPE_CHECKING, Any

from wngrad.install import REPOSITORY

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

SHOWN = (".md", ".png", ".svg")  # what the site has of docs/
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|`[^`]*`)+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Puts a page in the place of every notebook."""
    from mkdocs.structure.files import File

    for notebook in [file for file in files if file.src_uri.endswith(".ipynb")]:
        name = notebook.src_uri.removesuffix(".ipynb")
        text, pictures = notebook_page(
            json.loads(notebook.content_string), posixpath.basename(name)
        )
        files.remove(notebook)
        files.append(File.generated(config, f"{name}.md", content=text))
        for picture, content in pictures.items():
            place = posixpath.join(posixpath.dirname(name), picture)
            files.append(File.generated(config, place, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """What code hosts and MkDocs read differently."""
    return site_markdown(markdown, page.file.src_uri)


def site_markdown(markdown: str, src_uri: str, repository: str = REPOSITORY) -> str:
    """A page of docs/ as the site has it.

    Links that leave the site are changed. A fence `python integrations` is one of Python. A list
    within a list is indented by four spaces, where code hosts are content with two.

    Example:
        >>> site_markdown("See [the numbers](../results/a.json) and [b](b.md#c).", "a.md", "")
        'See the numbers (`results/a.json`) and [b](b.md#c).'
        >>> site_markdown("[the numbers](../results/a.json)", "a.md", "https://example.org/w")
        '[the numbers](https://example.org/w/blob/main/results/a.json)'
    """
    folder = posixpath.join("docs", posixpath.dirname(src_uri))

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if path.endswith(".ipynb"):
            return f"[{text}]({target.removesuffix('.ipynb')}.md{anchor})"
        if path.startswith("docs/") and path.endswith(SHOWN):
            return link[0]
        if repository.startswith("https://"):
            return f"[{text}]({repository}/blob/main/{path}{anchor})"
        return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"

    # Code is left alone: the even pieces lie outside of fences.
    pieces = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.S | re.M)
    pieces[::2] = [
        re.sub(r"^  (?=- )", "    ", _LINK.sub(replaced, piece), flags=re.M)
        for piece in pieces[::2]
    ]
    pieces[1::2] = [
        piece.replace("```python integrations", "```python", 1) for piece in pieces[1::2]
    ]
    return "".join(pieces)


def notebook_page(notebook: dict[str, Any], name: str) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and the pictures that it drew.

    Example:
        >>> cells = [{"cell_type": "markdown", "source": ["# Hello"]}]
        >>> notebook_page({"cells": cells}, "hello")
        ('# Hello\\n', {})
    """
    parts, pictures = [], {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" in data:
                picture = f"{name}-{len(pictures) + 1}.png"
                pictures[picture] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![{cell['metadata'].get('alt', '')}]({picture})")
            elif text := "".join(output.get("text", data.get("text/plain", ""))):
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n", pictures
