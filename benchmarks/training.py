"""What an optimizer adds to a training step: WNMuon, torch's Muon and AdamW on whole networks.

    python benchmarks/training.py [--device cuda] [--networks resnet18 transformer] [--json FILE]

The networks train on random data in turn, round after round, one optimizer after another: ResNet-18
on 128 images, a character transformer (4 layers, width 256) on 64 × 128 characters, and 784-100-10
on 100 images. On CUDA forward and backward are compiled, in bfloat16, and the whole step, the
optimizer's included, is replayed as one CUDA graph where the optimizer allows it; "wall" is the
optimizer's own step launched from Python. On a CPU everything is eager, on one thread.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

sys.path.insert(0, str(Path(__file__).parents[1]))

from experiments.tournament.tasks import CharTransformer
from experiments.untuned.methods import MuonAdamW
from experiments.untuned.tasks import TASKS
from wngrad import WNMuon
from wngrad.lab.run.environment import environment
from wngrad.lab.train import models

WARM = 5  # steps before anything is timed


def resnet18(device: str) -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.randn(128, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    model = models.resnet18((3, 32, 32), 10).to(device, memory_format=torch.channels_last)
    return model, x, torch.randint(10, (128,), device=device)


def transformer(device: str) -> tuple[nn.Module, Tensor, Tensor]:
    model = CharTransformer(256, 4, 4, context=128).to(device)
    x, y = torch.randint(65, (2, 64, 128), device=device)
    return model, x, y


def mlp(device: str) -> tuple[nn.Module, Tensor, Tensor]:
    model = models.mlp((784,), 10).to(device)
    return (
        model,
        torch.randn(100, 1, 28, 28, device=device),
        torch.randint(10, (100,), device=device),
    )


NETWORKS = {"resnet18": resnet18, "transformer": transformer, "mlp": mlp}
_TASK = {"resnet18": "cifar-resnet", "transformer": "shakespeare", "mlp": "mnist-mlp"}


def adamw(model: nn.Module, name: str) -> Any:
    on_cuda = next(model.parameters()).is_cuda
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=on_cuda)


def muon(model: nn.Module, name: str) -> Any:
    opt = MuonAdamW(model, TASKS[_TASK[name]], 1e-3)
    for group in opt.param_groups:
        if "capturable" in group:
            group["capturable"] = next(model.parameters()).is_cuda
    return opt


OPTIMIZERS: dict[str, Callable[[nn.Module, str], Any]] = {
    "AdamW": adamw,
    "Muon + AdamW": muon,
    "WNMuon": lambda model, name: WNMuon(model),
    "WNMuon, no average": lambda model, name: WNMuon(model, average=None),
}


class Training:
    """A network and an optimizer, and the ways in which their step is timed."""

    def __init__(self, network: str, optimizer: str, device: str) -> None:
        torch.manual_seed(0)
        self.cuda = device != "cpu"
        self.model, self.x, self.y = NETWORKS[network](device)
        self.opt = OPTIMIZERS[optimizer](self.model, network)
        self._forward = torch.compile(self.model, dynamic=False) if self.cuda else self.model
        self.step: Callable[[], object] = self._step
        for _ in range(WARM):
            self._step()
        self.graphed = self.cuda and self._capture()

    def gradient(self) -> None:
        with torch.autocast("cuda", torch.bfloat16, self.cuda, cache_enabled=False):
            output = self._forward(self.x)
        if output.dim() > 2:
            output = output.transpose(1, 2).flatten(0, 1)
        F.cross_entropy(output.float(), self.y.flatten()).backward()

    def _step(self) -> None:
        for p in self.model.parameters():
            p.grad = None
        self.gradient()
        self.opt.step()

    def _capture(self) -> bool:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self._step()
        except Exception as error:
            print(f"not captured: {str(error).splitlines()[0]}", file=sys.stderr)
            return False
        self.step = graph.replay
        return True


def timed(work: Callable[[], object], cuda: bool, least: float = 0.1) -> float:
    """Milliseconds a call, over calls that take `least` seconds together."""
    if cuda:
        torch.cuda.synchronize()
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < least:
        for _ in range(10):
            work()
        count += 10
        if cuda:
            torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begun) / count


def measure(network: str, device: str, rounds: int) -> dict[str, Any]:
    """Median times of every optimizer on one network."""
    runs = {name: Training(network, name, device) for name in OPTIMIZERS}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            whole = timed(run.step, run.cuda)
            times[name].append((whole, timed(run.opt.step, run.cuda)))
    base = statistics.median(whole for whole, _ in times["AdamW"])
    rows = {}
    for name, pairs in times.items():
        whole, alone = (statistics.median(part) for part in zip(*pairs, strict=True))
        graphed = runs[name].graphed
        rows[name] = {"step_ms": whole, "over_adamw": whole / base, "optimizer_wall_ms": alone}
        rows[name]["graphed"] = graphed
    return {"network": network, "rounds": rounds, "rows": rows}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=found)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        torch.set_num_threads(1)
    networks = options.networks or (
        ["mlp"] if options.device == "cpu" else ["resnet18", "transformer"]
    )
    results = [measure(name, options.device, options.rounds) for name in networks]
    machine = environment(options.device)
    print("| network | optimizer | training step, ms | × AdamW | optimizer alone, wall, ms |")
    print("|---|---|---:|---:|---:|")
    for result in results:
        for name, row in result["rows"].items():
            how = "" if row["graphed"] or options.device == "cpu" else " (not in a graph)"
            numbers = f"{row['step_ms']:.3f}{how} | {row['over_adamw']:.2f}"
            print(f"| {result['network']} | {name} | {numbers} | {row['optimizer_wall_ms']:.3f} |")
    words = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "benchmarks/training.py", *words])
    record = {"command": command, "machine": machine, "results": results}
    if options.json:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
