"""What the probes share: how an optimizer is made and called, small problems, and verdicts."""

from __future__ import annotations

import inspect
import io
import linecache
import pickle
import traceback
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

Closure = Callable[[], Tensor]  # computes the loss and the gradients, and returns the loss
Takes = Literal["nothing", "loss", "closure"]


class Failed(AssertionError):  # noqa: N818, a verdict rather than an error
    """The optimizer does not do what the probe asks; the message says what it does instead."""


class NotApplicable(unittest.SkipTest):
    """The question makes no sense for this optimizer, or cannot be asked on this machine."""


# ------------------------------------------------------------------ the registry


@dataclass(frozen=True, slots=True)
class Probe:
    """A question to an optimizer. Returns a measurement or None for a pass."""

    name: str
    does: str
    why: str  # a user would care
    failing: str  # what it looks like in practice
    ask: Callable[[Subject], str | None]
    distributed: bool = False

    @property
    def seconds(self) -> float:
        """The time limit."""
        return 120.0 if self.distributed else 30.0


REGISTERED: list[Probe] = []

Ask = Callable[["Subject"], str | None]


def probe(
    name: str, *, does: str, why: str, failing: str, distributed: bool = False
) -> Callable[[Ask], Ask]:
    def register(ask: Ask) -> Ask:
        REGISTERED.append(Probe(name, does, why, failing, ask, distributed))
        return ask

    return register


# ------------------------------------------------- how an optimizer is made and called


@dataclass(frozen=True, slots=True)
class Profile:
    """What its authors say about the use of an optimizer, where `cls(params)` is not enough."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    takes: Takes = "nothing"
    sharded: Mapping[str, Any] = field(default_factory=dict)  # more kwargs, for sharded parameters
    exempt: Mapping[str, str] = field(default_factory=dict)  # probe: why it does not apply


_AVERAGES = Profile(
    exempt={"scheduler to 0": "it averages its iterates, which by design goes on at lr = 0"}
)
_START = "lr is only where its own step sizes start"
_DENSE = {"sparse": "its README: only the AdaGrad version takes sparse gradients"}
_WHOLE = "its code: it does not support sharded parameters"
_CLIPPED = "its README: only with gradients clipped to norm 1"

# By package and class. Whether an optimizer has train() and eval() is seen from the class.
PROFILES: dict[str, Profile] = {
    "dadaptation:DAdaptAdaGrad": Profile(
        exempt=dict.fromkeys(("FSDP2 even", "FSDP2 uneven", "2 → 4 resharding"), _WHOLE)
    ),
    "dadaptation:DAdaptAdam": Profile(sharded={"fsdp_in_use": True}, exempt=_DENSE),
    "dadaptation:DAdaptAdan": Profile(exempt=_DENSE),
    "dadaptation:DAdaptLion": Profile(sharded={"fsdp_in_use": True}),
    "dadaptation:DAdaptSGD": Profile(sharded={"fsdp_in_use": True}, exempt=_DENSE),
    "momo:Momo": Profile(takes="loss"),
    "momo:MomoAdam": Profile(takes="loss"),
    "parameterfree:KT": Profile(exempt=dict.fromkeys(("gradient spike", "loss scale"), _CLIPPED)),
    "prodigyopt:Prodigy": Profile(sharded={"fsdp_in_use": True}),
    "schedulefree:AdamWScheduleFree": _AVERAGES,
    "schedulefree:RAdamScheduleFree": _AVERAGES,
    "schedulefree:SGDScheduleFree": _AVERAGES,
    "torch:Rprop": Profile(exempt={"lr = 0 group": _START, "scheduler to 0": _START}),
    "torch:SGD": Profile({"lr": 0.1}),  # as in its documentation
}


@dataclass(frozen=True, slots=True)
class Subject:
    """An optimizer as its authors say it is used: `make(params)`, `make.step(opt, closure)`."""

    cls: Callable[..., Any]
    kwargs: Mapping[str, Any]
    takes: Takes
    sharded: Mapping[str, Any]
    exempt: Mapping[str, str]

    def __call__(self, params: Any, **options: Any) -> Any:
        opt = self.cls(params, **{**self.kwargs, **options})
        self.train(opt)
        return opt

    def step(self, opt: Any, closure: Closure) -> Tensor:
        """A step of the documented kind on the loss and gradients of `closure`."""
        if self.takes == "closure":
            loss: Tensor = opt.step(closure)
            return loss
        loss = closure()
        if self.takes == "loss":
            opt.step(loss=loss)
        else:
            opt.step()
        return loss

    def train(self, opt: Any) -> None:
        if callable(getattr(opt, "train", None)):
            opt.train()

    def eval(self, opt: Any) -> None:
        if callable(getattr(opt, "eval", None)):
            opt.eval()

    def group(self) -> dict[str, Any]:
        """The settings it is made with."""
        return dict(self([nn.Parameter(torch.ones(2, 2))]).param_groups[0])

    def lr(self) -> float:
        if not isinstance(value := self.group().get("lr"), int | float):
            raise NotApplicable("it has no lr")
        return float(value)

    def options(self) -> list[dict[str, Any]]:
        """As it is made, and with weight decay where it has that."""
        return [{}, {"weight_decay": 0.01}] if "weight_decay" in self.group() else [{}]

    def saved(self, model: nn.Module, opt: Any) -> bytes:
        """A checkpoint, taken in evaluation mode where there is one."""
        file = io.BytesIO()
        self.eval(opt)
        torch.save((model.state_dict(), opt.state_dict()), file)
        self.train(opt)
        return file.getvalue()

    def load(self, model: nn.Module, opt: Any, saved: bytes) -> None:
        try:
            weights, state = torch.load(io.BytesIO(saved), weights_only=True)
        except pickle.UnpicklingError as error:
            raise Failed(
                "its state is not plain data: torch.load(weights_only=True), the default, "
                f"refuses it ({first_line(error)})"
            ) from None
        model.load_state_dict(weights)
        opt.load_state_dict(state)
        self.train(opt)

    def usage(self) -> str:
        """How it is made and called, in one line."""
        cls = self.cls
        given = ", ".join(["params", *(f"{key}={value!r}" for key, value in self.kwargs.items())])
        call = {"nothing": "step()", "loss": "step(loss=loss)", "closure": "step(closure)"}
        modes = ", train() and eval()" if hasattr(cls, "train") and hasattr(cls, "eval") else ""
        return f"{getattr(cls, '__qualname__', cls)}({given}), {call[self.takes]}{modes}"


def load_subject(target: str, kwargs: Mapping[str, Any] | None = None) -> Subject:
    """The optimizer at "module:Class"; with `kwargs`, or as its profile and signature say."""
    module, _, name = target.partition(":")
    try:
        cls = attrgetter(name)(import_module(module))
    except Exception as error:
        raise Failed(f"cannot be imported: {described(error)}") from error
    package = str(getattr(cls, "__module__", module)).partition(".")[0]
    profile = PROFILES.get(f"{package}:{name}", Profile())
    takes: Takes = "closure" if _required(getattr(cls, "step", None), "closure") else profile.takes
    if kwargs is None:
        kwargs = profile.kwargs or ({"lr": 0.01} if _required(cls, "lr") else {})
    return Subject(cls, dict(kwargs), takes, profile.sharded, profile.exempt)


def _required(call: Any, name: str) -> bool:
    try:
        parameter = inspect.signature(call).parameters.get(name)
    except (TypeError, ValueError):
        return False
    return parameter is not None and parameter.default is parameter.empty


# ------------------------------------------------------------------ small problems
#
# All gradients have norms below 1, as some methods ask for, unless a probe says otherwise.

STEPS = 12  # Enough for methods that stand still in their first steps, as RAdam may.


def network(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """A convolution, a normalization and a linear layer: parameters of 1, 2 and 4 dimensions."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)
    )
    return model.to(dtype)


