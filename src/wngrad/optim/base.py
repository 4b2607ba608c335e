"""The torch contract, shared by WNGrad and WNAdam: groups, state, checkpoints, and the step.

A step goes through *families*, parameters that share their b. Everything that can be refused is
refused before the first change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from wngrad import rule
from wngrad.optim import blocks, door, report, sharded
from wngrad.optim.pieces import SMALL, Family, Piece, Proposal, piece

Group = dict[str, Any]


class BlockOptimizer(Optimizer):
    """An optimizer with one learning rate, λ/b, for every block of entries."""

    _buffer: str  # the name of the buffer of the parameter's size
    _counts_blocks: bool  # whether t is kept for every block, or once for the parameter

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
        with torch.set_grad_enabled(any(g["differentiable"] for g in self.param_groups)):
            if self._stateless():
                self._first_update()
            else:
                self._update()
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # A traced step loses new state.
    def _first_update(self) -> None:
        """An update that makes state, and takes it away again if it fails."""
        before = {p: dict(state) for p, state in self.state.items()}
        try:
            self._update()
        except BaseException:
            self.state.clear()
            self.state.update(before)
            raise

    def _update(self) -> None:
        # Whatever can fail, fails here: nothing has changed before the first commit.
        proposals = [new for family in self._families() for new in self._propose(family)]
        self._refuse_nonfinite(proposals)
        for proposal in proposals:
            self._commit(proposal)

    def _propose(self, family: Family) -> list[Proposal]:
        """The new b of every piece: b_j ← b_{j-1} + λ²‖g‖²/b_{j-1}."""
        group, lam = family.group, family.lam
        norms = _shared_norms(family)
        proposals = []
        for part, sq, b in zip(family.pieces, norms, _shared_b(family), strict=True):
            wide = b.to(sq.dtype, copy=group["differentiable"])
            if isinstance(group["b_init"], tuple):
                wide = _latched(wide, sq, lam, group["b_init"][1], torch.finfo(b.dtype))
            if not family.hold:
                # What has no b yet keeps none; 0·‖g‖² lets a NaN show all the same.
                unset = wide == 0
                wide = torch.where(unset, 0 * sq, rule.next_b(torch.where(unset, 1, wide), sq, lam))
            new = wide.to(b.dtype)
            finite = torch.isfinite(new) & torch.isfinite(sq)
            # An infinite b would freeze the block for ever, and in silence. NaN shows.
            new = torch.where(torch.isinf(new), torch.nan, new)
            proposals.append(Proposal(family, part, new, finite, sq != 0))
        return proposals

    def _commit(self, proposal: Proposal) -> None:
        """Move the parameter and store what the step proposes."""
        family, part, b, finite, seen = proposal
        group, state = family.group, part.state
        skip = group["nonfinite"] == "skip"
        # A step with neither rate nor gradient (a checkpoint loader's) is not counted.
        counted = family.lam != 0
        t = state["t"] + (seen | counted if self._counts_blocks else counted)
        # Dividing by ∞ leaves a block that has no b where it is.
        divisor = torch.where(b == 0, torch.inf, b)
        buffer = state.get(self._buffer)
        for p, g, b_, t_, ok, buf in _slices(group, part.p, part.g, divisor, t, finite, buffer):
            x = _working(p, group)
            m = None if buf is None else _working(buf, group)
            if group["decoupled_weight_decay"] and group["weight_decay"]:
                x = rule.decay(x, family.lam, group["weight_decay"])
            x, m = self._move(x, _gradient(p, g, group), b_, m, t_, family)
            if buf is not None:
                buf.copy_(torch.where(ok, cast(Tensor, m), buf) if skip else m)
            p.copy_(torch.where(ok, x, p) if skip else x)
        if skip:
            b = torch.where(finite, b, state["b"])
            t = torch.where(finite, t, state["t"]) if self._counts_blocks else t
            state["skipped"].add_(~finite)
        state["b"].copy_(b)
        state["t"].copy_(t)
        if part.write_back is not None:
            part.write_back()

    def _refuse_nonfinite(self, proposals: list[Proposal]) -> None:
        for family, part, _, finite, _ in proposals:
            if family.group["nonfinite"] == "raise" and not finite.all():
                raise ValueError(
                    f"{self._owner}: `nonfinite` is 'raise', and the gradient of "
                    f"{int((~finite).sum())} of {finite.numel()} blocks of a parameter of shape "
                    f"{tuple(part.param.shape)} is not finite or too large. Nothing was changed."
                )

    # ------------------------------------------------------- families and state

    def _families(self) -> list[Family]:
        """Who steps together. Everything is checked before any state is made."""
        plan = [(group, self._lam(group), _live(group)) for group in self.param_groups]
        for group, _, live in plan:
            for i in live:
                self._check_gradient(group, i)
        for group, _, live in plan:
            for i in live:
                if self._lacks_state(group, i):
                    self._make_state(group, i)
        return [family for part in plan for family in self._group_families(*part)]

    def _group_families(
        self, group: Group, lam: float | Tensor, live: list[int]
    ) -> Iterator[Family]:
        params = group["params"]
        held = [i for i in live if group["hold_1d"] and params[i].dim() == 1]
        free = [i for i in live if i not in held]
        joint = group["joint"] or group["per"] == "model"
        lonely = held if joint else live
        for i in lonely:
            part = piece(params[i], self.state[params[i]], alone=True)
            yield Family(group, lam, [part], [], hold=i in held)
        if joint and free:
            alone = len(params) == 1
            parts = [piece(params[i], self.state[params[i]], alone=alone) for i in free]
            absent = [
                sharded.local(self.state[p]["b"])
                for i, p in enumerate(params)
                if i not in live and "b" in self.state.get(p, {})
            ]
            yield Family(group, lam, parts, absent, hold=False)

    def _lam(self, group: Group) -> float | Tensor:
        lr = group["lr"]
        return door.scalar(self._owner, lr) if isinstance(lr, Tensor) else cast(float, lr)

    def _check_gradient(self, group: Group, i: int) -> None:
        p = group["params"][i]
        touches_all = self._buffered(group) or group["weight_decay"] != 0
        door.gradient(self._owner, p, p.grad, touches_all=touches_all)
        b = self.state[p]["b"] if p in self.state and "b" in self.state[p] else None
        if b is not None and tuple(b.shape) != self._shape(group, i):
            raise ValueError(
                f"{self._owner}: `params` must keep their shapes, got {tuple(p.shape)} for a "
                f"parameter whose b has shape {tuple(b.shape)}."
            )

    def _shape(self, group: Group, i: int) -> blocks.Shape:
        per: Any = group["per"]
        p = group["params"][i]
        return tuple(per[i]) if isinstance(per, list) else blocks.named_shape(tuple(p.shape), per)

    def _stateless(self) -> bool:
        """Whether a parameter is about to take its first step."""
        return any(self._lacks_state(group, i) for group in self.param_groups for i in _live(group))

    def _lacks_state(self, group: Group, i: int) -> bool:
        p = group["params"][i]
        state = self.state.get(p, {})
        return (
            "b" not in state
            or (self._buffered(group) and self._buffer not in state)
            or (group["nonfinite"] == "skip" and "skipped" not in state)
        )

    def _make_state(self, group: Group, i: int) -> None:
        """Whatever state the parameter lacks."""
        p, shape = group["params"][i], self._shape(group, i)
        one = group["per"] == "model"
        state = self.state[p]
        if "b" not in state:
            double = p.dtype in (torch.float64, torch.complex128)
            dtype = torch.float64 if double else torch.float32
            # 0 stands for "not yet": the first gradient will set it.
            start = 0.0 if isinstance(group["b_init"], tuple) else group["b_init"]
            state["b"] = sharded.filled(p, shape, start, dtype, one=one)
            state["t"] = (
                sharded.filled(p, shape, 0.0, dtype, one=one)
                if self._counts_blocks
                else torch.zeros((), device=p.device)
            )
        if self._buffered(group) and self._buffer not in state:
            state[self._buffer] = torch.zeros_like(p, memory_format=torch.preserve_format)
        if group["nonfinite"] == "skip" and "skipped" not in state:
            state["skipped"] = sharded.filled(p, shape, 0, torch.int32, one=one)

    # ---------------------------------------------------------------- the door

    @property
    def _owner(self) -> str:
        return type(self).__name__

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; its settings override the defaults and are checked first."""
        group = {**self.defaults, **param_group}
        if not isinstance(group["params"], (Tensor, set)):  # torch wraps the one, refuses the other
            group["params"] = list(group["params"])
        tensors = door.parameters(self._owner, group["params"])
        group |= door.common(self._owner, group) | self._checked(group)
        group["per"] = blocks.resolve(self._owner, group["per"], tensors)
        shapes = [self._shape({**group, "params": tensors}, i) for i in range(len(tensors))]
        for p, shape in zip(tensors, shapes, strict=True):
            sharded.check(self._owner, p, shape)
        if group["joint"] and len({torch.Size(shape).numel() for shape in shapes}) > 1:
            raise ValueError(
                f"{self._owner}: `joint` parameters must have as many blocks each, got {shapes}."
            )
        super().add_param_group(group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # from a release that did not have them all
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, bit for bit; refused if a shape does not fit."""
        given: dict[str, Any] = {}

        def check(_: Optimizer, state_dict: dict[str, Any]) -> None:
            self._check_state(state_dict)
            given.update(state_dict)

        hook = self.register_load_state_dict_pre_hook(check)  # runs after everyone else's
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()
        # torch casts all state to its parameter's dtype, where b, t and the counts are wider on
        # purpose, and keeps what needs no cast, which would tie two optimizers together.
        for param, saved in self._pairs(given):
            for key, value in saved.items():
                dtype = value.dtype if key in SMALL else param.dtype
                self.state[param][key] = value.detach().to(param.device, dtype, copy=True)

    def _pairs(self, state_dict: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Each parameter with the state saved for it."""
        for mine, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            for p, key in zip(mine["params"], saved["params"], strict=False):
                yield p, state_dict["state"].get(key, {})

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        for mine, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            group = {**mine, **saved, "params": mine["params"]}
            for i, key in enumerate(saved["params"][: len(mine["params"])]):
                self._check_shapes(group, i, state_dict["state"].get(key, {}))

    def _check_shapes(self, group: Group, i: int, state: dict[str, Tensor]) -> None:
        want = {"b": self._shape(group, i), self._buffer: tuple(group["params"][i].shape)}
        for key, shape in want.items():
            if key in state and tuple(state[key].shape) != shape:
                raise ValueError(
                    f"{self._owner}: `state_dict` must fit the parameters, got `{key}` of shape "
                    f"{tuple(state[key].shape)} instead of {shape} for a parameter of shape "
                    f"{tuple(group['params'][i].shape)}."
                )

    # ------------------------------------------------------------ see what it does

    def rates(self) -> dict[Tensor, Tensor]:
        """The effective rates λ/b of every parameter that has stepped, in the shape of its b.

        NaN where no gradient has set a b yet. Does not wait for the device.
        """
        return report.rates(self)

    def rate_summary(self) -> list[report.RateSummary]:
        """Minimum, median and maximum of λ/b for each group, as tensors.

        Does not wait for the device; `summary.floats()` does.
        """
        return report.summarize(self)

    def skipped(self) -> int:
        """How many blocks `nonfinite="skip"` has left alone so far. Waits for the device."""
        return report.skipped(self)

    def diagnose(self) -> list[str]:
        """What b says about the run so far, a line for each group. Waits for the device."""
        return report.diagnose(self)


def _live(group: Group) -> list[int]:
    """The parameters that have a gradient."""
    return [i for i, p in enumerate(group["params"]) if p.grad is not None]


def _working(t: Tensor, group: Group) -> Tensor:
    """`t` in float32 or wider; a copy where autograd will want the value from before the step."""
    return t.to(torch.promote_types(t.dtype, torch.float32), copy=group["differentiable"])


def _gradient(p: Tensor, g: Tensor, group: Group) -> Tensor:
    """The gradient the rule sees: of −f if maximizing, with coupled weight decay in it."""
    g = _working(g, {"differentiable": False})
    if group["maximize"]:
        g = -g
    if group["weight_decay"] and not group["decoupled_weight_decay"]:
        g = g + group["weight_decay"] * _working(p, group)
    return g


def _slices(group: Group, *tensors: Tensor | None) -> Iterator[tuple[Any, ...]]:
    whole = group["differentiable"] or torch.compiler.is_compiling()
    return blocks.slices(whole, *cast(tuple[Tensor, ...], tensors))


def _sq_norm(part: Piece, group: Group) -> Tensor:
    """‖g‖² of each block of a piece, on this rank."""
    shape = tuple(part.state["b"].shape)
    sums = [
        blocks.sq_norm(_gradient(p, g, group), shape) for p, g in _slices(group, part.p, part.g)
    ]
    if len(sums) == 1:
        return sums[0]
    return torch.stack(sums).sum(0) if shape[0] == 1 else torch.cat(sums)


def _shared_norms(family: Family) -> list[Tensor]:
    """‖g‖² over all parameters that share the block, and over all ranks that hold a part of it."""
    norms = [_sq_norm(part, family.group) for part in family.pieces]
    sums: dict[tuple[Any, ...], Tensor] = {}  # what the same ranks share is summed up first
    for part, sq in zip(family.pieces, norms, strict=True):
        flat = sq.flatten().to(norms[0].device)
        sums[part.cuts] = sums[part.cuts] + flat if part.cuts in sums else flat
    total = sum(sharded.sum_over_ranks(sq, cuts) for cuts, sq in sums.items())
    return [cast(Tensor, total).to(sq.device).view_as(sq) for sq in norms]


def _shared_b(family: Family) -> list[Tensor]:
    """The b each piece starts from.

    b never decreases, so among relatives the largest is the latest: a parameter that was frozen
    for a while takes over what the others have reached.
    """
    mine = [part.state["b"] for part in family.pieces]
    if len(mine) + len(family.absent) == 1:
        return mine
    every = torch.stack([b.flatten().to(mine[0].device) for b in [*mine, *family.absent]])
    return [every.amax(0).to(b.device).view_as(b) for b in mine]


def _latched(b: Tensor, sq: Tensor, lam: Any, c: float, info: torch.finfo) -> Tensor:
    """b, or b₁ = C·λ·‖g₁‖ where a block meets its first gradient that is neither 0 nor denormal."""
    norm = sq.sqrt()
    b1 = rule.first_b(norm, lam, c)
    # Below this a gradient's entries may be denormal, with too few digits to start from.
    floor = info.tiny / info.eps
    return torch.where((b == 0) & (norm >= floor) & (b1 >= floor), b1, b)
