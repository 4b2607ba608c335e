"""Rules that end a run which cannot become useful; off unless a sweep asks for one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from wngrad.lab.train.spec import Record, StopRule

STARTUP = 5  # finished runs that the median is taken of, at least
WARMUP = 0.25  # of all epochs, in which no run is ended by the median

WORDS: dict[StopRule, str] = {
    "": "",
    "diverged": "a run whose loss is not finite is ended",
    "median": (
        "a run whose loss is not finite is ended, and so is one whose best loss so far is above "
        f"the median of that of the finished runs at the same epoch, once there are {STARTUP} of "
        f"them and {100 * WARMUP:g} % of its epochs are over"
    ),
}


def lost(
    rule: StopRule, losses: Sequence[float], epochs: int, finished: Iterable[Record], by: str
) -> str:
    """Why a run should be ended; empty if it should not.

    Args:
        losses: its losses so far, one an epoch.
        epochs: as many as it is to have.
        finished: runs to compare it with, which have curves `by`.
    """
    if not rule or not losses or len(losses) >= epochs:
        return ""
    if not math.isfinite(losses[-1]):
        return "stopped: it had diverged"
    if rule != "median" or len(losses) < max(1, math.ceil(WARMUP * epochs)):
        return ""
    peers = [_best(record.curves[by][: len(losses)]) for record in finished if by in record.curves]
    if len(peers) < STARTUP or _best(losses) <= median(peers):
        return ""
    return "stopped: worse than the median of finished runs"


def _best(losses: Sequence[float | None]) -> float:
    finite = [value for value in losses if value is not None and math.isfinite(value)]
    return min(finite, default=math.inf)
