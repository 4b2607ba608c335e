"""The guard around b, held to scalar arithmetic and to itself over all kinds of arrays."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import jax_in_float64
from wngrad.guard import guarded_b

SIZES = st.sampled_from(
    [0.0, 5e-324, 1e-320, 1e-300, 0.75, 9.0, 1e200, 1.7e308, math.inf, math.nan]
)
SQ_NORMS = SIZES | st.floats(0, 1e6)
BS = st.sampled_from([0.0, 1e-300, 1.0, 1.7e308]) | st.floats(1e-3, 1e6)
BLOCKS = st.lists(st.tuples(BS, SQ_NORMS), min_size=1, max_size=8)
OPTIONS = st.fixed_dictionaries(
    {
        "lam": st.sampled_from([1e-9, 0.56, 1.0, 1e5]),
        "c": st.sampled_from([None, 0.5, 1.0]),
        "floor": st.sampled_from([0.0, 1e-290]),
        "hold": st.booleans(),
    }
)


def scalar_b(b: float, sq: float, lam: float, c: float | None, floor: float, hold: bool) -> float:
    """The rule and its guard for one block, in plain words."""
    if b == 0 and c is not None and sq > 0:
        norm = math.sqrt(sq)
        b = c * lam * norm if norm >= floor and c * lam * norm >= floor else 0.0
    if not hold:
        b = b + lam**2 * sq / b if b != 0 else 0 * sq
    return math.nan if math.isinf(b) else b


def as_numpy(arrays: tuple[Any, Any]) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(arrays[0]), np.asarray(arrays[1])


@given(BLOCKS, OPTIONS)
@settings(max_examples=200)
def test_numpy_and_torch_are_the_scalar_rule(blocks: list[Any], options: Any) -> None:
    b, sq = np.array(blocks).T
    lam = options.pop("lam")
    with np.errstate(all="ignore"):
        new, finite = guarded_b(np, b, sq, lam, **options)
    expected = [scalar_b(*block, lam, **options) for block in blocks]
    np.testing.assert_array_equal(new, expected)
    np.testing.assert_array_equal(finite, np.isfinite(expected) & np.isfinite(sq))
    torch_b, torch_finite = as_numpy(
        guarded_b(torch, torch.tensor(b), torch.tensor(sq), lam, **options)
    )
    np.testing.assert_array_equal(finite, torch_finite)
    # Bitwise, but that torch's √ may miss the last digit.
    np.testing.assert_allclose(new, torch_b, rtol=0 if options["c"] is None else 5e-16)


@given(BLOCKS, OPTIONS)
def test_of_norms_numpy_and_torch_agree_bitwise(blocks: list[Any], options: Any) -> None:
    b, norm = np.array(blocks).T
    with np.errstate(all="ignore"):
        ours = guarded_b(np, b, None, norm=norm, **options)
    twin = guarded_b(torch, torch.tensor(b), None, norm=torch.tensor(norm), **options)
    for array, other in zip(ours, as_numpy(twin), strict=True):
        np.testing.assert_array_equal(array, other)


@pytest.fixture(scope="module")
def jax_programs() -> dict[Any, Any]:
    """One compiled program for each combination of the static options, at one shape."""
    return {
        (c, hold): jax.jit(partial(guarded_b, jnp, c=c, hold=hold))
        for c in (None, 0.5, 1.0)
        for hold in (False, True)
    }


@given(BLOCKS, OPTIONS)
@settings(max_examples=100, deadline=None)
def test_jax_is_numpy_bitwise(jax_programs: Any, blocks: list[Any], options: Any) -> None:
    # XLA flushes denormal numbers to 0 on a CPU.
    tiny = np.finfo(np.float64).tiny
    lam_2 = options["lam"] ** 2
    blocks = [(b, 0.0 if 0 < sq < tiny or 0 < lam_2 * sq < tiny else sq) for b, sq in blocks]
    b, sq = np.array(blocks + [(1.0, 1.0)] * (8 - len(blocks))).T
    with np.errstate(all="ignore"):
        new, finite = guarded_b(np, b, sq, **options)
    with jax_in_float64():
        program = jax_programs[options["c"], options["hold"]]
        lam, floor = np.float64(options["lam"]), np.float64(options["floor"])
        twin = as_numpy(program(jnp.asarray(b), jnp.asarray(sq), lam, floor=floor))
    for ours, theirs in zip((new, finite), twin, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_the_new_b_is_rounded_before_it_is_judged() -> None:
    """What is finite in float64 and not in float32, the type b is stored in, is an overflow."""
    wide = torch.tensor([1.0, 1.0], dtype=torch.float64)
    sq = torch.tensor([1e39, 4.0], dtype=torch.float64)
    new, finite = guarded_b(torch, wide, sq, 1.0, narrow=lambda b: b.to(torch.float32))
    assert new.dtype == torch.float32
    assert finite.tolist() == [False, True]
    assert math.isnan(new[0])
    assert new[1] == 5


def test_a_norm_is_not_squared() -> None:
    b, norm = np.array([1e200, 0.0]), np.array([1e200, 1e200])
    new, finite = guarded_b(np, b, None, 1.0, c=1.0, norm=norm)
    assert new.tolist() == [2e200, 2e200]
    assert finite.all()


def test_a_gradient_of_zero_has_a_finite_derivative() -> None:
    sq = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    new, _ = guarded_b(torch, torch.zeros(2, dtype=torch.float64), sq, 1.0, c=1.0)
    (slope,) = torch.autograd.grad(new.sum(), sq)
    assert torch.isfinite(slope).all()
