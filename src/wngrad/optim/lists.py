"""Operations over lists of tensors: one call of torch's where it has one, or one for all alike.

torch's `_foreach` functions loop in C++, which takes a tenth of the time of a loop in Python. They
are in beta, not all of them can be differentiated, and tensors with a `__torch_dispatch__` of their
own need not know them; so a loop over the public operation stands behind each. The same holds for
the private functions that DistributedDataParallel puts tensors end to end with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import not_
from typing import Any

import torch
from torch import Tensor, nn

Tensors = Sequence[Tensor]
_PLAIN = {Tensor, nn.Parameter}


def _known(*lists: Tensors) -> bool:
    """Whether torch's functions take them: some, of no other class, no sign still to be turned.

    A compiler sees single operations, which it fuses as it likes.
    """
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not lists[0]:
        return False
    for tensors in lists:
        if not _PLAIN.issuperset(map(type, tensors)):
            return False
    return not any(map(Tensor.is_neg, lists[0]))


def _by_shape(*lists: Tensors) -> list[list[Any]]:
    """Split equal-shape from broadcasting tensors: `_foreach` fuses only the former on CUDA."""
    same = [all(t.shape == p.shape for t in rest) for p, *rest in zip(*lists, strict=True)]
    split = [
        [list(compress(part, mask)) for part in lists] for mask in (same, list(map(not_, same)))
    ]
    return [part for part in split if part[0]]


def _over_lists(name: str) -> Callable[..., None]:
    """The in-place operation `name` for every tensor of a list and its partners in the others."""
    foreach = getattr(torch, f"_foreach_{name}", None)
    single: Callable[..., Any] = getattr(Tensor, name)
    apart: Callable[..., Any] = getattr(Tensor, name.rstrip("_"), single)

    def operation(tensors: Tensors, *others: Any, **options: Any) -> None:
        lists = [tensors]
        for other in others:
            if isinstance(other, list):
                lists.append(other)
        numbers = others[len(lists) - 1 :]
        if foreach is not None and _known(*lists):
            for part in _by_shape(*lists) if tensors[0].is_cuda else [lists]:
                foreach(*part, *numbers, **options)
            return
        for row in zip(*lists, strict=True):
            if torch.compiler.is_compiling() and apart is not single:
                # A compiler takes the operation in place apart, and rounds once more than eagerly.
                row[0].copy_(apart(*row, *numbers, **options))
            else:
                single(*row, *numbers, **options)

    return operation


mul_ = _over_lists("mul_")  # x ← x·y
div_ = _over_lists("div_")  # x ← x/y
add_ = _over_lists("add_")  # x ← x + alpha·y
addcmul_ = _over_lists("addcmul_")  # x ← x + value·y·z
_copy = _over_lists("copy_")
lerp_ = _over_lists("lerp_")  # x ← x + w·(y − x)


def copy_(tensors: Tensors, new: list[Tensor]) -> None:
    """x ← y, in x's type."""
    if not torch.compiler.is_compiling() and any(map(Tensor.is_neg, tensors)):
        # torch 2.13 loses the negative bit of a float16 tensor to which it copies a float32 one.
        new = [x.to(t.dtype) for t, x in zip(tensors, new, strict=True)]
    _copy(tensors, new)


def lerp(start: list[Tensor], end: list[Tensor], weight: float) -> list[Tensor]:
    """x + w·(y − x), as new tensors."""
    if hasattr(torch, "_foreach_lerp") and _known(start, end):
        return list(torch._foreach_lerp(start, end, weight))
    return [torch.lerp(x, y, weight) for x, y in zip(start, end, strict=True)]


_flatten = getattr(torch._C._nn, "flatten_dense_tensors", None)
_unflatten = getattr(torch._C._nn, "unflatten_dense_tensors", None)


def flatten(tensors: list[Tensor]) -> Tensor:
    """All entries as one vector; a single tensor as it is."""
    if len(tensors) == 1:
        return tensors[0]
    if _flatten is not None and _known(tensors):
        vector: Tensor = _flatten(tensors)
        return vector
    return torch.cat([t.flatten() for t in tensors])


def unflatten(vector: Tensor, like: list[Tensor]) -> list[Tensor]:
    """What `flatten` has put together, in the shapes of `like`."""
    if len(like) == 1:
        return [vector]
    sizes = list(map(Tensor.numel, like))
    if _unflatten is not None and all(sizes) and _known([vector]):
        return list(_unflatten(vector, like))
    parts = torch.split(vector, sizes)
    return [part.view_as(t) for part, t in zip(parts, like, strict=True)]


def stacked(tensors: Tensors) -> Tensor:
    """Tensors of one shape as one, on a GPU where any of them is: nothing waits for it."""
    device = next((t.device for t in tensors if t.is_cuda), tensors[0].device)
    return torch.stack([t.to(device, non_blocking=True) for t in tensors])


def alike(keys: Iterable[Any]) -> dict[Any, list[int]]:
    """The positions of each distinct key, in the order of the first of them."""
    members: dict[Any, list[int]] = {}
    for i, key in enumerate(keys):
        members.setdefault(key, []).append(i)
    return members


def joined(tensors: Tensors) -> Tensor:
    return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]


def together(f: Callable[..., Tensor], keys: Iterable[Any], *lists: Tensors) -> list[Tensor]:
    """f(key, x, …) of each x and its partners: those of one key are put together for one call."""
    out: dict[int, Tensor] = {}
    for key, members in alike(keys).items():
        inputs = [joined([tensors[i] for i in members]) for tensors in lists]
        results = torch.split(f(key, *inputs), [len(lists[0][i]) for i in members])
        out.update(zip(members, results, strict=True))
    return [out[i] for i in range(len(out))]


def in_batches(f: Callable[..., Tensor], *stacks: Tensors) -> list[Tensor]:
    """f(x, …) of each x and its partners, those of one shape in one call.

    Not for messages between ranks: parts of one shape on this rank may differ on another.
    """
    kinds = [[(t.shape[1:], t.dtype, t.device) for t in stack] for stack in stacks]
    return together(lambda _, *inputs: f(*inputs), zip(*kinds, strict=True), *stacks)
