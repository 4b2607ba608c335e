"""Algorithm 1 as a minimizer: its steps, its outcomes, and who may call it."""

from __future__ import annotations

import itertools
import math
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
import torch
from hypothesis import given
from hypothesis import strategies as st

import paper
from conftest import jax_in_float64
from wngrad import EvaluationError, gradient_descent, minimize, scipy_method
from wngrad.batch import Status
from wngrad.batch.minimizer import StartError
from wngrad.problems import ZOO, logistic, quadratic, styblinski_tang

BOWL = quadratic((1.0, 3.0, 10.0))


def bowl(**options):
    return minimize(BOWL.f, BOWL.x0, jac=BOWL.grad, **options)


@pytest.mark.parametrize("b1", [0.5, 5.0, 50.0])
def test_fifty_steps_match_algorithm_1_on_plain_floats(b1):
    res = bowl(b_init=b1, tol=0.0, max_steps=50, trace=True)
    grad = lambda x: [a * xi for a, xi in zip((1.0, 3.0, 10.0), x, strict=True)]  # noqa: E731
    oracle = list(itertools.islice(paper.algorithm_1([1.0] * 3, grad, b1), 50))
    np.testing.assert_allclose(res.trace.b, [b1] + [b for _, b in oracle], rtol=1e-12)
    np.testing.assert_allclose(res.x, oracle[-1][0], rtol=1e-11)


@pytest.mark.parametrize("name", [n for n in ZOO if n != "absolute"])
def test_it_minimizes_the_zoo(name):
    """Every smooth problem, from its standard start and with the defaults, to ‖∇f‖² ≤ 1e-8."""
    problem = ZOO[name]()
    res = minimize(problem.f, problem.x0, jac=problem.grad, tol=1e-8)
    assert res.success
    assert res.sq_norm == pytest.approx(float(problem.grad(res.x) @ problem.grad(res.x)))
    assert res.fun == problem.f(res.x)


def test_ensmallens_sphere():
    """From (−5, 5) to |f| ≤ 1e-3 and |x| ≤ 1e-2."""
    res = minimize(lambda x: float(x @ x), [-5.0, 5.0], jac=lambda x: 2 * x)
    assert abs(res.fun) <= 1e-3
    assert abs(res.x).max() <= 1e-2


def test_ensmallens_styblinski_tang():
    """From (−5, −5) to five times that."""
    problem = styblinski_tang()
    res = minimize(problem.f, [-5.0, -5.0], jac=problem.grad)
    assert abs(res.fun - problem.f_star) <= 5e-3
    assert abs(res.x - problem.x_star).max() <= 5e-2


def test_ensmallens_logistic_regression():
    """Two Gaussian classes at (1, 1, 1) and (9, 9, 9): 99.7 % of train, 99.4 % of test right."""
    rng = np.random.default_rng(0)
    half = 500
    draw = lambda: np.vstack([rng.normal(1, 1, (half, 3)), rng.normal(9, 1, (half, 3))])  # noqa: E731
    y = np.repeat([-1.0, 1.0], half)
    train, test = (np.hstack([draw(), np.ones((2 * half, 1))]) for _ in range(2))

    def grad(w):
        return -(train * y[:, None]).T @ (1 / (1 + np.exp(y * (train @ w)))) / len(y)

    f = lambda w: np.logaddexp(0, -y * (train @ w)).mean()  # noqa: E731
    res = minimize(f, np.zeros(4), jac=grad, tol=1e-6, max_steps=200_000)
    for data, least in ((train, 0.997), (test, 0.994)):
        assert (np.sign(data @ res.x) == y).mean() >= least


@given(
    st.sampled_from([2.0**k for k in (-20, -3, 1, 7, 30)]),
    st.sampled_from(["gradient", ("gradient", 3.0), "lipschitz", ("lipschitz", 4)]),
    st.sampled_from(["quadratic", "logistic", "rosenbrock", "himmelblau", "softplus"]),
)
def test_the_scale_of_f_changes_nothing(scale, b_init, name):
    """f → λf leaves the iterates bitwise unchanged for λ a power of two (Remark 2.2)."""
    p = ZOO[name]()
    one = minimize(p.f, p.x0, jac=p.grad, b_init=b_init, tol=0.0, max_steps=40)
    other = minimize(
        lambda x: scale * p.f(x), p.x0, jac=lambda x: scale * p.grad(x), b_init=b_init, tol=0.0,
        max_steps=40,
    )  # fmt: skip
    assert np.array_equal(one.x, other.x)
    assert other.b == scale * one.b


