"""Nothing to tune against tuned rivals: schedules, pairing, going on, choices, and the page."""

from __future__ import annotations

import inspect
import json
import math
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import pairwise
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wngrad
from experiments.untuned import __main__ as command
from experiments.untuned import page, plan, tables, tasks
from experiments.untuned.methods import METHODS, RHO, C, Method, MuonAdamW, half_decades, split
from experiments.untuned.plan import Plan, Run
from experiments.untuned.run import Runner, serve
from experiments.untuned.tasks import PAD, TASKS, Split, Task
from experiments.untuned.train import Trainer
from wngrad.lab.report.cells import Cell

DIGITS, WINE, TEXT = TASKS["digits-mlp"], TASKS["wine"], TASKS["shakespeare"]


@pytest.fixture(autouse=True)
def _no_known_records(tmp_path, monkeypatch):
    """The published records must not count here."""
    monkeypatch.setattr("experiments.untuned.run.KNOWN", tmp_path / "nothing")


def normalized() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3)
    )


def random_images(folder: Path | None) -> Split:
    rng = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 1, 4, 4, generator=rng), torch.randint(3, (60,), generator=rng)
    return Split(x[:40], y[:40], x[40:], y[40:])


TINY = Task("tiny", "judging", "", normalized, random_images, 12, 8, batch_norm=True)


class Recorder:
    """An optimizer that changes nothing and keeps every batch and the first weights."""

    def __init__(self, trainer: Trainer) -> None:
        self.gradient, self.param_groups = trainer.gradient, []
        self.first = [p.detach().clone() for p in trainer.gradient.params]
        self.draws: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        self.draws.append(self.gradient.draw.clone())

    def method(self) -> Method:
        return Method("recorder", "", lambda *_: self, (1.0,), "default")


def recorded(trainer: Trainer, seed: int) -> Recorder:
    trainer.gradient.start(seed)
    recorder = Recorder(trainer)
    trainer.run(recorder.method(), 1.0, seed, 12)
    return recorder


# ------------------------------------------------------------------------------- schedules


def test_adamw_warms_up_over_five_per_cent_and_decays_to_zero():
    factors = [METHODS["adamw"].factor(t, 100) for t in range(101)]
    assert factors[:6] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]
    assert factors[100] == 0
    falls = [a - b for a, b in pairwise(factors[5:])]
    assert falls == pytest.approx([1 / 95] * 95)


def test_muon_decays_from_the_first_step_and_ours_never():
    assert [METHODS["muon"].factor(t, 4) for t in range(5)] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert {METHODS["wnmuon"].factor(t, 4) for t in range(5)} == {1.0}


def test_the_rate_of_a_step_is_what_the_schedule_says():
    rates, trainer = [], Trainer(WINE, "cpu")

    def build(model: nn.Module, *_: Any) -> Any:
        opt = torch.optim.SGD(model.parameters(), lr=0.5)
        opt.register_step_pre_hook(lambda opt, *_: rates.append(opt.param_groups[0]["lr"]))
        return opt

    trainer.run(replace(METHODS["muon"], build=build), 0.5, 0, 4)
    assert rates == [0.5, 0.375, 0.25, 0.125]


def test_grids_are_half_decades():
    assert METHODS["adamw"].lams == (1e-4, 3.16e-4, 1e-3, 3.16e-3, 0.01, 0.0316, 0.1, 0.316, 1.0)
    assert len(METHODS["muon"].lams) == 7
    assert half_decades(2.5e-3, 2) == (2.5e-4, 7.91e-4, 2.5e-3, 7.91e-3, 2.5e-2)


# --------------------------------------------------------------------------------- pairing


def test_a_seed_gives_the_same_weights_and_batches_whatever_ran_before():
    trainer = Trainer(TINY, "cpu")
    before = recorded(trainer, 0)
    for name in ("adamw", "muon", "wnmuon"):
        trainer.run(METHODS[name], 0.1, 0, 12)
    after, other = recorded(trainer, 0), recorded(trainer, 1)
    assert all(map(torch.equal, before.first, after.first))
    assert all(map(torch.equal, before.draws, after.draws))
    assert len(before.draws) == 12
    assert not torch.equal(before.first[0], other.first[0])
    assert not torch.equal(before.draws[0], other.draws[0])


def test_a_run_gives_the_same_numbers_again():
    runs = [Trainer(DIGITS, "cpu").run(METHODS["adamw"], 0.01, 1, 20) for _ in range(2)]
    assert runs[0]["loss"] == runs[1]["loss"]
    assert runs[0]["curve"] == runs[1]["curve"]


