"""Certificates: the paper's inequalities on a finished run, with both sides' numbers.

A certificate never says "converged". It lists its claims, what it verified, what it took on trust,
and what it therefore cannot claim.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from wngrad.batch import bounds
from wngrad.batch.arrays import kind_of
from wngrad.batch.updates import UPDATES

if TYPE_CHECKING:
    from wngrad.batch.result import Result, Trace

# What rounding may cost on the way to either side, in units of the run's last place and relative to
# the numbers that went in: 1e-12 in float64.
_UNITS = 4500
# Near a minimum a slope is a quotient of two roundings; only an excess above this contradicts L.
_ALLOWANCE = 1.01


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
        return f"{self.name}: {self.lhs:.6g} {sign} {self.rhs:.6g}{trust}"


@dataclass(frozen=True, slots=True)
class Certificate:
    """What can be said of a run, and what not."""

    claims: tuple[Claim, ...]
    verified: tuple[str, ...]  # hypotheses checked on the run itself
    assumed: tuple[str, ...]  # hypotheses taken on trust
    refuted: tuple[str, ...]  # hypotheses the run contradicts
    not_claimed: tuple[str, ...]  # what cannot be said, and why
    lipschitz_seen: float  # the largest slope of the gradient on the run: a lower estimate of L

    @property
    def holds(self) -> bool:
        """Every claim holds, and the run contradicts no hypothesis."""
        return not self.refuted and all(claim.holds for claim in self.claims)

    def __str__(self) -> str:
        parts = (
            ("claims", map(str, self.claims)),
            ("verified on the run", self.verified),
            ("taken on trust", self.assumed),
            ("contradicted by the run", self.refuted),
            ("not claimed", self.not_claimed),
        )
        lines = ["\n  ".join([title, *rows]) for title, rows in _full(parts)]
        if math.isfinite(self.lipschitz_seen):
            lines.append(
                f"largest slope of ∇f seen: {self.lipschitz_seen:.6g} (L is at least that)"
            )
        return "\n".join(lines)


def _full(parts: tuple[tuple[str, object], ...]) -> Iterator[tuple[str, list[str]]]:
    for title, rows in parts:
        if listed := list(rows):  # type: ignore[call-overload]
            yield title, listed


class Draft:
    """A certificate in the making."""

    def __init__(self, rounding: float = 1e-12) -> None:
        self.rounding = rounding
        self.claims: list[Claim] = []
        self.verified: list[str] = []
        self.assumed: list[str] = []
        self.refuted: list[str] = []
        self.not_claimed: list[str] = []
        self.lipschitz_seen = math.nan

    def check(self, text: str, true: bool) -> bool:
        (self.verified if true else self.refuted).append(text)
        return true

    def finish(self) -> Certificate:
        return Certificate(
            tuple(self.claims),
            tuple(self.verified),
            tuple(self.assumed),
            tuple(self.refuted),
            tuple(self.not_claimed),
            self.lipschitz_seen,
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
            given. Gradients by finite differences need more.

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
    draft = Draft(_UNITS * run.eps if rounding is None else rounding)
    draft.assumed.append("f and ∇f are what the run says they are at its points")
    _ends(draft, run)
    _recursion(draft, run)
    if run.trace is not None:
        draft.lipschitz_seen = float(np.nanmax(run.trace.slope, initial=-math.inf))
    if run.method == "adagrad-norm":
        draft.not_claimed.append("the paper has no bound for AdaGrad-Norm")
        return draft.finish()
    if lipschitz is None or f_star is None:
        missing = " and ".join(
            name for name, v in (("lipschitz", lipschitz), ("f_star", f_star)) if v is None
        )
        draft.not_claimed.append(f"Lemmas 2.1 to 2.6 and Theorem 2.3: {missing} not given")
        return draft.finish()
    _hypotheses(draft, run, lipschitz, f_star)
    given = (f"lipschitz={lipschitz:g}", f"f_star={f_star:g}")
    if run.method == "constant":
        _lemma_2_1(draft, run, lipschitz, f_star, given)
    else:
        _theorem_2_3(draft, run, lipschitz, f_star, given)
        _lemmas(draft, run, lipschitz, f_star, given)
    _descent_lemma(draft, run, lipschitz)
    return draft.finish()


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
            (run.nit + 1, len(t)),
        )
        apart += [_apart(float(x), float(y)) for x, y in pairs]
        apart += [_apart(run.fun, float(t.fun[-1]))] if math.isfinite(run.fun) else []
    draft.claims.append(Claim("the parts of the result agree", max(apart), 1e-12))
    if run.success:
        draft.claims.append(Claim("‖∇f(x)‖² ≤ ε at the end", run.sq_norm, run.tol))


def _recursion(draft: Draft, run: Result) -> None:
    """Was b what the method says?"""
    if run.trace is None:
        return
    b, sq = run.trace.b, run.trace.sq_norm
    expected = np.array([UPDATES[run.method](x, s, 1.0) for x, s in zip(b, sq[1:], strict=False)])
    off = float(np.max(np.abs(b[1:] - expected) / np.abs(expected), initial=0.0))
    name = "Algorithm 1: error of b_j = b_{j-1} + ‖∇f(x_j)‖²/b_{j-1}"
    name = name if run.method == "wngrad" else f"{run.method}: error of b"
    draft.claims.append(Claim(name, off, 1e-12))


def _apart(x: float, y: float) -> float:
    return 0.0 if x == y else abs(x - y) / max(abs(x), abs(y))


def _hypotheses(draft: Draft, run: Result, lipschitz: float, f_star: float) -> None:
    draft.assumed += [f"∇f is Lipschitz with L = {lipschitz:g}", f"f ≥ f* = {f_star:g}"]
    values = [run.start.fun, run.fun] if run.trace is None else run.trace.fun
    lowest = float(np.nanmin(values))
    seen = draft.lipschitz_seen
    if run.trace is not None and seen > 0:
        text = f"no slope of ∇f on the run exceeds {_ALLOWANCE}·L ({seen:.6g} seen)"
        draft.check(text, seen <= _ALLOWANCE * lipschitz)
    slack = draft.rounding * max(1.0, abs(lowest), abs(f_star))
    draft.check(f"no f(x_k) lies below f* (lowest {lowest:.6g})", lowest >= f_star - slack)


def _gap(run: Result, f_star: float) -> float:
    return max(0.0, run.start.fun - f_star)


def _lemma_2_1(
    draft: Draft, run: Result, lipschitz: float, f_star: float, given: tuple[str, ...]
) -> None:
    delta = lipschitz / run.start.b
    if delta > 1:
        draft.not_claimed.append(f"Lemma 2.1: the step is {delta:.4g}/L, above 1/L")
        return
    gap = _gap(run, f_star)

    def steps(tol: float) -> float:
        return bounds.lemma_2_1_steps(lipschitz=lipschitz, gap=gap, delta=delta, tol=tol)

    _rate_claims(
        draft, run, f"Lemma 2.1, δ = {delta:.4g}", steps, steps(1.0) / (run.nit + 1), given
    )


def _theorem_2_3(
    draft: Draft, run: Result, lipschitz: float, f_star: float, given: tuple[str, ...]
) -> None:
    b1, norm, gap = run.start.b, math.sqrt(run.start.sq_norm), _gap(run, f_star)
    case = 1 if b1 >= lipschitz else 2
    if case == 2 and not _started_well(draft, run):
        draft.not_claimed.append("Theorem 2.3, case 2: b₁ < ‖∇f(x₁)‖")
        return

    def steps(tol: float) -> float:
        return bounds.theorem_2_3_steps(
            lipschitz=lipschitz, gap=gap, b1=b1, grad_norm=norm, tol=tol
        )

    smallest = bounds.theorem_2_3_sq_norm(
        lipschitz=lipschitz, gap=gap, b1=b1, grad_norm=norm, points=run.nit + 1
    )
    _rate_claims(draft, run, f"Theorem 2.3, case {case}", steps, smallest, given)


def _rate_claims(
    draft: Draft,
    run: Result,
    name: str,
    steps: Callable[[float], float],
    smallest: float,
    given: tuple[str, ...],
) -> None:
    """A rate, read both ways: how many points to ε, and how small by now."""
    rounding = draft.rounding * max(1.0, run.start.sq_norm)
    if run.success and run.tol > 0:
        most = max(1.0, bounds.ceil(steps(run.tol)))
        text = f"{name}: points until ‖∇f‖² ≤ {run.tol:g}"
        draft.claims.append(Claim(text, run.nit + 1, most, given))
    elif run.tol > 0:
        draft.not_claimed.append(f"{name}: points until ε, since the run ended before it")
    if math.isfinite(smallest):
        text = f"{name}: smallest ‖∇f‖² of {run.nit + 1} points"
        draft.claims.append(Claim(text, run.best, smallest, given, rounding))


def _started_well(draft: Draft, run: Result) -> bool:
    norm = math.sqrt(run.start.sq_norm)
    text = f"b₁ = {run.start.b:.6g} ≥ ‖∇f(x₁)‖ = {norm:.6g}"
    good = bounds.well_started(run.start.b, norm)
    if good and text not in draft.verified:
        draft.verified.append(text)
    return good


def _lemmas(
    draft: Draft, run: Result, lipschitz: float, f_star: float, given: tuple[str, ...]
) -> None:
    if run.trace is None:
        draft.not_claimed.append("Lemmas 2.4, 2.5 and 2.6: no trace was kept (trace=True)")
        return
    trace, b1, norm = run.trace, run.start.b, math.sqrt(run.start.sq_norm)
    trust = f"lipschitz={lipschitz:g}"
    _lemma_2_4(draft, run, lipschitz, trust)
    settled = settling(trace, lipschitz, f_star)
    if settled is None:
        draft.not_claimed.append("Lemmas 2.5 and 2.6: b never reached L")
        return
    k0, limit = settled
    scale = max(abs(float(trace.fun[k0])), abs(f_star), float(trace.b[-1]))
    rounding = 8 * draft.rounding * scale
    claim = Claim(f"Lemma 2.5: b after k0 = {k0 + 1}", float(trace.b[-1]), limit, given, rounding)
    draft.claims.append(claim)
    if k0 == 0:
        return
    if not _started_well(draft, run):
        draft.not_claimed.append("Lemma 2.6, and f in Lemma 2.5: b₁ < ‖∇f(x₁)‖")
        return
    f_limit = bounds.lemma_2_5_f(f1=run.start.fun, lipschitz=lipschitz, b1=b1, grad_norm=norm)
    b_limit = bounds.lemma_2_6_b(lipschitz=lipschitz, b1=b1, grad_norm=norm)
    draft.claims += [
        Claim("Lemma 2.5: f(x_{k0})", float(trace.fun[k0]), f_limit, (trust,), rounding),
        Claim("Lemma 2.6: b_{k0}", float(trace.b[k0]), b_limit, (trust,), rounding),
    ]


def settling(trace: Trace, lipschitz: float, f_star: float) -> tuple[int, float] | None:
    """k0 − 1, where b first reaches L, and Lemma 2.5's limit on b from there."""
    reached = np.flatnonzero(trace.b >= lipschitz)
    if reached.size == 0:
        return None
    k0 = int(reached[0])
    gap = max(0.0, float(trace.fun[k0]) - f_star)
    return k0, bounds.lemma_2_5_b(b_k0=float(trace.b[k0]), gap_k0=gap)


