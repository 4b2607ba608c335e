"""Groups by role: which direction each parameter of a model takes, and as which matrices."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from wngrad import WNGrad
from wngrad.optim.modules import Layout, matrix_groups


class Conv1D(nn.Module):
    """A linear layer that keeps its weight as (in, out), as Hugging Face's GPT-2 does."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


class Experts(nn.Module):
    """All of them at once, their outputs side by side."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 5, 4))
        self.up_bias = nn.Parameter(torch.zeros(3, 5))

    def forward(self, x):
        return (torch.einsum("bi,eoi->beo", x, self.up) + self.up_bias).flatten(1)


@pytest.mark.parametrize(
    ("layer", "inputs"),
    [
        (nn.Linear(4, 3), [(2, 4)]),
        (nn.Bilinear(2, 3, 4), [(5, 2), (5, 3)]),
        (nn.Conv1d(2, 4, 3), [(1, 2, 5)]),
        (nn.Conv2d(4, 6, 3, groups=2), [(1, 4, 5, 5)]),
        (nn.Conv2d(4, 8, 3, groups=4), [(1, 4, 5, 5)]),
        (nn.Conv3d(2, 3, 2), [(1, 2, 3, 3, 3)]),
        (nn.ConvTranspose1d(4, 6, 3), [(1, 4, 5)]),
        (nn.ConvTranspose2d(4, 6, 3, groups=2), [(1, 4, 5, 5)]),
        (nn.ConvTranspose3d(2, 3, 2), [(1, 2, 3, 3, 3)]),
        (Conv1D(5, 3), [(2, 3)]),
        (Experts(), [(2, 4)]),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_row_is_what_one_output_depends_on(layer, inputs):
    """Back-propagate each output alone: its own row, and no other, has a gradient everywhere."""
    group = matrix_groups(layer)[0]
    (p,), pair = group["params"], group["layout"]
    outputs = layer(*map(torch.randn, inputs)).movedim(1, 0)
    for k, output in enumerate(outputs):
        (grad,) = torch.autograd.grad(output.square().sum(), p, retain_graph=True)
        rows = Layout(*pair).matrices(grad).flatten(0, 1)
        assert len(rows) == len(outputs)
        assert [i for i, row in enumerate(rows) if row.any()] == [k]
        assert rows[k].all()


def model_of(**modules):
    model = nn.Module()
    for name, module in modules.items():
        setattr(model, name, module)
    return model


class Holder(nn.Module):
    """A module of no known type."""

    def __init__(self, **shapes):
        super().__init__()
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.ones(shape)))


def adapter():
    """LoRA beside a linear layer, with the names that PEFT gives them."""
    layer = model_of(base_layer=nn.Linear(6, 18))
    layer.lora_A = nn.ModuleDict({"default": nn.Linear(6, 2, bias=False)})
    layer.lora_B = nn.ModuleDict({"default": nn.Linear(2, 18, bias=False)})
    return layer


class Adapted(nn.ConvTranspose1d):
    """A known layer with LoRA's weights as parameters of its own, as loralib has them."""

    def __init__(self, *sizes, **options):
        super().__init__(*sizes, **options)
        self.lora_A = nn.Parameter(torch.ones(3, 2))


