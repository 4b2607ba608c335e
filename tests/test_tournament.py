"""The tournament: contestants as their authors say, tasks, tables by hand, and what it refuses."""

from __future__ import annotations

import inspect
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from typer.testing import CliRunner

from experiments.tournament import contestants, run, slot, tables, tasks
from experiments.tournament import page as report
from experiments.tournament import plan as tournament
from experiments.tournament.__main__ import app
from experiments.tournament.contestants import CONTESTANTS, Contestant
from experiments.tournament.run import Tournament
from experiments.tournament.tasks import EVENTS
from wngrad.install import install_hint
from wngrad.lab.run import files, session
from wngrad.lab.run.store import exported
from wngrad.lab.train import data
from wngrad.lab.train.programs.lone import Lone, optimizer
from wngrad.lab.train.spec import Lane, Pack, Record, Setting, Sweep
from wngrad.lab.train.task import Task
from wngrad.lab.train.task import find as find_task

ROOT = Path(__file__).parents[1]
NAMES = [who.name for who in CONTESTANTS]


@pytest.fixture(params=CONTESTANTS, ids=NAMES)
def who(request: pytest.FixtureRequest) -> Contestant:
    """Every contestant whose package is installed."""
    contestant: Contestant = request.param
    if why := contestant.missing():
        pytest.skip(why)
    return contestant


# ---------------------------------------------------------------------------- contestants

CLASSES = {
    "sgd": "torch.optim:SGD",
    "sgd-momentum": "torch.optim:SGD",
    "adam": "torch.optim:Adam",
    "adamw": "torch.optim:AdamW",
    "adagrad": "torch.optim:Adagrad",
    "adagrad-norm": "experiments.tournament.contestants:AdaGradNorm",
    "wnmuon": "wngrad.optim:WNMuon",
    "wngrad": "wngrad.optim:WNGrad",
    "wngrad-tensor": "wngrad.optim:WNGrad",
    "wngrad-momentum": "wngrad.optim:WNGrad",
    "wngrad-momentum-tensor": "wngrad.optim:WNGrad",
    "wnadam": "wngrad.optim:WNAdam",
    "wnadam-tensor": "wngrad.optim:WNAdam",
    "schedulefree-sgd": "schedulefree:SGDScheduleFree",
    "schedulefree-adamw": "schedulefree:AdamWScheduleFree",
    "momo-adam": "momo:MomoAdam",
    "prodigy": "prodigyopt:Prodigy",
    "dadapt-adam": "dadaptation:DAdaptAdam",
    "dog": "dog:DoG",
    "cocob": "parameterfree:COCOB",
}


def made(who: Contestant, params: list[nn.Parameter], batch_norm: bool = False) -> Any:
    return optimizer(Lane(who.target(batch_norm), who.default, 0), params, 0.0)


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    return model, torch.randn(16, 5), torch.randint(3, (16,))


def step(model: nn.Module, opt: Any, x: Tensor, y: Tensor) -> None:
    def closure() -> Tensor:
        opt.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach()

    opt.step(closure)


def test_a_default_is_that_of_the_packages_signature(who: Contestant) -> None:
    module, _, name = CLASSES[who.name].partition(":")
    signature = inspect.signature(getattr(import_module(module), name)).parameters
    if who.name == "cocob":
        assert "lr" not in signature
        assert signature["alpha"].default == 100
    else:
        assert signature["lr"].default == who.default


def test_an_optimizer_is_the_real_class(who: Contestant) -> None:
    module, _, name = CLASSES[who.name].partition(":")
    model, _, _ = problem()
    assert type(made(who, list(model.parameters()))) is getattr(import_module(module), name)


def test_a_run_that_was_saved_goes_on_as_if_nothing_had_happened(who: Contestant) -> None:
    model, x, y = problem()
    opt = made(who, list(model.parameters()))
    getattr(opt, "train", bool)()
    for _ in range(3):
        step(model, opt, x, y)
    sealed = files.seal_tensors((model.state_dict(), opt.state_dict()))
    other, _, _ = problem()
    again = made(who, list(other.parameters()))
    weights, state = files.open_tensors(sealed, "a checkpoint")
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for _ in range(3):
        step(model, opt, x, y)
        step(other, again, x, y)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_weights_to_be_tested_do_not_disturb_the_training(who: Contestant) -> None:
    (model, x, y), (other, _, _) = problem(), problem()
    opt, again = made(who, list(model.parameters())), made(who, list(other.parameters()))
    for each in (opt, again):
        getattr(each, "train", bool)()
    for _ in range(4):
        step(model, opt, x, y)
        step(other, again, x, y)
        getattr(again, "eval", bool)()
        getattr(again, "eval", bool)()
        getattr(again, "train", bool)()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)  # schedule-free comes back by lerp


