"""What a step of each optimizer cost, and what a stopping rule has saved: read from the log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from wngrad.lab.train.words import counted


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a training step; None where it is not known."""

    seconds: float | None = None
    state: int | None = None  # bytes that the optimizer keeps
    peak: int | None = None  # bytes that torch had allocated on CUDA, at most

    def time_text(self) -> str:
        """

        >>> Cost(0.00123).time_text()
        '1.23 ms'
        """
        if self.seconds is None:
            return "–"
        return f"{self.seconds:.3g} s" if self.seconds >= 1 else f"{1e3 * self.seconds:.3g} ms"


def bytes_text(count: int | None) -> str:
    """

    >>> bytes_text(2_400_000)
    '2.4 MB'
    """
    if count is None:
        return "–"
    units = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
    scale, unit = next(((s, u) for s, u in units if count >= s), (1, "B"))
    return f"{count / scale:.3g} {unit}"


@dataclass(frozen=True, slots=True)
class Log:
    """What the log of a folder says of costs."""

    costs: Mapping[str, Cost] = field(default_factory=dict)
    stopped: int = 0  # runs that a rule has ended
    saved_seconds: float = 0.0

    @property
    def has_peaks(self) -> bool:
        """True if some run was on CUDA, where the memory of a step is known."""
        return any(cost.peak is not None for cost in self.costs.values())

    def saved(self) -> str:
        """What the rule did, in a sentence."""
        if not self.stopped:
            return "It has ended no run."
        return (
            f"It has ended {counted(self.stopped, 'run')}, and saved about "
            f"{self.saved_seconds:.3g} s of training."
        )


def read(sessions: Iterable[Mapping[str, Any]]) -> Log:
    """The costs in the entries of a log: the least time, as other work only adds to it."""
    seconds: dict[str, list[float]] = {}
    memory: dict[str, dict[str, int]] = {"state_bytes": {}, "peak_bytes": {}}
    stopped, saved = 0, 0.0
    for entry in sessions:
        for name, cost in _dict(entry.get("costs")).items():
            if (took := _number(_dict(cost).get("step_seconds"))) is not None:
                seconds.setdefault(name, []).append(took)
            for key, most in memory.items():
                if (count := _number(_dict(cost).get(key))) is not None:
                    most[name] = max(int(count), most.get(name, 0))
        if entry.get("stopped"):
            stopped, saved = stopped + 1, saved + (_number(entry.get("saved_seconds")) or 0.0)
    states, peaks = memory.values()
    names = dict.fromkeys((*seconds, *states, *peaks))
    costs = {
        name: Cost(min(seconds.get(name, ()), default=None), states.get(name), peaks.get(name))
        for name in names
    }
    return Log(costs, stopped, saved)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float | None:
    return float(value) if type(value) in (int, float) else None
