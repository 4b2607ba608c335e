"""`page.json`: what the page of a sweep's folder is made from, beside the records.

It grows with every `wngrad sweep` into the folder, so that a page shows all that is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from wngrad.lab.run import files
from wngrad.lab.run.store import Store
from wngrad.lab.train.spec import Setting, Sweep

NAME = "page.json"


@dataclass(frozen=True, slots=True)
class PageSource:
    """A sweep, the lines that say how it was run, and the commands that a user typed, in order."""

    sweep: Sweep
    notes: tuple[str, ...]
    commands: tuple[str, ...]


def read(store: Store) -> PageSource | None:
    """What a folder says; None if it says nothing that can be read."""
    path = store.folder / NAME
    data = store.place.read(path)
    if data is None:
        return None
    try:
        plain = files.open_json(data, str(path))
        sweep = Sweep.from_json(plain["sweep"])
        typed = plain["commands"] if "commands" in plain else [plain["command"]]  # as at first
        return PageSource(sweep, tuple(map(str, plain["notes"])), tuple(map(str, typed)))
    except (ValueError, TypeError, KeyError, AttributeError) as error:  # Damaged is a ValueError
        store.warn(f"{path} cannot be read, and is not used: {error}")
        return None


def add(store: Store, source: PageSource) -> None:
    """Add a sweep to what the folder says."""
    before = read(store)
    if before is not None:
        notes = {note.partition(": ")[0]: note for note in (*before.notes, *source.notes)}
        sweep = merged(before.sweep, source.sweep)
        commands = tuple(dict.fromkeys((*before.commands, *source.commands)))
        source = PageSource(sweep, tuple(notes.values()), commands)
    plain: dict[str, Any] = {"sweep": source.sweep.to_json()}
    plain |= {"notes": list(source.notes), "commands": list(source.commands)}
    store.place.write(store.folder / NAME, files.seal_json(plain))


def merged(before: Sweep, now: Sweep) -> Sweep:
    """All optimizers, λ and seeds of both; all else is the later one's."""
    grids = _without_lone_defaults(before, now), _without_lone_defaults(now, before)
    pairs = tuple(dict.fromkeys((*grids[0], *grids[1])))
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


def _without_lone_defaults(sweep: Sweep, other: Sweep) -> list[Setting]:
    """A sweep's settings on the grid; an optimizer that ran at its default alone has none there.

    Unless it did so in the other sweep as well, or its default is on the grid of the others.
    """
    on_grid = _on_grid(sweep)
    swept = [each for each in on_grid if not _is_lone_default(sweep, each)]
    lams = {each.lam for each in swept}
    elsewhere = {e.optimizer for e in _on_grid(other) if not _is_lone_default(other, e)}
    return [e for e in on_grid if e in swept or e.lam in lams or e.optimizer not in elsewhere]


def _is_lone_default(sweep: Sweep, setting: Setting) -> bool:
    """Whether a setting is the default of an optimizer for which the sweep has no other λ."""
    others = [pair for pair in sweep.pairs if pair.optimizer == setting.optimizer]
    return setting in sweep.defaults and others == [setting]


def _on_grid(sweep: Sweep) -> Sequence[Setting]:
    return sweep.pairs or [Setting(o, lam) for o in sweep.optimizers for lam in sweep.lam]
