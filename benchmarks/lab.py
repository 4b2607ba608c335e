"""How much faster the lab's programs are than one network after another.

    python benchmarks/lab.py [RECIPE …] [--device cuda] [--data DIR] [--out FILE.json]

For each recipe, in one run on one machine: the time of an epoch (training and evaluation) of the
whole sweep as the lab runs it, after compilation, and of the same lanes trained one after another
with the real optimizer classes in the ordinary eager loop (measured for every optimizer at one λ).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from wngrad.lab.recipes import RECIPES
from wngrad.lab.run.environment import environment, precision_on
from wngrad.lab.train.data import Data, load
from wngrad.lab.train.programs import PROGRAMS, Lone, Program
from wngrad.lab.train.spec import Sweep, packs


def epoch(program: Program) -> float:
    """Seconds of one epoch."""
    return timed(program, lambda: program.advance(program.steps))


def timed(program: Program, work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    if program.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def sequential(sweep: Sweep, data: Data, device: str) -> dict[str, float]:
    """Seconds of an epoch of one lane, for every optimizer, from 100 steps and an evaluation."""
    found = {}
    for name in sweep.optimizers:
        one = replace(sweep, optimizers=(name,), lam=(0.01,), seeds=(0,))
        program = Lone(one, packs(one.settings, one.seeds, None)[0], data, device)
        some = min(100, program.steps)
        bare(program, min(some, 20))  # warm-up
        program._test()
        found[name] = timed(program, lambda n=some, p=program: bare(p, n)) * program.steps / some
        found[name] += timed(program, program._test)
    return found


def bare(program: Lone, steps: int) -> None:
    """The loop that everyone writes, on a lone run's network, data and optimizer."""
    model, opt, batch = program.models[0].train(), program.optimizers[0], program.sweep.batch
    for k in range(steps):
        index = program.order[0, k * batch : (k + 1) * batch]
        opt.zero_grad()
        loss = F.cross_entropy(
            program._logits(model, program.train_x[index]), program.train_y[index]
        )
        loss.backward()
        opt.step()
        program.total[0] += loss.detach()


def measure(name: str, device: str, folder: Path | None, repeats: int) -> dict[str, Any]:
    sweep = RECIPES[name]
    sweep = replace(sweep, precision=precision_on(device, sweep))
    data = load(sweep.dataset, folder)
    pack = sweep.cut(sweep.seeds)[0]
    began = time.perf_counter()
    program = PROGRAMS[sweep.program](sweep, pack, data, device)
    epoch(program)
    start = time.perf_counter() - began
    times = [epoch(program) for _ in range(repeats)]
    together, alone = statistics.median(times), sequential(sweep, data, device)
    lanes, one = len(pack.lanes), statistics.fmean(alone.values())
    return {
        "recipe": name,
        "program": sweep.program,
        "precision": sweep.precision,
        "lanes at once": lanes,
        "seconds per epoch of all": together,
        "seconds per lane and epoch": together / lanes,
        "n": repeats,
        "spread of n": [min(times), max(times)],
        "first epoch with compilation": start,
        "whole sweep, seconds": together / lanes * len(sweep.lanes) * sweep.epochs,
        "sequential, seconds per lane and epoch": alone,
        "times the sequential rate": one * lanes / together,
        "environment": environment(device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipes", nargs="*", default=["digits"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for name in options.recipes:
        row = measure(name, options.device, options.data, options.repeats)
        rows.append(row)
        alone = row["sequential, seconds per lane and epoch"]
        print(
            f"{name}: {row['lanes at once']} lanes at once, "
            f"{row['seconds per epoch of all']:.3f} s an epoch "
            f"({row['seconds per lane and epoch']:.4f} s a lane), "
            f"{row['times the sequential rate']:.0f} times the sequential rate "
            f"({', '.join(f'{k} {v:.3f} s' for k, v in alone.items())} a lane); "
            f"the whole sweep {row['whole sweep, seconds']:.1f} s.",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
