"""The table of settings: name, default, check, what a launch depends on, documentation.

A setting is a field of `Settings`, or of the class of one optimizer that adds to it. From that one
row come the optimizer's signature and `help`, the check of every group and checkpoint, the key
under which fused steps are cached, and what a step reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import is_, itemgetter
from typing import (
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    NoReturn,
    TypedDict,
    TypeVar,
    cast,
    get_args,
)

from torch import Tensor
from typing_extensions import dataclass_transform

from wngrad.optim import checks, sharded
from wngrad.optim.blocks import NAMES, Per, Shape, named_shape, resolve
from wngrad.optim.checks import MAX_RATE, Check
from wngrad.values import BInit

Nonfinite = Literal["propagate", "skip", "raise"]
Group = dict[str, Any]  # torch's: the settings of some parameters, by name, and "params"
_Table = TypeVar("_Table", bound="Settings")


class Row(NamedTuple):
    """A setting."""

    default: Any
    check: Check
    doc: str
    launch: Callable[[Any], object] | None
    also: str | None
    loaded: bool


def setting(
    default: Any,
    check: Check,
    doc: str,
    *,
    launch: Callable[[Any], object] | None = None,
    also: str | None = None,
    loaded: bool = True,
) -> Any:
    """A row of the table.

    Args:
        default: the default.
        check: of (owner, name, value): returns the value as plain data, or refuses it.
        doc: a line of documentation.
        launch: what of it a cached launch depends on, if that is not the whole of it: a kernel
            reads numbers anew in every step.
        also: another name under which a group may be given it.
        loaded: whether a checkpoint may change it; else it is the machine's, or the model's.
    """
    row = Row(default, check, doc, launch, also, loaded)
    return field(default=default, metadata={"row": row})


def like(name: str, default: Any) -> Any:
    """A row of the shared table with another default."""
    return field(default=default, metadata={"row": Settings.rows[name]._replace(default=default)})


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(setting, like, field)
)
def table(cls: type[_Table]) -> type[_Table]:
    """Make a class of fields a table, whose objects are the checked settings of a group."""
    made = dataclass(frozen=True, slots=True, eq=False, kw_only=True)(cls)
    shared = getattr(cls.__base__, "rows", {})  # come after those that are added
    rows = sorted(fields(made), key=lambda row: row.name in shared)
    made.rows = {row.name: row.metadata["row"] for row in rows}
    made.aliases = {row.also: name for name, row in made.rows.items() if row.also is not None}
    made.values = staticmethod(itemgetter(*made.rows))
    return made


def _per(owner: str, name: str, value: object) -> object:
    """A name, or the shapes that `blocks.resolve` has made of a callable or a list."""
    if isinstance(value, list):
        if not all(isinstance(shape, (tuple, list)) for shape in value):
            raise TypeError(
                f"{owner}: `{name}` must hold a shape for each parameter, got {value!r}."
            )
        return tuple(map(tuple, value))
    return checks.one_of(owner, name, value, NAMES, " or a callable")


def _is_none(value: object) -> bool:
    return value is None


@table
class Settings:
    """The settings that every optimizer has; `WNGrad` says more of each of them.

    Equal settings are one object, as far as they are cached.
    """

    rows: ClassVar[dict[str, Row]]
    aliases: ClassVar[dict[str, str]]  # other names
    values: ClassVar[Callable[[Group], tuple[Any, ...]]]  # those of a group, in order

    weight_decay: float = setting(
        0.0, checks.finite_item, "w, added to the gradient before its norm is taken", launch=bool
    )
    decoupled_weight_decay: bool = setting(
        False, checks.flag, "shrink x by 1 − lr·weight_decay instead"
    )
    b_init: float | tuple[str, float] = setting(
        1.0, checks.b_init, 'b₁: a number, or ("gradient", C) for b₁ = C·λ·‖g₁‖'
    )
    per: str | tuple[Shape, ...] = setting(
        "neuron", _per, 'what shares one b: "neuron", "tensor", "model", "slice" or a callable'
    )
    hold_1d: bool = setting(False, checks.flag, "keep b at b₁ for 1-D parameters")
    joint: bool = setting(False, checks.flag, "the parameters of a group share their b")
    nonfinite: str = setting(
        "propagate",
        checks.choice(get_args(Nonfinite)),
        'blocks whose gradient is not finite: "propagate", "skip" or "raise"',
    )
    maximize: bool = setting(False, checks.flag, "go up instead of down")
    differentiable: bool = setting(False, checks.flag, "let autograd see the step")
    fused: bool | None = setting(
        None,
        checks.or_none(checks.flag),
        "step in one kernel: where possible (None), insist (True) or never (False)",
        loaded=False,
    )
    stochastic_rounding: bool = setting(
        False, checks.flag, "round new bfloat16 parameters up or down at random"
    )
    average: float | None = setting(
        None,
        checks.or_none(checks.finite),
        "η of the polynomial average of the parameters; None for none",
        launch=_is_none,
    )

    @property
    def c(self) -> float | None:
        """C of b₁ = C·λ·‖g₁‖; None where b₁ is a number."""
        return self.b_init[1] if isinstance(self.b_init, tuple) else None

    @property
    def shares(self) -> bool:
        """Whether a group's parameters share their b."""
        return self.joint or self.per == "model"

    @property
    def key(self) -> tuple[object, ...]:
        """What a launch depends on: every setting, or as much of it as its row says."""
        pairs = [(getattr(self, name), row.launch) for name, row in self.rows.items()]
        return tuple(value if part is None else part(value) for value, part in pairs)


