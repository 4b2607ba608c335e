"""The torch contract, shared by all optimizers: steps, groups, checkpoints, the average."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from wngrad.optim import (
    average,
    blocks,
    checks,
    collect,
    fused,
    report,
    scaling,
    settings,
    sharded,
    state,
    step,
)
from wngrad.optim.collect import Step
from wngrad.optim.directions import Direction
from wngrad.optim.settings import Group

if TYPE_CHECKING:
    from wngrad.optim import backward


class BlockOptimizer(Optimizer):
    """An optimizer with one learning rate, λ/b, for every block of entries.

    A subclass says what its `direction` is, and in `Settings` which settings it adds;
    `docs/new-optimizer.md` writes one.
    """

    Settings: ClassVar[type[settings.Settings]] = settings.Settings

    # Lets GradScaler hand `grad_scale` and `found_inf` to the step instead of synchronizing.
    _step_supports_amp_scaling = True
    _swapped = False  # within `averaged`

    def __init__(self, params: ParamsT, given: dict[str, Any]) -> None:
        defaults = {name: row.default for name, row in self.Settings.rows.items()}
        for name in given.keys() - {"lr", "foreach", *defaults}:
            settings.refuse_argument(self._owner, name, given[name])
        every = {**defaults, **given}
        settings.check_defaults(self._owner, self.Settings, every)
        checks.iterable(self._owner, params)
        self._renew()
        super().__init__(params, {name: every[name] for name in ("lr", *defaults)})

    def __init_subclass__(cls, **more: Any) -> None:
        """Let `help` and `inspect.signature` show every setting, as if it were written out."""
        super().__init_subclass__(**more)
        signature = inspect.signature(cls.__init__)
        named = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        if len(named) < len(signature.parameters):
            defaults = [(name, row.default) for name, row in cls.Settings.rows.items()]
            shared = [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
                for name, default in (*defaults, ("foreach", None))
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

    def _take(self, only: backward.Part | None = None) -> None:
        """The step itself, with the gradients there are; of a part of a group, if one is given."""
        if self._swapped:
            self._refuse_within_averaged()
        groups, places, take = self.param_groups, None, None
        if torch.compiler.is_compiling():
            now = self._settings_now(groups, None)
        else:
            groups, places, now, take = self._eagerly(only)
            if take is None:
                return
        differentiable = False
        for checked in now:
            differentiable = differentiable or checked.differentiable
        with torch.set_grad_enabled(differentiable):
            steps = collect.collect(self, groups, now, places)
            untraceable = False
            for s in steps:
                untraceable = untraceable or s.untraceable
            (self._with_new_state if untraceable else self._move)(groups, steps, take)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _eagerly(self, only: backward.Part | None) -> tuple[Any, ...]:
        """What steps, its settings, and what takes units by kernels; None once all have stepped."""
        if only is None:
            groups, places, engine = self.param_groups, None, self._engine
            params = [p for group in groups for p in group["params"]]
            self._steps += 1
            if self._steps == report.WARN_AFTER + 1:
                report.warn_of_small_rate(self)
        else:
            groups, places, engine = [self.param_groups[only.number]], only.places, only.engine
            params = only.params
        now = self._settings_now(groups, self._memo)
        scope = fused.Scope(self, params, groups, now)
        take = None if engine.repeat(scope) else partial(engine.take, scope)
        return groups, places, now, take

    def _settings_now(
        self, groups: list[Group], memo: settings.Memo | None
    ) -> list[settings.Settings]:
        now = []
        for group in groups:
            settings.rename(type(self).__name__, self.Settings, group)
            now.append(settings.read(type(self).__name__, self.Settings, group, memo))
        return now

    def _move(self, groups: list[Group], steps: list[Step], take: Any) -> None:
        """Propose, rule, move: by kernels where they can, and plainly."""
        units, launch = collect.units(self, groups, steps), None
        if take is not None:
            units, launch = take(units)
        batches = step.propose(units)
        step.rule(type(self).__name__, units, batches)
        if launch is not None:
            launch()
        step.move(batches)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _with_new_state(self, groups: list[Group], steps: list[Step], take: Any) -> None:
        """A move outside any trace; takes back the state it made if it fails."""
        before = {s.param: dict(self.state[s.param]) for s in steps if s.param in self.state}
        try:
            for s in steps:
                state.make(groups[s.group], s.param, self.state[s.param], s.shapes, s.direction)
            self._move(groups, steps, take)
        except BaseException:
            for s in steps:
                self.state.pop(s.param, None)
            self.state.update(before)
            raise

    def _refuse_within_averaged(self) -> None:
        if self._swapped:
            raise RuntimeError(f"{self._owner}: `step` must not be taken within `averaged`.")

    # ---------------------------------------------------------------- groups and checkpoints

    @property
    def _owner(self) -> str:
        return type(self).__name__

    def _renew(self) -> None:
        """What is made again after a copy, since none of it is state."""
        self._engine = fused.Engine()
        self._memo: settings.Memo = {}  # of settings that were checked
        self._steps = 0  # that were asked for, for a hint that is given once
        self._single_parts: dict[tuple[int, int], backward.Part] = {}  # of `step_parameter`

    def _settings(self, group: Group) -> settings.Settings:
        return settings.read(self._owner, self.Settings, group, {})

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; its settings override the defaults and are checked first."""
        owner = self._owner
        params = checks.listed(owner, param_group)
        group = {**self.defaults, **param_group, "params": params}
        settings.rename(owner, self.Settings, group)
        tensors = checks.parameters(owner, params)
        group |= settings.plain(owner, self.Settings, group)
        group["per"] = blocks.resolve(owner, group["per"], tensors)
        settings.fit(owner, group)
        for i, p in enumerate(tensors):
            sharded.check(owner, p, state.shape_of({**group, "params": tensors}, i))
            if group["fused"]:
                checked = self._settings(group)
                fused.insist(owner, p, checked, fused.why_never(self, p, checked))
        param_group.update(group)  # as with torch, it stays the same object
        settings.rename(owner, self.Settings, param_group)
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        per = kept["defaults"]["per"]
        if callable(per):  # It is kept for groups that are added later, and may not be picklable.
            per = blocks.PortableCallable(per)
        return {**kept, "defaults": {**kept["defaults"], "per": per}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if isinstance(per := self.defaults["per"], blocks.PortableCallable):
            self.defaults["per"] = per.function
        if "_engine" not in self.__dict__:
            self._renew()
        self._engine.forget()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, bit for bit; refused if a shape does not fit."""
        state.load(self, state_dict, super().load_state_dict)

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
        now = [self._settings(group) for group in self.param_groups]
        return fused.why_plain(self, now, self._engine.reasons)

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
