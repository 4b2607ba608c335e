"""The tournament as data: every contestant at every task.

For each task there are two sweeps. One asks how far a method comes at its documented default, the
other what becomes of it over the decades of λ, if λ is meant to be moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiments.tournament import contestants as contestants_
from experiments.tournament.contestants import Contestant
from experiments.tournament.tasks import EVENTS, Event, scale
from wngrad.lab.train.loader import did_you_mean
from wngrad.lab.train.spec import Setting, Sweep

Question = Literal["default", "grid"]
QUESTIONS: tuple[Question, ...] = ("default", "grid")
LANE_MS = 150.0  # for the estimate: to build, to test, to save
START_S = 15.0  # for the estimate: imports and data


@dataclass(frozen=True, slots=True)
class Part:
    """One question at one task: a sweep, and where it is trained."""

    event: Event
    question: Question
    sweep: Sweep
    device: str

    @property
    def name(self) -> str:
        return self.sweep.name

    @property
    def lane_s(self) -> float:
        """Seconds a run may take."""
        return (self.event.steps * self.event.step_ms * scale() + LANE_MS) / 1000


def plan(
    tasks: Iterable[str] = (),
    names: Iterable[str] = (),
    seeds: int | None = None,
    device: str = "auto",
) -> list[Part]:
    """The sweeps of the tournament: of all tasks and contestants, or of those that are named.

    Args:
        tasks: of `EVENTS`.
        names: of `CONTESTANTS`.
        seeds: instead of each task's own number.
        device: for the tasks that gain from a GPU; the others are trained on the CPU.
    """
    scale()  # said wrongly, it would be said again by every worker
    who = [c for c in contestants_.find(names) if c.missing() is None]
    if not who:
        raise ValueError("tournament: `contestants` must be some that are installed, got none.")
    parts = []
    for event in _events(tasks):
        where = device if event.cuda else "cpu"
        for question in QUESTIONS:
            if sweep := _sweep(event, question, who, seeds):
                parts.append(Part(event, question, sweep, where))
    return parts


def _events(tasks: Iterable[str]) -> list[Event]:
    wanted = list(tasks)
    for name in wanted:
        if name not in EVENTS:
            close = did_you_mean(name, EVENTS)
            raise ValueError(
                f"tournament: `tasks` must be of {', '.join(EVENTS)}, got {name!r}{close}"
            )
    return [EVENTS[name] for name in wanted or EVENTS]


def _sweep(
    event: Event, question: Question, who: Sequence[Contestant], seeds: int | None
) -> Sweep | None:
    task, more = event.task, dict[str, Any]()
    if question == "default":
        pairs = [Setting(c.target(event.batch_norm), c.default) for c in who]
        more = {"pairs": tuple(pairs), "optimizers": (), "lam": ()}
    else:
        more = {
            "optimizers": tuple(c.target(event.batch_norm) for c in who if c.moved),
            "lam": event.lam,
        }
        if not more["optimizers"]:
            return None
    return Sweep(
        name=f"{task.name}-{question}",
        claim=event.text,
        dataset=task.name,
        model=task.name,
        epochs=task.epochs,
        seeds=tuple(range(seeds or event.seeds[question])),
        batch=task.batch,
        program="lone",
        precision=task.precision,
        best_by="test_loss",
        task=f"{Event.__module__}:{task.name.replace('-', '_')}",
        **more,
    )


def absent(names: Iterable[str] = ()) -> list[str]:
    """Why contestants cannot take part, a line for each that cannot."""
    return [why for c in contestants_.find(names) if (why := c.missing())]


def note(names: Iterable[str] = (), remark: str = "") -> str:
    """What a record must say beside torch's version: those of the peers, the scale, a remark."""
    peers = [c for c in contestants_.find(names) if c.module and c.missing() is None]
    found = {c.package: c.version for c in peers} | ({"scale": scale()} if scale() < 1 else {})
    said = ", ".join(f"{name} {number}" for name, number in found.items())
    return f"{said}; {remark}" if remark else said


def estimate(parts: Sequence[Part], workers: int) -> str:
    """How many runs there are, and how long they may take."""
    lanes = sum(len(part.sweep.lanes) for part in parts)
    work = sum(len(part.sweep.lanes) * part.lane_s for part in parts)
    minutes = (work / workers + START_S) / 60
    return f"{lanes} runs, about {minutes:.1f} min with {workers} workers"
