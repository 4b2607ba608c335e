"""WNMuon on matrices that are cut between ranks: the step on the whole, and the bytes it takes.

All that needs processes is done by one world of four; two ranks are a mesh of 2 × 2 that replicates
along one dimension.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from wngrad import WNMuon, step_in_backward
from wngrad.conformance.distributed import on_ranks
from wngrad.optim.modules import Layout
from wngrad.optim.orthogonal import orthogonalize
from wngrad.optim.orthogonal_sharded import messages, orthogonalize_sharded
from wngrad.optim.orthogonal_sharded.messages import dealt, packed, unpacked
from wngrad.optim.orthogonal_sharded.placement import COLUMNS, ROWS, Slice, _MeshCut, _parts
from wngrad.polynomials import LARGEST, LEAST

MATRICES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "tall": ((21, 3), {}),
    "wide": ((5, 23), {}),
    "square": ((6, 6), {}),
    "fewer rows than ranks": ((2, 9), {}),
    "one row": ((1, 7), {}),
    "one column": ((7, 1), {}),
    "convolution": ((6, 2, 3, 3), {}),
    "packed, cut within pieces": ((12, 7), {"layout": ("rows", 3)}),
    "packed, tall, cut within pieces": ((33, 2), {"layout": ("rows", 3)}),
    "packed, cut between pieces": ((8, 3), {"layout": ("rows", 4)}),
    "experts": ((4, 5, 3), {"layout": ("stack", 1)}),
    "fewer experts than ranks": ((3, 4, 9), {"layout": ("stack", 1)}),
    "transposed": ((8, 5), {"layout": ("transposed", 1)}),
    "transposed convolution": ((9, 3, 2), {"layout": ("transposed", 1)}),
    "embedding": ((17, 3), {"role": "embedding"}),
}
BOTH_WAYS = ("tall", "wide", "packed, cut within pieces", "packed, tall, cut within pieces",
             "fewer experts than ranks", "transposed convolution", "embedding")  # fmt: skip
PLACEMENTS: dict[str, tuple[Any, ...]] = {  # of one dimension: four ranks, of two: 2 × 2
    "FSDP2 on 4": (Shard(0),),
    "columns on 4": (Shard(1),),
    "HSDP on 2 × 2": (Replicate(), Shard(0)),
    "columns on 2": (Replicate(), Shard(1)),
    "rows and columns": (Shard(0), Shard(1)),
    "columns and rows": (Shard(1), Shard(0)),
    "rows twice": (Shard(0), Shard(0)),
    "replicated": (Replicate(),),
}


def drawn(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def whole(tensors: list[Tensor]) -> list[Tensor]:
    return [getattr(t, "full_tensor", lambda t=t: t)().detach().clone() for t in tensors]


def meshes() -> dict[int, Any]:
    names = ("dp", "tp")
    return {
        1: init_device_mesh("cpu", (4,)),
        2: init_device_mesh("cpu", (2, 2), mesh_dim_names=names),
    }


# --------------------------------------------------------------------------- four ranks


def placed(t: Tensor, mesh: Any, places: Any) -> Tensor:
    """A copy of a tensor that every rank has, sharded; nothing is sent."""
    return distribute_tensor(t.clone(), mesh, places, src_data_rank=None)


def furthest(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, on any rank, of sharded tensors and whole ones."""
    local = [
        (a.to_local(), placed(b, a.device_mesh, a.placements).to_local())
        if hasattr(a, "to_local")
        else (a, b)
        for a, b in zip(ours, theirs, strict=True)
    ]
    far = torch.stack([(a - b).abs().max() for a, b in local if a.numel()]).max().double()
    dist.all_reduce(far, op=dist.ReduceOp.MAX)
    return float(far)


def matrices(mesh: Any, places: tuple[Any, ...], dtype: torch.dtype = torch.float64) -> float:
    """Two steps of a parameter of each kind: how far those on shards are from the whole's.

    On a mesh of two dimensions, where DTensor takes its time, of fewer kinds.
    """
    kinds = [kind for name, kind in MATRICES.items() if len(places) == 1 or name in BOTH_WAYS]
    shapes, options = zip(*kinds, strict=True)
    plain = [nn.Parameter(drawn(shape, 7, dtype)) for shape in shapes]
    cut = [nn.Parameter(placed(p.detach(), mesh, places)) for p in plain]
    pairs = [
        (params, WNMuon([{"params": [p], **own} for p, own in zip(params, options, strict=True)]))
        for params in (plain, cut)
    ]
    for step in range(2):
        for k, (p, q) in enumerate(zip(plain, cut, strict=True)):
            p.grad = drawn(tuple(p.shape), 100 * step + k, dtype)
            p.grad[::3] = 0  # rows without a gradient, which an embedding leaves alone
            if "role" in options[k]:
                p.grad[1::3, :-1] = 0  # and rows whose gradient one rank alone has
            q.grad = placed(p.grad, mesh, places)
        for _, opt in pairs:
            opt.step()
    names = ("m", "b", "average")
    theirs, ours = (
        [p.detach() for p in params] + [opt.state[p][name] for p in params for name in names]
        for params, opt in pairs
    )
    return furthest(ours, theirs)


