"""The paper's lemmas and theorems as claims about a run, where L and f* are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wngrad.batch import bounds

if TYPE_CHECKING:
    from wngrad.batch.certificate import Draft
    from wngrad.batch.result import Result, Trace

# Only a slope above this, after what rounding may have added to it, contradicts L.
_ALLOWANCE = 1.01


class Known(NamedTuple):
    """What the caller knows of f."""

    lipschitz: float
    f_star: float

    @property
    def given(self) -> tuple[str, str]:
        return f"lipschitz={self.lipschitz:g}", f"f_star={self.f_star:g}"


def hypotheses(draft: Draft, run: Result, known: Known) -> None:
    """What is taken on trust of f, and whether the run contradicts it."""
    lipschitz, f_star = known
    draft.assumed += [f"∇f is Lipschitz with L = {lipschitz:g}", f"f ≥ f* = {f_star:g}"]
    seen, trace = draft.lipschitz_seen, run.trace
    if trace is not None and seen > 0:
        text = f"no slope of ∇f on the run, less rounding, exceeds {_ALLOWANCE}·L ({seen:.6g} seen)"
        draft.check(text, seen <= _ALLOWANCE * lipschitz)
    if trace is not None:
        text, lowest = "no f(x_k) lies below f*", float(trace.fun.min())
    elif math.isfinite(run.fun):
        text, lowest = "neither f(x₁) nor f(x) lies below f*", min(run.start.fun, run.fun)
    else:
        text, lowest = "f(x₁) does not lie below f*", run.start.fun
        draft.not_claimed.append("whether f(x) lies below f*: it is not known, or not finite")
    slack = draft.rounding * max(abs(run.start.fun), abs(lowest), abs(f_star))
    draft.check(f"{text} (lowest {lowest:.6g})", lowest >= f_star - slack)


def rate(draft: Draft, run: Result, known: Known) -> None:
    """Lemma 2.1 for a constant step of δ/L, Theorem 2.3 for WNGrad.

    Read both ways: how many points it takes to ε, and how small ‖∇f‖² is by now.
    """
    (lipschitz, f_star), b1, f1 = known, run.start.b, run.start.fun
    # f(x₁) − f*, and what rounding may have taken from it.
    gap = max(0.0, f1 - f_star) + draft.rounding * max(abs(f1), abs(f_star))
    steps: Callable[..., float]
    if run.method == "constant":
        delta = lipschitz / b1
        if not bounds.at_least(b1, lipschitz):
            draft.not_claimed.append(f"Lemma 2.1: the step is {delta:.4g}/L, above 1/L")
            return
        delta = min(1.0, delta)
        name = f"Lemma 2.1, δ = {delta:.4g}"
        steps = partial(bounds.lemma_2_1_steps, lipschitz=lipschitz, gap=gap, delta=delta)
        smallest = steps(tol=1.0) / (run.nit + 1)
    else:
        case = 1 if b1 >= lipschitz else 2  # from a b₁ above L, or below it
        if case == 2 and not _started_well(draft, run):
            draft.not_claimed.append("Theorem 2.3, case 2: b₁ < ‖∇f(x₁)‖")
            return
        name, numbers = f"Theorem 2.3, case {case}", {**_start(run, known), "gap": gap}
        steps = partial(bounds.theorem_2_3_steps, **numbers)
        smallest = bounds.theorem_2_3_sq_norm(**numbers, points=run.nit + 1)
    if run.success and run.tol > 0:
        most = max(1.0, float(np.ceil(steps(tol=run.tol))))
        draft.claim(f"{name}: points until ‖∇f‖² ≤ {run.tol:g}", run.nit + 1, most, known.given)
    elif run.tol > 0:
        draft.not_claimed.append(f"{name}: points until ε, since the run ended before it")
    if math.isfinite(smallest):
        text = f"{name}: smallest ‖∇f‖² of {run.nit + 1} points"
        rounding = draft.rounding * run.start.sq_norm
        draft.claim(text, run.best, smallest, known.given, rounding)


def lemmas_2_4_to_2_6(draft: Draft, run: Result, known: Known) -> None:
    """What b does on the way to L, at L and from there."""
    trace = run.trace
    if trace is None:
        draft.not_claimed.append("Lemmas 2.4, 2.5 and 2.6: no trace was kept (trace=True)")
        return
    lipschitz, trust = known.lipschitz, known.given[:1]
    # By point N, b has reached L or some ‖∇f‖² is ≤ ε. With ε just under everything seen before
    # the end, b must reach L within N points.
    low = float(trace.sq_norm[: max(1, len(trace) - 1)].min())
    if low > 0:
        tol = low * (1 - 1e-9)
        n = bounds.lemma_2_4_points(lipschitz=lipschitz, b1=run.start.b, tol=tol)
        if n <= len(trace) - 1:
            short = lipschitz - float(trace.b[int(n) - 1])
            text = f"Lemma 2.4: L − b_N at N = {int(n)}"
            draft.claim(text, short, 0.0, trust, draft.rounding * lipschitz)
    settled = settling(trace, *known)
    if settled is None:
        draft.not_claimed.append("Lemmas 2.5 and 2.6: b never reached L")
        return
    k0, limit = settled
    b_last, f_k0 = float(trace.b[-1]), float(trace.fun[k0])
    rounding = 8 * draft.rounding * max(abs(f_k0), abs(known.f_star), b_last)
    draft.claim(f"Lemma 2.5: b after k0 = {k0 + 1}", b_last, limit, known.given, rounding)
    if k0 == 0:
        return
    if not _started_well(draft, run):
        draft.not_claimed.append("Lemma 2.6, and f in Lemma 2.5: b₁ < ‖∇f(x₁)‖")
        return
    start = _start(run, known)
    f_limit = bounds.lemma_2_5_f(f1=run.start.fun, **start)
    draft.claim("Lemma 2.5: f(x_{k0})", f_k0, f_limit, trust, rounding)
    b_limit = bounds.lemma_2_6_b(**start)
    draft.claim("Lemma 2.6: b_{k0}", float(trace.b[k0]), b_limit, trust, rounding)


def settling(trace: Trace, lipschitz: float, f_star: float) -> tuple[int, float] | None:
    """k0 − 1, where b first reaches L, and Lemma 2.5's limit on b from there."""
    reached = np.flatnonzero(trace.b >= lipschitz)
    if reached.size == 0:
        return None
    k0 = int(reached[0])
    gap = max(0.0, float(trace.fun[k0]) - f_star)
    return k0, bounds.lemma_2_5_b(b_k0=float(trace.b[k0]), gap_k0=gap)


