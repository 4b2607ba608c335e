"""Orthogonalized directions in a fused step: u of every matrix, before the kernels take the rows.

The kernels step rows by a tensor u in the gradient's place (`Method.proposed`), as if it were the
gradient. A *stage* makes it: for some parameters, once a step, from their gradients and their
momentum `m`, which it brings up to date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from wngrad.optim import lists
from wngrad.optim.collect import Step, Unit
from wngrad.optim.directions import Orthogonalized
from wngrad.optim.fused import matrices_cuda
from wngrad.optim.fused.records import GROUP, number
from wngrad.optim.modules import Layout
from wngrad.optim.orthogonal import orthogonalize
from wngrad.optim.step import working

_NAMES = GROUP.names or ()
_WORDS, (_LAM, _MU, _SIGN) = len(_NAMES), map(_NAMES.index, ("lam", "mu", "sign"))


class Stage(Protocol):
    """Makes u of some parameters, all on one device.

    A step without rate (λ = 0, or an inf that a `GradScaler` has found) leaves m as it is, and u is
    not read. Under `nonfinite="skip"` a block whose u is NaN keeps its m; its rows are left to the
    kernels, which skip and count what is NaN.
    """

    units: list[Unit]
    u: list[Tensor]  # of each unit, in its parameter's shape and order in memory

    def run(
        self,
        optimizer: Any,
        params: list[Tensor],
        words: list[int],
        scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """Bring m up to date, and fill u.

        Args:
            optimizer: whose `state` holds m.
            params: all its parameters, in the order that the stage was made with.
            words: those of the step's snapshot; the first are `records.GROUP` of every group.
        """


def stages(units: list[Unit], params: list[Tensor], words: list[int]) -> list[Stage]:
    """The stages of the units that need one: each is run, and its u used, before the next.

    Args:
        words: those of the step's snapshot: numbers of groups, then addresses of gradients.
    """
    by_kind: dict[tuple[Any, ...], list[Unit]] = {}
    for unit in units:
        view = unit[0]
        if isinstance(view.direction, Orthogonalized):
            kind = (view.p.device, view.p.dtype, view.settings.nonfinite == "skip")
            key = kind if uses_kernels(view.p) else (view.p.device,)
            by_kind.setdefault(key, []).append(unit)
    made: list[Stage] = []
    for key, part in by_kind.items():
        made += [TorchStage(part, params)] if len(key) == 1 else _by_kernels(part, params, words)
    return made


def uses_kernels(p: Tensor) -> bool:
    """Whether a stage is made of Triton's kernels."""
    return p.is_cuda


def _by_kernels(units: list[Unit], params: list[Tensor], words: list[int]) -> list[Stage]:
    stepping = {id(p): i for i, p in enumerate(p for p in params if p.grad is not None)}
    head = len(words) - len(stepping)
    start, sources = units[0][0], []
    for i, unit in enumerate(units):
        view = unit[0]
        direction = cast(Orthogonalized, view.direction)
        g, m = view.param.grad, view.buffers["m"].view(view.param.shape)
        facts, apart = (direction.layout, i, view.group), direction.rows_apart
        sources.append(matrices_cuda.Source.of(cast(Tensor, g), m, *facts, hides_rows=apart))
    index = [*range(head), *(head + stepping[id(unit[0].param)] for unit in units)]
    table = matrices_cuda.Words(words, index, head, start.p.device)
    skip = start.settings.nonfinite == "skip"
    return [KernelStage(each, units) for each in matrices_cuda.stages(sources, skip, table)]


