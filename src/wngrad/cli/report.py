"""`wngrad report`: the page, the figure and the summary of a recipe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from wngrad.cli.messages import fail, warn
from wngrad.cli.sweep import show_report


def report(
    recipe: Annotated[
        str,
        typer.Argument(help="See `wngrad list`; module:sweep; or the folder of a `wngrad sweep`."),
    ],
    records: Annotated[
        str | None,
        typer.Option(help="The folder or address of a run, or a .jsonl file of records."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="A folder; if not given out/RECIPE, or that of a `wngrad sweep` itself."),
    ] = None,
) -> None:
    """Write the page, the figure and the summary of a sweep from its records. Never trains."""
    from wngrad.lab import recipes
    from wngrad.lab.report import builder
    from wngrad.lab.run.places import is_address
    from wngrad.lab.run.store import Store, exported
    from wngrad.lab.sweep import page_source

    if is_address(recipe) or (Path(recipe) / page_source.NAME).is_file():
        if records is not None:
            fail(f"`--records` must be left out for a folder, which has its own, got {records}.")
        show_report(recipe, out or (Path("out") if is_address(recipe) else Path(recipe)))
        return
    if recipe not in recipes.RECIPES and ":" not in recipe:
        _check_folder(recipe)
    try:
        sweep = recipes.find(recipe)
        folder = out or Path("out") / sweep.name
        source = records or folder
        store = Store(source, warn=warn)
        one_file = records is not None and not is_address(records) and not Path(records).is_dir()
        each = exported(Path(source)) if one_file else store.records()
        written = builder.write(sweep, each, folder, recipe=recipe)
        if not one_file:
            store.export(folder / "records.jsonl")
        for path in written:
            print(f"Wrote {path}.")
    except (ValueError, OSError) as error:  # Damaged is a ValueError
        fail(str(error))


def _check_folder(recipe: str) -> None:
    """Refuse what is meant as a folder and holds no sweep."""
    if Path(recipe).is_dir():
        fail(
            f"`recipe` {recipe} is a folder without the page.json of a `wngrad sweep`; that of a "
            f"`wngrad run` is given as `wngrad report RECIPE --records {recipe}`."
        )
    if "/" in recipe or os.sep in recipe:
        fail(f"`recipe` must be a recipe or the folder of a `wngrad sweep`; {recipe} is not there.")
