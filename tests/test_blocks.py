"""Granularity: who shares a b, and the groups that follow App. A.3 to the letter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wngrad import WNAdam, WNGrad, neuron_groups


def rates_of(shape, per):
    p = nn.Parameter(torch.ones(shape))
    opt = WNGrad([p], per=per)
    p.grad = torch.ones(shape)
    opt.step()
    return tuple(opt.state[p]["b"].shape)


@pytest.mark.parametrize(
    ("shape", "per", "b"),
    [
        ((6,), "neuron", (6,)),
        ((5, 4), "neuron", (5, 1)),
        ((5, 4, 3, 3), "neuron", (5, 1, 1, 1)),
        ((6,), "tensor", (1,)),
        ((5, 4), "tensor", (1, 1)),
        ((5, 4), "model", (1, 1)),
        ((5, 4, 3, 3), "slice", (5, 4, 1, 1)),
        ((5, 4, 3), "slice", (5, 4, 1)),
        ((5, 4), "slice", (5, 1)),  # never a full-size b for a matrix
        ((6,), "slice", (6,)),
        ((), "neuron", ()),
        ((12, 4), lambda p: (3, 1), (3, 1)),  # one rate for every head's rows
        ((12, 4), lambda p: [1, 4], (1, 4)),
    ],
)
def test_the_shape_of_b(shape, per, b):
    assert rates_of(shape, per) == b


def test_a_callable_is_plain_data_afterwards():
    p = nn.Parameter(torch.ones(12, 4))
    opt = WNGrad([p], per=lambda p: (3, 1))
    assert opt.param_groups[0]["per"] == [(3, 1)]
    other = WNGrad([p], per=[(3, 1)])
    other.load_state_dict(opt.state_dict())


def test_blocks_of_rows_share_what_their_rows_sum_to():
    p = nn.Parameter(torch.zeros(4, 2))
    opt = WNGrad([p], per=lambda p: (2, 1))
    p.grad = torch.tensor([[1.0, 0], [0, 1], [2, 0], [0, 0]])
    opt.step()
    assert opt.state[p]["b"].flatten().tolist() == [1 + 2, 1 + 4]


LAYERS = [
    (nn.Linear(4, 3), (2, 4)),
    (nn.Linear(4, 3, bias=False), (2, 4)),
    (nn.Bilinear(2, 3, 4), None),
    (nn.Conv1d(2, 4, 3), (1, 2, 5)),
    (nn.Conv2d(4, 6, 3, groups=2), (1, 4, 5, 5)),
    (nn.Conv3d(2, 3, 2), (1, 2, 3, 3, 3)),
    (nn.ConvTranspose1d(4, 6, 3), (1, 4, 5)),
    (nn.ConvTranspose2d(4, 6, 3, groups=2), (1, 4, 5, 5)),
    (nn.ConvTranspose3d(2, 3, 2), (1, 2, 3, 3, 3)),
    (nn.BatchNorm2d(3), (2, 3, 4, 4)),
    (nn.GroupNorm(1, 4), (2, 4, 3)),
    (nn.LayerNorm((3, 2)), (5, 3, 2)),
    (nn.RMSNorm(4), (2, 4)),
    (nn.InstanceNorm1d(3, affine=True), (2, 3, 4)),
]


def outputs_first(layer, y):
    """The output with the neuron's dimension in front: what each of them alone produces."""
    if isinstance(layer, nn.LayerNorm):
        return y.flatten(1).T
    if isinstance(layer, (nn.Linear, nn.Bilinear, nn.RMSNorm)):
        return y.movedim(-1, 0)
    return y.movedim(1, 0)


@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=lambda v: str(v)[:40])
@torch.enable_grad()
def test_a_neuron_is_what_one_output_depends_on(layer, shape):
    """Back-propagate each output alone: only its own block's b may move, and by ‖g‖² exactly."""
    inputs = (torch.randn(5, 2), torch.randn(5, 3)) if shape is None else (torch.randn(shape),)
    neurons = outputs_first(layer, layer(*inputs)).shape[0]
    for k in range(neurons):
        layer.zero_grad()
        outputs_first(layer, layer(*inputs))[k].square().sum().backward()
        opt = WNGrad(neuron_groups(layer))
        sq = sum(p.grad.double().square().sum() for p in layer.parameters()).item()
        opt.step()
        for p in layer.parameters():
            b = opt.state[p]["b"].flatten()
            assert b.numel() == neurons
            expected = torch.ones(neurons)
            expected[k] += sq
            torch.testing.assert_close(b, expected, rtol=1e-5, atol=1e-6)


