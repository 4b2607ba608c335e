"""The theory, checked: bounds by hand, certificates on thousands of runs, and its slips."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wngrad import gradient_descent, minimize, minimize_stochastic
from wngrad.batch import Claim, bounds
from wngrad.cli import certify_figure
from wngrad.problems import (
    ZOO,
    Problem,
    absolute,
    geman_mcclure,
    huber,
    least_squares,
    logistic,
    quadratic,
    softplus,
)

# ---------------------------------------------------------------- bounds, by hand


def test_lemma_2_1_by_hand():
    assert bounds.lemma_2_1_steps(lipschitz=4, gap=3, delta=0.5, tol=0.1) == pytest.approx(480)


def test_theorem_2_3_by_hand_in_both_cases():
    case_1 = bounds.theorem_2_3_steps(lipschitz=2, gap=3, b1=4, grad_norm=9, tol=0.5)
    assert case_1 == pytest.approx(2 * 3 * (4 + 24) / 0.5)
    case_2 = bounds.theorem_2_3_steps(lipschitz=2, gap=3, b1=1, grad_norm=1, tol=0.5)
    reach = 3 + (3 / 16 + 5 / (8 * 0.5)) * 2
    assert case_2 == pytest.approx(1 + 4 * 0.5 / 0.5 + 16 * reach**2 / 0.5)


@given(st.floats(0.1, 10), st.floats(0, 10), st.floats(0.01, 100), st.integers(2, 1000))
def test_theorem_2_3_reads_both_ways(lipschitz, gap, b1, points):
    """ε after T points, and the ε that T points give, are inverse to each other."""
    known = {"lipschitz": lipschitz, "gap": gap + 0.1, "b1": b1, "grad_norm": 0.0}
    tol = bounds.theorem_2_3_sq_norm(**known, points=points)
    assert bounds.theorem_2_3_steps(**known, tol=tol) == pytest.approx(points)


def test_the_lemmas_by_hand():
    assert bounds.lemma_2_4_points(lipschitz=3, b1=1, tol=0.5) == 13
    assert bounds.lemma_2_4_points(lipschitz=3, b1=5, tol=0.5) == 1
    assert bounds.lemma_2_5_b(b_k0=2, gap_k0=3) == 26
    assert bounds.lemma_2_5_f(f1=1, lipschitz=4, b1=2, grad_norm=1) == 5
    assert bounds.lemma_2_6_b(lipschitz=4, b1=2, grad_norm=1) == 28
    assert bounds.lemma_3_3_b(grad_floor=2, k=9) == 6


def test_theorem_3_1_by_hand():
    gap = bounds.theorem_3_1_gap(grad_bound=2, grad_floor=1, diameter=3, b1=4, distance=5, k=4)
    assert gap == pytest.approx(4 * 11 / 2 + 4 * 25 / 8)


@pytest.mark.parametrize(
    ("bound", "known", "name"),
    [
        (bounds.lemma_2_1_steps, {"lipschitz": 1, "gap": 1, "delta": 1.5, "tol": 1}, "delta"),
        (bounds.lemma_2_1_steps, {"lipschitz": 1, "gap": -1, "delta": 1, "tol": 1}, "gap"),
        (
            bounds.theorem_2_3_steps,
            {"lipschitz": 2, "gap": 1, "b1": 1, "grad_norm": 1.5, "tol": 1},
            "b1",
        ),
        (
            bounds.theorem_2_3_steps,
            {"lipschitz": 0, "gap": 1, "b1": 1, "grad_norm": 1, "tol": 1},
            "lipschitz",
        ),
        (bounds.lemma_2_6_b, {"lipschitz": 2, "b1": 1, "grad_norm": math.nan}, "b1"),
        (
            bounds.theorem_3_1_gap,
            {"grad_bound": 1, "grad_floor": 2, "diameter": 1, "b1": 1, "distance": 1, "k": 1},
            "grad_floor",
        ),
    ],
)
def test_a_hypothesis_that_fails_is_named(bound, known, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        bound(**known)


# ---------------------------------------------------------------- certificates on random runs

seeds = st.integers(0, 10**6)


def drawn(family: str, seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(3, 20)), int(rng.integers(1, 6))
    if family == "quadratic":
        return quadratic(10 ** rng.uniform(-3, 3, columns), seed=seed)
    make = {
        "least-squares": least_squares,
        "huber": huber,
        "softplus": softplus,
        "logistic": logistic,
        "geman-mcclure": geman_mcclure,
    }[family]
    return make(rows, columns, seed=seed)


FAMILIES = ("quadratic", "least-squares", "huber", "softplus", "logistic", "geman-mcclure")


def claims_hold(family, seed, log_b1, log_far, from_gradient):
    problem = drawn(family, seed)
    rng = np.random.default_rng(seed + 1)
    x0 = problem.x0 + 10**log_far * rng.standard_normal(problem.x0.shape)
    g = problem.grad(x0)
    assume(g @ g > 0 or not g.any())  # A square that underflows is refused, with the way out.
    b1 = "gradient" if from_gradient else 10**log_b1 * problem.lipschitz
    res = minimize(problem.f, x0, jac=problem.grad, b_init=b1, tol=1e-6, max_steps=150, trace=True)
    cert = res.certify(lipschitz=problem.lipschitz, f_star=problem.f_star)
    assert cert.claims
    assert all(claim.holds for claim in cert.claims), str(cert)
    assert cert.holds, str(cert)


# A family, a seed, the decades of b₁/L and of the distance, and whether b₁ is the gradient's norm.
RUNS = (st.sampled_from(FAMILIES), seeds, st.floats(-3, 3), st.floats(-2, 3), st.booleans())


@given(*RUNS)
@settings(max_examples=400)
def test_every_claim_whose_hypotheses_hold_holds(family, seed, log_b1, log_far, from_gradient):
    """400 random problems, convex and not, starts, and b₁ over six decades of L, in float64."""
    claims_hold(family, seed, log_b1, log_far, from_gradient)


@pytest.mark.faults
@given(*RUNS)
@settings(max_examples=2000)
def test_every_claim_holds_on_two_thousand_runs(family, seed, log_b1, log_far, from_gradient):
    claims_hold(family, seed, log_b1, log_far, from_gradient)


@given(st.sampled_from(FAMILIES), seeds, st.floats(0.05, 1.0))
def test_constant_steps_up_to_one_over_l_keep_lemma_2_1(family, seed, delta):
    problem = drawn(family, seed)
    res = minimize(
        problem.f, problem.x0 + 1.0, jac=problem.grad, b_init=problem.lipschitz / delta,
        method="constant", tol=1e-6, max_steps=150, trace=True,
    )  # fmt: skip
    cert = res.certify(lipschitz=problem.lipschitz, f_star=problem.f_star)
    assert any("Lemma 2.1" in claim.name for claim in cert.claims)
    assert cert.holds, str(cert)


def run(**options):
    p = ZOO["huber"]()
    res = minimize(p.f, p.x0, jac=p.grad, tol=1e-6, trace=True, **options)
    return res, {"lipschitz": p.lipschitz, "f_star": p.f_star}


def test_a_certificate_lists_every_lemma():
    res, known = run()
    names = " ".join(claim.name for claim in res.certify(**known).claims)
    for statement in ("Theorem 2.3, case 2", "Lemma 2.5: b", "Lemma 2.5: f", "Lemma 2.6", "A.1"):
        assert statement in names
    case_1, known = run(b_init=5.0)
    names = " ".join(claim.name for claim in case_1.certify(**known).claims)
    assert "Theorem 2.3, case 1" in names
    assert "Lemma 2.4" in names


def doctored(res, **changes):
    trace = {k: v for k, v in changes.items() if hasattr(res.trace, k)}
    rest = {k: v for k, v in changes.items() if k not in trace}
    return dataclasses.replace(res, trace=dataclasses.replace(res.trace, **trace), **rest)


def test_a_doctored_run_fails_its_certificate():
    res, known = run()
    assert res.certify(**known).holds
    t = res.trace
    half = len(t) // 2
    lies = {
        "smaller b": {"b": 0.5 * t.b},
        "one b": {"b": np.where(np.arange(len(t)) == half, 1.01 * t.b, t.b)},
        "smaller gradients": {"sq_norm": 0.9 * t.sq_norm},
        "lower f": {"fun": t.fun - 1.0},
        "f rises": {"fun": np.where(np.arange(len(t)) == half, t.fun + 1.0, t.fun)},
        "a steep gradient": {"slope": 100 * t.slope},
        "unknown slopes": {"slope": math.nan * t.slope},
        "slopes known to nothing": {"slope_condition": math.nan * t.slope, "slope": 100 * t.slope},
        "fewer steps": {"nit": res.nit // 2},
        "another end": {"b": t.b, "sq_norm": t.sq_norm, "best": 0.1 * res.best},
        "another f": {"fun": t.fun, "start": dataclasses.replace(res.start, fun=1e9)},
        "another start": {"start": dataclasses.replace(res.start, sq_norm=1e-9)},
        "another b₁": {"start": dataclasses.replace(res.start, b=77.0)},
        "another gradient": {"jac": 1e9 * res.jac},
        "another method": {"method": "constant"},
        "adagrad": {"method": "adagrad-norm"},
    }
    for lie, changes in lies.items():
        assert not doctored(res, **changes).certify(**known).holds, lie
    slower = dataclasses.replace(res, trace=None, nit=10**15)
    assert not slower.certify(**known).holds
    short, known = run(max_steps=5)
    boast = dataclasses.replace(short, trace=None, status=res.status)
    assert not boast.certify(**known).holds
    constant, known = run(method="constant", b_init=3.0)
    assert constant.certify(**known).holds
    for changes in ({"b": 2 * constant.trace.b}, {"sq_norm": 1e-3 * constant.trace.sq_norm}):
        assert not doctored(constant, **changes).certify(**known).holds


@pytest.mark.parametrize("seed", range(20))
def test_honest_float32_runs_keep_their_certificates(seed):
    p = least_squares(20, 4, seed=seed)
    res = minimize(
        lambda x: np.float32(p.f(x)), p.x0.astype(np.float32),
        jac=lambda x: p.grad(x.astype(np.float64)).astype(np.float32), tol=1e-4, trace=True,
    )  # fmt: skip
    cert = res.certify(lipschitz=p.lipschitz, f_star=p.f_star)
    assert cert.holds, str(cert)


NUMBERS = ("b", "sq_norm", "best", "fun")


@pytest.mark.parametrize("lie", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("name", [*NUMBERS, "start.b", "start.sq_norm", "start.fun", "jac"])
@pytest.mark.parametrize("traced", [True, False])
def test_no_number_that_is_none_hides_behind_a_maximum(name, lie, traced):
    res, known = run()
    res = res if traced else dataclasses.replace(res, trace=None)
    if name.startswith("start."):
        changes = {"start": dataclasses.replace(res.start, **{name[6:]: lie})}
    else:
        changes = {name: np.full_like(res.jac, lie) if name == "jac" else lie}
    if (name.endswith("fun"), lie, traced) == (True, -1.0, False):
        return  # A negative f is a value like others; only the trace knows better.
    assert not dataclasses.replace(res, **changes).certify(**known).holds
    assert not dataclasses.replace(res, **changes).certify().holds


@pytest.mark.parametrize("name", ["b", "sq_norm", "fun"])
@pytest.mark.parametrize("method", ["wngrad", "constant"])
def test_no_number_of_a_trace_that_is_none_passes(name, method):
    res, known = run(method=method, b_init=3.0)
    numbers = getattr(res.trace, name)
    for at in (0, len(numbers) // 2, -1):
        wrong = numbers.copy()
        wrong[at] = math.nan
        assert not doctored(res, **{name: wrong, "nit": res.nit}).certify(**known).holds


@pytest.mark.parametrize("name", ["b", "b_first", "grad_first", "grad_min", "grad_max"])
def test_a_stochastic_run_with_a_number_that_is_none_is_refuted(name):
    p = absolute()
    res = minimize_stochastic(p.sample, p.x0, steps=50)
    assert res.certify().holds
    assert not dataclasses.replace(res, **{name: math.nan}).certify().holds


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_b_so_large_that_rounding_hides_the_slope_contradicts_nothing(dtype):
    """A step of ‖∇f‖/b leaves a slope known to ε·b: the certificate says so instead."""
    refuted, blurred = 0, 0
    for seed in range(60):
        p = drawn(("quadratic", "least-squares")[seed % 2], seed)
        b1 = 10 ** (5 + seed / 8) * p.lipschitz * (dtype(1) if dtype is np.float32 else 1e5)
        res = minimize(
            p.f, p.x0.astype(dtype), jac=lambda x, p=p: p.grad(x.astype(np.float64)).astype(dtype),
            b_init=float(b1), tol=1e-6, max_steps=60, trace=True,
        )  # fmt: skip
        cert = res.certify(lipschitz=p.lipschitz, f_star=p.f_star)
        refuted += bool(cert.refuted)
        blurred += any("slope of ∇f at" in text for text in cert.not_claimed)
        assert not cert.lipschitz_seen > 1.01 * p.lipschitz
    assert refuted == 0
    assert blurred > 30


def test_rounding_hides_no_wrong_l():
    """Runs of ordinary b contradict an L that is 10 % too small, in float32, too."""
    p = quadratic((1.0, 3.0, 10.0))
    for dtype in (np.float32, np.float64):
        jac = lambda x: p.grad(x).astype(x.dtype)  # noqa: E731
        res = minimize(p.f, p.x0.astype(dtype), jac=jac, tol=1e-4, trace=True)
        assert not res.certify(lipschitz=10.0, f_star=0.0).refuted
        assert any("slope" in text for text in res.certify(lipschitz=9.0, f_star=0.0).refuted)


def test_the_gradient_of_a_result_is_its_points_own():
    """A function that uses its memory again has written the bad point's gradient there."""
    out = np.empty(1)

    def jac(x):
        out[:] = 1 / x if x[0] > 0 else math.nan
        return out

    res = minimize(lambda x: float(np.log(x[0])), [0.1], jac=jac, b_init=1.0)
    assert res.jac == 1 / res.x
    assert res.certify().holds