class Options(TypedDict, total=False):
    """The types of the keyword arguments that every optimizer takes, for type checkers."""

    weight_decay: float
    decoupled_weight_decay: bool
    b_init: BInit
    per: Per
    hold_1d: bool
    joint: bool
    nonfinite: Nonfinite
    maximize: bool
    differentiable: bool
    fused: bool | None
    stochastic_rounding: bool
    average: float | None
    foreach: bool | None  # for torch's sake; the plain step is over lists anyway


# ----------------------------------------------------------------------- a group's settings


def plain(owner: str, kind: type[Settings], group: Group) -> dict[str, Any]:
    """λ and every setting of a new group but `per`, checked and as plain data.

    A tensor that stands for a number stays: it may change in place, and is read in each step.
    """
    checked = {"lr": checks.rate(owner, group["lr"])}
    for name, row in kind.rows.items():
        if name != "per":
            value = row.check(owner, name, group[name])
            checked[name] = group[name] if isinstance(group[name], Tensor) else value
    return checked


def check_defaults(owner: str, kind: type[Settings], given: dict[str, Any]) -> None:
    """Check what an optimizer is made with, before it looks at its parameters."""
    plain(owner, kind, given)
    if isinstance(given["per"], str):
        _per(owner, "per", given["per"])
    checks.or_none(checks.flag)(owner, "foreach", given.get("foreach"))


def numbers(kind: type[Settings], group: Group) -> Group:
    """The group with numbers in the place of tensors but λ; itself where there are none."""
    tensors = {}
    for name in kind.rows:
        if isinstance(value := group[name], Tensor):
            tensors[name] = checks.item(value)
    return {**group, **tensors} if tensors else group


def rename(owner: str, kind: type[Settings], group: Group) -> None:
    """Take over what was set under another name, checked under that."""
    for also, name in kind.aliases.items():
        if also in group:
            kind.rows[name].check(owner, also, group[also])
            group[name] = group.pop(also)


_PLAIN = {float, bool, str, tuple, type(None)}
_MEMORIZED = 256
# By a group's id: its values, the parameters that have to fit them, and the settings.
Memo = dict[int, tuple[tuple[Any, ...], tuple[int, ...], Settings]]