ROWS, STACK, TRANSPOSED = ("rows", 1), ("stack", 1), ("transposed", 1)
MATRIX, EMBEDDING = "matrix", "embedding"
RULES = {  # a model, and of each parameter (role, layout, shape of b); None for (vector, entries)
    "linear": (nn.Linear(4, 3), {"weight": (MATRIX, ROWS, (3, 1)), "bias": None}),
    "linear of one entry": (nn.Linear(1, 1, bias=False), {"weight": (MATRIX, ROWS, (1, 1))}),
    "bilinear": (nn.Bilinear(2, 3, 4), {"weight": (MATRIX, ROWS, (4, 1, 1)), "bias": None}),
    "conv1d": (nn.Conv1d(2, 4, 3), {"weight": (MATRIX, ROWS, (4, 1, 1)), "bias": None}),
    "conv2d": (
        nn.Conv2d(4, 6, 3, groups=2),
        {"weight": (MATRIX, ("rows", 2), (6, 1, 1, 1)), "bias": None},
    ),
    "depthwise": (
        nn.Conv2d(4, 4, 3, groups=4, bias=False),
        {"weight": (MATRIX, ("rows", 4), (4, 1, 1, 1))},
    ),
    "conv3d": (nn.Conv3d(2, 3, 2, bias=False), {"weight": (MATRIX, ROWS, (3, 1, 1, 1, 1))}),
    "conv transposed": (
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        {"weight": (MATRIX, ("transposed", 2), (2, 3, 1, 1)), "bias": None},
    ),
    "embedding": (nn.Embedding(9, 4), {"weight": (EMBEDDING, ROWS, (9, 1))}),
    "embedding bag": (nn.EmbeddingBag(9, 4), {"weight": (EMBEDDING, ROWS, (9, 1))}),
    "batch norm": (nn.BatchNorm2d(3), {"weight": None, "bias": None}),
    "instance norm": (nn.InstanceNorm1d(3, affine=True), {"weight": None, "bias": None}),
    "group norm": (nn.GroupNorm(1, 4), {"weight": None, "bias": None}),
    "layer norm of two dimensions": (nn.LayerNorm((3, 2)), {"weight": None, "bias": None}),
    "rms norm": (nn.RMSNorm(4), {"weight": None}),
    "rnn": (
        nn.RNN(3, 5),
        {
            "weight_ih_l0": (MATRIX, ROWS, (5, 1)),
            "weight_hh_l0": (MATRIX, ROWS, (5, 1)),
            "bias_ih_l0": None,
            "bias_hh_l0": None,
        },
    ),
    "lstm with projection": (
        nn.LSTM(3, 5, proj_size=2, bias=False),
        {
            "weight_ih_l0": (MATRIX, ("rows", 4), (20, 1)),
            "weight_hh_l0": (MATRIX, ("rows", 4), (20, 1)),
            "weight_hr_l0": (MATRIX, ROWS, (2, 1)),
        },
    ),
    "gru of two directions": (
        nn.GRU(3, 5, bias=False, bidirectional=True),
        {
            "weight_ih_l0": (MATRIX, ("rows", 3), (15, 1)),
            "weight_hh_l0": (MATRIX, ("rows", 3), (15, 1)),
            "weight_ih_l0_reverse": (MATRIX, ("rows", 3), (15, 1)),
            "weight_hh_l0_reverse": (MATRIX, ("rows", 3), (15, 1)),
        },
    ),
    "rnn cell": (
        nn.RNNCell(3, 5, bias=False),
        {"weight_ih": (MATRIX, ROWS, (5, 1)), "weight_hh": (MATRIX, ROWS, (5, 1))},
    ),
    "lstm cell": (
        nn.LSTMCell(3, 5),
        {
            "weight_ih": (MATRIX, ("rows", 4), (20, 1)),
            "weight_hh": (MATRIX, ("rows", 4), (20, 1)),
            "bias_ih": None,
            "bias_hh": None,
        },
    ),
    "gru cell": (
        nn.GRUCell(3, 5, bias=False),
        {"weight_ih": (MATRIX, ("rows", 3), (15, 1)), "weight_hh": (MATRIX, ("rows", 3), (15, 1))},
    ),
    "attention": (
        nn.MultiheadAttention(4, 2, add_bias_kv=True),
        {
            "in_proj_weight": (MATRIX, ("rows", 3), (12, 1)),
            "in_proj_bias": None,
            "bias_k": None,
            "bias_v": None,
            "out_proj.weight": (MATRIX, ROWS, (4, 1)),
            "out_proj.bias": None,
        },
    ),
    "attention with other keys": (
        nn.MultiheadAttention(4, 2, kdim=3, vdim=5, bias=False),
        {
            "q_proj_weight": (MATRIX, ROWS, (4, 1)),
            "k_proj_weight": (MATRIX, ROWS, (4, 1)),
            "v_proj_weight": (MATRIX, ROWS, (4, 1)),
            "out_proj.weight": (MATRIX, ROWS, (4, 1)),
        },
    ),
    "packed by name": (
        model_of(
            WQKV=nn.Linear(2, 6, bias=False),
            c_attn=nn.Linear(2, 6, bias=False),
            in_proj=nn.Linear(2, 6, bias=False),
            qkv=nn.Linear(2, 4, bias=False),  # not three times as many
            up=nn.Linear(2, 6, bias=False),  # another name
        ),
        {
            "WQKV.weight": (MATRIX, ("rows", 3), (6, 1)),
            "c_attn.weight": (MATRIX, ("rows", 3), (6, 1)),
            "in_proj.weight": (MATRIX, ("rows", 3), (6, 1)),
            "qkv.weight": (MATRIX, ROWS, (4, 1)),
            "up.weight": (MATRIX, ROWS, (6, 1)),
        },
    ),
    "no packed linear layer": (
        model_of(
            qkv=model_of(block=model_of(up=nn.Linear(2, 6, bias=False))),  # too far away
            in_proj=nn.Bilinear(1, 2, 6, bias=False),
            qkv_codes=nn.Embedding(6, 2),
        ),
        {
            "qkv.block.up.weight": (MATRIX, ROWS, (6, 1)),
            "in_proj.weight": (MATRIX, ROWS, (6, 1, 1)),
            "qkv_codes.weight": (EMBEDDING, ROWS, (6, 1)),
        },
    ),
    "packed, with LoRA": (
        model_of(qkv=adapter()),
        {
            "qkv.base_layer.weight": (MATRIX, ("rows", 3), (18, 1)),
            "qkv.base_layer.bias": None,
            "qkv.lora_A.default.weight": (MATRIX, ROWS, (2, 1)),
            "qkv.lora_B.default.weight": (MATRIX, ROWS, (18, 1)),
        },
    ),
    "Conv1D of GPT-2": (
        model_of(c_attn=Conv1D(6, 2)),
        {"c_attn.weight": (MATRIX, TRANSPOSED, (1, 6)), "c_attn.bias": None},
    ),
    "convolution called Conv1D": (
        type("Conv1D", (Holder,), {"nf": 2})(weight=(4, 2, 3)),
        {"weight": (MATRIX, ROWS, (4, 1, 1))},
    ),
    "a second weight in a known layer": (
        Adapted(2, 4, 1, bias=False),
        {"weight": (MATRIX, TRANSPOSED, (1, 4, 1)), "lora_A": (MATRIX, ROWS, (3, 1))},
    ),
    "experts by class": (Experts(), {"up": (MATRIX, STACK, (3, 5, 1)), "up_bias": None}),
    "experts by name": (
        model_of(mlp=model_of(experts=Holder(gate=(3, 5, 4), mix=(5, 4), much=(2, 3, 5, 4)))),
        {
            "mlp.experts.gate": (MATRIX, STACK, (3, 5, 1)),
            "mlp.experts.mix": (MATRIX, ROWS, (5, 1)),
            "mlp.experts.much": (MATRIX, ROWS, (2, 1, 1, 1)),
        },
    ),
    "experts by the parameter's name": (
        Holder(experts_up=(3, 5, 4), weight_ih_experts=(3, 5, 4)),
        {"experts_up": (MATRIX, STACK, (3, 5, 1)), "weight_ih_experts": (MATRIX, STACK, (3, 5, 1))},
    ),
    "linear layer called Conv1D": (
        type("Conv1D", (Holder,), {"nf": 4})(weight=(4, 2)),
        {"weight": (MATRIX, ROWS, (4, 1))},
    ),
    "unknown": (
        Holder(gain=(), bias=(2, 3), w=(5, 4), row=(1, 4), column=(4, 1), temperature=(1, 1)),
        {
            "gain": None,
            "bias": None,
            "w": (MATRIX, ROWS, (5, 1)),
            "row": (MATRIX, ROWS, (1, 1)),
            "column": (MATRIX, ROWS, (4, 1)),
            "temperature": None,
        },
    ),
    "parametrized": (
        weight_norm(nn.Linear(4, 3)),
        {
            "bias": None,
            "parametrizations.weight.original0": (MATRIX, ROWS, (3, 1)),
            "parametrizations.weight.original1": (MATRIX, ROWS, (3, 1)),
        },
    ),
    "complex": (
        nn.Linear(4, 3, dtype=torch.complex64),
        {"weight": ("vector", None, (3, 1)), "bias": None},
    ),
    "frozen": (
        nn.Linear(4, 3).requires_grad_(False),
        {"weight": (MATRIX, ROWS, (3, 1)), "bias": None},
    ),
}


