"""WN-Adam: Algorithm 4 of the paper."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from wngrad.optim import checks
from wngrad.optim.directions import Direction, RunningMean, known_to_kernels
from wngrad.optim.optimizer import BlockOptimizer


class WNAdam(BlockOptimizer):
    """Adam's running mean under WNGrad's learning rate, one for every neuron (Alg. 4).

    ĝ_j ← β ĝ_{j-1} + (1−β) g,  b_j ← b_{j-1} + λ²‖g‖²/b_{j-1},  then
    x_j ← x_{j-1} − (λ/b_j)·ĝ_j/(1−βᵗ), with t = 1 at the first step. No ε, no second moment.

    Args:
        params: as for `WNGrad`, and so are all arguments but `beta`.
        lr: λ.
        beta: β of the running mean.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> opt = WNAdam(model.parameters())
        >>> model(torch.ones(1, 3)).square().sum().backward()
        >>> opt.step()
    """

    own_settings: ClassVar[checks.Own] = (("beta", checks.fraction),)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        *,
        beta: float = 0.9,
        **settings: Unpack[checks.Options],
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, **settings})

    @known_to_kernels("beta")
    def direction(self, group: dict[str, Any], p: Tensor) -> Direction:
        """The running mean of the gradient."""
        return RunningMean(group["beta"])
