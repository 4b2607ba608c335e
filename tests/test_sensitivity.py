"""How much a result depends on λ: by hand, and on curves whose truth is known."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import wngrad
from wngrad.lab.report.sensitivity import (
    Estimate,
    best_lam,
    lr_sensitivity,
    recommended_lam,
    t_quantile,
    usable_decades,
    usable_range,
)

GRID = [0.001, 0.01, 0.1, 1.0, 10.0]
NAN, INF = math.nan, math.inf


def test_the_sensitivity_is_that_of_the_hand():
    # min(loss, 2) − 0.5: 1.5, 0.5, 0, 1.5 (diverged), 1.5 (worse than at the start)
    assert lr_sensitivity(GRID, [2.0, 1.0, 0.5, NAN, 7.0], 2.0) == pytest.approx(5.0 / 5)
    assert lr_sensitivity(GRID, [0.3] * 5, 2.0) == 0.0
    assert (
        lr_sensitivity(GRID, [INF] * 5, 2.0) == 0.0
    )  # it never trains: no λ is better than another
    assert lr_sensitivity(GRID, [2.0, 1.0, 0.5, NAN, 7.0], 2.0, best=0.25) == pytest.approx(1.25)


def test_the_sensitivity_of_several_seeds_is_the_mean_of_theirs():
    losses, start = [[2.0, 1.0, 0.5, NAN, 7.0], [0.1, 0.1, 0.1, 0.1, 0.6]], [2.0, 1.0]
    each = [lr_sensitivity(GRID, row, first) for row, first in zip(losses, start, strict=True)]
    assert each == pytest.approx([1.0, 0.1])
    assert lr_sensitivity(GRID, losses, start) == pytest.approx(0.55)


def test_the_best_lambda_is_never_one_at_which_a_seed_diverged():
    assert best_lam(GRID, [5, 4, 3, 2, 1]) == 10.0
    assert best_lam(GRID, [[5, 4, 3, 2, 1], [5, 4, 3, 2, NAN]]) == 1.0
    with pytest.raises(ValueError, match=r"best_lam: `losses` must be finite at some λ"):
        best_lam(GRID, [INF] * 5)


def test_the_usable_range_ends_where_the_line_between_two_lambdas_crosses_the_limit():
    # Best 0, start 1, so the limit is 0.1; it is crossed a tenth of a decade beyond 0.01 and 1.
    found = usable_range(GRID, [1.0, 0.0, 0.0, 0.0, 1.0], 1.0, within=0.1)
    assert (found.low, found.high) == pytest.approx((10**-2.1, 10**0.1))
    assert found.decades == pytest.approx(2.2)
    assert found.middle == pytest.approx(0.1)
    assert (found.open_low, found.open_high) == (False, False)


def test_a_range_that_the_grid_cuts_off_is_said_to_be_open():
    found = usable_range(GRID, [1.0, 1.0, 0.0, 0.0, 0.0], 1.0, within=0.5)
    assert (found.low, found.high) == pytest.approx((10**-1.5, 10.0))
    assert (found.open_low, found.open_high) == (False, True)
    assert usable_decades(GRID, [1.0, 1.0, 0.0, 0.0, 0.0], 1.0).at_least


def test_only_the_range_around_the_best_counts():
    """A second valley, with a hill between, would make the middle a bad λ."""
    found = usable_range(GRID, [0.04, 1.0, 1.0, 0.0, 0.0], 1.0)
    assert found.low > 0.1


def test_measured_from_a_better_rival_no_lambda_may_be_usable():
    assert usable_range(GRID, [0.5] * 5, 1.0, best=0.0) is None
    assert recommended_lam(GRID, [0.5] * 5, 1.0, best=0.0) is None
    assert usable_decades(GRID, [0.5] * 5, 1.0, best=0.0).value == 0.0


@given(
    losses=st.lists(st.integers(0, 192).map(lambda k: k / 64), min_size=5, max_size=5),
    scale=st.sampled_from([0.125, 4.0, 1024.0]),
    shift=st.sampled_from([-8.0, 0.0, 16.0]),
)
def test_neither_the_unit_nor_the_zero_of_the_loss_changes_what_is_usable(losses, scale, shift):
    other = [scale * loss + shift for loss in losses]
    mine, its = usable_range(GRID, losses, 2.0), usable_range(GRID, other, scale * 2.0 + shift)
    assert its.low == pytest.approx(mine.low, rel=1e-6)
    assert its.high == pytest.approx(mine.high, rel=1e-6)


@given(losses=st.lists(st.floats(0, 3) | st.just(NAN), min_size=5, max_size=5))
def test_the_order_of_the_grid_does_not_matter(losses):
    back = GRID[::-1], losses[::-1], 2.0
    assert lr_sensitivity(*back) == pytest.approx(lr_sensitivity(GRID, losses, 2.0))
    assert usable_range(*back) == usable_range(GRID, losses, 2.0)


def test_students_quantiles_are_scipys():
    for freedom in (*range(1, 31), 99, 100):
        for level in (0.5, 0.9, 0.95, 0.99):
            expected = stats.t.ppf((1 + level) / 2, freedom)
            assert t_quantile(level, freedom) == pytest.approx(expected, rel=1e-9)


def test_one_seed_has_no_interval():
    assert usable_decades(GRID, [1, 0, 0, 0, 1], 1.0) == Estimate(
        pytest.approx(2.1), None, None, 1, 0.95, False
    )
    assert str(usable_decades(GRID, [1, 0, 0, 0, 1], 1.0)) == "2.10 [–]"


FINE = 10.0 ** np.arange(-6, 4.01, 0.25)


def valleys(draw, n):
    """n curves, flat between two edges in log λ that differ from seed to seed; each its decades.

    The loss rises by 1 a decade from a floor of 0 and the start is 10, so that 5 % of the way up
    is half a decade beyond each edge, two grid steps: there the line between two λ is exact.
    """
    at, (low, high) = np.log10(FINE), draw(n)
    rise = np.maximum(low[:, None] - at, 0) + np.maximum(at - high[:, None], 0)
    return np.minimum(rise, 10.0), high - low + 1.0


def normal(rng, n):
    return rng.normal(-3, 0.2, n), rng.normal(0, 0.3, n)


def skewed(rng, n):
    return rng.uniform(-3.5, -2.5, n), rng.exponential(0.3, n)


EXPECTED = {normal: 4.0, skewed: 4.3}  # of the decades: the mean distance of the edges, and 1


@pytest.mark.parametrize(("n", "level"), [(2, 0.95), (3, 0.8), (5, 0.95), (10, 0.8)])
def test_the_interval_covers_the_truth_at_its_stated_rate(n, level):
    """4,000 sweeps whose decades are known: within three standard errors of a binomial."""
    rng, trials = np.random.default_rng([n, int(100 * level)]), 4000
    covered = 0
    for _ in range(trials):
        losses, truth = valleys(lambda k: normal(rng, k), n)
        found = usable_decades(FINE, losses, [10.0] * n, level=level)
        assert found.value == pytest.approx(truth.mean(), abs=1e-9)
        covered += found.low <= EXPECTED[normal] <= found.high
    assert abs(covered / trials - level) < 3 * math.sqrt(level * (1 - level) / trials)


@pytest.mark.parametrize("n", [3, 5, 10])
def test_decades_that_are_not_normal_are_covered_almost_as_often(n):
    """Uniform and exponential edges: at least 90 % where 95 % is stated."""
    rng, trials = np.random.default_rng(n), 2000
    covered = 0
    for _ in range(trials):
        losses, _ = valleys(lambda k: skewed(rng, k), n)
        found = usable_decades(FINE, losses, [10.0] * n)
        covered += found.low <= EXPECTED[skewed] <= found.high
    assert covered / trials > 0.90


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: lr_sensitivity([0.1, 0.1], [1, 2], 1),
            r"lr_sensitivity: `lam` must be numbers > 0",
        ),
        (lambda: lr_sensitivity([0, 1], [1, 2], 1), "`lam` must be numbers > 0, each once"),
        (lambda: lr_sensitivity([], [], 1), "`lam` must be"),
        (lambda: best_lam(GRID, [1, 2]), r"`losses` must have one value for each of the 5 λ"),
        (lambda: usable_range(GRID, [1] * 5, [1, 2]), "`start` must be a finite number, or one"),
        (lambda: usable_range(GRID, [1] * 5, NAN), "`start` must be a finite number"),
        (lambda: usable_range(GRID, [1] * 5, 1, best=[1, 2]), "`best` must be a finite number"),
        (lambda: usable_range(GRID, [1] * 5, 1, within=0), "`within` must be between 0 and 1"),
        (lambda: usable_decades(GRID, [1] * 5, 1, level=1), "`level` must be between 0 and 1"),
    ],
)
def test_bad_arguments_are_named_in_the_message(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_the_front_door_has_them():
    assert wngrad.lr_sensitivity is lr_sensitivity
    assert wngrad.usable_decades is usable_decades
    assert wngrad.best_lam is best_lam
    assert wngrad.recommended_lam is recommended_lam


def test_they_load_numpy_and_no_framework():
    code = "import sys, wngrad; wngrad.lr_sensitivity; print({'torch', 'jax'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
