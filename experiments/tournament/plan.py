"""The tournament as data: every contestant at every task.

For each task there are two sweeps. One asks how far a method comes at its documented default, the
other what becomes of it over the decades of λ, if λ is meant to be moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from experiments.tournament.contestants import Contestant, find, named
from experiments.tournament.tasks import EVENTS, Event, Folder, address, check_scale
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
    scale: float = 1.0

    @property
    def name(self) -> str:
        return self.sweep.name

    @property
    def lane_s(self) -> float:
        """Seconds a run may take."""
        return (self.event.steps * self.event.step_ms * self.scale + LANE_MS) / 1000


def plan(
    tasks: Iterable[str] = (),
    names: Iterable[str] = (),
    seeds: int | None = None,
    device: str = "auto",
    *,
    scale: float = 1.0,
    folder: Folder = None,
) -> list[Part]:
    """The sweeps of the tournament: of all tasks and contestants, or of those that are named.

    Args:
        tasks: of `EVENTS`.
        names: of `CONTESTANTS`.
        seeds: instead of each task's own number.
        device: for the tasks that gain from a GPU; the others are trained on the CPU.
        scale: the part of every data set that is used.
        folder: where the data is, if it is not to be downloaded.
    """
    check_scale(scale)
    who = [c for c in find(names) if c.missing() is None]
    if not who:
        raise ValueError("tournament: `contestants` must be some that are installed, got none.")
    parts = []
    for event in named("tasks", tasks, EVENTS):
        where = device if event.cuda else "cpu"
        home = address(event.task, scale, folder)
        for question in QUESTIONS:
            if sweep := _sweep(event, question, who, seeds, home):
                parts.append(Part(event, question, sweep, where, scale))
    return parts


def _sweep(
    event: Event, question: Question, who: Sequence[Contestant], seeds: int | None, home: str
) -> Sweep | None:
    task, targets = event.task, {c.target(event.batch_norm): c for c in who}
    lanes: dict[str, Any] = {"optimizers": (), "lam": ()}
    if question == "default":
        lanes["pairs"] = tuple(Setting(target, c.default) for target, c in targets.items())
    else:
        moved = tuple(target for target, c in targets.items() if c.moved)
        if not moved:
            return None
        lanes = {"optimizers": moved, "lam": event.lam}
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
        task=home,
        **lanes,
    )


def absent(names: Iterable[str] = ()) -> list[str]:
    """Why contestants cannot take part, a line for each that cannot."""
    return [why for c in find(names) if (why := c.missing())]


def note(names: Iterable[str] = (), remark: str = "", scale: float = 1.0) -> str:
    """What a record says beside torch's version: those of the peers, the scale, a remark."""
    peers = [c for c in find(names) if c.module and c.missing() is None]
    numbers = {c.package: c.version for c in peers} | ({"scale": scale} if scale < 1 else {})
    text = ", ".join(f"{name} {number}" for name, number in numbers.items())
    return f"{text}; {remark}" if remark else text


def estimate(parts: Sequence[Part], workers: int) -> str:
    """How many runs there are, and how long they may take."""
    lanes = sum(len(part.sweep.lanes) for part in parts)
    work = sum(len(part.sweep.lanes) * part.lane_s for part in parts)
    minutes = (work / workers + START_S) / 60
    return f"{lanes} runs, about {minutes:.1f} min with {workers} workers"
