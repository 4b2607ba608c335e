"""The probes that need several processes, or torch's distributed checkpoints.

Ranks are forked from the process of the probe and speak over gloo. Of a step on shards the oracle
is the step on the whole: the same optimizer on the same network, not sharded.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from wngrad.conformance.compare import held, same
from wngrad.conformance.registry import probe
from wngrad.conformance.subject import Closure, Subject
from wngrad.conformance.training import STEPS, differentiated, fresh, train
from wngrad.conformance.verdicts import Failed, NotApplicable, described

EVEN, UNEVEN = (6, 8, 4), (5, 3, 1)  # widths of a network; the first one also for four ranks


# ------------------------------------------------------------------------- ranks


def on_ranks(world: int, work: Callable[[], Any]) -> Any:
    """What `work()` returns on rank 0; the first rank that fails ends all of them."""
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        ranks = [
            context.Process(target=_rank, args=(k, world, f"{folder}/store", work, pipes[k][1]))
            for k in range(world)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # JAX's, which no rank uses
            for rank, (_, writer) in zip(ranks, pipes, strict=True):
                rank.start()
                writer.close()
        try:
            return _first_result(ranks, [reader for reader, _ in pipes])
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()


def _first_result(ranks: list[Any], readers: list[Any]) -> Any:
    results: dict[int, Any] = {}
    while len(results) < len(readers):
        for reader in wait([r for k, r in enumerate(readers) if k not in results]):
            k = readers.index(reader)
            try:
                ok, results[k] = pickle.loads(readers[k].recv_bytes())
            except EOFError:
                ranks[k].join()
                raise Failed(f"rank {k} ended with exit code {ranks[k].exitcode}") from None
            if not ok and "CUDA" in results[k] and not torch.cuda.is_available():
                raise NotApplicable(f"for sharded parameters it needs CUDA ({results[k]})")
            if not ok:
                raise Failed(f"on rank {k}: {results[k]}")
    return results[0]


def _rank(rank: int, world: int, store: str, work: Callable[[], Any], pipe: Any) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
        result = (True, work())
        dist.barrier()
    except BaseException as error:
        reason = str(error) if isinstance(error, Failed) else described(error)
        result = (False, reason)
    pipe.send_bytes(pickle.dumps(result))  # send() would share the memory of tensors
    pipe.close()
    os._exit(0)


# ----------------------------------------------------------------------- networks


def layers(widths: tuple[int, ...], seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))).double()


def sharded(widths: tuple[int, ...], seed: int = 0) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = layers(widths, seed)
    fully_shard(model, mesh=mesh)
    return model


def whole(t: Tensor) -> Tensor:
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def compare(params: list[Tensor], expected: list[Tensor], start: list[Tensor]) -> None:
    """Relative to how far the parameters have moved: some methods start with tiny steps."""
    moved = max(float((b - a).abs().max()) for a, b in zip(start, expected, strict=True))
    far = max(float((b - a).abs().max()) for a, b in zip(params, expected, strict=True))
    if not moved > 0:
        raise Failed("no parameter moves")
    if not far <= 1e-6 * moved:
        raise Failed(f"parameters that should have moved {moved:.2g} are {far:.2g} off")


# --------------------------------------------------------------------------- FSDP2


def _steps_on_shards(make: Subject, widths: tuple[int, ...]) -> None:
    """Steps on shards and on the whole, with the same batches on every rank."""

    def work() -> None:
        plain, model = layers(widths), sharded(widths)
        start = [whole(p) for p in plain.parameters()]
        for m in (plain, model):
            opt = make(m.parameters(), **(make.sharded if m is model else {}))
            for seed in range(STEPS):
                make.step(opt, _batch(m, widths[0], seed))
        moved, expected = ([whole(p) for p in m.parameters()] for m in (model, plain))
        compare(moved, expected, start)

    on_ranks(2, work)


def _batch(model: nn.Module, width: int, seed: int) -> Closure:
    def closure() -> Tensor:
        torch.manual_seed(seed)
        model.zero_grad()
        return differentiated(model(torch.randn(4, width).double()).square().mean() / 4)

    return closure


@probe("FSDP2 even", distributed=True)
def fsdp_even(make: Subject) -> None:
    _steps_on_shards(make, EVEN)


@probe("FSDP2 uneven", distributed=True)
def fsdp_uneven(make: Subject) -> None:
    _steps_on_shards(make, UNEVEN)


# ---------------------------------------------------------------------- checkpoints


def _save(make: Subject, model: nn.Module, opt: Any, folder: str) -> None:
    make.eval(opt)
    weights, state = get_state_dict(model, opt)
    save({"model": weights, "opt": state}, checkpoint_id=folder)
    make.train(opt)


def _load(make: Subject, model: nn.Module, opt: Any, folder: str) -> None:
    weights, state = get_state_dict(model, opt)
    saved: dict[str, Any] = {"model": weights, "opt": state}
    load(saved, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=saved["model"], optim_state_dict=saved["opt"])
    make.train(opt)


@probe("DCP", distributed=True)
def distributed_checkpoint(make: Subject) -> None:
    (model, opt), (other, again) = (fresh(make, seed, torch.float32) for seed in (0, 7))
    with tempfile.TemporaryDirectory() as folder:
        train(make, model, opt, 8)
        _save(make, model, opt, folder)
        _load(make, other, again, folder)
    tensors, loaded = len(held(opt)), len(held(again))
    train(make, model, opt, 8, first=8)
    train(make, other, again, 8, first=8)
    if not same(model, other):
        lost = f"; of {tensors} tensors of state {loaded} came back" if loaded < tensors else ""
        raise Failed(f"after loading it is not the run that was never stopped{lost}")


def _dealt(params: list[Tensor], seed: int) -> Closure:
    """The same gradients for any number of ranks, dealt out as the parameters are."""

    def closure() -> Tensor:
        draw = torch.Generator().manual_seed(100 + seed)
        for p in params:
            full = torch.randn(p.shape, generator=draw, dtype=p.dtype) / 20
            p.grad = distribute_tensor(full, p.device_mesh, p.placements)  # type: ignore[attr-defined]
        return torch.ones((), dtype=torch.float64)

    return closure


def _dealt_steps(make: Subject, model: nn.Module, opt: Any, seeds: range) -> list[Tensor]:
    params: list[Tensor] = list(model.parameters())
    for seed in seeds:
        make.step(opt, _dealt(params, seed))
    return [whole(p) for p in params]


@probe("2 → 4 resharding", distributed=True)
def resharding(make: Subject) -> None:
    with tempfile.TemporaryDirectory() as folder:

        def saves() -> list[list[Tensor]]:
            model = sharded(EVEN)
            start = [whole(p) for p in model.parameters()]
            opt = make(model.parameters(), **make.sharded)
            _dealt_steps(make, model, opt, range(6))
            _save(make, model, opt, folder)
            return [start, _dealt_steps(make, model, opt, range(6, 12))]

        def loads() -> list[Tensor]:
            model = sharded(EVEN, seed=7)
            opt = make(model.parameters(), **make.sharded)
            _load(make, model, opt, folder)
            return _dealt_steps(make, model, opt, range(6, 12))

        start, expected = on_ranks(2, saves)
        compare(on_ranks(4, loads), expected, start)
