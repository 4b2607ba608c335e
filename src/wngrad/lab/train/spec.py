"""A sweep, its lanes, and the record each lane leaves.

A *lane* is one training run: one optimizer, one λ, one seed. A *sweep* is all lanes of an
experiment. A *pack* is the set of lanes that one program trains together: all settings of the
pack with each of its seeds.
"""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, TypeAlias, cast, get_args

# "train_loss", and what is measured on validation and test data: "valid_loss", "test_accuracy", ….
# A task's own metric is a score if more of it is better, an error if less.
Metric: TypeAlias = str
Precision = Literal["float32", "tf32", "bfloat16", "float64"]
Kind = Literal["stacked", "branches", "lone", "loop", "function"]
ONE_BY_ONE: tuple[Kind, ...] = ("lone", "loop", "function")  # each run is a pack of its own
StopRule = Literal["", "diverged", "median"]


@dataclass(frozen=True, slots=True)
class Setting:
    """An optimizer and its λ: what a lane is, its seed apart."""

    optimizer: str
    lam: float


@dataclass(frozen=True, slots=True)
class Lane:
    """One training run."""

    optimizer: str
    lam: float
    seed: int

    @property
    def name(self) -> str:
        """A short file name, readable and unique."""
        exact = hashlib.sha256(repr((self.optimizer, self.lam, self.seed)).encode()).hexdigest()
        words = re.sub(r"[^A-Za-z0-9-]+", "-", self.optimizer)[-40:]
        return f"{words}-{self.lam:.4g}-seed{self.seed}-{exact[:10]}"

    def __str__(self) -> str:
        return f"{self.optimizer}, λ = {self.lam:.4g}, seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Pack:
    """Lanes that train as one program: every setting with every seed."""

    name: str
    settings: tuple[Setting, ...]
    seeds: tuple[int, ...]

    @property
    def lanes(self) -> list[Lane]:
        """Seeds outermost: the order of every array that has one entry per lane."""
        return [Lane(s.optimizer, s.lam, seed) for seed in self.seeds for s in self.settings]


class Claim(Protocol):
    """A sentence about a sweep's results that a report judges; see `wngrad.lab.report.claims`."""

    def measure(self, results: Any, /) -> Any: ...


