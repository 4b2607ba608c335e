"""WNGrad, WN-Adam and WNMuon as optax transformations: a direction, the rule, the rate."""

# No annotations from __future__: optax's tools look for `ScalarOrSchedule` itself, not its name.

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from wngrad.muon_numbers import FRESH, LEAST
from wngrad.transforms import directions
from wngrad.transforms.blocks import arrays, first_b, grown, norm_of, wider
from wngrad.transforms.directions import Direction, Leaf, Moved
from wngrad.transforms.layouts import Matrices, Path, matrices_of
from wngrad.transforms.settings import (
    BInit,
    Layout,
    NeuronAxis,
    Nonfinite,
    Number,
    Per,
    PyTree,
    Rate,
    Settings,
    is_off,
)


class WNGradState(NamedTuple):
    """b of every leaf, or one for all of them with `per="model"`."""

    count: Any  # updates seen, for a schedule
    b: PyTree
    velocity: PyTree | None  # μ·velocity + λ g/b, with momentum
    skipped: Array  # blocks left alone so far


class WNAdamState(NamedTuple):
    """As `WNGradState`; the velocity is a mean of λg over b, t the number of gradients in it."""

    count: Any
    b: PyTree
    velocity: PyTree
    t: PyTree
    skipped: Array


class WNMuonState(NamedTuple):
    """b and the momentum of every leaf, and what Adam's direction keeps of the vectors."""

    count: Any  # updates seen, for a schedule
    b: PyTree
    m: PyTree  # μ·m + (1−μ)·g
    rms: PyTree  # √v of vectors; `optax.MaskedNode()` for matrices, and so is t
    t: PyTree  # the gradients in m and rms, for each b
    skipped: Array  # blocks left alone so far
    norm: PyTree = ()  # with `finetune`: of the neurons of every leaf before the first step


