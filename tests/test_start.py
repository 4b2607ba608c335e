"""b₁ from a sampled Lipschitz constant (Remark 2.2)."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from wngrad import WNGrad, lipschitz_b_init


class Quadratic(nn.Module):
    """f = ½ xᵀ diag(a) x, whose gradient has the Lipschitz constant max a."""

    def __init__(self, *a: float) -> None:
        super().__init__()
        self.a = torch.tensor(a, dtype=torch.float64)
        self.x = nn.Parameter(torch.ones(len(a), dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return (self.a * self.x**2).sum() / 2


@pytest.mark.parametrize("points", [2, 3, 8])
def test_it_estimates_the_lipschitz_constant_from_below(points):
    model = Quadratic(1.0, 3.0, 10.0)
    estimate = lipschitz_b_init(model, model, points=points, seed=points)
    assert 1.0 <= estimate <= 10.0 * (1 + 1e-9)


def test_more_points_never_lower_the_estimate():
    model = Quadratic(1.0, 3.0, 10.0)
    every = [lipschitz_b_init(model, model, points=n) for n in range(2, 20)]
    assert every == sorted(every)
    assert every[-1] > 8


def test_it_is_in_proportion_to_lam_and_to_the_loss():
    model = Quadratic(2.0, 2.0)
    assert lipschitz_b_init(model, model) == pytest.approx(2.0)
    assert lipschitz_b_init(model, model, lr=8.0) == pytest.approx(16.0)
    assert lipschitz_b_init(model, lambda: 4 * model()) == pytest.approx(8.0)


def test_the_model_is_left_bit_for_bit_as_it_was():
    """Parameters, gradients, buffers (batch statistics) and the random state (dropout)."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))
    model[0].weight.grad = torch.ones(8, 4)
    model[0].bias.requires_grad_(False)
    x = torch.randn(16, 4)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    assert lipschitz_b_init(model, lambda: model(x).square().mean()) > 0
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model[0].weight.grad, torch.ones(8, 4))
    assert model[3].weight.grad is None


def test_gradients_are_put_back_after_a_closure_that_clears_them():
    model = Quadratic(1.0, 3.0)
    model.x.grad = torch.ones_like(model.x)

    def closure():
        model.zero_grad()
        return model()

    lipschitz_b_init(model, closure)
    assert torch.equal(model.x.grad, torch.ones_like(model.x))


def test_the_model_is_put_back_even_if_the_closure_raises():
    model = Quadratic(1.0, 2.0)
    before = model.x.detach().clone()

    def closure():
        assert not torch.equal(model.x, before)
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        lipschitz_b_init(model, closure)
    assert torch.equal(model.x, before)


def test_the_seed_decides():
    model = Quadratic(1.0, 5.0)
    assert lipschitz_b_init(model, model, seed=1) == lipschitz_b_init(model, model, seed=1)
    assert lipschitz_b_init(model, model, seed=1) != lipschitz_b_init(model, model, seed=2)


def test_an_unused_parameter_and_low_precision_do_no_harm():
    model = nn.Linear(4, 2).to(torch.bfloat16)
    model.unused = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    x = torch.randn(8, 4, dtype=torch.bfloat16)
    assert lipschitz_b_init(model, lambda: model(x).float().square().mean(), radius=0.5) > 0


def test_it_starts_at_the_stable_rate():
    """b₁ = λL̂ with L̂ = L: the rate is 1/L, and no step increases a quadratic."""
    model = Quadratic(7.0, 7.0)
    b1 = lipschitz_b_init(model, model, lr=3.0)
    opt = WNGrad(model.parameters(), lr=3.0, b_init=b1)
    losses = []
    for _ in range(20):
        opt.zero_grad()
        loss = model()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 1e-2 * losses[0]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"points": 1}, "`points`.*got 1"),
        ({"points": 2.0}, "`points`.*got 2.0"),
        ({"radius": 0.0}, "`radius`.*got 0.0"),
        ({"lr": -1.0}, "`lr`.*got -1.0"),
    ],
)
def test_bad_arguments_are_named(options, match):
    model = Quadratic(1.0)
    with pytest.raises(ValueError, match=match):
        lipschitz_b_init(model, model, **options)


def test_a_linear_loss_has_no_estimate():
    model = Quadratic(1.0)
    with pytest.raises(ValueError, match=r"`closure` needs.*`b_init` as a number"):
        lipschitz_b_init(model, lambda: model.x.sum())


def test_low_precision_needs_no_larger_radius():
    """In bfloat16 the default distance would be lost in rounding; it is stretched to fit."""
    model = nn.Linear(8, 8).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    loss = lambda: model.weight.float().square().sum() + model.bias.float().square().sum()  # noqa: E731
    assert lipschitz_b_init(model, loss) == pytest.approx(2.0, rel=0.05)


def test_the_least_precise_parameter_sets_the_radius():
    """A distance that float32 keeps is lost in the rounding of the bfloat16 beside it."""
    model = nn.Linear(64, 64)
    nn.init.ones_(model.weight)
    model.weight.data = model.weight.data.to(torch.bfloat16)
    loss = lambda: model.weight.float().square().sum()  # noqa: E731
    assert lipschitz_b_init(model, loss, radius=1e-5) == pytest.approx(2.0, rel=0.05)


def test_complex_parameters_count_both_parts():
    model = nn.Module()
    model.z = nn.Parameter(torch.ones(4, dtype=torch.complex128))
    assert lipschitz_b_init(model, lambda: 3 * model.z.abs().square().sum()) == pytest.approx(6.0)


def test_nothing_to_train_is_named():
    model = Quadratic(1.0)
    model.x.requires_grad_(False)
    with pytest.raises(ValueError, match="`model` must have a parameter"):
        lipschitz_b_init(model, model)


def test_buffers_that_forward_replaces_are_put_back():
    model = Quadratic(1.0, 2.0)
    model.register_buffer("count", torch.zeros(()))

    def closure():
        model.count = model.count + 1
        return model()

    lipschitz_b_init(model, closure)
    assert model.count == 0