class Net(nn.Module):
    """An embedding, packed projections, and layers that grow and shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 4)
        self.qkv = nn.Linear(4, 12, bias=False)
        self.up, self.down = nn.Linear(4, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x)).chunk(3, -1)
        return self.down(self.up(q * k + v).relu()).square().mean((1, 2))


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return Net().to(dtype)


def accumulated(wrap: Callable[[nn.Module], Any]) -> float:
    """Two steps of two backward passes each: how far weights and averages are from the whole's."""
    results = []
    for sharded in (True, False):
        model = network()
        if sharded:
            wrap(model)
        opt = WNMuon(model)
        for step in range(2):
            opt.zero_grad()
            for part in range(2):
                generator = torch.Generator().manual_seed(2 * step + part)
                x = torch.randint(19, (3, 5), generator=generator)
                model(x).mean().backward()
            opt.step()
        params = list(model.parameters())
        tensors = [p.detach().clone() for p in params]
        with opt.averaged():
            tensors += [p.detach().clone() for p in params]
        results.append(tensors)
    return furthest(*results)


def over_tensor_parallelism(model: nn.Module, mesh: Any) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    fully_shard(model, mesh=mesh["dp"])


def resumed(four: Any, two: Any) -> dict[str, Any]:
    """State saved on four ranks and loaded on two (twice), and the step after it, in float32."""

    def made(mesh: Any) -> tuple[nn.Module, WNMuon]:
        model = network(torch.float32)
        fully_shard(model, mesh=mesh)
        return model, WNMuon(model)

    def step(model: nn.Module, opt: WNMuon, seed: int) -> list[Tensor]:
        for k, p in enumerate(model.parameters()):
            g = drawn(tuple(p.shape), 10 * seed + k, torch.float32)
            p.grad = placed(g, p.device_mesh, p.placements)
        opt.step()
        return whole([p.detach() for p in model.parameters()])

    def state(model: nn.Module, opt: WNMuon) -> list[Tensor]:
        held = [opt.state[p][name] for p in model.parameters() for name in sorted(opt.state[p])]
        return whole(held + list(model.parameters()))

    (model, opt), (other, again) = made(four), made(two)
    for seed in range(3):
        step(model, opt, seed)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    weights, saved = get_state_dict(model, opt)
    dcp.save({"model": weights, "opt": saved}, checkpoint_id=folder[0])
    weights, saved = get_state_dict(other, again)
    loaded = {"model": weights, "opt": saved}
    dcp.load(loaded, checkpoint_id=folder[0])
    set_state_dict(other, again, model_state_dict=weights, optim_state_dict=loaded["opt"])
    states = state(model, opt), state(other, again)
    return {"state": states, "step": (step(model, opt, 3), step(other, again, 3))}


@contextmanager
def counted() -> Iterator[list[tuple[str, float]]]:
    """Each message of ours: its kind, and how many bytes this rank sends to others in it.

    In a ring's all-reduce every rank sends (R−1)/R of the tensor twice, in an all-gather its own to
    R−1 others.
    """
    messages: list[tuple[str, float]] = []
    ways = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "all_to_all_single")}

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, group: Any, **options: Any) -> Any:
            ranks, rank = dist.get_world_size(group), dist.get_rank(group)
            tensor = args[0] if name == "all_reduce" else args[1]
            if name == "all_reduce":
                sent = 2 * (ranks - 1) / ranks * tensor.numel()
            elif name == "all_gather":
                sent = (ranks - 1) * tensor.numel()
            else:
                sent = tensor.numel() - args[3][rank]
            messages.append((name, sent * tensor.itemsize))
            return ways[name](*args, group=group, **options)

        return call

    try:
        for name in ways:
            setattr(dist, name, counting(name))
        yield messages
    finally:
        for name, way in ways.items():
            setattr(dist, name, way)


