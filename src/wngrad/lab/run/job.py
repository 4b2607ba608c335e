"""A job: a sweep, where its records go, and how it is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from wngrad.lab.run.store import Store
from wngrad.lab.train.spec import Pack, Sweep

Event = dict[str, Any]  # what happened: a `kind`, and what belongs to it
Tell = Callable[[Event], None]


@dataclass(frozen=True, slots=True)
class Job:
    """A sweep to be run, and all that a worker must know to run its packs."""

    sweep: Sweep
    out: Path | str  # a folder, or an address
    data: Path | None = None
    device: str = "auto"
    note: str = ""
    save_every: float = 30.0
    sized: bool = False  # whether someone has said how many lanes a pack has
    cpus: int = 1  # torch's threads in a worker
    packs: int | None = None  # at most so many are run, of those that lack records; None: all

    def to_json(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        data = str(self.data) if self.data else None
        return plain | {"sweep": self.sweep.to_json(), "out": str(self.out), "data": data}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Job:
        data = Path(plain["data"]) if plain["data"] else None
        return cls(**plain | {"sweep": Sweep.from_json(plain["sweep"]), "data": data})


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended: an exit status, the message of an error, and the lanes that failed."""

    status: int
    text: str = ""
    failed: list[str] = field(default_factory=list)  # lanes, with reasons
    left: int = 0  # packs that lack records, and were not to be run this time


def unfinished(store: Store, sweep: Sweep, conditions: dict[str, Any], tell: Tell) -> list[Pack]:
    """The packs of `sweep` that lack records, those that have failed before at the end.

    Those that are done are told as such.

    Raises:
        Mismatch: the store holds a sweep made under other conditions.
    """
    packs = store.open(sweep, conditions)
    lanes = sum(len(pack.lanes) for pack in packs)
    tell({"kind": "plan", "lanes": lanes, "epochs": sweep.epochs})
    settings = {**sweep.identity(), **conditions}
    left = store.unfinished(packs, settings, sweep.epochs)
    names = {pack.name for pack in left}
    for pack in (pack for pack in packs if pack.name not in names):
        with store.claim(pack) as claimed:
            if claimed:  # whoever wrote the last record may not have come to it
                store.finish(pack)
        tell({"kind": "had", "pack": pack.name, "lanes": len(pack.lanes)})
    return sorted(left, key=lambda pack: any(map(store.has_record, pack.lanes)))
