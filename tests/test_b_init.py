"""b₁ is spelled alike for NumPy, torch and JAX."""

from __future__ import annotations

import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from wngrad import WNGrad, minimize, minimize_stochastic
from wngrad.transforms import wngrad
from wngrad.values import parse_b_init


def by_minimize(b_init):
    minimize(lambda x: x @ x, [3.0, 4.0], jac=lambda x: 2 * x, b_init=b_init, max_steps=1)


def by_minimize_stochastic(b_init):
    minimize_stochastic(lambda x, rng: 2 * x, [3.0, 4.0], b_init=b_init, steps=1)


def by_torch(b_init):
    WNGrad([torch.nn.Parameter(torch.ones(2))], b_init=b_init)


def by_jax(b_init):
    wngrad(b_init=b_init).init(jnp.ones(2))


DOORS = [by_minimize, by_minimize_stochastic, by_torch, by_jax]
GOOD = [
    1, 2.5, 1e-3, np.float64(2), np.float32(0.5), np.int64(3), "gradient", ("gradient", 1.0),
    ("gradient", 2), ["gradient", 1.0], ("gradient", np.float32(2)), json.loads('["gradient", 3]'),
]  # fmt: skip
BAD = [
    None, True, False, 0, -1.0, math.nan, math.inf, 10**400, "grad", "", "2", b"gradient", 1j, {},
    (), [], ("gradient",), ["gradient"], ("gradient", 0), ("gradient", -1.0),
    ("gradient", math.nan), ("gradient", math.inf), ("gradient", "2"), ["gradient", "2"],
    ("gradient", None), ("gradient", True), ("gradient", [1.0]), ("gradient", 1.0, 2.0),
    ("grad", 1.0), ["x", 2.0],
    ("number", 2.5), (1.0, "gradient"), (1.0, 2.0), [1, 2, 3], [1.0], {"gradient": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("b_init", GOOD, ids=repr)
def test_what_one_takes_all_take(door, b_init):
    door(b_init)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("b_init", BAD, ids=lambda value: repr(value)[:30])
def test_what_one_refuses_all_refuse(door, b_init):
    with pytest.raises((TypeError, ValueError), match="`b_init`"):
        door(b_init)


def test_the_sampled_constant_is_for_minimize_alone():
    for b_init in ("lipschitz", ("lipschitz", 4), ["lipschitz", 4]):
        by_minimize(b_init)
        for door in DOORS[1:]:
            with pytest.raises(ValueError, match="`b_init`"):
                door(b_init)


def test_words_have_their_numbers():
    words = ("gradient", "lipschitz")
    read = [parse_b_init("here", value, "…", words=words) for value in ("gradient", "lipschitz", 3)]
    assert read == [("gradient", 1.0), ("lipschitz", 2), ("number", 3.0)]