def traffic(mesh: Any, place: Any, shapes: list[tuple[int, ...]], **options: Any) -> dict[str, Any]:
    """How many messages a step takes, and the bytes of each kind that all ranks together send."""
    params = [nn.Parameter(placed(drawn(s, 1).float(), mesh, place)) for s in shapes]
    opt = WNMuon([{"params": params, **options}])
    for p in params:
        p.grad = placed(drawn(tuple(p.shape), 2).float(), mesh, place)
    with CommDebugMode() as mode, counted() as messages:
        opt.step()
    assert mode.get_total_counts() == len(messages)  # and none that is not ours
    bytes_sent = dict.fromkeys(("all_gather", "all_reduce", "all_to_all_single"), 0.0)
    for name, sent in messages:
        bytes_sent[name] += sent
    total = torch.tensor(list(bytes_sent.values()), dtype=torch.float64)
    dist.all_reduce(total)
    return {"messages": len(messages), **dict(zip(bytes_sent, total.tolist(), strict=True))}


def bad_entries(mesh: Any) -> dict[str, Any]:
    """What rank 3 has of one matrix is not finite; another matrix is zero."""
    results: dict[str, Any] = {}
    for shape, bad in product(((32, 3), (4, 12)), (float("nan"), float("inf"))):
        x = torch.stack([drawn(shape, k) for k in range(3)])
        x[0, -1, -1], x[1] = bad, 0
        params = [nn.Parameter(placed(torch.zeros(shape), mesh, [Shard(0)]))] * 3
        local = [placed(each, mesh, [Shard(0)]).to_local() for each in x]
        u = orthogonalize_sharded(params, [Layout()] * 3, local)
        mine = [u[0].isnan().all(), (u[1] == 0).all(), u[2].isfinite().all()]
        all_ranks = torch.stack(mine).to(torch.uint8)
        dist.all_reduce(all_ranks, op=dist.ReduceOp.MIN)
        results[f"{shape}, {bad}"] = all_ranks.tolist()
    return results


def skipped(mesh: Any) -> tuple[list[bool], int]:
    """Which of two parameters move where rank 3's part of the first one's gradient is NaN."""
    params = [nn.Parameter(placed(torch.ones(8, 2), mesh, [Shard(0)])) for _ in "ab"]
    opt = WNMuon(params, nonfinite="skip")
    for p in params:
        p.grad = placed(drawn((8, 2), 0).float(), mesh, [Shard(0)])
    if dist.get_rank() == 3:
        params[0].grad.to_local()[0, 0] = torch.nan
    opt.step()
    return [bool((t != 1).any()) for t in whole(params)], opt.skipped()


@contextmanager
def half_on_the_wire() -> Iterator[None]:
    """Matrices travel in float16, as they do on CUDA."""
    before = Slice.wire_type
    try:
        Slice.wire_type = property(lambda _: torch.float16)
        yield
    finally:
        Slice.wire_type = before


def of_sizes(mesh: Any) -> dict[str, Any]:
    """The function itself in float32: against float64 on the whole, at several scales."""
    results: dict[str, Any] = {}
    for shape in ((64, 6), (6, 40)):
        left, right = (torch.linalg.qr(drawn((n, 6), n))[0] for n in shape)
        x = ((left * torch.logspace(0, -3, 6).double()) @ right.mT).float()
        p = nn.Parameter(placed(x, mesh, [Shard(0)]))

        def of(x: Tensor, p: Tensor = p) -> Tensor:
            t = placed(x, mesh, [Shard(0)])
            (u,) = orthogonalize_sharded([p], [Layout()], [t.to_local()])
            sizes = {"shape": t.shape, "stride": t.stride()}
            return whole([type(t).from_local(u, mesh, [Shard(0)], **sizes)])[0]

        powers = [of(x * 2.0**power) for power in (0, 60, -60)]
        extremes = [of(x / x.abs().max() * size) for size in (1e-38, 3e38)]
        apart = torch.cat([torch.zeros(shape), 1e30 * x])  # nothing of it on ranks 0 and 1
        p = nn.Parameter(placed(apart, mesh, [Shard(0)]))
        extremes.append(of(apart, p)[len(x) :])
        results[str(shape)] = orthogonalize(x.double()), powers, extremes
    return results


