"""Algorithm 2, the averaged iterate, the schedules, and weight normalization."""

from __future__ import annotations

import itertools
import math
import typing
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wngrad import EvaluationError, minimize, minimize_stochastic, rule
from wngrad.batch import Status, schedules, weightnorm
from wngrad.problems import ZOO, absolute, least_squares, quadratic


def noisy(x, rng):
    return 2 * (x - 3) + rng.standard_normal(x.shape)


def test_without_noise_it_is_algorithm_1():
    p = quadratic((1.0, 4.0))
    batch = minimize(p.f, p.x0, jac=p.grad, tol=0.0, max_steps=50)
    res = minimize_stochastic(lambda x, rng: p.grad(x), p.x0, steps=50)
    assert np.array_equal(batch.x, res.x)
    assert batch.b == res.b


def test_the_mean_is_the_mean_of_all_iterates():
    seen = []

    def oracle(x, rng):
        seen.append(x.copy())
        return noisy(x, rng)

    res = minimize_stochastic(oracle, np.zeros(3), steps=100)
    np.testing.assert_allclose(res.x_mean, np.mean(seen, axis=0), rtol=1e-12)
    assert np.array_equal(seen[-1], res.x)


def test_the_seed_decides():
    runs = [minimize_stochastic(noisy, np.zeros(2), steps=20, seed=s).x for s in (0, 0, 1)]
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_it_stops_when_f_is_small_enough():
    p = least_squares()
    res = minimize_stochastic(
        lambda x, rng: p.grad(x), p.x0, steps=5000, f=p.f, tol=p.f_star + 1e-3, check_every=7
    )
    assert res.status is Status.CONVERGED
    assert res.fun <= p.f_star + 1e-3
    assert res.nit % 7 == 0
    assert minimize_stochastic(noisy, [0.0], steps=3).status is Status.STEP_LIMIT


def test_it_stops_where_f_is_small_enough_after_the_last_step():
    """f is looked at once in 100 steps, and at the end."""
    run = partial(minimize_stochastic, lambda x, rng: 2 * x, [1.0], b_init=5.0, f=lambda x: x @ x)
    assert run(steps=50, tol=1e-6, check_every=100).status is Status.CONVERGED
    assert run(steps=2, tol=1e-6, check_every=100).status is Status.STEP_LIMIT


def test_the_smallest_and_the_largest_gradient_are_kept():
    sizes = iter([3.0, 5.0, 1.0, 2.0])
    res = minimize_stochastic(lambda x, rng: np.array([next(sizes)]), [0.0], steps=3)
    assert (res.grad_first, res.grad_min, res.grad_max) == (3.0, 1.0, 5.0)


def test_b_grows_like_the_root_of_the_steps():
    """Under gradients of norm G: G√(2k), where the paper prints √k/G."""
    unit = lambda x, rng: rng.choice([-2.0, 2.0], size=1)  # noqa: E731
    res = minimize_stochastic(unit, [0.0], steps=10_000, b_init=2.0)
    assert res.b == pytest.approx(2 * math.sqrt(2 * 10_000), rel=0.01)


def test_torch_tensors_go_in_and_out():
    res = minimize_stochastic(lambda x, rng: 2 * x, torch.ones(2, 2), steps=5)
    assert isinstance(res.x_mean, torch.Tensor)


def test_a_gradient_that_is_not_finite_ends_the_run_at_the_last_good_point():
    count = itertools.count()
    bad = lambda x, rng: x * (math.nan if next(count) == 3 else 1.0)  # noqa: E731
    res = minimize_stochastic(bad, np.ones(2), steps=10)
    assert res.status is Status.NOT_FINITE
    assert res.nit == 2
    assert np.isfinite(res.x).all()


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (schedules.inverse_sqrt(2.0), [2.0, 2 / math.sqrt(2), 1.0]),
        (schedules.inverse(2.0), [2.0, 1.0, 0.5]),
        (schedules.hyperbolic(2.0, 4.0), [2 / 1.25, 2 / 1.5, 1.0]),
        (schedules.sqrt_hyperbolic(2.0, 2.0), [2 / 1.5, 2 / (1 + math.sqrt(2) / 2), 1.0]),
    ],
)
def test_the_schedules_are_the_introductions(schedule, rates):
    assert [schedule(k) for k in (1, 2, 4)] == pytest.approx(rates)
    seen = []

    def oracle(x, rng):
        seen.append(float(x[0]))
        return np.ones(1)

    minimize_stochastic(oracle, [0.0], steps=3, schedule=schedule)
    moved = [a - b for a, b in itertools.pairwise(seen)]
    assert moved == pytest.approx([schedule(k) for k in (1, 2, 3)])