@pytest.mark.parametrize("seed", range(20))
def test_far_from_the_origin_a_slope_is_still_a_slope(seed):
    """Near 1e8 a step rounds: its length is measured, not computed."""
    rng = np.random.default_rng(seed)
    center, curve = 1e8 * rng.uniform(1, 2), 10.0
    res = minimize(
        lambda x: float(curve * ((x - center) ** 2).sum() / 2), [center + rng.uniform(1, 10)],
        jac=lambda x: curve * (x - center), tol=1e-3, trace=True, max_steps=200,
    )  # fmt: skip
    cert = res.certify(lipschitz=curve, f_star=0.0)
    assert not cert.refuted, str(cert)


def test_certify_checks_what_it_is_told():
    res, _ = run()
    for known in ({"lipschitz": math.inf}, {"lipschitz": 0.0}, {"f_star": math.nan}):
        with pytest.raises(ValueError, match=f"`{next(iter(known))}`"):
            res.certify(**{"lipschitz": 1.0, "f_star": 0.0, **known})
    for rounding in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="`rounding` must be >= 0 and finite"):
            res.certify(rounding=rounding)


def test_bounds_too_large_for_a_number_are_no_error():
    p = quadratic((1.0, 3.0, 10.0))
    res = minimize(p.f, p.x0, jac=p.grad, tol=1e-300, max_steps=200, trace=True)
    assert res.certify(lipschitz=1e7, f_star=0.0).holds
    exact = minimize(p.f, p.x0, jac=p.grad, tol=0.0, max_steps=3000, trace=True)
    assert exact.certify(lipschitz=10.0, f_star=0.0).holds


