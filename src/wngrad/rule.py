"""The recursions of the paper as pure arithmetic, and nothing else.

Every function takes and returns floats, NumPy arrays, torch tensors or JAX arrays alike: only
`+ - * / **`. Reductions are not here, each backend owns its norm. The paper's letters: `lam` is λ,
`b` the divisor that learns, `g` a gradient, `m` its running mean ĝ, `x` the parameters.
"""

from __future__ import annotations

from typing import Any

Array = Any  # A float, or any array with Python's arithmetic operators.


def next_b(b: Array, sq_norm: Array, lam: Array) -> Array:
    """b_j = b_{j-1} + λ²‖g‖²/b_{j-1}  (Alg. 3; Algs. 1 and 2 with λ = 1)."""
    return b + lam**2 * sq_norm / b


def next_b_of_norm(b: Array, norm: Array, lam: Array) -> Array:
    """`next_b` from ‖g‖ itself: nothing is squared that could overflow before b does."""
    return b + lam * norm * (lam * norm / b)


def first_b(norm: Array, lam: Array, c: Array) -> Array:
    """b₁ = C·λ·‖g₁‖  (Remark 2.2, for the scaled loss λf)."""
    return c * lam * norm


def momentum(v: Array, g: Array, b: Array, mu: Array, lam: Array) -> Array:
    """v ← μ·v + λ g/b_j  (WNGrad-Momentum); μ = 0 is plain WNGrad.

    Its authors released buf ← μ·buf + g/b_j, x ← x − λ·buf: the same while λ is constant. With λ
    in the buffer ‖v‖ ≤ ½/(1−μ) whatever λ does, since λ‖g‖/b_j ≤ ½ in every step.
    """
    return mu * v + lam * (g / b)


def running_mean(m: Array, g: Array, beta: Array) -> Array:
    """ĝ_j = β ĝ_{j-1} + (1−β) g_{j-1}  (Alg. 4)."""
    return beta * m + (1 - beta) * g


def mean_step(v: Array, g: Array, b_before: Array, b: Array, beta: Array, lam: Array) -> Array:
    """v ← β·(b_{j-1}/b_j)·v + (1−β)·λ g/b_j, the mean of λg over b_j  (Alg. 4).

    (λ/b_j)·ĝ_j while λ is constant. As it takes in each g with the λ of its own step, and b never
    decreases, ‖v‖ ≤ ½·(1−βᵗ) whatever λ does.
    """
    return kept(beta, b_before, b) * v + (1 - beta) * (lam * (g / b))


def kept(beta: Array, b_before: Array, b: Array) -> Array:
    """β·b_{j-1}/b_j: what is left of a mean that was divided by b_{j-1}."""
    return beta * (b_before / b)


def unbiased(m: Array, beta: Array, t: Array) -> Array:
    """ĝ/(1−βᵗ), with t = 1 at the first step  (Alg. 4)."""
    return m / (1 - beta**t)


def descend(x: Array, direction: Array, lam: Array) -> Array:
    """x_j = x_{j-1} − λ·direction, where the direction is g/b_j or what stands in for it."""
    return x - lam * direction


def step(x: Array, g: Array, b: Array) -> Array:
    """x_j = x_{j-1} − g/b_{j-1}  (Algs. 1 and 2)."""
    return x - g / b


def adagrad_norm(b: Array, sq_norm: Array, lam: Array) -> Array:
    """b_j² = b_{j-1}² + λ²‖g‖²: AdaGrad-Norm (Ward, Wu, Bottou 2019), WNGrad's successor."""
    return (b**2 + lam**2 * sq_norm) ** 0.5


def decay(x: Array, lam: Array, weight_decay: Array) -> Array:
    """Decoupled weight decay: x ← x·(1 − λ·w), before the step and outside the norm."""
    return x * (1 - lam * weight_decay)


def polynomial_weight(eta: Array, k: Array) -> Array:
    """(η+1)/(k+η): how much of the k-th iterate the polynomial average takes over."""
    return (eta + 1) / (k + eta)
