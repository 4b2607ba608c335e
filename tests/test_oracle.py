"""The optimizers against the paper on plain floats, and against its numbers."""

from __future__ import annotations

import math
from itertools import islice

import pytest
import torch

import golden
import paper
from golden import gradient
from wngrad import WNAdam, WNGrad, rule


def halves(p: torch.Tensor) -> tuple[int, ...]:
    return (1,) * (p.dim() - 1) + (2,)


def lock_step(opt, p, steps, oracle):
    """Step both for a while; the largest relative difference of x and of b."""
    worst = 0.0
    for x, b in islice(oracle, steps):
        p.grad = torch.tensor(gradient(p.detach().flatten().tolist()), dtype=p.dtype).view_as(p)
        opt.step()
        for ours, theirs in zip(p.detach().flatten().tolist(), x, strict=True):
            worst = max(worst, abs(ours - theirs) / max(1.0, abs(theirs)))
        for ours, theirs in zip(opt.state[p]["b"].flatten().tolist(), b, strict=True):
            worst = max(worst, abs(ours - theirs) / theirs)
    return worst


def torch_twin(rule, shape, per, b_init, decay):
    """The parameter and the optimizer of a case of the golden file."""
    (b1, c), (w, decoupled) = golden.B_INIT[b_init], golden.DECAY[decay]
    p = torch.nn.Parameter(torch.tensor(golden.start(shape), dtype=torch.float64).view(shape))
    options = {
        "lr": golden.LAM,
        "per": halves if per == "last" else per,
        "b_init": b1 if c is None else ("gradient", c),
        "weight_decay": w,
        "decoupled_weight_decay": decoupled,
    }
    if rule == "adam":
        return p, WNAdam([p], **options)
    return p, WNGrad([p], momentum=0.9 if rule == "momentum" else 0.0, **options)


@pytest.mark.parametrize("shape", golden.SHAPES, ids=str)
@pytest.mark.parametrize("per", ["neuron", "tensor", "model", "slice", "last"])
@pytest.mark.parametrize("b_init", golden.B_INIT)
@pytest.mark.parametrize("decay", golden.DECAY)
@pytest.mark.parametrize("rule", golden.RULES)
def test_hundred_steps_match_the_paper_on_plain_floats(rule, shape, per, b_init, decay):
    """1e-12 relative in float64: 100 steps of a few roundings each, in another order of summing."""
    case = (rule, shape, per, b_init, decay)
    p, opt = torch_twin(*case)
    assert lock_step(opt, p, 100, golden.oracle(*case)) < 1e-12