def test_dog_is_tested_at_its_packages_average() -> None:
    dog = next(who for who in CONTESTANTS if who.name == "dog")
    if why := dog.missing():
        pytest.skip(why)
    model, x, y = problem()
    opt = made(dog, list(model.parameters()), batch_norm=True)
    assert opt.param_groups[0]["reps_rel"] == 1e-4  # as its docstring says of batch normalization
    mean = [torch.zeros_like(p) for p in model.parameters()]
    for t in range(1, 6):
        step(model, opt, x, y)
        share = 9 / (8 + t)  # (γ + 1)/(γ + t), with γ = 8 by default
        mean = [m + share * (p.detach() - m) for m, p in zip(mean, model.parameters(), strict=True)]
    opt.eval()
    for p, m in zip(model.parameters(), mean, strict=True):
        torch.testing.assert_close(p.detach(), m)


def test_adagrad_norm_is_its_authors_algorithm_with_b0_one_over_lam() -> None:
    x = nn.Parameter(torch.tensor([3.0, -4.0], dtype=torch.float64))
    y = nn.Parameter(torch.tensor([[1.0]], dtype=torch.float64))
    lam, theirs, b = 0.5, [3.0, -4.0, 1.0], 1 / 0.5
    opt = contestants.AdaGradNorm([x, y], lr=lam)
    for _ in range(5):
        opt.zero_grad()
        (x.square().sum() + y.square().sum()).backward()
        opt.step()
        g = [2 * v for v in theirs]
        b = math.sqrt(b**2 + sum(v * v for v in g))
        theirs = [v - u / b for v, u in zip(theirs, g, strict=True)]
    assert [*x.tolist(), y.item()] == pytest.approx(theirs, rel=1e-12)


def test_a_missing_peer_is_refused_in_a_line_and_the_others_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without(name: str) -> Any:
        if name == "prodigyopt":
            raise ImportError(name)
        return import_module(name)

    monkeypatch.setattr(contestants, "import_module", without)
    said = [line for line in tournament.absent() if "Prodigy" in line]
    assert said == [
        f"tournament: Prodigy needs prodigyopt, which cannot be imported: {install_hint('peers')}."
    ]
    swept = tournament.plan(["wine"], ["sgd", "prodigy"])[0].sweep
    assert swept.optimizers == ("sgd",)
    with pytest.raises(ValueError, match="`contestants` must be some that are installed"):
        tournament.plan(["wine"], ["prodigy"])


def test_cocob_has_no_lam_to_move() -> None:
    with pytest.raises(ValueError, match=r"cocob: `lr` must be 1, as it has none, got 0\.1"):
        contestants.cocob([], lr=0.1)


