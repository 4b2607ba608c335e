"""Parameters as matrices: layouts, and roles by shape."""

from __future__ import annotations

import math
from dataclasses import astuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wngrad.optim.blocks import resolve
from wngrad.optim.modules import Layout, by_shape


@st.composite
def layouts(draw):
    """A layout, and a shape that it fits; sizes of 0 and 1 among them."""
    kind = draw(st.sampled_from(["rows", "stack", "transposed"]))
    pieces = 1 if kind == "stack" else draw(st.integers(1, 4))
    first, *rest = draw(st.lists(st.integers(0, 4), min_size=2, max_size=5))
    return Layout(kind, pieces), (pieces * first, *rest)


@st.composite
def tensors(draw, shape):
    """Numbered entries, with −0 and NaN, in any order of strides, with or without gaps."""
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
    order = draw(st.permutations(range(len(shape))))
    gap = draw(st.integers(1, 2))
    memory = torch.zeros([shape[i] * gap for i in order], dtype=dtype)
    t = memory[tuple(slice(None, None, gap) for _ in order)].permute(
        [order.index(i) for i in range(len(shape))]
    )
    t.copy_(torch.arange(1.0, t.numel() + 1).reshape(shape))
    if t.numel() > 1:
        t[tuple(n - 1 for n in shape)] = float("nan")
        t[(0,) * len(shape)] = -0.0
    return t


def bits(t):
    return t.contiguous().flatten().view(torch.uint8)


@given(st.data())
def test_matrices_and_back_is_the_same_bits_for_any_strides(data):
    layout, shape = data.draw(layouts())
    t = data.draw(tensors(shape))
    m = layout.matrices(t)
    assert m.shape == layout.sizes(shape)
    back = layout.restore(m, t)
    assert back.shape == t.shape
    assert back.dtype == t.dtype
    assert torch.equal(bits(back), bits(t))