def _descent_lemma(draft: Draft, run: Result, lipschitz: float) -> None:
    """f(x_{j+1}) ≤ f(x_j) − (1/b_j)(1 − L/(2b_j))‖∇f(x_j)‖², whatever b_j (Lemma A.1)."""
    if run.trace is None or len(run.trace) < 2:
        return
    b, sq, f = run.trace.b[:-1], run.trace.sq_norm[:-1], run.trace.fun
    bound = f[:-1] - sq / b * (1 - lipschitz / (2 * b))
    over = f[1:] - bound
    worst = int(over.argmax())
    scale = max(1.0, float(np.abs(f[worst : worst + 2]).max()), abs(float(bound[worst])))
    text = f"Lemma A.1: f(x_j) above the descent it must make, at worst (j = {worst + 2})"
    given = (f"lipschitz={lipschitz:g}",)
    draft.claims.append(Claim(text, float(over[worst]), 0.0, given, draft.rounding * scale))


def _lemma_2_4(draft: Draft, run: Result, lipschitz: float, given: str) -> None:
    """By point N, b has reached L or some ‖∇f‖² is ≤ ε; ε is the run's smallest ‖∇f‖² but one."""
    assert run.trace is not None
    low = float(run.trace.sq_norm[: max(1, len(run.trace) - 1)].min())
    if low <= 0:
        return
    # With ε just under everything seen before the end, b must reach L within N points.
    tol = low * (1 - 1e-9)
    n = bounds.lemma_2_4_points(lipschitz=lipschitz, b1=run.start.b, tol=tol)
    if n <= len(run.trace) - 1:
        n = int(n)
        short = lipschitz - float(run.trace.b[n - 1])
        rounding = draft.rounding * lipschitz
        draft.claims.append(Claim(f"Lemma 2.4: L − b_N at N = {n}", short, 0.0, (given,), rounding))