# ---------------------------------------------------------------------------------- tasks


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros in the shapes of the real data."""

    def load(name: str, folder: Path | None) -> data.Data:
        shape = {"mnist": (1, 28, 28), "cifar10": (3, 32, 32), "digits": (64,)}[name]
        n, m = (1400, 397) if name == "digits" else (20_000, 4_000)
        x, y = torch.zeros(()).expand(n, *shape), torch.zeros(()).long().expand(n)
        return data.Data(name, x, y, x[:m], y[:m], 10, "")

    letters = bytes(range(tasks.LETTERS)) * (1_115_394 // tasks.LETTERS)
    monkeypatch.setattr(data, "load", load)
    monkeypatch.setattr(tasks, "_text", lambda folder: letters)


@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize("name", EVENTS)
def test_a_task_has_the_steps_it_says_and_a_loss_with_a_gradient(name: str) -> None:
    event, task = EVENTS[name], EVENTS[name].task
    assert callable(task.train)
    (x, y), test = task.train()
    assert len(y) // task.batch * task.epochs == event.steps
    assert len(test[1])
    model = task.model()
    output = model(x[:4])
    loss = task.loss(output, y[:4])
    loss.backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None for p in model.parameters())
    assert task.metric is None or 0 <= task.metric(output, y[:4]) <= 1
    assert event.batch_norm == any(isinstance(m, nn.BatchNorm2d) for m in model.modules())


@pytest.mark.parametrize("name", EVENTS)
def test_the_grid_reaches_over_seven_decades_or_more(name: str) -> None:
    lam = EVENTS[name].lam
    assert math.log10(lam[-1] / lam[0]) >= 7
    apart = np.diff(np.log10(lam))
    np.testing.assert_allclose(apart, apart[0], atol=2e-3)  # λ is rounded to three digits


def test_tables_are_standardized_by_their_training_part() -> None:
    (x, y), (test, _) = tasks.table("wine")
    assert (len(y), len(test)) == (142, 36)
    torch.testing.assert_close(x.mean(0), torch.zeros(13), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(13), atol=1e-5, rtol=0)


def test_the_transformer_does_not_see_what_comes_after() -> None:
    torch.manual_seed(0)
    model, x = tasks.CharTransformer(), torch.randint(65, (2, tasks.CONTEXT))
    changed = x.clone()
    changed[:, 40:] = 7
    before, after = model(x), model(changed)
    torch.testing.assert_close(before[..., :40], after[..., :40])
    assert not torch.allclose(before[..., 40:], after[..., 40:])


@pytest.mark.usefixtures("no_files")
def test_the_target_of_the_text_is_its_next_character() -> None:
    (x, y), _ = tasks.characters(10, 5)
    assert torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal((x[:, -1] + 1) % tasks.LETTERS, y[:, -1])


def test_the_deep_network_has_eight_layers_and_does_not_normalize() -> None:
    kinds = [type(layer) for layer in tasks.deep_mlp()]  # type: ignore[attr-defined]
    assert kinds.count(nn.Linear) == 8
    assert set(kinds) == {nn.Flatten, nn.Linear, nn.ReLU}
    assert kinds[-1] is nn.Linear


def test_a_text_that_is_missing_or_wrong_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WNGRAD_DATA", str(tmp_path))
    with pytest.raises(data.DataError, match=r"tinyshakespeare\.txt is not there; correct --data"):
        tasks.characters(1, 1)
    (tmp_path / tasks.TEXT).write_text("To be")
    with pytest.raises(data.DataError, match="expected md5 6fb458f1"):
        tasks.characters(1, 1)
    monkeypatch.delenv("WNGRAD_DATA")
    with pytest.raises(data.DataError, match="expected md5 6fb458f1"):
        tasks.characters(1, 1, folder=tmp_path)


@pytest.mark.parametrize("scale", [0, 2, math.nan])
def test_a_scale_is_a_fraction(scale: float) -> None:
    with pytest.raises(ValueError, match="tournament: `scale` must be > 0 and <= 1, got"):
        tasks.table("wine", scale=scale)
    with pytest.raises(ValueError, match="tournament: `scale` must be > 0 and <= 1, got"):
        tournament.plan(["wine"], ["sgd"], scale=scale)


def test_a_scale_leaves_a_batch_to_train_on() -> None:
    train, test = tasks.table("wine", 16, scale=0.01)
    assert (len(train[1]), len(test[1])) == (16, 1)


def test_an_address_holds_the_scale_and_the_folder_of_the_data(tmp_path: Path) -> None:
    assert find_task(tasks.address(tasks.wine)) is tasks.wine
    part = tournament.plan(["wine"], ["sgd"], scale=0.5, folder=tmp_path / "a: b")[0]
    task = find_task(part.sweep.task)
    assert (task.name, task.batch) == ("wine", 16)
    assert callable(task.train)
    assert len(task.train()[0][1]) == 71  # half of 142
    options = task.train.keywords  # type: ignore[attr-defined]
    assert options == {"scale": 0.5, "folder": tmp_path / "a: b"}
    with pytest.raises(ValueError, match=r"has no attribute 'wien'\. Did you mean 'wine'"):
        find_task("experiments.tournament.tasks:wien")


# ------------------------------------------------------------------------------- the lab


def test_batch_statistics_are_those_of_the_weights_that_are_tested() -> None:
    """An optimizer that tests elsewhere than it trains has them taken anew."""
    task = Task(
        "normal",
        lambda: nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)),
        (torch.full((64, 1), 5.0), torch.zeros(64, 1)),
        test=(torch.full((4, 1), 5.0), torch.zeros(4, 1)),
        loss=F.mse_loss,
    )
    pack = Pack("pack-0001", (Setting(f"{__name__}:Elsewhere", 0.0),), (0,))
    sweep = Sweep("s", "", "", "", ("x",), (1.0,), 1, (0,), batch=4, program="lone")
    program = Lone(sweep, pack, task.data(), "cpu")
    program.advance(1)
    normal = next(program.models[0].children())
    assert isinstance(normal, nn.BatchNorm1d)
    assert normal.running_mean is not None
    # Sixteen batches before the first step and one in it, with the momentum 0.1.
    assert normal.running_mean.item() == pytest.approx(5 * (1 - 0.9**17))


class Elsewhere(torch.optim.SGD):
    """It has the two modes, and no use for them."""

    def train(self) -> None: ...
    def eval(self) -> None: ...


# ----------------------------------------------------------------------------- the tables


def record(
    name: str, lam: float, seed: int, loss: float | None, accuracy: float = 0.5, why: str = ""
) -> Record:
    """One epoch: a loss of None diverged, a reason failed."""
    target = next(who for who in CONTESTANTS if who.name == name).target()
    curves = {"train_loss": [loss], "test_loss": [loss], "test_accuracy": [accuracy]}
    note = {"note": "prodigyopt 9.9"}
    return Record(
        Lane(target, lam, seed),
        "failed" if why else "done",
        why,
        1 if loss is None and not why else None,
        {} if why else curves,  # type: ignore[arg-type]
        note,
        {"torch": "2", "wngrad": "0", "device": "a desk"},
        {"test_loss": 1.0, "test_accuracy": 0.1},
    )


def outcome(default: list[Record], grid: list[Record]) -> tables.Outcome:
    return tables.Outcome(EVENTS["wine"], {r.lane: r for r in default}, {r.lane: r for r in grid})


def defaults(name: str, *accuracies: float | None) -> list[Record]:
    lam = next(who for who in CONTESTANTS if who.name == name).default
    return [
        record(name, lam, seed, None if value is None else 0.3, value or 0.1)
        for seed, value in enumerate(accuracies)
    ]


DEFAULTS = [
    *defaults("wngrad", 0.90, 0.92),
    *defaults("adam", 0.91, 0.91),
    *defaults("sgd", 0.60, 0.62),
    *defaults("cocob", 0.99, None),
]
LAM = (0.001, 0.01, 0.1, 1.0, 10.0)


def curve(name: str, seed: int, *losses: float | None) -> list[Record]:
    return [record(name, lam, seed, loss) for lam, loss in zip(LAM, losses, strict=False)]


GRID = [
    *(r for seed in (0, 1) for r in curve("wngrad", seed, 1, 0, 0, 0, 1)),
    *curve("sgd", 0, 1, 0.5, 0.5, 3, None),
    *curve("sgd", 1, 1, 1, 1),  # a seed that was not finished
]


def test_ranks_are_by_the_mean_and_who_lost_a_seed_is_last() -> None:
    wine = outcome(DEFAULTS, [])
    assert wine.ranks == {"wngrad": 1, "adam": 1, "sgd": 3, "cocob": 4}
    assert wine.leaders == {"wngrad", "adam"}
    assert str(wine.cells["sgd"]) == "61.00 ± 1.41 % (n = 2)"


def test_a_curve_is_measured_from_the_best_of_all_methods() -> None:
    curves = outcome([], GRID).curves
    ours, sgd = curves["wngrad"], curves["sgd"]
    assert str(ours.decades) == "2.10 [2.10, 2.10]"  # two decades, and 5 % of one on either side
    assert ours.best_lam == 0.01
    assert ours.sensitivity.mean == pytest.approx(2 / 5)
    assert sgd.seeds == [0]  # the other seed does not have the whole grid
    assert sgd.decades.value == 0  # 0.5 is nowhere near 0
    assert sgd.sensitivity.mean == pytest.approx((0.5 + 0.5 + 0.5) / 5)
    assert sgd.best_lam == 0.01
    assert (sgd.diverged, sgd.failed, sgd.runs) == (1, 0, 8)
    assert sgd.capped()[0] == [1, 0.5, 0.5, 1, 1]


def test_a_failed_run_counts_as_lost_and_its_reason_is_printed() -> None:
    bad = [record("prodigy", 1.0, seed, None, why="ValueError: no") for seed in (0, 1)]
    wine = outcome([*DEFAULTS, *bad], GRID)
    assert wine.ranks["prodigy"] == 4
    page = report.markdown([wine])
    assert "wine, default: Prodigy failed 2 times: ValueError: no" in page
    assert "lost 2 of 2 (4)" in page


def test_the_page_tells_wins_and_losses_versions_and_what_was_said_by_hand() -> None:
    page = report.markdown([outcome([*DEFAULTS, *defaults("prodigy", 0.7)], GRID)], "Use it.")
    assert "## What to do\n\nUse it.\n" in page
    assert "| prodigyopt 9.9 | 1 |" in page
    assert "| even: WNGrad level with Adam | win: WNGrad ahead by 0.500" in page
    assert "wine, grid: diverged: SGD 1." in page
    assert "wine, default: diverged: COCOB 1." in page
    assert "Not run: SGD-Momentum, AdamW" in page
    assert "a desk" in page


def test_a_remark_stands_below_the_tasks_and_is_no_version() -> None:
    note = tournament.note(["sgd"], "From a copy, scale unknown.")
    assert note == "; From a copy, scale unknown."
    said = [
        Record(r.lane, r.status, r.reason, r.diverged_at, r.curves, {"note": note}, {})
        for r in DEFAULTS
    ]
    page = report.markdown([outcome(said, [])])
    assert "\n\nFrom a copy, scale unknown.\n" in page
    assert "A trial" not in page


def test_a_trial_at_a_smaller_scale_is_called_one() -> None:
    small = [
        Record(r.lane, r.status, r.reason, r.diverged_at, r.curves, {"note": "scale 0.1"}, {})
        for r in DEFAULTS
    ]
    assert "**A trial at scale 0.1" in report.markdown([outcome(small, [])])
    assert "A trial" not in report.markdown([outcome(DEFAULTS, [])])


def test_the_page_and_its_pictures_are_written_from_exported_records(tmp_path: Path) -> None:
    records = tmp_path / "records"
    records.mkdir()
    for question, runs in (("default", DEFAULTS), ("grid", GRID)):
        lines = [files.seal_json(r.to_json()) for r in runs]
        (records / f"wine-{question}.jsonl").write_bytes(b"".join(lines))
    (tmp_path / report.VERDICT).write_text("By hand.\n")
    written = report.write(records, tmp_path / "page.md")
    assert [path.name for path in written] == ["page.md", "curves.png", "ranks.png"]
    assert all(path.stat().st_size > 1000 for path in written)
    assert "\nBy hand.\n" in written[0].read_text()
    assert "](figures/tournament/curves.png)" in written[0].read_text()


@pytest.mark.skipif(
    not (ROOT / "results/tournament").is_dir(), reason="the tournament has not been run"
)
def test_the_page_in_the_docs_is_what_the_records_say() -> None:
    verdict = ROOT / "docs" / report.VERDICT
    said = verdict.read_text().strip() if verdict.is_file() else ""
    outcomes = tables.load(ROOT / "results/tournament")
    assert (ROOT / "docs/tournament.md").read_text() == report.markdown(outcomes, said)


# ---------------------------------------------------------------------------- the command


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tasks", "chess"), "tournament: `tasks` must be of breast-cancer, wine"),
        (("--contestants", "lbfgs"), "tournament: `contestants` must be of sgd, sgd-momentum"),
        (("--scale", "2"), "tournament: `scale` must be > 0 and <= 1, got 2.0"),
        (("--report", "--out", "nowhere"), "`records` must be a folder with records, got nowhere"),
    ],
)
def test_a_mistake_is_one_line(
    words: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, [*words])
    assert done.exit_code == 2
    assert said in done.output
    assert done.output.count("\n") == 1


WINE = ["--device", "cpu", "--tasks", "wine"]
SMALL = ["--contestants", "sgd", "--seeds", "2", "--scale", "0.2"]


def play(folder: Path) -> Any:
    """A small tournament in a folder of its own, with real workers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("WNGRAD_DATA", "")
        return CliRunner().invoke(app, [*WINE, *SMALL])


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tournament that was run to its end."""
    folder = tmp_path_factory.mktemp("played")
    done = play(folder)
    assert done.exit_code == 0, done.output
    assert "36 runs, about" in done.output
    assert "36 of 36 runs" in done.output
    return folder


def test_the_records_of_a_trial_say_their_scale(played: Path) -> None:
    records = exported(played / "results/tournament/wine-default.jsonl")
    assert [record.settings["note"] for record in records] == ["scale 0.2"] * 2


@pytest.mark.integrations
def test_a_second_call_runs_what_is_missing_and_overwrites_no_records_of_other_conditions(
    played: Path, tmp_path: Path
) -> None:
    """One record of the defaults is missing; those of the grid are another machine's."""
    folder = tmp_path / "results/tournament"
    shutil.copytree(played / "results/tournament", folder)
    default, grid = folder / "wine-default.jsonl", folder / "wine-grid.jsonl"
    whole, foreign = default.read_bytes(), files.seal_json(record("sgd", 1e-5, 0, 0.5).to_json())
    default.write_bytes(whole.splitlines(keepends=True)[0])
    grid.write_bytes(foreign)
    again = play(tmp_path)
    assert again.exit_code == 1
    assert "2 runs have been made before" in again.output
    assert "wine-grid: " in again.output
    assert "holds a sweep made under other conditions" in again.output
    assert default.read_bytes() == whole
    assert grid.read_bytes() == foreign
    ran = (tmp_path / "out/tournament/wine-default/sessions.jsonl").read_text().splitlines()
    assert len(ran) == 1