class KernelStage:
    """A stage of Triton's kernels, with u in float16."""

    def __init__(self, stage: matrices_cuda.Stage, units: list[Unit]) -> None:
        self.units = [units[source.gradient] for source in stage.sources]
        self.u, self._stage = stage.u, stage

    def run(
        self,
        optimizer: Any,
        params: list[Tensor],
        words: list[int],
        scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        self._stage.run(words, scale, found_inf)


def proposed(unit: Unit, u: Tensor) -> Unit:
    """The same unit, with u in the gradient's place."""
    (view,) = unit
    return [replace(view, g=u.view(view.p.shape))]


def has_views(view: Step) -> bool:
    """Whether the matrices of an orthogonalized parameter lie in its memory as a stage needs it."""
    p, layout = view.param, cast(Orthogonalized, view.direction).layout
    if uses_kernels(p):
        m = view.buffers["m"].view(p.shape)
        return matrices_cuda.fits(p, cast(Tensor, p.grad), m, layout)
    return not p.numel() or layout.matrices(p.detach()).data_ptr() == p.data_ptr()


class _Matrix(NamedTuple):
    """A parameter of a stage; nothing that would keep it, its gradient or its state alive."""

    place: int  # among the parameters of the optimizer
    layout: Layout
    single: bool  # it is one matrix as it is
    scale: float
    rows_apart: bool  # an embedding: rows without a gradient do not move
    skips: bool  # nonfinite="skip"
    shape: torch.Size  # of the view, and of its b
    blocks: torch.Size
    u: Tensor


def _matrix(unit: Unit, place: int) -> _Matrix:
    view = unit[0]
    p, direction = view.param, cast(Orthogonalized, view.direction)
    apart, skips = direction.rows_apart, view.settings.nonfinite == "skip"
    dtype = torch.promote_types(p.dtype, torch.float32)
    u = torch.empty_like(p, dtype=dtype, requires_grad=False)
    scale = direction.layout.scale(p.shape)
    single = (1, *p.shape) == direction.layout.sizes(p.shape) and direction.layout.kind == "rows"
    shapes = view.p.shape, view.b.shape
    return _Matrix(place, direction.layout, single, scale, apart, skips, *shapes, u)


class TorchStage:
    """A stage of torch's own operations, the same as `Orthogonalized.propose`, bit for bit."""

    def __init__(self, units: list[Unit], params: list[Tensor]) -> None:
        order = {id(p): i for i, p in enumerate(params)}
        each = [_matrix(unit, order[id(unit[0].param)]) for unit in units]
        self.units, self.u = units, [matrix.u for matrix in each]
        self._groups: dict[tuple[int, torch.dtype], list[_Matrix]] = {}
        for unit, matrix in zip(units, each, strict=True):
            self._groups.setdefault((unit[0].group, unit[0].p.dtype), []).append(matrix)

    @torch.no_grad()
    def run(
        self,
        optimizer: Any,
        params: list[Tensor],
        words: list[int],
        scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        if found_inf is not None and bool(found_inf):
            return
        for (group, _), matrices in self._groups.items():
            own = words[group * _WORDS : (group + 1) * _WORDS]
            lam, mu, sign = (number(own[i]) for i in (_LAM, _MU, _SIGN))
            if lam != 0:
                grads = [cast(Tensor, params[matrix.place].grad) for matrix in matrices]
                g = _gradients(grads, sign, scale)
                states = [optimizer.state[params[matrix.place]] for matrix in matrices]
                _propose(matrices, g, states, mu)


def _gradients(grads: list[Tensor], sign: float, scale: Tensor | None) -> list[Tensor]:
    """The gradients that the rule sees: unscaled, and of −f if maximizing."""
    g = [working(each) for each in grads]
    if scale is not None:
        divisor = scale.to(g[0].device).reshape(())
        g = [each / divisor for each in g]
    return [-each for each in g] if sign < 0 else g


def _propose(
    matrices: Sequence[_Matrix], g: list[Tensor], states: list[dict[str, Tensor]], mu: float
) -> None:
    """m ← μ·m + (1−μ)·g,  u = orthogonalize(μ·m + (1−μ)·g)·max(1, √(out/in))."""
    kept = [its["m"] for its in states]
    in_place = not matrices[0].skips and kept[0].dtype == g[0].dtype
    if in_place:
        m = kept
        lists.lerp_(m, g, 1 - mu)
    else:
        m = lists.lerp([working(each) for each in kept], g, 1 - mu)
    for matrix, each, ahead in zip(matrices, g, lists.lerp(g, m, mu), strict=True):
        if matrix.single:
            result = orthogonalize(ahead)
        else:
            stack = orthogonalize(matrix.layout.matrices(ahead))
            result = matrix.layout.restore(stack, matrix.u)
        torch.mul(result, matrix.scale, out=matrix.u)
        if matrix.rows_apart:
            matrix.u.mul_((each != 0).flatten(1).any(1).view(-1, *[1] * (each.dim() - 1)))
    if not in_place:
        for matrix, old, new, its in zip(matrices, kept, m, states, strict=True):
            old.copy_(torch.where(_taken(matrix, its["b"]), new, old) if matrix.skips else new)


def _taken(matrix: _Matrix, b: Tensor) -> Tensor:
    """The blocks that take the step, not being skipped, as a mask of the parameter's shape."""
    dims = [i for i, n in enumerate(matrix.blocks) if n == 1]
    u = matrix.u.view(matrix.shape)
    total = u.sum(dims, keepdim=True) if dims else u
    finite = torch.isfinite(total + b.view(matrix.blocks))
    return finite.expand(matrix.shape).reshape(matrix.u.shape)
