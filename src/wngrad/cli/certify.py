"""`wngrad certify`: Algorithm 1 on a problem, beside every bound of the paper."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from wngrad.batch import Certificate, EvaluationError, Result, minimize
from wngrad.cli.messages import fail, make_folder
from wngrad.lab.train.loader import load_callable
from wngrad.problems import ZOO, Problem


def certify(
    problem: Annotated[str, typer.Argument(help=f"One of {', '.join(ZOO)}; or path.py:function.")],
    b1: Annotated[
        list[str] | None,
        typer.Option("--b1", help="b₁: a number, a multiple of L (0.1L), gradient or lipschitz."),
    ] = None,
    tol: Annotated[float, typer.Option(help="ε, on the squared gradient norm.")] = 1e-8,
    max_steps: Annotated[int, typer.Option(help="A limit on steps.")] = 100_000,
    lipschitz: Annotated[float | None, typer.Option(help="L, if the problem has none.")] = None,
    f_star: Annotated[float | None, typer.Option(help="A lower bound on f.")] = None,
    x0: Annotated[str | None, typer.Option(help="The start, as numbers with commas.")] = None,
    out: Annotated[Path, typer.Option(help="A folder for the picture.")] = Path("out"),
) -> None:
    """Run Algorithm 1 from several b₁ and set every bound of the paper beside what was measured."""
    try:
        what, exact = _problem(problem, x0, lipschitz, f_star)
    except ValueError as error:
        fail(str(error))
    make_folder(out)
    named: list[tuple[str, Result]] = []
    for text in b1 or _choices(what):
        try:
            res = minimize(
                what.f,
                what.x0,
                jac=what.grad,
                b_init=_b1(text, what),
                tol=tol,
                max_steps=max_steps,
                trace=True,
            )
        except (ValueError, TypeError, EvaluationError) as error:
            if b1 is None and text == "lipschitz":
                print(f"No run from b₁ = lipschitz: {error}")
                continue
            fail(str(error))
        named.append((text, res))
    held = _show(what, named, None if exact else 1e-6)
    path = out / f"certify-{Path(what.name).stem}.png"
    from wngrad.cli import certify_figure

    certify_figure.draw(named, what.name, what.lipschitz, what.f_star, path)
    print(f"Wrote {path}.")
    raise typer.Exit(0 if held else 1)


def _choices(problem: Problem) -> list[str]:
    known = problem.lipschitz is not None
    return ["gradient", "lipschitz", *(["0.01L", "L", "100L"] if known else ["0.1", "10"])]


def _b1(text: str, problem: Problem) -> Any:
    if text in ("gradient", "lipschitz"):
        return text
    scale = problem.lipschitz if text.endswith("L") else 1.0
    if scale is None:
        raise ValueError(f"`--b1` {text!r} needs an L: give `--lipschitz`.")
    try:
        return scale * float(text.removesuffix("L") or 1)
    except ValueError as error:
        raise ValueError(
            f"`--b1` must be a number, a multiple of L, gradient or lipschitz, got {text!r}."
        ) from error


def _problem(
    text: str, x0: str | None, lipschitz: float | None, f_star: float | None
) -> tuple[Problem, bool]:
    """The problem, and whether its gradient is exact."""
    if lipschitz is not None and not 0 < lipschitz < np.inf:
        raise ValueError(f"`--lipschitz` must be > 0 and finite, got {lipschitz}.")
    if f_star is not None and not np.isfinite(f_star):
        raise ValueError(f"`--f-star` must be finite, got {f_star}.")
    found, exact = (ZOO[text](), True) if text in ZOO else _from_file(text, x0)
    start = found.x0 if x0 is None else _point(x0)
    if start.shape != found.x0.shape:
        raise ValueError(f"`--x0` must have {found.x0.size} numbers, got {start.size}.")
    return replace(
        found,
        x0=start,
        f_star=found.f_star if f_star is None else f_star,
        lipschitz=found.lipschitz if lipschitz is None else lipschitz,
    ), exact


def _point(text: str) -> Any:
    try:
        return np.array([float(part) for part in text.split(",")])
    except ValueError as error:
        raise ValueError(f"`--x0` must be numbers with commas, got {text!r}.") from error


def _from_file(text: str, x0: str | None) -> tuple[Problem, bool]:
    """A user's f(x), which returns the value, or (value, gradient)."""
    f = load_callable(text, "problem", ZOO, owner="certify")
    if x0 is None:
        raise ValueError("`--x0` must be given for a function of your own.")
    start, name = _point(x0), text.rpartition(":")[2]
    try:
        value = f(start)
    except Exception as error:
        raise ValueError(f"{text} raised {type(error).__name__} at `--x0`: {error}.") from error
    if isinstance(value, tuple):
        if len(value) != 2 or np.shape(value[1]) != start.shape:
            raise ValueError(f"{text} must return a value, or (value, gradient), got {value!r}.")
        return Problem(name, lambda x: f(x)[0], lambda x: np.asarray(f(x)[1]), start), True
    from wngrad.batch.arrays import finite_difference_gradient

    print("The gradient is taken by finite differences: claims hold to 1e-6.")
    return Problem(name, f, finite_difference_gradient(f), start), False


def _show(problem: Problem, named: list[tuple[str, Result]], rounding: float | None) -> bool:
    known = f"L = {_text(problem.lipschitz)}, f* = {_text(problem.f_star)}"
    table = Table(title=f"{problem.name}: {known}")
    for column in ("start", "b₁", "points", "at most", "‖∇f‖²", "last b", "claims held", "ended"):
        table.add_column(column, justify="left" if column in ("start", "ended") else "right")
    held, notes = True, []
    for name, res in named:
        cert = res.certify(lipschitz=problem.lipschitz, f_star=problem.f_star, rounding=rounding)
        points = [c for c in cert.claims if "points until" in c.name]
        most = f"{points[0].rhs:.3g}" if points else "–"
        good = sum(c.holds for c in cert.claims)
        table.add_row(
            name, f"{res.start.b:.4g}", f"{res.nit + 1:,}", most, f"{res.sq_norm:.2e}",
            f"{res.b:.4g}", _held(good, cert), res.status.name.lower(),
        )  # fmt: skip
        notes += [f"b₁ = {name}: {c}" for c in cert.claims if not c.holds]
        notes += [f"b₁ = {name}: the run contradicts: {text}" for text in cert.refuted]
        notes += [f"b₁ = {name}: not claimed: {text}" for text in cert.not_claimed]
        held = held and cert.holds
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    for note in notes:
        print(note)
    return held


def _held(good: int, cert: Certificate) -> str:
    missing = f", {len(cert.not_claimed)} not made" if cert.not_claimed else ""
    return f"{good} of {len(cert.claims)}{missing}"


def _text(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.6g}"
