"""What is to be run, the most telling first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from experiments.finetune.methods import METHODS, FineTuner
from experiments.finetune.tasks import LORA, STEPS, TASKS, FineTuning
from experiments.tournament.contestants import named
from experiments.untuned.plan import Records, Run, cost

MIDDLE = ("full", f"lora-{LORA[0][0]}-{LORA[0][1]}")  # the two modes that are tuned
SHORT = ("finetune", "prodigy", "schedulefree", "adamw")  # where everybody would be too many
HALF = ("finetune", "no-average", "nearest", "adamw", "prodigy")
# At defaults; over grids; images; weights in bfloat16; other ranks and modes; peft; other lengths.
PARTS = ("defaults", "tuned", "image", "half", "modes", "peft", "length", "length-tuned")
GRIDS = ("tuned", "image", "length-tuned")
Cell = tuple[FineTuning, FineTuner, float, int]  # a task, a method, λ and steps


@dataclass(frozen=True, slots=True)
class Plan:
    """The runs of some tasks, methods and parts; every part with one seed first.

    Args:
        seeds: how many. With the second and the third, of grids only the best λ is run.
    """

    tasks: tuple[FineTuning, ...]
    methods: tuple[FineTuner, ...]
    parts: tuple[str, ...] = PARTS
    seeds: int = 1

    def missing(self, records: Records) -> list[Run]:
        """The runs that have no record, in the order of their stages."""
        runs = [run for _, run in self.stages(records)]
        return [run for run in dict.fromkeys(runs) if run not in records]

    def first(self, runs: list[Run]) -> list[Run]:
        """Those of the missing runs that belong to the first stage of them."""
        return [run for run in runs if _stage(run) == _stage(runs[0])]

    def stages(self, records: Records) -> Iterator[tuple[str, Run]]:
        """Every run with its part: the first seed of all parts but the last, the others, that."""
        pairs = [(seed, part) for seed in range(self.seeds) for part in self.parts]
        for seed, part in sorted(pairs, key=lambda pair: pair[1] == PARTS[-1]):
            cells = list(dict.fromkeys(self._cells(part)))
            for cell in cells if seed == 0 else self._best(cells, records):
                yield part, Run(cell[0].name, cell[1].name, cell[2], seed, cell[3])

    def _best(self, cells: list[Cell], records: Records) -> Iterator[Cell]:
        """Defaults, and of tuned methods the λ that is best with the first seed."""
        costs: dict[tuple[str, str, int], tuple[tuple[float, float], float]] = {}
        for task, method, lam, steps in cells:
            record = records.get(Run(task.name, method.name, lam, 0, steps))
            if record is not None:
                key = task.name, method.name, steps
                costs[key] = min(costs.get(key, ((float("inf"),) * 2, 0.0)), (cost(record), lam))
        for task, method, lam, steps in cells:
            best = costs.get((task.name, method.name, steps), (None, None))[1]
            if lam in method.defaults or lam == best:
                yield task, method, lam, steps

    def _cells(self, part: str) -> Iterator[Cell]:
        for task in (task for task in self.tasks if _belongs(task, part)):
            for method in self.methods:
                if method.only in task.name and _takes_part(method, part):
                    yield from _runs(task, method, part)


def _belongs(task: FineTuning, part: str) -> bool:
    if part in ("image", "half") or task.half or not task.context:
        return part == ("half" if task.half else "text" if task.context else "image")
    if part == "peft" or task.mode.startswith("peft"):
        return part == "peft" and task.mode.startswith(part)
    return (task.mode in MIDDLE) != (part == "modes")


def _takes_part(method: FineTuner, part: str) -> bool:
    if part == "half":
        return method.name in HALF
    if part == "modes":
        return method.name in SHORT
    if part == PARTS[-1]:
        return method.name in ("finetune", "adamw")
    return method.part != "half" and (part in GRIDS or bool(method.defaults))


def _runs(task: FineTuning, method: FineTuner, part: str) -> Iterable[Cell]:
    lams = method.lams if part in GRIDS else method.defaults or method.lams[:1]
    lengths = STEPS[1:] if part.startswith("length") else (task.steps,)
    return [(task, method, lam, steps) for steps in lengths for lam in lams]


def _stage(run: Run) -> tuple[object, ...]:
    """What runs that may go in any order have in common."""
    task, method = TASKS[run.task], METHODS[run.method]
    kind = (task.half, bool(task.context), task.mode in MIDDLE)
    return run.seed, kind, run.steps, run.lam in method.defaults


def plan(tasks: list[FineTuning], methods: list[str], parts: list[str], seeds: int) -> Plan:
    """The plan for these tasks and names; all of a kind where there are none.

    Raises:
        ValueError: a name is unknown.
    """
    wanted = named("parts", parts, {part: part for part in PARTS})
    rows = [row for row in named("methods", methods, METHODS) if not row.missing()]
    return Plan(tuple(tasks), tuple(rows), tuple(wanted), seeds)
