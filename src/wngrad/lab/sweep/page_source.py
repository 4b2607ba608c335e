"""`page.json`: what the page of a sweep's folder is made from, beside the records.

It grows with every `wngrad sweep` into the folder, so that a page shows all that is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from wngrad.lab.run import files
from wngrad.lab.run.store import Store
from wngrad.lab.train.spec import Setting, Sweep

NAME = "page.json"


@dataclass(frozen=True, slots=True)
class PageSource:
    """A sweep, the lines that say how it was run, and the command that the user typed last."""

    sweep: Sweep
    notes: tuple[str, ...]
    command: str


def read(store: Store) -> PageSource | None:
    """What a folder says; None if it says nothing that can be read."""
    path = store.folder / NAME
    data = store.place.read(path)
    if data is None:
        return None
    try:
        plain = files.open_json(data, str(path))
        sweep = Sweep.from_json(plain["sweep"])
        return PageSource(sweep, tuple(map(str, plain["notes"])), str(plain["command"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # Damaged is a ValueError
        store.warn(f"{path} cannot be read, and is not used: {error}")
        return None


def add(store: Store, source: PageSource) -> None:
    """Add a sweep to what the folder says."""
    before = read(store)
    if before is not None:
        notes = {note.partition(": ")[0]: note for note in (*before.notes, *source.notes)}
        sweep = merged(before.sweep, source.sweep)
        source = PageSource(sweep, tuple(notes.values()), source.command)
    plain: dict[str, Any] = {"sweep": source.sweep.to_json()}
    plain |= {"notes": list(source.notes), "command": source.command}
    store.place.write(store.folder / NAME, files.seal_json(plain))


def merged(before: Sweep, now: Sweep) -> Sweep:
    """All optimizers, λ and seeds of both; all else is the later one's."""
    pairs = tuple(dict.fromkeys((*_on_grid(before), *_on_grid(now))))
    defaults = {each.optimizer: each for each in (*before.defaults, *now.defaults)}
    names = tuple(dict.fromkeys(pair.optimizer for pair in pairs))
    lam = tuple(sorted({pair.lam for pair in pairs}))
    whole = len(pairs) == len(names) * len(lam)
    return replace(
        now,
        optimizers=names,
        lam=lam,
        pairs=() if whole else pairs,
        defaults=tuple(defaults.values()),
        alone=tuple(dict.fromkeys((*before.alone, *now.alone))),
        seeds=tuple(sorted({*before.seeds, *now.seeds})),
        epochs=max(before.epochs, now.epochs),
    )


def _on_grid(sweep: Sweep) -> Iterable[Setting]:
    return sweep.pairs or tuple(Setting(o, lam) for o in sweep.optimizers for lam in sweep.lam)