@given(st.data())
def test_matrices_hold_every_entry_once_row_by_row_as_b_counts(data):
    """Each entry carries the number of its b: spread over b's blocks, read from the rows."""
    layout, shape = data.draw(layouts())
    count, out, size = layout.sizes(shape)
    blocks = layout.blocks(shape)
    assert resolve("test", [blocks], [torch.zeros(shape)]) == [blocks]
    if math.prod(shape) == 0:
        return
    number = torch.arange(float(count * out)).reshape(blocks)
    for dim, n in enumerate(shape):
        number = number.repeat_interleave(n // blocks[dim], dim)
    expected = torch.arange(float(count * out)).reshape(count, out, 1).expand(-1, -1, size)
    assert torch.equal(layout.matrices(number), expected)


@given(layouts())
def test_a_layout_is_plain_data_and_back(pair):
    layout, _ = pair
    assert Layout(*astuple(layout)) == layout
    assert Layout(*list(astuple(layout))) == layout  # as JSON has it


@pytest.mark.parametrize(
    ("layout", "shape", "sizes", "blocks"),
    [
        (Layout(), (5, 4), (1, 5, 4), (5, 1)),
        (Layout(), (6, 4, 3, 3), (1, 6, 36), (6, 1, 1, 1)),
        (Layout("rows", 3), (12, 4), (3, 4, 4), (12, 1)),
        (Layout("rows", 6), (6, 1, 3, 3), (6, 1, 9), (6, 1, 1, 1)),
        (Layout("stack"), (8, 5, 4), (8, 5, 4), (8, 5, 1)),
        (Layout("stack"), (2, 8, 5, 4), (16, 5, 4), (2, 8, 5, 1)),
        (Layout("stack"), (5, 4), (1, 5, 4), (5, 1)),
        (Layout("transposed"), (4, 5), (1, 5, 4), (1, 5)),
        (Layout("transposed", 2), (4, 3, 5, 5), (2, 3, 50), (2, 3, 1, 1)),
        (Layout(), (0, 4), (1, 0, 4), (0, 1)),
        (Layout("rows", 3), (0, 4), (3, 0, 4), (0, 1)),
        (Layout(), (4, 0), (1, 4, 0), (4, 1)),
        (Layout(), (1, 7), (1, 1, 7), (1, 1)),
    ],
)
def test_sizes_and_blocks(layout, shape, sizes, blocks):
    assert layout.sizes(shape) == sizes
    assert layout.blocks(shape) == blocks
    assert layout.matrices(torch.zeros(shape)).shape == sizes


@pytest.mark.parametrize(
    ("layout", "shape", "scale"),
    [
        (Layout(), (16, 4), 2.0),
        (Layout(), (4, 16), 1.0),
        (Layout("rows", 4), (16, 4), 1.0),  # of one matrix, not of all
        (Layout("transposed"), (4, 16), 2.0),
        (Layout("stack"), (3, 36, 4), 3.0),
        (Layout(), (4, 0), 1.0),
        (Layout(), (0, 4), 1.0),
    ],
)
def test_the_scale_of_tall_matrices(layout, shape, scale):
    assert layout.scale(shape) == scale


@pytest.mark.parametrize(
    ("layout", "t"),
    [
        (Layout("rows", 3), torch.zeros(12, 4)),
        (Layout("rows", 2), torch.zeros(4, 3, 2, 2)),
        (Layout("rows"), torch.zeros(4, 5).T),
        (Layout("stack"), torch.zeros(3, 4, 5)),
        (Layout("transposed"), torch.zeros(4, 5)),
        (Layout("transposed", 2), torch.zeros(4, 5)),
    ],
)
def test_matrices_are_a_view_where_the_strides_allow_it(layout, t):
    layout.matrices(t).add_(1)
    assert torch.equal(t, torch.ones_like(t))


def test_channels_last_makes_no_difference_to_the_matrices():
    t = torch.randn(6, 4, 3, 3)
    last = t.to(memory_format=torch.channels_last)
    assert last.stride() != t.stride()
    for layout in (Layout("rows", 2), Layout("transposed", 2), Layout("stack")):
        assert torch.equal(layout.matrices(last), layout.matrices(t))


@pytest.mark.parametrize(
    ("p", "layout"),
    [
        (torch.ones(()), None),
        (torch.ones(5), None),
        (torch.ones(1, 1), None),
        (torch.ones(0, 3), None),
        (torch.ones(3, 2, dtype=torch.complex64), None),
        (torch.ones(1, 1, 6), None),
        (torch.ones(1, 4, 6), Layout("stack")),
        (torch.ones(1, 3), Layout()),
        (torch.ones(3, 1), Layout()),
        (torch.ones(1, 2, 3, 3), Layout()),
        (torch.ones(2, 3, 4, 4), Layout()),
    ],
)
def test_a_layout_by_shape_alone(p, layout):
    assert by_shape(p) == layout


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: Layout("columns"), ValueError, "Layout: `kind` must be one of .* got 'columns'"),
        (lambda: Layout(["rows"]), ValueError, r"Layout: `kind` must be one of .* got \['rows'\]"),
        (lambda: Layout("rows", 0), ValueError, "Layout: `pieces` must be >= 1, got 0"),
        (lambda: Layout("rows", True), TypeError, "Layout: `pieces` must be an int, got True"),
        (lambda: Layout("rows", 2.0), TypeError, "Layout: `pieces` must be an int, got 2.0"),
        (lambda: Layout("stack", 3), ValueError, "Layout: `pieces` of a 'stack' must be 1, got 3"),
        (
            lambda: Layout("rows", 3).matrices(torch.ones(4, 2)),
            ValueError,
            r"Layout: `pieces` must divide dimension 0, got 3 for a parameter of shape \(4, 2\)",
        ),
        (
            lambda: Layout("transposed", 2).blocks((3, 2)),
            ValueError,
            r"Layout: `pieces` must divide dimension 0, got 2 for a parameter of shape \(3, 2\)",
        ),
        (
            lambda: Layout().scale((3,)),
            ValueError,
            r"Layout: `shape` must have at least 2 dimensions, got \(3,\)",
        ),
    ],
)
def test_bad_arguments_are_named_in_the_message(call, error, message):
    with pytest.raises(error, match=message):
        call()