def refused(mesh: Any) -> list[str]:
    """What is said of matrices that are cut to who asks for a step that needs them whole."""
    p = nn.Parameter(placed(drawn((8, 3), 0), mesh, [Shard(0)]))
    q = p.detach()
    q.grad = placed(drawn((8, 3), 1), mesh, [Shard(0)])
    messages = []
    for work in (WNMuon([q], differentiable=True).step, lambda: step_in_backward(WNMuon([p]))):
        with pytest.raises(ValueError) as error:  # noqa: PT011  (the message is looked at below)
            work()
        messages.append(str(error.value))
    return messages


def in_backward(mesh: Any) -> tuple[list[Tensor], list[Tensor]]:
    """A stack of experts, each whole on a rank, stepped inside backward and after it."""
    results = []
    for hooked in (False, True):
        p = nn.Parameter(placed(drawn((4, 5, 3), 0), mesh, [Shard(0)]))
        opt = WNMuon([{"params": [p], "layout": ("stack", 1)}])
        hooks = step_in_backward(opt) if hooked else None
        for step in range(3):
            opt.zero_grad()
            (p * placed(drawn((4, 5, 3), step), mesh, [Shard(0)])).sum().backward()
            opt.step()
        results.append(whole([p]))
        assert hooks is None or hooks.remove() is None
    return results[0], results[1]


TALL, WIDE, SQUARE = (32, 4), (4, 32), (8, 8)
EACH = [TALL, WIDE, SQUARE, (8, 3), (8, 4)]  # R·(n+1) = 2m, and one column more
TRAFFIC: dict[str, tuple[int, Any, list[tuple[int, ...]], dict[str, Any]]] = {
    "one of each": (1, [Shard(0)], EACH, {}),
    "seven of each": (1, [Shard(0)], EACH * 7, {}),
    "columns": (1, [Shard(1)], [TALL, WIDE, SQUARE], {}),
    "hsdp": (2, [Replicate(), Shard(0)], [TALL, WIDE, SQUARE], {}),
    "experts": (1, [Shard(0)], [(8, 4, 6)], {"layout": ("stack", 1)}),
    "experts cut": (1, [Shard(1)], [(8, 4, 6)], {"layout": ("stack", 1)}),
    "twice": (2, [Shard(0), Shard(1)], [SQUARE], {}),
}


def work() -> dict[str, Any]:
    torch.set_num_threads(1)
    mesh = meshes()
    results: dict[str, Any] = {
        name: matrices(mesh[len(places)], places) for name, places in PLACEMENTS.items()
    }
    results["float32"] = matrices(mesh[1], (Shard(0),), torch.float32)
    results["FSDP2"] = accumulated(lambda model: fully_shard(model, mesh=mesh[1]))
    results["FSDP2 over TP"] = accumulated(lambda model: over_tensor_parallelism(model, mesh[2]))
    results["resumed"] = resumed(mesh[1], mesh[2])
    results["traffic"] = {
        name: traffic(mesh[dims], place, shapes, **options)
        for name, (dims, place, shapes, options) in TRAFFIC.items()
    }
    results["bad"], results["skipped"] = bad_entries(mesh[1]), skipped(mesh[1])
    results["sizes"], results["backward"] = of_sizes(mesh[1]), in_backward(mesh[1])
    results["refused"] = refused(mesh[1])
    with half_on_the_wire():
        results["half"] = of_sizes(mesh[1])
        results["half traffic"] = traffic(mesh[1], [Shard(0)], [WIDE] * 2)
    return results


@pytest.fixture(scope="module")
def four() -> Any:
    return on_ranks(4, work)


# ------------------------------------------------------------------------------ the step


@pytest.mark.parametrize("name", [*PLACEMENTS, "FSDP2", "FSDP2 over TP", "float32"])
def test_a_step_on_cut_matrices_is_the_step_on_the_whole(four, name):
    # σ = 1e-3 of the largest is 1e-6 of its square, of which float32 has not many digits.
    assert four[name] < (5e-5 if name == "float32" else 1e-12)


@pytest.mark.parametrize("i", range(2), ids=["state", "step"])
def test_a_checkpoint_of_four_ranks_goes_on_on_two(four, i):
    """Momentum, b, counts and averages bit for bit; the next step, in float32, to 1e-6."""
    ours, theirs = four["resumed"][("state", "step")[i]]
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=(0, 1e-6)[i])


def test_matrices_whole_on_a_rank_may_step_inside_backward(four):
    ordinary, hooked = four["backward"]
    assert torch.equal(ordinary[0], hooked[0])


def test_what_needs_a_matrix_whole_is_refused(four):
    differentiable, in_backward = four["refused"]
    assert differentiable.startswith("WNMuon: `differentiable` must be False for matrices")
    assert "must have their matrices whole on a rank" in in_backward