def read(owner: str, kind: type[Settings], group: Group, memo: Memo | None = None) -> Settings:
    """The settings of a group as they are now, checked before each step, as λ is.

    Args:
        memo: what was checked before; the same objects need no second check. None for a compiler,
            which knows neither `itemgetter` nor caches.
    """
    lr = group["lr"]
    if not isinstance(lr, Tensor) and not (type(lr) is float and -MAX_RATE <= lr <= MAX_RATE):
        checks.rate_now(owner, lr)
    if memo is None:
        return _checked(owner, kind, *[group[name] for name in kind.rows])
    alone = not group["joint"] and not isinstance(group["per"], list)
    fitting = () if alone else tuple(map(id, group["params"]))  # a group may be edited
    values, earlier = kind.values(group), memo.get(id(group))
    if earlier is not None and fitting == earlier[1] and all(map(is_, values, earlier[0])):
        return earlier[2]
    if isinstance(group["b_init"], str) or not _PLAIN.issuperset(map(type, values)):
        for name, row in kind.rows.items():
            # `per` stays a list of shapes, and a tensor what it is.
            if name != "per" and not isinstance(group[name], Tensor):
                group[name] = row.check(owner, name, group[name])
        values = kind.values(group)
    plain_values = tuple(map(checks.item, values))
    try:
        settings: Settings = _cached(owner, kind, *plain_values)
    except TypeError:  # perhaps a tuple of something that cannot be a key
        settings = _checked(owner, kind, *plain_values)
    fit(owner, group)
    if not any(isinstance(value, Tensor) for value in values):  # which may change in place
        if len(memo) >= _MEMORIZED:  # of groups that may be gone
            memo.clear()
        memo[id(group)] = values, fitting, settings
    return settings


def fit(owner: str, group: Group) -> None:
    """Refuse a `b_init`, shapes in `per` or a `joint` that do not fit the group's parameters."""
    params, per = checks.parameters(owner, group["params"]), group["per"]
    for dtype in {p.dtype for p in params}:
        checks.representable(owner, group["b_init"], dtype)
    if isinstance(per, list):
        shapes = cast(list[Shape], resolve(owner, per, params))
    elif group["joint"]:
        shapes = [named_shape(tuple(p.shape), per) for p in params]
    if group["joint"]:
        sharded.check_joint(owner, params, shapes)


def _checked(owner: str, kind: type[Settings], *values: Any) -> Settings:
    pairs = zip(kind.rows.items(), values, strict=True)
    return kind(**{name: row.check(owner, name, value) for (name, row), value in pairs})


# Typed, since True equals 1.0: of its arguments, but not of what a tuple holds.
_cached: Any = lru_cache(maxsize=1024, typed=True)(_checked)


# ------------------------------------------------------------------------------- refusals


_INSTEAD = {  # of arguments that torch's optimizers take
    "beta": "use `momentum`",
    "betas": "use `momentum` (`beta` of WNAdam) for the first; b takes no second",
    "eps": "leave it out, since b is never 0",
    "nesterov": "leave it out, and use `momentum` alone",
    "dampening": "leave it out, and use `momentum` alone",
    "amsgrad": "leave it out, since b never decreases",
    "capturable": "leave it out, since any step can be captured in a CUDA graph",
    "lr_decay": "leave it out, since b decreases the rate",
    "initial_accumulator_value": "use `b_init`",
    # and that learning-rate-free ones take
    "decouple": "use `decoupled_weight_decay`",
    "d0": "leave it out, since there is no distance to find",
    "d_coef": "use `lr`",
    "use_bias_correction": "leave it out, since means are unbiased already",
    "safeguard_warmup": "leave it out, since a warm-up may multiply `lr` as it likes",
    "warmup_steps": "leave it out, or use a scheduler",
}


def refuse_argument(owner: str, name: str, value: object) -> NoReturn:
    """An argument that no optimizer here has, perhaps one of torch's."""
    instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise TypeError(f"{owner}: `{name}` is not an argument, got {value!r}{instead}.")