def test_batches_take_every_example_once_an_epoch():
    draws = WINE.draws(32, 4, seed=0)
    assert draws.shape == (4, 16, 1)
    assert sorted(draws[:2].flatten().tolist()) == sorted(draws[2:].flatten().tolist())
    assert sorted(draws[:2].flatten().tolist()) == list(range(32))


def test_the_targets_of_a_text_are_its_next_bytes():
    codes = torch.arange(200, dtype=torch.uint8)
    x, y = TEXT.examples(Split(codes, codes[:0], codes, codes), torch.tensor([[3], [7]]))
    assert x[0].tolist() == list(range(3, 131))
    assert torch.equal(y, x + 1)


def test_a_crop_is_a_moved_and_mirrored_window():
    image = torch.arange(32.0 * 32).view(1, 1, 32, 32)
    padded = nn.functional.pad(image, (PAD,) * 4)
    plain, flipped, moved = (
        tasks.crops(padded, torch.tensor([[0, *draw]]))
        for draw in ((PAD, PAD, 0), (PAD, PAD, 1), (0, PAD + 1, 0))
    )
    assert torch.equal(plain, image)
    assert torch.equal(flipped, image.flip(3))
    assert torch.equal(moved[0, 0, PAD:, :-1], image[0, 0, :-PAD, 1:])
    assert not moved[0, 0, :PAD].any()


# ------------------------------------------------------------------------------ evaluation


class Averaging(Recorder):
    """Evaluated at weights of zero, which are put back."""

    given: Any = None

    @contextmanager
    def averaged(self, model: Any = None, *, batches: Any = ()) -> Any:
        self.given = model, list(batches)
        kept = [p.detach().clone() for p in self.gradient.params]
        for p in self.gradient.params:
            p.zero_()
        yield
        for p, value in zip(self.gradient.params, kept, strict=True):
            p.copy_(value)


def test_an_average_is_where_ours_is_evaluated_and_gets_batches_for_its_statistics():
    trainer = Trainer(TINY, "cpu")
    opt = Averaging(trainer)
    opt.param_groups = [{"average": 8.0}]
    record = trainer.run(opt.method(), 1.0, 0, 12)
    assert record["loss"] == pytest.approx(math.log(3))
    assert opt.given[0] is trainer.gradient.model
    assert [x.shape for x in opt.given[1]] == [(8, 1, 4, 4)] * 12


def test_batch_statistics_are_estimated_anew_where_an_optimizer_switches_to_eval():
    trainer = Trainer(TINY, "cpu")

    class Switching(Recorder):
        def train(self) -> None: ...
        def eval(self) -> None:
            trainer.gradient.model[1].running_mean.fill_(1e6)

    trainer.run(Switching(trainer).method(), 1.0, 0, 60)
    assert trainer.gradient.model[1].running_mean.abs().max() < 10


def test_a_run_that_diverges_says_so():
    build = lambda model, *_: torch.optim.SGD(model.parameters(), lr=1e30)  # noqa: E731
    record = Trainer(DIGITS, "cpu").run(replace(METHODS["adamw"], build=build), 1e30, 0, 20)
    assert record["diverged"]
    assert record["loss"] is None
    assert len(record["curve"]) < 20
    json.dumps(record, allow_nan=False)


def test_an_optimizers_own_error_is_not_taken_for_divergence():
    class Broken(Recorder):
        def step(self, closure: Any = None) -> None:
            raise KeyError("x")

    trainer = Trainer(TINY, "cpu")
    with pytest.raises(KeyError):
        trainer.run(Broken(trainer).method(), 1.0, 0, 12)


# ------------------------------------------------------------------------------------ Muon


