"""What a step of each optimizer cost, and what a stopping rule has saved: read from the log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a training step: seconds, and bytes that the optimizer keeps; None if not known."""

    seconds: float | None
    bytes: int | None

    def time_text(self) -> str:
        """

        >>> Cost(0.00123, None).time_text()
        '1.23 ms'
        """
        if self.seconds is None:
            return "–"
        return f"{self.seconds:.3g} s" if self.seconds >= 1 else f"{1e3 * self.seconds:.3g} ms"

    def memory_text(self) -> str:
        """

        >>> Cost(None, 2_400_000).memory_text()
        '2.4 MB'
        """
        if self.bytes is None:
            return "–"
        scale, unit = next(
            ((s, u) for s, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if self.bytes >= s),
            (1, "B"),
        )
        return f"{self.bytes / scale:.3g} {unit}"


@dataclass(frozen=True, slots=True)
class Log:
    """What the log of a folder says of costs."""

    costs: Mapping[str, Cost] = field(default_factory=dict)
    stopped: int = 0  # runs that a rule has ended
    saved_seconds: float = 0.0

    def saved(self) -> str:
        """What the rule did, in a sentence."""
        if not self.stopped:
            return "It has ended no run."
        return (
            f"It has ended {self.stopped} runs, and saved about {self.saved_seconds:.3g} s of "
            "training."
        )


def read(sessions: Iterable[Mapping[str, Any]]) -> Log:
    """The costs in the entries of a log: the least time, as other work only adds to it."""
    seconds: dict[str, list[float]] = {}
    memory: dict[str, int] = {}
    stopped, saved = 0, 0.0
    for entry in sessions:
        for name, cost in _dict(entry.get("costs")).items():
            if (took := _number(_dict(cost).get("step_seconds"))) is not None:
                seconds.setdefault(name, []).append(took)
            if (kept := _number(_dict(cost).get("state_bytes"))) is not None:
                memory[name] = max(int(kept), memory.get(name, 0))
        if entry.get("stopped"):
            stopped, saved = stopped + 1, saved + (_number(entry.get("saved_seconds")) or 0.0)
    names = dict.fromkeys((*seconds, *memory))
    costs = {n: Cost(min(seconds[n]) if n in seconds else None, memory.get(n)) for n in names}
    return Log(costs, stopped, saved)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None