def test_a_run_of_one_point_verifies_no_slope():
    res, known = run(max_steps=0)
    assert not any("slope" in text for text in res.certify(**known).verified)


def test_a_wrong_l_or_f_star_is_contradicted_by_the_run():
    res, known = run()
    assert any("slope" in text for text in res.certify(lipschitz=0.1, f_star=0.0).refuted)
    assert any("below f*" in text for text in res.certify(**{**known, "f_star": 1.0}).refuted)


def test_without_l_there_is_an_estimate_from_below_and_no_claim():
    res, known = run()
    cert = res.certify()
    assert 0 < cert.lipschitz_seen <= known["lipschitz"] * (1 + 1e-9)
    assert "lipschitz and f_star not given" in cert.not_claimed[0]
    assert not any("Theorem" in claim.name for claim in cert.claims)


def test_without_a_trace_the_claims_about_the_ends_remain():
    res, known = run()
    short = dataclasses.replace(res, trace=None).certify(**known)
    assert short.holds
    assert sum("Theorem 2.3, case 2" in claim.name for claim in short.claims) == 2
    assert not any("Lemma" in claim.name for claim in short.claims)
    assert "no trace" in " ".join(short.not_claimed)


def test_a_certificate_prints_both_sides_and_what_it_took_on_trust():
    res, known = run()
    text = str(res.certify(**known))
    for part in ("claims", "verified on the run", "taken on trust", "≤", "given lipschitz"):
        assert part in text
    assert "converged" not in text