def test_wngrad_needs_no_constant_where_the_schedule_does():
    """Remark 3.2's c/√k with c a hundredfold too large or small is worse than WNGrad's own rate."""
    p = absolute()
    own = minimize_stochastic(p.sample, p.x0, steps=4000, f=p.f).fun_mean
    for c in (100.0, 1e-4):
        step = schedules.inverse_sqrt(c)
        other = minimize_stochastic(p.sample, p.x0, steps=4000, f=p.f, schedule=step).fun_mean
        assert own < other


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"steps": -1}, ValueError, "steps"),
        ({"steps": 2.0}, ValueError, "steps"),
        ({"steps": 1, "check_every": 0}, ValueError, "check_every"),
        ({"steps": 1, "schedule": 0.1}, TypeError, "schedule"),
        ({"steps": 1, "method": "adam"}, ValueError, "method"),
        ({"steps": 1, "b_init": "lipschitz"}, ValueError, "b_init"),
        ({"steps": 1, "b_init": 0}, ValueError, "b_init"),
        ({"steps": 1, "tol": 0.1}, ValueError, "tol"),
        ({"steps": 1, "schedule": lambda k: 0.0}, ValueError, "schedule"),
        ({"steps": 1, "schedule": lambda k: -1.0}, ValueError, "schedule"),
    ],
)
def test_bad_arguments_are_named(options, error, name):
    with pytest.raises(error, match=f"minimize_stochastic: `{name}`"):
        minimize_stochastic(noisy, [0.0], **options)


def test_a_bad_oracle_is_named():
    with pytest.raises(ValueError, match=r"`oracle`.*\(1,\), got \(2,\)"):
        minimize_stochastic(lambda x, rng: np.ones(2), [0.0], steps=1)
    with pytest.raises(ValueError, match="`oracle` must give a finite first gradient"):
        minimize_stochastic(lambda x, rng: np.zeros(1), [0.0], steps=1)


# ---------------------------------------------------------------- weight normalization

seeds = st.integers(0, 10**6)


@given(seeds, st.floats(0.01, 10))
def test_the_squared_norm_on_the_sphere_is_wngrads_b(seed, eta):
    """Eq. 4: ‖v_{k+1}‖² = ‖v_k‖² + (η²/‖v_k‖²)‖P∇f‖², which is `rule.next_b`."""
    p = quadratic((1.0, 5.0, 20.0), seed=seed)
    v = np.random.default_rng(seed).standard_normal(3)
    walk = weightnorm.iterate(weightnorm.sphere_step, v, p.grad, eta)
    for now, new in itertools.pairwise(itertools.islice(walk, 10)):
        tangent = weightnorm.projected(p.grad(now / np.linalg.norm(now)), now)
        b = rule.next_b(float(now @ now), float(tangent @ tangent), eta)
        assert float(new @ new) == pytest.approx(b, rel=1e-9)
        assert new @ new >= now @ now * (1 - 1e-12)


@given(seeds, st.floats(0.001, 0.1))
def test_polar_steps_are_gradient_steps_in_v_and_r(seed, eta):
    """Eq. 3 against finite differences of f(r·v/‖v‖)."""
    p = ZOO["softplus"]()
    rng = np.random.default_rng(seed)
    point = weightnorm.Polar(rng.standard_normal(10), float(rng.uniform(0.5, 2)))
    new = weightnorm.polar_step(point, p.grad, eta)

    def f(v, r):
        return p.f(r / np.linalg.norm(v) * v)

    h = 1e-6
    slope = [
        (f(point.v + h * e, point.r) - f(point.v - h * e, point.r)) / (2 * h) for e in np.eye(10)
    ]
    np.testing.assert_allclose(new.v, point.v - eta * np.array(slope), atol=1e-8)
    along = (f(point.v, point.r + h) - f(point.v, point.r - h)) / (2 * h)
    assert new.r == pytest.approx(point.r - eta * along, abs=1e-8)
    assert np.linalg.norm(new.v) >= np.linalg.norm(point.v) * (1 - 1e-12)


def test_the_sphere_settles_whatever_the_rate():
    """The effective rate η/‖v‖² falls until it fits: from 200/L, f stops jumping."""
    p = ZOO["softplus"]()
    walk = weightnorm.iterate(weightnorm.sphere_step, np.ones(10), p.grad, 200 / p.lipschitz)
    points = list(itertools.islice(walk, 300))
    rates = [200 / p.lipschitz / (v @ v) for v in points]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 2 / p.lipschitz
    values = [p.f(v / np.linalg.norm(v)) for v in points[-10:]]
    assert max(values) - min(values) < 1e-3


