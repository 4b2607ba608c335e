"""`wngrad sweep` with trainings of one's own: from a file to a page, and a folder that grows."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from small_lab import wngrad
from wngrad.lab.report.costs import read as read_costs
from wngrad.lab.run import files
from wngrad.lab.run.stop_rules import STARTUP, lost
from wngrad.lab.run.store import Store
from wngrad.lab.sweep import page_source, plan
from wngrad.lab.sweep.page_source import merged
from wngrad.lab.train.spec import Lane, Record, Setting

TRAIN = """
import torch
from torch import nn

x = torch.linspace(-1, 1, 32)[:, None]


def train(trial):
    model = nn.Linear(1, 1)
    opt = trial.optimizer(model)
    loss = lambda: (model(x) - 3 * x).square().mean()
    trial.report(0, loss=loss(), accuracy=0.0)
    for epoch in range(trial.epochs):
        for _ in range(4):
            opt.zero_grad()
            loss().backward()
            opt.step()
        with trial.evaluating(model):
            trial.report(4 * epoch + 4, loss=loss(), accuracy=0.5, test_loss=2 * loss())
""".replace("accuracy=0.0)", "accuracy=0.0, test_loss=2 * loss())")
LOADERS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from wngrad import LoaderTask

x = torch.linspace(-1, 1, 32)[:, None]


def loaders():
    train = DataLoader(TensorDataset(x, 3 * x), 8, shuffle=True)
    return train, [(x, 3 * x)], [(x, 0 * x)]


task = LoaderTask("lines", lambda: nn.Linear(1, 1), loaders, loss=nn.functional.mse_loss, epochs=3)
"""
TENSORS = """
import torch
from torch import nn
from wngrad import Task

x = torch.linspace(-1, 1, 48)[:, None]
task = Task(
    "pairs", lambda: nn.Sequential(nn.Linear(1, 1)), (x, 3 * x), validation=(x[:9], 3 * x[:9]),
    test=(x[9:], 0 * x[9:]), loss=nn.functional.mse_loss, epochs=3, batch=8,
)
"""


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch, request):
    """Drawing takes longer than all the training here; the first test draws."""
    if "to_a_page" not in request.node.name:
        monkeypatch.setattr("wngrad.lab.report.figures.write", lambda report, paths: None)
        monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "")


def sweep(folder: Path, text: str, *words: str, lam: str = "0.01,0.1", seeds: str = "1") -> Any:
    (folder / "mine.py").write_text(text)
    return wngrad(
        folder, "sweep", "mine.py", "--lam", lam, "--seeds", seeds, "--device", "cpu", *words
    )


def records(out: Path) -> dict[str, Any]:
    return {p.name: json.loads(p.read_text()) for p in (out / "records").glob("*.json")}


# ------------------------------------------------------------------------ from a file to a page


def test_a_function_from_its_file_to_a_page_and_the_page_again_from_the_folder(tmp_path):
    done = sweep(tmp_path, TRAIN, "--optimizers", "sgd,adamw(weight_decay=0.1)", "--epochs", "3")
    assert done.exit_code == 0, done.stderr
    assert "sgd: 3 separate runs: its training is a function of its own." in done.stdout
    assert "mine; n = 1 seed, 3 reports, 6 of 6 lanes." in done.stdout
    out = tmp_path / "out/mine"
    summary = (out / "summary.md").read_text()
    assert "| AdamW(weight_decay=0.1) |" in summary
    heads = ("validation loss at default λ", "validation loss at best λ", "test loss there")
    assert " | ".join(heads) in summary
    assert "validation accuracy there" in summary
    assert "At step 12, over 2 λ" in summary
    page = (out / "report.html").read_bytes()
    (tmp_path / "mine.py").unlink()  # a report needs no file, and trains nothing
    again = wngrad(tmp_path, "report", "out/mine")
    assert again.exit_code == 0, again.stderr
    assert (out / "report.html").read_bytes() == page
    table = lambda text: text[text.index("┏") :]  # noqa: E731
    assert table(again.stdout) == table(done.stdout)


