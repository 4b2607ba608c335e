"""Gradient descent that learns its own learning rate (WNGrad; Wu, Ward and Bottou, 2018).

>>> from wngrad import WNAdam, WNMuon
>>> model = torch.nn.Linear(3, 2)
>>> opt = WNMuon(model)  # nothing to tune
>>> opt = WNAdam(model.parameters())  # Algorithm 4: a cheap step, one rate per neuron
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wngrad.install import naming_the_extra

if TYPE_CHECKING:
    from wngrad.batch import Certificate as Certificate
    from wngrad.batch import Claim as Claim
    from wngrad.batch import EvaluationError as EvaluationError
    from wngrad.batch import gradient_descent as gradient_descent
    from wngrad.batch import minimize as minimize
    from wngrad.batch import minimize_stochastic as minimize_stochastic
    from wngrad.batch import scipy_method as scipy_method
    from wngrad.lab.report.sensitivity import best_lam as best_lam
    from wngrad.lab.report.sensitivity import lr_sensitivity as lr_sensitivity
    from wngrad.lab.report.sensitivity import recommended_lam as recommended_lam
    from wngrad.lab.report.sensitivity import usable_decades as usable_decades
    from wngrad.lab.train.function_task import FunctionTask as FunctionTask
    from wngrad.lab.train.loader_task import LoaderTask as LoaderTask
    from wngrad.lab.train.task import Task as Task
    from wngrad.lab.train.trial import Trial as Trial
    from wngrad.optim import MatrixGroups as MatrixGroups
    from wngrad.optim import NeuronGroups as NeuronGroups
    from wngrad.optim import RateSummary as RateSummary
    from wngrad.optim import Released as Released
    from wngrad.optim import WNAdam as WNAdam
    from wngrad.optim import WNGrad as WNGrad
    from wngrad.optim import WNMuon as WNMuon
    from wngrad.optim import lipschitz_b_init as lipschitz_b_init
    from wngrad.optim import matrix_groups as matrix_groups
    from wngrad.optim import neuron_groups as neuron_groups
    from wngrad.optim import polynomial_average as polynomial_average
    from wngrad.optim import step_in_backward as step_in_backward
    from wngrad.rate_history import RateHistory as RateHistory
    from wngrad.telemetry import rate_metrics as rate_metrics
    from wngrad.telemetry import show_rates as show_rates

__version__ = "0.1.0"

# Where each public name lives. A name is imported when it is first asked for, so that nobody
# loads a framework they do not use.
_HOMES = {
    "WNMuon": "wngrad.optim",
    "WNGrad": "wngrad.optim",
    "WNAdam": "wngrad.optim",
    "RateSummary": "wngrad.optim",
    "NeuronGroups": "wngrad.optim",
    "neuron_groups": "wngrad.optim",
    "MatrixGroups": "wngrad.optim",
    "matrix_groups": "wngrad.optim",
    "polynomial_average": "wngrad.optim",
    "Released": "wngrad.optim",
    "step_in_backward": "wngrad.optim",
    "lipschitz_b_init": "wngrad.optim",
    "RateHistory": "wngrad.rate_history",
    "rate_metrics": "wngrad.telemetry",
    "show_rates": "wngrad.telemetry",
    "minimize": "wngrad.batch",
    "minimize_stochastic": "wngrad.batch",
    "gradient_descent": "wngrad.batch",
    "scipy_method": "wngrad.batch",
    "Certificate": "wngrad.batch",
    "Claim": "wngrad.batch",
    "EvaluationError": "wngrad.batch",
    "Task": "wngrad.lab.train.task",
    "LoaderTask": "wngrad.lab.train.loader_task",
    "FunctionTask": "wngrad.lab.train.function_task",
    "Trial": "wngrad.lab.train.trial",
    "best_lam": "wngrad.lab.report.sensitivity",
    "lr_sensitivity": "wngrad.lab.report.sensitivity",
    "recommended_lam": "wngrad.lab.report.sensitivity",
    "usable_decades": "wngrad.lab.report.sensitivity",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'wngrad' has no attribute {name!r}")
    with naming_the_extra(name):
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