def rules_of(groups):
    """Of each parameter by name: (role, layout, shape of b)."""
    return {
        groups.names[p]: (group["role"], group.get("layout"), group["per"][i])
        for group in groups
        for i, p in enumerate(group["params"])
    }


@pytest.mark.parametrize("rule", RULES)
def test_every_parameter_has_the_role_that_its_module_gives_it(rule):
    model, expected = RULES[rule]
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes.keys() == expected.keys()
    assert rules_of(matrix_groups(model)) == {
        name: each or ("vector", None, shapes[name]) for name, each in expected.items()
    }


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Embedding(5, 8), layer, nn.LayerNorm(8), nn.Linear(8, 5))


def test_groups_hold_every_parameter_once_in_the_models_order():
    model = transformer()
    groups = matrix_groups(model)
    names = ["matrices (rows, 3)", "matrices", "embeddings", "vectors"]
    assert [group["name"] for group in groups] == names
    assert [group["role"] for group in groups] == ["matrix", "matrix", "embedding", "vector"]
    order = list(model.parameters())
    for group in groups:
        assert group["params"] == [p for p in order if any(p is q for q in group["params"])]
        assert len(group["per"]) == len(group["params"])
    assert {id(p) for group in groups for p in group["params"]} == set(map(id, order))
    assert groups.names == {p: name for name, p in model.named_parameters()}


