"""The kernels of batch normalization, sum and ReLU, against torch's own operations."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from wngrad.lab.train import models, norm

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there, in Triton's interpreter


def table(n: int, c: int, side: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, c, side, side, generator=g) * 2 + torch.randn(c, 1, 1, generator=g)
    return x.to(DEVICE, dtype).contiguous(memory_format=torch.channels_last).requires_grad_()


def plain(x: Tensor, w: Tensor, b: Tensor, moving: list[Tensor], res: Tensor | None, relu: bool):
    y = F.batch_norm(x, *moving, w, b, training=True, momentum=0.1, eps=1e-5)
    y = y if res is None else y + res
    return torch.relu(y) if relu else y


def ours(x: Tensor, w: Tensor, b: Tensor, moving: list[Tensor], res: Tensor | None, relu: bool):
    return norm.Norm.apply(x, w, b, *moving, res, 0.1, 1e-5, relu)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("shape", [(3, 8, 5), (2, 70, 3)])
def test_values_gradients_and_statistics_are_those_of_torch(shape, relu, adds):
    n, c, side = shape
    outcomes = []
    for way in (plain, ours):
        x, res = table(n, c, side, 1), table(n, c, side, 2) if adds else None
        w, b = (torch.linspace(-1, 2, c, device=DEVICE).add(k).requires_grad_() for k in (0, 1))
        moving = [torch.full((c,), v, device=DEVICE) for v in (0.5, 2.0)]
        y = way(x, w, b, moving, res, relu)
        inputs = [x, w, b, *([res] if adds else [])]
        grads = torch.autograd.grad((y * table(n, c, side, 3).detach()).sum(), inputs)
        outcomes.append([y, *grads, *moving])
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(other, one, rtol=2e-5, atol=2e-5)


def test_a_large_mean_costs_no_digits_once_the_statistics_know_it():
    x = (table(4, 8, 4, 1).detach() + 1e4).contiguous(memory_format=torch.channels_last)
    w, b = torch.ones(8, device=DEVICE), torch.zeros(8, device=DEVICE)
    moving = [torch.full((8,), v, device=DEVICE) for v in (1e4, 4.0)]
    y = ours(x, w, b, moving, None, False)
    want = F.batch_norm(x.double(), None, None, training=True).float()
    torch.testing.assert_close(y, want, rtol=1e-2, atol=1e-2)  # float32 has 1e-3 left at 1e4


def test_what_has_diverged_stays_nan_and_what_comes_back_is_normalized():
    x, w, b = (
        table(2, 4, 3, 1).detach(),
        torch.ones(4, device=DEVICE),
        torch.zeros(4, device=DEVICE),
    )
    moving = [torch.full((4,), torch.inf, device=DEVICE) for _ in range(2)]
    assert ours(x, w, b, moving, None, True).isfinite().all()
    bad = x.clone()
    bad[0, 1] = torch.nan
    y = ours(bad, w, b, moving, None, True)
    assert y[:, 1].isnan().all()
    assert y[:, [0, 2, 3]].isfinite().all()


def test_bfloat16_tables_are_rounded_once():
    """To a unit in the last place: Triton's interpreter cuts digits off."""
    x, res = table(2, 16, 4, 1, torch.bfloat16), table(2, 16, 4, 2, torch.bfloat16)
    w, b = torch.ones(16, device=DEVICE), torch.zeros(16, device=DEVICE)
    y = ours(x, w, b, [torch.zeros(16, device=DEVICE), torch.ones(16, device=DEVICE)], res, True)
    wide = F.batch_norm(x.float(), None, None, w, b, training=True) + res.float()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), torch.relu(wide), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_in_evaluation_is_that_of_torch(monkeypatch, dtype, relu, adds):
    layer = norm.BatchNorm(70, relu).to(DEVICE)
    for k, t in enumerate((layer.weight, layer.bias, layer.running_mean, layer.running_var)):
        t.data.copy_(torch.linspace(0.5, 2, 70).roll(7 * k))
    x, res = (table(2, 70, 3, k, dtype).detach() for k in (1, 2))
    args = (x, res) if adds else (x,)
    monkeypatch.setattr(norm.BatchNorm, "_suits", lambda self, *args: True)
    with torch.no_grad():
        want = layer.eval()(*(t.float() for t in args))
        norm.use_kernels(layer)
        y = layer(*args)
    assert y.dtype == dtype
    bound = 2e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(y.float(), want, rtol=bound, atol=bound)


@pytest.mark.parametrize("training", [True, False])
def test_without_a_gpu_kernels_that_were_asked_for_are_left_alone(training):
    plain, asked = (models.build("resnet18", (3, 32, 32), 10, seed=3) for _ in range(2))
    norm.use_kernels(asked)
    assert sum(getattr(layer, "by_kernels", False) for layer in asked.modules()) == 20
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(plain.train(training)(x), asked.train(training)(x))


def test_kernels_are_for_networks_that_have_the_layer_and_where_triton_is(monkeypatch):
    net = models.build("resnet18", (3, 32, 32), 10, seed=3)
    assert norm.has_kernels(net)
    assert not norm.has_kernels(torch.nn.Sequential(torch.nn.BatchNorm2d(3)))
    monkeypatch.setattr(norm, "find_spec", lambda name: None)
    assert not norm.has_kernels(net)


def test_a_block_adds_its_way_around_before_the_last_relu():
    """As in the paper of the network: relu(bn(conv(relu(bn(conv(x))))) + around(x))."""
    net = models.build("resnet18", (3, 32, 32), 10, seed=3).train()
    x, block = torch.randn(2, 64, 4, 4), net[4]
    one, two, around = (F.batch_norm(y, None, None, training=True) for y in _convolved(block, x))
    torch.testing.assert_close(block(x), torch.relu(two + around))
    assert (one < 0).any()


def _convolved(block, x):
    one = block.conv1(x)
    inner = torch.relu(F.batch_norm(one, None, None, training=True))
    return one, block.conv2(inner), block.around[0](x)
