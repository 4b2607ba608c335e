"""What a step inside backward saves: peak memory and time against the ordinary loop.

    python benchmarks/release.py [--device cuda] [--layers 8] [--width 8192] [--json FILE]

A stack of linear layers is trained on one batch, by the same loop with and without the hooks. On
CUDA the peak is that of all memory of a step; on a CPU, where nobody counts, that of the bytes in
gradients. The two loops are timed in turn, round after round.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from steps.sets import DTYPES
from torch import Tensor, nn

from wngrad import WNAdam, WNGrad, step_in_backward
from wngrad.lab.run.environment import environment

OPTIMIZERS = {
    "WNGrad": lambda params: WNGrad(params, lr=1e-3),
    "WNGrad-momentum": lambda params: WNGrad(params, lr=1e-3, momentum=0.9),
    "WNAdam": lambda params: WNAdam(params, lr=1e-3),
}
SIZES = {"cuda": (8, 8192), "cpu": (8, 1024)}  # layers and width: 0.5 B and 8 M parameters
WARM = 3


@dataclass
class Loop:
    """A training loop over one batch."""

    model: nn.Module
    opt: Any
    x: Tensor

    def step(self) -> None:
        self.opt.zero_grad()
        self.model(self.x).square().mean().backward()
        self.opt.step()

    def hooks(self, released: bool) -> Any:
        return step_in_backward(self.opt) if released else nullcontext()

    def wait(self) -> None:
        if self.x.is_cuda:
            torch.cuda.synchronize(self.x.device)

    def seconds(self, steps: int) -> float:
        """Of a step, when the state and all plans have been made."""
        for _ in range(WARM):
            self.step()
        self.wait()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.wait()
        return (time.perf_counter() - began) / steps


def peak_bytes(loop: Loop, released: bool) -> int:
    """The most memory in use on the device during a step, all that is there counted."""
    with loop.hooks(released):
        for _ in range(WARM):
            loop.step()
        loop.opt.zero_grad()
        loop.wait()
        torch.cuda.reset_peak_memory_stats(loop.x.device)
        loop.step()
        loop.wait()
        peak = torch.cuda.max_memory_allocated(loop.x.device)
    loop.opt.zero_grad()
    return peak


def live_gradient_bytes(model: nn.Module, opt: Any, released: bool) -> int:
    """The most bytes in gradients at any time during a backward pass."""
    params, most = list(model.parameters()), 0

    def look(_: Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad.nbytes for p in params if p.grad is not None))

    # Hooks are called in their order: this one before the gradient is freed.
    lookers = [p.register_post_accumulate_grad_hook(look) for p in params]
    loop = Loop(model, opt, torch.ones(2, params[0].shape[1], dtype=params[0].dtype))
    with loop.hooks(released):
        loop.step()
    for looker in lookers:
        looker.remove()
    opt.zero_grad()
    return most


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One optimizer, both loops."""
    torch.manual_seed(0)
    kind = {"device": options.device, "dtype": DTYPES[options.dtype]}
    width = options.width
    stack = [nn.Linear(width, width, bias=False, **kind) for _ in range(options.layers)]
    model = nn.Sequential(*stack)
    params = list(model.parameters())
    loop = Loop(model, OPTIMIZERS[name](params), torch.randn(options.batch, width, **kind))
    row: dict[str, Any] = {"optimizer": name, "parameters": sum(p.numel() for p in params)}
    row["gradient bytes"] = sum(p.nbytes for p in params)
    ways, times = {"ordinary": False, "released": True}, {"ordinary": [], "released": []}
    for _ in range(options.rounds):
        for way, released in ways.items():
            with loop.hooks(released):
                times[way].append(loop.seconds(options.steps))
            loop.opt.zero_grad()
    for way, released in ways.items():
        if loop.x.is_cuda:
            peak = peak_bytes(loop, released)
        else:
            peak = live_gradient_bytes(model, loop.opt, released)
        row[way] = {"peak bytes": peak, "seconds": times[way]}
    return row


def document(rows: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """The table."""
    n, first = options.rounds, rows[0]
    what = "memory" if options.device.startswith("cuda") else "gradients"
    lines = [
        f"{options.layers} linear layers of {options.width} × {options.width}, {options.dtype}, "
        f"{first['parameters']:,} parameters, a batch of {options.batch}. Gradients: "
        f"{first['gradient bytes'] / 2**20:,.1f} MiB. Medians of {n} rounds, lowest to highest.",
        "",
        f"| | peak of {what}, ordinary | released | saved | of the gradients "
        "| a step, ordinary | released |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        peaks = [row[way]["peak bytes"] for way in ("ordinary", "released")]
        saved = peaks[0] - peaks[1]
        cells = [f"{b / 2**20:,.1f} MiB" for b in (*peaks, saved)]
        cells += [f"{saved / row['gradient bytes']:.1%}"]
        cells += [_times(row[way]["seconds"]) for way in ("ordinary", "released")]
        lines.append(f"| {row['optimizer']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _times(seconds: list[float]) -> str:
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    return f"{1e3 * middle:.2f} ms ({1e3 * low:.2f} to {1e3 * high:.2f})"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=found, help="cpu, cuda or cuda:0, 1, …")
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help="in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    layers, width = SIZES["cuda" if options.device.startswith("cuda") else "cpu"]
    options.layers = layers if options.layers is None else options.layers
    options.width = width if options.width is None else options.width
    for name in ("layers", "width", "batch", "steps", "rounds"):
        if getattr(options, name) < 1:
            parser.error(f"`--{name}` must be > 0, got {getattr(options, name)}.")
    return options


def main(arguments: list[str] | None = None) -> None:
    options, rows = parsed(arguments), []
    for name in OPTIMIZERS:
        rows.append(measured(name, options))
        gc.collect()  # The hooks and the optimizer hold each other.
    where = environment(options.device)
    print(document(rows, options))
    if options.json:
        settings = {k: v for k, v in vars(options).items() if k != "json"}
        record = {"machine": where, "settings": settings, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    print(f"on {where}", file=sys.stderr)


if __name__ == "__main__":
    main()
