"""Parameter groups of a model by role: matrices, embeddings and vectors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.parameter import is_lazy

from wngrad.optim.blocks import Shape, named_shape
from wngrad.optim.matrices import Layout, Role, by_shape

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_KNOWN = (nn.Linear, nn.Bilinear, *_EMBEDDINGS, _ConvNd)
_RECURRENT = (nn.RNNBase, nn.RNNCellBase)
_GATES = (((nn.LSTM, nn.LSTMCell), 4), ((nn.GRU, nn.GRUCell), 3))
_PACKED = ("qkv", "c_attn", "in_proj")
_GROUP_NAMES: dict[Role, str] = {
    "matrix": "matrices",
    "embedding": "embeddings",
    "vector": "vectors",
}


class _Entry(NamedTuple):
    """What a parameter is: its role, the shape of its b, and its layout unless it is a vector."""

    role: Role
    per: Shape
    layout: Layout | None


class MatrixGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer; printed, a table of what each parameter is.

    Attributes:
        names: the name in the model of each parameter.
    """

    def __init__(self, groups: list[dict[str, Any]], names: dict[Tensor, str]) -> None:
        super().__init__(groups)
        self.names = names

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("parameter", "shape", "role", "matrices", "rates")]
        rows += [row for group in self for row in self._rows(group)]
        count = sum(p.numel() for group in self for p in group["params"])
        rates = sum(torch.Size(shape).numel() for group in self for shape in group["per"])
        rows.append(("total", f"{count:,} parameters", "", "", f"{rates:,}"))
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join([f"{cell:<{n}}" for cell, n in zip(row[:-1], wide, strict=False)])
            + f"  {row[-1]:>{wide[-1]}}"
            for row in rows
        )

    def _rows(self, group: dict[str, Any]) -> Iterator[tuple[str, ...]]:
        """A line for each parameter of a group."""
        for i, p in enumerate(group["params"]):
            shape = "×".join(map(str, p.shape)) or "1"
            matrices = "–"
            if "layout" in group:
                count, out, size = Layout(*group["layout"]).sizes(p.shape)
                matrices = f"{count:,} of {out}×{size}"
            rates = torch.Size(group["per"][i]).numel()
            yield self.names.get(p, "?"), shape, group["role"], matrices, f"{rates:,}"


def matrix_groups(model: nn.Module) -> MatrixGroups:
    """Groups of a model's parameters by role: matrices, embeddings and vectors.

    What a parameter is depends on its module's type, then on names, then on its shape:

    - Fewer than two dimensions, a normalization's parameters, everything called `bias`, `bias_…`
      or `…_bias`, complex types: a vector, with one b for each entry (a complex one of two or more
      dimensions: for each index of dimension 0).
    - `Linear` and `Bilinear`: one matrix, one row for each output. Packed queries, keys and values
      have no type of their own: a `Linear` holds three matrices if it has three times as many
      outputs as inputs, and "qkv", "c_attn" or "in_proj" is in its name or in that of the module
      around it.
    - Convolutions: a matrix for each of their groups, (out/groups, in/groups·k), transposed ones
      likewise. A depthwise convolution has a 1×k matrix for each channel.
    - `Embedding` and `EmbeddingBag`: an embedding, one row for each entry of the vocabulary.
    - `RNN`, `GRU`, `LSTM` and their cells: a matrix for each gate; a projection is whole.
    - `MultiheadAttention`: three matrices in `in_proj_weight`; `q_proj_weight` and the like whole.
    - A class called `Conv1D` with `nf` outputs, as in Hugging Face's GPT-2: one matrix, kept as
      (in, out), even where it packs queries, keys and values.
    - Of any other module, three dimensions and "expert" in the name of the parameter, of its
      module or of the module around it, or in the module's class: (experts, out, in), a matrix for
      each expert. If a model keeps them as (experts, in, out), edit the groups.
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
        >>> model = torch.nn.Sequential(
        ...     torch.nn.Embedding(9, 4), torch.nn.GRU(4, 6, bias=False), torch.nn.LayerNorm(6)
        ... )
        >>> print(matrix_groups(model))
        parameter       shape           role       matrices  rates
        1.weight_ih_l0  18×4            matrix     3 of 6×4     18
        1.weight_hh_l0  18×6            matrix     3 of 6×6     18
        0.weight        9×4             embedding  1 of 9×4      9
        2.weight        6               vector     –             6
        2.bias          6               vector     –             6
        total           228 parameters                          57
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"matrix_groups: `model` must be a torch.nn.Module, got {model!r}.")
    names: dict[Tensor, str] = {}
    entries: dict[Tensor, _Entry] = {}
    for name, module, p in _owned(model):
        entry = _entry(name, module, p)
        if p not in entries or entry.role == "embedding":
            entries[p] = entry
        names.setdefault(p, name)
    if not entries:
        raise ValueError(
            f"matrix_groups: `model` must have parameters, got a {type(model).__name__} without."
        )
    kinds = {(entry.role, entry.layout): entry for entry in entries.values()}
    order = sorted(kinds, key=lambda kind: get_args(Role).index(kind[0]))
    return MatrixGroups([_group(role, layout, entries) for role, layout in order], names)


def _owned(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Each parameter with its name and its module; one that has several owners with each."""
    for path, module in model.named_modules():
        for name, p in module.named_parameters(path, recurse=False):
            if is_lazy(p):
                raise ValueError(
                    f"matrix_groups: `model` must have no lazy parameters, got {name!r} without a "
                    f"shape. Run the model once."
                )
            if _is_flattened(module, name, p):
                raise ValueError(
                    f"matrix_groups: `model` must have its matrices as they are, got {name!r}, "
                    f"flattened by FullyShardedDataParallel. Use `fully_shard` (FSDP2)."
                )
            yield name, module, p


