"""The command line: parse, call one function, print."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, cast, get_args

import numpy as np

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ImportError:  # pragma: no cover
    sys.exit("wngrad: the command line needs the extra `lab`: pip install 'wngrad[lab]'.")

from wngrad.batch import Certificate, EvaluationError, Result, minimize
from wngrad.problems import ZOO, Problem

if TYPE_CHECKING:
    from wngrad.lab.spec import Kind
    from wngrad.lab.supervisor import Job, Outcome

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Gradient descent that learns its learning rate: check the theory, study the method.",
)


@app.callback()
def _root() -> None:
    pass


@app.command()
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
    what, exact = _problem(problem, x0, lipschitz, f_star)
    _make(out)
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
            _fail(str(error))
        named.append((text, res))
    held = _print_certificates(what, named, None if exact else 1e-6)
    path = out / f"certify-{Path(what.name).stem}.png"
    from wngrad.batch import picture

    picture.runs(named, what.name, what.lipschitz, what.f_star, path)
    print(f"Wrote {path}.")
    raise typer.Exit(0 if held else 1)


@app.command()
def study(
    out: Annotated[Path, typer.Option(help="A folder for the report.")] = Path("out/study"),
) -> None:
    """WNGrad over twelve decades of b₁ against constant steps and AdaGrad-Norm."""
    from rich.progress import Progress

    from wngrad.batch import study as study_

    _make(out)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("running", total=study_.size())
        rows = study_.run(lambda: progress.advance(task))
    for path in study_.write(rows, out):
        print(f"Wrote {path}.")


@app.command("list")
def list_() -> None:
    """The recipes: what each claims and what it costs."""
    from wngrad.lab.recipes import RECIPES

    table = Table()
    for column in ("recipe", "what it claims", "data, network", "runs", "cost"):
        table.add_column(column, justify="right" if column == "runs" else "left")
    for sweep in RECIPES.values():
        runs = f"{len(sweep.lanes)} × {sweep.epochs} epochs"
        table.add_row(sweep.name, sweep.claim, f"{sweep.dataset}, {sweep.model}", runs, sweep.cost)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="See `wngrad list`; or module:sweep.")],
    data: Annotated[
        Path | None,
        typer.Option(help="A folder with the data (or set WNGRAD_DATA); else it is downloaded."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")] = None,
    out: Annotated[Path | None, typer.Option(help="A folder; out/RECIPE if not given.")] = None,
    lanes: Annotated[
        int | None, typer.Option(min=1, help="At most so many at once, if memory is short.")
    ] = None,
    note: Annotated[str, typer.Option(help="What a reader of the report must know.")] = "",
    patience: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds of silence (compilation is silent) to call a hang."),
    ] = None,
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 30.0,
) -> None:
    """Train every lane of a recipe. What is done is left alone; what was interrupted goes on."""
    from wngrad.lab import recipes
    from wngrad.lab.supervisor import Job

    try:
        sweep = recipes.find(recipe).scaled(epochs=epochs, seeds=seeds)
    except ValueError as error:
        _fail(str(error))
    if lanes is not None:
        sweep = replace(sweep, lanes_per_pack=lanes)
    folder = out or Path("out") / sweep.name
    _make(folder)
    outcome, told = _trained(Job(sweep, folder, data, device, note, save_every), patience)
    where = [] if out is None else ["--out", str(out)]
    following = shlex.join(["wngrad", "report", recipe, *where])
    print(f"{told}. Records are in {folder}; next: {following}")
    for lane in outcome.failed:
        print(f"Failed: {lane}")
    raise typer.Exit(outcome.status)


@app.command()
def sweep(
    task: Annotated[str, typer.Argument(help="file.py with a `task`; file.py:name; module:name.")],
    optimizers: Annotated[
        str, typer.Option(help="With commas: names, module:Class, or file.py:function.")
    ] = "sgd,adam,wngrad,wnadam",
    lam_from: Annotated[float, typer.Option(help="The least λ of the grid.")] = 1e-4,
    lam_to: Annotated[float, typer.Option(help="The greatest.")] = 10.0,
    per_decade: Annotated[int, typer.Option(help="How many λ a decade.")] = 2,
    lam: Annotated[str | None, typer.Option(help="The grid itself, with commas.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs at each λ.")] = 3,
    epochs: Annotated[int | None, typer.Option(min=1, help="Instead of the task's.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    out: Annotated[Path | None, typer.Option(help="A folder; out/NAME if not given.")] = None,
    lanes: Annotated[
        int | None, typer.Option(min=1, help="At most so many at once, if memory is short.")
    ] = None,
    program: Annotated[
        str, typer.Option(help="auto, or how to run: stacked, branches or lone.")
    ] = "auto",
    note: Annotated[str, typer.Option(help="What a reader of the report must know.")] = "",
    patience: Annotated[
        float | None,
        typer.Option(min=1, help="Seconds of silence (compilation is silent) to call a hang."),
    ] = None,
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 30.0,
) -> None:
    """How much does your own training depend on the learning rate? Trains, resumes and reports."""
    from wngrad.lab import sweep_plan, sweep_told
    from wngrad.lab.supervisor import Job

    try:
        grid = _numbers("lam", lam) if lam else sweep_plan.grid(lam_from, lam_to, per_decade)
        plan = sweep_plan.plan(
            task,
            lam=grid,
            seeds=seeds,
            optimizers=[name.strip() for name in optimizers.split(",") if name.strip()],
            epochs=epochs,
            device=device,
            program=_kind(program),
            lanes=lanes,
        )
    except ValueError as error:
        _fail(str(error))
    folder = out or Path("out") / sweep_plan.folder(plan.sweep.name)
    _make(folder)
    for line in plan.how:
        print(line)
    outcome, _ = _trained(Job(plan.sweep, folder, None, device, note, save_every), patience)
    try:
        told = sweep_told.write(plan, folder, shlex.join(["wngrad", *sys.argv[1:]]), _warn)
    except ImportError as error:
        _fail(f"reports need the extra `lab`: pip install 'wngrad[lab]' ({error}).")
    except (ValueError, OSError) as error:
        _fail(str(error))
    table = Table()
    for head in told.heads:
        table.add_column(head, overflow="fold")
    for row in told.rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table, markup=False)
    print(*told.lines, sep="\n")
    raise typer.Exit(outcome.status)


@app.command()
def report(
    recipe: Annotated[str, typer.Argument(help="See `wngrad list`; or module:sweep.")],
    records: Annotated[
        Path | None, typer.Option(help="The folder of a run, or a .jsonl file of records.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A folder; out/RECIPE if not given.")] = None,
) -> None:
    """Write the page, the figure and the summary of a sweep from its records. Never trains."""
    from wngrad.lab import recipes
    from wngrad.lab import report as report_
    from wngrad.lab.files import Damaged
    from wngrad.lab.store import Store, exported

    try:
        sweep = recipes.find(recipe)
        folder = out or Path("out") / sweep.name
        source = records or folder
        store = Store(source, warn=_warn)
        one_file = records is not None and not source.is_dir()
        found = exported(source) if one_file else store.records()
        written = report_.write(sweep, found, folder, recipe=recipe)
        if not one_file:
            store.export(folder / "records.jsonl")
        for path in written:
            print(f"Wrote {path}.")
    except ImportError as error:
        _fail(f"reports need the extra `lab`: pip install 'wngrad[lab]' ({error}).")
    except (ValueError, Damaged, OSError) as error:
        _fail(str(error))


@app.command()
def tournament(
    data: Annotated[
        Path | None,
        typer.Option(help="A folder with the data (or set WNGRAD_DATA); else it is downloaded."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="For the tasks that gain from a GPU: cpu, cuda, or auto.")
    ] = "auto",
    workers: Annotated[int, typer.Option(min=1, help="Processes at once.")] = 2,
    tasks: Annotated[str, typer.Option(help="With commas; all if not given.")] = "",
    contestants: Annotated[str, typer.Option(help="With commas; all if not given.")] = "",
    seeds: Annotated[int | None, typer.Option(min=1, help="Instead of each task's own.")] = None,
    scale: Annotated[
        float, typer.Option(help="The part of every data set to use: less than 1 to try it out.")
    ] = 1.0,
    limit: Annotated[
        float | None, typer.Option(min=1, help="Seconds after which to stop, and export.")
    ] = None,
    out: Annotated[Path, typer.Option(help="A folder for the exported records.")] = Path(
        "results/tournament"
    ),
    work: Annotated[Path, typer.Option(help="A folder for what is under way; may be large.")] = (
        Path("out/tournament")
    ),
    note: Annotated[str, typer.Option(help="What a reader of the page must know.")] = "",
    report: Annotated[
        bool, typer.Option("--report", help="Write the page from the records; train nothing.")
    ] = False,
    page: Annotated[Path, typer.Option(help="The page that --report writes.")] = Path(
        "docs/tournament.md"
    ),
) -> None:
    """WNGrad among its rivals: at their defaults, and over the decades of λ. Goes on where it was.

    Records already in OUT or in results/tournament are not run again.
    """
    from wngrad.lab import tournament as plans
    from wngrad.lab.tournament_run import Tournament

    os.environ["WNGRAD_SCALE"] = str(scale)  # the workers read it, too
    who = [name for name in contestants.split(",") if name]
    try:
        if report:
            from wngrad.lab import tournament_report

            for path in tournament_report.write(out, page):
                print(f"Wrote {path}.")
            return
        parts = plans.plan([name for name in tasks.split(",") if name], who, seeds, device)
    except ImportError as error:
        _fail(f"reports need the extra `lab`: pip install 'wngrad[lab]' ({error}).")
    except (ValueError, OSError) as error:
        _fail(str(error))
    for line in plans.absent(who):
        print(line, file=sys.stderr)
    print(f"{plans.estimate(parts, workers)}.", flush=True)
    known, said = [Path("results/tournament")], plans.note(who, note)
    games = Tournament(parts, out, work, data, workers, limit, known, said, _say)
    try:
        status = games.run()
    except (ValueError, OSError) as error:
        _fail(str(error))
    print(f"{games.text()}. Records are in {out}; next: wngrad tournament --report")
    raise typer.Exit(status)


def _say(text: str) -> None:
    print(f"tournament: {text}", file=sys.stderr, flush=True)


def main() -> None:
    app()


def _trained(job: Job, patience: float | None) -> tuple[Outcome, str]:
    """Run a job under a bar; leaves if it was stopped, or could not begin."""
    from wngrad.lab.progress import Watch
    from wngrad.lab.supervisor import supervise

    with Watch(job.sweep.name) as watch:
        outcome = supervise(job, watch, patience)
    if outcome.status in (130, 143):
        again = shlex.join(["wngrad", *sys.argv[1:]])
        print(f"Stopped; everything so far is saved in {job.out}. Go on with: {again}")
        raise typer.Exit(outcome.status)
    if outcome.text:
        _fail(outcome.text)
    return outcome, watch.text()


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        _fail(f"`--{name}` must be numbers with commas, got {text!r}.")


def _kind(text: str) -> Kind | None:
    from wngrad.lab.spec import Kind

    if text not in ("auto", *get_args(Kind)):
        _fail(f"`--program` must be auto, {', '.join(get_args(Kind))}, got {text!r}.")
    return None if text == "auto" else cast("Kind", text)


def _fail(message: str) -> NoReturn:
    """A user's mistake: one line, exit code 2."""
    print(f"wngrad: {' '.join(message.split())}", file=sys.stderr)
    raise typer.Exit(2)


