"""A task of one's own: what it may be, how its lanes are run, and what is said at the door."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from typer.testing import CliRunner

import wngrad
from wngrad.cli.commands import app
from wngrad.lab.recipes import RECIPES
from wngrad.lab.sweep import (
    checked,
    grid,
    plan,
    why_not_at_once,
    why_not_stacked,
)
from wngrad.lab.train.loader import fingerprint
from wngrad.lab.train.programs import PROGRAMS, Branches, Lone, Program, Stacked
from wngrad.lab.train.spec import Lane, Record, Setting, Sweep, packs
from wngrad.lab.train.task import Task, find

EXAMPLES = Path(__file__).parents[1] / "examples"


def cloud(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def worst(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().mean(0).max()


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


REGRESSION = Task(
    "regression", small, (cloud(60, 3), cloud(60, 2, seed=1)), test=(cloud(30, 3), cloud(30, 2)),
    loss=mse, metric=worst, metric_name="gap", higher_is_better=False, epochs=2, batch=8,
)  # fmt: skip


class Words(nn.Module):
    """Logits (batch, time, vocabulary) for tokens (batch, time)."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(5, 6), nn.Linear(6, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.words(tokens).cumsum(1).tanh())


TOKENS = torch.randint(5, (40, 7), generator=torch.Generator().manual_seed(0))
SEQUENCE = Task(
    "sequence", Words, lambda: ((TOKENS, TOKENS.flip(1)), (TOKENS[:9], TOKENS[:9].flip(1))),
    loss=lambda logits, y: F.cross_entropy(logits.mT, y), batch=10, epochs=2,
)  # fmt: skip


def made(task: Task, kind: str = "stacked", **changes: Any) -> Program:
    s = Sweep(
        name="t", claim="", dataset="t", model="t", optimizers=("sgd", "adam", "wngrad", "wnadam"),
        lam=(0.01, 0.1), epochs=2, seeds=(0, 1), batch=task.batch, precision="float64", task="t",
    )  # fmt: skip
    s = replace(s, **changes)
    p = PROGRAMS[kind](s, packs(s.settings, s.seeds, None)[0], task.data(), "cpu")
    while p.epoch < s.epochs:
        p.advance(100)
    return p


def test_unless_others_are_named_wnmuon_is_run_at_its_default_alone():
    address = f"{EXAMPLES}/diabetes_task.py"
    usual, without = (plan(address, lam=(0.1, 1), defaults=each) for each in (True, False))
    assert usual.sweep.grid("wnmuon") == (0.3,)
    assert usual.sweep.grid("wnadam") == (0.1, 1)
    assert "wnmuon" in usual.sweep.alone
    assert usual.how[-1] == (
        "wnmuon: 3 separate runs: at its default alone, as it has nothing to tune."
    )
    named = plan(address, lam=(0.1, 1), optimizers=("sgd", "wnmuon"))
    assert named.sweep.grid("wnmuon") == (0.1, 1)
    assert "wnmuon" not in without.sweep.optimizers
    one = plan(address, lam=(0.1,))
    assert one.how[0] == "sgd: stacked, 6 of the 24 lanes that train as one program."


@pytest.mark.parametrize(
    ("task", "kind"), [(REGRESSION, "stacked"), (REGRESSION, "branches"), (SEQUENCE, "branches")]
)
def test_a_lane_of_a_task_is_its_lone_run(task: Task, kind: str) -> None:
    ours, real = made(task, kind), made(task, "lone")
    assert isinstance(ours, Stacked if kind == "stacked" else Branches)
    assert isinstance(real, Lone)
    assert ours.curves.keys() == real.curves.keys()
    for name, rows in real.curves.items():
        for mine, its in zip(ours.curves[name], rows, strict=True):
            assert mine == pytest.approx(its, rel=1e-9), name


@pytest.mark.parametrize("kind", PROGRAMS)
def test_what_is_known_before_the_first_step_is_that_of_the_untrained_network(kind: str) -> None:
    p, data = made(REGRESSION, kind), REGRESSION.data()
    for k, lane in enumerate(p.pack.lanes):
        torch.manual_seed(lane.seed)
        output = small().double()(data.test_x.double())
        assert p.start["test_loss"][k] == pytest.approx(mse(output, data.test_y).item())
        assert p.start["test_error"][k] == pytest.approx(worst(output, data.test_y).item())