def _is_flattened(module: nn.Module, name: str, p: Tensor) -> bool:
    """True for a flat parameter of FSDP1, and for a part of one under the original's name."""
    flat: bool = getattr(p, "_is_flat_param", False)
    return flat or (name.endswith("weight") and isinstance(module, _KNOWN) and p.dim() < 2)


def _group(role: Role, layout: Layout | None, entries: dict[Tensor, _Entry]) -> dict[str, Any]:
    shapes = {p: entry.per for p, entry in entries.items() if entry[::2] == (role, layout)}
    name = _GROUP_NAMES[role]
    if layout is None:
        return {"params": list(shapes), "name": name, "role": role, "per": list(shapes.values())}
    name += "" if layout == Layout() else f" ({layout.kind}, {layout.pieces})"
    own = {"name": name, "role": role, "layout": astuple(layout)}
    return {"params": list(shapes), **own, "per": list(shapes.values())}


def _entry(name: str, module: nn.Module, p: Tensor) -> _Entry:
    """What a parameter is to one of its owners."""
    if p.is_complex() and p.dim() > 1:
        return _Entry("vector", named_shape(tuple(p.shape), "neuron"), None)
    own = name.rpartition(".")[2]
    bias = own == "bias" or own.startswith("bias_") or own.endswith("_bias")
    single = p.dim() < 2 or bias or isinstance(module, _NORMS)
    layout = None if single else _layout(name, own, module, p)
    if layout is None:
        return _Entry("vector", tuple(p.shape), None)
    embeds = own == "weight" and isinstance(module, _EMBEDDINGS)
    return _Entry("embedding" if embeds else "matrix", layout.blocks(tuple(p.shape)), layout)


def _layout(name: str, own: str, module: nn.Module, p: Tensor) -> Layout | None:
    """The layout of a parameter of two or more dimensions that is no bias; None for a vector."""
    near = ".".join(name.split(".")[-3:]).lower()  # A wrapper may be around the named module.
    if own == "weight" and isinstance(module, _KNOWN):
        return _of_weight(near, module, p)
    if own.startswith(("weight_ih", "weight_hh")) and isinstance(module, _RECURRENT):
        return Layout(pieces=next((n for cls, n in _GATES if isinstance(module, cls)), 1))
    if own == "in_proj_weight" and isinstance(module, nn.MultiheadAttention):
        return Layout(pieces=3)
    if own == "weight" and _is_conv1d(module, p):
        return Layout("transposed")
    if p.dim() == 3 and "expert" in near + type(module).__name__.lower():
        return Layout("stack")
    return by_shape(p)


def _of_weight(near: str, module: nn.Module, p: Tensor) -> Layout:
    """The layout of the weight of a linear layer, a convolution or an embedding."""
    if isinstance(module, _ConvNd):
        transposed = isinstance(module, _ConvTransposeNd)
        return Layout("transposed" if transposed else "rows", module.groups)
    packed = isinstance(module, nn.Linear) and any(part in near for part in _PACKED)
    return Layout(pieces=3 if packed and p.shape[0] == 3 * p.shape[1] else 1)


def _is_conv1d(module: nn.Module, p: Tensor) -> bool:
    """Duck-typed: importing Hugging Face's library is slow, and it may not be there."""
    named = type(module).__name__ == "Conv1D"
    return named and p.dim() == 2 and getattr(module, "nf", None) == p.shape[1]
