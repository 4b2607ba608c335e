"""`torch.optim.swa_utils` over WNGrad and WNAdam; its equal average is Theorem 3.1's x̄_k."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import paper
from conftest import network, same, train, twins
from wngrad import WNGrad

A = torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
Y = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


def slope(x):
    """The gradient of ½‖Ax − y‖²."""
    return (A.T @ (A @ torch.tensor(x, dtype=torch.float64) - Y)).tolist()


def averaged(model, opt, steps, **options):
    """The average over a run, and the iterates it is of: x_1, the start, to x_k."""
    mean, seen = AveragedModel(model, **options), []
    for seed in range(steps):
        seen.append([p.detach().clone() for p in model.parameters()])
        mean.update_parameters(model)
        train(model, opt, 1, first=seed)
    return mean, seen


def test_equal_averaging_gives_the_average_of_theorem_3_1():
    """x̄_k = (x_1 + … + x_k)/k, against the paper's algorithm on plain floats."""
    start, k = [3.0, -4.0], 50
    oracle = paper.algorithm_3(start, slope, 1.0, [[0, 1]])
    iterates = [start, *(next(oracle)[0] for _ in range(k - 1))]
    expected = [sum(x[i] for x in iterates) / k for i in range(2)]

    layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
    layer.weight.data = torch.tensor([start], dtype=torch.float64)
    opt, mean = WNGrad(layer.parameters(), per="model"), AveragedModel(layer)
    for _ in range(k):
        mean.update_parameters(layer)  # before the step, for x_1 is the start
        layer.weight.grad = torch.tensor([slope(layer.weight[0].tolist())], dtype=torch.float64)
        opt.step()
    assert mean.n_averaged == k
    # Rounding only: of the steps, whose map contracts, and of a running mean of k numbers.
    assert mean.module.weight[0].tolist() == pytest.approx(expected, rel=k * 2**-50)


def test_it_is_the_mean_of_the_iterates_of_any_run(optimizer):
    model = network().double()
    mean, seen = averaged(model, optimizer(model.parameters()), 10)
    for p, iterates in zip(mean.parameters(), zip(*seen, strict=True), strict=True):
        # A running mean of ten numbers of order 1, each of which is rounded.
        torch.testing.assert_close(p.data, torch.stack(iterates).mean(0), rtol=0, atol=1e-14)


def test_an_exponential_average_follows_its_recursion(optimizer):
    model = network().double()
    ema = get_ema_multi_avg_fn(0.75)
    mean, seen = averaged(model, optimizer(model.parameters()), 10, multi_avg_fn=ema)
    for p, iterates in zip(mean.parameters(), zip(*seen, strict=True), strict=True):
        expected = iterates[0]
        for x in iterates[1:]:
            expected = 0.75 * expected + 0.25 * x
        torch.testing.assert_close(p.data, expected, rtol=0, atol=1e-14)


def test_averaging_does_not_change_the_run(optimizer):
    a, b = twins()
    mean, _ = averaged(a, optimizer(a.parameters()), 5)
    train(b, optimizer(b.parameters()), 5)
    assert same(a, b)
    assert not same(mean.module, a)


def test_the_average_resumes_with_the_run(optimizer):
    a, b = twins()
    whole, _ = averaged(a, optimizer(a.parameters()), 4)
    opt = optimizer(b.parameters())
    half, _ = averaged(b, opt, 2)
    again = AveragedModel(network())
    again.load_state_dict(copy.deepcopy(half.state_dict()))
    for seed in (2, 3):
        again.update_parameters(b)
        train(b, opt, 1, first=seed)
    assert same(whole, again)
    assert again.n_averaged == 4


def test_batch_norm_is_measured_anew_for_the_average(optimizer):
    """`update_bn` leaves the statistics of the averaged network, not an average of statistics."""
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4))
    mean, _ = averaged(model, optimizer(model.parameters()), 5)
    batches = torch.randn(4, 8, 2, 4, 4)
    update_bn(batches, mean)
    with torch.no_grad():
        inside = torch.stack([mean.module[0](x) for x in batches])
    norm = mean.module[1]
    # float32, and torch sums in another order.
    torch.testing.assert_close(norm.running_mean, inside.mean((1, 3, 4)).mean(0))
    torch.testing.assert_close(norm.running_var, inside.transpose(1, 2).flatten(2).var(2).mean(0))
    assert not torch.equal(norm.running_mean, model[1].running_mean)
