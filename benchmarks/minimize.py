"""What `wngrad.minimize` costs over a bare Python loop of the same arithmetic, as a ratio.

Run it: `python benchmarks/minimize.py`. Prints a line for each size, the median of `REPEATS` pairs
timed one after the other.
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from wngrad import minimize

SIZES = {10: 20_000, 1_000_000: 40}
REPEATS = 9


def bare(grad: Callable[[np.ndarray], np.ndarray], x: np.ndarray, steps: int) -> np.ndarray:
    """Algorithm 1, and nothing else."""
    g = grad(x)
    b = math.sqrt(float(np.vdot(g, g)))
    for _ in range(steps):
        x = x - g / b
        g = grad(x)
        sq = float(np.vdot(g, g))
        b = b + sq / b
        if sq <= 0.0:
            break
    return x


def timed(run: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    begin = time.perf_counter()
    x = run()
    return time.perf_counter() - begin, x


def main() -> None:
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, {platform.machine()}")
    for n, steps in SIZES.items():
        curvature = np.linspace(1, 10, n)
        x0 = np.ones(n)

        def f(x: np.ndarray, a: np.ndarray = curvature) -> float:
            return float(x @ (a * x)) / 2

        def grad(x: np.ndarray, a: np.ndarray = curvature) -> np.ndarray:
            return a * x

        ratios, loops = [], []
        for _ in range(REPEATS):
            loop, x = timed(lambda: bare(grad, x0, steps))  # noqa: B023
            ours, y = timed(lambda: minimize(f, x0, jac=grad, tol=0.0, max_steps=steps).x)  # noqa: B023
            assert np.array_equal(x, y), "the two must take the same steps"
            ratios.append(ours / loop)
            loops.append(loop / steps)
        low, middle, high = min(ratios), statistics.median(ratios), max(ratios)
        print(
            f"n = {n:>9,}: minimize / bare loop {middle:.2f} "
            f"({low:.2f} to {high:.2f}, n = {REPEATS}); "
            f"a bare step takes {statistics.median(loops) * 1e6:,.1f} µs"
        )


if __name__ == "__main__":
    main()
