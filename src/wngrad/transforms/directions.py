"""Directions: what the rule measures, and what x moves by, one equation each.

A direction is a function of a leaf. It gives u, whose norm enters b, and a function of the blocks
after the rule, which gives what is subtracted from x and the new buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from wngrad import rule
from wngrad.muon_numbers import BETA2, VECTOR_SCALE
from wngrad.transforms.blocks import Blocks, wider
from wngrad.transforms.layouts import Matrices
from wngrad.transforms.orthogonal import orthogonalize
from wngrad.transforms.settings import Number, Settings, is_off

Displacement = Callable[[Blocks], tuple[Array, dict[str, Array]]]


class Leaf(NamedTuple):
    """What a step knows of one leaf before the rule."""

    g: Array  # the gradient as seen: in float32 or wider, with coupled decay in it
    x: Any  # the parameter; None where no decay needs it
    lam: Any  # λ
    buffers: dict[str, Array]  # those of the state, in the types they are stored in


Direction = Callable[[Leaf], tuple[Array, Displacement]]


def over_b(leaf: Leaf) -> tuple[Array, Displacement]:
    """u = g,  x ← x − g/b_j: for a chain in which λ comes later."""
    return leaf.g, lambda blocks: (blocks.over(leaf.g), {})


def gradient(leaf: Leaf) -> tuple[Array, Displacement]:
    """u = g,  x ← x − λ g/b_j  (Alg. 3)."""
    return leaf.g, lambda blocks: (leaf.lam * blocks.over(leaf.g), {})


def momentum(leaf: Leaf, mu: Number) -> tuple[Array, Displacement]:
    """u = g,  v ← μ·v + λ g/b_j,  x ← x − v."""

    def displacement(blocks: Blocks) -> tuple[Array, dict[str, Array]]:
        v, g = wider(leaf.buffers["velocity"]), blocks.scaled(leaf.g)
        v = rule.momentum(v, g, blocks.divisor, mu, leaf.lam)
        return v, {"velocity": v}

    return leaf.g, displacement


def running_mean(leaf: Leaf, beta: Number) -> tuple[Array, Displacement]:
    """u = g,  v ← β·(b_{j-1}/b_j)·v + (1−β)·λ g/b_j,  x ← x − v/(1−βᵗ)  (Alg. 4)."""

    def displacement(blocks: Blocks) -> tuple[Array, dict[str, Array]]:
        v, g, t = wider(leaf.buffers["velocity"]), blocks.scaled(leaf.g), leaf.buffers["t"] + 1
        v = rule.mean_step(v, g, blocks.before, blocks.divisor, beta, leaf.lam)
        return v / bias_correction(beta, t), {"velocity": v, "t": t}

    return leaf.g, displacement


def adam(leaf: Leaf, mu: Number) -> tuple[Array, Displacement]:
    """u = 0.3·m̂/√v̂,  x ← x − u/b_j: WNMuon's direction of a vector."""
    t = leaf.buffers["t"] + 1
    m = rule.running_mean(wider(leaf.buffers["m"]), leaf.g, mu)
    # √(β₂·v + (1−β₂)·g²) of √v, which neither overflows nor underflows where g does not.
    old, new = math.sqrt(BETA2), math.sqrt(1 - BETA2)
    rms = wider(leaf.buffers["rms"])
    rms = _by_parts(lambda r, g: jnp.hypot(old * r, new * g), rms, leaf.g)
    unbiased = jnp.sqrt(bias_correction(BETA2, t)) / bias_correction(mu, t)
    ratio = _by_parts(lambda m, r: m / jnp.where(r == 0, 1, r), m, rms)
    u = VECTOR_SCALE * unbiased * ratio
    return u, lambda blocks: (blocks.over(u), {"m": m, "rms": rms, "t": t})


def orthogonalized(
    leaf: Leaf, settings: Settings, matrices: Matrices
) -> tuple[Array, Displacement]:
    """u = max(1, √(out/in))·UVᵀ of the momentum UΣVᵀ,  x ← x − (u + w·x)/b_j: of a matrix.

    Of an embedding, rows without a gradient do not move, and no row decays.
    """
    m = rule.running_mean(wider(leaf.buffers["m"]), leaf.g, settings.momentum)
    ahead = rule.running_mean(m, leaf.g, settings.momentum)

    def polar_factor(stack: Array) -> Array:
        _, out, size = stack.shape
        scale = max(1.0, math.sqrt(out / size)) if size else 1.0
        return scale * orthogonalize(stack, settings.precision)

    u = placed_by_compiler(lambda m: matrices.apply(polar_factor, m), ahead)
    if matrices.by_rows:
        u = u * jnp.any(leaf.g != 0, matrices.inputs, keepdims=True)
    off = is_off(settings.weight_decay) or matrices.by_rows
    decayed = u if off else u + settings.weight_decay * wider(leaf.x)
    return u, lambda blocks: (blocks.over(decayed), {"m": m})


def _by_parts(f: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
    """f, of a complex number's two parts each by itself."""
    if not jnp.iscomplexobj(x):
        return f(x, y)
    return jax.lax.complex(f(x.real, y.real), f(x.imag, y.imag))


def bias_correction(beta: Any, t: Array) -> Array:
    """1 − βᵗ for t >= 1, to the last digits: βᵗ is near 1, and its rounding all of the rest."""
    if isinstance(beta, Array):
        log: Any = jnp.log1p(beta - 1)
    else:
        log = math.log(beta) if beta > 0 else -math.inf
    return -jnp.expm1(t * log)


def placed_by_compiler(f: Callable[[Array], Array], x: Array) -> Array:
    """f(x), placed as x is, where products of matrices must not ask how to place their results.

    Under a mesh with explicit axes they do; older versions of JAX have no such meshes.
    """
    sharding = jax.typeof(x).sharding if hasattr(jax, "typeof") else None
    if sharding is None or not sharding.mesh.explicit_axes:
        return f(x)
    placed: Array = jax.sharding.auto_axes(f, out_sharding=sharding)(x)
    return placed