@dataclass(frozen=True, slots=True)
class Sweep:
    """An experiment as data: what to train, over which λ, and what the paper says of it.

    The lanes are every optimizer at every λ, or the `pairs` of both if there are some. A `task`
    ("file.py:task" or "module:name") brings data, network, loss and metric of its own; `dataset`
    and `model` are then only names.
    """

    name: str
    claim: str  # in one sentence
    dataset: str  # "digits", "mnist", "cifar10", or "module:function" that returns a Data
    model: str  # "mlp", "cnn", "resnet18", or "module:function" of (shape, classes)
    optimizers: tuple[str, ...]  # names of `wngrad.lab.optimizers`, or "module:Class"
    lam: tuple[float, ...]
    epochs: int
    seeds: tuple[int, ...]
    repeat: tuple[Setting, ...] = ()  # what has every seed, others the first; empty: all have
    batch: int = 100
    weight_decay: float = 0.0
    program: Kind = "stacked"
    lanes_per_pack: int | None = None  # None: all lanes in one program
    precision: Precision = "float32"  # on CUDA; elsewhere float32, unless this is float64
    # What a report shows: metrics, at the last epoch over λ and over the epochs at some λ.
    metrics: tuple[Metric, ...] = ("train_loss", "test_accuracy")
    best_by: Metric = "test_accuracy"  # what an optimizer's best λ is chosen by
    curves_at: tuple[float, ...] = ()  # empty: each optimizer at its own best λ
    claims: tuple[Claim, ...] = ()
    cost: str = ""  # measured, with the machine
    reproduced: str = ""  # how much of it the records under results/ have, and what holds
    task: str = ""
    metric_name: str = ""  # what reports call a task's metric
    pairs: tuple[Setting, ...] = ()  # `optimizers` and `lam` are read from them
    alone: tuple[str, ...] = ()  # optimizers whose lanes run one after another, as they are
    defaults: tuple[
        Setting, ...
    ] = ()  # each optimizer at the λ of its signature, on the grid or not
    epochs_fixed: bool = False  # more epochs would change the first ones, as a schedule does
    stop: StopRule = ""  # which runs are ended before their time, judged by `best_by`, a loss

    def __post_init__(self) -> None:
        if self.pairs:
            self._set("optimizers", dict.fromkeys(p.optimizer for p in self.pairs))
            self._set("lam", dict.fromkeys(p.lam for p in self.pairs))
        for name in ("pairs", "optimizers", "lam", "seeds", "repeat"):
            values, optional = self._set(name, getattr(self, name)), name in ("pairs", "repeat")
            if len(set(values)) < len(values) or not (values or optional):
                what = "each once" if optional else "some values, each once"
                raise ValueError(f"Sweep: `{name}` must be {what}, got {values!r}.")
        if unknown := set(self.repeat) - set(self.settings):
            raise ValueError(f"Sweep: `repeat` must be of the sweep's settings, got {unknown!r}.")
        for name, least in (("epochs", 1), ("batch", 1), ("weight_decay", 0)):
            if not (value := getattr(self, name)) >= least:
                raise ValueError(f"Sweep: `{name}` must be >= {least}, got {value!r}.")
        if min(self.seeds) < 0 or not all(0 <= lam < math.inf for lam in self.lam):
            raise ValueError(
                f"Sweep: `seeds` and `lam` must be >= 0, got {self.seeds} and {self.lam}."
            )
        for name, modes in (("program", Kind), ("precision", Precision), ("stop", StopRule)):
            if (value := getattr(self, name)) not in get_args(modes):
                raise ValueError(
                    f"Sweep: `{name}` must be one of {get_args(modes)}, got {value!r}."
                )
        if self.stop and not self.best_by.endswith("_loss"):
            raise ValueError(
                f"Sweep: `best_by` must be a loss where `stop` is given, which looks at no other "
                f"metric: 'test_loss', say; got {self.best_by!r}."
            )

    def _set(self, name: str, values: Iterable[Any]) -> tuple[Any, ...]:
        object.__setattr__(self, name, tuple(values))
        return tuple(values)

    @property
    def settings(self) -> tuple[Setting, ...]:
        product = tuple(Setting(name, lam) for name in self.optimizers for lam in self.lam)
        chosen = self.pairs or product
        return (*chosen, *(each for each in self.defaults if each not in set(chosen)))

    def grid(self, optimizer: str) -> tuple[float, ...]:
        """The λ of one optimizer in order, a default that is off the grid apart."""
        own = [pair.lam for pair in self.pairs if pair.optimizer == optimizer]
        return tuple(sorted(own if self.pairs else self.lam))

    def default_lam(self, optimizer: str) -> float | None:
        """The λ of the optimizer's signature, if it is run there."""
        return next((each.lam for each in self.defaults if each.optimizer == optimizer), None)

    @property
    def lanes(self) -> list[Lane]:
        return [
            Lane(s.optimizer, s.lam, seed) for seed in self.seeds for s in self.settings_of(seed)
        ]

    def settings_of(self, seed: int) -> tuple[Setting, ...]:
        """What is run with a seed: everything with the first, and where it is to be repeated."""
        if not self.repeat or seed == self.seeds[0]:
            return self.settings
        return tuple(s for s in self.settings if s in self.repeat)

    def cut(
        self, seeds: Sequence[int], first: int = 1, settings: Iterable[Setting] | None = None
    ) -> list[Pack]:
        """The packs of these seeds: alone, an optimizer can fail without taking others."""
        groups: dict[bool, list[Setting]] = {False: [], True: []}
        for setting in self.settings if settings is None else settings:
            groups[self._runs_alone(setting)].append(setting)
        together = packs(groups[False], seeds, self.lanes_per_pack, first)
        return together + packs(groups[True], seeds, 1, first + len(together))

    def cut_lanes(self, have: Container[Lane] = (), first: int = 1) -> list[Pack]:
        """The packs of all lanes but those in `have`; seeds that lack the same are cut together."""
        lacking: dict[tuple[Setting, ...], list[int]] = {}
        for seed in self.seeds:
            lanes = [(s, Lane(s.optimizer, s.lam, seed)) for s in self.settings_of(seed)]
            lacking.setdefault(tuple(s for s, lane in lanes if lane not in have), []).append(seed)
        new: list[Pack] = []
        for settings, seeds in lacking.items():
            new += self.cut(seeds, first=first + len(new), settings=settings)
        return new

    def kind(self, pack: Pack) -> Kind:
        """The program that trains a pack."""
        if self.program in ONE_BY_ONE:
            return self.program
        return "lone" if self._runs_alone(pack.settings[0]) else self.program

    def _runs_alone(self, setting: Setting) -> bool:
        return self.program in ONE_BY_ONE or setting.optimizer in self.alone

    def identity(self) -> dict[str, Any]:
        """What must not change under records that are already there.

        Epochs and seeds may grow; of a task's sweep optimizers and λ, too: its runs do not depend
        on each other.
        """
        grid = () if self.task else ("optimizers", "lam")
        names = ("name", "dataset", "model", *grid, "batch", "weight_decay", "program")
        pairs = () if self.task else ("pairs", "alone")
        epochs = ("epochs",) if self.epochs_fixed else ()
        # The records of the first sweeps lack these.
        later = ("metric_name", "stop", *pairs, *epochs)
        plain = self.to_json()
        values = {name: plain[name] for name in names + later if name in names or plain[name]}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def scaled(self, *, epochs: int | None = None, seeds: int | None = None) -> Sweep:
        """The same sweep with fewer or more epochs and seeds."""
        return replace(
            self,
            epochs=self.epochs if epochs is None else epochs,
            seeds=self.seeds if seeds is None else tuple(range(seeds)),
        )

    def to_json(self) -> dict[str, Any]:
        """The sweep as plain data, its claims apart: they are for reports."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "claims"}
        return plain | {
            name: [[each.optimizer, each.lam] for each in getattr(self, name)] for name in _SETTINGS
        }

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Sweep:
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
        pairs = {name: tuple(Setting(*pair) for pair in plain.get(name, ())) for name in _SETTINGS}
        return cls(**{**plain, **pairs})


_SETTINGS = ("pairs", "defaults", "repeat")  # fields of a sweep


def packs(
    settings: Sequence[Setting], seeds: Sequence[int], most: int | None, first: int = 1
) -> list[Pack]:
    """Cut settings × seeds into packs of at most `most` lanes, named from number `first` on."""
    if not settings or not seeds:
        return []
    per_pack = len(seeds) if most is None else max(1, most // len(settings))
    width = len(settings) if most is None else min(most, len(settings))
    cut = [
        (tuple(settings[k : k + width]), tuple(seeds[s : s + per_pack]))
        for s in range(0, len(seeds), per_pack)
        for k in range(0, len(settings), width)
    ]
    return [Pack(f"pack-{first + i:04d}", *parts) for i, parts in enumerate(cut)]


@dataclass(frozen=True, slots=True)
class Record:
    """What one lane leaves: all that is needed to report it, and to do it again."""

    lane: Lane
    status: Literal["done", "failed"]
    reason: str  # why it failed; empty if it did not
    diverged_at: int | None  # the first epoch (from 1) whose training loss was not finite
    curves: dict[str, list[float | None]]  # one value per epoch; None where it was not finite
    settings: dict[str, Any] = field(default_factory=dict)  # Sweep.identity(), precision, data
    environment: dict[str, Any] = field(default_factory=dict)  # versions, commit, device
    start: dict[str, float | None] = field(default_factory=dict)  # what was tested before training
    ended: str = ""  # why a run is whole with fewer epochs than others; empty: it has them all
    steps: list[int] = field(default_factory=list)  # when a user's function reported; else epochs

    @property
    def epochs(self) -> int:
        return max(map(len, self.curves.values()), default=0)

    def to_json(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in fields(self)[1:]}
        for name in _LATER:
            if not plain[name]:
                del plain[name]
        lane = self.lane
        return {"optimizer": lane.optimizer, "lam": lane.lam, "seed": lane.seed, **plain}

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Record:
        """What `to_json` gave; a ValueError names the field that is none of ours."""
        for name, (must, valid) in _FIELDS.items():
            if not (valid(plain[name]) if name in plain else name in _LATER):
                got = repr(plain[name])[:60] if name in plain else "nothing"
                raise ValueError(f"`{name}` must be {must}, got {got}.")
        lane = Lane(plain["optimizer"], plain["lam"], plain["seed"])
        names = ("status", "reason", "diverged_at", "curves", "settings", "environment")
        later = {name: plain[name] for name in _LATER if name in plain}
        return cls(lane, **{name: plain[name] for name in names}, **later)


def is_lam(value: object) -> bool:
    return type(value) in (int, float) and 0 <= cast(float, value) <= sys.float_info.max


def is_seed(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**63


def _is_value(value: object) -> bool:
    """Of a curve: a number, or None where it was not finite."""
    return value is None or (
        type(value) in (int, float) and abs(cast(float, value)) <= sys.float_info.max
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)


def _is_curve(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_value, value))


# What the fields of a record must be: a file may be whole and still be somebody else's.
_FIELDS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "optimizer": ("a name", _is_text),
    "lam": ("a number >= 0", is_lam),
    "seed": ("an integer >= 0", is_seed),
    "status": ("'done' or 'failed'", lambda v: v in ("done", "failed")),
    "reason": ("a text", _is_text),
    "diverged_at": ("None or an epoch", lambda v: v is None or (type(v) is int and v > 0)),
    "curves": ("lists of numbers", lambda v: _is_dict(v) and all(map(_is_curve, v.values()))),
    "settings": ("a table", _is_dict),
    "environment": ("a table", _is_dict),
    "start": ("numbers", lambda v: _is_dict(v) and all(map(_is_value, v.values()))),
    "ended": ("a text", _is_text),
    "steps": (
        "a list of integers",
        lambda v: isinstance(v, list) and {type(n) for n in v} <= {int},
    ),
}
_LATER = ("start", "ended", "steps")  # which the records of the first sweeps have not
