"""Orthogonalized directions in a fused step: u of every matrix, before the kernels take the rows.

The kernels step rows by a tensor u in the gradient's place (`LaunchKey.proposed`), as if it were
the gradient. A *stage* makes it: for some parameters, once a step, from their gradients and their
momentum `m`, which it brings up to date.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from wngrad.optim import lists
from wngrad.optim.collect import Step, Unit
from wngrad.optim.directions import Orthogonalized
from wngrad.optim.fused.records import GROUP
from wngrad.optim.fused.snapshot import Scope, momentum_setting
from wngrad.optim.modules import Layout
from wngrad.optim.step import Batch

_NAMES = GROUP.names or ()
_WORDS, _LAM = len(_NAMES), _NAMES.index("lam")


class Stage(NamedTuple):
    """Makes u of some parameters, all on one device.

    A step without rate (λ = 0, or an inf that a `GradScaler` has found) leaves m as it is, and u is
    not read. Under `nonfinite="skip"` a block whose u is NaN keeps its m; its rows are left to the
    kernels, which skip and count what is NaN.
    """

    units: list[Unit]
    u: list[Tensor]  # of each unit, in its parameter's shape and order in memory
    # Brings m up to date and fills u; of the words of the step's snapshot, and what a scaler says.
    run: Callable[[Scope, list[int], Tensor | None, Tensor | None], None]


def stages(units: list[Unit], scope: Scope, words: list[int]) -> list[Stage]:
    """The stages of the units that need one: each is run, and its u used, before the next."""
    by_kind: dict[tuple[Any, ...], list[Unit]] = {}
    for unit in units:
        step = unit[0]
        if isinstance(step.direction, Orthogonalized):
            kind = (step.p.device, step.p.dtype, step.settings.nonfinite == "skip")
            key = kind if uses_kernels(step.p) else (step.p.device,)
            by_kind.setdefault(key, []).append(unit)
    made: list[Stage] = []
    for key, part in by_kind.items():
        if len(key) > 1:
            made += _by_kernels(part, scope, words)
        else:
            direct = Matrices(part, scope)
            made.append(Stage(part, direct.u, direct.run))
    return made


def proposed(unit: Unit, u: Tensor) -> Unit:
    """The same unit, with u in the gradient's place."""
    (step,) = unit
    return [replace(step, g=u.view(step.p.shape))]


def has_views(step: Step, layout: Layout) -> bool:
    """Whether the matrices of an orthogonalized parameter lie in its memory as a stage needs it."""
    p = step.param
    if uses_kernels(p):
        from wngrad.optim.fused import matrices_cuda

        return matrices_cuda.fits(p, cast(Tensor, p.grad), step.buffers["m"].view(p.shape), layout)
    return not p.numel() or layout.matrices(p.detach()).data_ptr() == p.data_ptr()


# -------------------------------------------------------------------- by Triton's kernels


def uses_kernels(p: Tensor) -> bool:
    """Whether a stage is made of Triton's kernels."""
    return p.is_cuda


def _by_kernels(units: list[Unit], scope: Scope, words: list[int]) -> list[Stage]:
    from wngrad.optim.fused import matrices_cuda

    stepping = {id(p): i for i, p in enumerate(p for p in scope.params if p.grad is not None)}
    head = len(words) - len(stepping)
    start, sources = units[0][0], []
    for i, unit in enumerate(units):
        step = unit[0]
        direction = cast(Orthogonalized, step.direction)
        g, m = step.param.grad, step.buffers["m"].view(step.param.shape)
        facts, apart = (direction.layout, i, step.group), direction.rows_apart
        sources.append(matrices_cuda.Source.of(cast(Tensor, g), m, *facts, hides_rows=apart))
    index = [*range(head), *(head + stepping[id(unit[0].param)] for unit in units)]
    table = matrices_cuda.Words(words, index, head, start.p.device)
    skip = start.settings.nonfinite == "skip"
    made = []
    for stage in matrices_cuda.stages(sources, skip, table):
        part = [units[source.gradient] for source in stage.sources]
        made.append(Stage(part, stage.u, lambda _, *step, run=stage.run: run(*step)))
    return made


# ------------------------------------------------------------------- by the direction itself


class _Matrix(NamedTuple):
    """A parameter of a stage; holds no reference to it, its gradient or its state."""

    place: int  # among the parameters of the scope
    shape: torch.Size  # of its view, and of its b
    blocks: torch.Size
    u: Tensor


def _matrix(step: Step, place: int) -> _Matrix:
    dtype = torch.promote_types(step.p.dtype, torch.float32)
    u = torch.empty_like(step.param, dtype=dtype, requires_grad=False)
    return _Matrix(place, step.p.shape, step.b.shape, u)


class Matrices:
    """Some parameters, of which a stage is made by `Direction.propose`, as in the plain step."""

    def __init__(self, units: list[Unit], scope: Scope) -> None:
        order = {id(p): i for i, p in enumerate(scope.params)}
        self.u: list[Tensor] = []
        self._momentum = cast(str, momentum_setting(scope.optimizer))
        self._alike: dict[tuple[int, Orthogonalized, torch.dtype], list[_Matrix]] = {}
        for unit in units:
            step = unit[0]
            kind = step.group, cast(Orthogonalized, step.direction), step.p.dtype
            self._alike.setdefault(kind, []).append(_matrix(step, order[id(step.param)]))
            self.u.append(self._alike[kind][-1].u)

    @torch.no_grad()
    def run(
        self, scope: Scope, words: list[int], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        if found_inf is not None and bool(found_inf):
            return
        for (group, direction, _), matrices in self._alike.items():
            if not words[group * _WORDS + _LAM]:  # 0 is 0 as a word, too
                continue
            settings, lam = scope.settings[group], scope.groups[group]["lr"]
            mu = getattr(settings, self._momentum)  # a number that launches read anew
            if mu != direction.mu:
                direction = replace(direction, mu=mu)
            steps = []
            for matrix in matrices:
                p = scope.params[matrix.place]
                kept = scope.optimizer.state[p]
                facts = (False, scale, False, False, False)  # not held, traced or sharded
                step = Step(p, group, settings, lam, direction, {}, *facts)
                step.p, step.g, step.shape = p, cast(Tensor, p.grad), p.shape
                step.b, step.t, step.buffers = kept["b"], kept["t"], {"m": kept["m"]}
                steps.append(step)
            batch = Batch(steps)
            u = direction.propose(batch)
            lists.copy_([matrix.u for matrix in matrices], u)
            m, new = [step.buffers["m"] for step in steps], batch.new["m"]
            if settings.nonfinite == "skip":
                triples = zip(matrices, steps, new, strict=True)
                new = [torch.where(_taken(a, s.b), x, s.buffers["m"]) for a, s, x in triples]
            lists.copy_(m, new)


def _taken(matrix: _Matrix, b: Tensor) -> Tensor:
    """The blocks that take the step, not being skipped, as a mask of the parameter's shape."""
    dims = [i for i, n in enumerate(matrix.blocks) if n == 1]
    u = matrix.u.view(matrix.shape)
    total = u.sum(dims, keepdim=True) if dims else u
    finite = torch.isfinite(total + b.view(matrix.blocks))
    return finite.expand(matrix.shape).reshape(matrix.u.shape)
