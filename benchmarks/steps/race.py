"""Everyone steps in turn, round after round, so that a machine's drift meets all alike."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from steps.clocks import EventClock, HostClock, clock
from steps.contestants import Contestant
from steps.sets import DTYPES, SETS, Field, floor_seconds
from steps.targets import JUDGED

TURN = 0.02  # seconds for each kind of measurement in a turn, if they are enough for a step
MOST_STEPS = 50  # back to back
MOST_SAMPLES = 5  # of so many steps
FEWEST_SAMPLES = 3  # of a step
SLOW, VERY_SLOW = 4, 20  # times the fastest: in every third round, in the first one alone,
PATIENCE = 5e-3  # but not if a step takes less than this.
SLACK = 2**20  # bytes that may stay
IN_GRAPH = 10  # steps in a graph, or one of more than
GRAPH_MOST = 1e-3  # so many seconds; steps of more than
NO_GRAPH = 0.05  # so many are not captured.


@dataclass
class Row:
    """What was measured of a contestant: samples in seconds, memory, what went wrong."""

    contestant: Contestant
    samples: dict[str, list[float]] = field(default_factory=dict)
    extra_bytes: int | None = None
    state_bytes: int | None = None
    failed: str = ""
    graph_failed: str = ""

    def add(self, measure: str, samples: list[float]) -> None:
        self.samples.setdefault(measure, []).extend(samples)

    @property
    def pace(self) -> float:
        return statistics.median(self.samples.get("step") or [0.0])


def race(
    name: str,
    dtype: str,
    device: torch.device,
    chosen: list[Contestant],
    repeats: int,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """One set of parameters in one dtype: everyone, `repeats` rounds; plain data."""
    ground = Field(SETS[name](), DTYPES[dtype], device)
    watch, rows, bandwidths = clock(device, ground.bytes), [Row(c) for c in chosen], []
    for k in range(repeats):
        tell(f"{name} {dtype}: round {k + 1} of {repeats}")
        bandwidths += watch.bandwidths(5)
        for row in due(rows, k):
            attempt(row, ground, watch)
    bandwidth = statistics.median(bandwidths)
    return {
        "set": name,
        "dtype": dtype,
        "device": device.type,
        "parameters": ground.parameters,
        "tensors": len(ground.params),
        "bytes": ground.bytes,
        "bandwidth": spread(bandwidths),
        "rounds": repeats,
        "rows": [plain(row, ground, bandwidth) for row in rows],
    }


def due(rows: list[Row], k: int) -> list[Row]:
    """Who steps in round k: all who can; the slow now and then, unless it is about them."""
    fastest = min((row.pace for row in rows if row.pace), default=0.0)
    return [
        row
        for row in rows
        if not row.failed and (row.contestant.label in JUDGED or k % period(row.pace, fastest) == 0)
    ]


def _central(who: Contestant) -> bool:
    return who.label in JUDGED or (who.where.startswith("wngrad:") and who.way != "plain")


def period(pace: float, fastest: float) -> int:
    """In how many rounds a contestant of this pace steps once."""
    if pace <= max(PATIENCE, SLOW * fastest):
        return 1
    return 3 if pace <= VERY_SLOW * fastest else 1000


def attempt(row: Row, ground: Field, watch: HostClock) -> None:
    """A turn; whatever goes wrong with a contestant is a result of that contestant."""
    before = watch.used()
    try:
        turn(row, ground, watch)
    except Exception as error:
        row.failed = one_line(error)
    if watch.used() > before + SLACK:
        gc.collect()  # An optimizer in a cycle of references would hold its state for long.


def turn(row: Row, ground: Field, watch: HostClock) -> None:
    ground.reset()
    optimizer = row.contestant.make(ground.params)
    pace = watch.warm(optimizer.step)
    steps = times(pace, MOST_STEPS)
    row.add("step", watch.each(optimizer.step, max(steps, FEWEST_SAMPLES)))
    several = range(times(steps * pace, MOST_SAMPLES))
    if isinstance(watch, EventClock):
        row.add("wall", [watch.back_to_back(optimizer.step, steps) for _ in several])
    row.add("moved", [watch.back_to_back(optimizer.step, steps, ground.move) for _ in several])
    row.extra_bytes = watch.extra(optimizer.step)
    row.state_bytes = state_bytes(optimizer)
    ground.check()
    del optimizer
    if isinstance(watch, EventClock) and not row.graph_failed:
        row.graph_failed = graph_attempt(row, ground, watch, pace)


def times(duration: float, most: int) -> int:
    """How often what takes so long is done in a turn."""
    return max(1, min(most, round(TURN / duration)))


def graph_attempt(row: Row, ground: Field, watch: EventClock, pace: float) -> str:
    """The step inside a CUDA graph; or why not."""
    if row.contestant.graph is None:
        return "cannot be captured"
    if pace > NO_GRAPH:
        return "not captured, as a step takes too long"
    try:
        graph_turn(row, ground, watch, pace)
    except Exception as error:
        return one_line(error)
    return ""


def graph_turn(row: Row, ground: Field, watch: EventClock, pace: float) -> None:
    """Several small steps share a launch, as all of a training's graph does."""
    ground.reset()
    optimizer = row.contestant.make(ground.params, **(row.contestant.graph or {}))
    inside = IN_GRAPH if pace < GRAPH_MOST else 1
    graph = watch.capture(optimizer.step, inside)
    replays = watch.each(graph.replay, times(pace * inside, MOST_STEPS))
    row.add("graph", [t / inside for t in replays])
    ground.check()


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes that the optimizer keeps between steps, in its state and its groups."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    found = {id(t): t for t in _tensors([*optimizer.state.values(), *groups])}
    return sum(t.numel() * t.element_size() for t in found.values())


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def spread(samples: list[float]) -> dict[str, float]:
    """Median, quartiles and their n."""
    several = samples if len(samples) > 1 else samples * 2
    low, _, high = statistics.quantiles(several, n=4, method="inclusive")
    return {"median": statistics.median(samples), "low": low, "high": high, "n": len(samples)}


def plain(row: Row, ground: Field, bandwidth: float) -> dict[str, Any]:
    """A row as data, with its floor."""
    who = row.contestant
    floor = floor_seconds(ground.parameters, ground.itemsize, who.passes, bandwidth)
    measured = {measure: spread(samples) for measure, samples in row.samples.items()}
    return {
        "label": who.label,
        "name": who.name,
        "way": who.way,
        "passes": who.passes,
        "floor": floor,
        "over floor": row.pace / floor if row.pace else None,
        **measured,
        "extra bytes": row.extra_bytes,
        "state bytes per parameter": row.state_bytes and row.state_bytes / ground.parameters,
        "failed": row.failed,
        "no graph": row.graph_failed,
    }


def one_line(error: Exception) -> str:
    """An error's kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
