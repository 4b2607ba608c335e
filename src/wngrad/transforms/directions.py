"""Directions: functions of a leaf that are a method's equations, from its gradient to its move."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from wngrad import rule
from wngrad.muon_numbers import BETA2, VECTOR_SCALE
from wngrad.transforms.blocks import Blocks, times, wider
from wngrad.transforms.layouts import Matrices, Path
from wngrad.transforms.orthogonal import orthogonalize
from wngrad.transforms.settings import Number, Settings, is_off


class Leaf(NamedTuple):
    """What a direction is given of one leaf."""

    path: Path
    g: Array  # the gradient as seen: in float32 or wider, with coupled decay in it
    x: Any  # the parameter; None where there is no decay
    lam: Any  # λ
    buffers: dict[str, Array]  # those of the state, in the types they are stored in
    grow: Callable[[Array], Blocks]  # the rule for b, of u


Moved = tuple[Blocks, Array, dict[str, Array]]  # what is subtracted from x, and new buffers
Direction = Callable[[Leaf], Moved]


def over_b(leaf: Leaf) -> Moved:
    """x ← x − g/b_j: for a chain in which λ comes later."""
    blocks = leaf.grow(leaf.g)
    return blocks, blocks.over(leaf.g), {}


def gradient(leaf: Leaf) -> Moved:
    """x ← x − λ g/b_j  (Alg. 3)."""
    blocks = leaf.grow(leaf.g)
    return blocks, leaf.lam * blocks.over(leaf.g), {}


def momentum(leaf: Leaf, mu: Number) -> Moved:
    """v ← μ·v + λ g/b_j,  x ← x − v."""
    blocks, v = leaf.grow(leaf.g), wider(leaf.buffers["velocity"])
    v = rule.momentum(v, times(blocks.scale, leaf.g), blocks.divisor, mu, leaf.lam)
    return blocks, v, {"velocity": v}


def running_mean(leaf: Leaf, beta: Number) -> Moved:
    """v ← β·(b_{j-1}/b_j)·v + (1−β)·λ g/b_j,  x ← x − v/(1−βᵗ)  (Alg. 4)."""
    blocks, v, t = leaf.grow(leaf.g), wider(leaf.buffers["velocity"]), leaf.buffers["t"] + 1
    g, before, b = times(blocks.scale, leaf.g), blocks.before, blocks.divisor
    v = rule.mean_step(v, g, before, b, beta, leaf.lam)
    return blocks, v / bias_correction(beta, t), {"velocity": v, "t": t}


def adam(leaf: Leaf, mu: Number) -> Moved:
    """u = 0.3·m̂/√v̂,  x ← x − u/b_j: WNMuon's direction of a vector."""
    m, t = rule.running_mean(wider(leaf.buffers["m"]), leaf.g, mu), leaf.buffers["t"] + 1
    # √(β₂·v + (1−β₂)·g²) of √v, which neither overflows nor underflows where g does not.
    old, new, rms = math.sqrt(BETA2), math.sqrt(1 - BETA2), wider(leaf.buffers["rms"])
    rms = _by_parts(lambda r, g: jnp.hypot(old * r, new * g), rms, leaf.g)
    unbiased = jnp.sqrt(bias_correction(BETA2, t)) / bias_correction(mu, t)
    u = VECTOR_SCALE * unbiased * _by_parts(lambda m, r: m / jnp.where(r == 0, 1, r), m, rms)
    blocks = leaf.grow(u)
    return blocks, blocks.over(u), {"m": m, "rms": rms, "t": t}


def orthogonalized(leaf: Leaf, settings: Settings, matrices: Matrices) -> Moved:
    """u = max(1, √(out/in))·UVᵀ of the momentum UΣVᵀ,  x ← x − (u + w·x)/b_j: of a matrix.

    Of an embedding, rows without a gradient do not move, and no row decays.
    """
    m = rule.running_mean(wider(leaf.buffers["m"]), leaf.g, settings.momentum)
    ahead = rule.running_mean(m, leaf.g, settings.momentum)

    def polar_factor(stack: Array) -> Any:
        _, out, size = stack.shape
        scale = max(1.0, math.sqrt(out / size)) if size else 1.0
        return scale * orthogonalize(stack, settings.precision)

    u = placed_by_compiler(lambda m: matrices.apply(polar_factor, m), ahead)
    if matrices.by_rows:
        u = u * jnp.any(leaf.g != 0, matrices.inputs, keepdims=True)
    blocks = leaf.grow(u)
    if not (is_off(settings.weight_decay) or matrices.by_rows):
        u = u + settings.weight_decay * wider(leaf.x)
    return blocks, blocks.over(u), {"m": m}


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
