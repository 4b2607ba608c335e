"""Parameter groups in which a neuron's weights and its bias share one b (App. A.3)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from wngrad.optim.blocks import Shape, named_shape

# Parameters that share their b, each with the shape of it.
_Shared: TypeAlias = Sequence[tuple[Tensor, Shape]]

_BY_ROW = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, _ConvNd, nn.RNNCellBase)
_BY_ELEMENT = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class NeuronGroups(list[dict[str, Any]]):
    """Parameter groups for an optimizer; printed, a table of layer, shapes and number of rates."""

    def __str__(self) -> str:
        rows = [("layer", "shape", "rates")]
        for group in self:
            shapes = " + ".join("×".join(map(str, p.shape)) or "1" for p in group["params"])
            rows.append((group["name"], shapes, f"{_rates(group):,}"))
        rows.append(("total", f"{self._count():,} parameters", f"{sum(map(_rates, self)):,}"))
        wide = [max(len(row[i]) for row in rows) for i in range(3)]
        return "\n".join(f"{a:<{wide[0]}}  {b:<{wide[1]}}  {c:>{wide[2]}}" for a, b, c in rows)

    def _count(self) -> int:
        return sum(p.numel() for group in self for p in group["params"])


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
    groups = NeuronGroups()
    taken: set[Tensor] = set()
    for name, module in model.named_modules():
        made = 0
        for shared in _neurons(module):
            fresh = [(p, shape) for p, shape in shared if p not in taken]
            taken |= {p for p, _ in fresh}
            if fresh:
                params, shapes = map(list, zip(*fresh, strict=True))
                made += 1
                layer = (name or type(module).__name__) + (f" ({made})" if made > 1 else "")
                groups.append({"params": params, "per": shapes, "joint": True, "name": layer})
    return groups


def _neurons(module: nn.Module) -> Iterator[_Shared]:
    """The module's own parameters, gathered into those whose blocks are the same neurons."""
    own = list(module.parameters(recurse=False))
    if isinstance(module, _ConvTransposeNd):
        yield from _alike([(p, _transposed(module, p)) for p in own])
    elif isinstance(module, _BY_ROW):
        yield from _alike([(p, _row(p)) for p in own])
    elif isinstance(module, _BY_ELEMENT):
        yield from _alike([(p, tuple(p.shape)) for p in own])
    elif isinstance(module, nn.RNNBase):
        for layer in module.all_weights:  # one list per layer and direction
            yield from _alike([(p, _row(p)) for p in layer])
    elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        packed = [p for p in own if p.shape[0] == 3 * module.embed_dim]  # weight and bias
        yield [(p, _row(p)) for p in packed]
        yield from ([(p, _row(p))] for p in own if p.shape[0] != 3 * module.embed_dim)
    else:
        yield from ([(p, _row(p))] for p in own)


def _alike(params: _Shared) -> Iterator[_Shared]:
    """Those with equally many blocks are the same neurons; others (a projection) have their own."""
    counts = [torch.Size(shape).numel() for _, shape in params]
    for count in dict.fromkeys(counts):
        yield [one for one, n in zip(params, counts, strict=True) if n == count]


def _row(p: Tensor) -> Shape:
    return named_shape(tuple(p.shape), "neuron")


def _transposed(module: _ConvTransposeNd, p: Tensor) -> Shape:
    """A transposed convolution's weight is (in, out/groups, …): its neurons are in dimension 1."""
    if p.dim() == 1:
        return tuple(p.shape)
    return (module.groups, p.shape[1]) + (1,) * (p.dim() - 2)


def _rates(group: dict[str, Any]) -> int:
    return torch.Size(group["per"][0]).numel()
