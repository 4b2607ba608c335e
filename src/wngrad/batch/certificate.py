"""Certificates: the paper's inequalities on a finished run, with both sides' numbers.

A certificate never says "converged". It lists its claims, what it verified, what it took on trust,
and what it therefore cannot claim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wngrad.batch import bounds, lemmas
from wngrad.batch.arrays import ROUNDING_UNITS, epsilon, kind_of, norm
from wngrad.batch.iterates import UPDATES
from wngrad.batch.result import Status

if TYPE_CHECKING:
    from wngrad.batch.result import Result
    from wngrad.batch.stochastic import StochasticResult


@dataclass(frozen=True, slots=True)
class Claim:
    """One inequality of the paper, measured on a run: `lhs <= rhs`."""

    name: str  # "Theorem 2.3, case 1: points until ‖∇f‖² ≤ ε"
    lhs: float
    rhs: float
    given: tuple[str, ...] = ()  # what it takes on trust: ("lipschitz=4.0", "f_star=0.0")
    rounding: float = 0.0  # what floating point may have lost between the sides

    @property
    def holds(self) -> bool:
        return self.lhs <= self.rhs + self.rounding

    def __str__(self) -> str:
        sign = "≤" if self.holds else ">"
        trust = f"   given {', '.join(self.given)}" if self.given else ""
        slack = f" + {self.rounding:.2g} (rounding)" if self.rhs < self.lhs and self.holds else ""
        return f"{self.name}: {self.lhs:.6g} {sign} {self.rhs:.6g}{slack}{trust}"


@dataclass(frozen=True, slots=True)
class Certificate:
    """What can be said of a run, and what not."""

    claims: tuple[Claim, ...]
    verified: tuple[str, ...]  # hypotheses checked on the run itself
    assumed: tuple[str, ...]  # hypotheses taken on trust
    refuted: tuple[str, ...]  # hypotheses the run contradicts
    not_claimed: tuple[str, ...]  # what cannot be said, and why
    lipschitz_seen: float  # the largest slope of ∇f on the run, less its rounding: L is no less

    @property
    def holds(self) -> bool:
        """Every claim holds, and the run contradicts no hypothesis."""
        return not self.refuted and all(claim.holds for claim in self.claims)

    def __str__(self) -> str:
        parts = {
            "claims": map(str, self.claims),
            "verified on the run": self.verified,
            "taken on trust": self.assumed,
            "contradicted by the run": self.refuted,
            "not claimed": self.not_claimed,
        }
        lines = ["\n  ".join([title, *rows]) for title, part in parts.items() if (rows := [*part])]
        if math.isfinite(self.lipschitz_seen):
            lines.append(
                f"largest slope of ∇f seen, less rounding: {self.lipschitz_seen:.6g} "
                f"(L is at least that)"
            )
        return "\n".join(lines)


class Draft:
    """A certificate in the making."""

    def __init__(self, rounding: float) -> None:
        self.rounding, self.lipschitz_seen = rounding, math.nan
        self.claims: list[Claim] = []
        self.verified: list[str] = []
        self.assumed: list[str] = []
        self.refuted: list[str] = []
        self.not_claimed: list[str] = []

    def claim(
        self, name: str, lhs: float, rhs: float, given: tuple[str, ...] = (), rounding: float = 0.0
    ) -> None:
        self.claims.append(Claim(name, lhs, rhs, given, rounding))

    def check(self, text: str, true: bool) -> bool:
        (self.verified if true else self.refuted).append(text)
        return true

    def finish(self, *not_claimed: str) -> Certificate:
        return Certificate(
            claims=tuple(self.claims),
            verified=tuple(self.verified),
            assumed=tuple(self.assumed),
            refuted=tuple(self.refuted),
            not_claimed=(*self.not_claimed, *not_claimed),
            lipschitz_seen=self.lipschitz_seen,
        )


# ---------------------------------------------------------------- runs of `minimize`


def certify(
    run: Result,
    *,
    lipschitz: float | None = None,
    f_star: float | None = None,
    rounding: float | None = None,
) -> Certificate:
    """The paper's inequalities on a run of `minimize`; see `Result.certify`."""
    _check_finite(lipschitz=lipschitz, f_star=f_star)
    if lipschitz is not None and not lipschitz > 0:
        raise ValueError(f"certify: `lipschitz` must be > 0, got {lipschitz!r}.")
    if rounding is not None and not 0 <= rounding < math.inf:
        raise ValueError(f"certify: `rounding` must be >= 0 and finite, got {rounding!r}.")
    draft = Draft(ROUNDING_UNITS * run.eps if rounding is None else rounding)
    draft.assumed.append("f and ∇f are what the run says they are at its points")
    if not _holds_numbers(run):
        draft.refuted.append("every b is > 0, every ‖∇f‖² >= 0, and every number finite")
        return draft.finish(
            "anything else: the run holds a number that is not finite or has the wrong sign"
        )
    _agreement(draft, run)
    if run.method == "adagrad-norm":
        return draft.finish("the paper has no bound for AdaGrad-Norm")
    if lipschitz is None or f_star is None:
        unknown = {"lipschitz": lipschitz, "f_star": f_star}
        missing = " and ".join(name for name, value in unknown.items() if value is None)
        return draft.finish(f"Lemmas 2.1 to 2.6 and Theorem 2.3: {missing} not given")
    known = lemmas.Known(float(lipschitz), float(f_star))
    lemmas.hypotheses(draft, run, known)
    lemmas.rate(draft, run, known)
    if run.method == "wngrad":
        lemmas.lemmas_2_4_to_2_6(draft, run, known)
    lemmas.descent_lemma(draft, run, known)
    return draft.finish()