def test_a_loss_is_averaged_over_parts_of_the_test_set_by_their_size() -> None:
    many = replace(REGRESSION, test=(cloud(1300, 3), cloud(1300, 2)), metric=None)
    p = made(many, "lone", optimizers=("sgd",), lam=(0.01,), seeds=(0,))
    torch.manual_seed(0)
    whole = mse(small()(many.test[0]), many.test[1]).item()
    assert p.start["test_loss"][0] == pytest.approx(whole, rel=1e-6)
    assert p.curves.keys() == {"train_loss", "test_loss"}


def test_integers_stay_integers_and_floats_take_the_precision_of_the_run() -> None:
    p = made(SEQUENCE, "lone", epochs=1)
    assert (p.train_x.dtype, p.train_y.dtype) == (torch.int64, torch.int64)
    p = made(REGRESSION, "lone", epochs=1)
    assert (p.train_x.dtype, p.train_y.dtype) == (torch.float64, torch.float64)


class Asks(torch.optim.SGD):
    """Wants the loss, and has modes for training and testing."""

    seen: list[Any] = []  # noqa: RUF012

    def step(self, closure: Any = None) -> Any:
        Asks.seen.append(float(closure()))
        return super().step()

    def train(self) -> None:
        Asks.seen.append("train")

    def eval(self) -> None:
        Asks.seen.append("eval")


def test_an_optimizer_is_given_the_loss_and_told_when_it_is_tested() -> None:
    Asks.seen.clear()
    one = {"lam": (0.01,), "seeds": (0,), "epochs": 1}
    asked = made(REGRESSION, "lone", optimizers=("test_sweep:Asks",), **one)
    plain = made(REGRESSION, "lone", optimizers=("sgd",), **one)
    assert asked.curves == plain.curves
    losses = [value for value in Asks.seen if isinstance(value, float)]
    assert math.fsum(losses) / len(losses) == pytest.approx(asked.curves["train_loss"][0][0])
    assert Asks.seen[:3] == ["eval", "train", "train"]  # tested at the start; then the first step
    assert Asks.seen[-2:] == ["eval", "train"]


def test_an_optimizer_that_keeps_an_average_is_tested_there() -> None:
    one = {"lam": (0.3,), "seeds": (0,), "epochs": 2, "optimizers": ("wngrad.optim:WNMuon",)}
    p = made(REGRESSION, "lone", **one)
    (model,), (opt,) = p.models, p.optimizers
    chunks = [(x, y) for x, y, _ in p.test_chunks(p._totals())]

    def loss() -> float:
        with torch.no_grad():
            sums = [p.objective.sums(model(x), y)[0].item() for x, y in chunks]
        return math.fsum(sums) / sum(len(y) for _, y in chunks)

    plain, reported = loss(), p.curves["test_loss"][-1][0]
    with opt.averaged():
        assert loss() == pytest.approx(reported)
    assert loss() == plain != pytest.approx(reported)


def test_an_optimizer_that_takes_the_loss_many_times_a_step_can_run() -> None:
    """Two steps of LBFGS on all the data, against the same by hand."""
    whole = replace(REGRESSION, batch=60)
    p = made(whole, "lone", optimizers=("torch.optim:LBFGS",), lam=(0.1,), seeds=(0,))
    torch.manual_seed(0)
    model, (x, y) = small().double(), (part.double() for part in whole.train)
    opt, seen = torch.optim.LBFGS(model.parameters(), lr=0.1), []

    def closure() -> Tensor:
        opt.zero_grad()
        loss = mse(model(x), y)
        loss.backward()
        return loss

    for _ in range(2):
        seen.append(opt.step(closure).item())
    assert [row[0] for row in p.curves["train_loss"]] == pytest.approx(seen, rel=1e-6)


# ------------------------------------------------------------------------------- sweeps


def test_pairs_take_the_place_of_every_optimizer_at_every_lambda() -> None:
    pairs = (Setting("sgd", 0.1), Setting("adam", 0.001), Setting("sgd", 1.0))
    s = replace(RECIPES["digits"], optimizers=(), lam=(), pairs=pairs, seeds=(0, 1))
    assert s.settings == pairs
    assert (s.optimizers, s.lam) == (("sgd", "adam"), (0.1, 0.001, 1.0))
    assert len(s.lanes) == 6
    assert s.identity()["pairs"] == [["sgd", 0.1], ["adam", 0.001], ["sgd", 1.0]]
    with pytest.raises(ValueError, match="Sweep: `pairs` must be each once"):
        replace(s, pairs=pairs * 2)