# ------------------------------------------------------------------------------ the bytes


def expected(ranks: int, shapes: list[tuple[int, int]], itemsize: int = 4) -> dict[str, float]:
    """The formulas of the documentation, for matrices cut evenly between their rows."""
    bytes_sent = {"all_gather": 0.0, "all_reduce": 0.0, "all_to_all_single": 0.0}
    for m, n in shapes:
        if ranks * (n + 1) <= 2 * m:
            bytes_sent["all_gather"] += 2 * ranks * (ranks - 1) * itemsize
            bytes_sent["all_reduce"] += (ranks - 1) * n * (n + 1) * itemsize
        else:
            bytes_sent["all_to_all_single"] += 2 * (ranks - 1) / ranks * m * n * itemsize
    return bytes_sent


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("one of each", EACH),
        ("seven of each", EACH * 7),
        ("experts cut", [(4, 6)] * 8),
    ],
)
def test_a_step_sends_the_bytes_that_the_formulas_say_in_four_messages(four, name, shapes):
    counts, sent = dict(four["traffic"][name]), expected(4, shapes)
    messages = {"all_gather": 1, "all_reduce": 1, "all_to_all_single": 2}
    assert counts.pop("messages") == sum(n for way, n in messages.items() if sent[way])
    assert counts == pytest.approx(sent)
    assert sum(counts.values()) < sum(2 * 3 * m * n * 4 for m, n in shapes)  # gathered everywhere


def test_columns_are_cut_like_rows_and_their_norms_are_summed(four):
    """b of a row needs ‖u‖² over its ranks: one more message, of a float64 for each row."""
    counts, sent = dict(four["traffic"]["columns"]), expected(4, [TALL[::-1], WIDE[::-1], SQUARE])
    sent["all_reduce"] += 2 * 3 * 8 * (32 + 4 + 8)
    assert counts.pop("messages") == 5
    assert counts == pytest.approx(sent)


def test_ranks_that_replicate_send_nothing_to_each_other(four):
    """HSDP on 2 × 2 is twice what two ranks send."""
    counts = dict(four["traffic"]["hsdp"])
    twice = {name: 2 * sent for name, sent in expected(2, [TALL, WIDE, SQUARE]).items()}
    assert counts.pop("messages") == 4
    assert counts == pytest.approx(twice)


def test_matrices_whole_on_a_rank_send_nothing(four):
    assert set(four["traffic"]["experts"].values()) == {0}


def test_a_matrix_cut_twice_goes_to_its_owner_in_two_hops(four):
    """Two pairs of ranks send each other half of what they have; then so does one pair."""
    counts = four["traffic"]["twice"]
    assert counts["all_to_all_single"] == 4 * 2 * (64 / 2 + 64 / 2)
    assert counts["messages"] == 4 + 1  # and ‖u‖² of rows that are cut


# ------------------------------------------------------------------- the orthogonalization


@pytest.mark.parametrize("shape", ["(64, 6)", "(6, 40)"])
@pytest.mark.parametrize("name", ["sizes", "half"])
def test_cut_matrices_keep_the_promise_in_float32(four, name, shape):
    """Singular values from 1/1000 of the largest on, at any scale; powers of two change no bit."""
    exact, powers, extremes = four[name][shape]
    tol = 5e-3 if name == "sizes" else 0.1  # float16's 2⁻¹² of the largest is 1/4 of the least
    values = torch.linalg.svdvals(powers[0].double())
    assert values[0] <= LARGEST
    assert values[-1] >= LEAST
    assert torch.allclose(powers[0].double(), exact, atol=tol)
    assert all(torch.equal(powers[0], u) for u in powers[1:])
    assert all(torch.allclose(powers[0], u, atol=tol) for u in extremes)


def test_float16_on_the_wire_is_half_the_bytes(four):
    scale, there_and_back = 2 * 4 * 3 * 4, 2 * 3 / 4 * 4 * 32 * 2
    counts = four["half traffic"]
    assert counts["all_gather"] == 2 * scale
    assert counts["all_to_all_single"] == 2 * there_and_back


def test_one_bad_entry_makes_its_own_matrix_nan_on_every_rank(four):
    assert set(map(tuple, four["bad"].values())) == {(1, 1, 1)}
    assert len(four["bad"]) == 4


def test_a_matrix_that_is_not_finite_on_one_rank_is_skipped_on_all(four):
    moved, skips = four["skipped"]
    assert moved == [False, True]
    assert skips == 2  # of rank 0's two rows


