"""How much faster the lab's programs are than one network after another.

    python benchmarks/lab.py [RECIPE …] [--device cuda] [--data DIR] [--out FILE.json]
    python benchmarks/lab.py figure-3 --variants plain kernels compiled --device cuda --random

For each recipe, in one run on one machine: the time of an epoch (training and evaluation) of a pack
as the lab runs it, after compilation, and of the same lanes trained one after another with the real
optimizer classes, for every optimizer at one λ: in the bare eager loop that everyone writes, and in
the lab's own loop for lone runs, which seeds every step. An epoch is taken from 100 steps and an
evaluation. `--variants` times other ways to run the same program; `--random` needs no data.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from wngrad.lab.recipes import RECIPES
from wngrad.lab.run.environment import environment, precision_on
from wngrad.lab.train.data import Data, load
from wngrad.lab.train.norm import BatchNorm
from wngrad.lab.train.programs import PROGRAMS, Branches, Lone, Program, branches
from wngrad.lab.train.programs.base import Fused
from wngrad.lab.train.spec import Pack, Sweep, packs

STEPS = 100  # timed of each program, of which the epoch is reckoned
VARIANTS = {  # of a network in branches, all but "eager" with a compiled optimizer
    "kernels": "normalization by our kernels, weights cast by tables, no compiler",
    "plain": "as it is in a CUDA graph, weights cast by tables, no compiler",
    "autocast": "compiled, weights cast one by one",
    "compiled": "compiled; in branches, weights cast by tables",
    "eager": "nothing is compiled, the step is a CUDA graph all the same",
    "unnormalized": "as kernels, but batch normalization does nothing: what the rest takes",
}
SHAPES = {"mnist": ((1, 28, 28), 60_000), "cifar10": ((3, 32, 32), 50_000)}


def noise(name: str) -> Data:
    """As many examples as a dataset has, but random ones: they take the same time."""
    shape, n = SHAPES[name]
    g = torch.Generator().manual_seed(0)
    train_x, test_x = (torch.randn(m, *shape, generator=g) for m in (n, 10_000))
    y = torch.arange(n) % 10
    return Data(name, train_x, y, test_x, y[:10_000], 10, "random")


def timed(program: Program, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if program.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def per_epoch(program: Program, train: Callable[[int], object], repeats: int) -> list[float]:
    """Seconds of an epoch, `repeats` times, after a first that is not counted."""
    some, steps = min(STEPS, program.steps), []
    train(min(some - 1, 20))
    program._test()
    for _ in range(repeats):
        program._shuffle()  # which begins the epoch again
        steps.append(timed(program, lambda: train(some)) / some)
    return [program.steps * step + timed(program, program._test) for step in steps]


def sequential(sweep: Sweep, data: Data, device: str) -> dict[str, dict[str, float]]:
    """Seconds of an epoch of one lane by the bare and by the lone loop, for every optimizer."""
    loops: dict[str, dict[str, float]] = {"bare": {}, "lone": {}}
    for name in sweep.optimizers:
        one = replace(sweep, optimizers=(name,), lam=(0.01,), seeds=(0,), repeat=())
        program = Lone(one, packs(one.settings, one.seeds, None)[0], data, device)
        loops["bare"][name] = per_epoch(program, lambda n, p=program: bare(p, n), 1)[0]
        loops["lone"][name] = per_epoch(program, program._train, 1)[0]
    return loops


def bare(program: Lone, steps: int) -> None:
    """The loop that everyone writes, on a lone run's network, data and optimizer."""
    model, opt, batch = program.models[0].train(), program.optimizers[0], program.sweep.batch
    for k in range(steps):
        index = program.order[0, k * batch : (k + 1) * batch]
        opt.zero_grad()
        output = program._output(model, program.train_x[index])
        loss = program.objective.mean(output, program.train_y[index])
        loss.backward()
        opt.step()
        program.total[0] += loss.detach()


