"""WNMuon: the paper's rule over an orthogonalized direction. Nothing to tune."""

from __future__ import annotations

from typing import Any, ClassVar, cast, get_args

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT
from typing_extensions import Unpack

from wngrad.muon_numbers import VECTOR_SCALE
from wngrad.optim import checks
from wngrad.optim.decays import BY_RATE
from wngrad.optim.directions import Adam, Direction, Orthogonalized, known_to_kernels
from wngrad.optim.modules import Layout, Role, by_shape, matrix_groups
from wngrad.optim.optimizer import BlockOptimizer
from wngrad.optim.settings import Options, Settings, like, setting, table


def _layout(owner: str, name: str, value: object) -> tuple[str, int]:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ValueError(f"{owner}: `{name}` must be a pair (kind, pieces), got {value!r}.")
    layout = Layout(*cast(Any, value))
    return layout.kind, layout.pieces


def _layout_of(group: dict[str, Any], p: Tensor) -> Layout | None:
    """The layout of a group's parameter; None for a vector."""
    if group["role"] == "vector":
        return None
    return Layout(*group["layout"]) if group["layout"] else by_shape(p)


@table
class MuonSettings(Settings):
    """What WNMuon adds, and where its defaults are others."""

    momentum: float = setting(0.9, checks.fraction, "μ, and β₁ of the vectors", launch=bool)
    role: str | None = setting(
        None, checks.or_none(checks.choice(get_args(Role))), "what a group holds", loaded=False
    )
    layout: tuple[str, int] | None = setting(
        None, checks.or_none(_layout), "how its matrices lie", loaded=False
    )
    finetune: bool = setting(False, checks.flag, "ρ is in units of each parameter's own norm")

    b_init: float | tuple[str, float] = like("b_init", 10.0)
    average: float | None = like("average", 8.0)
    weight_decay: float = like("weight_decay", 0.1)
    decoupled_weight_decay: bool = like("decoupled_weight_decay", True)


class MuonOptions(Options, total=False):
    """The types of WNMuon's settings."""

    momentum: float
    finetune: bool


class WNMuon(BlockOptimizer):
    """Muon's direction under WNGrad's learning rate: nothing to tune.

    u = the momentum of a matrix, orthogonalized; b_j ← b_{j-1} + ‖u‖²/b_{j-1} for every neuron's
    row, from b₁ = C; then x_j ← x_{j-1}·(1 − w·ρ/b_j) − ρ u/b_j. Since ‖u‖ ≈ 1, b = √(C² + 2k)
    after k steps: a decay that nobody has to choose, for runs of any length. Vectors take Adam's
    direction, at 0.3 ρ. Train with `step` as ever; evaluate the average of the weights:

        with opt.averaged():
            evaluate(model)

    In one step no row moves by more than 1.15·max(1, √(out/in))·ρ/C, decay apart, and no entry of
    a vector by more than 0.71·ρ/C at μ ≥ 0.9; never more than ρ/2. Multiplying the loss by a
    constant changes nothing (by a power of two, no bit).

    Args:
        params: a model, which says what each parameter is (see `matrix_groups`, and print it); or
            parameters, or groups of them: then everything with two dimensions or more is a matrix
            with one row for each index of dimension 0, and the rest are vectors.
        lr: ρ, the length of a step in units of a neuron.
        momentum: μ, and β₁ of the vectors.
        finetune: for weights that were trained before: ρ is in units of each parameter's own norm
            at its first step, the root mean square of a matrix's row norms or of a vector's
            entries (at least 0.1, and 1/√3 where all is zero, as B of LoRA is). `differentiable`
            steps take it for a constant.
        b_init: C: as many steps are about alike as C²/2 is.
        average: η of the polynomial average x̄ ← x̄ + (η+1)/(k+η)·(x − x̄), which training never
            reads; None to save its memory, and to evaluate the weights themselves.
        weight_decay: w, in units of the step; for matrices alone.
        settings: as for `WNGrad`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        >>> opt = WNMuon(model)
        >>> for _ in range(10):
        ...     loss = (model(torch.ones(1, 3)) - 1).square().sum()
        ...     opt.zero_grad()
        ...     loss.backward()
        ...     opt.step()
        >>> with opt.averaged():
        ...     _ = model(torch.ones(1, 3))
        >>> float(opt.rates()[model[0].weight].max()) <= 0.3 / 10
        True

    Note:
        A gradient that is not finite spoils its whole matrix, which `nonfinite="skip"` then leaves
        as it was. ρ, C, η, μ, w and the rest were chosen on four tasks and judged on others:
        see docs/nothing-to-tune.md. For `finetune` and rivals, see docs/fine-tuning.md.
    """

    Settings: ClassVar = MuonSettings

    def __init__(
        self,
        params: ParamsT | nn.Module,
        lr: float | Tensor = 0.3,
        **settings: Unpack[MuonOptions],
    ) -> None:
        if isinstance(params, nn.Module):
            params = matrix_groups(params)
            for group in params if "per" in settings else ():
                del group["per"]
        super().__init__(params, {"lr": lr, **settings})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; "neuron" means the rows of its layout."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["per"] != "neuron":
            return
        layouts = [_layout_of(group, p) for p in group["params"]]
        if any(layout not in (None, Layout()) for layout in layouts):
            pairs = zip(group["params"], layouts, strict=True)
            group["per"] = [
                (layout or Layout()).blocks(tuple(p.shape)) if p.dim() > 1 else tuple(p.shape)
                for p, layout in pairs
            ]

    @known_to_kernels("momentum")
    def direction(self, group: dict[str, Any], p: Tensor) -> Direction:
        """Orthogonalized momentum for matrices, Adam's direction for vectors."""
        layout, mu = _layout_of(group, p), group["momentum"]
        if layout is None:
            return Adam(VECTOR_SCALE, mu)
        if group["role"] == "embedding":
            return Orthogonalized(mu, layout, rows_apart=True)
        return Orthogonalized(mu, layout, decay=BY_RATE)