def differentiated(loss: Tensor) -> Tensor:
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def batch(model: nn.Module, seed: int, scale: float = 1.0) -> Closure:
    """The loss and gradients of one batch drawn from `seed`."""

    def closure() -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(8, 2, 4, 4, generator=draw).to(next(model.parameters()))
        y = torch.randint(4, (8,), generator=draw).to(x.device)
        model.zero_grad()
        return differentiated(scale * 0.25 * nn.functional.cross_entropy(model(x), y))

    return closure


def train(make: Subject, model: nn.Module, opt: Any, steps: int, first: int = 0) -> None:
    for seed in range(first, first + steps):
        make.step(opt, batch(model, seed))


def repeat(make: Subject, opt: Any, closure: Closure, steps: int = STEPS) -> None:
    for _ in range(steps):
        make.step(opt, closure)


def pull(*params: Tensor, weights: float | Tensor = 0.05) -> Closure:
    """Σ h|x|²/2: the gradient of every entry is its value times its weight h."""

    def closure() -> Tensor:
        for p in params:
            p.grad = None
        halves = [(weights * p.abs().square()).sum() / 2 for p in params]
        return differentiated(torch.stack(halves).sum())

    return closure


def push(p: Tensor, g: Tensor) -> Closure:
    """⟨g, x⟩ plus a constant that keeps the loss positive: the gradient is g, wherever x is."""

    def closure() -> Tensor:
        p.grad = None
        return differentiated((g * p).sum() + 100 * g.abs().sum())

    return closure


def ones(*shape: int, dtype: torch.dtype = torch.float64, value: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.full(shape, value, dtype=dtype))


# ----------------------------------------------------------------- looking at tensors


def copies(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def same(a: nn.Module, b: nn.Module) -> bool:
    """Bit for bit."""
    return all(map(torch.equal, a.parameters(), b.parameters()))


def apart(a: nn.Module, b: nn.Module) -> str:
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return f"{max(float((p - q).detach().abs().max()) for p, q in pairs):.2g}"


def finite(params: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in params)


def held(opt: Any) -> list[Tensor]:
    """Every tensor an optimizer holds on to, parameters and their gradients apart."""
    seen = {id(t) for g in opt.param_groups for p in g["params"] for t in (p, p.grad)}
    return list(_tensors(vars(opt), seen))


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, Mapping):
        for value in thing.values():
            yield from _tensors(value, seen)
    elif isinstance(thing, list | tuple | set):
        for value in thing:
            yield from _tensors(value, seen)


# -------------------------------------------------------------------- errors in words


def first_line(error: BaseException) -> str:
    """The first sentence or two of a message."""
    text = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
    return text if len(text) <= 200 else f"{text[:197]}..."


def described(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1:]
    text = first_line(error) or " ".join(f"in {Path(w.filename).name}: {w.line}" for w in where)
    return f"{type(error).__name__}: {text}"


def refusal(error: Exception, *words: str) -> str | None:
    """What the optimizer says when it refuses something by itself, in a `raise` that names it.

    An error out of a tensor operation is no refusal: nobody has thought of the case.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not any(word in str(error).lower() for word in words):
        return None
    line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno).strip()
    asserted = isinstance(error, AssertionError) and line.startswith("assert ")
    return first_line(error) if asserted or line.startswith("raise ") else None


@contextmanager
def unless_refused(*words: str) -> Iterator[None]:
    """What an optimizer refuses by itself, naming one of the words, does not apply to it."""
    try:
        yield
    except Exception as error:
        said = refusal(error, *words)
        if said is None:
            raise
        raise NotApplicable(f"it refuses: {said}") from error
