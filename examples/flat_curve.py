"""One picture of what wngrad is for: final loss against λ, flat where SGD's is steep.

Trains a small network on scikit-learn's bundled digits with SGD, WNGrad and WNAdam over six decades
of λ, three seeds each, and writes `out/flat_curve.png`. No download, about half a minute.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import matplotlib
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from sklearn.datasets import load_digits
from torch import Tensor, nn

from wngrad import WNAdam, WNGrad

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LAMBDAS = [10.0**k for k in (-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2)]
SEEDS = 3
EPOCHS = 15
BATCH = 100
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor], float], torch.optim.Optimizer]] = {
    "SGD": lambda params, lam: torch.optim.SGD(params, lr=lam),
    "WNGrad": lambda params, lam: WNGrad(params, lr=lam),
    "WNAdam": lambda params, lam: WNAdam(params, lr=lam),
    "WNGrad, b₁ from the gradient": lambda params, lam: WNGrad(params, lr=lam, b_init="gradient"),
}
COLORS = dict(zip(OPTIMIZERS, ("#8c8c8c", "#0b6e99", "#d1495b", "#e0a100"), strict=True))
WIDTH = max(map(len, OPTIMIZERS))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images, normalized by the training set's mean and deviation, and labels."""
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32)
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    mean, std = x[train].mean(), x[train].std()
    x = (x - mean) / std
    return x[train], y[train], x[test], y[test]


def final_loss(name: str, lam: float, seed: int, data: tuple[Tensor, ...]) -> float:
    """Train one network; the test loss after the last epoch (infinite if it diverged)."""
    x, y, x_test, y_test = data
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 100, bias=False), nn.ReLU(), nn.Linear(100, 10, bias=False))
    opt = OPTIMIZERS[name](model.parameters(), lam)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(x)).split(BATCH):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            opt.step()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(x_test), y_test).item()
    return loss if math.isfinite(loss) else math.inf


def sweep() -> dict[str, list[list[float]]]:
    """For each optimizer and λ, the test losses of all seeds."""
    torch.set_num_threads(1)  # The network is small: a second thread would only wait.
    data = digits()
    results: dict[str, list[list[float]]] = {name: [] for name in OPTIMIZERS}
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("training", total=len(OPTIMIZERS) * len(LAMBDAS) * SEEDS)
        for name in OPTIMIZERS:
            for lam in LAMBDAS:
                losses = []
                for seed in range(SEEDS):
                    progress.update(task, description=f"{name:<{WIDTH}}  λ = {lam:<8.2g}")
                    losses.append(final_loss(name, lam, seed, data))
                    progress.advance(task)
                results[name].append(losses)
    return results


def draw(results: dict[str, list[list[float]]], path: Path) -> None:
    """Mean and spread over seeds against λ, on logarithmic axes."""
    chance = math.log(10)
    fig, ax = plt.subplots(figsize=(7, 4.2), layout="constrained")
    ax.axhline(chance, color="#bbbbbb", linestyle=":", linewidth=1)
    ax.text(0.07, chance * 1.07, "guessing", color="#888888", fontsize=8)
    for name, rows in results.items():
        mean = [min(statistics.fmean(row), 100.0) for row in rows]
        ax.plot(LAMBDAS, mean, "o-", color=COLORS[name], label=name, linewidth=2, markersize=4)
        low, high = [min(row) for row in rows], [min(max(row), 100.0) for row in rows]
        ax.fill_between(LAMBDAS, low, high, color=COLORS[name], alpha=0.15, linewidth=0)
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="λ, the learning rate given",
        ylabel=f"test loss after {EPOCHS} epochs",
        title=f"Digits, 64-100-10 network, {SEEDS} seeds: mean, lowest and highest",
    )
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="center left")
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=150)


def main() -> None:
    results = sweep()
    path = Path("out/flat_curve.png")
    draw(results, path)
    for name, rows in results.items():
        means = [statistics.fmean(row) for row in rows]
        good = [lam for lam, loss in zip(LAMBDAS, means, strict=True) if loss < 2 * min(means)]
        print(
            f"{name:<{WIDTH}}  best test loss {min(means):.3f} "
            f"at λ = {LAMBDAS[means.index(min(means))]:.2g}; "
            f"within twice that from λ = {good[0]:.2g} to {good[-1]:.2g}"
        )
    print(f"Wrote {path}: open it.")


if __name__ == "__main__":
    main()