def wngrad(
    learning_rate: Rate = 1.0,
    *,
    momentum: Number | None = None,
    weight_decay: Number | None = None,
    decoupled_weight_decay: bool = False,
    b_init: BInit = 1.0,
    per: Per = "neuron",
    neuron_axis: NeuronAxis = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """WNGrad (Alg. 3): b_j ← b_{j-1} + λ²‖g‖²/b_{j-1}, then x_j ← x_{j-1} − λ g/b_j.

    No block ever moves by more than ½ in one step, whatever λ does; with momentum by ½/(1−μ).

    Args:
        learning_rate: λ: a number, an array or a schedule. A step at λ = 0 changes nothing.
        momentum: μ of v ← μ·v + λ g/b_j, x ← x − v. Start from λ = 0.01 to 0.1 then.
        weight_decay: added to the gradient before the norm is taken.
        decoupled_weight_decay: shrink x by λ·weight_decay·x instead, outside the norm.
        b_init: b₁: a number, or "gradient" (or ("gradient", C)) for C·λ·‖g₁‖ of each block, set by
            its first gradient that is neither zero nor denormal.
        per: what shares one b: "neuron", "tensor" or "model".
        neuron_axis: the axis (or axes) that count neurons, for all leaves of two dimensions or
            more; or a function of a leaf's path and shape. By default Flax's convention,
            `flax_neuron_axis`.
        nonfinite: "propagate", or "skip" to leave a block with a gradient that is not finite as it
            was and count it.
    """
    settings = Settings("wngrad", **locals())
    return _transformation(settings, *_coupled(settings), _wngrad(settings), optax.scale(-1.0))


def wn_adam(
    learning_rate: Rate = 1.0,
    *,
    beta: Number = 0.9,
    weight_decay: Number | None = None,
    decoupled_weight_decay: bool = False,
    b_init: BInit = 1.0,
    per: Per = "neuron",
    neuron_axis: NeuronAxis = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """WN-Adam (Alg. 4): Adam's running mean ĝ under WNGrad's b; x ← x − (λ/b_j)·ĝ_j/(1−βᵗ).

    Where λ changes, the mean is that of λg: no block moves by more than ½ in one step.

    Args:
        learning_rate: as for `wngrad`, and so are all arguments but `beta`.
        beta: β of the running mean.
    """
    settings = Settings("wn_adam", **locals())
    return _transformation(settings, *_coupled(settings), _wn_adam(settings), optax.scale(-1.0))


def scale_by_wngrad(
    learning_rate: Rate = 1.0,
    *,
    momentum: Number | None = None,
    b_init: BInit = 1.0,
    per: Per = "neuron",
    neuron_axis: NeuronAxis = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """g ↦ g/b_j, or v/λ with momentum; arguments as for `wngrad`.

    λ enters b; `optax.scale_by_learning_rate` has to follow, with the same λ.
    """
    settings = Settings("scale_by_wngrad", **locals())
    return _transformation(settings, _wngrad(settings, rated=False))


def scale_by_wn_adam(
    learning_rate: Rate = 1.0,
    *,
    beta: Number = 0.9,
    b_init: BInit = 1.0,
    per: Per = "neuron",
    neuron_axis: NeuronAxis = None,
    nonfinite: Nonfinite = "propagate",
) -> optax.GradientTransformationExtraArgs:
    """g ↦ ĝ_j/((1−βᵗ)·b_j) with b from the raw gradient; to be followed as `scale_by_wngrad`.

    Where λ changes, λĝ is the mean of λg.
    """
    settings = Settings("scale_by_wn_adam", **locals())
    return _transformation(settings, _wn_adam(settings, rated=False))


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
    settings = Settings("wnmuon", **locals())
    matrices = matrices_of("wnmuon", layout)

    def stack_of(path: Path, p: Array) -> Matrices | None:
        return None if jnp.iscomplexobj(p) else matrices(path, p.shape)

    def direction(leaf: Leaf) -> Moved:
        stack = stack_of(leaf.path, leaf.g)
        if stack is None:
            return directions.adam(leaf, settings.momentum)
        return directions.orthogonalized(leaf, settings, stack)

    def of_vectors(path: Path, p: Array, part: Array) -> Any:
        return jnp.zeros_like(part) if stack_of(path, p) is None else optax.MaskedNode()

    def start(params: PyTree, b: PyTree) -> WNMuonState:
        rms, t = (jax.tree_util.tree_map_with_path(of_vectors, params, x) for x in (params, b))
        norm = jax.tree.map(_norm, params, b) if finetune else ()
        return WNMuonState(_zero(), b, _zeros(params), rms, t, _zero(), norm)

    ruled = replace(
        settings,
        # ρ as the rule sees it: 0 where nothing is to change, else 1
        learning_rate=lambda count: (jnp.asarray(settings.rate(count)) != 0).astype(jnp.float32),
        neuron_axis=lambda *leaf: getattr(matrices(*leaf), "neurons", None),  # None of a vector
    )
    steps = _steps(ruled, start, direction)
    return _transformation(settings, steps, optax.scale_by_learning_rate(settings.learning_rate))


def _norm(p: Array, b: Array) -> Array:
    """√(‖p‖²/neurons), one for each b; at least 0.1, or 1/√3 where that is 0."""
    # Divided first: the norm of all may be too large for its type where that of one is not.
    mean = norm_of(wider(p) / math.sqrt(max(1, b.size)))
    return jnp.where((p != 0).any(), jnp.maximum(mean, LEAST), FRESH).astype(jnp.float32)


def _wngrad(settings: Settings, *, rated: bool = True) -> optax.GradientTransformation:
    buffered = not is_off(settings.momentum)
    plain = directions.gradient if rated else directions.over_b
    return _steps(
        settings,
        lambda params, b: WNGradState(_zero(), b, _zeros(params) if buffered else None, _zero()),
        partial(directions.momentum, mu=settings.momentum) if buffered else plain,
        rated=rated or not buffered,
    )


def _wn_adam(settings: Settings, *, rated: bool = True) -> optax.GradientTransformation:
    return _steps(
        settings,
        lambda params, b: WNAdamState(_zero(), b, _zeros(params), _zeros(b), _zero()),
        partial(directions.running_mean, beta=settings.beta),
        rated=rated,
    )


# ---------------------------------------------------------------- a step, and the chain around it


def _steps(
    settings: Settings,
    start: Callable[[PyTree, PyTree], Any],
    direction: Direction,
    *,
    rated: bool = True,
) -> optax.GradientTransformation:
    """A direction's steps, in float32 or wider: what is to be subtracted from x.

    Args:
        start: the state, of the parameters and b₁.
        rated: leave λ in it as the direction does; else it is taken out.
    """
    shared = {"b", "t"} if settings.per == "model" else set()  # one for all leaves
    decay = settings.weight_decay if settings.decoupled_weight_decay else 0.0

    def update(updates: PyTree, state: Any, params: PyTree | None = None) -> tuple[PyTree, Any]:
        tree: Any = jax.tree.structure(updates)
        leaves = jax.tree_util.tree_leaves_with_path(updates)
        n, count = len(leaves), optax.safe_increment(state.count)
        if not n:
            return updates, state._replace(count=count)
        parts = {
            name: [field] * n if name in shared else tree.flatten_up_to(field)
            for name, field in state._asdict().items()
            if name in ("b", "velocity", "m", "rms", "t") and field is not None
        }
        xs: list[Any] = [None] * n if is_off(settings.weight_decay) else tree.flatten_up_to(params)
        lam = settings.rate(state.count)
        lam = wider(lam) if isinstance(lam, Array) else lam  # λ² must not overflow float16
        if shared:
            norms = [norm_of(g).astype(state.b.dtype) for _, g in leaves]
            blocks_of_all = grown(settings, lam, state.b, jnp.stack(norms))

        results = []
        for i, (path, g) in enumerate(leaves):
            old = {name: part[i] for name, part in parts.items()}
            grow = (lambda u: blocks_of_all) if shared else partial(grown, settings, lam, old["b"])
            blocks, move, new = direction(Leaf(path, wider(g), xs[i], lam, old, grow))
            if not rated:
                move = move / jnp.where(lam == 0, 1, lam)
            if settings.finetune:
                move = tree.flatten_up_to(state.norm)[i] * move
            if not is_off(decay):
                move = move + lam * decay * wider(xs[i])
            # Exactly 0, and buffers as they were, where a block does not take the step.
            move = jnp.where(blocks.live, move, 0)
            for name, value in new.items():
                new[name] = jnp.where(blocks.live, value, old[name]).astype(old[name].dtype)
            results.append({**old, **new, "b": blocks.b, "move": move, "skipped": blocks.skipped})

        def whole(name: str) -> PyTree:
            of_leaves = [result[name] for result in results]
            return of_leaves[0] if name in shared else tree.unflatten(of_leaves)

        skipped = sum(result["skipped"] for result in results[: 1 if shared else n])
        return whole("move"), state._replace(
            count=count,
            skipped=state.skipped + jnp.asarray(skipped, jnp.int32),
            **{name: whole(name) for name in parts},
        )

    return optax.GradientTransformation(lambda x: start(x, first_b(settings, x)), update)


def _coupled(settings: Settings) -> list[optax.GradientTransformation]:
    """g + w·x in float32 or wider: in bfloat16 a w·x below g/256 would vanish whole."""
    decay = settings.weight_decay
    if is_off(decay) or settings.decoupled_weight_decay:
        return []
    seen = partial(jax.tree.map, lambda g, x: wider(g) + decay * wider(x))
    return [optax.stateless(seen)]


def _transformation(
    settings: Settings, *parts: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """A chain whose updates are rounded once, at the end; leaves may be Python's numbers."""
    wide = optax.chain(*parts) if len(parts) > 1 else parts[0]

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any
    ) -> tuple[PyTree, Any]:
        if params is None and not is_off(settings.weight_decay):
            raise ValueError(
                f"{settings.owner}: `params` must be given to `update`, since `weight_decay` needs "
                f"them, got None."
            )
        updates = arrays(updates)
        new, state = wide.update(updates, state, arrays(params))
        return jax.tree.map(lambda new, old: new.astype(old.dtype), new, updates), state

    return optax.GradientTransformationExtraArgs(lambda x: wide.init(arrays(x)), update)


def _zero() -> Array:
    """A count at its start."""
    return jnp.zeros((), jnp.int32)


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.zeros_like, tree)
