"""Orthogonalization by kernels: matrices of any sizes at once, against the decomposition."""

import numpy as np
import pytest
import torch

from test_orthogonal import SPECTRA, matrix, values
from wngrad import WNMuon
from wngrad.optim.fused import matrices, matrices_cuda
from wngrad.optim.fused.matrices_cuda import Source, Words
from wngrad.optim.fused.records import GROUP, bits
from wngrad.optim.modules import Layout
from wngrad.polynomials import LARGEST, LEAST

pytest.importorskip("triton", minversion="3.4")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(7, 1), (10, 30), (60, 60), (70, 40)]


def orthogonalized(
    gradients, *, layouts=None, momenta=None, mu=0.0, skip=True, found=None, rows=()
):
    """U of each, with what its momentum has become."""
    gradients = [g.to(DEVICE) for g in gradients]
    layouts = layouts or [Layout()] * len(gradients)
    momenta = momenta or [torch.zeros_like(g) for g in gradients]
    numbers = {"lam": 0.3, "mu": mu, "sign": 1.0}
    settings = [bits(numbers.get(name, 0.0)) for name in GROUP.names]
    settings[GROUP.names.index("lam_kind")] = 0
    words = [*settings, *(g.data_ptr() for g in gradients)]
    table = Words(words, list(range(len(words))), len(settings), DEVICE)
    sources = [
        Source.of(g, m, layout, i, 0, hides_rows=i in rows)
        for i, (g, m, layout) in enumerate(zip(gradients, momenta, layouts, strict=True))
    ]
    directions = {}
    with np.errstate(all="ignore"):  # NumPy runs the interpreter, over NaN and inf on purpose
        for stage in matrices_cuda.stages(sources, skip, table):
            stage.run(words, None, found)
            for source, u in zip(stage.sources, stage.u, strict=True):
                directions[source.gradient] = u.float().cpu().clone()
    return [directions[i] for i in range(len(gradients))], [m.cpu() for m in momenta]


def scale(shape):
    return Layout().scale(shape)


@pytest.mark.parametrize("large", [False, True], ids=["small", "large"])
def test_singular_values_come_within_the_promised_interval(monkeypatch, large):
    if large:  # as if they were: square ones are stepped themselves
        monkeypatch.setattr(matrices_cuda, "LARGE_SIDE", 1)
        monkeypatch.setattr(
            matrices_cuda, "LARGE", matrices_cuda.SMALL._replace(side=32, depth=32, across=64)
        )
    cases = [(spectrum, shape) for shape in SHAPES for spectrum in SPECTRA]
    made = [matrix(spectrum, *shape) for spectrum, shape in cases]
    sizes = torch.logspace(-30, 30, len(made))
    found, _ = orthogonalized([x * size for (x, *_), size in zip(made, sizes, strict=True)])
    for (spectrum, shape), (_, s, u, v), result in zip(cases, made, found, strict=True):
        rank, case = int((s > 0).sum()), f"{spectrum} {shape}"
        result = result.double() / scale(shape)
        assert values(result)[0] <= LARGEST, case
        assert values(result)[rank - 1] >= LEAST, case
        inner = u[:, :rank].T @ result @ v[:, :rank]
        assert torch.allclose(inner, inner.diagonal().diag(), atol=0.1), case
        large = inner.diagonal()[s[:rank] >= 1 / 250]
        assert ((large > 0.7) & (large < 1.15)).all(), case


def test_powers_of_two_change_no_bit_and_zeros_stay():
    x, *_ = matrix("even", 20, 30)
    x[3], x[:, 5] = 0, 0
    (first, large, zero), _ = orthogonalized([x, x * 2.0**70, torch.zeros(4, 3)])
    assert torch.equal(first, large)
    assert not any(t.any() for t in (first[3], first[:, 5], zero))
    assert values(first)[0] <= LARGEST