def test_muon_gets_the_hidden_matrices_and_adamw_the_rest():
    def names(model: nn.Module) -> tuple[list[str], list[str]]:
        known = {id(p): name for name, p in model.named_parameters()}
        hidden, rest = split(model)
        return [known[id(p)] for p in hidden], [known[id(p)] for p in rest]

    assert names(TINY.model()) == (
        ["0.weight"],
        ["0.bias", "1.weight", "1.bias", "3.weight", "3.bias"],
    )
    hidden, rest = names(TEXT.model())
    assert len(hidden) == 16
    assert {"letters.weight", "places.weight", "head.weight"} <= set(rest)
    assert not any("norm" in name or "bias" in name for name in hidden)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_convolution_is_orthogonalized_as_a_matrix_in_its_own_memory(layout):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8, 2))
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    before = model[0].weight.detach().clone().contiguous().flatten(1)
    plain = nn.Parameter(before.clone())
    oracle = torch.optim.Muon([plain], lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    opt = MuonAdamW(model, WINE, 0.1)
    for _ in range(2):
        model.zero_grad()
        model(torch.randn(4, 3, 3, 3)).square().sum().backward()
        plain.grad = model[0].weight.grad.contiguous().flatten(1)
        opt.step()
        oracle.step()
    # The products' sums of bfloat16 may be taken in another order.
    torch.testing.assert_close(model[0].weight.flatten(1), plain, atol=1e-3, rtol=0)
    assert (plain - before).abs().max() > 0.05


def test_one_rate_moves_both_parts_of_muon():
    opt = MuonAdamW(TINY.model(), TINY, 0.25)
    assert [group["lr"] for group in opt.param_groups] == [0.25] * 3
    assert [group["weight_decay"] for group in opt.param_groups] == [0.01, 0.01, 0.0]


# ------------------------------------------------------------------------- plan and resume


def record(run: Run, value: float, **more: Any) -> dict[str, Any]:
    """A made-up record: an accuracy for classes, a loss for a text."""
    text = TASKS[run.task].context > 0
    measures = {"loss": value if text else 1 - value, "accuracy": None if text else value}
    known = {"device": "a core", "torch": "2", "wngrad": "1", "commit": "c"}
    return {
        **asdict(run), **measures, "diverged": False, "curve": [], "step_ms": 2.0,
        "optimizer_ms": 0.5, "environment": known, "precision": "float32", **more,
    }  # fmt: skip


def made_up(task: Task, method: str, values: dict[float, list[float]]) -> dict[Run, dict[str, Any]]:
    runs = {
        Run(task.name, method, lam, seed, task.steps): value
        for lam, each in values.items()
        for seed, value in enumerate(each)
    }
    return {run: record(run, value) for run, value in runs.items()}


def test_seeds_first_runs_the_grid_once_and_then_the_best_and_its_neighbours():
    method = METHODS["muon"]
    small = Plan((DIGITS,), (method,), ("tuned",), seeds=3, seeds_first=True)
    assert [(run.lam, run.seed) for run in small.missing({})] == [(lam, 0) for lam in method.lams]
    records = made_up(DIGITS, "muon", {lam: [0.5] for lam in method.lams} | {0.01: [0.9]})
    more = [(lam, seed) for seed in (1, 2) for lam in (0.00316, 0.01, 0.0316)]
    assert [(run.lam, run.seed) for run in small.missing(records)] == more
    beside = {0.00316: [0.5] * 3, 0.01: [0.9, 0.1, 0.1], 0.0316: [0.5, 0.8, 0.8]}
    records |= made_up(DIGITS, "muon", beside)  # over all seeds its neighbour is better
    assert [(run.lam, run.seed) for run in small.missing(records)] == [(0.1, 1), (0.1, 2)]
    records |= made_up(DIGITS, "muon", {0.1: [0.5] * 3})
    assert small.missing(records) == []


def test_the_whole_plan_has_every_part():
    runs = plan.plan([], [], [], 3, False).missing({})
    assert len(runs) == len(set(runs))
    count = Counter((run.task, run.method) for run in runs)
    assert count["digits-16", "adamw"] == 27
    assert count["shakespeare", "wnmuon"] == 3 * 4  # lengths
    assert count["shakespeare", "adamw"] == 27 * 4
    assert count["wine", "muon"] == 0  # no hidden matrix
    assert count["stdlib", "wnmuon-rho"] == 6
    assert count["wine", "wnmuon-rho"] == 0
    assert count["wine", "default-adamw"] == 3


@pytest.mark.parametrize("option", ["--tasks", "--methods", "--parts"])
def test_an_unknown_name_is_one_line_and_exit_code_2(option, capsys):
    assert command.main([option, "wine,winee"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "winee" in error or "wine" in error


def test_records_survive_a_line_that_was_torn(tmp_path):
    runs = [Run("wine", "adamw", 0.1, seed, 160) for seed in range(2)]
    plan.append(tmp_path, runs[0], record(runs[0], 0.9))
    with (tmp_path / "wine.jsonl").open("a") as file:
        file.write('{"task": "wine", "meth')
    assert list(plan.read(tmp_path)) == runs[:1]
    plan.append(tmp_path, runs[1], record(runs[1], 0.8))
    assert [r["accuracy"] for r in plan.read(tmp_path).values()] == [0.9, 0.8]


@pytest.mark.integrations
def test_a_call_that_was_stopped_goes_on_and_nothing_is_run_twice(tmp_path):
    wanted = plan.plan(["wine"], ["adamw"], ["tuned"], 1, False)

    def stop(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Runner(wanted, tmp_path, say=stop).run()
    path = tmp_path / "wine.jsonl"
    before = path.read_text()
    assert before.count("\n") == 1
    lines: list[str] = []
    assert Runner(wanted, tmp_path, say=lines.append).run() == len(lines) == 8
    assert path.read_text().startswith(before)
    assert sorted(run.lam for run in plan.read(tmp_path)) == list(METHODS["adamw"].lams)
    assert path.read_text().count("\n") == 9
    assert Runner(wanted, tmp_path, say=lines.append).run() == 0


def test_a_worker_ends_when_nobody_is_there_to_ask():
    ours, theirs = Pipe()
    ours.close()
    serve(theirs, "cpu", None, "all")


def test_a_limit_stops_the_runs(tmp_path):
    wanted = plan.plan(["digits-mlp"], ["adamw"], ["tuned"], 500, False)
    begun = time.monotonic()
    runner = Runner(wanted, tmp_path, limit=0.5, say=lambda line: None)
    assert runner.run() == len(plan.read(tmp_path))
    assert time.monotonic() - begun < 20
    assert wanted.missing(runner.records)


# --------------------------------------------------------------------- choices and numbers


def test_the_best_lam_has_the_best_mean_and_no_seed_that_diverged():
    records = made_up(
        DIGITS, "adamw", {0.1: [0.9, 0.9, 0.9], 0.01: [0.8, 0.99, 0.97], 0.3: [1, 1, 1]}
    )
    records |= made_up(DIGITS, "adamw", {1.0: [1.0]})  # fewer seeds
    lost = Run("digits-mlp", "adamw", 0.3, 1, DIGITS.steps)
    records[lost] = record(lost, 1.0, diverged=True)
    lam, cell = tables.Results(records).best(DIGITS, "adamw")
    assert lam == 0.01
    assert cell.mean == pytest.approx(0.92)


def test_of_two_lams_with_one_accuracy_the_smaller_loss_is_chosen():
    records = made_up(DIGITS, "adamw", {0.1: [0.9], 0.01: [0.9]})
    worse = Run("digits-mlp", "adamw", 0.01, 0, DIGITS.steps)
    records[worse]["loss"] = 5.0
    assert tables.Results(records).best(DIGITS, "adamw")[0] == 0.1
    records[worse]["loss"] = 0.01
    assert tables.Results(records).best(DIGITS, "adamw")[0] == 0.01


@pytest.mark.parametrize(
    ("gaps", "accuracy", "loss"),
    [
        ((0.01, 0.02, 0.03), "ahead", "behind"),  # mean 0.02, s.e. 0.01/√3: 3.5 of them
        ((-0.01, -0.02, -0.03), "behind", "ahead"),
        ((-0.02, 0.01, 0.03), "tie", "tie"),  # mean 0.0067, s.e. 0.0145
    ],
)
def test_a_difference_is_paired_and_judged_by_two_standard_errors(gaps, accuracy, loss):
    base = (0.5, 0.7, 0.9)  # a spread that both have, and that cancels
    for metric, word in (("test_accuracy", accuracy), ("test_loss", loss)):
        second = Cell.of(metric, base, range(3))
        first = Cell.of(metric, [a + b for a, b in zip(base, gaps, strict=True)], range(3))
        gap = tables.difference(first, second)
        assert gap.mean == pytest.approx(sum(gaps) / 3)
        assert gap.word == word
    if accuracy == "ahead":
        assert gap.error == pytest.approx(0.01 / math.sqrt(3))


def test_a_run_that_diverged_is_behind_and_one_seed_has_no_verdict():
    good, lost = Cell.of("test_loss", [1.0], [0]), Cell.of("test_loss", [math.nan], [0])
    assert tables.difference(good, lost).word == "ahead"
    assert tables.difference(lost, good).word == "behind"
    assert tables.difference(lost, lost).word == "tie"
    assert tables.difference(good, good).word == "one seed"


def test_ranks_count_what_is_better():
    records = made_up(DIGITS, "wnmuon", {RHO: [0.9]}) | made_up(
        DIGITS, "default-sgd", {1e-3: [0.5]}
    )
    records |= made_up(DIGITS, "default-adam", {1e-3: [0.95]})
    expected = {"wnmuon": 2, "default-sgd": 3, "default-adam": 1}
    assert tables.Results(records).ranks(DIGITS) == expected


# ------------------------------------------------------------------------------------ page


@pytest.fixture
def folder(tmp_path):
    """Made-up records of two tasks, as files."""
    records = made_up(TEXT, "wnmuon", {RHO: [1.50, 1.52, 1.54]})
    curve = {
        lam: [1.6 + abs(math.log10(lam / 0.01)) + 0.01 * k for k in range(3)]
        for lam in METHODS["adamw"].lams
    }
    records |= made_up(TEXT, "adamw", curve) | made_up(TEXT, "muon", {0.01: [1.55, 1.56, 1.57]})
    records |= made_up(TEXT, "wnmuon-rho", {0.1: [1.51, 1.52, 1.53]})
    records |= made_up(TASKS["wine"], "wnmuon", {RHO: [0.9, 0.95]})
    records |= made_up(TASKS["wine"], "default-dog", {1.0: [0.8, 0.85]})
    lost = Run("shakespeare", "adamw", 1.0, 2, TEXT.steps)
    records[lost] = record(lost, 9.0, diverged=True)
    for run, each in records.items():
        plan.append(tmp_path / "records", run, each)
    return tmp_path


def test_the_page_keeps_what_was_written_by_hand_and_fills_its_regions(folder):
    target = folder / "docs" / "page.md"
    target.parent.mkdir()
    target.write_text("# By hand\n\n<!-- begin choosing -->\nold\n<!-- end choosing -->\n\nMore.\n")
    for _ in range(2):  # the second time nothing changes
        paths = page.write(folder / "records", target, "shakespeare")
        text = target.read_text()
        assert text.startswith("# By hand\n\n<!-- begin choosing -->\n| task |")
        assert "\n\nMore.\n" in text
        assert "old" not in text
        assert text.count("<!-- begin ") == text.count("<!-- end ") == 8
    assert all(path.stat().st_size > 1000 for path in paths[1:])
    row = next(line for line in text.splitlines() if line.startswith("| shakespeare | 1.52"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1] == "1.52 ± 0.02 (n = 3)"
    assert cells[2] == "1.61 ± 0.01 (n = 3) at 0.01"
    assert cells[3] == "1.56 ± 0.01 (n = 3) at 0.01"
    assert cells[6] == "-0.0900 ± 0.0058: ahead (n = 3)"
    assert "DoG, averaged: 82.50 ± 3.54 % (n = 2)" in text
    assert "| WNMuon | 1.0 | 1 |" in text  # where it is alone there is no rank
    assert "| shakespeare | 1.52 ± 0.02 (n = 3) | 1.52 ± 0.01 (n = 3) | – | – | – |" in text


def test_a_report_without_records_is_one_line_and_exit_code_2(tmp_path, capsys):
    assert command.main(["--report", "--out", str(tmp_path)]) == 2
    assert "must be a folder with records" in capsys.readouterr().err


# ----------------------------------------------------------------------- ours, and the GPU


def test_our_defaults_are_the_ones_that_are_moved():
    settings = inspect.signature(wngrad.WNMuon).parameters
    assert (settings["lr"].default, settings["b_init"].default) == (RHO, C)


def test_the_moved_settings_are_a_third_and_three_times_a_tenth_and_ten_times():
    assert METHODS["wnmuon-rho"].lams == pytest.approx((RHO / 3, RHO * 3))
    assert METHODS["wnmuon-c"].lams == pytest.approx((C / 10, C * 10))


def test_a_step_that_is_captured_writes_its_state_in_place():
    """A replay reads where the capture read: state must not move to new memory."""
    for method in (each for each in METHODS.values() if each.captured):
        model = TINY.network(0)
        opt = method.build(model, TINY, method.lams[0], 12)
        places = []
        for _ in range(3):
            model.zero_grad()
            model(torch.randn(8, 1, 4, 4)).square().sum().backward()
            opt.step()
            state = [value for each in opt.state.values() for value in each.values()]
            places.append([tensor.data_ptr() for tensor in (*state, *model.parameters())])
        assert places[1] == places[2]
        assert len(places[1]) > 20


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["wnmuon", "adamw", "muon"])
def test_graphs_train_as_the_same_operations_one_by_one(name):
    runs = [
        Trainer(TINY, "cuda", captured=captured).run(
            METHODS[name], METHODS[name].lams[-1] / 10, 0, 12
        )
        for captured in ("nothing", "gradient", "all")
    ]
    for other in runs[1:]:
        assert other["loss"] == pytest.approx(runs[0]["loss"], rel=1e-3)  # sums in another order
        losses = [[value for _, value in each["curve"]] for each in (runs[0], other)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-3)
