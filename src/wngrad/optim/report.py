"""What an optimizer says of itself: its rates, its skips, a diagnosis, a warning of a small λ.

b never decreases, and b² grows by at least 2‖u‖² in every step, where u is what the rule measures
(λg for WNGrad and WNAdam). From b and t alone it can be told how large gradients have been over the
whole run, and not when: a block whose gradients have stopped looks like one whose were small.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from wngrad.optim import checks, lists, sharded
from wngrad.optim.directions import Direction, Momentum, RunningMean
from wngrad.optim.settings import Group
from wngrad.optim.state import NORM, holds, shares


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured, in which nothing may wait for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


# ------------------------------------------------------------------------------- rates and skips


class RateSummary(NamedTuple):
    """The spread of the effective rates λ/b within one group."""

    min: Tensor
    median: Tensor
    max: Tensor

    def floats(self) -> tuple[float, float, float]:
        """The three numbers. Waits for the device."""
        return self.min.item(), self.median.item(), self.max.item()


def stepped(opt: Optimizer, group: Group) -> list[Tensor]:
    """The parameters of a group that have stepped."""
    return [p for p in group["params"] if "b" in opt.state.get(p, {})]


def rates(opt: Optimizer) -> dict[Tensor, Tensor]:
    """λ/b of every parameter that has stepped."""
    groups = opt.param_groups
    return {p: _rate(group, opt.state[p]) for group in groups for p in stepped(opt, group)}


def summarize(opt: Optimizer) -> list[RateSummary]:
    """The spread of λ/b in each group; NaN where none is known."""
    return [_spread(_group_rates(opt, group)) for group in opt.param_groups]


def median_without_lr(opt: Optimizer, group: Group) -> Tensor:
    """The median of a group's rates at λ = 1; NaN where none is known."""
    return _spread(_group_rates(opt, {**group, "lr": 1.0}).float()).median


def spreads(opt: Optimizer, params: list[Tensor]) -> Tensor:
    """Of each parameter: smallest, median and largest rate, then those of b; NaN if unknown.

    One tensor of shape (parameters, 6); nothing waits for a device. Of sharded parameters, this
    rank's.
    """
    known, rows = rates(opt), []
    for p in params:
        rate = b = torch.empty(0)
        if p in known:
            rate, b = (sharded.local(x).detach().flatten() for x in (known[p], opt.state[p]["b"]))
        row = [*_spread(rate), *_spread(torch.where(b == 0, torch.nan, b))]
        rows.append(torch.stack(row).float())
    return lists.stacked(rows)


def skip_count(opt: Optimizer, group: Group) -> Tensor | None:
    """How many blocks of a group were skipped, on the device; None where skips are not counted.

    What shares its blocks counts once: as often as the parameter that was skipped most often.
    """
    most: dict[int | None, Tensor] = {}  # by parameter; None for all that share their blocks
    for p in group["params"]:
        if "skipped" in (state := opt.state.get(p, {})):
            key = None if shares(group) and not holds(group, p) else id(p)
            count = sharded.local(state["skipped"]).sum()
            most[key] = torch.maximum(most.get(key, count).to(count.device), count)
    return lists.stacked(list(most.values())).sum() if most else None


def skipped(opt: Optimizer) -> int:
    """How many blocks were skipped. Waits for the device."""
    counts = (skip_count(opt, group) for group in opt.param_groups)
    return sum(int(count) for count in counts if count is not None)


def _rate(group: Group, state: dict[str, Tensor]) -> Tensor:
    """λ/b, in the shape of b; NaN where no gradient has set a b yet."""
    lam = group["lr"].reshape(()) if isinstance(group["lr"], Tensor) else group["lr"]
    if group.get("finetune") and NORM in state:
        lam = lam * state[NORM]
    return lam / torch.where(state["b"] == 0, torch.nan, state["b"])


def _group_rates(opt: Optimizer, group: Group) -> Tensor:
    """λ/b of a group's blocks on this rank, in one dimension."""
    local = [sharded.local(_rate(group, opt.state[p])).flatten() for p in stepped(opt, group)]
    return torch.cat([rate.to(local[0].device) for rate in local]) if local else torch.empty(0)


def _spread(values: Tensor) -> RateSummary:
    values = values if values.numel() else values.new_full((1,), torch.nan)
    low, high = values.nan_to_num(torch.inf).amin(), values.nan_to_num(-torch.inf).amax()
    nan = torch.where(values.isnan().all(), torch.nan, 0.0)
    return RateSummary(low + nan, values.nanmedian(), high + nan)


