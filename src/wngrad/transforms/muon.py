"""WNMuon as an optax transformation: the paper's rule over an orthogonalized direction."""

# No annotations from __future__: optax's tools look for `ScalarOrSchedule` itself, not its name.

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from wngrad import rule
from wngrad.muon_numbers import BETA2, FRESH, LEAST, VECTOR_SCALE
from wngrad.transforms.blocks import Blocks, norm_of, times, wider
from wngrad.transforms.chains import bias_correction, is_off, narrowed, placed_by_compiler, zero
from wngrad.transforms.checks import checked
from wngrad.transforms.layouts import Layouts, Matrices
from wngrad.transforms.orthogonal import orthogonalize
from wngrad.transforms.settings import BInit, Layout, Nonfinite, Number, PyTree, Rate


class WNMuonState(NamedTuple):
    """b and the momentum of every leaf, and what Adam's direction keeps of the vectors."""

    count: Any  # updates seen, for a schedule
    b: PyTree
    m: PyTree  # μ·m + (1−μ)·g
    rms: PyTree  # √v of vectors; `optax.MaskedNode()` for matrices, and so is t
    t: PyTree  # the gradients in m and rms, for each b
    skipped: Array  # blocks left alone so far
    norm: PyTree = ()  # with `finetune`: of the neurons of every leaf before the first step


def wnmuon(
    learning_rate: Rate = 0.3,
    *,
    momentum: Number | None = 0.9,
    b_init: BInit = 10.0,
    weight_decay: Number | None = 0.1,
    layout: Layout = None,
    nonfinite: Nonfinite = "propagate",
    finetune: bool = False,
    precision: Any = "highest",
) -> optax.GradientTransformationExtraArgs:
    """Muon's direction under WNGrad's learning rate: nothing to tune.

    u = the momentum of a matrix, orthogonalized; b_j ← b_{j-1} + ‖u‖²/b_{j-1} for every neuron,
    from b₁ = C; then x_j ← x_{j-1}·(1 − w·ρ/b_j) − ρ u/b_j. Vectors take Adam's direction, at
    0.3 ρ. `optax.chain(wnmuon(), polynomial_average())` keeps the average of the parameters, which
    is what to evaluate.

    Args:
        learning_rate: ρ, the length of a step in units of a neuron: a number, an array or a
            schedule. A step at ρ = 0 changes nothing.
        momentum: μ, and β₁ of the vectors.
        b_init: C: as many steps are about alike as C²/2 is; or as for `wngrad`, from ‖u₁‖.
        weight_decay: w, in units of the step; for matrices alone, embeddings apart.
        layout: what each leaf is: "matrix" (the neuron last), "embedding" (one row for each index
            of axis 0; rows without a gradient do not move), "vector", or `MatrixAxes` for any
            other matrix or stack of matrices. A function of a leaf's path and shape, or a tree of
            labels, of which one may stand for a whole part of the tree. By default Flax's
            convention, `flax_layout`.
        nonfinite: "propagate", or "skip" to leave a matrix, or an entry of a vector, with a
            gradient that is not finite as it was and count its blocks.
        finetune: for weights that were trained before: ρ is in units of each leaf's own norm, the
            root mean square of a matrix's neurons' norms or of a vector's entries in `init`, at
            least 0.1 and 1/√3 of what is zero.
        precision: of the products in the orthogonalization, as `jnp.matmul` takes it. "highest" is
            that of float32 on every device.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from wngrad.transforms import wnmuon
        >>> params = {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}
        >>> opt = wnmuon()
        >>> updates, state = opt.update(params, opt.init(params), params)
        >>> optax.tree.get(state, "b")["kernel"].shape
        (1, 2)

    Note:
        Trees of `optax.contrib.MuonDimensionNumbers`, with None for vectors, are taken as they
        are. Complex leaves take Adam's direction, whatever their label. Every leaf is
        orthogonalized by itself; a stack of layers is one batch.
    """
    owner = "wnmuon"
    rate = learning_rate
    if not callable(rate):
        rate = checked(owner, "learning_rate", rate)
    layouts = Layouts(owner, layout)
    blocks = Blocks(owner, _indicator(rate), b_init, "neuron", layouts.neuron_axis, nonfinite)
    mu = checked(owner, "momentum", momentum, below=1.0)
    decay = checked(owner, "weight_decay", weight_decay)
    if not isinstance(finetune, bool):
        raise TypeError(f"{owner}: `finetune` must be True or False, got {finetune!r}.")
    numbers = 0.0 if mu is None else mu, None if is_off(decay) else decay
    step = _Step(blocks, layouts, *numbers, finetune, precision)
    scaling = optax.GradientTransformation(step.init, step.update)
    chain = optax.chain(scaling, optax.scale_by_learning_rate(rate))
    return narrowed(chain, None if is_off(decay) else owner)


def _indicator(rate: Rate) -> Rate:
    """ρ as the rule for b sees it: 0 where nothing is to change, else 1."""
    if callable(rate):
        schedule: Callable[[Any], Any] = rate
        return lambda count: _indicator(schedule(count))
    return (rate != 0).astype(jnp.float32) if isinstance(rate, Array) else float(rate != 0)