# ---------------------------------------------------------------- what rounding may do


def away(center, curve, start, sign=1.0, **options):
    """curve·‖x − center‖²/2 from center + start; its gradient times a sign."""
    return minimize(
        lambda x: float(curve * ((x - center) ** 2).sum() / 2), center + np.asarray(start),
        jac=lambda x: sign * curve * (x - center), trace=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("center", [0.0, 1e3, 1e6, 1.7e9])
@pytest.mark.parametrize("curve", [1e-9, 1.0, 1e3])
def test_far_from_the_origin_every_claim_still_holds(center, curve):
    """There f moves by ‖∇f‖·ε‖x‖ as x is rounded, which is more than f's own last place."""
    for seed in range(10):
        start = 10 ** (seed / 3 - 2) * np.random.default_rng(seed).standard_normal(2)
        b_init = ("gradient", curve, 2 * curve, 100 * curve)[seed % 4]
        res = away(center, curve, start, b_init=b_init, tol=1e-9 * curve**2, max_steps=500)
        cert = res.certify(lipschitz=curve * (1 + 1e-9), f_star=0.0)
        assert cert.holds, str(cert)
    res = away(5000.0, 1000.0, [0.05, 0.01], tol=1e-9, b_init=1e5)
    assert res.certify(lipschitz=1000.0, f_star=0.0).holds


def test_a_claim_that_holds_by_its_rounding_alone_shows_it():
    assert str(Claim("a", 1.0, 2.0, rounding=1e-3)) == "a: 1 ≤ 2"
    assert str(Claim("a", 2.001, 2.0, rounding=0.002)) == "a: 2.001 ≤ 2 + 0.002 (rounding)"
    assert str(Claim("a", 3.0, 2.0, rounding=0.002)) == "a: 3 > 2"


@pytest.mark.parametrize("center", [0.0, 5e3, 1e6])
@pytest.mark.parametrize("curve", [1e-12, 1e-3, 1e3])
def test_a_gradient_that_climbs_is_found_out_anywhere_and_at_any_scale(center, curve):
    res = away(center, curve, [0.5, 0.1], sign=-1.0, b_init=100 * curve, tol=0.0, max_steps=20)
    cert = res.certify(lipschitz=curve, f_star=0.0)
    assert [claim.name[:9] for claim in cert.claims if not claim.holds] == ["Lemma A.1"]


def test_the_norm_of_x_in_a_trace_is_checked_against_x():
    res, known = run()
    for factor in (1e9, math.nan, math.inf):
        assert not doctored(res, x_norm=factor * res.trace.x_norm).certify(**known).holds


def test_a_gap_below_the_rounding_of_f_leaves_the_theorems_standing():
    """f − f* is 4.5e-13 where f is −10⁶: as computed, it is nothing, or an ulp."""
    f = lambda x: float(x @ x) * 1.6e-8 - 1e6  # noqa: E731
    for method in ("wngrad", "constant"):
        res = minimize(
            f, [3e-3, 4e-3], jac=lambda x: 3.2e-8 * x, b_init=1e-7, tol=1e-22, method=method
        )
        assert res.nit > 3
        assert f(np.array([3e-3, 4e-3])) == f(np.zeros(2))
        cert = res.certify(lipschitz=3.2e-8, f_star=-1e6)
        assert cert.holds, str(cert)


def test_a_run_down_to_a_zero_gradient_has_its_slopes(tmp_path):
    """The last steps are so short that their squares underflow."""
    p = ZOO["quadratic"]()
    res = minimize(p.f, p.x0, jac=p.grad, tol=0.0, trace=True)
    assert (res.success, res.sq_norm) == (True, 0.0)
    np.testing.assert_allclose(res.trace.slope[-1], 1.0, rtol=1e-6)
    cert = res.certify(lipschitz=p.lipschitz, f_star=p.f_star)
    assert cert.holds, str(cert)
    certify_figure.draw([("L", res)], "quadratic", 100.0, 0.0, tmp_path / "a.png")  # ε has no log
    far = minimize(lambda x: abs(x).sum(), [1e160], jac=np.sign, max_steps=3, trace=True)
    assert far.trace.x_norm[0] == 1e160
    assert far.certify().holds


def test_one_over_l_is_a_step_of_one_over_l_whatever_l():
    """1/(1/93) is one unit in the last place below 93."""
    for lipschitz in range(1, 200):
        p = quadratic((lipschitz,))
        res = gradient_descent(p.f, [1.0], jac=p.grad, step=1 / lipschitz)
        cert = res.certify(lipschitz=float(lipschitz), f_star=0.0)
        assert any("Lemma 2.1" in claim.name for claim in cert.claims), lipschitz
        assert cert.holds, str(cert)
    longer = gradient_descent(p.f, [1.0], jac=p.grad, step=1.0001 / lipschitz)
    assert "above 1/L" in longer.certify(lipschitz=199.0, f_star=0.0).not_claimed[0]


@pytest.mark.parametrize("scale", [1e-14, 1.0, 1e14])
def test_an_f_star_above_f_is_found_out_at_any_scale(scale):
    p = quadratic((1.0, 3.0))
    res = minimize(
        lambda x: scale * p.f(x), [5.0, 5.0], jac=lambda x: scale * p.grad(x),
        tol=1e-12 * scale**2, trace=True,
    )  # fmt: skip
    for run in (res, dataclasses.replace(res, trace=None)):
        assert run.certify(lipschitz=3 * scale, f_star=0.0).holds
        cert = run.certify(lipschitz=3 * scale, f_star=1e-6 * scale)
        assert any("below f*" in text for text in cert.refuted)


@pytest.mark.parametrize(
    ("bound", "known"),
    [
        (bounds.theorem_2_3_steps, {"gap": 1.0, "b1": 1.0, "grad_norm": 0.5, "tol": 1.0}),
        (bounds.theorem_2_3_sq_norm, {"gap": 1.0, "b1": 1e-200, "grad_norm": 0.0, "points": 5}),
        (bounds.lemma_2_6_b, {"b1": 0.5, "grad_norm": 0.5}),
        (bounds.lemma_2_5_f, {"f1": 1.0, "b1": 0.5, "grad_norm": 0.5}),
        (bounds.lemma_2_4_points, {"b1": 0.5, "tol": 1e-200}),
        (bounds.lemma_2_1_steps, {"gap": 1.0, "delta": 1e-200, "tol": 1e-200}),
    ],
)
def test_a_bound_beyond_every_number_is_infinite(bound, known):
    assert bound(lipschitz=1e200, **known) == math.inf


def test_bounds_of_section_3_are_numbers_too():
    known = {"grad_floor": 1.0, "diameter": 1e5, "b1": 1.0, "distance": 1.0}
    assert bounds.theorem_3_1_gap(grad_bound=1e200, k=5, **known) == math.inf
    for k in (-1, 0):
        with pytest.raises(ValueError, match=f"lemma_3_3_b: `k` must be > 0, got {k}"):
            bounds.lemma_3_3_b(grad_floor=1.0, k=k)


# ---------------------------------------------------------------- the stochastic theorem


@pytest.mark.parametrize("seed", range(10))
def test_theorem_3_1_on_a_convex_sum_that_is_not_smooth(seed):
    problem = absolute(seed=seed)
    res = minimize_stochastic(problem.sample, problem.x0, steps=3000, f=problem.f, seed=seed)
    far = float(np.linalg.norm(problem.x0 - problem.x_star))
    cert = res.certify(f_star=0.0, diameter=2 * far, distance=far)
    assert [claim.name.split(":")[0] for claim in cert.claims][-1] == "Theorem 3.1"
    assert cert.holds, str(cert)
    assert res.fun_mean < problem.f(problem.x0)


def test_a_stochastic_certificate_says_what_it_cannot_claim():
    problem = absolute()
    res = minimize_stochastic(problem.sample, problem.x0, steps=50, b_init=1e-3)
    assert "b₁ = 0.001" in res.certify().not_claimed[0]
    good = minimize_stochastic(problem.sample, problem.x0, steps=50)
    assert "needs f" in good.certify().not_claimed[0]
    assert not good.certify(grad_floor=1e9).holds
    trusted = good.certify(grad_bound=3.2)
    assert trusted.holds  # E‖g‖² ≤ G² is the caller's word, though single gradients are larger
    assert any("G = 3.2" in text for text in trusted.assumed)
    assert not dataclasses.replace(good, b=1e-9).certify().holds


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        ({"f_star": 1e6}, "below f* = 1e+06"),
        ({"diameter": 1.0, "distance": 100.0}, "‖x₁ − x*‖ = 100 ≤ D = 1"),
        ({"grad_bound": 1e-3}, "≤ G = 0.001"),
        ({"grad_floor": 100.0}, "≥ γ = 100"),
        ({"grad_floor": 100.0, "grad_bound": 50.0}, "≥ γ = 100"),
    ],
)
def test_what_a_stochastic_run_contradicts_is_refuted(wrong, part):
    p = absolute()
    res = minimize_stochastic(p.sample, p.x0, steps=300, f=p.f)
    far = float(np.linalg.norm(p.x0 - p.x_star))
    known = {"f_star": 0.0, "diameter": 2 * far, "distance": far}
    assert res.certify(**known).holds
    cert = res.certify(**{**known, **wrong})
    assert not cert.holds
    assert any(part in text for text in cert.refuted), str(cert)


