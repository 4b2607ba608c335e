"""A study of b₁: steps to tolerance over twelve decades, against its rivals."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import wngrad
from wngrad.batch import BInit
from wngrad.batch.minimizer import minimize
from wngrad.batch.result import Status
from wngrad.problems import ZOO, Problem, quadratic

TOL = 1e-6
MAX_STEPS = 20_000
B_OVER_L = tuple(10.0**k for k in range(-6, 7))
STARTS = ("gradient", "lipschitz")  # Remark 2.2
STEP_TIMES_L = tuple(10.0 ** (k / 4) for k in range(-8, 9))


@dataclass(frozen=True, slots=True)
class Row:
    """One run of the study."""

    problem: str
    method: str
    value: float  # b₁/L, or η·L for a constant step
    steps: int
    status: str


def problems() -> list[Problem]:
    """Nine problems with a known L; the last starts where f(x₁) − f* is 550,000 times L."""
    names = ["quadratic", "least-squares", "logistic", "logistic-l2"]
    names += ["huber", "softplus", "geman-mcclure", "booth"]
    far = quadratic((0.1, 1.0))
    return [*(ZOO[name]() for name in names), replace(far, name="far start", x0=1e3 * far.x0)]


def run(advance: Callable[[], None] = lambda: None) -> list[Row]:
    """All runs of the study."""
    rows = []
    for problem in problems():
        assert problem.lipschitz is not None
        for name, method, value, b1 in _settings(problem):
            with np.errstate(over="ignore", invalid="ignore"):
                res = minimize(
                    problem.f,
                    problem.x0,
                    jac=problem.grad,
                    b_init=b1,
                    method=method,  # type: ignore[arg-type]
                    tol=TOL,
                    max_steps=MAX_STEPS,
                )
            diverged = res.status is Status.NOT_FINITE or res.sq_norm > 1e12 * res.start.sq_norm
            status = "diverged" if diverged else res.status.name.lower()
            value = value or res.start.b / problem.lipschitz
            rows.append(Row(problem.name, name, value, res.nit, status))
            advance()
    return rows


def size() -> int:
    return len(problems()) * (2 * len(B_OVER_L) + len(STEP_TIMES_L) + len(STARTS))


def _settings(problem: Problem) -> Iterator[tuple[str, str, float, BInit]]:
    """(method of the row, method of `minimize`, value, b₁)."""
    assert problem.lipschitz is not None
    for ratio in B_OVER_L:
        yield "wngrad", "wngrad", ratio, ratio * problem.lipschitz
        yield "adagrad-norm", "adagrad-norm", ratio, ratio * problem.lipschitz
    for ratio in STEP_TIMES_L:
        yield "constant", "constant", ratio, problem.lipschitz / ratio
    for start in STARTS:
        yield f"wngrad, {start}", "wngrad", 0.0, start  # type: ignore[misc]


def write(rows: list[Row], out: Path) -> list[Path]:
    """The records as JSON, a table as Markdown, and a picture."""
    from experiments.study import figure  # which knows the rows of this module

    out.mkdir(parents=True, exist_ok=True)
    record = {
        "command": "python -m experiments.study",
        "version": wngrad.__version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "tol": TOL,
        "max_steps": MAX_STEPS,
        "rows": [asdict(row) for row in rows],
    }
    paths = [out / "study.json", out / "study.md", out / "study.png"]
    paths[0].write_text(json.dumps(record, indent=1) + "\n")
    paths[1].write_text(markdown(rows))
    figure.draw(rows, MAX_STEPS, paths[2])
    return paths


def markdown(rows: list[Row]) -> str:
    """Where each method reaches the tolerance, and at what price."""
    lines = [
        "# How much does b₁ matter?",
        "",
        f"Steps until ‖∇f‖² ≤ {TOL:g}, at most {MAX_STEPS:,}: WNGrad (Algorithm 1 to the letter) "
        "and AdaGrad-Norm with b₁ from 10⁻⁶·L to 10⁶·L, constant steps η from 0.01/L to 100/L, and "
        "Remark 2.2's two starts. Everything is deterministic (n = 1 run for each setting). "
        "Made by `python -m experiments.study`.",
        "",
        "![Steps against the starting b over L](study.png)",
        "",
        "| problem | method | converged | fewest steps | most of those | diverged |",
        "|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row.problem for row in rows):
        for method in dict.fromkeys(row.method for row in rows):
            lines.append(_table_row(name, method, _of(rows, method, name)))
    return "\n".join([*lines, "", *_reading(rows), ""])


def _table_row(name: str, method: str, rows: list[Row]) -> str:
    good = [r.steps for r in rows if r.status == "converged"]
    bad = sum(r.status == "diverged" for r in rows)
    few, many = (f"{min(good):,}", f"{max(good):,}") if good else ("–", "–")
    return f"| {name} | {method} | {len(good)} of {len(rows)} | {few} | {many} | {bad} |"


def _of(rows: list[Row], method: str, problem: str | None = None) -> list[Row]:
    return [r for r in rows if r.method == method and problem in (None, r.problem)]


def _reading(rows: list[Row]) -> list[str]:
    def converged(runs: list[Row]) -> str:
        return f"{sum(r.status == 'converged' for r in runs)} of {len(runs)}"

    wngrad, constant = _of(rows, "wngrad"), _of(rows, "constant")
    near = [r for r in wngrad if 0.1 <= r.value <= 10]
    low = [r for r in wngrad if r.value < 0.1]
    low_norm = [r for r in _of(rows, "adagrad-norm") if r.value < 0.1]
    plateau = min(r.steps for r in _of(rows, "wngrad", "geman-mcclure"))
    above = [r for r in constant if r.value > 2]
    lost = sum(r.status == "diverged" for r in above)
    wild = sum(r.status == "diverged" for r in wngrad)
    far = min(r.steps for r in _of(rows, "constant", "far start") if r.status == "converged")
    starts = [converged(_of(rows, f"wngrad, {start}")) for start in STARTS]
    return [
        f"- Started from ‖∇f(x₁)‖, the default, WNGrad converges in {starts[0]} problems; from the "
        f"sampled Lipschitz estimate in {starts[1]}.",
        f"- With b₁ between L/10 and 10·L it converges in {converged(near)} runs, and it diverges "
        f"in {wild} of all {len(wngrad)}. Constant steps above 2/L diverge in {lost} of "
        f"{len(above)}.",
        f"- With b₁ below L/10 it converges in {converged(low)} runs: the first step, ∇f(x₁)/b₁, "
        "throws x far away, the gradient found there makes b huge, and b never comes down. The "
        "theorem asks for b₁ ≥ ‖∇f(x₁)‖ for a reason.",
        f"- AdaGrad-Norm, whose b² adds up ‖∇f‖² and takes in the first gradient before the first "
        f"step, converges in {converged(low_norm)} runs with b₁ below L/10, at the same "
        "number of steps from any of them: where b₁ may be too small, it is the better rule.",
        "- Thrown far enough, a run may end on a plateau: Geman–McClure's function is flat at "
        f"infinity, and WNGrad from b₁ = 10⁻⁶·L stops there after {plateau:,} step(s), at no "
        "minimum.",
        "- With b₁ far above L WNGrad is gradient descent at the rate 1/b₁, and as slow as that.",
        f'- Where f(x₁) − f* is far above L ("far start") b overshoots from any b₁: '
        f"{converged(_of(rows, 'wngrad', 'far start'))} runs converge, where the best constant "
        f"step takes {far:,}. AdaGrad-Norm: {converged(_of(rows, 'adagrad-norm', 'far start'))}.",
    ]
