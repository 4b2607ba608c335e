"""A model's parameters by module: which are a neuron's, which are matrices, and how these lie.

`neuron_groups` and `matrix_groups` go by the types of a model's modules, `by_shape` by a parameter
alone. A `Layout` is asked about the shape of the parameter itself, never about that of a view.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, TypeAlias, get_args

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy

from wngrad.optim import checks
from wngrad.optim.blocks import Shape, named_shape

Role: TypeAlias = Literal["matrix", "embedding", "vector"]
Kind: TypeAlias = Literal["rows", "stack", "transposed"]

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_BY_ROW = (nn.Linear, nn.Bilinear, *_EMBEDDINGS, _ConvNd)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)


@dataclass(frozen=True, slots=True)
class Layout:
    """How a parameter is a stack of matrices with one row for each output neuron.

    `dataclasses.astuple` makes it plain data for a checkpoint, and `Layout(*pair)` takes it back.

    Args:
        kind: "rows": dimension 0 is the output, all others are the input, and dimension 0 is cut
            into `pieces` equal matrices (packed queries, keys and values: 3; the gates of an LSTM:
            4; a convolution: its groups).
            "stack": the last two dimensions are (out, in), those before count the matrices.
            "transposed": (in, out), or a transposed convolution's (in, out/groups, k…) with
            `pieces` groups; a group's matrix is (out/groups, in/groups·k).
        pieces: how many equal matrices dimension 0 holds; 1 for a "stack".

    Example:
        >>> Layout("rows", pieces=3).matrices(torch.zeros(12, 4)).shape
        torch.Size([3, 4, 4])
    """

    kind: Kind = "rows"
    pieces: int = 1

    def __post_init__(self) -> None:
        checks.one_of("Layout", "kind", self.kind, get_args(Kind))
        if type(self.pieces) is not int:
            raise TypeError(f"Layout: `pieces` must be an int, got {self.pieces!r}.")
        if self.pieces < 1:
            raise ValueError(f"Layout: `pieces` must be >= 1, got {self.pieces!r}.")
        if self.kind == "stack" and self.pieces != 1:
            raise ValueError(f"Layout: `pieces` of a 'stack' must be 1, got {self.pieces!r}.")

    def sizes(self, shape: Shape) -> tuple[int, int, int]:
        """(how many, out, in) of the matrices of a parameter of this shape."""
        if len(shape) < 2:
            raise ValueError(
                f"Layout: `shape` must have at least 2 dimensions, got {tuple(shape)!r}."
            )
        if self.kind == "stack":
            return math.prod(shape[:-2]), shape[-2], shape[-1]
        if shape[0] % self.pieces:
            raise ValueError(
                f"Layout: `pieces` must divide dimension 0, got {self.pieces!r} for a parameter of "
                f"shape {tuple(shape)!r}."
            )
        part, rest = shape[0] // self.pieces, math.prod(shape[2:])
        if self.kind == "transposed":
            return self.pieces, shape[1], part * rest
        return self.pieces, part, shape[1] * rest

    def is_one(self, t: Tensor) -> bool:
        """Whether `t` is a single matrix as it is."""
        return t.dim() == 2 and self.kind == "rows" and self.pieces == 1

    def matrices(self, t: Tensor) -> Tensor:
        """`t` as its matrices, (how many, out, in); a view where the strides allow it."""
        count, out, size = self.sizes(t.shape)
        if self.kind == "transposed":
            t = t.reshape(count, t.shape[0] // count, *t.shape[1:]).transpose(1, 2)
        return t.reshape(count, out, size)

    def restore(self, m: Tensor, like: Tensor) -> Tensor:
        """The inverse of `matrices`: m in the shape of `like`, its bits unchanged.

        A view of m where its strides allow it; type, device and strides are m's, not `like`'s.
        """
        count, out, _ = self.sizes(like.shape)
        if self.kind == "transposed":
            m = m.reshape(count, out, like.shape[0] // count, *like.shape[2:]).transpose(1, 2)
        return m.reshape_as(like)

    def blocks(self, shape: Shape) -> Shape:
        """The shape of b with one b for each row of each matrix.

        Its entries are in the rows' order: `b.reshape(how many, out, 1)` broadcasts against
        `matrices`.
        """
        count, out, _ = self.sizes(shape)
        if self.kind == "stack":
            return (*shape[:-1], 1)
        if self.kind == "transposed":
            return (count, out) + (1,) * (len(shape) - 2)
        return named_shape(shape, "neuron")

    def scale(self, shape: Shape) -> float:
        """max(1, √(out/in)) of one matrix; 1 for one without inputs."""
        _, out, size = self.sizes(shape)
        return max(1.0, math.sqrt(out / size)) if size else 1.0


def by_shape(p: Tensor) -> Layout | None:
    """The layout of a parameter of which nothing is known but its shape and type; None: a vector.

    - Fewer than two dimensions, or a complex type: a vector.
    - One entry or none in all, such as a temperature of shape (1, 1): a vector.
    - Three dimensions of which the first is 1, such as places learned for an image's patches: the
      matrix of the other two, or, if the second is 1 as well, a vector.
    - Every other: a matrix with `Layout("rows")`, dimension 0 against all others. A single row
      (1, n) or column (n, 1) is one, too: to orthogonalize it is to normalize it.
    """
    if p.dim() < 2 or p.numel() <= 1 or p.is_complex():
        return None
    if p.dim() == 3 and p.shape[0] == 1:
        return Layout("stack") if p.shape[1] > 1 else None
    return Layout()


def _owned(owner: str, model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """A parameter's name in the model and its module, once for each of its owners."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: `model` must be a torch.nn.Module, got {model!r}.")
    for path, module in model.named_modules():
        for name, p in module.named_parameters(path, recurse=False):
            if is_lazy(p):
                raise ValueError(
                    f"{owner}: `model` must have no lazy parameters, got {name!r} without a "
                    f"shape. Run the model once."
                )
            yield name, module, p