def _warn(text: str) -> None:
    print(f"wngrad: {text}", file=sys.stderr)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _fail(f"`--out` must be a folder that can be written, got {folder}: {error.strerror}.")


def _choices(problem: Problem) -> list[str]:
    known = problem.lipschitz is not None
    return ["gradient", "lipschitz", *(["0.01L", "L", "100L"] if known else ["0.1", "10"])]


def _b1(text: str, problem: Problem) -> Any:
    if text in ("gradient", "lipschitz"):
        return text
    scale = problem.lipschitz if text.endswith("L") else 1.0
    if scale is None:
        _fail(f"`--b1` {text!r} needs an L: give `--lipschitz`.")
    try:
        return scale * float(text.removesuffix("L") or 1)
    except ValueError:
        _fail(f"`--b1` must be a number, a multiple of L, gradient or lipschitz, got {text!r}.")


def _problem(
    text: str, x0: str | None, lipschitz: float | None, f_star: float | None
) -> tuple[Problem, bool]:
    """The problem, and whether its gradient is exact."""
    if lipschitz is not None and not 0 < lipschitz < np.inf:
        _fail(f"`--lipschitz` must be > 0 and finite, got {lipschitz}.")
    if f_star is not None and not np.isfinite(f_star):
        _fail(f"`--f-star` must be finite, got {f_star}.")
    found, exact = (ZOO[text](), True) if text in ZOO else _from_file(text, x0)
    start = found.x0 if x0 is None else _point(x0)
    if start.shape != found.x0.shape:
        _fail(f"`--x0` must have {found.x0.size} numbers, got {start.size}.")
    return replace(
        found,
        x0=start,
        f_star=found.f_star if f_star is None else f_star,
        lipschitz=found.lipschitz if lipschitz is None else lipschitz,
    ), exact


