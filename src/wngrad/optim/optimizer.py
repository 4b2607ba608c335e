"""The torch contract, shared by all optimizers: steps, groups, checkpoints, the average."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from wngrad.optim import (
    average,
    blocks,
    checkpoints,
    checks,
    due,
    fused,
    inputs,
    report,
    scaling,
    sharded,
    state,
)
from wngrad.optim.checks import Settings
from wngrad.optim.directions import Direction
from wngrad.optim.state import Group, shape_of
from wngrad.optim.step import plain_step


class BlockOptimizer(Optimizer):
    """An optimizer with one learning rate, λ/b, for every block of entries.

    A subclass says what its `direction` is, and which settings it adds; `docs/new-optimizer.md`
    writes one.
    """

    own_settings: ClassVar[checks.Own] = ()  # the settings it adds, each with its check
    other_defaults: ClassVar[checks.Options] = {}  # where they are not those of `checks.DEFAULTS`

    # Settings that may also be set under another name, such as that of earlier releases.
    other_names: ClassVar[dict[str, str]] = {}

    # Buffers of earlier releases, and how they become today's velocity.
    earlier_state: ClassVar[checkpoints.Readings] = {}

    # Lets GradScaler hand `grad_scale` and `found_inf` to the step instead of synchronizing.
    _step_supports_amp_scaling = True
    _swapped = False  # within `averaged`

    def __init__(self, params: ParamsT, settings: dict[str, Any]) -> None:
        own = [name for name, _ in self.own_settings]
        for name in settings.keys() - {"lr", "foreach", *own, *checks.DEFAULTS}:
            checks.refuse_argument(self._owner, name, settings[name])
        every = {**checks.DEFAULTS, **self.other_defaults, **settings}
        checks.defaults(self._owner, every, self.own_settings)
        inputs.iterable(self._owner, params)
        self._fused_engine = fused.Engine()
        order = ("lr", *own, *checks.DEFAULTS)
        super().__init__(params, {name: every[name] for name in order})

    def __init_subclass__(cls, **more: Any) -> None:
        """Let `help` and `inspect.signature` show every setting, as if it were written out."""
        super().__init_subclass__(**more)
        signature = inspect.signature(cls.__init__)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        if len(named) < len(signature.parameters):
            defaults = {**checks.DEFAULTS, **cls.other_defaults, "foreach": None}
            shared = [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
                for name, default in defaults.items()
                if name not in signature.parameters
            ]
            cls.__signature__ = signature.replace(parameters=[*named[1:], *shared])  # type: ignore[attr-defined]

    def direction(self, group: Group, p: Tensor) -> Direction:
        """How the step of parameter `p` is made from its gradient."""
        raise NotImplementedError

    # ---------------------------------------------------------------- the step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step: b first, then x.

        Args:
            closure: recomputes the loss and the gradients, and returns the loss.

        Returns:
            What the closure returned, or None.
        """
        loss = None
        if closure is not None:
            self._refuse_within_averaged()  # before it writes gradients
            with torch.enable_grad():
                loss = closure()
        self._take()
        if (scale := getattr(self, "grad_scale", None)) is not None:
            scaling.unscale((p for group in self.param_groups for p in group["params"]), scale)
        return loss

    def step_parameter(self, p: Tensor, group: Group, i: int) -> None:
        """The step of one parameter, for trainers that call it inside backward.

        The same as in `step`, bit for bit. It leaves the gradient, which the trainer frees;
        `step_in_backward` asks less of a loop.

        Args:
            group: the one of `param_groups` that holds `p`, at place `i` of its "params".
        """
        from wngrad.optim import backward  # which imports this module

        if p.grad is not None:
            backward.step_parameter(self, p, group, i)

    def _take(self) -> None:
        """The step itself, with the gradients there are."""
        engine, owner, own = self._engine, self._owner, self.own_settings
        self._refuse_within_averaged()
        memo = None if torch.compiler.is_compiling() else engine.memo
        if memo is not None:
            engine.steps += 1
            if engine.steps == report.WARN_AFTER + 1:
                report.warn_of_small_rate(self)
        for name in self.other_names:
            for group in self.param_groups:
                if name in group:
                    self._rename(group)
        settings = [checks.settings(owner, group, own, memo) for group in self.param_groups]
        for group in self.param_groups:
            checks.rate_now(owner, group["lr"])
        if memo is not None and engine.repeat(self, settings):
            return
        with torch.set_grad_enabled(any(each.differentiable for each in settings)):
            params = due.parameters(self, settings)
            # A trace would lose new state, and cannot see sparse gradients.
            if any(each.lacks_state or cast(Tensor, each.p.grad).is_sparse for each in params):
                self._eager_update(params, settings)
            else:
                self._update(params, settings)

    def _refuse_within_averaged(self) -> None:
        if self._swapped:
            raise RuntimeError(f"{self._owner}: `step` must not be taken within `averaged`.")

    def _update(self, params: list[due.Due], settings: list[Settings]) -> None:
        units = due.units(self, params)
        if torch.compiler.is_compiling():
            plain_step(self._owner, units)
        else:
            self._engine.step(self, settings, units)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _eager_update(self, params: list[due.Due], settings: list[Settings]) -> None:
        """An update outside any trace; takes back the state it made if it fails."""
        before = {
            key: dict(its) if isinstance(its, dict) else its  # a user's own entries
            for key, its in self.state.items()
        }
        try:
            for each in params:
                state.make(each.group, each.p, self.state[each.p], each.shapes, each.direction)
            self._update(params, settings)
        except BaseException:
            self.state.clear()
            self.state.update(before)
            raise

    def _settings(self, group: Group) -> Settings:
        return checks.settings(self._owner, group, self.own_settings, {})

    # ---------------------------------------------------------------- groups and checkpoints

    @property
    def _owner(self) -> str:
        return type(self).__name__

    @property
    def _engine(self) -> fused.Engine:
        """The cache of fused steps; made again after a copy, since none of it is state."""
        if "_fused_engine" not in self.__dict__:
            self._fused_engine = fused.Engine()
        return self._fused_engine

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; its settings override the defaults and are checked first."""
        params = inputs.listed(self._owner, param_group)
        group = {**self.defaults, **self._rename(dict(param_group)), "params": params}
        tensors = inputs.parameters(self._owner, params)
        group |= checks.plain(self._owner, group, self.own_settings)
        group["per"] = blocks.resolve(self._owner, group["per"], tensors)
        shapes = [shape_of({**group, "params": tensors}, i) for i in range(len(tensors))]
        for p, shape in zip(tensors, shapes, strict=True):
            sharded.check(self._owner, p, shape)
            checks.representable(self._owner, group["b_init"], state.b_dtype(p))
            if group["fused"] and not fused.is_quietly_plain(p):
                self._insist_on_fused(p, self._settings(group))
        if group["joint"]:
            sharded.check_joint(self._owner, tensors, shapes)
        self._rename(param_group).update(group)  # as with torch, it stays the same object
        super().add_param_group(param_group)

    def _rename(self, group: Group) -> Group:
        """Take over what was set under another name, checked under that."""
        for name, own in self.other_names.items():
            if name in group:
                dict(self.own_settings)[own](self._owner, name, group[name])
                group[own] = group.pop(name)
        return group

    def _insist_on_fused(self, p: Tensor, settings: Settings) -> None:
        if (reason := fused.why_never(self, p, settings)) is not None:
            fused.refuse(self._owner, p, reason)

    def __getstate__(self) -> dict[str, Any]:
        its = super().__getstate__()
        per = its["defaults"]["per"]
        if callable(per):  # It is kept for groups that are added later, and may not be picklable.
            per = blocks.PortableCallable(per)
        return {**its, "defaults": {**its["defaults"], "per": per}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(per := self.defaults["per"], blocks.PortableCallable):
            self.defaults["per"] = per.function
        self._engine.forget()
        self._rename(self.defaults)
        for group in self.param_groups:  # from a release that did not have them all
            self._rename(group)
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            group["b_init"] = checks.b_init(self._owner, "b_init", group["b_init"])
            for p in (p for p in group["params"] if p in self.state):
                self.state[p] = checkpoints.read(self.state[p], self.earlier_state, group["lr"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, bit for bit; refused if a shape does not fit."""
        checkpoints.load(self, state_dict, super().load_state_dict)

    # ------------------------------------------------------------ the average

    @contextmanager
    def averaged(
        self, model: nn.Module | None = None, *, batches: Iterable[Any] | None = None
    ) -> Iterator[None]:
        """The averages in the model's place: `with opt.averaged(): evaluate(model)`.

        Parameters are changed in place and put back at the end, bit for bit, also if something is
        raised. No step can be taken meanwhile. Parameters without an average stay as they are.

        Args:
            model: one with batch normalization, whose statistics belong to the weights that
                training reads; they are computed for the averages, and put back, too.
            batches: for that, some batches of training data, as `model` takes them (or tuples that
                start with that), which are run through it once.
        """
        if self._swapped:
            raise RuntimeError(f"{self._owner}: `averaged` must not be entered twice.")
        with average.swapped(self, f"{self._owner}.averaged", model, batches):
            self._swapped = True
            try:
                yield
            finally:
                self._swapped = False

    def load_average(
        self, model: nn.Module | None = None, *, batches: Iterable[Any] | None = None
    ) -> None:
        """Copy the average into the parameters, for good: the end of training.

        Args:
            model: as in `averaged`; the statistics of its batch normalization are computed.
            batches: as in `averaged`.
        """
        if self._swapped:
            raise RuntimeError(
                f"{self._owner}: `load_average` must not be called within `averaged`, which puts "
                f"the weights back."
            )
        average.load(self, f"{self._owner}.load_average", model, batches)

    def average_state_dict(
        self, model: nn.Module, *, batches: Iterable[Any] | None = None
    ) -> dict[str, Any]:
        """`model.state_dict()` with copies of the averages in place of the parameters.

        Args:
            model: whose parameters these are.
            batches: as in `averaged`, if `model` has batch normalization.
        """
        return average.state_dict(self, f"{self._owner}.average_state_dict", model, batches)

    # ------------------------------------------------------------ see what it does

    def why_plain(self) -> fused.Reasons:
        """The parameters that do not take the fused step, each with the reason.

        Before the first step, those that never can; after a step, as it was taken. `print` shows
        a line for each.
        """
        settings = [self._settings(group) for group in self.param_groups]
        return fused.why_plain(self, settings, self._engine.reasons)

    def rates(self) -> dict[Tensor, Tensor]:
        """The effective rates λ/b of every parameter that has stepped, in the shape of its b.

        NaN where no gradient has set a b yet. Does not wait for the device.
        """
        return report.rates(self)

    def rate_summary(self) -> list[report.RateSummary]:
        """Minimum, median and maximum of λ/b for each group, as tensors.

        Does not wait for the device; `summary.floats()` does. Of sharded parameters, this rank's.
        """
        return report.summarize(self)

    def skipped(self) -> int:
        """How many blocks `nonfinite="skip"` has left alone so far; waits for the device.

        Of sharded parameters, this rank's.
        """
        return report.skipped(self)

    def diagnose(self, losses: Sequence[float | Tensor] | None = None) -> list[str]:
        """What b says about the run so far, a line for each group. Waits for the device.

        b alone cannot tell whether the network learns: hand in losses, and the first line says
        whether they fall. Of sharded parameters, this rank's.

        Args:
            losses: training losses in the order of the steps, oldest first; at least 20.
        """
        return report.diagnose(self, losses)
