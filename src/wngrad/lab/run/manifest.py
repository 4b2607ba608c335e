"""`sweep.json`, the plan of a store: its settings and packs, checked before any name is used.

A folder may come from somebody else. The names in it become names of files, so they are matched
against ours, and never joined as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from wngrad.lab.run.files import Damaged
from wngrad.lab.train.spec import Pack, Setting, is_lam, is_seed

_NAME = re.compile(r"pack-[0-9]{4,9}")


def entries(packs: Sequence[Pack]) -> list[dict[str, Any]]:
    """Packs as plain data."""
    return [
        {
            "name": pack.name,
            "settings": [[s.optimizer, s.lam] for s in pack.settings],
            "seeds": list(pack.seeds),
        }
        for pack in packs
    ]


def packs_of(manifest: dict[str, Any], name: str) -> list[Pack]:
    """The packs of a plan, whose fields are ours, or Damaged."""
    packs, settings = manifest.get("packs"), manifest.get("settings")
    if not (isinstance(packs, list) and isinstance(settings, dict)):
        raise Damaged(f"{name} is not the plan of a sweep.")
    for entry in packs:
        if not _is_pack(entry):
            raise Damaged(f"{name} has a pack that is none of ours: {str(entry)[:100]!r}.")
    if len({entry["name"] for entry in packs}) < len(packs):
        raise Damaged(f"{name} has two packs of one name.")
    return [_pack(entry) for entry in packs]


def _pack(entry: dict[str, Any]) -> Pack:
    settings = tuple(Setting(name, lam) for name, lam in entry["settings"])
    return Pack(entry["name"], settings, tuple(entry["seeds"]))


def _is_pack(entry: Any) -> bool:
    if not (isinstance(entry, dict) and entry.keys() >= {"name", "settings", "seeds"}):
        return False
    name, settings, seeds = entry["name"], entry["settings"], entry["seeds"]
    return (
        isinstance(name, str)
        and _NAME.fullmatch(name) is not None
        and isinstance(settings, list)
        and bool(settings)
        and all(map(_is_setting, settings))
        and isinstance(seeds, list)
        and bool(seeds)
        and all(is_seed(seed) for seed in seeds)
    )


def _is_setting(pair: Any) -> bool:
    return (
        isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) and is_lam(pair[1])
    )
