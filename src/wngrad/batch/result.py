"""What a minimizer returns: outcomes are values, and say in a sentence what happened."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

if TYPE_CHECKING:
    from wngrad.batch.certificate import Certificate


class Status(IntEnum):
    """How a run ended. `message` of a result is the sentence."""

    CONVERGED = 0
    STEP_LIMIT = 1
    TIME_LIMIT = 2
    NOT_FINITE = 3
    STALLED = 4
    STOPPED = 5
    RAISED = 6


MESSAGES = {
    Status.CONVERGED: "The tolerance was reached.",
    Status.STEP_LIMIT: "The limit on steps was reached before the tolerance.",
    Status.TIME_LIMIT: "The limit on time was reached before the tolerance.",
    Status.NOT_FINITE: "f, ∇f or b is not finite at the next point; x is the last good one.",
    Status.STALLED: "x no longer changes in floating point, above the tolerance.",
    Status.STOPPED: "The callback stopped the run.",
    Status.RAISED: "f, its gradient or the callback raised; x is the last good point.",
}


@dataclass(frozen=True, slots=True)
class Trace:
    """The whole run, point by point: index 0 is x₁, so `b[k - 1]` is the paper's b_k."""

    b: np.ndarray
    sq_norm: np.ndarray  # ‖∇f(x_k)‖²
    fun: np.ndarray  # f(x_k)
    slope: np.ndarray  # ‖∇f(x_{k+1}) − ∇f(x_k)‖/‖x_{k+1} − x_k‖: each at most L, but for rounding
    slope_condition: np.ndarray  # by how much of it, per relative rounding of x and ∇f
    x_norm: np.ndarray  # ‖x_k‖, which says how far rounding moves x_k

    def __len__(self) -> int:
        return len(self.b)


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run began: what the bounds are stated in."""

    b: float  # b₁
    sq_norm: float  # ‖∇f(x₁)‖²
    fun: float  # f(x₁)


@dataclass(frozen=True, slots=True)
class Result:
    """A finished minimization, with the names of scipy's OptimizeResult."""

    x: Any
    fun: float
    jac: Any
    nit: int  # steps taken: x is x_{nit+1}
    nfev: int
    njev: int
    status: Status
    message: str
    b: float  # the last b
    sq_norm: float  # ‖∇f(x)‖²
    best: float  # the smallest ‖∇f(x_k)‖² of the run
    tol: float
    method: str
    start: Start
    eps: float  # the rounding unit of x's type
    trace: Trace | None = field(repr=False, default=None)

    @property
    def success(self) -> bool:
        return self.status is Status.CONVERGED

    def certify(
        self,
        *,
        lipschitz: float | None = None,
        f_star: float | None = None,
        rounding: float | None = None,
    ) -> Certificate:
        """The paper's inequalities on this run.

        Args:
            lipschitz: L, if you know it. A run with a trace is searched for a slope above it.
            f_star: a lower bound on f, if you know it.
            rounding: what may be lost on the way to either side of a claim, relative to the
                numbers that went in: 4,500 units in the last place of x's type (1e-12 in float64)
                unless given. Gradients by finite differences need more. x is rounded, too, which
                far from the origin moves f by more than f's own last place: Lemma A.1 allows for
                it. Where b is so large that a step is not much longer than x's rounding, no slope
                is known, and none contradicts L.

        Returns:
            A `Certificate`. Print it. Without `trace=True` it has only the claims about the run's
            ends.

        Example:
            >>> res = minimize(lambda x: x @ x, [3.0, -4.0], jac=lambda x: 2 * x, trace=True)
            >>> print(res.certify(lipschitz=2.0, f_star=0.0).claims[-2])
            Lemma 2.5: b after k0 = 1: 30.2092 ≤ 210   given lipschitz=2, f_star=0
        """
        from wngrad.batch.certificate import certify

        return certify(self, lipschitz=lipschitz, f_star=f_star, rounding=rounding)


class EvaluationError(RuntimeError):
    """f, its gradient or the callback raised; `result` keeps the last good point."""

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result

    def __reduce__(self) -> tuple[Any, ...]:  # for pickle, and so for a pool of processes
        return type(self), (*self.args, self.result)


def raise_with(error: BaseException, owner: str, result: Any) -> NoReturn:
    """Pass on what f, its gradient or the callback raised, with the last good point."""
    if isinstance(error, KeyboardInterrupt):
        error.result = result  # type: ignore[attr-defined]
        raise error
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # a generator must not let it through as it is (PEP 479)
    raise EvaluationError(
        f"{owner}: {type(error).__name__} after step {result.nit} ({error}); "
        f"the last good point is in this error's `result`.",
        result,
    ) from error
