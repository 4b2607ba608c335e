"""What Ray costs: 64 small packs on a local cluster, against the same packs without it.

    python benchmarks/ray_overhead.py [--rounds 3] [--out results/ray-overhead.json]

Both are whole commands as a user types them, from the start of the process to its end: `wngrad
run`, which trains the packs one after another in one process, and `wngrad run --ray ADDRESS` on a
cluster that is running and has room for one pack at a time. One thread each, in turns, in one run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from wngrad.lab.run.environment import environment

PACKS = 64
SWEEP = f"""
from wngrad.lab.train.spec import Sweep
SMALL = Sweep(
    name="small", claim="", dataset="digits", model="mlp", optimizers=("sgd", "wngrad"),
    lam=(0.01, 0.1), epochs=30, seeds=range({PACKS}), lanes_per_pack=4,
)
"""


def run(folder: Path, out: str, *more: str) -> dict[str, float]:
    """Seconds of a whole run, and of those in packs."""
    words = ["run", "sweeps:SMALL", "--device", "cpu", "--lanes", "4", "--out", out, *more]
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "wngrad", *words], cwd=folder, check=True, capture_output=True
    )
    took = time.perf_counter() - began
    lines = (folder / out / "sessions.jsonl").read_text().splitlines()
    assert len(lines) == PACKS
    return {"all": took, "in packs": sum(json.loads(line)["seconds"] for line in lines)}


def measure(rounds: int) -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sweeps.py").write_text(SWEEP)
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        try:
            for k in range(rounds):
                alone = run(folder, f"local-{k}")
                on_ray = run(folder, f"ray-{k}", "--ray", cluster.address)
                ratio = on_ray["all"] / alone["all"]
                print(f"{alone['all']:.1f} s alone, {on_ray['all']:.1f} s on Ray: {ratio:.3f}")
                found.append({"local": alone, "ray": on_ray, "ratio": ratio})
        finally:
            cluster.shutdown()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    rounds = measure(options.rounds)
    ratios = [each["ratio"] for each in rounds]
    row = {
        "packs": PACKS,
        "lanes in a pack": 4,
        "ratio, median": statistics.median(ratios),
        "ratio, least and greatest": [min(ratios), max(ratios)],
        "seconds more per pack, median": statistics.median(
            (each["ray"]["all"] - each["local"]["all"]) / PACKS for each in rounds
        ),
        "rounds": rounds,
        "environment": {**environment("cpu"), "ray": ray.__version__, "cores": os.cpu_count()},
    }
    print(
        f"{row['ratio, median']:.3f} (median of {len(ratios)}; {min(ratios):.3f}–{max(ratios):.3f})"
    )
    if options.out:
        options.out.write_text(json.dumps(row, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
