"""The torch contract, shared by WNGrad and WNAdam: groups, checkpoints, and who steps together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from wngrad.optim import blocks, door, fused, report, rows, sharded, state
from wngrad.optim.glance import Glance, glance
from wngrad.optim.launch import Plan
from wngrad.optim.pieces import Family, Proposal, piece
from wngrad.optim.state import SMALL, Group, shape_of
from wngrad.optim.update import commit, propose


class BlockOptimizer(Optimizer):
    """An optimizer with one learning rate, λ/b, for every block of entries."""

    _buffer: str  # the name of the buffer of the parameter's size
    _counts_blocks: bool  # whether t is kept for every block, or once for the parameter
    _fraction: str  # the name of μ or β

    # A GradScaler then sets `grad_scale` and `found_inf` before a step, and waits for nothing.
    _step_supports_amp_scaling = True

    def __init__(self, params: ParamsT, settings: dict[str, Any]) -> None:
        self._fused_engine = fused.Engine()
        super().__init__(params, settings)

    def _checked(self, group: Group) -> Group:
        """The settings a subclass adds, checked and as plain data."""
        raise NotImplementedError

    def _buffered(self, group: Group) -> bool:
        """Whether this group keeps the buffer."""
        raise NotImplementedError

    def _move(
        self, x: Tensor, g: Tensor, b: Tensor, buf: Tensor | None, t: Tensor, family: Family
    ) -> tuple[Tensor, Tensor | None]:
        """The new parameters and buffer, by the algorithm's last lines; changes nothing."""
        raise NotImplementedError

    def _move_in_place(
        self, p: Tensor, g: Tensor, b: Tensor, buf: Tensor | None, t: Tensor, family: Family
    ) -> None:
        """The same lines without temporaries; changes `p` and `buf`."""
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
            with torch.enable_grad():
                loss = closure()
        self._take()
        return loss

    def _take(self) -> None:
        """The step itself, with the gradients there are."""
        if not torch.compiler.is_compiling() and self._step_again():
            return
        for group in self.param_groups:
            door.settings(self._owner, group, self._fraction)
        with torch.set_grad_enabled(any(g["differentiable"] for g in self.param_groups)):
            if self._untraceable():
                self._eager_update()
            else:
                self._update()

    def _update(self) -> None:
        # Whatever can fail, fails before the first launch or commit.
        families = self._families()
        plan, now = None, None
        if not torch.compiler.is_compiling() and fused.possible(self):
            plan, now = self._plan(families)
            families = [f for f in families if f.pieces[0].param in plan.left]
        alone, together = rows.sorted_out(families)
        proposals = propose(together)
        self._refuse_nonfinite(proposals)
        if plan is not None and now is not None:
            self._launch(plan, now)
        for proposal in proposals:
            commit(proposal, self)
        for family in alone:
            for some in rows.split(family):
                commit(propose([some])[0], self)

    # ----------------------------------------------------------------- the fused step

    def _step_again(self) -> bool:
        """Take the step if an earlier one was like it, all of it fused."""
        engine = self._engine
        if engine.latest is None or fused.watched():
            return False
        now = glance(self, engine.before, engine.latest.look)
        plan = engine.earlier(now)
        if plan is None or now is None or plan.left:
            return False
        self._launch(plan, now)
        return True

    def _plan(self, families: list[Family]) -> tuple[Plan, Glance]:
        now = glance(self, None, None)
        assert now is not None  # its families have been made
        plan = self._engine.earlier(now)
        if plan is None:
            plan = self._engine.plan(self, families, now)
        for family in families:
            param = family.pieces[0].param
            if family.group["fused"] and param in plan.left:
                raise ValueError(
                    f"{self._owner}: `fused` is True, but a parameter of shape "
                    f"{tuple(param.shape)} cannot take the fused step: {plan.left[param]}."
                )
        return plan, now

    def _launch(self, plan: Plan, now: Glance) -> None:
        scale, found = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if (bad := plan.run(now, scale, found)) is not None:
            self._refuse(*bad)

    @property
    def _engine(self) -> fused.Engine:
        """The plans of fused steps; made again after a copy, since none of it is state."""
        if "_fused_engine" not in self.__dict__:
            self._fused_engine = fused.Engine()
        return self._fused_engine

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _eager_update(self) -> None:
        """An update outside any trace; takes back the state it made if it fails."""
        before = {p: dict(mine) for p, mine in self.state.items()}
        try:
            self._update()
        except BaseException:
            self.state.clear()
            self.state.update(before)
            raise

    def _untraceable(self) -> bool:
        """Whether there is state to make, which a trace would lose, or a sparse gradient."""
        return any(
            group["params"][i].grad.is_sparse
            or self._wanted(group, i).keys() - self.state.get(group["params"][i], {}).keys()
            for group in self.param_groups
            for i in _live(group)
        )

    def _refuse_nonfinite(self, proposals: list[Proposal]) -> None:
        asked = [p for p in proposals if p.family.group["nonfinite"] == "raise"]
        counts = [(~p.finite).sum() for p in asked]
        bad = sharded.over_ranks(counts, [p.piece.param for p in asked])
        for count, proposal in zip(bad, asked, strict=True):
            if count:
                self._refuse(proposal.piece.param, count)

    def _refuse(self, p: Tensor, count: int) -> NoReturn:
        raise ValueError(
            f"{self._owner}: `nonfinite` is 'raise', and the gradient of {count} blocks or more of "
            f"a parameter of shape {tuple(p.shape)} is not finite or too large. Nothing was "
            f"changed."
        )

    # ------------------------------------------------------- families and state

    def _families(self) -> list[Family]:
        """Who steps together. Everything is checked before any state is made."""
        plan = [(group, self._lam(group), _live(group)) for group in self.param_groups]
        for group, _, live in plan:
            for i in live:
                self._check_parameter(group, i)
        for group, _, live in plan:
            for i in live:
                mine = self.state[group["params"][i]]
                state.make(group, i, mine, self._wanted(group, i))
        return [family for part in plan for family in self._group_families(*part)]

    def _group_families(
        self, group: Group, lam: float | Tensor, live: list[int]
    ) -> Iterator[Family]:
        if not isinstance(lam, Tensor) and lam == 0:
            return  # A step without rate changes nothing.
        params, scale = group["params"], getattr(self, "grad_scale", None)
        held = {i for i, p in enumerate(params) if group["hold_1d"] and p.dim() == 1}
        joint = group["joint"] or group["per"] == "model"
        free = [i for i in live if i not in held]
        for i in live:
            if i in held or not joint:
                part = piece(params[i], self.state[params[i]], self._buffer, alone=True)
                yield Family(group, lam, [part], [], hold=i in held, scale=scale)
        if joint and free:
            alone = len(params) == 1
            parts = [piece(params[i], self.state[params[i]], self._buffer, alone) for i in free]
            absent = [
                sharded.local(self.state[p]["b"])
                for i, p in enumerate(params)
                if i not in held and i not in live and "b" in self.state.get(p, {})
            ]
            yield Family(group, lam, parts, absent, hold=False, scale=scale)

    def _lam(self, group: Group) -> float | Tensor:
        lr = group["lr"]
        lam = door.scalar(self._owner, lr) if isinstance(lr, Tensor) else cast(float, lr)
        found: Tensor | None = getattr(self, "found_inf", None)
        if found is None or (not isinstance(lam, Tensor) and lam == 0):
            return lam
        # A scaler has found an inf: a step without rate changes nothing.
        wide = torch.as_tensor(lam, dtype=torch.float64, device=found.device)
        return torch.where(found.reshape(()) != 0, 0.0, wide)

    def _wanted(self, group: Group, i: int) -> dict[str, blocks.Shape]:
        buffer = self._buffer if self._buffered(group) else None
        return state.wanted(group, i, buffer, self._counts_blocks)

    def _check_parameter(self, group: Group, i: int) -> None:
        p = group["params"][i]
        touches_all = self._buffered(group) or group["weight_decay"] != 0
        door.gradient(self._owner, p, p.grad, touches_all=touches_all)
        if group["differentiable"] and p.is_leaf and p.requires_grad:
            raise ValueError(
                f"{self._owner}: `differentiable` parameters must not be leaves that require a "
                f"gradient, got one of shape {tuple(p.shape)}; use a clone."
            )
        mine = self.state.get(p, {})
        fixed = "the state (neither `per` nor a shape may change)"
        state.check(self._owner, fixed, p, mine, self._wanted(group, i))

    # ---------------------------------------------------------------- the door

    @property
    def _owner(self) -> str:
        return type(self).__name__

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; its settings override the defaults and are checked first."""
        params = door.listed(self._owner, param_group)
        group = {**self.defaults, **param_group, "params": params}
        tensors = door.parameters(self._owner, params)
        group |= door.common(self._owner, group) | self._checked(group)
        group["per"] = blocks.resolve(self._owner, group["per"], tensors)
        shapes = [shape_of({**group, "params": tensors}, i) for i in range(len(tensors))]
        for p, shape in zip(tensors, shapes, strict=True):
            sharded.check(self._owner, p, shape)
            door.representable(self._owner, group["b_init"], state.b_dtype(p))
            if group["fused"] and (reason := fused.why_not_at_all(p, group)) is not None:
                raise ValueError(
                    f"{self._owner}: `fused` is True, but a parameter of shape {tuple(p.shape)} "
                    f"cannot take the fused step: {reason}."
                )
        if group["joint"]:
            sharded.check_joint(self._owner, tensors, shapes)
        super().add_param_group(group)

    def __getstate__(self) -> dict[str, Any]:
        # A callable default has done its work in every group, and may not be picklable.
        mine = super().__getstate__()
        per = mine["defaults"]["per"]
        return {**mine, "defaults": {**mine["defaults"], "per": "neuron" if callable(per) else per}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._engine.forget()
        for group in self.param_groups:  # from a release that did not have them all
            for key, value in self.defaults.items():
                group.setdefault(key, value)
            group["b_init"] = door.b_init(self._owner, group["b_init"])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, bit for bit; refused if a shape does not fit."""
        given: dict[str, Any] = {}

        def check(_: Optimizer, state_dict: dict[str, Any]) -> None:
            self._check_state_dict(state_dict)
            given.update(state_dict)

        def widen(_: Optimizer) -> None:
            # torch casts all state to its parameter's dtype, where b, t and the counts are wider
            # on purpose, and keeps what needs no cast, which would tie two optimizers together.
            for mine, saved in zip(self.param_groups, given["param_groups"], strict=True):
                for p, key in zip(mine["params"], saved["params"], strict=True):
                    for name, value in given["state"].get(key, {}).items():
                        if isinstance(value, Tensor):
                            dtype = value.dtype if name in SMALL else p.dtype
                            self.state[p][name] = value.detach().to(p.device, dtype, copy=True)

        # Our check runs after the user's hooks of its kind, our cast before them.
        hooks = [
            self.register_load_state_dict_pre_hook(check),
            self.register_load_state_dict_post_hook(widen, prepend=True),
        ]
        blocks_of = [(group["per"], group["fused"]) for group in self.param_groups]
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()
        for group, (per, fuse) in zip(self.param_groups, blocks_of, strict=True):
            group["fused"] = fuse  # That is for the machine to say, not for the checkpoint.
            if isinstance(per, list):  # Shapes are in the order of our parameters, not the file's.
                group["per"] = per

    def _check_state_dict(self, state_dict: dict[str, Any]) -> None:
        for mine, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            per = mine["per"] if isinstance(mine["per"], list) else saved.get("per", mine["per"])
            group = {**mine, **saved, "per": per, "params": mine["params"]}
            for i, key in enumerate(saved["params"][: len(mine["params"])]):
                found = state_dict["state"].get(key, {})
                state.check(
                    self._owner, "`state_dict`", mine["params"][i], found, self._wanted(group, i)
                )

    # ------------------------------------------------------------ see what it does

    def why_plain(self) -> dict[Tensor, str]:
        """The parameters that do not take the fused step, each with the reason.

        Before the first step, those that never can; after a step, as it was taken.
        """
        latest = self._engine.latest
        return {
            p: reason
            for group in self.param_groups
            for p in group["params"]
            if (reason := fused.why_plain(p, group, latest)) is not None
        }

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

    def diagnose(self) -> list[str]:
        """What b says about the run so far, a line for each group. Waits for the device."""
        return report.diagnose(self)


def _live(group: Group) -> list[int]:
    """The parameters that have a gradient."""
    return [i for i, p in enumerate(group["params"]) if p.grad is not None]