def _table(header: Sequence[str], rows: list[tuple[Any, ...]]) -> str:
    """Rows of a name, parameters, more cells and a number of rates, as columns with totals."""
    lines = [header]
    for name, params, *cells, rates in rows:
        shapes = " + ".join("×".join(map(str, p.shape)) or "1" for p in params)
        lines.append((name, shapes, *cells, f"{rates:,}"))
    count = sum(p.numel() for _, params, *_ in rows for p in params)
    total = f"{sum(row[-1] for row in rows):,}"
    lines.append(("total", f"{count:,} parameters", *[""] * (len(header) - 3), total))
    *widths, last = (max(map(len, column)) for column in zip(*lines, strict=True))
    return "\n".join(
        "  ".join([*map(str.ljust, line, widths), line[-1].rjust(last)]) for line in lines
    )


class NeuronGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer; printed, a table of layer, shapes and number of rates."""

    def __str__(self) -> str:
        rows = [(group["name"], group["params"], math.prod(group["per"][0])) for group in self]
        return _table(("layer", "shape", "rates"), rows)


def neuron_groups(model: nn.Module) -> NeuronGroups:
    """Groups in which each layer's weight rows and biases share one b per neuron (App. A.3).

    Knows linear, convolution, transposed convolution, embedding, normalization, recurrent and
    attention layers by their type. A parameter of any other module stands alone, with one b per
    index of its dimension 0. A parameter used twice belongs to the first layer that has it.

    Args:
        model: any module.

    Returns:
        Groups to hand to `WNGrad` or `WNAdam`; `print` shows them as a table.

    Example:
        >>> print(neuron_groups(torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))))
        layer  shape          rates
        0      2×3 + 2            2
        1      2 + 2              2
        total  12 parameters      4
    """
    layers: dict[str, dict[Hashable, dict[Tensor, Shape]]] = {}
    taken: set[Tensor] = set()
    for full, module, p in _owned("neuron_groups", model):
        if p not in taken:
            path, _, name = full.rpartition(".")
            neurons, shape = _neurons(name, module, p)
            layers.setdefault(path, {}).setdefault(neurons, {})[p] = shape
            taken.add(p)
    groups = NeuronGroups()
    for path, layer in layers.items():
        for number, shapes in enumerate(layer.values(), 1):
            name = (path or type(model).__name__) + (f" ({number})" if number > 1 else "")
            per = list(shapes.values())
            groups.append({"params": list(shapes), "per": per, "joint": True, "name": name})
    return groups


def _neurons(name: str, module: nn.Module, p: Tensor) -> tuple[Hashable, Shape]:
    """What parameters of a module have in common that share neurons, and the shape of their b."""
    shape = named_shape(p.shape, "neuron")
    if isinstance(module, _NORMS):
        shape = tuple(p.shape)
    elif isinstance(module, _ConvTransposeNd) and name == "weight" and p.dim() > 1:
        shape = Layout("transposed", module.groups).blocks(p.shape)
    if isinstance(module, (*_BY_ROW, *_NORMS, *_RECURRENT)):
        # "0_reverse" of "weight_ih_l0_reverse"; a projection has other neurons, and not as many.
        part = name.partition("_l")[2] if isinstance(module, nn.RNNBase) else ""
        return (part, math.prod(shape)), shape
    packed = isinstance(module, nn.MultiheadAttention) and p.shape[:1] == (3 * module.embed_dim,)
    return "in_proj" if packed else name, shape


class MatrixGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer; printed, a table of what each parameter is.

    Attributes:
        names: the name in the model of each parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], names: dict[Tensor, str]) -> None:
        super().__init__(groups)
        self.names = names

    def __str__(self) -> str:
        rows = []
        for group in self:
            for p, per in zip(group["params"], group["per"], strict=True):
                matrices = "–"
                if "layout" in group:
                    count, out, size = Layout(*group["layout"]).sizes(p.shape)
                    matrices = f"{count:,} of {out}×{size}"
                name = self.names.get(p, "?")
                rows.append((name, [p], group["role"], matrices, math.prod(per)))
        return _table(("parameter", "shape", "role", "matrices", "rates"), rows)


def matrix_groups(model: nn.Module) -> MatrixGroups:
    """Groups of a model's parameters by role: matrices, embeddings and vectors.

    What a parameter is depends on its module's type, then on names, then on its shape:

    - Fewer than two dimensions, a normalization's parameters, everything called `bias`, `bias_…`
      or `…_bias`, complex types: a vector, with one b for each entry (a complex one of two or more
      dimensions: for each index of dimension 0).
    - `Linear` and `Bilinear`: one matrix, one row for each output. A `Linear` packs queries, keys
      and values, three matrices, if it has three times as many outputs as inputs, and "qkv",
      "c_attn" or "in_proj" is in its name or in that of the module around it.
    - Convolutions, transposed ones too: a matrix for each of their groups, (out/groups,
      in/groups·k). A depthwise convolution has a 1×k matrix for each channel.
    - `Embedding` and `EmbeddingBag`: an embedding, one row for each entry of the vocabulary.
    - `RNN`, `GRU`, `LSTM` and their cells: a matrix for each gate; a projection is whole.
    - `MultiheadAttention`: three matrices in `in_proj_weight`; `q_proj_weight` and the like whole.
    - A class called `Conv1D` with `nf` outputs, as in Hugging Face's GPT-2: one matrix, kept as
      (in, out), even where it packs queries, keys and values.
    - Of any other module, three dimensions and "expert" in the name of the parameter, of its
      module, of its class or of the module around it: (experts, out, in), a matrix for each
      expert. If a model keeps them as (experts, in, out), edit the groups.
    - All others, parametrized weights among them: as `by_shape` says. LoRA's are linear layers.

    The output layer is a matrix like any other: heads and embeddings did as well orthogonalized as
    with Adam's direction. A parameter with several owners is listed once: as an embedding if any
    of them is one, else by its first owner. Frozen parameters are listed like all others.

    Args:
        model: any module with parameters.

    Returns:
        A group for each role and layout that there is, "matrices" first, then "embeddings" and
        "vectors", with `role`, `per` (the shape of b for each parameter) and, but for vectors,
        `layout` (a pair, `Layout(*pair)`); `print` shows them as a table.

    Example:
        >>> convolution = torch.nn.Conv1d(4, 6, 9, groups=2)
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), convolution)
        >>> print(matrix_groups(model))
        parameter  shape           role       matrices   rates
        1.weight   6×2×9           matrix     2 of 3×18      6
        0.weight   9×4             embedding  1 of 9×4       9
        1.bias     6               vector     –              6
        total      150 parameters                           21
    """
    kinds: dict[Tensor, tuple[Role, Layout | None]] = {}
    for name, module, p in _owned("matrix_groups", model):
        weight = name.rpartition(".")[2] == "weight" and isinstance(module, _BY_ROW)
        # FSDP1 has a flat parameter, or flat parts of it under the names of the weights.
        if getattr(p, "_is_flat_param", False) or (weight and p.dim() < 2):
            raise ValueError(
                f"matrix_groups: `model` must have its matrices as they are, got {name!r}, "
                f"flattened by FullyShardedDataParallel. Use `fully_shard` (FSDP2)."
            )
        layout = _layout(name, module, p)
        embeds = layout is not None and weight and isinstance(module, _EMBEDDINGS)
        if embeds or p not in kinds:
            role: Role = "vector" if layout is None else "embedding" if embeds else "matrix"
            kinds[p] = role, layout
    if not kinds:
        raise ValueError(
            f"matrix_groups: `model` must have parameters, got a {type(model).__name__} without."
        )
    order = sorted(dict.fromkeys(kinds.values()), key=lambda kind: get_args(Role).index(kind[0]))
    groups = [_group(*kind, [p for p in kinds if kinds[p] == kind]) for kind in order]
    return MatrixGroups(groups, {p: name for name, p in model.named_parameters()})


def _group(role: Role, layout: Layout | None, params: list[Tensor]) -> dict[str, Any]:
    if layout is None:  # A complex matrix has a b for each row.
        per = [named_shape(p.shape, "neuron") if p.is_complex() else (*p.shape,) for p in params]
        return {"params": params, "name": "vectors", "role": role, "per": per}
    name = {"matrix": "matrices", "embedding": "embeddings"}[role]
    name += "" if layout == Layout() else f" ({layout.kind}, {layout.pieces})"
    per = [layout.blocks(p.shape) for p in params]
    return {"params": params, "name": name, "role": role, "layout": astuple(layout), "per": per}


def _layout(full: str, module: nn.Module, p: Tensor) -> Layout | None:
    """The layout of a parameter in one of its owners; None for a vector."""
    name = full.rpartition(".")[2]
    near = ".".join(full.split(".")[-3:]).lower()  # A wrapper may be around the named module.
    bias = name == "bias" or name.startswith("bias_") or name.endswith("_bias")
    if p.dim() < 2 or p.is_complex() or bias or isinstance(module, _NORMS):
        return None
    if name == "weight" and isinstance(module, _ConvNd):
        transposed = isinstance(module, _ConvTransposeNd)
        return Layout("transposed" if transposed else "rows", module.groups)
    if name == "weight" and isinstance(module, _BY_ROW):
        thrice = isinstance(module, nn.Linear) and p.shape[0] == 3 * p.shape[1]
        packed = thrice and any(part in near for part in ("qkv", "c_attn", "in_proj"))
        return Layout(pieces=3 if packed else 1)
    if name.startswith(("weight_ih", "weight_hh")) and isinstance(module, _RECURRENT):
        return Layout(pieces=p.shape[0] // module.hidden_size or 1)  # its gates
    if name == "in_proj_weight" and isinstance(module, nn.MultiheadAttention):
        return Layout(pieces=3)
    # Duck-typed: importing Hugging Face's library is slow, and it may not be there.
    conv1d = name == "weight" and type(module).__name__ == "Conv1D" and p.dim() == 2
    if conv1d and getattr(module, "nf", None) == p.shape[1]:
        return Layout("transposed")
    if p.dim() == 3 and "expert" in near + type(module).__name__.lower():
        return Layout("stack")
    return by_shape(p)