def together(sweep: Sweep, pack: Pack, data: Data, device: str, repeats: int) -> dict[str, Any]:
    """What a pack takes: to start, and for an epoch."""
    began = time.perf_counter()
    program = PROGRAMS[sweep.program](sweep, pack, data, device)
    program._train(1)
    start = timed(program, program._test) + time.perf_counter() - began
    times = per_epoch(program, program._train, repeats)
    lanes, seconds = len(pack.lanes), statistics.median(times)
    return {
        "lanes at once": lanes,
        "seconds per epoch of all": seconds,
        "seconds per lane and epoch": seconds / lanes,
        "n": repeats,
        "spread of n": [min(times), max(times)],
        "start, seconds": start,
        "summed losses": program.total.tolist(),  # of the steps so far: variants agree
    }


def as_they_are(branch: Any, half: bool) -> Any:
    return branch.params


@contextmanager
def variant(name: str) -> Iterator[None]:
    """Branches that run their network so."""
    by = "compiler" if name in ("autocast", "compiled") else "kernels"
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Branches, "network_by", by))
        if name == "autocast":
            stack.enter_context(mock.patch.object(branches._Branch, "weights", as_they_are))
        if name in ("plain", "eager"):
            stack.enter_context(mock.patch.object(branches, "use_kernels"))
        if name == "eager":
            stack.enter_context(mock.patch.object(Fused, "compiles", False))
        if name == "unnormalized":
            stack.enter_context(mock.patch.object(BatchNorm, "forward", only_add))
            grad = partial(torch.autograd.grad, allow_unused=True, materialize_grads=True)
            stack.enter_context(mock.patch.object(torch.autograd, "grad", grad))
        yield


def only_add(layer: BatchNorm, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    return x if residual is None else x + residual


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    device, sweep = options.device, RECIPES[name]
    sweep = replace(sweep, precision=precision_on(device, sweep))
    data = noise(sweep.dataset) if options.random else load(sweep.dataset, options.data)
    pack = sweep.cut(sweep.seeds)[0]
    row: dict[str, Any] = {"recipe": name, "program": sweep.program, "precision": sweep.precision}
    for which in options.variants:
        try:
            with variant(which):
                row[which] = together(sweep, pack, data, device, options.repeats)
            say(f"{name}, {which} ({VARIANTS[which]})", row[which])
        except Exception as error:  # the others are still worth knowing
            print(f"{name}, {which}: {type(error).__name__}: {error}", flush=True)
        gc.collect()
    if not options.variants:
        row |= together(sweep, pack, data, device, options.repeats)
        row["whole sweep, seconds"] = (
            row["seconds per lane and epoch"] * len(sweep.lanes) * sweep.epochs
        )
        say(name, row)
        del row["summed losses"]
    row["alone, seconds per lane and epoch"] = sequential(sweep, data, device)
    for loop, seconds in row["alone, seconds per lane and epoch"].items():
        each = ", ".join(f"{k} {v:.3f} s" for k, v in seconds.items())
        print(f"{name}, one after another, the {loop} loop: {each} a lane and epoch", flush=True)
    if not options.variants:
        alone = row["alone, seconds per lane and epoch"]["bare"]
        rate = statistics.fmean(alone.values()) / row["seconds per lane and epoch"]
        row["times the rate of the bare loop"] = rate
        print(f"{name}: {rate:.0f} times the rate of the bare loop", flush=True)
    return {**row, "environment": environment(device)}


def say(what: str, row: dict[str, Any]) -> None:
    low, high = row["spread of n"]
    print(
        f"{what}: {row['lanes at once']} lanes at once, {row['seconds per epoch of all']:.3f} s an "
        f"epoch ({low:.3f} to {high:.3f}, n = {row['n']}), {row['seconds per lane and epoch']:.4f} "
        f"s a lane; {row['start, seconds']:.1f} s to start; loss of the first lane "
        f"{row['summed losses'][0]:.4f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=["digits"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--random", action="store_true", help="random examples, no data")
    parser.add_argument("--variants", nargs="*", default=[], choices=VARIANTS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = [measure(name, options) for name in options.recipes]
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
