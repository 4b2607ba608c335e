"""The benchmark of a step: its arithmetic, its targets, what it says, and a small run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import step
from steps import contestants, race, report, sets, targets
from steps.clocks import HostClock


def row(label: str, **measured: Any) -> dict[str, Any]:
    name, _, way = label.partition(" ")
    times = {
        k: {"median": v, "low": v, "high": v, "n": 3}
        for k, v in measured.items()
        if k in ("step", "wall", "moved", "graph")
    }
    bare = {"floor": 2e-3, "over floor": None, "extra bytes": None, "failed": "", "no graph": ""}
    bare |= {"state bytes per parameter": 0.0}
    return {"label": label, "name": name, "way": way, **bare, **measured, **times}


def result(*rows: dict[str, Any], **changed: Any) -> dict[str, Any]:
    bandwidth = {"median": 4e12, "low": 3e12, "high": 5e12, "n": 5}
    about = {"set": "llama", "dtype": "fp32", "device": "cuda", "parameters": 1000, "tensors": 2}
    about |= {"bytes": 4000, "bandwidth": bandwidth, "rounds": 3}
    return {**about, "rows": list(rows), **changed}


def verdict(text: str, *results: dict[str, Any]) -> dict[str, Any]:
    (found,) = (v for v in targets.verdicts(list(results)) if v["target"] == text)
    return found


# ------------------------------------------------------------------------ what is stepped


def test_three_passes_over_a_billion_floats_take_three_times_their_bytes_over_the_bandwidth():
    assert sets.floor_seconds(10**9, 4, 3, 4e12) == pytest.approx(3e-3)
    assert sets.floor_seconds(10**9, 2, 5, 4e12) == pytest.approx(2.5e-3)


def test_the_sets_are_as_large_as_the_networks_they_are_named_after():
    sizes = {name: sets.count(shapes()) for name, shapes in sets.SETS.items()}
    assert sizes["llama"] == 1_235_814_400  # Llama-3.2-1B's own count
    assert sizes["llama-hidden"] == 16 * (2 * 2048**2 + 2 * 512 * 2048 + 3 * 8192 * 2048)
    assert sizes["mlp"] == 784 * 100 + 100 * 10
    assert round(sizes["38M"] / 1e6) == 38
    assert sizes["resnet18"] == 11_173_962


def test_gradients_move_and_parameters_come_back():
    ground = sets.Field([(3, 5), (7,)], torch.float32, torch.device("cpu"))
    ground.reset()
    start = [p.detach().clone() for p in ground.params]
    with torch.no_grad():
        ground.params[0].add_(1)
    seen = set()
    for _ in range(20):
        ground.move()
        seen.add(tuple(p.grad.data_ptr() for p in ground.params))
    assert len(seen) > 10
    ground.reset()
    assert all(torch.equal(p, q) for p, q in zip(ground.params, start, strict=True))


def test_parameters_that_are_not_finite_are_noticed():
    ground = sets.Field([(3,)], torch.float32, torch.device("cpu"))
    ground.check()
    with torch.no_grad():
        ground.params[0][1] = torch.inf
    with pytest.raises(FloatingPointError, match="no longer finite"):
        ground.check()


# ------------------------------------------------------------------------ who steps


def test_every_torch_optimizer_comes_in_three_ways_and_one_contestant_comes_twice():
    labels = [c.label for c in contestants.contestants("cuda")]
    assert len(set(labels)) == len(labels)
    assert {f"AdamW {way}" for way in ("fused", "foreach", "default")} < set(labels)
    assert {"WNGrad fused", "WNAdam plain", "Prodigy default", "SGD fused (again)"} < set(labels)


def test_a_contestant_that_fails_leaves_one_line_and_harms_nobody():
    odd = contestants.Contestant("Odd", "default", 3, "torch.optim:SGD", {"lr": -1.0}, None)
    (fine,) = (c for c in contestants.contestants("cpu") if c.label == "SGD default")
    found = race.race("mlp", "fp32", torch.device("cpu"), [odd, fine], 1, lambda line: None)
    assert found["rows"][0]["failed"].startswith("ValueError: Invalid learning rate: -1.0")
    assert found["rows"][1]["step"]["median"] > 0


def test_the_slow_step_now_and_then_unless_they_are_what_it_is_about():
    names = ("SGD default", "Adam fused", "Adam default", "WNGrad default")
    rows = [race.Row(c) for n in names for c in contestants.contestants("cpu") if c.label == n]
    for one, pace in zip(rows, (0.01, 0.05, 0.5, 0.5), strict=True):
        one.add("step", [pace])
    turns = [[one in race.due(rows, k) for k in range(4)] for one in rows]
    assert turns[1:3] == [[True, False, False, True], [True, False, False, False]]
    assert turns[0] == turns[3] == [True] * 4


def test_the_state_of_adam_is_two_numbers_a_parameter_and_a_count():
    p = torch.ones(10, requires_grad=True)
    p.grad = torch.ones(10)
    adam = torch.optim.Adam([p])
    adam.step()
    assert race.state_bytes(adam) == 2 * 10 * 4 + 4


def test_what_is_done_between_calls_is_not_counted(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("steps.clocks.time.perf_counter", lambda: now[0])

    def takes(duration):
        def work():
            now[0] += duration

        return work

    clock = HostClock.__new__(HostClock)
    assert clock.back_to_back(takes(2.0), 3, between=takes(5.0)) == pytest.approx(2.0)


# ------------------------------------------------------------------------ what is said


def test_a_target_that_is_met_says_so():
    found = verdict(
        "llama fp32: WNGrad fused over SGD fused, time ≤ 0.85",
        result(row("WNGrad fused", step=0.8), row("SGD fused", step=1.0)),
    )
    assert found["met"]
    assert found["ratio"] == pytest.approx(0.8)
    assert found["verdict"] == "met"


def test_a_target_that_is_missed_says_by_how_much():
    slow = row("WNGrad fused", step=2.12e-3 * 1.1, floor=2e-3)
    found = verdict("llama fp32: WNGrad fused over floor, time ≤ 1.06", result(slow))
    assert found["met"] is False
    assert found["verdict"] == "missed by 10.0%"


def test_a_target_whose_contestant_failed_is_not_measured():
    failed = row("WNGrad fused", step=1.0, failed="RuntimeError: no")
    found = verdict("llama fp32: WNGrad fused over floor, time ≤ 1.06", result(failed))
    assert found["verdict"] == "not measured"


def test_extra_memory_is_judged_against_the_bytes_of_the_parameters():
    text = "llama fp32: WNAdam fused over parameters, peak extra memory ≤ 0.01"
    none = verdict(text, result(row("WNAdam fused", **{"extra bytes": 0})))
    assert none["met"]
    much = verdict(text, result(row("WNAdam fused", **{"extra bytes": 4000})))
    assert much["ratio"] == 1.0


def test_targets_of_the_gpu_say_nothing_of_a_cpu():
    assert targets.verdicts([result(row("WNGrad fused", step=1.0), device="cpu")]) == []
    found = targets.verdicts([result(row("WNGrad default", step=1.0), set="38M", device="cpu")])
    assert [v["verdict"] for v in found] == ["not measured"] * 2


def test_the_table_has_a_row_for_everyone_and_every_row_has_all_columns():
    some = result(
        row("WNGrad fused", step=3.7e-3, wall=3.8e-3, **{"over floor": 1.03, "extra bytes": 5e6}),
        row("Adagrad fused", failed="RuntimeError: a | b"),
        row("DoG default", step=9e-3, **{"no graph": "cannot be captured"}),
    )
    lines = report.table(some).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1
    assert rows[2].startswith("| WNGrad fused | 3.70 (3.70–3.70) | 1.03 | 3.80 (3.80–3.80) | – ")
    assert "RuntimeError: a / b" in rows[3]
    assert lines[-1] == "No graph of DoG default: cannot be captured."


def test_the_noise_is_what_separates_two_runs_of_one_contestant():
    assert "= 1.100" in report.noise(
        result(row("SGD fused", step=1.0), row("SGD fused (again)", step=1.1))
    )


# ------------------------------------------------------------------------ a run


def test_a_small_run_writes_a_table_json_and_a_picture(tmp_path, capsys):
    record, drawn = tmp_path / "step.json", tmp_path / "step.png"
    names = ["--optimizers", "WNGrad", "SGD", "AdamW"]
    written = ["--json", str(record), "--picture", str(drawn)]
    step.main(["--device", "cpu", "--sets", "mlp", "--repeats", "3", *names, *written])
    printed = capsys.readouterr().out
    found = json.loads(record.read_text())
    assert "### mlp, bf16" in printed
    assert found["machine"]["torch"] == str(torch.__version__)
    assert "--repeats 3" in found["command"]
    for one in found["results"]:
        fine = [r for r in one["rows"] if not r["failed"]]
        assert {"WNGrad default", "SGD fused (again)"} < {r["label"] for r in fine}
        assert all(r["step"]["low"] <= r["step"]["median"] <= r["step"]["high"] for r in fine)
        assert all(r["step"]["n"] >= 3 and r["over floor"] > 0 for r in fine)
    assert drawn.read_bytes()[:4] == b"\x89PNG"


def test_a_mistake_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit, match="2"):
        step.main(["--repeats", "0"])
    assert "`--repeats` must be > 0, got 0." in capsys.readouterr().err