def test_an_embeddings_neuron_is_its_row():
    layer = nn.Embedding(5, 3)
    layer(torch.tensor([2, 2])).sum().backward()
    opt = WNGrad(neuron_groups(layer))
    opt.step()
    assert opt.state[layer.weight]["b"].flatten().tolist() == [1, 1, 13, 1, 1]


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_share_by_row_within_a_layer_and_direction(cls):
    layer = cls(3, 4, num_layers=2, bidirectional=True)
    groups = neuron_groups(layer)
    assert len(groups) == 4
    assert all(len(g["params"]) == 4 for g in groups)
    layer(torch.randn(5, 2, 3))[0].sum().backward()
    WNGrad(groups).step()


def test_attention_and_unknown_modules():
    attention = nn.MultiheadAttention(4, 2)
    shapes = [[tuple(p.shape) for p in g["params"]] for g in neuron_groups(attention)]
    assert shapes == [[(12, 4), (12,)], [(4, 4), (4,)]]

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.scale = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(3))

    assert [len(g["params"]) for g in neuron_groups(Scale())] == [1, 1]


def test_what_has_no_neurons_yet_is_refused():
    with pytest.raises(TypeError, match=r"neuron_groups: `model` must be a torch.nn.Module, got "):
        neuron_groups([torch.ones(2)])
    with pytest.raises(ValueError, match=r"neuron_groups: .* no lazy parameters, got '0.weight'"):
        neuron_groups(nn.Sequential(nn.LazyLinear(3)))


def test_every_parameter_is_in_exactly_one_group_even_if_it_is_tied():
    model = nn.Sequential(nn.Embedding(6, 4), nn.LSTM(4, 4), nn.Linear(4, 6))
    model[2].weight = model[0].weight
    grouped = [p for g in neuron_groups(model) for p in g["params"]]
    assert len(grouped) == len(set(grouped)) == len(list(model.parameters()))


def test_the_table_names_layers_shapes_and_rates():
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 10))
    lines = str(neuron_groups(model)).splitlines()
    assert [line.split() for line in lines] == [
        ["layer", "shape", "rates"],
        ["0", "8×1×3×3", "+", "8", "8"],
        ["1", "8", "+", "8", "8"],
        ["2", "10×8", "+", "10", "10"],
        ["total", "186", "parameters", "26"],
    ]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize("make", [WNGrad, WNAdam])
@pytest.mark.parametrize("b_init", [1.0, "gradient"])
def test_relatives_keep_one_b_through_freezing_and_thawing(make, b_init):
    layer = nn.Linear(3, 2)
    for options in ({"per": "model"}, {"per": [(2, 1), (2,)], "joint": True}):
        opt = make(layer.parameters(), b_init=b_init, **options)
        for frozen in (layer.bias, None, layer.weight, None):
            for p in layer.parameters():
                p.grad = None if p is frozen else torch.randn_like(p)
            opt.step()
        one, other = (opt.state[p]["b"].flatten() for p in layer.parameters())
        assert torch.equal(one, other)


def test_held_vectors_take_no_part_in_a_models_b():
    w, v = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    opt = WNGrad([w, v], per="model", hold_1d=True)
    w.grad, v.grad = torch.ones(2, 2), torch.full((2,), 5.0)
    opt.step()
    assert opt.state[w]["b"].item() == 5
    assert (opt.state[v]["b"] == 1).all()
    assert v.tolist() == [-5, -5]


def test_joint_sparse_gradients_equal_dense_ones():
    start = torch.randn(4, 3)
    weights = [nn.Parameter(start.clone()) for _ in range(2)]
    biases = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    for per in ("model", "neuron"):
        opts = [
            WNGrad([w, b], per=per, joint=True) if per == "neuron" else WNGrad([w, b], per=per)
            for w, b in zip(weights, biases, strict=True)
        ]
        for w, b, sparse in zip(weights, biases, (True, False), strict=True):
            g = torch.zeros(4, 3)
            g[[1, 3]] = 2.0
            w.grad, b.grad = (g.to_sparse(1) if sparse else g), torch.ones(4)
        for opt in opts:
            opt.step()
        assert torch.equal(*weights)