def test_a_sweep_survives_json_with_its_pairs() -> None:
    s = replace(RECIPES["digits"], pairs=(Setting("sgd", 0.1),), alone=("sgd",), claims=())
    import json

    assert Sweep.from_json(json.loads(json.dumps(s.to_json()))) == s


def test_the_identity_of_the_figures_is_what_their_records_hold() -> None:
    for name in ("figure-1", "figure-2", "figure-3", "digits"):
        assert not {"pairs", "alone", "metric_name"} & RECIPES[name].identity().keys()


def test_a_record_without_a_start_is_read_and_written_as_it_was() -> None:
    old = Record(Lane("sgd", 0.1, 0), "done", "", None, {"train_loss": [1.0]})
    assert "start" not in old.to_json()
    assert Record.from_json(old.to_json()) == old
    new = replace(old, start={"test_loss": 2.0})
    assert Record.from_json(new.to_json()) == new


def test_optimizers_that_run_alone_are_in_packs_of_one() -> None:
    s = replace(
        RECIPES["digits"], optimizers=("sgd", "x:Y", "adam"), lam=(1.0, 2.0), alone=("x:Y",)
    )
    cut = s.cut(s.seeds)
    assert [len(pack.lanes) for pack in cut] == [12, *[1] * 6]
    assert [s.kind(pack) for pack in cut] == ["stacked", *["lone"] * 6]
    assert {pack.settings[0].optimizer for pack in cut[1:]} == {"x:Y"}
    assert len({pack.name for pack in cut}) == 7


def test_the_grid_is_even_in_log_lambda_and_holds_both_ends() -> None:
    assert grid(1e-4, 10, 1) == (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)
    assert len(grid(1e-4, 10, 3)) == 16
    assert grid(0.1, 0.5, 1) == (0.1,)
    with pytest.raises(ValueError, match=r"sweep: `lam` must go from a number > 0"):
        grid(1, 0.1, 2)


# ------------------------------------------------------- what can be stacked, and what not


def with_item(output: Tensor, target: Tensor) -> Tensor:
    return mse(output, target) * (1.0 if output.max().item() > 0 else 2.0)


def drawing(output: Tensor, target: Tensor) -> Tensor:
    return mse(output, target) + 0 * torch.rand(())


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"model": Words}, "it is a Words, not a Sequential"),
        ({"model": lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout())}, "it has a Dropout"),
        (
            {"train": (cloud(60, 5, 3), cloud(60, 5, 2)), "batch": 6},
            "not on inputs of shape (5, 3)",
        ),
    ],
)
def test_what_keeps_a_model_from_being_stacked_is_told(changes: Any, why: str | None) -> None:
    task = replace(REGRESSION, **changes)
    said = why_not_stacked(task, task.data())
    assert said is None if why is None else why in str(said)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, None),
        ({"loss": F.mse_loss}, None),
        ({"loss": with_item}, "its loss cannot be taken of many lanes at once (RuntimeError: vmap"),
        ({"loss": drawing}, "its loss cannot be taken of many lanes at once"),
        ({"metric": lambda o, t: float(mse(o, t))}, "its metric cannot be taken of many lanes"),
        ({"metric": None}, None),
    ],
)
def test_what_keeps_a_loss_from_being_taken_of_all_lanes_is_told(changes, why) -> None:
    task = replace(REGRESSION, **changes)
    said = why_not_at_once(task, task.data())
    assert said is None if why is None else why in str(said)


def plain_gap(output: Tensor, target: Tensor) -> float:
    return float((output - target).abs().mean())


FLOATING = replace(REGRESSION, metric=plain_gap)