def test_momentum_is_stored_and_looked_ahead_with():
    g, m = torch.randn(12, 20), torch.randn(12, 20)
    (u,), (after,) = orthogonalized([g], momenta=[m.to(DEVICE, copy=True)], mu=0.9)
    assert torch.allclose(after, torch.lerp(m, g, 0.1), atol=1e-6)
    (ahead,), _ = orthogonalized([torch.lerp(g, after, 0.9)])
    assert torch.allclose(u, ahead, atol=2e-3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_spoils_its_own_matrix_alone(bad):
    spoilt, whole = torch.randn(6, 5), torch.randn(5, 6)
    spoilt[2, 3] = bad
    (first, second), momenta = orthogonalized([spoilt, whole], mu=0.9)
    assert first.isnan().all()
    assert second.isfinite().all()
    assert not momenta[0].any()  # as if the step had not been
    assert momenta[1].any()
    _, momenta = orthogonalized([spoilt], mu=0.9, skip=False)
    assert not momenta[0].isfinite().all()


def test_a_scaler_that_has_found_an_inf_leaves_the_momentum():
    _, (m,) = orthogonalized([torch.randn(3, 4)], mu=0.9, found=torch.ones(1))
    assert not m.any()


def test_packed_matrices_and_channels_last():
    packed, image = torch.randn(12, 7), torch.randn(8, 3, 2, 2)
    last = image.to(memory_format=torch.channels_last)
    alone = [*packed.split(4), image.flatten(1)]
    (u, v), _ = orthogonalized([packed, last], layouts=[Layout("rows", 3), Layout()])
    parts, _ = orthogonalized(alone)
    assert torch.equal(u, torch.cat(parts[:3]))
    assert torch.allclose(v.flatten(1), parts[3], atol=2e-3)


def test_rows_without_a_gradient_are_hidden_where_that_is_asked():
    g = torch.randn(9, 4)
    g[4] = 0
    m = torch.randn(9, 4)
    (hidden, shown), _ = orthogonalized(
        [g, g], momenta=[m.to(DEVICE, copy=True) for _ in range(2)], mu=0.9, rows=[0]
    )
    assert not hidden[4].any()
    assert shown[4].any()
    keep = torch.arange(9) != 4
    assert torch.equal(hidden[keep], shown[keep])


def test_large_matrices_are_worked_on_some_at_a_time(monkeypatch):
    monkeypatch.setattr(matrices_cuda, "_AT_ONCE", 100)
    xs = [torch.randn(9, 8) for _ in range(3)]
    apart, _ = orthogonalized(xs)
    monkeypatch.undo()
    together, _ = orthogonalized(xs)
    assert all(map(torch.equal, apart, together))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wnmuon_steps_by_them_as_it_steps_plainly(monkeypatch, dtype):
    """On CUDA as a matter of course; elsewhere in Triton's interpreter."""
    monkeypatch.setattr(matrices, "uses_kernels", lambda p: True)
    nets = []
    for fused in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Embedding(7, 6), torch.nn.Linear(6, 9))
        nets.append((net.to(DEVICE, dtype), fused))
    opts = [WNMuon(net, fused=fused) for net, fused in nets]
    tokens, noise = torch.tensor([[0, 3], [3, 5]], device=DEVICE), torch.randn(3, 9, device=DEVICE)
    for k in range(3):
        for (net, _), opt in zip(nets, opts, strict=True):
            opt.zero_grad()
            (net(tokens).float() * noise[k]).square().sum().backward()
            opt.step()
    assert not opts[0].why_plain()
    near = 0.1 * 0.03 if dtype == torch.float32 else 0.02  # of a step, ρ/C: float16 and float32
    for (name, p), q in zip(nets[0][0].named_parameters(), nets[1][0].parameters(), strict=True):
        for of in ("m", "average", "b"):
            first, second = opts[0].state[p][of].float(), opts[1].state[q][of].float()
            assert torch.allclose(first, second, atol=near, rtol=1e-2), (name, of)
        assert torch.allclose(p.float(), q.float(), atol=3 * near), name
    unseen = opts[0].state[nets[0][0][0].weight]["b"].flatten()[[1, 2, 4, 6]]
    assert unseen.tolist() == [10.0] * 4