@pytest.mark.parametrize("text", [LOADERS, TENSORS])
def test_lambda_is_chosen_on_validation_data_and_the_test_set_is_reported_there(text, tmp_path):
    done = sweep(tmp_path, text, "--optimizers", "sgd", "--no-defaults", lam="0.03,0.3")
    assert done.exit_code == 0, done.stderr
    (out,) = (tmp_path / "out").iterdir()
    for record in records(out).values():
        assert record["start"].keys() >= {"valid_loss", "test_loss"}
    by_lam = {r["lam"]: r["curves"] for r in records(out).values()}
    best = min(by_lam, key=lambda lam: by_lam[lam]["valid_loss"][-1])
    assert best != min(by_lam, key=lambda lam: by_lam[lam]["test_loss"][-1])
    summary = (out / "summary.md").read_text()
    assert "at 0.3 | " in summary
    assert f"{by_lam[best]['test_loss'][-1]:#.3g}" in summary
    assert "chosen on the test data" not in summary


def test_a_task_without_validation_data_says_that_lambda_was_chosen_on_the_test_set(tmp_path):
    text = TENSORS.replace("validation=(x[:9], 3 * x[:9]),", "")
    assert sweep(tmp_path, text, "--optimizers", "sgd").exit_code == 0
    assert "λ was chosen on the test data" in (tmp_path / "out/pairs/summary.md").read_text()


def test_a_default_off_the_grid_is_run_and_shown_but_is_not_of_the_grid(tmp_path):
    sweep(tmp_path, LOADERS, "--optimizers", "wnmuon,sgd", lam="0.01,0.1")
    text = (tmp_path / "out/lines/summary.md").read_text()
    assert "The best λ of WNMuon, SGD is at an end of the grid: a longer one" in text
    out = tmp_path / "out/lines"
    assert sorted(r["lam"] for r in records(out).values() if r["optimizer"] == "wnmuon") == [
        0.01, 0.1, 0.3
    ]  # fmt: skip
    row = next(x for x in (out / "summary.md").read_text().splitlines() if x.startswith("| WNMu"))
    assert " at 0.3 | " in row.split("| ")[2] + "| "
    assert "over 2 λ from 0.01 to 0.1" in (out / "summary.md").read_text()


def test_the_time_and_the_memory_of_a_step_are_in_the_table(tmp_path):
    for text, name in ((TRAIN, "mine"), (LOADERS, "lines"), (TENSORS, "pairs")):
        assert sweep(tmp_path, text, "--optimizers", "adam", "--no-defaults").exit_code == 0
        summary = (tmp_path / "out" / name / "summary.md").read_text()
        row = next(x for x in summary.splitlines() if x.startswith("| Adam"))
        step, state = row.split(" | ")[-4:-2]
        assert step.endswith(" ms"), row
        assert ("as its reports count steps" in summary) == (name == "mine")
        # Two moments of a weight and a bias; torch keeps the number of steps of each, too.
        assert state in ("16 B", "24 B"), row


def test_a_run_that_fails_says_at_which_line_of_the_users_file(tmp_path):
    text = TRAIN.replace("    opt = trial", "    0.1 / (0.1 - trial.lam)\n    opt = trial")
    done = sweep(tmp_path, text, "--optimizers", "sgd", "--no-defaults")
    assert done.exit_code == 1
    line = text.splitlines().index("    0.1 / (0.1 - trial.lam)") + 1
    reason = f"at line {line} of mine.py: ZeroDivisionError: float division by zero"
    ends = {r["lam"]: r["reason"] for r in records(tmp_path / "out/mine").values()}
    assert ends == {0.01: "", 0.1: reason}
    assert f"1 of 2 lanes failed: sgd, λ = 0.1, seed 0 ({reason})." in done.stdout


# ------------------------------------------------------------------------- a folder that grows