class _Step:
    """The direction of every leaf, measured by the rule and divided by b, with decay in it."""

    def __init__(
        self,
        blocks: Blocks,
        layouts: Layouts,
        mu: Number,
        decay: Number | None,
        finetune: bool,
        precision: Any,
    ) -> None:
        self._blocks, self._layouts, self._mu, self._decay = blocks, layouts, mu, decay
        self._finetune, self._precision = finetune, precision

    def init(self, params: PyTree) -> WNMuonState:
        def of_vectors(path: tuple[Any, ...], p: Array, like: Array) -> Any:
            vector = self._matrices(path, p) is None
            return jnp.zeros_like(like) if vector else optax.MaskedNode()

        b, over = self._blocks.first(params), jax.tree_util.tree_map_with_path
        rms, t = over(of_vectors, params, params), over(of_vectors, params, b)
        m = jax.tree.map(jnp.zeros_like, params)
        norm = jax.tree.map(_norm, params, b) if self._finetune else ()
        return WNMuonState(zero(), b, m, rms, t, zero(), norm)

    def update(
        self, g: PyTree, state: WNMuonState, params: PyTree | None = None
    ) -> tuple[PyTree, WNMuonState]:
        over = jax.tree_util.tree_map_with_path
        # m ← μ·m + (1−μ)·g, and v ← β₂·v + (1−β₂)·g² of vectors
        m = jax.tree.map(lambda m, g: rule.running_mean(wider(m), wider(g), self._mu), state.m, g)
        rms = _of_vectors(_next_rms, state.rms, g)
        u = over(self._direction, g, m, rms, state.t)
        grown = self._blocks.grow(u, state.b, state.count)
        blocks = grown.scale, grown.divisor, grown.live
        moves = over(self._move, u, *blocks, u if params is None else params)
        if self._finetune:
            moves = jax.tree.map(lambda move, norm: norm * move, moves, state.norm)
        return moves, WNMuonState(
            count=optax.safe_increment(state.count),
            b=grown.b,
            m=jax.tree.map(_stored, state.m, m, grown.live),
            rms=_of_vectors(_stored, state.rms, rms, grown.live),
            t=_of_vectors(lambda t, live: t + live, state.t, grown.live_blocks),
            skipped=state.skipped + grown.skipped,
            norm=state.norm,
        )

    def _matrices(self, path: tuple[Any, ...], p: Array) -> Matrices | None:
        return None if jnp.iscomplexobj(p) else self._layouts.matrices(path, p.shape)

    def _direction(self, path: tuple[Any, ...], g: Array, m: Array, rms: Any, t: Any) -> Array:
        """What the rule measures: orthogonalized momentum, or Adam's direction for a vector."""
        matrices = self._matrices(path, g)
        if matrices is None:
            return _adam(m, rms, t, self._mu)
        ahead = rule.running_mean(m, wider(g), self._mu)

        def orthogonalized(leaf: Array) -> Array:
            u = orthogonalize(matrices.of(leaf), self._precision)
            return matrices.scale(g.shape) * matrices.restore(u, g.shape)

        u = placed_by_compiler(orthogonalized, ahead)
        return u * matrices.seen(g) if matrices.by_rows else u

    def _move(
        self, path: tuple[Any, ...], u: Array, scale: Array, b: Array, live: Array, x: Array
    ) -> Array:
        """(u + w·x)/b, and exactly 0 where a block does not take the step."""
        matrices = self._matrices(path, u)
        if self._decay is not None and matrices is not None and not matrices.by_rows:
            u = u + self._decay * wider(x)
        return jnp.where(live, times(scale, u) / b, 0)


def _norm(p: Array, b: Array) -> Array:
    """√(‖p‖²/neurons), one for each b; at least 0.1, or 1/√3 where that is 0."""
    # Divided first: the norm of all may be too large for its type where that of one is not.
    mean = norm_of(wider(p) / math.sqrt(max(1, b.size)), None)
    return jnp.where((p != 0).any(), jnp.maximum(mean, LEAST), FRESH).astype(jnp.float32)


def _next_rms(rms: Array, g: Array) -> Array:
    """√(β₂·v + (1−β₂)·g²) of √v, which neither overflows nor underflows where g does not."""
    old, new = math.sqrt(BETA2), math.sqrt(1 - BETA2)
    return _by_parts(lambda r, g: jnp.hypot(old * r, new * g), wider(rms), wider(g))


def _adam(m: Array, rms: Array, t: Array, mu: Number) -> Array:
    """0.3·m̂/√v̂, Adam's direction; t counts the gradients before this one."""
    unbiased = jnp.sqrt(bias_correction(BETA2, t + 1)) / bias_correction(mu, t + 1)
    ratio = _by_parts(lambda m, r: m / jnp.where(r == 0, 1, r), m, rms)
    return VECTOR_SCALE * unbiased * ratio


def _by_parts(f: Callable[[Array, Array], Array], x: Array, y: Array) -> Array:
    """f, of a complex number's two parts each by itself."""
    if not jnp.iscomplexobj(x):
        return f(x, y)
    return jax.lax.complex(f(x.real, y.real), f(x.imag, y.imag))


def _stored(old: Array, new: Array, live: Array) -> Array:
    """A buffer in its own type, unchanged where a block does not take the step."""
    return jnp.where(live, new, old).astype(old.dtype)


def _of_vectors(f: Callable[..., Array], tree: PyTree, *rest: PyTree) -> PyTree:
    """f over the leaves of a tree that has none for matrices."""

    def is_masked(leaf: Any) -> bool:
        return isinstance(leaf, optax.MaskedNode)

    def leaf(first: Any, *others: Any) -> Any:
        return first if is_masked(first) else f(first, *others)

    return jax.tree.map(leaf, tree, *rest, is_leaf=is_masked)
