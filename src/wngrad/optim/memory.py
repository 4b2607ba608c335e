"""Where tensors lie in memory, and which of them lie on one another."""

from __future__ import annotations

from torch import Tensor


def extent(t: Tensor) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    if not t.numel():
        return 0
    reach = 1
    for n, stride in zip(t.shape, t.stride(), strict=True):
        reach += (n - 1) * abs(stride)
    return reach * t.element_size()


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether one begins before the other has ended."""
    start_a, start_b = a.data_ptr(), b.data_ptr()
    return start_a < start_b + extent(b) and start_b < start_a + extent(a)


def any_overlap(tensors: list[Tensor]) -> bool:
    """Whether any of them begins before another has ended; False of what has no memory."""
    try:
        places = list(map(Tensor.data_ptr, tensors))
    except RuntimeError:
        return False
    end = 0
    for i in sorted(range(len(tensors)), key=places.__getitem__):
        if size := extent(tensors[i]):
            if places[i] < end:
                return True
            end = places[i] + size
    return False


def overlap_in_part(a: Tensor, b: Tensor) -> bool:
    """Whether writing to `a` would change elements of `b` that are read later, as torch tells it.

    False for one and the same elements, where each is read before it is written, and for tensors
    with gaps, of which torch cannot tell.
    """
    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr() or not overlap(a, b):
        return False
    same = a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape
    return not same and _has_no_gaps(a) and _has_no_gaps(b)


def _has_no_gaps(t: Tensor) -> bool:
    return extent(t) == t.numel() * t.element_size()
