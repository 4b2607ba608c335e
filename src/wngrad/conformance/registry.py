"""The list of probes, with the explanations of `probes/README.md`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wngrad.conformance.subject import Subject

Ask = Callable[[Subject], str | None]


@dataclass(frozen=True, slots=True)
class Probe:
    """A question to an optimizer. Returns a measurement or None for a pass."""

    name: str
    does: str
    why: str  # a user would care
    failing: str  # what it looks like in practice
    ask: Ask
    distributed: bool = False

    @property
    def seconds(self) -> float:
        """The time limit."""
        return 120.0 if self.distributed else 30.0


REGISTERED: list[Probe] = []


def _explanations() -> dict[str, list[str]]:
    """Of every probe what it does, why, and what failing looks like."""
    lines = (Path(__file__).parent / "probes" / "README.md").read_text().splitlines()
    rows = [re.split(r" (?<!\\)\| ", line.strip("| ")) for line in lines if line.startswith("| ")]
    return {name: [text.replace("\\|", "|") for text in texts] for name, *texts in rows}


_EXPLANATIONS = _explanations()


def probe(name: str, *, distributed: bool = False) -> Callable[[Ask], Ask]:
    """Registers a function as a probe."""

    def register(ask: Ask) -> Ask:
        does, why, failing = _EXPLANATIONS[name]
        REGISTERED.append(Probe(name, does, why, failing, ask, distributed))
        return ask

    return register