@pytest.mark.parametrize("text", [LOADERS, TENSORS])
def test_a_finer_grid_more_seeds_and_another_optimizer_keep_what_is_there(text, tmp_path):
    name = "lines" if text == LOADERS else "pairs"
    assert sweep(tmp_path, text, "--optimizers", "sgd", "--no-defaults").exit_code == 0
    out = tmp_path / "out" / name
    first = {p: p.read_bytes() for p in (out / "records").iterdir()}
    grown = (
        (("--optimizers", "sgd", "--no-defaults"), {"lam": "0.01,0.03,0.1"}, 3),
        (("--optimizers", "sgd", "--no-defaults"), {"lam": "0.01,0.03,0.1", "seeds": "2"}, 6),
        (("--optimizers", "adam", "--no-defaults"), {"lam": "0.01,0.1", "seeds": "2"}, 10),
    )
    for words, more, count in grown:
        done = sweep(tmp_path, text, *words, **more)
        assert done.exit_code == 0, done.stderr
        assert len(records(out)) == count
        assert {p: p.read_bytes() for p in first} == first
    assert f"{name}; n = 2 seeds, 3 epochs, 10 of 10 lanes." in done.stdout
    summary = (out / "summary.md").read_text()
    assert "| SGD |" in summary  # the page shows all that is there
    assert "| Adam |" in summary
    again = sweep(tmp_path, text, "--optimizers", "sgd", "--no-defaults", lam="0.03")
    assert "10 of 10 lanes" in again.stdout
    assert len(records(out)) == 10


def test_two_sweeps_in_a_folder_are_shown_as_one():
    first = plan("test_sweep:REGRESSION", lam=(0.1, 1.0), seeds=2, optimizers=("sgd",)).sweep
    then = plan("test_sweep:REGRESSION", lam=(0.1, 1.0), seeds=3, optimizers=("adam",)).sweep
    both = merged(first, then)
    assert (both.optimizers, both.lam, both.pairs) == (("sgd", "adam"), (0.1, 1.0), ())
    assert both.seeds == (0, 1, 2)
    assert both.defaults == (Setting("sgd", 0.001), Setting("adam", 0.001))
    finer = plan("test_sweep:REGRESSION", lam=(0.3,), seeds=1, optimizers=("adam",)).sweep
    more = merged(both, finer)
    assert more.grid("sgd") == (0.1, 1.0)
    assert more.grid("adam") == (0.1, 0.3, 1.0)


def test_a_lone_default_is_none_of_the_grid_once_its_optimizer_is_swept():
    usual = plan("test_sweep:REGRESSION", lam=(0.1, 1.0), seeds=1).sweep
    named = ("adamw", "wnmuon")
    swept = plan("test_sweep:REGRESSION", lam=(0.1, 1.0), seeds=1, optimizers=named).sweep
    assert usual.grid("wnmuon") == (0.3,)
    assert merged(usual, usual).grid("wnmuon") == (0.3,)
    for both in (merged(usual, swept), merged(swept, usual), merged(merged(usual, swept), usual)):
        assert both.grid("wnmuon") == (0.1, 1.0)
        assert both.lam == (0.1, 1.0)
        assert Setting("wnmuon", 0.3) in both.settings  # as its default
    one = plan("test_sweep:REGRESSION", lam=(0.3,), seeds=1, optimizers=named).sweep
    assert merged(one, swept).grid("wnmuon") == (0.1, 0.3, 1.0)  # a grid of one λ is a grid


def test_a_page_has_every_command_that_made_it_in_order(tmp_path):
    for name in ("sgd", "adam", "sgd"):
        assert sweep(tmp_path, LOADERS, "--optimizers", name).exit_code == 0
    start = "wngrad sweep mine.py --lam 0.01,0.1 --seeds 1 --device cpu --optimizers"
    out = tmp_path / "out/lines"
    assert f"```sh\n{start} sgd\n{start} adam\n```" in (out / "summary.md").read_text()
    page = (out / "report.html").read_text()
    assert f"<code>{start} sgd</code>, then <code>{start} adam</code>" in page


def test_a_folder_that_knows_its_last_command_alone_is_read(tmp_path):
    store = Store(tmp_path)
    asked = plan("test_sweep:REGRESSION", lam=(0.1,), seeds=1, optimizers=("sgd",))
    old = {"sweep": asked.sweep.to_json(), "notes": [], "command": "wngrad sweep mine.py"}
    store.place.write(store.folder / page_source.NAME, files.seal_json(old))
    assert page_source.read(store).commands == ("wngrad sweep mine.py",)


