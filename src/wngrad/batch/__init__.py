"""Sections 2 and 3 of the paper as a numerical library: minimizers, bounds and certificates."""

from wngrad.batch import bounds, schedules, weightnorm
from wngrad.batch.certificate import Certificate, Claim
from wngrad.batch.minimizer import BInit, gradient_descent, minimize
from wngrad.batch.result import EvaluationError, Result, Status, Trace
from wngrad.batch.scipy_adapter import scipy_method
from wngrad.batch.stochastic import StochasticResult, minimize_stochastic

__all__ = [
    "BInit",
    "Certificate",
    "Claim",
    "EvaluationError",
    "Result",
    "Status",
    "StochasticResult",
    "Trace",
    "bounds",
    "gradient_descent",
    "minimize",
    "minimize_stochastic",
    "schedules",
    "scipy_method",
    "weightnorm",
]
