"""PyTorch optimizers: WNMuon, WNGrad and WNAdam, and what helps to set them up."""

from wngrad.install import naming_the_extra

with naming_the_extra("wngrad.optim", "torch"):
    from wngrad.optim import checks
    from wngrad.optim.average import polynomial_average
    from wngrad.optim.backward import Released, step_in_backward
    from wngrad.optim.directions import Direction
    from wngrad.optim.lipschitz import lipschitz_b_init
    from wngrad.optim.modules import MatrixGroups, NeuronGroups, matrix_groups, neuron_groups
    from wngrad.optim.optimizer import BlockOptimizer
    from wngrad.optim.orthogonal import orthogonalize
    from wngrad.optim.report import RateSummary
    from wngrad.optim.settings import Settings, setting, table
    from wngrad.optim.wnadam import WNAdam
    from wngrad.optim.wngrad import WNGrad
    from wngrad.optim.wnmuon import WNMuon

__all__ = [
    "BlockOptimizer",
    "Direction",
    "MatrixGroups",
    "NeuronGroups",
    "RateSummary",
    "Released",
    "Settings",
    "WNAdam",
    "WNGrad",
    "WNMuon",
    "checks",
    "lipschitz_b_init",
    "matrix_groups",
    "neuron_groups",
    "orthogonalize",
    "polynomial_average",
    "setting",
    "step_in_backward",
    "table",
]
