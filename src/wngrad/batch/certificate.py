"""Certificates: the paper's inequalities on a finished run, with both sides' numbers.

A certificate never says "converged". It lists its claims, what it verified, what it took on trust,
and what it therefore cannot claim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wngrad.batch import lemmas
from wngrad.batch.arrays import ROUNDING_UNITS, kind_of, norm
from wngrad.batch.result import Status
from wngrad.batch.updates import UPDATES

if TYPE_CHECKING:
    from wngrad.batch.result import Result, Trace


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
    lipschitz_seen: (
        float  # the largest slope of the gradient on the run, less its rounding: L is no less
    )

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

    def __init__(self, rounding: float = 1e-12) -> None:
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

    def finish(self) -> Certificate:
        return Certificate(
            claims=tuple(self.claims),
            verified=tuple(self.verified),
            assumed=tuple(self.assumed),
            refuted=tuple(self.refuted),
            not_claimed=tuple(self.not_claimed),
            lipschitz_seen=self.lipschitz_seen,
        )


def certify(
    run: Result,
    *,
    lipschitz: float | None = None,
    f_star: float | None = None,
    rounding: float | None = None,
) -> Certificate:
    """The paper's inequalities on a run of `minimize`.

    Args:
        run: a finished run. Without `trace=True` only the claims about its ends can be made.
        lipschitz: L, if you know it. A run with a trace is searched for a slope above it.
        f_star: a lower bound on f, if you know it.
        rounding: what may be lost on the way to either side of a claim, relative to the numbers
            that went in: 4,500 units in the last place of x's type (1e-12 in float64) unless
            given. Gradients by finite differences need more. x is rounded, too, which far from the
            origin moves f by more than f's own last place: Lemma A.1 allows for it. Where b is so
            large that a step is not much longer than x's rounding, no slope is known, and none
            contradicts L.

    Returns:
        A `Certificate`. Print it.

    Example:
        >>> res = minimize(lambda x: x @ x, [3.0, -4.0], jac=lambda x: 2 * x, trace=True)
        >>> print(res.certify(lipschitz=2.0, f_star=0.0).claims[-2])
        Lemma 2.5: b after k0 = 1: 30.2092 ≤ 210   given lipschitz=2, f_star=0
    """
    for name, value in (("lipschitz", lipschitz), ("f_star", f_star)):
        if value is not None and not math.isfinite(value):
            raise ValueError(f"certify: `{name}` must be finite, got {value!r}.")
    if lipschitz is not None and not lipschitz > 0:
        raise ValueError(f"certify: `lipschitz` must be > 0, got {lipschitz!r}.")
    if rounding is not None and not 0 <= rounding < math.inf:
        raise ValueError(f"certify: `rounding` must be >= 0 and finite, got {rounding!r}.")
    draft = Draft(ROUNDING_UNITS * run.eps if rounding is None else rounding)
    draft.assumed.append("f and ∇f are what the run says they are at its points")
    if not _numbers(run):
        draft.refuted.append("every b is > 0, every ‖∇f‖² >= 0, and every number finite")
        draft.not_claimed.append(
            "anything else: the run holds a number that is not finite or has the wrong sign"
        )
        return draft.finish()
    _ends(draft, run)
    _recursion(draft, run)
    _slopes(draft, run.trace)
    if run.method == "adagrad-norm":
        draft.not_claimed.append("the paper has no bound for AdaGrad-Norm")
        return draft.finish()
    if lipschitz is None or f_star is None:
        unknown = {"lipschitz": lipschitz, "f_star": f_star}
        missing = " and ".join(name for name, value in unknown.items() if value is None)
        draft.not_claimed.append(f"Lemmas 2.1 to 2.6 and Theorem 2.3: {missing} not given")
        return draft.finish()
    known = lemmas.Known(float(lipschitz), float(f_star))
    lemmas.hypotheses(draft, run, known)
    if run.method == "constant":
        lemmas.lemma_2_1(draft, run, known)
    else:
        lemmas.theorem_2_3(draft, run, known)
        lemmas.lemmas_2_4_to_2_6(draft, run, known)
    lemmas.descent_lemma(draft, run, known)
    return draft.finish()


def _numbers(run: Result) -> bool:
    """Whether every number of a run is one: a NaN is in no order, and hides behind a maximum."""
    unevaluated = run.trace is None and run.status in (Status.RAISED, Status.NOT_FINITE)
    values = [run.start.fun] if unevaluated else [run.start.fun, run.fun]
    b, squares = [run.b, run.start.b], [run.sq_norm, run.start.sq_norm, run.best]
    if run.trace is not None:
        values, b, squares = (
            [*ends, *many]
            for ends, many in (
                (values, run.trace.fun), (b, run.trace.b), (squares, run.trace.sq_norm)
            )
        )  # fmt: skip
        squares += [*run.trace.x_norm]
    finite = np.isfinite([*values, *b, *squares]).all()
    return bool(finite and min(b) > 0 and min(squares) >= 0) and _known_slopes(run.trace)


def _known_slopes(trace: Trace | None) -> bool:
    """Whether a slope is missing only where x, and so its gradient, has not changed."""
    if trace is None:
        return True
    missing = np.flatnonzero(np.isnan(trace.slope[1:]) | np.isnan(trace.slope_condition[1:]))
    return bool((trace.sq_norm[missing + 1] == trace.sq_norm[missing]).all())


def _slopes(draft: Draft, trace: Trace | None) -> None:
    """The largest slope that rounding does not explain, and how many it could explain whole."""
    if trace is None:
        return
    rounding = draft.rounding * trace.slope_condition
    draft.lipschitz_seen = float(np.nanmax(trace.slope - rounding, initial=-math.inf))
    blurred = int((rounding >= trace.slope).sum())
    if blurred:
        worst = float(np.nanmax(rounding))
        draft.not_claimed.append(
            f"the slope of ∇f at {blurred} of {len(trace) - 1} steps: too short for it, their "
            f"slopes are known to within {worst:.2g}"
        )


def _ends(draft: Draft, run: Result) -> None:
    """Does the result agree with itself? A doctored one does not."""
    apart = [
        _apart(run.sq_norm, kind_of(run.jac).sq_norm(run.jac)),
        max(0.0, run.best - run.sq_norm),
    ]
    if run.trace is not None:
        t = run.trace
        pairs = (
            (run.b, t.b[-1]),
            (run.start.b, t.b[0]),
            (run.sq_norm, t.sq_norm[-1]),
            (run.start.sq_norm, t.sq_norm[0]),
            (run.best, t.sq_norm.min()),
            (run.start.fun, t.fun[0]),
            (run.fun, t.fun[-1]),
            (run.nit + 1, len(t)),
            (norm(kind_of(run.x), run.x), t.x_norm[-1]),
        )
        apart += [_apart(float(x), float(y)) for x, y in pairs]
    draft.claim("the parts of the result agree", max(apart), 1e-12)
    if run.success:
        draft.claim("‖∇f(x)‖² ≤ ε at the end", run.sq_norm, run.tol)


def _recursion(draft: Draft, run: Result) -> None:
    """Was b what the method says?"""
    if run.trace is None:
        return
    b, sq = run.trace.b, run.trace.sq_norm
    expected = np.array([UPDATES[run.method](x, s, 1.0) for x, s in zip(b, sq[1:], strict=False)])
    off = float(np.max(np.abs(b[1:] - expected) / np.abs(expected), initial=0.0))
    name = "Algorithm 1: error of b_j = b_{j-1} + ‖∇f(x_j)‖²/b_{j-1}"
    draft.claim(name if run.method == "wngrad" else f"{run.method}: error of b", off, 1e-12)


def _apart(x: float, y: float) -> float:
    if not (math.isfinite(x) and math.isfinite(y)):
        return math.inf
    return 0.0 if x == y else abs(x - y) / max(abs(x), abs(y))