def descent_lemma(draft: Draft, run: Result, known: Known) -> None:
    """f(x_{j+1}) ≤ f(x_j) − (1/b_j)(1 − L/(2b_j))‖∇f(x_j)‖², whatever b_j (Lemma A.1)."""
    trace, lipschitz = run.trace, known.lipschitz
    if trace is None or len(trace) < 2:
        return
    b, sq, f = trace.b[:-1], trace.sq_norm[:-1], trace.fun
    bound = f[:-1] - sq / b * (1 - lipschitz / (2 * b))
    # f is rounded relative to the numbers it is computed from, which its values tell of. And x is
    # rounded by some δ = ε‖x‖, which moves f by up to ‖∇f‖δ + Lδ²/2: more, far from the origin.
    sizes, norms = np.abs(f), np.sqrt(trace.sq_norm)
    scale = np.maximum.reduce([sizes[:-1], sizes[1:], np.abs(bound), np.full_like(bound, sizes[0])])
    moved = draft.rounding * (trace.x_norm[:-1] + trace.x_norm[1:])
    steepest = np.maximum(norms[:-1], norms[1:])
    slack = draft.rounding * scale + steepest * moved + lipschitz * moved**2 / 2
    over = f[1:] - bound
    worst = int((over - slack).argmax())
    text = f"Lemma A.1: f(x_j) above the descent it must make, at worst (j = {worst + 2})"
    draft.claim(text, float(over[worst]), 0.0, known.given[:1], float(slack[worst]))


def _start(run: Result, known: Known) -> dict[str, float]:
    """The numbers of the start that the bounds are stated in."""
    norm = math.sqrt(run.start.sq_norm)
    return {"lipschitz": known.lipschitz, "b1": run.start.b, "grad_norm": norm}


def _started_well(draft: Draft, run: Result) -> bool:
    norm = math.sqrt(run.start.sq_norm)
    text = f"b₁ = {run.start.b:.6g} ≥ ‖∇f(x₁)‖ = {norm:.6g}"
    good = bounds.at_least(run.start.b, norm)
    if good and text not in draft.verified:
        draft.verified.append(text)
    return good