def test_records_from_elsewhere_are_taken_over_only_where_they_fit(tmp_path: Path) -> None:
    part = tournament.plan(["wine"], ["sgd"], 1, "cpu")[0]
    known, lane = tmp_path / "known", part.sweep.lanes[0]
    known.mkdir()
    games = Tournament([part], tmp_path / "out", tmp_path / "work", known=[known], note="mine")
    made_here = session.environment("cpu") | part.sweep.identity() | {"note": "mine"}
    for settings, taken in (({"note": "theirs"}, 0), ({"torch": "1"}, 0), ({}, 1)):
        fits = Record(lane, "done", "", None, {}, made_here | settings, {})
        (known / "wine-default.jsonl").write_bytes(files.seal_json(fits.to_json()))
        games._import(part)
        assert games.done(part) == taken
    other = Record(lane, "done", "", None, {}, {"note": "other"}, {})
    games.out.mkdir()
    (games.out / "wine-default.jsonl").write_bytes(files.seal_json(other.to_json()))
    with pytest.raises(ValueError, match="holds runs made under other conditions than"):
        games.run()


def test_a_signal_stops_the_workers_and_what_is_done_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The small case of the test below: a worker that only waits."""
    part = tournament.plan(["wine"], ["sgd"], 1, "cpu")[1]
    games = Tournament([part], tmp_path / "out", tmp_path / "work", say=lambda text: None)
    done = Record(part.sweep.lanes[0], "done", "", None, {"train_loss": [0.5]}, {}, {})
    run._put(done, games._store(part))
    workers: list[subprocess.Popen[str]] = []

    def start(self: Tournament, part: tournament.Part) -> subprocess.Popen[str]:
        command = [sys.executable, "-S", "-c", "input()"]
        workers.append(subprocess.Popen(command, stdin=-1, stdout=-1, text=True))
        os.kill(os.getpid(), signal.SIGTERM)
        return workers[-1]

    monkeypatch.setattr(Tournament, "_start", start)
    assert games.run() == 128 + signal.SIGTERM
    assert {worker.returncode for worker in workers} == {-signal.SIGTERM}
    assert exported(tmp_path / "out/wine-grid.jsonl") == [done]


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whatever_stops_it_nothing_goes_on_and_what_is_done_is_exported(
    tmp_path: Path, number: int
) -> None:
    command = [sys.executable, "-m", "experiments.tournament", *WINE]
    command += ["--contestants", "sgd,adam,wngrad"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=-3, stderr=-3) as games:
        records = _soon(lambda: list((tmp_path / "out").glob("tournament/*/records/*.json")))
        games.send_signal(number)
        assert games.wait(600) == (128 + number if number == signal.SIGTERM else -number)
    locks = list((tmp_path / "out").glob("tournament/*/locks/pack-*"))
    assert locks
    assert _soon(lambda: all(_free(path) for path in locks))  # the workers are gone, too
    out = tmp_path / "results/tournament"
    if number == signal.SIGTERM:
        names = [r.lane.name for path in out.glob("*.jsonl") for r in exported(path)]
        assert {path.stem for path in records} <= set(names)


def test_a_worker_ends_with_the_pipe_that_the_tournament_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The small case of a tournament that is killed."""
    ours, theirs = os.pipe()
    signals: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *args: signals.append(args))
    with os.fdopen(ours) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        os.write(theirs, b"more")
        os.close(theirs)
        slot._watch()
    assert signals == [(os.getpid(), signal.SIGTERM)]


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "WNGRAD_DATA": ""}


def _soon(ready: Callable[[], Any], seconds: float = 600.0) -> Any:
    end = time.monotonic() + seconds
    while not (value := ready()) and time.monotonic() < end:
        time.sleep(0.1)
    return value


def _free(path: Path) -> bool:
    with files.lock(path, wait=False) as free:
        return free
