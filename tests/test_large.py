"""Beyond ten million parameters: one pass, the order of runs, going on, records, the report."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from experiments.large import __main__ as command
from experiments.large import corpus, plan, report
from experiments.large.plan import DECAY, RATES, Run
from experiments.large.train import Size, Trainer, build

STEPS, TEST_BYTES = 12, 256
SIZE = Size(width=8, layers=1, heads=2, context=16, batch=4)
RUNS = 1 + 2 * len(RATES) + 2 + 2 * 2 + 2 * 2


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Forty files, one of them twice, and some that are no text."""
    folder = tmp_path_factory.mktemp("texts")
    for k in range(40):
        (folder / f"{k}.py").write_text(f"x_{k} = {k * k}\n" * 12)
    (folder / "copy.md").write_bytes((folder / "0.py").read_bytes())
    (folder / "empty.py").touch()
    (folder / "data.bin").write_bytes(b"\1" * 500)
    inner = folder / "site-packages"
    inner.mkdir()
    (inner / "other.py").write_text("of a package\n")
    return folder


@pytest.fixture(scope="module")
def trainer(texts):
    text = corpus.load([texts], TEST_BYTES)
    return Trainer(SIZE, text, "cpu", test_bytes=TEST_BYTES, compiled=False)


def arguments(texts, out, *more):
    sizes = [f"--{name}={value}" for name, value in asdict(SIZE).items()]
    common = [f"--out={out}", f"--text={texts}", f"--steps={STEPS}", f"--test-bytes={TEST_BYTES}"]
    return [*common, *sizes, "--device=cpu", "--no-compile", *more]


def fake(run, loss):
    return {"loss": loss, "wall_seconds": 1.0, "steps": run.steps}


# ------------------------------------------------------------------------------- the text


def test_a_text_is_the_same_every_time_and_no_file_is_in_it_twice(texts):
    one, other = (corpus.load([texts], TEST_BYTES) for _ in range(2))
    assert one.facts == other.facts
    assert torch.equal(one.train, other.train)
    assert one.facts["files"] == 40  # neither the copy, nor the empty file, nor a nested package
    train, test = (bytes(part.tolist()).split(b"\0") for part in (one.train, one.test))
    assert not set(train) & set(test)
    assert one.facts["test_bytes"] >= TEST_BYTES
    assert len(set(train)) + len(set(test)) == 40


def test_a_text_ends_at_its_limit(texts, monkeypatch):
    monkeypatch.setattr(corpus, "MOST", 2_000)
    facts = corpus.load([texts], TEST_BYTES).facts
    assert 1_500 < facts["train_bytes"] + facts["test_bytes"] < 2_100


def test_one_pass_sees_no_byte_twice_and_a_seed_gives_its_batches(trainer):
    runs = [Run("wnmuon", None, None, seed, STEPS) for seed in (0, 0, 1)]
    one, same, other = (trainer._starts(run) for run in runs)
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.shape == (STEPS, SIZE.batch)
    assert len(one.unique()) == one.numel()
    assert bool((one % SIZE.context == 0).all())


def test_a_text_that_is_too_short_for_one_pass_is_refused(texts, tmp_path, capsys):
    assert command.main([*arguments(texts, tmp_path), "--steps=1000"]) == 2
    assert "one pass of 1000 steps must have 64001 bytes" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------- the plan


def test_the_order_of_runs_follows_the_records():
    """WNMuon, both grids, its other seeds; then seeds and decays where a rival was best."""
    records, order = {}, []
    while run := plan.missing(records, STEPS):
        best = {"muon": 3e-3, "adamw": 3e-4}.get(run.method)
        records[run] = fake(run, 1.0 if run.rate == best else 2.0)
        order.append(run)
    assert len(order) == len(set(order)) == RUNS
    assert order[0] == Run("wnmuon", None, None, 0, STEPS)
    assert {run.rate for run in order[1:11]} == set(RATES)
    assert [run.seed for run in order[11:13]] == [1, 2]
    late = [(run.method, run.rate) for run in order[13:]]
    assert late == [("muon", 3e-3), ("adamw", 3e-4)] * 4
    assert [run.decay for run in order[13:]] == [DECAY] * 4 + [0.0333] * 2 + [0.3] * 2


def test_a_diverged_run_is_never_the_best():
    runs = [Run("adamw", rate, DECAY, 0, STEPS) for rate in RATES]
    records = {run: fake(run, None) for run in runs}
    records[runs[-1]] = fake(runs[-1], 5.0)
    assert plan.best_rate(records, "adamw", STEPS) == RATES[-1]


# ------------------------------------------------------------------------------- training


def test_all_methods_start_from_the_same_weights(trainer):
    trainer._initialize(0)
    first = [p.clone() for p in trainer.model.parameters()]
    trainer.train(Run("muon", 1e-2, DECAY, 1, STEPS))
    trainer._initialize(0)
    assert all(map(torch.equal, first, trainer.model.parameters()))
    tables = [p for p in trainer.model.parameters() if p.ndim == 2]
    assert 0.015 < float(torch.cat([p.detach().flatten() for p in tables]).std()) < 0.025