def test_a_metric_that_returns_a_plain_number_is_measured_run_by_run(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = plan("test_sweep:FLOATING", lam=(0.1,), seeds=1, optimizers=("sgd",))
    assert found.sweep.program == "lone"
    assert "its metric cannot be taken" in found.how[0]
    p = made(FLOATING, "lone", optimizers=("sgd",), lam=(0.1,), seeds=(0,))
    assert len(p.curves["test_error"]) == 2


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
@pytest.mark.parametrize(("task", "kind"), [(REGRESSION, "stacked"), (SEQUENCE, "branches")])
def test_the_compiler_can_read_the_programs_of_a_task(task, kind, monkeypatch) -> None:
    """As on CUDA, in one graph each; here without the code that it would make."""
    eager = made(task, kind)
    compiled: list[Any] = []

    def traced(self: Any, work: Any) -> Any:
        compiled.append(work)
        return torch.compile(work, fullgraph=True, dynamic=False, backend="eager")

    monkeypatch.setattr("wngrad.lab.train.programs.base.Fused.compiled", traced)
    assert made(task, kind).curves == eager.curves
    assert len(compiled) >= 3


def test_on_cuda_networks_that_cannot_be_stacked_are_branches(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = plan("test_sweep:SEQUENCE", lam=(0.1,), seeds=1, optimizers=("adam",), device="cuda")
    assert (found.sweep.program, found.sweep.lanes_per_pack) == ("branches", 8)
    assert "8 networks side by side: the model cannot be stacked" in found.how[0]


def test_how_each_optimizer_is_run_is_told_in_a_line_with_the_reason(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    names = ("wngrad", "torch.optim:AdamW")
    found = plan("test_sweep:REGRESSION", lam=(0.1, 1.0), seeds=2, optimizers=names, defaults=False)
    assert found.sweep.program == "stacked"
    assert found.sweep.alone == ("torch.optim:AdamW",)
    assert found.how == (
        "wngrad: stacked, 4 of the 4 lanes that train as one program.",
        "torch.optim:AdamW: 4 separate runs: it is run as it is, as the lab has no stacked form "
        "of it.",
    )
    found = plan("test_sweep:SEQUENCE", lam=(0.1,), seeds=1, optimizers=("wngrad",))
    assert found.sweep.program == "lone"
    assert found.how == (
        "wngrad: 2 separate runs: the model cannot be stacked: it is a Words, not a Sequential.",
    )


def test_the_metrics_of_a_task_say_which_way_is_better(monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert REGRESSION.metric_key == "test_error"
    assert replace(REGRESSION, higher_is_better=True).metric_key == "test_score"
    rate = replace(REGRESSION, higher_is_better=True, metric_name="accuracy")
    assert rate.metric_key == "test_accuracy"
    assert plan("test_sweep:REGRESSION", lam=(1.0,)).sweep.metrics == ("test_loss", "test_error")
    assert plan("test_sweep:SEQUENCE", lam=(1.0,)).sweep.metrics == ("test_loss", "train_loss")


def test_the_examples_are_tasks_that_pass_the_door() -> None:
    diabetes, sorting = (
        find(str(EXAMPLES / name)) for name in ("diabetes_task.py", "tiny_transformer_task.py")
    )
    assert isinstance(diabetes, wngrad.Task)
    assert why_not_stacked(diabetes, checked(diabetes, "x")) is None
    assert checked(sorting, "x").train_x.shape == (1000, 8)


def test_comments_do_not_change_what_a_task_is_and_code_does(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text("x = 1\n")
    before = fingerprint(f"{file}:task")
    file.write_text("# one\nx = 1\n")
    assert fingerprint(str(file)) == before
    file.write_text("x = 2\n")
    assert fingerprint(str(file)) != before
    assert fingerprint("package.module:TASK") == ""


# ---------------------------------------------------------------------------- the door

HEAD = """
import torch
from torch import nn
from wngrad import Task
x = torch.ones(8, 2)
parts = dict(name="t", model=lambda: nn.Linear(2, 1), train=(x, x[:, :1]), test=(x, x[:, :1]),
             loss=nn.functional.mse_loss, batch=4)
def boom(*args):
    raise KeyError("no such column")
"""
MISTAKES = {
    "x = = 1": "cannot be imported: SyntaxError at line 1: invalid syntax",
    "import no_such_module": "cannot be imported: No module named 'no_such_module'",
    HEAD: "`task` 'mine.py' has no attribute 'task' and no function 'train'.",
    HEAD + "mine = Task(**parts)": "and no function 'train'. Did you mean mine.py:mine?",
    HEAD + "task = Task(**parts | {'model': nn.Linear(2, 1)})": "network, got a Linear, which",
    "def train():\n    pass": "`train` must take a trial and nothing else, got (): too many pos",
    "def train(trial, data):\n    pass": "got (trial, data): missing a required argument: 'data'",
    "task = 3": "must be a wngrad.Task, a wngrad.LoaderTask or a function train(trial), got 3",
    HEAD + "task = Task(**parts | {'batch': 9})": "`batch` must be at most the 8 training examples",
    HEAD + "task = Task(**parts | {'batch': 0})": "`batch` must be >= 1, got 0",
    HEAD + "task = Task(**parts | {'name': ''})": "`name` must be some text",
    HEAD + "task = Task(**parts | {'loss': 3})": "`loss` must be callable, got 3",
    HEAD + "task = Task(**parts | {'test': None})": "`test` must be inputs and targets",
    HEAD + "task = Task(**parts | {'train': 3})": "`train` must be a pair of tensors",
    HEAD + "task = Task(**parts | {'train': (x, x[1:])})": "as many inputs as targets",
    HEAD
    + "task = Task(**parts | {'train': boom, 'test': None})": "`train` raised at line 9: KeyErr",
    HEAD + "task = Task(**parts | {'train': lambda: x, 'test': None})": "must return (train, test)",
    HEAD + "task = Task(**parts | {'model': boom})": "`model` raised at line 9: KeyError: 'no such",
    HEAD
    + "task = Task(**parts | {'model': dict})": "`model` must return a network with parameters",
    HEAD
    + "task = Task(**parts | {'model': lambda: nn.Linear(3, 1)})": "`model` raised: RuntimeError",
    HEAD + "task = Task(**parts | {'loss': boom})": "`loss` raised at line 9: KeyError",
    HEAD + "task = Task(**parts | {'loss': lambda o, t: o - t})": "got a tensor of shape (4, 1)",
    HEAD
    + "task = Task(**parts | {'loss': lambda o, t: 1.0})": "one number with a gradient, got 1.0",
    HEAD + "task = Task(**parts | {'metric': boom})": "`metric` raised at line 9: KeyError",
    HEAD + "task = Task(**parts | {'metric': lambda o, t: o})": "`metric` must return one number",
}


@pytest.mark.parametrize("text", MISTAKES)
def test_an_error_in_a_users_file_is_one_line_and_exit_code_two(text, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(text)
    done = CliRunner().invoke(app, ["sweep", "mine.py"])
    assert done.exit_code == 2, done.output
    assert MISTAKES[text] in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.py"], "nowhere.py is not there"),
        (["nothing"], "`task` must be file.py:name or module:name, got 'nothing'"),
        (["mine.py:other"], "has no attribute 'other'"),
        (["mine.py", "--optimizers", "no.such:Thing"], "`optimizer` 'no.such:Thing' cannot be imp"),
        (["mine.py", "--optimizers", "torch.optim:Nothing"], "has no attribute 'Nothing'"),
        (["mine.py", "--optimizers", "mine.py:x"], "'mine.py:x' must be callable"),
        (
            ["mine.py", "--optimizers", "mine.py:boom"],
            "must be callable as (params, lr=λ), got (*ar",
        ),
        (["mine.py", "--optimizers", "sdg"], "must be one of sgd, sgd-momentum, adam"),
        (["mine.py", "--optimizers", ","], "`optimizers` must be some values"),
        (["mine.py", "--lam", "a,b"], "`--lam` must be numbers with commas, got 'a,b'"),
        (["mine.py", "--lam", "1,1"], "`lam` must be some values, each once"),
        (["mine.py", "--lam", "0,1"], "sweep: `lam` must be finite numbers > 0, got (0.0, 1.0)"),
        (["mine.py", "--lam", "nan"], "sweep: `lam` must be finite numbers > 0, got (nan,)"),
        (["mine.py", "--lam-from", "0"], "`lam` must go from a number > 0"),
        (["mine.py", "--program", "fast"], "`--program` must be auto, stacked, branches, lone"),
        (["mine.py", "--out", "mine.py"], "`--out` must be a folder that can be written"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_exit_code_two(
    words, said, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(HEAD + "task = Task(**parts)")
    done = CliRunner().invoke(app, ["sweep", *words])
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
