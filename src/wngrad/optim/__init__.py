"""PyTorch optimizers: WNGrad and WNAdam, and what helps to set them up."""

from wngrad.optim import checks
from wngrad.optim.backward import Released, step_in_backward
from wngrad.optim.directions import Direction
from wngrad.optim.groups import NeuronGroups, neuron_groups
from wngrad.optim.lipschitz import lipschitz_b_init
from wngrad.optim.optimizer import BlockOptimizer
from wngrad.optim.report import RateSummary
from wngrad.optim.wnadam import WNAdam
from wngrad.optim.wngrad import WNGrad

__all__ = [
    "BlockOptimizer",
    "Direction",
    "NeuronGroups",
    "RateSummary",
    "Released",
    "WNAdam",
    "WNGrad",
    "checks",
    "lipschitz_b_init",
    "neuron_groups",
    "step_in_backward",
]
