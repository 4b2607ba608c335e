"""The experiment on fine-tuning: LoRA, what is trained when, the order of runs, and the page."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from experiments.finetune import __main__ as command
from experiments.finetune import page, tasks
from experiments.finetune.lora import LoRA, add_lora, plus_groups
from experiments.finetune.methods import METHODS, Lion
from experiments.finetune.plan import plan
from experiments.finetune.tasks import TASKS, FineTuning
from experiments.finetune.train import Folders, Trainer, state_bytes
from experiments.untuned.plan import Run
from experiments.untuned.tasks import Split
from wngrad import WNMuon


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def points(folder: Path | None, seed: int = 0) -> Split:
    rng = torch.Generator().manual_seed(seed)
    x, y = torch.randn(40, 4, generator=rng), torch.randint(3, (40,), generator=rng)
    return Split(x[:30], y[:30], x[30:], y[30:])


@pytest.fixture
def trainer(tmp_path):
    """Makes trainers of a small network that starts from a file."""
    torch.manual_seed(5)
    torch.save(classifier().state_dict(), tmp_path / "first.pt")
    base = FineTuning("tiny", "judging", "", classifier, points, 10, 8, source="first",
                      first=lambda folder: points(folder, 1))  # fmt: skip
    return lambda **more: Trainer(replace(base, **more), "cpu", Folders(None, tmp_path))


# ------------------------------------------------------------------------------------- LoRA


def test_lora_begins_as_the_layer_it_stands_beside_and_trains_a_and_b_alone():
    torch.manual_seed(0)
    layer = nn.Linear(5, 4)
    x = torch.randn(3, 5)
    lora = LoRA(layer, rank=2, alpha=6)
    assert torch.equal(lora(x), layer(x))
    nn.init.ones_(lora.b.weight)
    torch.testing.assert_close(lora(x), layer(x) + 3 * x @ (lora.b.weight @ lora.a.weight).T)
    assert [name for name, p in lora.named_parameters() if p.requires_grad] == [
        "a.weight",
        "b.weight",
    ]


def test_lora_plus_groups_hold_every_a_and_b_at_their_rates():
    model = add_lora(classifier(), 2, 2)
    groups = plus_groups(model, 0.3)
    assert [(len(group["params"]), group["lr"]) for group in groups] == [(2, 0.3), (2, 4.8)]
    assert sum(p.requires_grad for p in model.parameters()) == 4


def test_lion_is_its_equations():
    x = nn.Parameter(torch.tensor([1.0, -2.0]))
    opt = Lion([x], 0.1, weight_decay=0.5)
    for g in ([2.0, -3.0], [-10.0, 1.0]):
        x.grad = torch.tensor(g)
        opt.step()
    # Signs of g, then of 0.9·m + 0.1·g with m = 0.01·(2, −3): −, +.
    expected = torch.tensor([(1 * 0.95 - 0.1) * 0.95 + 0.1, (-2 * 0.95 + 0.1) * 0.95 - 0.1])
    torch.testing.assert_close(x.detach(), expected)


# ------------------------------------------------------------------------------------ a run


def test_a_run_starts_from_the_file_and_says_what_is_forgotten(trainer, tmp_path):
    made = trainer()
    still = made.run(METHODS["adamw"], 0.0, 0, 2)
    model = classifier()
    model.load_state_dict(torch.load(tmp_path / "first.pt", weights_only=True))
    for key, seed in (("loss", 0), ("first_loss", 1)):
        split = points(None, seed)
        expected = nn.functional.cross_entropy(model(split.test_x), split.test_y).item()
        assert still[key] == pytest.approx(expected, rel=1e-5)
    assert made.run(METHODS["adamw"], 0.01, 0, 10)["first_loss"] != still["first_loss"]


@pytest.mark.parametrize("name", ["finetune", "adamw", "lion", "muon"])
def test_the_head_alone_is_trained_first(trainer, name):
    made = trainer(mode="head-first")
    model, method = made.gradient.model, METHODS[name]
    moved: list[list[bool]] = []
    before: list[torch.Tensor] = []

    def build(*arguments: Any) -> Any:
        opt = method.build(*arguments)
        step = opt.step

        def look(*more: Any) -> Any:
            before[:] = [p.detach().clone() for p in model.parameters()]
            result = step(*more)
            pairs = zip(model.parameters(), before, strict=True)
            moved.append([not torch.equal(p, q) for p, q in pairs])
            return result

        opt.step = look
        return opt

    made.run(replace(method, build=build), method.defaults[0], 0, 10)
    assert moved[:2] == [[False, False, True, True]] * 2
    assert moved[3:] == [[True] * 4] * 7


def test_the_seed_draws_a_of_lora_and_the_start_stays(trainer):
    made = trainer(mode="lora-2-2")
    first, second = made.task.network(0), made.task.network(1)
    assert torch.equal(first[0].base.weight, second[0].base.weight)
    assert not torch.equal(first[0].a.weight, second[0].a.weight)


def test_the_bytes_of_state_are_those_of_all_its_tensors():
    model = nn.Linear(4, 3)
    opt = WNMuon(model, finetune=True, average=None)
    model(torch.ones(1, 4)).sum().backward()
    opt.step()
    matrix, vector = 12 + 3 + 1 + 1, 3 + 3 + 3 + 3 + 1  # m, b, t, norm; m, rms, b, t, norm
    assert state_bytes(opt) == 4 * (matrix + vector)


# ------------------------------------------------------------------------- plan and records


def record(run: Run, loss: float, **more: Any) -> dict[str, Any]:
    known = {"device": "a core", "torch": "2", "wngrad": "1", "commit": "c"}
    values = {"loss": loss, "first_loss": 2 * loss, "accuracy": None, "state_bytes": 1e6}
    times = {"step_ms": 2.0, "optimizer_ms": 0.5, "precision": "float32", "curve": []}
    return {**asdict(run), **values, **times, "diverged": False, "environment": known, **more}


def test_the_most_telling_runs_come_first_and_other_seeds_later():
    wanted = plan(tasks.find([]), [], [], 3)
    runs = wanted.missing({})
    assert len(runs) == len(set(runs))
    first = wanted.first(runs)
    assert {run.task for run in first} == {
        f"{pair}.{mode}"
        for pair in ("python-shakespeare", "shakespeare-python")
        for mode in ("full", "lora-8-8")
    }
    assert {(run.seed, run.steps) for run in first} == {(0, 500)}
    rivals = ("prodigy", "dadapt", "schedulefree", "adamw", "lion", "muon")
    installed = {name for name in rivals if not METHODS[name].missing()}
    assert {"finetune", *installed} <= {run.method for run in first}
    seeds = [run.seed for run in runs if run.lam in METHODS[run.method].defaults]
    assert seeds.index(1) > len(first)


def test_of_a_grid_only_the_best_rate_is_run_with_other_seeds():
    task = TASKS["python-shakespeare.full"]
    wanted = plan([task], ["lion"], ["tuned"], 2)
    lams = METHODS["lion"].lams
    runs = [Run(task.name, "lion", lam, 0, 500) for lam in lams]
    records = {run: record(run, 1 + abs(i - 5)) for i, run in enumerate(runs)}
    assert {run.lam for run in wanted.missing(records)} == {1e-4, lams[5]}  # the default, too
    assert {run.seed for run in wanted.missing(records)} == {1}


def test_the_page_ranks_ours_against_rivals_and_marks_the_best():
    task = "python-shakespeare.full"
    pairs = [(m.name, lam) for m in METHODS.values() for lam in m.defaults if not m.only]
    order = {pair: i for i, pair in enumerate(pairs)}
    runs = {Run(task, *pair, 0, 500): order[pair] for pair in pairs}
    results = page.Results({run: record(run, 1.0 + i) for run, i in runs.items()}, {})
    regions = page.regions(results)
    ranks = {line.split("|")[1].strip(): line.split("|")[2].strip() for line in regions["ranks"]}
    assert ranks["WNMuon, `finetune=True`"] == "1.0 (1)"
    assert ranks["WNMuon"] == "1.0 (1)"  # against rivals alone
    assert ranks["Prodigy"] == "2.0 (1)"
    assert "| WNMuon, `finetune=True` | **1.000 (n = 1)** |" in regions["defaults"]
    assert "| WNMuon, `finetune=True` | **2.000 (n = 1)** |" in regions["forgetting"]


def test_a_run_that_diverged_is_said_to_have():
    run = Run("python-shakespeare.full", "adamw", 1e-3, 0, 500)
    results = page.Results({run: {**record(run, 0.0), "loss": None, "diverged": True}}, {})
    assert any("diverged" in line for line in page.regions(results)["defaults"])


def test_the_published_page_is_what_its_records_say(tmp_path):
    root = Path(__file__).parents[1]
    copy = tmp_path / "page.md"
    copy.write_text((root / "docs/fine-tuning.md").read_text())
    page.write(root / "results/finetune", copy)
    assert copy.read_text() == (root / "docs/fine-tuning.md").read_text()


def test_a_plan_is_listed_and_mistakes_are_one_line(tmp_path, capsys):
    assert command.main(["--plan", "--seeds", "1", "--out", str(tmp_path)]) == 0
    assert "defaults: python-shakespeare.full, finetune, 0.3, 0, 500" in capsys.readouterr().out
    assert command.main(["--tasks", "nothing", "--plan"]) == 2
    assert command.main(["--report", "--out", str(tmp_path)]) == 2
    assert "must be a folder with records" in capsys.readouterr().err