@pytest.mark.parametrize("n", range(8))
def test_half_of_a_symmetric_matrix_is_enough(n):
    x = drawn((3, n, n + 1), 0)
    gram = x @ x.mT
    half = packed(gram)
    assert half.numel() == 3 * n * (n + 1) // 2
    assert torch.equal(unpacked(half), unpacked(half).mT)
    assert torch.allclose(unpacked(half), gram)


@given(st.lists(st.integers(1, 1000), min_size=1), st.lists(st.integers(0, 9), min_size=1))
def test_no_rank_is_given_more_than_an_equal_share_and_one_matrix(work, loads):
    hands = dealt(tuple(work), tuple(loads))
    assert sorted(i for hand in hands for i in hand) == list(range(len(work)))
    for hand, load in zip(hands, loads, strict=True):
        before = load + sum(sorted((work[i] for i in hand), reverse=True)[:-1])
        assert not hand or before <= (sum(work) + sum(loads)) / len(loads)


def test_what_is_cut_along_another_dimension_too_is_dealt_out_for_itself():
    """The ranks there must find the same owners, and may hold other matrices besides."""

    def cut(rows, *others):
        return Slice(torch.empty(1, rows, 4), rows, 4, (), (*others, "last"))

    shared, besides = [cut(9, "a"), cut(8, "a")], [cut(7, "b", "c"), cut(6, "b", "c"), cut(5)]
    for more in ([], besides):
        owned = messages._by_owner([*shared, *more], 3)
        assert [[i for i in part if i < 2] for part in owned] == [[0], [1], []]


def test_the_norm_of_a_whole_matrix_is_that_of_all_its_parts(monkeypatch):
    parts = [drawn((2, 3, 4), 0), 1e-3 * drawn((2, 5, 4), 1)]
    pairs = list(map(messages._norms, parts))
    monkeypatch.setattr(dist, "get_world_size", lambda _: 2)
    monkeypatch.setattr(
        dist, "all_gather", lambda out, *_, group: list(map(Tensor.copy_, out, pairs))
    )
    top, norm = messages._of_wholes(pairs[0], ("ranks",)).unbind(-1)
    assert torch.allclose(top * norm, torch.linalg.vector_norm(torch.cat(parts, 1), dim=(1, 2)))


KINDS = st.sampled_from(
    [
        ((9, 4), Layout()),
        ((12, 5), Layout("rows", 3)),
        ((3, 7, 5), Layout("stack")),
        ((8, 3, 2), Layout("transposed", 2)),
    ]
)


@given(KINDS, st.lists(st.tuples(st.integers(0, 2), st.integers(1, 4)), max_size=2))
def test_parts_of_all_ranks_are_the_whole_of_every_matrix(kind, cuts):
    """Every rank's parts, against torch.chunk on the numbers of the matrices they are in."""
    shape, layout = kind
    cuts = [(min(dim, len(shape) - 1), ranks) for dim, ranks in cuts]
    count, rows, columns = layout.sizes(shape)
    number = torch.arange(count).view(-1, 1, 1).expand(count, rows, columns)
    numbers = layout.restore(number.contiguous(), torch.empty(shape))
    for place in product(*(range(ranks) for _, ranks in cuts)):
        local = numbers
        for (dim, ranks), rank in zip(cuts, place, strict=True):
            pieces = local.chunk(ranks, dim)
            local = pieces[rank] if rank < len(pieces) else local.narrow(dim, 0, 0)
        pairs = zip(cuts, place, strict=True)
        mesh = [_MeshCut(k, dim, n, rank) for k, ((dim, n), rank) in enumerate(pairs)]
        seen = 0
        for part in _parts(shape, layout, tuple(mesh)):
            piece = part.layout.matrices(local[part.start : part.stop])
            assert all(len(each.unique()) <= 1 for each in piece)  # of one matrix alone
            assert (part.rows, part.columns) == (rows, columns)
            for cut in part.cuts:
                last = not any(c.axis == cut.axis for c in part.cuts[part.cuts.index(cut) + 1 :])
                assert not last or piece.shape[cut.axis] == cut.sizes[place[cut.mesh_dim]]
            for axis, size in ((ROWS, rows), (COLUMNS, columns)):
                first = [cut for cut in part.cuts if cut.axis == axis][:1]
                assert all(sum(cut.sizes) == size for cut in first)
            seen += piece.numel()
        assert seen == local.numel()