def test_fully_sparse_gradients_are_made_dense():
    p, q = nn.Parameter(torch.zeros(3, 2)), nn.Parameter(torch.zeros(3, 2))
    q.grad = torch.tensor([[1.0, 0], [0, 0], [0, 3]])
    p.grad = q.grad.to_sparse()
    for x in (p, q):
        WNGrad([x]).step()
    assert torch.equal(p, q)


def test_an_absent_held_vector_has_no_say_in_its_relatives_b():
    w, v = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(2))
    opt = WNGrad([w, v], per="model", hold_1d=True, b_init="gradient")
    w.grad, v.grad = torch.ones(2, 2), torch.full((2,), 1000.0)
    opt.step()
    v.grad = None
    opt.step()
    assert opt.state[w]["b"].item() == 5.0  # 2, then 2 + 4/2, then 4 + 4/4


def test_a_single_row_without_entries_keeps_its_relatives_b():
    p, q = nn.Parameter(torch.zeros(1, 2)), nn.Parameter(torch.zeros(3))
    opt = WNGrad([p, q], per="model")
    p.grad, q.grad = torch.zeros(1, 2).to_sparse(1), torch.ones(3)
    opt.step()
    assert opt.state[p]["b"].item() == opt.state[q]["b"].item() == 4.0


def test_attention_with_other_keys_and_values_keeps_its_projections_apart():
    attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True)
    groups = neuron_groups(attention)
    own = [g for g in groups if g["name"] == "MultiheadAttention"]
    assert all(len(g["params"]) == 1 for g in own)
    WNGrad(groups)


def test_a_layer_with_more_parameters_than_its_type_has_keeps_them_apart():
    layer = nn.Linear(6, 4)
    layer.lora_a, layer.scale = nn.Parameter(torch.ones(2, 6)), nn.Parameter(torch.ones(()))
    groups = neuron_groups(layer)
    assert [[tuple(p.shape) for p in g["params"]] for g in groups] == [
        [(4, 6), (4,)],
        [(2, 6)],
        [()],
    ]
    WNGrad(groups)
    transposed = nn.ConvTranspose1d(4, 6, 2, groups=2, bias=False)
    transposed.lora_a = nn.Parameter(torch.ones(3, 2))
    groups = neuron_groups(transposed)
    assert [group["per"] for group in groups] == [[(2, 3, 1)], [(3, 1)]]
    WNGrad(groups)


@pytest.mark.parametrize(
    "layer", [nn.LSTM(3, 2, 2, bidirectional=True), nn.MultiheadAttention(4, 2)]
)
def test_the_groups_of_a_layer_have_names_of_their_own(layer):
    names = [group["name"] for group in neuron_groups(layer)]
    assert len(set(names)) == len(names) > 1


@pytest.mark.parametrize(
    "options", [{}, {"nonfinite": "skip"}, {"b_init": "gradient"}, {"hold_1d": True}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [WNGrad, WNAdam])
def test_parameters_settled_together_step_as_each_alone(make, dtype, options):
    """One operation finds the b of all; an empty one and a 0-D one are among them."""
    shapes, runs = [(5, 7), (4,), (0, 3), (), (2, 3, 2)], []
    for together in (True, False):
        draw = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(s, generator=draw).to(dtype)) for s in shapes]
        opts = [make(params, fused=False, **options)]
        if not together:
            opts = [make([p], fused=False, **options) for p in params]
        for _ in range(3):
            for p in params:
                p.grad = torch.randn(p.shape, generator=draw).to(dtype)
            params[0].grad[1] = 0
            params[1].grad[2] = torch.nan if "nonfinite" in options else 1
            for opt in opts:
                opt.step()
        runs.append((params, [opt.state[p] for opt in opts for p in opt.param_groups[0]["params"]]))
    (one, kept), (other, held) = runs
    assert all(torch.equal(p, q) for p, q in zip(one, other, strict=True))
    assert all(torch.equal(a[k], b[k]) for a, b in zip(kept, held, strict=True) for k in a)


@pytest.mark.parametrize("options", [{"joint": True}, {"per": "model"}], ids=str)
def test_relatives_keep_their_b_in_the_widest_type_among_them(options):
    params = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.float64)]
    opt = WNGrad(params, **options)
    for p in params:
        p.grad = torch.full_like(p, 1e-5)
    opt.step()
    b = [opt.state[p]["b"] for p in params]
    assert [value.dtype for value in b] == [torch.float64] * 2
    assert (b[0] == b[1]).all()