def _point(text: str) -> Any:
    try:
        return np.array([float(part) for part in text.split(",")])
    except ValueError:
        _fail(f"`--x0` must be numbers with commas, got {text!r}.")


def _from_file(text: str, x0: str | None) -> tuple[Problem, bool]:
    """A user's f(x), which returns the value, or (value, gradient)."""
    file, _, name = text.rpartition(":")
    if not file:
        _fail(f"`problem` must be one of {', '.join(ZOO)} or path.py:function, got {text!r}.")
    if x0 is None:
        _fail("`--x0` must be given for a function of your own.")
    f = _load(Path(file), name)
    start = _point(x0)
    try:
        value = f(start)
    except Exception as error:
        _fail(f"{text} raised {type(error).__name__} at `--x0`: {error}.")
    if isinstance(value, tuple):
        if len(value) != 2 or np.shape(value[1]) != start.shape:
            _fail(f"{text} must return a value, or (value, gradient), got {value!r}.")
        return Problem(name, lambda x: f(x)[0], lambda x: np.asarray(f(x)[1]), start), True
    from wngrad.batch.arrays import finite_difference_gradient

    print("The gradient is taken by finite differences: claims hold to 1e-6.")
    return Problem(name, f, finite_difference_gradient(f), start), False


def _load(path: Path, name: str) -> Callable[..., Any]:
    if not path.is_file():
        _fail(f"`problem` names a file that is not there: {path}.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        _fail(f"`problem` must name a Python file, got {path}.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # as an import would
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        _fail(f"{path} could not be run: {type(error).__name__}: {error}.")
    found: Callable[..., Any] | None = getattr(module, name, None)
    if found is None or not callable(found):
        _fail(f"{path} has no function {name!r}.")
    return found


def _print_certificates(
    problem: Problem, named: list[tuple[str, Result]], rounding: float | None
) -> bool:
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


if __name__ == "__main__":
    main()
