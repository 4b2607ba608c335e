"""WN-Adam: Algorithm 4 of the paper."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from wngrad.optim import checks
from wngrad.optim.directions import Direction, RunningMean, known_to_kernels
from wngrad.optim.optimizer import BlockOptimizer
from wngrad.optim.settings import Options, Settings, setting, table


@table
class MeanSettings(Settings):
    """What WNAdam adds."""

    momentum: float = setting(0.9, checks.fraction, "β of the mean", launch=bool, also="beta")


class WNAdam(BlockOptimizer):
    """Adam's running mean under WNGrad's learning rate, one for every neuron (Alg. 4).

    ĝ_j ← β ĝ_{j-1} + (1−β) g,  b_j ← b_{j-1} + λ²‖g‖²/b_{j-1},  then
    x_j ← x_{j-1} − (λ/b_j)·ĝ_j/(1−βᵗ), with t = 1 at the first step. No ε, no second moment.

    No block ever moves by more than ½ in one step, whatever λ, and whatever it was before: where λ
    changes, each gradient is in the mean with the λ of its own step (λĝ is the mean of λg). The
    state keeps that mean over b_j, as `velocity`.

    Args:
        params: as for `WNGrad`, and so are all arguments but `beta`.
        lr: λ.
        beta: β of the running mean. Groups hold it as `momentum`, the key that torch's schedulers
            turn; in a group, too, it may be given as `beta`.
        momentum: the same as `beta`, so that an optimizer can be made from another's defaults.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> opt = WNAdam(model.parameters())
        >>> model(torch.ones(1, 3)).square().sum().backward()
        >>> opt.step()
    """

    Settings: ClassVar = MeanSettings

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1.0,
        *,
        beta: float = 0.9,
        momentum: float | None = None,
        **settings: Unpack[Options],
    ) -> None:
        checks.fraction(type(self).__name__, "beta", beta)
        if momentum is not None and beta not in (0.9, momentum):  # 0.9: not given
            raise ValueError(
                f"{type(self).__name__}: `momentum` must be `beta`, of which it is another name, "
                f"got {momentum!r} and {beta!r}."
            )
        mean = {"momentum": beta if momentum is None else momentum}
        super().__init__(params, {"lr": lr, **mean, **settings})

    @known_to_kernels("momentum")
    def direction(self, group: dict[str, Any], p: Tensor) -> Direction:
        """The running mean of the gradient."""
        return RunningMean(group["momentum"])
