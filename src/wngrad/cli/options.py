"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer

Recipe: TypeAlias = Annotated[str, typer.Argument(help="See `wngrad list`; or module:sweep.")]
Data: TypeAlias = Annotated[
    Path | None,
    typer.Option(help="A folder with the data (or set WNGRAD_DATA); else it is downloaded."),
]
Device: TypeAlias = Annotated[str, typer.Option(help="cpu, cuda, or auto.")]
Out: TypeAlias = Annotated[
    str | None, typer.Option(help="A folder, or an address as s3://…; out/NAME if not given.")
]
Lanes: TypeAlias = Annotated[
    int | None, typer.Option(min=1, help="At most so many at once, if memory is short.")
]
Note: TypeAlias = Annotated[str, typer.Option(help="What a reader of the report must know.")]
Patience: TypeAlias = Annotated[
    float | None,
    typer.Option(min=1, help="Seconds of silence (compilation is silent) to call a hang."),
]
SaveEvery: TypeAlias = Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")]
Ray: TypeAlias = Annotated[
    str | None, typer.Option(help="Run on a Ray cluster: HOST:PORT, auto, or local.")
]
Workers: TypeAlias = Annotated[
    int, typer.Option(min=1, help="Processes of this machine, each with a pack at a time.")
]
Cpus: TypeAlias = Annotated[int, typer.Option(min=1, help="Cores, and torch's threads, a pack.")]
Packs: TypeAlias = Annotated[
    int | None,
    typer.Option(min=1, help="Train at most so many packs that lack records; then write a report."),
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Print packs, resources and time; train nothing.")
]
