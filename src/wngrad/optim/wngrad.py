"""WNGrad: Algorithms 2 and 3 of the paper, and its momentum variant."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from wngrad.optim import checks
from wngrad.optim.directions import GRADIENT, Direction, Momentum, known_to_kernels
from wngrad.optim.optimizer import BlockOptimizer
from wngrad.optim.settings import Options, Settings, setting, table


@table
class MomentumSettings(Settings):
    """What WNGrad adds."""

    momentum: float = setting(0.0, checks.fraction, "μ of v ← μ·v + λ g/b_j", launch=bool)


class MomentumOptions(Options, total=False):
    """The types of WNGrad's settings."""

    momentum: float


class WNGrad(BlockOptimizer):
    """Gradient descent that learns its learning rate, one for every neuron (Alg. 3).

    b_j ← b_{j-1} + λ²‖g‖²/b_{j-1},  then  x_j ← x_{j-1} − λ g/b_j.

    No block ever moves by more than ½ in one step, whatever λ, and whatever it was before; with
    momentum by ½/(1−μ).

    Args:
        params: parameters or groups of them; see `neuron_groups` for groups in which a layer's
            weight row and its bias share one b.
        lr: λ, a number or a tensor of one element.
        momentum: μ of v ← μ·v + λ g/b_j, x ← x − v. Start from lr = 0.01 to 0.1 then: at 1.0
            networks without normalization do not train (docs/tournament.md).
        weight_decay: added to the gradient before the norm is taken, as in `torch.optim.SGD`.
        decoupled_weight_decay: shrink x by 1 − lr·weight_decay instead, as in `torch.optim.AdamW`.
        b_init: b₁. A number; or "gradient" (or ("gradient", C)) for b₁ = C·λ·‖g₁‖, set by each
            block's first gradient that is not zero, so that neither λ nor the scale of the loss
            matters (Remark 2.2), best with per="tensor"; or what `lipschitz_b_init` returns.
        per: what shares one b: "neuron" (an index of dimension 0), "tensor" (better for
            convolutional networks and transformers), "model" (the whole group), "slice" (a
            convolution's (out, in) kernel), or a callable that takes a parameter and returns the
            shape of its b, each entry of which divides the parameter's.
        hold_1d: keep b at b₁ for 1-D parameters, which makes them plain SGD.
        joint: the parameters of a group share their b, block by block.
        nonfinite: what to do with a block whose gradient is not finite or too large for b:
            "propagate" (NaN shows in the parameters), "skip" (leave it as it was, and count it) or
            "raise" (before anything changes).
        maximize: go up instead of down.
        differentiable: let autograd see the step.
        fused: take the step in one kernel that reads and writes everything once. None: where that
            is possible (CUDA with Triton, a CPU for which the package was built); True: insist, or
            say why not (but float64 and float16 quietly take the plain step on a CPU); False:
            never. See `why_plain`.
        stochastic_rounding: round new bfloat16 parameters up or down at random, so that updates too
            small for the type are not lost.
        foreach: taken as torch's optimizers take it, and means nothing: the plain step goes over
            lists anyway.

    Example:
        >>> model = torch.nn.Linear(3, 2)
        >>> opt = WNGrad(model.parameters(), lr=0.03, momentum=0.9)
        >>> model(torch.ones(1, 3)).square().sum().backward()
        >>> opt.step()
        >>> opt.rates()[model.weight].shape  # one rate per neuron
        torch.Size([2, 1])

    Note:
        The paper never writes the momentum variant out. Its authors released
        buf ← μ·buf + g/b_j, x ← x − λ·buf, which is the same for a constant λ; where λ rises, steps
        of small λ would be multiplied by the large one, and no bound would hold.
        Algorithms 1 and 2 use b before updating it and Algorithm 3 after, which is the same
        sequence of steps; the introduction's Eq. 5 differs and is not used.
    """

    Settings: ClassVar = MomentumSettings

    def __init__(
        self, params: ParamsT, lr: float | Tensor = 1.0, **settings: Unpack[MomentumOptions]
    ) -> None:
        super().__init__(params, {"lr": lr, **settings})

    @known_to_kernels("momentum")
    def direction(self, group: dict[str, Any], p: Tensor) -> Direction:
        """g/b_j alone, or its momentum; a buffer that is there is kept up to date at μ = 0, too."""
        buffered = group["momentum"] > 0 or "velocity" in self.state.get(p, {})
        return Momentum(group["momentum"]) if buffered else GRADIENT