def test_a_schedule_holds_a_folder_to_its_epochs(tmp_path):
    text = LOADERS.replace("epochs=3", "epochs=3, schedule='linear'")
    assert sweep(tmp_path, text, "--optimizers", "sgd").exit_code == 0
    done = sweep(tmp_path, text, "--optimizers", "sgd", "--epochs", "4")
    assert done.exit_code == 2
    assert "(epochs: 3 there, 4 now)" in done.stderr
    plain = sweep(tmp_path, LOADERS, "--optimizers", "sgd", "--out", "plain")
    assert plain.exit_code == 0
    longer = sweep(tmp_path, LOADERS, "--optimizers", "sgd", "--out", "plain", "--epochs", "4")
    assert "n = 1 seed, 4 epochs" in longer.stdout, longer.stderr


# ------------------------------------------------------------------------------ what is lost


def peers(*losses: float) -> list[Record]:
    lane = Lane("sgd", 0.1, 0)
    return [Record(lane, "done", "", None, {"valid_loss": [4.0, loss]}) for loss in losses]


def test_a_run_is_lost_when_it_has_diverged_or_is_worse_than_the_median():
    five = peers(1, 2, 3, 4, 5)
    nan = math.nan
    assert lost("", [nan], 8, five, "valid_loss") == ""
    assert lost("diverged", [1.0, nan], 8, [], "valid_loss") == "stopped: it had diverged"
    assert lost("diverged", [9.0, 9.0], 8, five, "valid_loss") == ""
    assert "median" in lost("median", [9.0, 3.5], 8, five, "valid_loss")
    assert lost("median", [9.0, 2.5], 8, five, "valid_loss") == ""
    assert lost("median", [9.0], 8, five, "valid_loss") == ""  # a quarter of its epochs first
    assert lost("median", [9.0, 9.0], 8, five[: STARTUP - 1], "valid_loss") == ""
    assert lost("median", [9.0, 9.0], 2, five, "valid_loss") == ""  # it is done


@pytest.mark.parametrize("text", [TRAIN, LOADERS])
def test_runs_that_diverge_are_ended_and_the_time_saved_is_shown(text, tmp_path):
    words = ("--optimizers", "sgd", "--no-defaults", "--epochs", "6", "--stop", "diverged")
    done = sweep(tmp_path, text, *words, lam="0.1,1e30")
    assert done.exit_code == 0, done.stderr
    assert "It has ended 1 run, and saved about" in done.stdout
    (out,) = (tmp_path / "out").iterdir()
    ends = {r["lam"]: (r.get("ended", ""), r["diverged_at"]) for r in records(out).values()}
    assert ends[1e30][0] == "stopped: it had diverged"
    assert ends[1e30][1] < 6
    summary = (out / "summary.md").read_text()
    assert "Stopping rule: a run whose loss is not finite is ended." in summary
    assert "1 of 2 |" in summary  # diverged
    entries = [json.loads(x) for x in (out / "sessions.jsonl").read_text().splitlines()]
    assert read_costs(entries).stopped == 1


def test_runs_that_train_as_one_program_are_never_ended_and_the_page_says_so(tmp_path):
    words = ("--optimizers", "sgd", "--no-defaults", "--stop", "diverged")
    done = sweep(tmp_path, TENSORS, *words, lam="0.1,1e30")
    assert "--stop diverged: runs that train as one program are never ended" in done.stdout
    summary = (tmp_path / "out/pairs/summary.md").read_text()
    assert "It has ended no run. Runs that train as one program are never ended" in summary
    other = sweep(tmp_path, TENSORS, *words, "--program", "lone", "--out", "o", lam="0.1,1e30")
    assert "never ended" not in other.stdout
    assert "It has ended 1 run, and" in other.stdout, other.stdout


def test_the_median_ends_runs_that_are_behind_and_keeps_the_others(tmp_path):
    words = ("--optimizers", "sgd", "--no-defaults", "--stop", "median", "--epochs", "4")
    lam = "0.1,0.2,0.3,0.15,0.25,0.00001"
    assert sweep(tmp_path, LOADERS, *words, lam=lam).exit_code == 0
    ends = {r["lam"]: r.get("ended", "") for r in records(tmp_path / "out/lines").values()}
    assert ends.pop(0.00001) == "stopped: worse than the median of finished runs"
    assert set(ends.values()) == {""}
    assert (
        f"once there are {STARTUP} of them and 25 %"
        in (tmp_path / "out/lines/summary.md").read_text()
    )