def _holds_numbers(run: Result) -> bool:
    """Whether every number of a run is one: a NaN is in no order, and hides behind a maximum."""
    trace = run.trace
    unevaluated = trace is None and run.status in (Status.RAISED, Status.NOT_FINITE)
    values = [run.start.fun] if unevaluated else [run.start.fun, run.fun]
    b, squares = [run.b, run.start.b], [run.sq_norm, run.start.sq_norm, run.best]
    if trace is None:
        slopes_known = True
    else:
        values, b = [*values, *trace.fun], [*b, *trace.b]
        squares += [*trace.sq_norm, *trace.x_norm]
        # A slope is missing only where x, and so its gradient, has not changed.
        missing = np.flatnonzero(np.isnan(trace.slope[1:]) | np.isnan(trace.slope_condition[1:]))
        slopes_known = bool((trace.sq_norm[missing + 1] == trace.sq_norm[missing]).all())
    finite = np.isfinite([*values, *b, *squares]).all()
    return bool(finite and min(b) > 0 and min(squares) >= 0) and slopes_known


def _agreement(draft: Draft, run: Result) -> None:
    """Does the result agree with itself? A doctored one does not."""
    t = run.trace
    apart = [
        _apart(run.sq_norm, kind_of(run.jac).sq_norm(run.jac)),
        max(0.0, run.best - run.sq_norm),
    ]
    if t is not None:
        ours = [run.b, run.start.b, run.sq_norm, run.start.sq_norm, run.best]
        ours += [run.start.fun, run.fun, run.nit + 1, norm(kind_of(run.x), run.x)]
        traced = [t.b[-1], t.b[0], t.sq_norm[-1], t.sq_norm[0], t.sq_norm.min()]
        traced += [t.fun[0], t.fun[-1], len(t), t.x_norm[-1]]
        apart += [_apart(float(x), float(y)) for x, y in zip(ours, traced, strict=True)]
    draft.claim("the parts of the result agree", max(apart), 1e-12)
    if run.success:
        draft.claim("‖∇f(x)‖² ≤ ε at the end", run.sq_norm, run.tol)
    if t is None:
        return
    # Was b what the method says?
    update = UPDATES[run.method]
    expected = np.array([update(b, sq, 0) for b, sq in zip(t.b, t.sq_norm[1:], strict=False)])
    off = float(np.max(np.abs(t.b[1:] - expected) / np.abs(expected), initial=0.0))
    name = "Algorithm 1: error of b_j = b_{j-1} + ‖∇f(x_j)‖²/b_{j-1}"
    draft.claim(name if run.method == "wngrad" else f"{run.method}: error of b", off, 1e-12)
    # The largest slope that rounding does not explain, and how many it could explain whole.
    rounding = draft.rounding * t.slope_condition
    draft.lipschitz_seen = float(np.nanmax(t.slope - rounding, initial=-math.inf))
    if blurred := int((rounding >= t.slope).sum()):
        draft.not_claimed.append(
            f"the slope of ∇f at {blurred} of {len(t) - 1} steps: too short for it, their "
            f"slopes are known to within {float(np.nanmax(rounding)):.2g}"
        )


def _apart(x: float, y: float) -> float:
    if not (math.isfinite(x) and math.isfinite(y)):
        return math.inf
    return 0.0 if x == y else abs(x - y) / max(abs(x), abs(y))