def test_a_run_can_be_repeated(trainer):
    """The steps that warm up leave nothing behind."""
    runs = [trainer.train(Run("wnmuon", None, None, 0, STEPS)) for _ in range(2)]
    assert runs[0]["loss"] == pytest.approx(runs[1]["loss"], rel=1e-6)
    assert [row[0] for row in runs[0]["train"]] == list(range(1, STEPS + 1))
    assert [row[0] for row in runs[0]["test"]] == [10, 12]
    assert runs[0]["loss"] < 5.5  # ln 256 = 5.545 is guessing


def test_rivals_warm_up_fall_and_share_their_rate(trainer, monkeypatch):
    made = []
    keep = torch.optim.Optimizer.__init__

    def noted(self, *args, **settings):
        made.append(self)
        keep(self, *args, **settings)

    monkeypatch.setattr(torch.optim.Optimizer, "__init__", noted)
    step, _ = build(trainer.model, Run("muon", 1.0, DECAY, 0, 100))
    rates = []
    for t in (0, 4, 5, 99):
        step(t)
        rates.append({group["lr"] for opt in made for group in opt.param_groups})
    assert rates == [{0.2}, {1.0}, {1.0}, {1 / 95}]
    held = [p for opt in made for group in opt.param_groups for p in group["params"]]
    assert {id(p) for p in held} == {id(p) for p in trainer.model.parameters()}
    decays = {p.ndim: g["weight_decay"] for o in made for g in o.param_groups for p in g["params"]}
    assert decays == {1: 0.0, 2: DECAY}


def test_a_run_that_diverges_ends_at_a_test_and_is_recorded(trainer, tmp_path):
    run = Run("adamw", 1e30, DECAY, 0, STEPS)
    record = plan.append(tmp_path, run, trainer.train(run))
    assert record["diverged"]
    assert record["loss"] is None
    assert plan.read(tmp_path) == {run: record}


# ----------------------------------------------------------------------------- end to end


def test_runs_go_on_where_they_stopped_and_are_reported(texts, tmp_path, capsys):
    out, figures = tmp_path / "out", tmp_path / "figures"
    assert command.main(arguments(texts, out)) == 0
    whole = (out / plan.FILE).read_text().splitlines()
    assert len(whole) == RUNS
    for key in ("corpus", "environment", "size", "compiled", "warmup_seconds", "seconds"):
        assert key in json.loads(whole[0])
    (out / plan.FILE).write_text("\n".join(whole[:-2]) + "\n" + whole[-2][:50])  # as if killed
    assert command.main(arguments(texts, out)) == 0
    again = plan.read(out)
    assert [key_of(line) for line in whole] == list(again)
    assert command.main(arguments(texts, out)) == 0
    assert plan.read(out) == again
    assert capsys.readouterr().out.count("All runs have a record.") == 3

    pytest.importorskip("matplotlib")
    assert command.main(["report", f"--out={out}", f"--figures={figures}", f"--steps={STEPS}"]) == 0
    assert sorted(path.name for path in figures.iterdir()) == ["seconds.png", "steps.png"]
    table = (out / "table.md").read_text()
    assert "| WNMuon, nothing set | – | – |" in table
    assert table.count("| Muon |") == table.count("| AdamW |") == len(RATES) + 2
    assert "'s final loss" in table


def key_of(line):
    record = json.loads(line)
    return Run(*(record[name] for name in ("method", "rate", "decay", "seed", "steps")))


def test_no_run_begins_that_would_end_too_late(texts, tmp_path, capsys):
    assert command.main(arguments(texts, tmp_path, "--minutes=1e-9")) == 0
    assert "would not end in time" in capsys.readouterr().out
    assert not plan.read(tmp_path)


def test_records_of_another_text_or_size_are_refused(texts, tmp_path, trainer, capsys):
    run = Run("wnmuon", None, None, 0, STEPS)
    other = {**trainer.facts, "size": {"width": 16}, "wall_seconds": 1.0}
    plan.append(tmp_path, run, other)
    assert command.main(arguments(texts, tmp_path)) == 2
    assert "records of this size and text" in capsys.readouterr().err


def test_a_report_without_records_says_so(tmp_path, capsys):
    assert command.main(["report", f"--out={tmp_path}"]) == 2
    assert "records of 1000 steps" in capsys.readouterr().err


def test_seconds_of_wnmuon_are_set_against_what_a_rival_ends_at():
    def record(method, losses, seconds, rate=None):
        rows = [[10 * k, loss, seconds * k] for k, loss in enumerate(losses, 1)]
        run = {"loss": losses[-1], "test": rows, "train": rows, "seconds": rows[-1][2]}
        return {**run, "method": method, "rate": rate, "diverged": False}

    ours, adamw = (
        record("wnmuon", [3.0, 2.0, 1.0], 2.0),
        record("adamw", [4.0, 3.0, 2.5], 1.0, 1e-3),
    )
    chosen = {"wnmuon": [ours], "adamw": [adamw]}
    said = "WNMuon is tested below AdamW's final loss, 2.5000, "
    said += "after 20 steps and 133 % of its seconds."
    assert report._sentences(chosen, {"adamw": sorted(RATES)}) == [said]
    assert report._sentences(chosen, {"adamw": [3e-4, 1e-3]}) == [
        "AdamW has not run at 0.0001, 0.003, 0.01.",
        "AdamW's best rate is an end of those that ran.",
        said,
    ]