def test_arrays_come_back_as_the_kind_they_went_in():
    x0 = [3.0, -4.0]
    plain = minimize(lambda x: x @ x, x0, jac=lambda x: 2 * x, max_steps=20, tol=0.0)
    pytorch = minimize(lambda x: x @ x, torch.tensor(x0).double(), max_steps=20, tol=0.0)
    assert isinstance(plain.x, np.ndarray)
    assert isinstance(pytorch.x, torch.Tensor)
    assert not pytorch.x.requires_grad
    np.testing.assert_allclose(pytorch.x.numpy(), plain.x, rtol=1e-12)
    with jax_in_float64():
        res = minimize(lambda x: x @ x, jnp.array(x0), max_steps=20, tol=0.0)
        assert isinstance(res.x, jax.Array)
        np.testing.assert_allclose(np.asarray(res.x), plain.x, rtol=1e-12)


def test_torch_and_jax_keep_shape_and_dtype():
    for x0 in (torch.ones(2, 3), jnp.ones((2, 3), jnp.float32), np.ones((2, 3), np.float32)):
        jac = (lambda x: 2 * x) if isinstance(x0, np.ndarray) else None
        res = minimize(lambda x: (x * x).sum(), x0, jac=jac, tol=1e-6)
        assert res.success
        assert tuple(res.x.shape) == (2, 3)
        assert res.x.dtype == x0.dtype


def test_a_torch_function_with_a_gradient_of_its_own():
    res = minimize(lambda x: (x**2).sum(), torch.ones(3), jac=lambda x: 2 * x, tol=1e-8)
    assert res.success


def test_value_and_gradient_together_are_evaluated_once_a_point():
    calls = []

    def both(x):
        calls.append(1)
        return x @ x, 2 * x

    res = minimize(both, [1.0, 2.0], jac=True)
    assert len(calls) == res.nit + 1 == res.njev == res.nfev


@pytest.mark.parametrize(("scheme", "close"), [("2-point", 1e-5), ("3-point", 1e-8)])
def test_finite_differences_on_request(scheme, close):
    p = ZOO["booth"]()
    res = minimize(p.f, p.x0, jac=scheme, tol=1e-6 if scheme == "2-point" else 1e-12)
    assert res.success
    np.testing.assert_allclose(res.x, p.x_star, atol=1e3 * close)


def test_args_reach_both_functions():
    res = minimize(lambda x, a: a * x @ x, [1.0], jac=lambda x, a: 2 * a * x, args=(3.0,))
    assert res.success


# ---------------------------------------------------------------- outcomes


def test_every_outcome_is_a_value_with_a_sentence():
    assert bowl().status is Status.CONVERGED
    assert bowl(max_steps=3).status is Status.STEP_LIMIT
    assert bowl(max_steps=3).nit == 3
    assert bowl(max_seconds=0.0, tol=0.0).status is Status.TIME_LIMIT
    assert bowl(max_steps=0).nit == 0
    messages = {bowl().message, bowl(max_steps=3).message, bowl(max_seconds=0.0, tol=0.0).message}
    assert len(messages) == 3
    assert not bowl(max_steps=3).success


def test_a_start_at_the_minimum_takes_no_step():
    res = minimize(BOWL.f, np.zeros(3), jac=BOWL.grad)
    assert (res.success, res.nit, res.fun) == (True, 0, 0.0)