def _check_finite(**known: float | None) -> None:
    for name, value in known.items():
        if value is not None and not math.isfinite(value):
            raise ValueError(f"certify: `{name}` must be finite, got {value!r}.")


# ---------------------------------------------------------------- runs of `minimize_stochastic`


def certify_stochastic(
    run: StochasticResult,
    *,
    f_star: float | None = None,
    diameter: float | None = None,
    distance: float | None = None,
    grad_bound: float | None = None,
    grad_floor: float | None = None,
) -> Certificate:
    """Section 3's inequalities on a run; see `StochasticResult.certify`."""
    known = {"diameter": diameter, "distance": distance}
    known |= {"grad_bound": grad_bound, "grad_floor": grad_floor}
    _check_finite(f_star=f_star, **known)
    for name, value in known.items():
        if value is not None and value < 0:
            raise ValueError(f"certify: `{name}` must be >= 0, got {value!r}.")
    draft = Draft(ROUNDING_UNITS * epsilon(run.x))
    if run.method != "wngrad":
        return draft.finish("Theorem 3.1 is about WNGrad")
    if not np.isfinite((run.b, run.b_first, run.grad_first, run.grad_min, run.grad_max)).all():
        draft.refuted.append("b and every ‖g_k‖ are finite")
        return draft.finish()
    if f_star is not None and run.fun is not None and run.fun_mean is not None:
        slack = draft.rounding * max(abs(f_star), abs(run.fun), abs(run.fun_mean))
        lowest = float(np.min([run.fun, run.fun_mean]))
        text = f"neither f(x_k) nor f(x̄_k) lies below f* = {f_star:g} (lowest {lowest:.6g})"
        draft.check(text, lowest >= f_star - slack)
    grace = 1 + draft.rounding  # for the caller's arithmetic
    near = diameter is None or distance is None or draft.check(
        f"‖x₁ − x*‖ = {distance:g} ≤ D = {diameter:g}", distance <= diameter * grace
    )  # fmt: skip
    # γ and G beside the gradients that were seen.
    floor = run.grad_min if grad_floor is None else grad_floor
    bound = run.grad_max if grad_bound is None else grad_bound
    steep = draft.check(
        f"every ‖g_k‖ ≥ γ = {floor:.6g} (smallest {run.grad_min:.6g})", run.grad_min >= floor
    )
    if grad_bound is None:
        bounded = draft.check(f"every ‖g_k‖ ≤ G = {bound:.6g}, the largest seen", True)
    else:
        seen = f"(largest ‖g_k‖ {run.grad_max:.6g})"
        draft.assumed.append(f"E‖g_k‖² ≤ G² with G = {bound:g} {seen}")
        text = f"some ‖g_k‖ ≤ G = {bound:.6g} (smallest {run.grad_min:.6g})"
        bounded = draft.check(text, run.grad_min <= bound * grace)
    text = f"b₁ = {run.b_first:.6g} ≥ ‖g₁‖ = {run.grad_first:.6g}"
    if not (bounds.at_least(run.b_first, run.grad_first) and steep):
        return draft.finish(f"b_k ≥ γ√k and Theorem 3.1: need {text} and ‖g_k‖ ≥ γ")
    draft.verified.append(text)
    k = run.nit + 1
    least = bounds.lemma_3_3_b(grad_floor=floor, k=k)
    # b is summed in float64, whatever the type of x.
    draft.claim(f"γ√k ≤ b_k at k = {k}", least, run.b, rounding=1e-12 * run.b)
    if run.fun_mean is None or f_star is None or diameter is None or floor <= 0:
        return draft.finish("Theorem 3.1: needs f, f_star, diameter and γ > 0")
    if not (near and bounded):
        return draft.finish("Theorem 3.1: the run contradicts D or G")
    limit = bounds.theorem_3_1_gap(
        grad_bound=bound,
        grad_floor=min(floor, bound),
        diameter=diameter,
        b1=run.b_first,
        distance=diameter if distance is None else distance,
        k=k,
    )
    draft.assumed += [
        "f is convex",
        f"f* = {f_star:g}",
        f"E‖x_k − x*‖² ≤ D² with D = {diameter:g}",
        "the theorem bounds the mean over runs; this is one of them",
    ]
    given = (f"f_star={f_star:g}", f"diameter={diameter:g}", f"grad_bound={bound:g}")
    draft.claim(f"Theorem 3.1: f(x̄_k) − f* at k = {k}", run.fun_mean - f_star, limit, given)
    return draft.finish()