# ------------------------------------------------------------------------------------- diagnosis

_TOO_FAST = 100.0  # b whose median grew so many times more than explained started too low
_RUNAWAY = 10.0  # a block that grew so many times more than explained, and than the median
_STILL, _PATIENCE = 1e-3, 10  # b that moved by less in so many steps leaves plain SGD


class Finding(NamedTuple):
    """One clause of a diagnosis."""

    clause: str
    usual: bool = False  # as in a run in which nothing looks wrong


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The blocks of a group whose b moves, on this rank: an entry a block, on the host."""

    b: Tensor
    steps: Tensor  # that the block's parameter has taken
    unmoved: Tensor  # whether b is b₁, to the last bit, and not because of a skip
    parameter: Tensor  # an index of `labels`
    labels: list[str]
    b1: float  # NaN where the first gradient sets it

    @property
    def growth(self) -> Tensor:
        return self.b / self.b1

    def count(self, mask: Tensor) -> str:
        return f"{int(mask.sum())} of {mask.numel()}"

    def where(self, mask: Tensor) -> str:
        """The parameter that has most of these blocks, in parentheses."""
        which = self.parameter[mask]
        i = int(which.bincount().argmax())
        most = "" if (which == i).all() else "most of them "
        count, size = int((which == i).sum()), int((self.parameter == i).sum())
        return f" ({most}in {self.labels[i]}: {count} of its {size})"


def diagnose(
    opt: Optimizer, losses: Iterable[float | Tensor] | None, *, usual: bool = True
) -> list[str]:
    """A line for the losses, if there are any, and one for each group. Waits for the device.

    Args:
        usual: tell also what is as it should be; else only lines with something wrong are left.
    """
    parts: list[tuple[str, Iterator[Finding]]] = []
    if losses is not None:
        params = opt.param_groups[-1]["params"]
        rows = params[-1].shape[0] if params and params[-1].dim() else 0
        parts.append(("loss", _loss_findings(floats(type(opt).__name__, losses), rows)))
    for i, group in enumerate(opt.param_groups):
        name = f" ({group['name']})" if "name" in group else ""
        parts.append((f"group {i}{name}", _group_findings(opt, group)))
    said = [(title, [x.clause for x in found if usual or not x.usual]) for title, found in parts]
    return [f"{title}: {'; '.join(clauses)}." for title, clauses in said if clauses]


def _group_findings(opt: Optimizer, group: Group) -> Iterator[Finding]:
    blocks = _moving_blocks(opt, group)
    b, bad, unset = blocks.b, ~blocks.b.isfinite(), blocks.b == 0
    if not blocks.steps.any():
        all_held = not b.numel() and stepped(opt, group)
        yield Finding("no b that moves" if all_held else "no step taken yet", usual=True)
        return
    if bad.any():
        yield Finding(f"{blocks.count(bad)} blocks are NaN: a gradient was not finite")
    if unset.any():
        count, where = blocks.count(unset), blocks.where(unset)
        yield Finding(f"{count} blocks have seen no gradient yet{where}")
    if (skips := skip_count(opt, group)) is not None and skips > 0:
        yield Finding(f"{skips} blocks with gradients that were not finite have been skipped")
    b = b[~bad & ~unset]
    if b.numel() and math.isnan(blocks.b1):
        ends = f"between {b.min():.3g} and {b.max():.3g}"
        yield Finding(f"b lies {ends} after {blocks.steps.max():.0f} steps", usual=True)
    elif b.numel():
        lams = [float(group[name]) for name in ("lr", "initial_lr") if name in group]
        yield from _growth_findings(blocks, max(1.0, *lams))


def _growth_findings(blocks: _Blocks, lam: float) -> Iterator[Finding]:
    """How far b has come, and what directions of norm λ (at least 1) do not explain of it."""
    steps, growth = int(blocks.steps.max()), blocks.growth
    finite = growth[growth.isfinite() & (growth > 0)]
    middle, barely = finite.median().item(), int((finite < 1 + _STILL).sum())
    if steps >= _PATIENCE and barely == finite.numel():
        yield Finding(
            f"b has not moved in {steps} steps: λ is so small that this is plain SGD, or the "
            f"gradients are next to zero"
        )
        return
    unit = lam / blocks.b1
    explained = torch.hypot(torch.ones(()), unit * (2 * blocks.steps).sqrt())  # √(b₁² + 2tλ²)/b₁
    if middle > _TOO_FAST * explained.max():
        power = str(round(math.log10(middle))).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
        yield Finding(
            f"b has grown 10{power}-fold in {steps} steps: the first steps were too large (start "
            f"from a larger b_init or a smaller lr)"
        )
    else:
        yield Finding(f"b has grown {middle:.3g}-fold in {steps} steps", usual=True)
    runaway = growth.isfinite() & (growth > _RUNAWAY * explained.clamp(min=middle))
    if runaway.any():
        i = torch.where(runaway, growth, 0).argmax()
        yield Finding(
            f"the median hides {blocks.count(runaway)} blocks whose b has grown far more, up to "
            f"{growth[i]:.3g}-fold where directions of norm 1 explain {explained[i]:.3g}-fold"
            f"{blocks.where(runaway)}: large gradients have lowered their rates for good (clip "
            f"gradients, scale the inputs, or start from a larger b_init or a smaller lr)"
        )
    unmoved = blocks.unmoved & (blocks.steps >= _PATIENCE)
    if unmoved.any():
        yield Finding(
            f"b of {blocks.count(unmoved)} blocks has not moved in "
            f"{blocks.steps[unmoved].min():.0f} steps{blocks.where(unmoved)}: each gradient was "
            f"zero or too small for b's precision (dead ReLUs want a smaller lr or another "
            f"activation; unused rows and biases before a normalization do no harm)"
        )
    if steps >= _PATIENCE and 2 * barely > finite.numel():
        yield Finding(
            f"b of {barely} of {finite.numel()} blocks has grown by less than {_STILL:.1%}: hardly "
            f"any gradient reaches them (add normalization layers or change the initialization), "
            f"or λ is so small that this is plain SGD"
        )


def _moving_blocks(opt: Optimizer, group: Group) -> _Blocks:
    """The blocks of a group whose b moves; where parameters share theirs, those of one."""
    b1 = math.nan if isinstance(group["b_init"], (str, tuple)) else float(group["b_init"])
    labels: list[str] = []
    columns = [torch.empty(4, 0, dtype=torch.float64)]
    for i, p in enumerate(group["params"]):
        state = opt.state.get(p, {})
        if "b" not in state or holds(group, p) or not sharded.local(state["b"]).numel():
            continue
        b, t, skips = (
            sharded.local(state.get(key, torch.zeros(1))).detach().flatten().cpu()
            for key in ("b", "t", "skipped")
        )
        unmoved = (b == torch.tensor(b1, dtype=b.dtype)) & (skips == 0)
        rows = (b, t.max().expand(b.shape), unmoved, torch.full(b.shape, len(labels)))
        columns.append(torch.stack([row.double() for row in rows]))
        names = group.get("param_names")
        labels.append(f"`{names[i]}`" if names else f"parameter {i} of shape {tuple(p.shape)}")
    if labels and shares(group):
        # b never decreases: of those that share it, the largest is the latest.
        latest = max(columns[1:], key=lambda column: float(column[0].sum()))
        latest[1] = torch.cat(columns, 1)[1].max()
        columns = [latest]
    b, steps, unmoved, parameter = torch.cat(columns, 1)
    return _Blocks(b, steps, unmoved.bool(), parameter.long(), labels, b1)


# ---------------------------------------------------------------------------------------- losses

_FEWEST = 20  # losses from which a trend is read
_SURE = 3.0  # standard errors by which two medians differ for certain
_NEAR_ZERO = 0.2  # spread over level: minibatches of a loss close to zero differ by factors
_ZERO = 1e-3  # a loss that is next to zero even without any spread
_GUESS = 0.98, 1.1  # a network that guesses is at ln K, or above it if its steps are noisy
_SIGMA = 1.4826  # standard deviations in a median distance, whatever the outliers


def floats(owner: str, losses: Iterable[float | Tensor]) -> list[float]:
    """The losses as floats. Waits for the device."""
    values = list(losses)
    for x in values:
        if isinstance(x, Tensor) and (x.numel() != 1 or x.is_complex()):
            raise ValueError(
                f"{owner}: `losses` must hold real numbers or tensors of one, got a tensor of "
                f"shape {tuple(x.shape)} and dtype {x.dtype}."
            )
    return [checks.real(owner, "losses", checks.item(x)) for x in values]


def _loss_findings(losses: list[float], classes: int) -> Iterator[Finding]:
    """Whether losses fall, by medians of quarters; the last parameter may have a row a class."""
    finite = [x for x in losses if math.isfinite(x)]
    if bad := len(losses) - len(finite):
        at = next(i for i, x in enumerate(losses) if not math.isfinite(x))
        yield Finding(
            f'{bad} of {len(losses)} are not finite, the first at index {at} (nonfinite="raise" '
            f"names the parameter)"
        )
    if len(finite) < _FEWEST:
        clause = f"too few to judge: {len(finite)} finite ones of at least {_FEWEST}"
        yield Finding(clause, usual=True)
        return
    k = len(finite) // 4
    early, late = torch.tensor([finite[:k], finite[-k:]], dtype=torch.float64)
    start, end = early.quantile(0.5), late.quantile(0.5)
    spread = _SIGMA * torch.cat([early - start, late - end]).abs().quantile(0.5)
    certain = _SURE * spread * math.sqrt(math.pi / k)  # medians of k normal numbers have √(π/2k)·σ
    medians = (
        f"(median {start:.4g} in the first quarter of {len(finite)} losses, {end:.4g} in the last, "
        f"spread {spread:.2g})"
    )
    if start - end > max(certain, spread):
        yield Finding(f"falls {medians}", usual=True)
        return
    verb = "hardly falls" if start - end > certain else "does not fall"
    verb = "rises" if end - start > max(certain, spread) else verb
    # What this may mean: a fact is called a fact, a guess a guess.
    restart = "start again with a smaller lr or less momentum, or with normalization layers"
    context = f"either this is as low as it gets, or the run is stuck (then {restart})"
    noisy = _SIGMA * (late - end).abs().quantile(0.5) >= _NEAR_ZERO * end
    converged = bool((late.min() >= 0) & ((end <= _ZERO) | noisy))
    if converged:
        context = "it lies close to zero, as the loss of a run that has converged does"
    elif classes > 1 and _GUESS[0] <= end / math.log(classes) <= _GUESS[1]:
        context = (
            f"the last parameter has {classes} rows, and ln {classes} = {math.log(classes):.4g} is "
            f"the loss of guessing among {classes} classes; if that is what they are, nothing has "
            f"been learned ({restart})"
        )
    yield Finding(f"{verb} {medians}: {context}", usual=converged)


# ------------------------------------------------------------------------- a warning, given once

WARN_AFTER = 100  # steps: b has grown where λ lets it, and one wait for a device is no cost
_SMALL = 1e-2  # of λ = 1, at which b₁ is the only limit of the first step
_SMALL_SUMMED = 2e-3  # with momentum, which is started from 0.01 to 0.1
_GROWN = 1.1  # b that has grown less than this many times does not limit the rate
_SHORT = 1e-3  # of λ where the rule does not see it: steps 300 times shorter than the default's


class SmallRateWarning(UserWarning):
    """λ is so small that WNGrad is plain gradient descent at that rate, or WNMuon stands still."""


def warn_of_small_rate(opt: Any) -> None:
    """Warns if λ is too small after `WARN_AFTER` steps, as the rates that trainers hand over are.

    A sentence is said only of directions it is true of: steps along a sign descend no gradient.
    """
    if is_capturing():
        return  # It must not wait.
    lr = inspect.signature(type(opt).__init__).parameters.get("lr")
    default = getattr(lr, "default", None)
    for group in opt.param_groups:
        lams = [group.get(name) for name in ("lr", "initial_lr", "max_lr")]
        lam = max(float(lam) for lam in lams if lam is not None)  # now, or as scheduled at most
        larger = isinstance(default, (int, float)) and default > lam
        start = f"lr={default}, the default" if larger else "a larger one"
        directions = {type(opt.direction(group, p)) for p in group["params"]}
        if not directions or lam <= 0:
            continue
        if not any(direction.rate_in_rule for direction in directions):
            small = lam <= _SHORT
            hint = (
                f"hardly anything has moved. `lr` is the length of a step in units of a neuron, "
                f"not a learning rate as Adam's: use {start.removeprefix('lr=')}"
            )
        else:
            summed = Momentum in directions
            start = "lr=0.03, as momentum asks for" if summed else start
            small = directions <= {Direction, Momentum, RunningMean}
            small = small and lam <= (_SMALL_SUMMED if summed else _SMALL)
            small = small and bool(_moving_blocks(opt, group).growth.nanmedian() < _GROWN)
            hint = (
                f"b has hardly grown, so that this is plain gradient descent at that rate. b "
                f"lowers the rate by itself: start from {start}"
            )
        if small:
            warnings.warn(
                f"{type(opt).__name__}: in {WARN_AFTER} steps at `lr` = {lam:g} {hint}, whatever "
                f"your trainer's is.",
                SmallRateWarning,
                stacklevel=7,  # the line that called `step`
            )
            return