def test_empty_groups_are_left_out():
    assert [group["name"] for group in matrix_groups(nn.LayerNorm(3))] == ["vectors"]
    assert [group["name"] for group in matrix_groups(nn.Embedding(3, 2))] == ["embeddings"]


@pytest.mark.parametrize("first", ["embedding", "head"])
def test_a_weight_tied_to_an_embedding_is_one_embedding(first):
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(*([embedding, head] if first == "embedding" else [head, embedding]))
    groups = matrix_groups(model)
    assert rules_of(groups) == {"0.weight": ("embedding", ("rows", 1), (5, 1))}


def test_a_weight_used_twice_is_what_its_first_owner_makes_of_it():
    conv, linear = nn.ConvTranspose1d(4, 5, 1, bias=False), Holder()
    linear.weight = conv.weight
    for model, layout in ((nn.Sequential(conv, linear), TRANSPOSED), ([linear, conv], ROWS)):
        model = model if isinstance(model, nn.Module) else nn.Sequential(*model)
        assert matrix_groups(model)[0]["layout"] == layout


def test_an_optimizer_takes_the_shapes_of_b():
    model = transformer()
    opt = WNGrad([{k: g[k] for k in ("params", "per", "name")} for g in matrix_groups(model)])
    model(torch.arange(5)[None]).square().sum().backward()
    opt.step()
    for group in opt.param_groups:
        for p, shape in zip(group["params"], group["per"], strict=True):
            assert opt.state[p]["b"].shape == shape


def test_the_table_has_a_line_for_each_parameter():
    attention = nn.MultiheadAttention(256, 4, bias=False)
    model = model_of(embed=nn.Embedding(1000, 256), attention=attention, gain=Holder(g=()))
    assert str(matrix_groups(model)).splitlines() == [
        "parameter                  shape               role       matrices       rates",
        "attention.in_proj_weight   768×256             matrix     3 of 256×256     768",
        "attention.out_proj.weight  256×256             matrix     1 of 256×256     256",
        "embed.weight               1000×256            embedding  1 of 1000×256  1,000",
        "gain.g                     1                   vector     –                  1",
        "total                      518,145 parameters                            2,025",
    ]


def test_groups_survive_a_copy_and_a_pickle():
    groups = matrix_groups(nn.Linear(3, 2))
    for twin in (copy.deepcopy(groups), pickle.loads(pickle.dumps(groups))):
        assert str(twin) == str(groups)
        assert twin[0]["params"][0] is not groups[0]["params"][0]


def flattened(kind, module):
    """As FSDP1 leaves a module: one flat parameter, or flat parts under the old names."""
    p = nn.Parameter(torch.ones(6))
    if kind == "flat":
        p._is_flat_param = True
    module.register_parameter("_flat_param" if kind == "flat" else "weight", p)
    return module


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: matrix_groups([torch.ones(2)]),
            TypeError,
            r"matrix_groups: `model` must be a torch.nn.Module, got \[tensor",
        ),
        (
            lambda: matrix_groups(nn.ReLU()),
            ValueError,
            "matrix_groups: `model` must have parameters, got a ReLU without",
        ),
        (
            lambda: matrix_groups(nn.Sequential(nn.LazyLinear(3))),
            ValueError,
            "matrix_groups: `model` must have no lazy parameters, got '0.weight'",
        ),
        (
            lambda: matrix_groups(flattened("flat", nn.Identity())),
            ValueError,
            r"matrix_groups: .* got '_flat_param', flattened by FullyShardedDataParallel. Use `ful",
        ),
        (
            lambda: matrix_groups(flattened("shard", nn.Linear(3, 2))),
            ValueError,
            "matrix_groups: .* got 'weight', flattened by FullyShardedDataParallel",
        ),
    ],
)
def test_bad_arguments_are_named_in_the_message(call, error, message):
    with pytest.raises(error, match=message):
        call()
