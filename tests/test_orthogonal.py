"""Orthogonalization, against the singular value decomposition in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from wngrad.optim.orthogonal import (
    _polynomials,
    _scaled,
    orthogonalize,
    orthogonalize_all,
)
from wngrad.polynomials import COEFFICIENTS, LARGEST, LEAST, WIDE

SPECTRA = {
    "one": lambda r: np.eye(1, r)[0],
    "flat": np.ones,
    "even": lambda r: np.geomspace(1, 1e-3, r),
    "two levels": lambda r: np.where(np.arange(r) < (r + 1) // 2, 1, 1e-3),
    "one above": lambda r: np.where(np.arange(r) < 1, 1, 0.03),
    "harmonic": lambda r: 1 / np.arange(1, r + 1),
}
SHAPES = [(1, 1), (1, 7), (7, 1), (3, 5), (10, 100), (64, 64), (96, 32)]


def matrix(spectrum, rows, columns, seed=0, dtype=torch.float32):
    """U Σ Vᵀ with these singular values; also U and V."""
    g = torch.Generator().manual_seed(seed)
    r = min(rows, columns)
    s = torch.from_numpy(np.asarray(SPECTRA[spectrum](r), float))
    u, v = (
        torch.linalg.qr(torch.randn(n, r, generator=g, dtype=torch.float64))[0]
        for n in (rows, columns)
    )
    return ((u * s) @ v.T).to(dtype), s, u, v


def values(x):
    return torch.linalg.svdvals(x.double())


def test_each_polynomial_is_the_best_for_what_the_one_before_it_leaves():
    low, high = 1e-3, 1.0
    for k, coefficients in enumerate(COEFFICIENTS):
        top = high if k == 0 else 1.03 * high
        x = np.unique([*np.geomspace(low, top, 2000), *np.linspace(low, top, 2000)])
        powers, one = np.stack([x, x**3, x**5], 1), np.ones((len(x), 1))
        above, below = np.hstack([powers, -one]), np.hstack([-powers, -one])
        found = linprog(
            [0, 0, 0, 1],
            A_ub=np.vstack([above, below]),
            b_ub=np.r_[one[:, 0], -one[:, 0]],
            bounds=[(None, None)] * 3 + [(0, None)],
        )
        error = found.x[3]
        assert coefficients == pytest.approx(found.x[:3], rel=2e-3)
        assert abs(1 - powers @ coefficients).max() <= error + 1e-3
        low, high = 1 - error, 1 + error


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_singular_values_come_within_the_promised_interval(spectrum, shape):
    x, s, u, v = matrix(spectrum, *shape)
    result = orthogonalize(x)
    found = values(result)
    rank = int((s > 0).sum())
    assert result.dtype == torch.float32
    assert found[0] <= LARGEST
    assert found[rank - 1] >= LEAST
    # Singular vectors are kept: to what float32 knows of σ, or, where a row is long, of σ².
    near = 5e-3 if max(shape) > WIDE * min(shape) else 2e-3
    inner = u[:, :rank].T @ result.double() @ v[:, :rank]
    assert torch.allclose(inner, inner.diagonal().diag(), atol=near)
    large = inner.diagonal()[s[:rank] >= 1 / 250]
    assert ((large > 0.85) & (large < 1.15)).all()


@given(
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(0, 10**6),
    st.integers(-60, 60),
    st.floats(0, 4),
)
@settings(max_examples=150)
def test_no_singular_value_ever_exceeds_the_largest_promised(rows, columns, seed, power, decades):
    """Whatever the spectrum, the size and the scale."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g) * torch.logspace(0, -decades, columns)
    result = orthogonalize(x * 2.0**power)
    assert values(result)[0] <= LARGEST
    assert torch.equal(result, orthogonalize(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_give_the_same_up_to_their_precision(dtype):
    x, *_ = matrix("harmonic", 8, 20, dtype=dtype)
    result, wide = orthogonalize(x), orthogonalize(x.double())
    assert result.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(result.double(), wide, atol=1e-4)


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e30, 3e38], ids=str)
def test_tiny_and_huge_entries_neither_vanish_nor_overflow(size):
    x, *_ = matrix("harmonic", 6, 9)
    x = x / x.abs().max()
    assert torch.allclose(orthogonalize(x * size), orthogonalize(x), atol=1e-3)


def test_zero_stays_zero():
    assert not orthogonalize(torch.zeros(2, 4, 3)).any()
    x, *_ = matrix("even", 6, 9)
    for rows in (x.clone(), x.T.clone()):
        rows[2] = 0
        result = orthogonalize(rows)
        assert not result[2].any()
        assert values(result)[0] <= LARGEST
    stack = orthogonalize(torch.stack([x, torch.zeros_like(x)]))
    assert torch.allclose(stack[0], orthogonalize(x), atol=1e-5)
    assert not stack[1].any()
    assert orthogonalize(torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(4, 6), (4, 40)], ids=str)
def test_what_is_not_finite_shows_in_its_own_matrix_alone(bad, shape):
    x = torch.stack([matrix("even", *shape)[0]] * 2)
    x[0, 1, 2] = bad
    assert orthogonalize(x[0]).isnan().all()
    result = orthogonalize(x)
    assert result[0].isnan().all()
    assert values(result[1])[0] <= LARGEST


@pytest.mark.parametrize("shape", [(2, 9), (9, 2), (5, 40)], ids=str)
def test_long_rows_come_to_the_same(shape):
    """By the matrix of rows times rows alone, or by all of it: in float64 to many digits."""
    x, *_ = matrix("even", *shape, dtype=torch.float64)
    whole = _polynomials(_scaled(x if shape[0] < shape[1] else x.T))
    whole = whole if shape[0] < shape[1] else whole.T
    assert torch.allclose(orthogonalize(x), whole, atol=1e-9)


def test_a_list_is_worked_on_in_batches_of_one_size():
    g = torch.Generator().manual_seed(0)
    shapes = [(1, 4, 6), (2, 6, 4), (1, 3, 3), (3, 4, 6)]
    stacks = [torch.randn(shape, generator=g) for shape in shapes]
    for result, stack in zip(orthogonalize_all(stacks), stacks, strict=True):
        assert torch.allclose(result, orthogonalize(stack), atol=1e-5)


def test_a_compiler_takes_it_as_one_graph():
    x = torch.randn(2, 5, 3)
    compiled = torch.compile(orthogonalize, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), orthogonalize(x))