def test_what_is_not_finite_keeps_the_last_good_point():
    """log x, which the first step leaves at once for negative numbers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        res = minimize(
            lambda x: (float(np.log(x).sum()), 1 / x), np.array([0.1]), jac=True, b_init=1.0
        )
    assert res.status is Status.NOT_FINITE
    assert res.x == [0.1]
    assert np.isfinite(res.fun)
    root = minimize(lambda x: x.sqrt().sum(), torch.tensor([0.1]), b_init=0.01)
    assert root.status is Status.NOT_FINITE
    assert root.x.tolist() == pytest.approx([0.1])


def test_a_run_that_no_longer_moves_says_so():
    """b₁ = 10¹⁶: the first step is already below the last digit of x."""
    res = bowl(b_init=1e18, tol=1e-30)
    assert res.status is Status.STALLED
    assert np.array_equal(res.x, BOWL.x0)
    assert res.nit <= 64


def test_a_run_that_goes_to_and_fro_is_not_stalled():
    """2/L on a parabola: x, −x, x, … is where it was before every other step."""
    res = gradient_descent(lambda x: x @ x, [1.0], step=1.0, jac=lambda x: 2 * x, max_steps=200)
    assert (res.status, res.nit) == (Status.STEP_LIMIT, 200)


def test_a_function_that_raises_midway_keeps_the_last_good_point():
    count = itertools.count()

    def grad(x):
        if next(count) == 5:
            raise FloatingPointError("half-way")
        return BOWL.grad(x)

    with pytest.raises(EvaluationError, match=r"FloatingPointError after step 4.*half-way") as info:
        minimize(BOWL.f, BOWL.x0, jac=grad)
    assert info.value.result.status is Status.RAISED
    assert np.array_equal(info.value.result.x, bowl(max_steps=4).x)
    assert isinstance(info.value.__cause__, FloatingPointError)


@pytest.mark.parametrize("at", ["gradient", "f"])
def test_a_function_that_runs_out_of_data_is_named(at):
    """A StopIteration of its own is not the end of ours."""
    batches = iter([1.0] * 5)

    def value(x):
        return BOWL.f(x) * (next(batches) if at == "f" else 1.0)

    def grad(x):
        return BOWL.grad(x) * (next(batches) if at == "gradient" else 1.0)

    with pytest.raises(
        EvaluationError, match=r"^minimize: StopIteration after step 4 \(\)"
    ) as info:
        minimize(value, BOWL.x0, jac=grad, trace=True)
    assert isinstance(info.value.__cause__, StopIteration)
    assert info.value.result.status is Status.RAISED
    assert len(info.value.result.trace) == 5


def test_callbacks_by_scipys_convention():
    seen = []
    res = bowl(callback=lambda xk: seen.append(xk.copy()))
    assert len(seen) == res.nit
    assert np.array_equal(seen[-1], res.x)

    def stop(intermediate_result):
        assert intermediate_result.fun == BOWL.f(intermediate_result.x)
        if intermediate_result.nit == 3:
            raise StopIteration

    for callback in (stop, lambda xk: len(seen) > 0):
        res = bowl(callback=callback)
        assert res.status is Status.STOPPED
    assert bowl(callback=stop).nit == 3
    with pytest.raises(EvaluationError, match="ZeroDivisionError"):
        bowl(callback=lambda xk: 1 / 0)


def test_progress_is_a_line_now_and_then(capsys, monkeypatch):
    clock = itertools.count(0.0, 0.25)
    monkeypatch.setattr("wngrad.batch.observer.time.monotonic", lambda: next(clock))
    bowl(progress=True, max_steps=20, tol=0.0)
    lines = capsys.readouterr().err.splitlines()
    assert 3 <= len(lines) <= 6
    assert all("minimize: step" in line and "‖∇f‖²" in line for line in lines)


def test_progress_ends_its_line_on_a_terminal(capsys, monkeypatch):
    clock = itertools.count()
    monkeypatch.setattr("wngrad.batch.observer.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    bowl(progress=True, max_steps=3, tol=0.0)
    assert capsys.readouterr().err.endswith(" s\r\n")


def test_nothing_grows_with_the_steps_unless_a_trace_is_asked_for():
    import tracemalloc

    def peak(steps, **options):
        tracemalloc.start()
        slope = minimize(np.sum, np.zeros(3), jac=np.ones_like, max_steps=steps, **options)
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert slope.nit == steps  # it never ends by itself
        return most

    few = peak(10)
    assert peak(20_000) < few + 20_000  # a byte a step: to keep anything takes eight, or more
    assert peak(20_000, trace=True) > few + 160_000
    assert bowl(max_steps=3).trace is None


# ---------------------------------------------------------------- comparators and scipy


def test_constant_steps_converge_up_to_one_over_l_and_may_not_from_two():
    """Lemma 2.1, on a quadratic: δ ≤ 1 converges; 2/L oscillates for ever, beyond it diverges."""
    for delta in (0.1, 0.5, 1.0):
        res = gradient_descent(
            BOWL.f, BOWL.x0, step=delta / BOWL.lipschitz, jac=BOWL.grad, tol=1e-8
        )
        assert res.success
        assert all(c.holds for c in res.certify(lipschitz=10.0, f_star=0.0).claims)
    oscillating = gradient_descent(BOWL.f, BOWL.x0, step=0.2, jac=BOWL.grad, max_steps=1000)
    assert oscillating.sq_norm == pytest.approx(100.0)
    with np.errstate(over="ignore"):
        beyond = gradient_descent(BOWL.f, BOWL.x0, step=0.21, jac=BOWL.grad)
    assert beyond.status is Status.NOT_FINITE


def test_adagrad_norm_takes_in_the_gradient_before_the_first_step():
    """b_j² = b_0² + ‖g_1‖² + … + ‖g_j‖², and the step at x_j is divided by b_j."""
    res = bowl(method="adagrad-norm", b_init=2.0, tol=0.0, max_steps=30, trace=True)
    np.testing.assert_allclose(res.trace.b**2, 4.0 + res.trace.sq_norm.cumsum())
    one = bowl(method="adagrad-norm", b_init=2.0, tol=0.0, max_steps=1)
    np.testing.assert_allclose(one.x, BOWL.x0 - BOWL.grad(BOWL.x0) / math.sqrt(4 + 110))


@pytest.mark.parametrize("jac", [BOWL.grad, True])
def test_scipy_calls_it_like_its_own(jac):
    f = BOWL.f if jac is not True else (lambda x: (BOWL.f(x), BOWL.grad(x)))
    res = scipy.optimize.minimize(
        f, BOWL.x0, jac=jac, method=scipy_method, tol=1e-12, options={"maxiter": 5000}
    )
    assert res.success
    assert isinstance(res, scipy.optimize.OptimizeResult)
    np.testing.assert_allclose(res.x, 0, atol=1e-5)
    short = scipy.optimize.minimize(
        f, BOWL.x0, jac=jac, method=scipy_method, options={"maxiter": 2}
    )
    assert (short.nit, short.success, short.status) == (2, False, 1)


def test_scipys_constraints_are_refused():
    with pytest.raises(ValueError, match="`bounds` must not be given"):
        scipy.optimize.minimize(
            BOWL.f, BOWL.x0, jac=BOWL.grad, method=scipy_method, bounds=[(0, 1)] * 3
        )


# ---------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"jac": None}, ValueError, r"`jac`.*'3-point'.*got None"),
        ({"jac": "exact"}, ValueError, "`jac`.*got 'exact'"),
        ({"jac": lambda x: np.ones(2)}, ValueError, r"`jac`.*\(3,\), got \(2,\)"),
        ({"b_init": 0.0}, ValueError, "`b_init`.*got 0.0"),
        ({"b_init": -1.0}, ValueError, "`b_init`.*got -1.0"),
        ({"b_init": math.nan}, ValueError, "`b_init`.*got nan"),
        ({"b_init": "grad"}, ValueError, "`b_init`.*got 'grad'"),
        ({"b_init": ("lipschitz", 1)}, ValueError, "`b_init`.*R >= 2"),
        ({"b_init": ("gradient", 0)}, ValueError, "`b_init`.*C > 0"),
        ({"b_init": [1, 2, 3]}, ValueError, "`b_init`"),
        ({"b_init": ("number", 2.5)}, ValueError, "`b_init`"),
        ({"b_init": ("lipschitz", 2.5)}, ValueError, "`b_init`"),
        ({"jac": lambda x: np.ones((3, 1))}, ValueError, "`jac`"),
        ({"jac": lambda x: None}, (TypeError, ValueError), "`jac` must return an array"),
        ({"jac": True}, ValueError, r"`f` must return \(value, gradient\)"),
        ({"callback": 3}, TypeError, "`callback` must be a function"),
        ({"method": "newton"}, ValueError, "`method`.*got 'newton'"),
        ({"tol": -1.0}, ValueError, "`tol`.*got -1.0"),
        ({"tol": math.nan}, ValueError, "`tol`.*got nan"),
        ({"max_steps": -1}, ValueError, "`max_steps`.*got -1"),
        ({"max_steps": 1.5}, ValueError, "`max_steps`.*got 1.5"),
        ({"max_seconds": -1}, ValueError, "`max_seconds`.*got -1"),
    ],
)
def test_bad_arguments_are_named(options, error, match):
    with pytest.raises(error, match=match):
        minimize(BOWL.f, BOWL.x0, **{"jac": BOWL.grad, **options})


def test_bad_starts_are_named():
    with pytest.raises(ValueError, match="`x0` must be finite"):
        minimize(BOWL.f, [math.nan, 0, 0], jac=BOWL.grad)
    for bad in (["a"], np.ones(3, np.float16), torch.ones(3, dtype=torch.bfloat16), [1j]):
        with pytest.raises(TypeError, match="`x0` must hold float32 or float64 numbers"):
            minimize(BOWL.f, bad, jac=BOWL.grad)
    with pytest.raises(TypeError, match="`f` must be a function"):
        minimize(3, [1.0], jac=BOWL.grad)
    with pytest.raises(ValueError, match="must be finite at `x0`"):
        minimize(lambda x: math.inf, [1.0], jac=lambda x: x)
    with pytest.raises(ValueError, match="`b_init` needs a finite gradient that changes"):
        minimize(lambda x: x.sum(), [1.0], jac=lambda x: np.ones(1), b_init="lipschitz")
    with pytest.raises(ValueError, match="`step` must be > 0"):
        gradient_descent(BOWL.f, BOWL.x0, step=0.0, jac=BOWL.grad)


def test_integers_are_taken_as_numbers():
    assert minimize(BOWL.f, [1, 2, 3], jac=BOWL.grad).success


def test_the_sampled_lipschitz_start_is_seeded_and_at_most_l():
    first = [bowl(b_init="lipschitz", seed=s, max_steps=0).start.b for s in (0, 0, 1)]
    assert first[0] == first[1] != first[2]
    assert max(first) <= BOWL.lipschitz * (1 + 1e-9)
    more = bowl(b_init=("lipschitz", 20), max_steps=0)
    assert more.start.b >= first[0]
    assert more.njev == 21


def test_logistic_with_and_without_l2_share_their_data():
    assert logistic(l2=0.1).f(np.zeros(5)) == logistic().f(np.zeros(5))


# ---------------------------------------------------------------- what review found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("points", [2, 5])
def test_the_sampled_start_works_on_a_line(seed, points):
    res = minimize(
        lambda x: float(x @ x), [1.3], jac=lambda x: 2 * x, b_init=("lipschitz", points), seed=seed
    )
    assert res.start.b == pytest.approx(2.0)


def test_what_scipy_takes_is_taken():
    """Lists for gradients, arrays of one element for values, NumPy scalars, args as one value."""
    assert minimize(lambda x: x @ x, [1.0, 2.0], jac=lambda x: [2 * x[0], 2 * x[1]]).success
    assert minimize(lambda x: np.array([x @ x]), [1.0], jac=lambda x: 2 * x).success
    assert minimize(lambda x, a: a * x @ x, [1.0], jac=lambda x, a: 2 * a * x, args=3.0).success
    assert bowl(max_steps=np.int64(500), tol=np.float32(1e-3), b_init=np.float64(20)).success
    assert bowl(callback=lambda xk: np.True_).status is Status.STOPPED


def test_a_gradient_that_changes_its_shape_is_no_success():
    count = itertools.count()
    with pytest.raises(EvaluationError, match=r"returned the shape \(1,\)"):
        minimize(BOWL.f, BOWL.x0, jac=lambda x: BOWL.grad(x) if next(count) < 4 else np.zeros(1))


def test_an_underflowing_gradient_is_no_success():
    with pytest.raises(ValueError, match="`f` must be scaled up"):
        minimize(lambda x: 1e-170 * x @ x, [1.0], jac=lambda x: 2e-170 * x, tol=0.0)


def test_f_not_finite_at_the_end_is_no_success():
    res = minimize(lambda x: math.nan if abs(x[0]) < 0.9 else 1.0, [1.0], jac=lambda x: 2 * x)
    assert res.status is Status.NOT_FINITE


def test_b_that_overflows_ends_the_run_at_the_last_good_point():
    """b₁ = 1e-150: b would be infinite, and freeze x where the first step threw it."""
    res = minimize(lambda x: x @ x, [1e3], jac=lambda x: 2 * x, b_init=1e-150)
    assert res.status is Status.NOT_FINITE
    assert res.x == [1e3]


def test_large_finite_starts_are_finite():
    res = minimize(lambda x: abs(x).sum(), [1e160], jac=np.sign, max_steps=3)
    assert res.nit == 3


def test_f_that_raises_only_at_the_end_keeps_the_point():
    calls = itertools.count()

    def f(x):
        if next(calls):
            raise RuntimeError("no licence")
        return BOWL.f(x)

    with pytest.raises(EvaluationError, match="no licence") as info:
        minimize(f, BOWL.x0, jac=BOWL.grad)
    assert info.value.result.sq_norm <= 1e-10


def test_an_interrupt_carries_the_result():
    count = itertools.count()

    def grad(x):
        if next(count) == 5:
            raise KeyboardInterrupt
        return BOWL.grad(x)

    with pytest.raises(KeyboardInterrupt) as info:
        minimize(BOWL.f, BOWL.x0, jac=grad)
    assert info.value.result.nit == 4


def test_nobody_can_write_into_the_run():
    start = np.ones(3)

    def scribble(x):
        value = BOWL.f(x)
        x[:] = 7.0
        return value

    minimize(scribble, start, jac=BOWL.grad, max_steps=0)
    assert (start == 1).all()

    def vandal(xk):
        xk[:] = 100.0

    assert np.array_equal(bowl(callback=vandal).x, bowl().x)


def test_a_gradient_that_reuses_its_memory_has_true_slopes():
    out = np.empty(3)

    def grad(x):
        return np.multiply((1.0, 3.0, 10.0), x, out=out)

    reused = minimize(BOWL.f, BOWL.x0, jac=grad, trace=True, max_steps=50)
    np.testing.assert_array_equal(reused.trace.slope, bowl(trace=True, max_steps=50).trace.slope)
    sampled = minimize(BOWL.f, BOWL.x0, jac=grad, b_init="lipschitz", max_steps=0)
    assert sampled.start.b == bowl(b_init="lipschitz", max_steps=0).start.b


def test_no_autograd_graph_grows_with_the_steps():
    scale = torch.ones(2, requires_grad=True)
    res = minimize(lambda x: (x * x).sum(), torch.ones(2), jac=lambda x: 2 * x * scale)
    assert not res.x.requires_grad
    with torch.inference_mode():
        assert minimize(lambda x: (x * x).sum(), torch.ones(2), tol=1e-8).success


def test_evaluations_are_counted():
    calls = {"f": 0, "g": 0}

    def f(x):
        calls["f"] += 1
        return BOWL.f(x)

    def grad(x):
        calls["g"] += 1
        return BOWL.grad(x)

    res = minimize(f, BOWL.x0, jac=grad)
    assert (res.nfev, res.njev) == (calls["f"], calls["g"])
    calls["f"] = 0
    res = minimize(f, BOWL.x0, jac="3-point", max_steps=5)
    assert res.nfev == calls["f"]


def test_the_evaluation_that_is_not_finite_is_counted():
    calls = []

    def grad(x):
        calls.append(1)
        return 2 * x if len(calls) < 4 else math.nan * x

    res = minimize(lambda x: x @ x, [1.0, 2.0], jac=grad)
    assert res.status is Status.NOT_FINITE
    assert (res.nit, res.njev) == (2, 4) == (2, len(calls))


def test_a_frozen_run_is_stalled_at_its_limit_too():
    assert bowl(b_init=1e18, tol=1e-30, max_steps=5).status is Status.STALLED


def test_scipys_options_are_translated_and_never_guessed():
    options = {"gtol": 1e-3}
    res = scipy.optimize.minimize(
        BOWL.f, BOWL.x0, jac=BOWL.grad, method=scipy_method, options=options
    )
    assert 1e-7 < res.sq_norm <= 1e-6
    for bad, match in (
        ({"gtol": 1e-3, "tol": 1e-3}, "`gtol` or `tol`"),
        ({"maxiter": 3, "max_steps": 3}, "`maxiter` or `max_steps`"),
        ({"newton": 1}, "`options`.*newton"),
    ):
        with pytest.raises((ValueError, TypeError), match=match):
            scipy_method(BOWL.f, BOWL.x0, jac=BOWL.grad, **bad)


# ---------------------------------------------------------------- types of the gradient


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "uint8", "float16"])
def test_a_gradient_of_a_narrow_type_is_widened_before_it_is_squared(dtype):
    """200² is 64 in int8, and 70,000² overflows int32."""
    size = {"bool": 1, "int8": 100, "uint8": 200, "int32": 70_000, "float16": 60_000}[dtype]
    narrow = lambda x: np.array([size, 0]).astype(dtype)  # noqa: E731
    res = minimize(lambda x: float(size * x[0]), np.zeros(2), jac=narrow, max_steps=2)
    assert res.start.sq_norm == size**2
    assert res.jac.dtype == res.x.dtype == np.float64
    tensor = minimize(
        lambda x: float(size * x[0]), torch.zeros(2),
        jac=lambda x: torch.tensor([size, 0]).to(getattr(torch, dtype)), max_steps=2,
    )  # fmt: skip
    assert tensor.start.sq_norm == size**2
    assert tensor.x.dtype == torch.float32


def test_a_gradient_may_change_its_type_on_the_way():
    counts = itertools.count()
    forms = [list, tuple, lambda g: g.astype(np.float32), lambda g: g.astype(object)]
    res = minimize(BOWL.f, BOWL.x0, jac=lambda x: forms[next(counts) % 4](BOWL.grad(x)), tol=1e-8)
    assert res.success
    assert res.x.dtype == np.float64


@pytest.mark.parametrize("array", [torch.ones, jnp.ones])
def test_a_gradient_may_be_a_list_or_an_array_of_numpys(array):
    for form in (np.asarray, np.ravel, lambda g: np.asarray(g).tolist()):
        res = minimize(lambda x: (x * x).sum(), array((2, 3)), jac=lambda x, form=form: form(2 * x))
        assert res.success
        assert type(res.jac) is type(res.x)


def test_the_type_of_x_survives_a_wider_gradient():
    x0 = np.ones(3, np.float32)
    res = minimize(BOWL.f, x0, jac=lambda x: BOWL.grad(x).astype(np.float64), tol=1e-4)
    assert res.success
    assert res.x.dtype == np.float32


def test_a_squared_norm_beyond_float32_is_still_a_number():
    for x0 in (np.ones(1, np.float32), torch.ones(1)):
        res = minimize(lambda x: 0.0, x0, jac=lambda x: 1e25 * x, max_steps=0)
        assert res.start.sq_norm == pytest.approx(1e50, rel=1e-6)


@pytest.mark.parametrize("x0", [np.ones(2), torch.ones(2), jnp.ones(2)])
def test_a_complex_gradient_is_refused(x0):
    with pytest.raises(TypeError, match="minimize: `jac` must return an array of real numbers"):
        minimize(lambda x: 1.0, x0, jac=lambda x: x * 1j)
    with pytest.raises(TypeError, match="minimize: `jac` must return an array of real numbers"):
        minimize(lambda x: 1.0, x0, jac=lambda x: [1j, 2.0])


# ---------------------------------------------------------------- as SciPy's methods behave


def by_scipy(f=BOWL.f, x0=BOWL.x0, jac=BOWL.grad, **rest):
    return scipy.optimize.minimize(f, x0, jac=jac, method=scipy_method, **rest)


def test_scipy_gets_the_best_point_of_a_run_that_ended_early():
    """Rosenbrock from b₁ = 1: the first step throws x far away."""
    p = ZOO["rosenbrock"]()
    seen = [p.f(p.x0)]
    with np.errstate(over="ignore"):
        res = by_scipy(
            p.f, p.x0, p.grad, callback=lambda x: seen.append(p.f(x)),
            options={"maxiter": 5, "b_init": 1.0},
        )  # fmt: skip
    assert max(seen) > 10 * seen[0]
    assert not res.success
    assert res.fun == min(seen) == p.f(res.x)
    assert np.array_equal(res.jac, p.grad(res.x))
    assert res.sq_norm == pytest.approx(float(res.jac @ res.jac))


def test_scipy_gets_no_success_at_a_point_worse_than_the_first():
    """x⁴ − x² with a high plateau beyond 3, where the first step lands."""
    f = lambda x: float(x[0] ** 4 - x[0] ** 2) if abs(x[0]) < 3 else 100.0  # noqa: E731
    jac = lambda x: 4 * x**3 - 2 * x if abs(x[0]) < 3 else 0 * x  # noqa: E731
    assert minimize(f, [1.0], jac=jac, b_init=0.1).fun == 100.0
    res = by_scipy(f, [1.0], jac, options={"b_init": 0.1})
    assert (res.fun, res.x, res.success) == (0.0, [1.0], False)
    assert "worse than x0" in res.message


@pytest.mark.parametrize("jac", [None, "2-point", "3-point", "cs"])
def test_scipy_may_leave_out_the_gradient(jac):
    booth = lambda x: (x[0] + 2 * x[1] - 7) ** 2 + (2 * x[0] + x[1] - 5) ** 2  # noqa: E731
    for res in (by_scipy(booth, np.zeros(2), jac), scipy_method(booth, np.zeros(2), jac=jac)):
        assert res.success
        np.testing.assert_allclose(res.x, [1.0, 3.0], atol=1e-4)


def test_complex_steps_are_exact_to_the_last_digits():
    f = lambda x: (np.exp(x) * np.sin(x)).sum()  # noqa: E731
    x0 = np.array([[0.3, 1.0], [2.0, -1.0]])
    res = minimize(f, x0, jac="cs", max_steps=0)
    np.testing.assert_allclose(res.jac, np.exp(x0) * (np.sin(x0) + np.cos(x0)), rtol=1e-14)
    with pytest.raises(ValueError, match="`f` must return one complex number at complex x"):
        minimize(lambda x: float(abs(x) @ abs(x)), np.ones(2), jac="cs")
    with pytest.raises(ValueError, match="'cs' for complex steps"):
        minimize(lambda x: (x * x).sum(), torch.ones(2), jac="cs")


def test_scipys_maxiter_may_be_a_float_and_is_refused_by_its_name():
    assert by_scipy(options={"maxiter": 2e0}).nit == 2
    for bad in (2.5, -1, math.nan, "7"):
        with pytest.raises(ValueError, match="scipy_method: `maxiter` must be an integer >= 0"):
            by_scipy(options={"maxiter": bad})
    for bad in (-1e-3, math.nan):
        with pytest.raises(ValueError, match="scipy_method: `gtol` must be >= 0"):
            by_scipy(options={"gtol": bad})


def test_scipys_disp_warns_of_a_run_that_did_not_converge(capsys):
    with pytest.warns(scipy.optimize.OptimizeWarning, match="limit on steps"):
        by_scipy(options={"maxiter": 2, "disp": True})
    assert "Iterations: 2" in capsys.readouterr().out
    assert by_scipy(options={"disp": True}).success
    assert "The tolerance was reached." in capsys.readouterr().out


def test_scipys_callbacks_stop_a_run_with_scipys_status():
    def stop(intermediate_result):
        assert (
            intermediate_result["fun"] == intermediate_result.fun == BOWL.f(intermediate_result.x)
        )
        raise StopIteration

    ours, theirs = by_scipy(callback=stop), scipy.optimize.minimize(
        BOWL.f, BOWL.x0, jac=BOWL.grad, method="BFGS", callback=stop
    )  # fmt: skip
    assert (ours.status, ours.message, ours.success) == (theirs.status, theirs.message, False)
    assert ours.status == 99
    assert by_scipy(callback=lambda xk: True).status == 99
    with pytest.raises(TypeError, match="scipy_method: `callback` must be a function"):
        by_scipy(callback=3)


def test_second_derivatives_are_not_used_and_scipy_says_so():
    for name in ("hess", "hessp"):
        with pytest.warns(RuntimeWarning, match=f"`{name}` is not used"):
            assert by_scipy(**{name: lambda x, *p: np.eye(3)}).success


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_scipy_gets_a_result_where_f_is_none_at_the_start(value):
    res = by_scipy(lambda x: value)
    assert (res.success, res.nit, res.status) == (False, 0, int(Status.NOT_FINITE))
    assert np.array_equal(res.x, BOWL.x0)
    assert not math.isfinite(res.fun)
    assert "must be finite at `x0`" in res.message


def in_place(x):
    """‖x − 1‖², worked out in the memory of x, as scipy allows."""
    x -= 1
    return x @ x, 2 * x


@pytest.mark.parametrize("array", [np.asarray, torch.tensor])
def test_a_function_may_work_on_its_x_in_place(array):
    x0 = array([0.0, 3.0])
    res = minimize(in_place, x0, jac=True)
    assert res.success
    assert res.x.tolist() == pytest.approx([1.0, 1.0], abs=1e-4)
    assert x0.tolist() == [0.0, 3.0]
    apart = minimize(lambda x: in_place(x)[0], x0, jac=lambda x: in_place(x)[1])
    assert apart.x.tolist() == res.x.tolist()
    assert apart.fun == res.fun


# ---------------------------------------------------------------- what a second review found


def test_complex_steps_of_a_number_are_those_of_an_array():
    res = minimize(lambda x: (x - 2) ** 2, 5.0, jac="cs")
    assert res.success
    assert res.x == pytest.approx(2.0, abs=1e-4)
    assert res.x.shape == ()


@pytest.mark.parametrize("size", [1e20, 1e-24])
def test_float32_gradients_of_every_kind_are_squared_in_float64(size):
    for x0 in (np.ones(3, np.float32), torch.ones(3), jnp.ones(3)):
        jac = (lambda x: np.full(3, size, np.float32)) if isinstance(x0, np.ndarray) else None
        res = minimize(lambda x: size * x.sum(), x0, jac=jac, tol=0.0, max_steps=2)
        assert res.start.sq_norm == pytest.approx(3 * size**2, rel=1e-6)
        assert res.status is Status.STEP_LIMIT


@pytest.mark.parametrize("x0", [torch.tensor([5.0]), jnp.asarray([5.0])])
def test_autograd_takes_an_array_of_one_element_for_f(x0):
    assert minimize(lambda x: (x - 2.0) ** 2, x0, tol=1e-6).x.tolist() == pytest.approx(
        [2], abs=1e-3
    )


def test_the_first_b_is_what_was_asked_for_where_the_gradient_is_zero():
    assert minimize(BOWL.f, np.zeros(3), jac=BOWL.grad, b_init=5.0).b == 5.0
    assert gradient_descent(BOWL.f, np.zeros(3), jac=BOWL.grad, step=0.25).b == 4.0
    for b_init in ("gradient", "lipschitz"):
        assert minimize(BOWL.f, np.zeros(3), jac=BOWL.grad, b_init=b_init).b == 1.0


def test_gradient_descent_names_its_own_arguments():
    for name in ("b_init", "method"):
        with pytest.raises(TypeError, match=f"gradient_descent: `{name}` must not be given"):
            gradient_descent(BOWL.f, BOWL.x0, jac=BOWL.grad, step=0.1, **{name: 3.0})
    with pytest.raises(ValueError, match=r"gradient_descent: `step` .*must be > 0.*got 1e-310"):
        gradient_descent(BOWL.f, BOWL.x0, jac=BOWL.grad, step=1e-310)


def test_errors_go_from_one_process_to_another():
    def fail(xk):
        raise OSError("disk gone")

    with pytest.raises(EvaluationError) as info:
        bowl(callback=fail)
    copy = pickle.loads(pickle.dumps(info.value))
    assert str(copy) == str(info.value)
    assert np.array_equal(copy.result.x, info.value.result.x)
    with pytest.raises(StartError) as info:
        minimize(lambda x: math.nan, BOWL.x0, jac=BOWL.grad)
    copy = pickle.loads(pickle.dumps(info.value))
    assert str(copy) == str(info.value)
    assert np.array_equal(copy.point.x, BOWL.x0)


def test_a_run_whose_f_is_nan_at_its_last_point_says_so():
    """f is evaluated at the ends alone: nobody knows which point is the last good one."""
    f = lambda x: float(x @ x) if x[0] > 0.9 else math.nan  # noqa: E731
    res = minimize(f, [1.0, 2.0], jac=lambda x: 2 * x, b_init=20.0, max_steps=50)
    assert res.status is Status.NOT_FINITE
    assert math.isnan(res.fun)
    assert res.message == "f is not finite at x, though ∇f and b are."
    cert = res.certify(lipschitz=2.0, f_star=0.0)
    assert not any("f(x_k)" in text for text in cert.verified)
    assert any("f(x)" in text for text in cert.not_claimed)
    assert any("below f*" in text for text in res.certify(lipschitz=2.0, f_star=9.0).refuted)
    traced = minimize(f, [1.0, 2.0], jac=lambda x: 2 * x, b_init=20.0, trace=True)
    assert "x is the last good one" in traced.message
    assert math.isfinite(traced.fun)