def test_an_f_star_above_the_last_iterate_is_refuted_without_a_diameter():
    p = absolute()
    res = minimize_stochastic(p.sample, p.x0, steps=300, f=p.f)
    lowest = min(res.fun, res.fun_mean)
    assert res.certify(f_star=lowest).holds
    assert any("below f*" in text for text in res.certify(f_star=1.001 * lowest).refuted)


def test_a_g_or_d_that_is_met_but_for_rounding_is_met():
    res = minimize_stochastic(lambda x, rng: np.full(10, 0.1), np.zeros(10), steps=9, f=lambda x: 0)
    exact, short = res.grad_min, res.grad_min * (1 - 1e-15)
    for bound in (exact, short):
        cert = res.certify(grad_bound=bound, f_star=0.0, diameter=short, distance=exact)
        assert cert.holds, str(cert)
        assert "Theorem 3.1" in cert.claims[-1].name


def test_the_stochastic_certificate_checks_what_it_is_told():
    p = absolute()
    res = minimize_stochastic(p.sample, p.x0, steps=5, f=p.f)
    for name in ("f_star", "diameter", "distance", "grad_bound", "grad_floor"):
        for value in (math.nan, math.inf, -1.0):
            if (name, value) != ("f_star", -1.0):
                with pytest.raises(ValueError, match=f"certify: `{name}` must be"):
                    res.certify(**{name: value})