@pytest.mark.parametrize("b_init", golden.B_INIT)
@pytest.mark.parametrize("decay", golden.DECAY)
@pytest.mark.parametrize("rule", golden.RULES)
def test_a_rate_that_rises_and_falls_matches_the_paper_on_plain_floats(rule, b_init, decay):
    def lam(j):
        return (0.01, 0.1, 1.0, 0.3)[j // 5 % 4]

    case = (rule, (3, 4), "neuron", b_init, decay)
    p, opt = torch_twin(*case)
    for j, point in enumerate(islice(golden.oracle(*case, lam=lam), 40)):
        opt.param_groups[0]["lr"] = lam(j)
        assert lock_step(opt, p, 1, iter([point])) < 1e-12


def test_the_golden_file_is_what_the_oracle_says():
    kept = golden.load()
    assert [case for case, _ in kept] == golden.cases()
    for case, after in kept:
        for ours, theirs in zip(golden.trajectory(case), after, strict=True):
            assert ours["x"] == pytest.approx(theirs["x"], rel=1e-12, abs=1e-13)
            assert ours["b"] == pytest.approx(theirs["b"], rel=1e-12)


@pytest.mark.parametrize(("case", "after"), golden.load())
def test_torch_follows_the_golden_trajectories(case, after):
    p, opt = torch_twin(*case)
    for k in range(1, max(golden.STEPS) + 1):
        x = p.detach().flatten().tolist()
        p.grad = torch.tensor(gradient(x), dtype=p.dtype).view_as(p)
        opt.step()
        if k in golden.STEPS:
            point = after[golden.STEPS.index(k)]
            ours = p.detach().flatten().tolist()
            assert ours == pytest.approx(point["x"], rel=1e-12, abs=1e-12)
            assert opt.state[p]["b"].flatten().tolist() == pytest.approx(point["b"], rel=1e-12)


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_one_b_for_the_model_spans_parameters_of_every_shape(make):
    x = [math.cos(7 * i) for i in range(6 + 12)]
    params = [
        torch.nn.Parameter(torch.tensor(part, dtype=torch.float64).view(shape))
        for part, shape in ((x[:6], (6,)), (x[6:], (3, 4)))
    ]
    opt = make(params, lr=0.7, per="model")
    algorithm = paper.algorithm_3 if make is WNGrad else paper.algorithm_4
    for theirs, (b,) in islice(algorithm(x, gradient, 0.7, [list(range(18))]), 100):
        ours = torch.cat([p.detach().flatten() for p in params])
        g = torch.tensor(gradient(ours.tolist()), dtype=torch.float64)
        params[0].grad, params[1].grad = g[:6].clone(), g[6:].view(3, 4).clone()
        opt.step()
        ours = torch.cat([p.detach().flatten() for p in params])
        torch.testing.assert_close(ours, ours.new_tensor(theirs), rtol=0, atol=1e-12)
        assert all(abs(opt.state[p]["b"].item() - b) < 1e-12 * b for p in params)


def test_algorithm_1_and_algorithm_3_take_the_same_steps():
    """Counted from the step it divides, b is B_k = B_{k-1} + ‖g_k‖²/B_{k-1} in both."""
    x = [0.3, -1.2, 2.0]
    b1 = 1.5
    first = b1 + paper.sq_norm(gradient(x), range(3)) / b1
    batch = islice(paper.algorithm_1(x, gradient, first), 50)
    scaled = islice(paper.algorithm_3(x, gradient, 1.0, [[0, 1, 2]], b1=b1), 50)
    for (u, _), (v, _) in zip(batch, scaled, strict=True):
        assert u == pytest.approx(v, rel=1e-12)


def test_golden_numbers_of_a_constant_gradient():
    """‖g‖ = 0.75, λ = 1, b₁ = 1."""
    p = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt, seen, b, plain = WNGrad([p]), [], 1.0, []
    for _ in range(3):
        p.grad = torch.full_like(p, 0.75)
        opt.step()
        seen.append(opt.state[p]["b"].item())
        plain.append(b := rule.next_b(b, 0.75**2, 1.0))
    assert [f"{b:.4f}" for b in seen[:2]] == ["1.5625", "1.9225"]
    assert f"{seen[2]:.6f}" == "2.215088"
    assert seen == plain


def test_golden_numbers_of_a_small_bowl():
    """f = Σx² from (−5, 5), λ = 0.56, one b."""
    p = torch.nn.Parameter(torch.tensor([-5.0, 5.0], dtype=torch.float64))
    opt, seen = WNGrad([p], lr=0.56, per="tensor"), []
    for _ in range(3):
        p.grad = 2 * p.detach()
        opt.step()
        seen.append(round(opt.state[p]["b"].item(), 6))
    assert seen == [63.72, 64.670008, 65.573919]


def test_the_step_the_introduction_prints_is_not_the_one_taken():
    """Eq. 5's b is one step stale: on a quadratic with L = 100, b₁ = 1 it throws f from 139 up."""
    curvature = (100.0, 1.0)
    x = [math.sqrt(2 * 138.0 / 100), math.sqrt(2.0)]  # f(x) = 139

    def f(x):
        return sum(a * xi**2 / 2 for a, xi in zip(curvature, x, strict=True))

    p = torch.nn.Parameter(torch.tensor(x, dtype=torch.float64))
    stale = [xi - a * xi for a, xi in zip(curvature, x, strict=True)]
    opt = WNGrad([p], per="tensor")
    p.grad = torch.tensor([a * xi for a, xi in zip(curvature, x, strict=True)]).double()
    opt.step()
    assert f(x) == pytest.approx(139)
    assert f(stale) > 1e6
    assert f(p.tolist()) < 139