def test_adagrad_norm_takes_in_the_first_gradient():
    res = minimize_stochastic(
        lambda x, rng: np.ones(1), [0.0], steps=3, b_init=2.0, method="adagrad-norm"
    )
    assert res.b_first**2 == pytest.approx(5)
    assert res.b**2 == pytest.approx(8)


def test_an_oracle_that_raises_midway_keeps_the_last_good_point():
    count = itertools.count()

    def oracle(x, rng):
        if next(count) == 4:
            raise OSError("disk gone")
        return 2 * x

    with pytest.raises(EvaluationError, match=r"OSError after step 3.*disk gone") as info:
        minimize_stochastic(oracle, np.ones(2), steps=10)
    assert info.value.result.nit == 3
    assert np.isfinite(info.value.result.x_mean).all()


def test_f_is_left_alone_unless_it_is_needed():
    calls = []
    minimize_stochastic(noisy, [0.0], steps=100, f=lambda x: calls.append(1) or 0.0)
    assert len(calls) == 2  # at the end: of the last and of the averaged iterate


def test_what_minimize_takes_for_a_gradient_the_oracle_may_give():
    """Lists, narrow types that would overflow, and no complex numbers."""
    listed = minimize_stochastic(lambda x, rng: [2 * x[0], 2 * x[1]], [1.0, 2.0], steps=5)
    arrayed = minimize_stochastic(lambda x, rng: 2 * x, [1.0, 2.0], steps=5)
    assert np.array_equal(listed.x, arrayed.x)
    narrow = minimize_stochastic(lambda x, rng: np.array([100], np.int8), [0.0], steps=3)
    assert narrow.grad_first == narrow.grad_max == 100.0
    assert narrow.x.dtype == np.float64
    with pytest.raises(TypeError, match="minimize_stochastic: `oracle` must return an array of re"):
        minimize_stochastic(lambda x, rng: x * 1j, [1.0], steps=3)


def test_a_b_that_overflows_ends_the_run_at_the_last_good_point():
    """b₁ = 1e-200 under ‖g‖ = 1e100: b would be infinite, and x frozen where the step threw it."""
    res = minimize_stochastic(lambda x, rng: np.full(1, 1e100), [1.0], steps=9, b_init=1e-200)
    assert (res.status, res.nit, res.b) == (Status.NOT_FINITE, 0, 1e-200)
    assert "b was not finite" in res.message
    with pytest.raises(ValueError, match="`oracle` must give a finite first gradient"):
        minimize_stochastic(
            lambda x, rng: np.full(1, 1e100), [1.0], steps=9, b_init=("gradient", 1e250)
        )


def test_an_oracle_may_work_on_its_x_in_place():
    def ours(x, rng):
        x -= 3
        return 2 * x

    def value(x):
        x -= 3
        return x @ x

    plain = minimize_stochastic(lambda x, rng: 2 * (x - 3), [0.0, 1.0], steps=50)
    res = minimize_stochastic(ours, [0.0, 1.0], steps=50, f=value)
    assert np.array_equal(res.x, plain.x)
    assert np.array_equal(res.x_mean, plain.x_mean)
    assert res.fun == float((plain.x - 3) @ (plain.x - 3))


def test_f_may_return_an_array_of_one_element():
    value = lambda x: np.array([x @ x])  # noqa: E731
    res = minimize_stochastic(noisy, [0.0], steps=3, f=value, tol=-1.0)
    assert res.fun == float(res.x @ res.x)
    with pytest.raises(EvaluationError, match="minimize_stochastic: `f` must return one number"):
        minimize_stochastic(noisy, [0.0, 1.0], steps=3, f=lambda x: x)


@pytest.mark.parametrize(("name", "value"), [("b_init", 3.0), ("method", "adagrad-norm")])
def test_a_schedule_goes_with_no_way_to_learn_the_rate(name, value):
    rate = schedules.inverse(1.0)
    with pytest.raises(ValueError, match=f"minimize_stochastic: `{name}` must not be given with"):
        minimize_stochastic(noisy, [0.0], steps=3, schedule=rate, **{name: value})


def test_the_types_admit_what_the_function_admits():
    hints = typing.get_type_hints(minimize_stochastic)
    assert typing.get_args(hints["method"]) == ("wngrad", "adagrad-norm")
    assert "lipschitz" not in str(hints["b_init"])


def test_what_the_docs_refer_to_is_exported():
    from wngrad import batch

    assert {"bounds", "schedules", "weightnorm"} <= set(batch.__all__)
