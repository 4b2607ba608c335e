"""The zoo: gradients, minima and Lipschitz constants are what they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wngrad.batch.arrays import finite_difference_gradient
from wngrad.problems import ZOO, quadratic

names = st.sampled_from(sorted(ZOO))
seeds = st.integers(0, 10**6)


def near(problem, seed, spread=2.0):
    return problem.x0 + spread * np.random.default_rng(seed).standard_normal(problem.x0.shape)


@given(names, seeds)
def test_the_gradient_is_the_slope_of_f(name, seed):
    p = ZOO[name]()
    x = near(p, seed)
    numeric = finite_difference_gradient(p.f)(x)
    scale = max(1.0, float(np.abs(numeric).max()))
    if name == "absolute":  # A kink within the difference's reach is no error of the gradient.
        p_x, step = p.grad(x), 1e-5
        if any(not np.allclose(p.grad(x + step * s), p_x) for s in np.r_[np.eye(10), -np.eye(10)]):
            return
    np.testing.assert_allclose(p.grad(x), numeric, atol=1e-5 * scale)


@pytest.mark.parametrize("name", ZOO)
def test_the_minimum_is_where_and_what_it_says(name):
    p = ZOO[name]()
    if p.x_star is not None:
        assert p.f(p.x_star) == pytest.approx(p.f_star, abs=1e-12)
        if name != "absolute":
            assert np.abs(p.grad(p.x_star)).max() < 1e-7


@given(names, seeds)
def test_nothing_lies_below_f_star(name, seed):
    p = ZOO[name]()
    if p.f_star is not None:
        assert p.f(near(p, seed)) >= p.f_star - 1e-12


@given(names, seeds, st.floats(-3, 2))
def test_no_slope_of_the_gradient_exceeds_l(name, seed, log_apart):
    p = ZOO[name]()
    if p.lipschitz is None:
        return
    x = near(p, seed)
    y = x + 10**log_apart * np.random.default_rng(seed + 1).standard_normal(x.shape)
    slope = np.linalg.norm(p.grad(x) - p.grad(y)) / np.linalg.norm(x - y)
    assert slope <= p.lipschitz * (1 + 1e-9)


@given(names, seeds)
def test_convex_problems_are_convex(name, seed):
    p = ZOO[name]()
    x, y = near(p, seed), near(p, seed + 1)
    if p.convex:
        assert p.f((x + y) / 2) <= (p.f(x) + p.f(y)) / 2 + 1e-9
        assert p.f(y) >= p.f(x) + p.grad(x) @ (y - x) - 1e-9 * max(1.0, abs(p.f(x)))


@pytest.mark.parametrize("name", [n for n in ZOO if ZOO[n]().sample is not None])
def test_the_stochastic_gradient_is_right_on_average(name):
    p = ZOO[name]()
    x, rng = near(p, 0), np.random.default_rng(0)
    mean = np.mean([p.sample(x, rng) for _ in range(20_000)], axis=0)
    np.testing.assert_allclose(mean, p.grad(x), atol=0.05 * max(1.0, np.abs(p.grad(x)).max()))


def test_mccormick_has_no_lower_bound():
    p = ZOO["mccormick"]()
    assert p.f(np.array([-1e6, -1e6])) < -1e5
    assert p.f_star is None


@pytest.mark.parametrize("spectrum", [(-5.0, 1.0), (np.nan, 1.0), (np.inf,), ()])
def test_a_quadratic_that_is_no_bowl_is_refused(spectrum):
    """A negative eigenvalue: neither f* nor `convex` would be true, and L would be too small."""
    with pytest.raises(ValueError, match="quadratic: `spectrum` must hold finite numbers >= 0"):
        quadratic(spectrum)
