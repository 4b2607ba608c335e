"""What a step costs: our optimizers against torch's and others that are installed.

    python benchmarks/step.py [--device cuda] [--sets llama mlp] [--json FILE] [--picture FILE]

For each set of parameters and each dtype everyone steps in turn, round after round, over the same
parameters and random gradients. Measured are the time of a step on the device (a GPU's cache is
emptied first; a CPU's is not), the wall time of a step as the host sees it, with gradients that
stay and with gradients that move between steps, the time inside a CUDA graph, the peak of extra
memory, and the state. The floor is the time in which the bytes that must move are moved by a plain
copy on a GPU, and by a change in place on a CPU.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from steps.contestants import NAMES, WAYS, contestants
from steps.race import race
from steps.report import document, picture
from steps.sets import DTYPES, SETS
from steps.targets import verdicts

from wngrad.lab.run.environment import environment
from wngrad.optim.report import SmallRateWarning

DEFAULT_SETS = {"cuda": ["llama", "resnet18", "mlp"], "cpu": ["38M", "resnet18", "mlp"]}


def machine(device: str) -> dict[str, Any]:
    """Where and with what the run was made."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = None
    return {**environment(device), "triton": triton, "CUDA": torch.version.cuda}


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=found, help="cpu, cuda or cuda:0, 1, …")
    parser.add_argument("--sets", nargs="+", choices=list(SETS))
    parser.add_argument("--dtypes", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--optimizers", nargs="+", choices=NAMES)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), help="implementations")
    parser.add_argument("--repeats", type=int, default=7, help="rounds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error(f"`--repeats` must be > 0, got {options.repeats}.")
    try:
        options.machine = machine(options.device)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str] | None = None) -> None:
    options, began = parsed(arguments), time.perf_counter()
    warnings.simplefilter("ignore", SmallRateWarning)  # parameters are to stay where they are
    device = torch.empty(0, device=options.device).device  # with its index
    if device.type == "cuda":
        torch.cuda.set_device(device)

    def tell(line: str) -> None:
        print(f"{time.perf_counter() - began:6.1f} s  {line}", file=sys.stderr, flush=True)

    chosen, results = contestants(device.type, options.optimizers, options.ways), []
    for name in options.sets or DEFAULT_SETS[device.type]:
        for dtype in options.dtypes:
            results.append(race(name, dtype, device, chosen, options.repeats, tell))
    judged = verdicts(results)
    print(document(results, judged, options.machine))
    words = sys.argv[1:] if arguments is None else arguments
    record = {
        "command": shlex.join(["python", "benchmarks/step.py", *words]),
        "machine": options.machine,
        "seconds": time.perf_counter() - began,
        "results": results,
        "targets": judged,
    }
    if options.json:
        options.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if options.picture:
        picture(results, options.machine, options.picture)


if __name__ == "__main__":
    main()
