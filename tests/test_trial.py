"""`train(trial)`: what a trial gives, what it is told, and how its runs end, stop and go on."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from small_lab import contents
from wngrad import FunctionTask, Trial
from wngrad.lab.run.session import Interrupted, Session
from wngrad.lab.run.store import Store
from wngrad.lab.train.spec import Lane, Sweep

LANE = Lane("sgd", 0.1, 0)
X = torch.linspace(-1, 1, 24)[:, None]
SWEEP = Sweep(
    name="own", claim="", dataset="own", model="own", optimizers=("sgd", "wnmuon"), lam=(0.01, 0.1),
    epochs=4, seeds=(0,), program="function", best_by="valid_loss", metrics=("valid_loss",),
    task="own", epochs_fixed=True,
)  # fmt: skip


def train(trial: Trial, *, resumes: bool = True, inside: bool = False) -> None:
    """Noise from three generators, dropout, and a schedule of its own."""
    import random

    model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 1))
    opt = trial.optimizer(model)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.5, 4)
    first = trial.resume(model=model, opt=opt, schedule=schedule) if resumes else 0
    for epoch in range(first, trial.epochs):
        for batch in torch.randperm(24).split(8):
            opt.zero_grad()
            noise = random.gauss(0, 0.1) + np.random.normal(0, 0.1)
            (model(X[batch]) - 2 * X[batch] + noise).square().mean().backward()
            opt.step()
        schedule.step()
        with trial.evaluating(model):
            loss = (model(X) - 2 * X).square().mean()
            if inside:  # where the average is in the weights' place
                trial.report(epoch + 1, loss=loss, gap=loss.sqrt())
        if not inside:
            trial.report(epoch + 1, loss=loss, gap=loss.sqrt())


def visit(folder: Path, function: Any, sweep: Sweep = SWEEP, **options: Any) -> list[Any]:
    events: list[Any] = []
    store = Store(folder, warn=lambda text: events.append({"kind": "warning", "text": text}))
    Session(sweep, FunctionTask(function), store, save_every=0, tell=events.append, **options).run()
    return events


# ------------------------------------------------------------------------------ what it gives


def test_a_trial_builds_its_optimizer_at_its_lambda():
    model = nn.Linear(2, 1)
    trial = Trial(Lane("adamw(weight_decay=0.2)", 0.03, 5), epochs=7)
    opt = trial.optimizer(model, weight_decay=0.1)
    assert isinstance(opt, torch.optim.AdamW)
    assert (opt.param_groups[0]["lr"], opt.param_groups[0]["weight_decay"]) == (0.03, 0.2)
    assert (trial.lam, trial.seed, trial.epochs) == (0.03, 5, 7)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "weight_decay": 0.0}]
    decays = [g["weight_decay"] for g in Trial(LANE, 1).optimizer(groups).param_groups]
    assert decays == [0, 0.0]


def test_evaluation_is_at_the_average_where_there_is_one_and_training_goes_on_as_before():
    model, trial = nn.Linear(1, 1), Trial(Lane("wnmuon", 0.3, 0), 1)
    opt = trial.optimizer(model)
    for _ in range(3):
        opt.zero_grad()
        (model(X) - 2 * X).square().mean().backward()
        opt.step()
    before = model.weight.clone()
    with opt.averaged():
        average = model.weight.clone()
    with trial.evaluating(model):
        assert torch.equal(model.weight, average)
        assert not torch.equal(model.weight, before)
        assert not model.training
        assert not model(X).requires_grad
    assert torch.equal(model.weight, before)
    assert model.training


class Switching(torch.optim.SGD):
    """As schedule-free optimizers: two modes, and other weights in each."""

    mode = "neither"

    def eval(self) -> None:
        self._move("eval", 1)

    def train(self) -> None:
        self._move("train", -1)

    @torch.no_grad()
    def _move(self, mode: str, by: float) -> None:
        before, self.mode = self.mode, mode
        if before not in (mode, "neither"):
            for p in self.param_groups[0]["params"]:
                p += by


def test_evaluation_switches_schedule_free_optimizers_and_finds_batch_statistics_again():
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    trial = Trial(Lane("test_trial:Switching", 0.1, 0), 1)
    opt = trial.optimizer(model)
    assert opt.mode == "train"  # without which schedule-free ones refuse to step
    model(X)
    mean, frozen = model[1].running_mean.clone(), model[0].train(False)
    with trial.evaluating(model, batches=[X] * 40):
        assert opt.mode == "eval"
        inside = model[1].running_mean.clone()
        torch.testing.assert_close(inside, model[0](X).mean(0), atol=0.05, rtol=0)
    assert opt.mode == "train"
    assert torch.equal(model[1].running_mean, mean)
    assert not frozen.training  # a part that was in evaluation mode stays there
    assert model[1].training


@pytest.mark.parametrize("name", ["wnmuon", "test_trial:Switching"])
@pytest.mark.parametrize("batches", [None, []])
def test_other_weights_than_the_trained_are_not_tested_with_their_batch_statistics(name, batches):
    model = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    trial = Trial(Lane(name, 0.1, 0), 1)
    opt = trial.optimizer(model)
    model(X).square().mean().backward()
    opt.step()
    before = [p.detach().clone() for p in model.parameters()]
    refused = pytest.raises(ValueError, match=r"evaluating: `batches` must be .* got (None|none)")
    with refused, trial.evaluating(model, batches):
        pass
    assert all(map(torch.equal, model.parameters(), before))
    assert getattr(opt, "mode", "train") == "train"
    with trial.evaluating(model, [X]):
        assert not model.training


def test_weights_as_trained_need_no_batches_and_nor_do_networks_without_batch_statistics():
    norm, bare = nn.BatchNorm1d(1), nn.BatchNorm1d(1, track_running_stats=False)
    for name, layer in (("sgd", norm), ("wnmuon", nn.LayerNorm(1)), ("wnmuon", bare)):
        model, trial = nn.Sequential(nn.Linear(1, 1), layer), Trial(Lane(name, 0.1, 0), 1)
        opt = trial.optimizer(model)
        model(X).square().mean().backward()
        opt.step()
        with trial.evaluating(model):
            assert model(X).isfinite().all()


# ------------------------------------------------------------------------------ what it is told


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda t: t.report(1, loss="low"), "`loss` must be a number, got 'low'"),
        (lambda t: t.report(1, loss=torch.ones(2)), "`loss` must be a number"),
        (lambda t: t.report(1, loss=1, accuracy=93.0), "`accuracy` must be from 0 to 1, got 93.0"),
        (lambda t: t.report(1.5, loss=1), "`step` must be an integer > -1, got 1.5"),
        (lambda t: [t.report(2, loss=1), t.report(2, loss=1)], "`step` must be an integer > 2"),
        (lambda t: [t.report(1, loss=1), t.report(2, loss=1, f1=1)], "must be the same every time"),
        (lambda t: t.resume(model=3), "`model` must have state_dict and load_state_dict, got 3"),
    ],
)
def test_a_wrong_report_is_told_in_a_line(call, said):
    with pytest.raises(ValueError, match=r"^(report|resume): ") as error:
        call(Trial(LANE, 3))
    assert said in str(error.value)


def test_a_step_may_be_any_integer_and_is_kept_as_a_plain_one():
    trial = Trial(LANE, 3)
    for step in (np.int64(1), np.uint8(2), 3):
        trial.report(step, loss=1.0)
    assert [type(step) for step in trial.steps] == [int] * 3
    for step in (True, np.float64(4), np.bool_(True)):
        with pytest.raises(ValueError, match="`step` must be an integer > 3"):
            trial.report(step, loss=1.0)


def test_reports_become_curves_and_step_zero_is_the_start(tmp_path):
    def own(trial):
        trial.report(0, loss=4.0, test_loss=5.0, train_loss=3.0, f1=0.1)
        for step in (10, 25):
            trial.report(
                step, loss=1 / step, test_loss=2 / step, train_loss=0, f1=torch.tensor(0.5)
            )

    visit(tmp_path, own, replace(SWEEP, optimizers=("sgd",), lam=(0.1,)))
    (record,) = Store(tmp_path).records()
    assert record.curves == {
        "valid_loss": [0.1, 0.04], "test_loss": [0.2, 0.08], "train_loss": [0, 0],
        "valid_f1": [0.5, 0.5],
    }  # fmt: skip
    assert record.start == {"valid_loss": 4, "test_loss": 5, "train_loss": 3, "valid_f1": 0.1}
    assert (record.steps, record.ended, record.status) == (
        [10, 25],
        "its function returned",
        "done",
    )


def test_a_step_is_timed_without_its_tests_also_if_the_report_is_made_in_one():
    import time

    trial = Trial(LANE, 3)
    for step in (1, 2, 3):
        time.sleep(0.01)
        with trial.evaluating():
            time.sleep(0.05)
            trial.report(step, loss=1.0)
            time.sleep(0.05)
    assert 0.005 < trial.step_seconds < 0.05


# ---------------------------------------------------------------------- stopped, and going on


@pytest.fixture
def undisturbed(one_thread, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    visit(folder, train)
    return contents(folder)


@pytest.mark.parametrize(("after", "inside"), [(1, False), (5, True), (16, False), (17, True)])
def test_a_function_that_resumes_and_was_stopped_leaves_what_it_would_have_left(
    after, inside, undisturbed, tmp_path
):
    own = partial(train, inside=inside)
    asked = [0]

    def stop() -> bool:
        asked[0] += 1
        return asked[0] == after

    with pytest.raises(Interrupted):
        visit(tmp_path, own, stop=stop)
    visit(tmp_path, own)
    assert contents(tmp_path) == undisturbed


def test_a_function_that_resumes_does_not_train_again_what_it_had(one_thread, tmp_path):
    calls: list[int] = []

    def counting(trial: Trial) -> None:
        report = trial.report
        trial.report = lambda step, **values: [calls.append(step), report(step, **values)]
        train(trial)

    asked = [0]

    def stop() -> bool:
        asked[0] += 1
        return asked[0] == 5  # one before the pack, one before its training, then the reports

    one = replace(SWEEP, optimizers=("sgd",), lam=(0.1,))
    with pytest.raises(Interrupted):
        visit(tmp_path, counting, one, stop=stop)
    assert calls == [1, 2, 3]
    visit(tmp_path, counting, one)
    assert calls == [1, 2, 3, 4]


def test_a_function_that_does_not_resume_begins_anew_and_leaves_the_same(
    one_thread, undisturbed, tmp_path
):
    asked = [0]

    def stop() -> bool:
        asked[0] += 1
        return asked[0] == 5

    def anew(trial: Trial) -> None:
        train(trial, resumes=False)

    with pytest.raises(Interrupted):
        visit(tmp_path, anew, stop=stop)
    visit(tmp_path, anew)
    assert contents(tmp_path) == undisturbed


def test_no_checkpoint_is_left_of_a_run_that_is_done(undisturbed):
    assert not [name for name in undisturbed if "checkpoint" in name]


# --------------------------------------------------------------------------- what goes wrong


def raises(trial):
    trial.report(1, loss=1.0)
    raise ArithmeticError("no such root")


def leaves(trial):
    raise SystemExit(3)


def silent(trial):
    print("nothing to say", flush=True)


def nan(trial):
    trial.report(1, loss=float("nan"))
    trial.report(2, loss=1.0)


def holds_up(trial):
    try:
        trial.report(1, loss=1.0)
        trial.report(1, loss=1.0)
    except Exception:
        trial.report(2, loss=2.0)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (raises, "ArithmeticError: no such root"),
        (leaves, "SystemExit: 3"),
        (silent, "ValueError: train must call trial.report(step, loss=…) with a step > 0"),
    ],
)
def test_a_run_that_fails_fails_alone_with_its_reason(function, reason, tmp_path):
    def own(trial: Trial) -> None:
        (function if trial.lam == 0.1 else train)(trial)

    visit(tmp_path, own, replace(SWEEP, optimizers=("sgd",)))
    ends = {r.lane.lam: (r.status, r.reason) for r in Store(tmp_path).records()}
    assert ends == {0.01: ("done", ""), 0.1: ("failed", reason)}


def test_what_a_run_sets_for_its_process_is_put_back_for_the_next(tmp_path):
    def settings() -> list[Any]:
        return [
            torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), os.getcwd(), os.environ.get("WN_LEFT"),
            signal.getsignal(signal.SIGTERM), torch.get_num_threads(),
        ]  # fmt: skip

    def careless(trial: Trial) -> None:
        seen.append(settings())
        trial.report(1, loss=1.0)
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True)
        torch.set_num_threads(torch.get_num_threads() + 1)
        os.chdir("/")
        os.environ["WN_LEFT"] = "1"
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if trial.lam == 0.01:
            raise ArithmeticError("no such root")

    before, seen = settings(), []
    visit(tmp_path, careless, replace(SWEEP, optimizers=("sgd",)))
    assert [before, *seen, settings()] == [before] * 4


def test_a_loss_that_is_not_a_number_is_a_result(tmp_path):
    visit(tmp_path, nan, replace(SWEEP, optimizers=("sgd",), lam=(0.1,)))
    (record,) = Store(tmp_path).records()
    assert (record.status, record.diverged_at, record.curves["valid_loss"]) == (
        "done",
        1,
        [None, 1],
    )


def test_except_exception_does_not_hold_up_an_interruption(tmp_path):
    asked = [0]

    def stop() -> bool:
        asked[0] += 1
        return asked[0] == 3

    with pytest.raises(Interrupted):
        visit(tmp_path, holds_up, replace(SWEEP, optimizers=("sgd",), lam=(0.1,)), stop=stop)


@pytest.mark.filterwarnings("ignore:.*fork.*")  # of JAX, where another test has loaded it
@pytest.mark.parametrize("comes", ["to a report", "to the end", "to an error"])
def test_a_child_that_a_run_forks_and_that_comes_back_writes_nothing(comes, tmp_path, capfd):
    def forks(trial: Trial) -> None:
        if os.fork() == 0:
            if comes == "to an error":
                raise RuntimeError("in the child")
            if comes == "to a report":
                trial.report(77, loss=0.0)
            return
        assert os.wait()[1] != 0
        trial.report(1, loss=1.0)

    events = visit(tmp_path, forks, replace(SWEEP, optimizers=("sgd",), lam=(0.1,)))
    (record,) = Store(tmp_path).records()
    assert (record.steps, record.status) == ([1], "done")
    assert sum(event["kind"] == "record" for event in events) == 1
    assert (tmp_path / "sessions.jsonl").read_text().count("\n") == 1