# ---------------------------------------------------------------- the paper's slips


def test_lemma_2_6_is_false_without_its_unsaid_hypothesis():
    """f = x²/2, x₁ = 100, b₁ = 0.1: b₂ is 8.1e6, where the lemma says at most 23."""
    half = quadratic((1.0,))
    res = minimize(half.f, [100.0], jac=half.grad, b_init=0.1, max_steps=1, trace=True)
    printed = 3 * 1 + 2 * 1 / 0.1
    assert printed == 23
    assert res.trace.b[1] == pytest.approx(8.1e6, rel=1e-3)
    with pytest.raises(ValueError, match="`b1` must be >= ‖∇f"):
        bounds.lemma_2_6_b(lipschitz=1, b1=0.1, grad_norm=100)
    assert "b₁ < ‖∇f(x₁)‖" in " ".join(res.certify(lipschitz=1.0, f_star=0.0).not_claimed)


def test_lemma_3_3_is_false_at_its_first_index():
    """A run from b₁ = ‖g₁‖ = γ: the lemma's √(2γ²k) exceeds b_1; what the proof uses does not."""
    res = minimize_stochastic(lambda x, rng: np.ones(1), [0.0], steps=0)
    assert math.sqrt(2 * 1.0 * 1) > res.b
    assert bounds.lemma_3_3_b(grad_floor=1.0, k=1) <= res.b


def test_lemma_2_4_needs_an_or_equal_where_b1_is_l():
    """b₁ = L gives N = 1; b_N > L is false and no gradient is small. The proof shows b_N ≥ L."""
    half = quadratic((2.0,))
    res = minimize(half.f, [1.0], jac=half.grad, b_init=2.0, max_steps=1, trace=True)
    n = int(bounds.lemma_2_4_points(lipschitz=2.0, b1=2.0, tol=1e-9))
    assert n == 1
    assert not res.trace.b[n - 1] > 2.0
    assert res.trace.b[n - 1] >= 2.0
    assert res.trace.sq_norm[:n].min() > 1e-9