# -------------------------------------------------------------------------------- the door


@pytest.mark.parametrize("kind", ["tensors", "loaders", "train"])
def test_a_file_to_start_from_is_written_and_can_be_planned(kind, tmp_path, monkeypatch):
    done = wngrad(tmp_path, "sweep", "--init", kind)
    assert done.exit_code == 0, done.stderr
    assert f"Next: wngrad sweep my_{kind}.py" in done.stdout
    twice = wngrad(tmp_path, "sweep", "--init", kind)
    assert twice.exit_code == 2
    assert f"my_{kind}.py is there already" in twice.stderr
    short = ["--lam", "0.1", "--seeds", "1", "--epochs", "1", "--optimizers", "wngrad"]
    done = wngrad(tmp_path, "sweep", f"my_{kind}.py", *short, "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    assert list((tmp_path / "out").glob("*/report.html"))


@pytest.mark.parametrize("words", [["--init"], ["--init", "--seeds", "2"]])
def test_init_alone_lists_the_kinds_of_files(words, tmp_path):
    done = wngrad(tmp_path, "sweep", *words)
    assert done.exit_code == 0, done.stderr
    for kind in ("tensors", "loaders", "train"):
        assert f"wngrad sweep --init {kind}" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "`task` must be given: file.py or module:name; --init writes a file to start from"),
        (["--init", "loader"], "`--init` must be tensors, loaders, train, got 'loader'. Did you"),
        (
            ["mine.py", "--stop", "medium"],
            "`--stop` must be none, diverged, median, got 'medium'",
        ),
        (["mine.py", "--program", "stacked"], "`program` must be auto for mine.py, got 'stacked'"),
        (["mine.py:missing"], "has no attribute 'missing'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(words, said, tmp_path):
    (tmp_path / "mine.py").write_text(TRAIN)
    done = wngrad(tmp_path, "sweep", *words)
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_dry_run_of_a_function_says_that_its_time_is_not_known(tmp_path):
    done = sweep(tmp_path, TRAIN, "--dry-run", "--optimizers", "sgd", "--no-defaults")
    assert done.exit_code == 0, done.stderr
    assert "2 runs of a function, 1 at a time: how long one takes is not known." in done.stdout
    loop = sweep(tmp_path, LOADERS, "--dry-run", "--optimizers", "sgd", "--no-defaults")
    assert "2 lanes of 3 epochs in 2 packs" in loop.stdout, loop.stderr


def test_init_writes_to_out_and_not_to_two_files(tmp_path):
    done = wngrad(tmp_path, "sweep", "--init", "train", "--out", "bar.py")
    assert done.exit_code == 0, done.stderr
    assert "Wrote bar.py" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["bar.py"]
    both = wngrad(tmp_path, "sweep", "foo.py", "--init", "train", "--out", "baz.py")
    assert both.exit_code == 2
    assert "`--init` writes one file, got foo.py and, as `--out`, baz.py." in both.stderr


def test_the_page_of_a_folder_may_be_written_elsewhere(tmp_path):
    assert sweep(tmp_path, TRAIN, "--optimizers", "sgd").exit_code == 0
    page = tmp_path / "out/mine/report.html"
    page.unlink()
    done = wngrad(tmp_path, "report", "out/mine", "--out", "elsewhere")
    assert done.exit_code == 0, done.stderr
    assert "Wrote elsewhere/report.html" in done.stdout
    assert (tmp_path / "elsewhere/records.jsonl").exists()
    assert not page.exists()
    two = wngrad(tmp_path, "report", "out/mine", "--records", "other")
    assert two.exit_code == 2
    assert "`--records` must be left out for a folder" in two.stderr


def test_a_folder_that_is_no_sweeps_is_told(tmp_path):
    (tmp_path / "empty").mkdir()
    for name, said in (("out/nope", "out/nope is not there"), ("empty", "without the page.json")):
        told = wngrad(tmp_path, "report", name)
        assert told.exit_code == 2
        assert said in told.stderr
        assert told.stderr.count("\n") == 1
    done = wngrad(tmp_path, "report", "nothing-here")
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
