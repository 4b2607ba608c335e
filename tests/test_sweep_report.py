"""What a sweep of one's own tells: the table, the page and the figure, from the records alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from wngrad.lab.report import builder, costs, figures, page
from wngrad.lab.report.dependence import Row, measure
from wngrad.lab.report.results import Results
from wngrad.lab.report.sensitivity import lr_sensitivity, usable_decades
from wngrad.lab.report.task import TaskReport
from wngrad.lab.train.spec import Lane, Record, Setting, Sweep

SWEEP = Sweep(
    name="mine", claim="Does it depend on λ?", dataset="mine", model="mine",
    optimizers=("sgd", "wngrad", "peers:Fast"), lam=(0.01, 0.1, 1.0, 10.0), epochs=2,
    seeds=(0, 1, 2), metrics=("test_loss", "test_score"), best_by="test_loss", task="mine.py",
    metric_name="R²", alone=("peers:Fast",),
)  # fmt: skip
START = 4.0
LOSS = {  # over λ; None: it diverges
    "sgd": (2.0, 1.0, 3.9, None),
    "wngrad": (2.0, 1.0, 1.0, 1.05),
    "peers:Fast": (3.0, 2.0, 2.0, 50.0),
}
Final = Callable[[Lane], "float | None"]


def final(lane: Lane) -> float | None:
    value = LOSS[lane.optimizer][SWEEP.lam.index(lane.lam)]
    return None if value is None else value + 0.01 * lane.seed


def record(lane: Lane, loss: float | None, score: float | None, start: float = START) -> Record:
    curves = {
        "train_loss": [start, loss],
        "test_loss": [start, loss],
        "test_score": [0.0, score],
    }
    at = 2 if loss is None else None
    before = {"test_loss": start, "test_score": 0.0}
    return Record(lane, "done", "", at, curves, {}, {"device": "a"}, before)


def records(value: Final = final, score: Final | None = None) -> list[Record]:
    out = []
    for lane in SWEEP.lanes:
        loss = value(lane)
        own = score(lane) if score else None if loss is None else 1 - loss / START
        out.append(record(lane, loss, own))
    return out


def row(results: Results, name: str) -> Row:
    return next(row for row in measure(results).rows if row.optimizer == name)


def cells(results: Results, name: str) -> dict[str, str]:
    """An optimizer's row of the table, by the heads of the columns."""
    report = TaskReport(results)
    index = SWEEP.optimizers.index(name)
    return dict(zip(report.heads(), report.rows()[index], strict=True))


def test_the_table_is_what_the_library_says_of_the_records():
    results = Results(SWEEP, records())
    measured = row(results, "wngrad")
    losses = [[final(Lane("wngrad", lam, seed)) for lam in SWEEP.lam] for seed in SWEEP.seeds]
    starts = [START] * 3
    assert measured.curves.sensitivity.mean == pytest.approx(
        lr_sensitivity(SWEEP.lam, losses, starts)
    )
    best = [1.0, 1.01, 1.02]  # of all, seed by seed
    assert measured.curves.decades == usable_decades(SWEEP.lam, losses, starts, best=best)
    assert measured.best.lam == 0.1
    # The limit of the mean curve is 1.01 + 5 % of 2.99; from 0.1 down it rises by 1 a decade.
    assert measured.curves.usable.low == pytest.approx(10**-1.1495)
    assert measured.curves.usable.open_high
    assert measured.curves.recommended == pytest.approx(math.sqrt(10**-1.1495 * 10))
    assert (measured.diverged, measured.lanes, measured.failed) == (0, 12, 0)


def test_on_cuda_the_memory_of_a_step_has_a_column_and_on_a_cpu_there_is_none():
    log = costs.read([
        {"costs": {"sgd": {"step_seconds": 0.25, "state_bytes": 0, "peak_bytes": 1_500_000}}},
        {"costs": {"sgd": {"step_seconds": 0.125, "state_bytes": 8, "peak_bytes": 1_400_000}}},
        {"costs": {"wngrad": {"step_seconds": 0.5, "state_bytes": 4, "peak_bytes": None}}},
    ])  # fmt: skip
    report = TaskReport(Results(SWEEP, records()), log=log)
    row = dict(zip(report.heads(), report.rows()[0], strict=True))
    shown = [row[head] for head in ("step time", "peak GPU memory", "optimizer state")]
    assert shown == ["125 ms", "1.5 MB", "8 B"]
    assert "Peak GPU memory: the most that torch had allocated" in report.legend()
    without = TaskReport(Results(SWEEP, records()))
    assert "peak GPU memory" not in without.heads()
    assert "GPU" not in without.legend()


def test_what_diverged_is_counted_and_never_best():
    measured = row(Results(SWEEP, records()), "sgd")
    assert (measured.diverged, measured.lanes) == (3, 12)
    assert measured.best.lam == 0.1
    assert not measured.curves.decades.at_least


def test_an_optimizer_that_is_never_near_the_best_of_all_has_no_recommended_lambda():
    results = Results(SWEEP, records())
    measured = row(results, "peers:Fast")
    assert measured.curves.recommended is None
    assert measured.curves.decades.value == 0.0
    assert cells(results, "peers:Fast") == {
        "optimizer": "peers:Fast",
        "test loss at default λ": "–",
        "test loss at best λ": "2.01 ± 0.01 (n = 3) at 0.1",
        "test R² there": "0.498 ± 0.0025 (n = 3)",
        "step time": "–",
        "optimizer state": "–",
        "recommended λ": "–",
        "sensitivity": "0.747 ± 0.0025 (n = 3)",  # (1 + 0 + 0 + 1.99)/4
        "usable decades [95 %]": "0.00 [0.00, 0.00]",
        "diverged lanes": "0 of 12",
    }


def test_failed_lanes_are_counted_and_leave_the_others_alone():
    whole = records()
    lost = [
        Record(r.lane, "failed", "TypeError: no lr", None, {}) if r.lane.optimizer == "sgd" else r
        for r in whole
    ]
    results = Results(SWEEP, lost)
    measured = row(results, "sgd")
    assert (measured.best, measured.curves, measured.failed) == (None, None, 12)
    assert cells(results, "sgd")["diverged lanes"] == "0 of 0; 12 failed"
    assert row(results, "wngrad") == row(Results(SWEEP, whole), "wngrad")
    assert sum("12 of 36 lanes failed" in line for line in results.left_out()) == 1


def test_a_seed_that_is_not_whole_is_left_out_of_what_needs_all_lambda():
    fewer = [r for r in records() if r.lane != Lane("wngrad", 1.0, 2)]
    assert row(Results(SWEEP, fewer), "wngrad").curves.decades.n == 2


def test_a_metric_that_is_nan_is_told_in_one_line_and_the_losses_stand():
    bad = Results(SWEEP, records(score=lambda lane: None if lane.optimizer == "sgd" else 0.5))
    said = [line for line in bad.left_out() if "R²" in line]
    assert len(said) == 1
    assert said[0].startswith("test R² is not a finite number in 9 of 36 lanes: sgd, λ = 0.01")
    good = Results(SWEEP, records())
    for name in SWEEP.optimizers:
        assert row(bad, name).best.lam == row(good, name).best.lam
        assert row(bad, name).curves.decades == row(good, name).curves.decades


def test_the_sentence_names_the_lowest_loss_and_the_widest_range():
    said = TaskReport(Results(SWEEP, records())).verdict()
    assert said.startswith("Lowest test loss: SGD, 1.01 ± 0.01 (n = 3) at λ = 0.1. Most")
    assert "Most usable decades: WNGrad, ≥ 2.1" in said
    nothing = Results(SWEEP, [Record(lane, "failed", "", None, {}) for lane in SWEEP.lanes])
    assert "No optimizer has a result" in TaskReport(nothing).verdict()


def test_an_optimizer_at_one_lambda_may_be_the_best_and_depends_on_nothing():
    pairs = [s for s in SWEEP.settings if s.optimizer != "peers:Fast"]
    sweep = replace(SWEEP, pairs=(*pairs, Setting("peers:Fast", 0.1)))

    def with_best(best: float) -> TaskReport:
        every = records(lambda lane: best if lane.optimizer == "peers:Fast" else final(lane))
        return TaskReport(Results(sweep, [r for r in every if r.lane in sweep.lanes]))

    report = with_best(0.95)
    assert "Lowest test loss: peers:Fast" in report.verdict()
    assert "Most usable decades: WNGrad" in report.verdict()
    assert with_best(0.1).verdict().endswith("No range of λ is usable.")
    cells = dict(zip(report.heads(), report.rows()[2], strict=True))
    for head in ("usable decades [95 %]", "sensitivity", "recommended λ"):
        assert cells[head] == "–"
        assert "–" not in (row[report.heads().index(head)] for row in report.rows()[1:2])
    grids = {each["name"]: each["grid"] for each in page._optimizers(report.results)}
    assert grids == {"sgd": [0, 1, 2, 3], "wngrad": [0, 1, 2, 3], "peers:Fast": [1]}
    assert "over 4 λ from 0.01 to 10" in report.legend()
    assert "An optimizer at its default alone has neither." in report.legend()
    assert "alone has neither" not in TaskReport(Results(SWEEP, records())).legend()


def test_a_lead_within_noise_is_called_so():
    """WNGrad's seeds go the other way: level in the mean, with noise in the difference."""

    def other(lane: Lane) -> float | None:
        value = final(lane)
        return value and (value + 0.02 - 0.02 * lane.seed if lane.optimizer == "wngrad" else value)

    said = TaskReport(Results(SWEEP, records(other))).verdict()
    assert "at λ = 0.1, within noise of WNGrad. Most" in said


def test_a_default_off_the_grid_may_be_the_lowest_and_is_what_usable_is_measured_from():
    sweep = replace(SWEEP, defaults=(Setting("wngrad", 0.3), Setting("sgd", 0.1)))

    def with_default(loss: float | None, seeds: int = 3) -> Results:
        lanes = [Lane("wngrad", 0.3, seed) for seed in range(seeds)]
        return Results(sweep, [*records(), *(record(lane, loss, 0.5) for lane in lanes)])

    results = with_default(0.5)
    said = TaskReport(results).verdict()
    assert said.startswith("Lowest test loss: WNGrad, 0.500 ± 0 (n = 3) at λ = 0.3, its default.")
    limit = 0.5 + 0.05 * (START - 0.5)
    assert measure(results).limit == pytest.approx(limit)
    for other in (with_default(None), with_default(0.5, seeds=2), with_default(2.0)):
        assert TaskReport(other).verdict().startswith("Lowest test loss: SGD, 1.01 ± 0.01 (n = 3)")
    level = "at λ = 0.1. Most"  # a default on the grid is a λ of the grid
    assert level in TaskReport(with_default(2.0)).verdict()


def test_what_is_as_wide_within_noise_or_cut_off_by_the_grid_is_named_beside_the_widest():
    falls = {
        "sgd": (3.9, 1.0, 1.0, 3.9),  # as wide in the mean, and its seeds go the other way
        "wngrad": (3.9, 1.0, 1.0, 3.9),
        "peers:Fast": (3.9, 3.9, 3.9, 1.0),
    }

    def final(lane: Lane) -> float:
        up = {"sgd": lane.seed, "wngrad": 2.1 - lane.seed}.get(lane.optimizer, 0)
        return falls[lane.optimizer][SWEEP.lam.index(lane.lam)] + 0.05 * up

    said = TaskReport(Results(SWEEP, records(final))).verdict()
    assert "Most usable decades: SGD, 1.07 [0.98, 1.15], within noise of WNGrad; of" in said
    assert said.endswith("; of peers:Fast the range reaches an end of the grid, and may be wider.")
    legend = TaskReport(Results(SWEEP, records(final))).legend()
    assert "Within noise: the mean difference, seed by seed, is less than two of its" in legend


def test_the_legend_says_whose_grid_and_how_many_seeds():
    pairs = [s for s in SWEEP.settings if s.optimizer != "wngrad" or s.lam in (0.1, 1.0)]
    sweep = replace(SWEEP, pairs=tuple(pairs))
    fewer = [r for r in records() if r.lane.optimizer == "sgd" or r.lane.seed < 2]
    report = TaskReport(Results(sweep, [r for r in fewer if r.lane in sweep.lanes]))
    legend = report.legend()
    assert "over 4 λ from 0.01 to 10 (SGD, peers:Fast); 2 λ from 0.1 to 1 (WNGrad);" in legend
    assert "± is one sample standard deviation over n = 2 to 3 seeds." in legend
    assert "over different grids they do not compare" in legend
    n = "(n\u00a0=\u00a03)"
    assert n in report.cards()[0]  # which n a cell has is then said in the cell
    whole = TaskReport(Results(SWEEP, records()))
    assert "over 4 λ from 0.01 to 10;" in whole.legend()
    assert "do not compare" not in whole.legend()
    assert n not in whole.cards()[0]


def test_a_sweep_with_a_lambda_of_zero_is_drawn_and_measured_without_it():
    sweep = replace(SWEEP, lam=(0.0, *SWEEP.lam))
    still = [record(Lane(name, 0.0, k), START, 0.0) for name in SWEEP.optimizers for k in range(3)]
    results = Results(sweep, [*records(), *still])
    report = TaskReport(results)
    assert row(results, "wngrad").curves.lam == list(SWEEP.lam)
    assert figures.draw(report).get_axes()[0].get_xscale() == "log"  # and warns of nothing
    assert page.render(report)
    only = TaskReport(Results(replace(SWEEP, lam=(0.0,)), still))
    assert figures.draw(only).get_axes()
    assert page.render(only)


def test_no_lambda_is_recommended_where_the_mean_is_not_usable_and_the_legend_says_so():
    """Of WNGrad one seed comes near the best, and their mean does not."""

    def final(lane: Lane) -> float:
        near = lane.optimizer == "sgd" or (lane.optimizer == "wngrad" and lane.seed == 0)
        return 1.0 if near and lane.lam == 1.0 else 3.0

    results = Results(SWEEP, records(final))
    curves = row(results, "wngrad").curves
    assert curves.decades.value > 0
    assert curves.recommended is None
    legend = TaskReport(results).legend()
    assert (
        "usable in the mean over the seeds; –: no λ is, though one may be for some seed" in legend
    )


def test_where_everything_diverged_the_sentence_says_that():
    report = TaskReport(Results(SWEEP, records(lambda lane: None)))
    assert report.verdict() == "Every run diverged."
    assert "hollow marker for" not in report.marks()  # there is nothing that one would stand for
    some = Results(SWEEP, records(lambda lane: None if lane.seed == 0 else 1.0))
    assert TaskReport(some).verdict() == "No optimizer has a λ at which no seed diverged."


def test_a_loss_is_drawn_up_to_three_times_that_of_the_start():
    report = TaskReport(Results(SWEEP, records()))
    on = report.axis("test_loss")
    assert (on.log, on.worst) == (True, 12.0)
    assert on.beyond(report.results.cell("peers:Fast", 10.0, "test_loss"))
    assert "a mean test loss above 12 or test R² below -0.747" in report.marks()


@pytest.mark.parametrize(("losses", "whole"), [((1.1, 2.0, 2.9), True), ((0.0, 0.0, 5.0), False)])
def test_bars_are_drawn_whole_and_a_foot_below_a_tenth_of_the_mean_is_left_out(losses, whole):
    def value(lane: Lane) -> float:
        return losses[lane.seed] if (lane.optimizer, lane.lam) == ("sgd", 0.1) else 2.0

    report = TaskReport(Results(SWEEP, records(value)))
    cell, on = report.results.cell("sgd", 0.1, "test_loss"), report.axis("test_loss")
    low, high = figures.draw(report).get_axes()[0].get_ylim()
    assert high > cell.mean + cell.sd
    assert on.foot(cell) == (on.bar(cell) if whole else 0.0)
    assert low < cell.mean - on.foot(cell)
    assert "On a logarithmic axis a bar that would reach below a tenth of" in report.marks()
    assert page._columns([cell], on)["foot"] == [float(f"{on.foot(cell):.5g}")]


def test_a_loss_below_zero_is_drawn_on_a_linear_axis():
    low = [record(r.lane, None if final(r.lane) is None else final(r.lane) - 3, 0.5, 1.0) for r in
           records()]  # fmt: skip
    report = TaskReport(Results(SWEEP, low))
    assert not report.axis("test_loss").log
    assert figures.draw(report).get_axes()[0].get_yscale() == "linear"
    assert page.render(report)


def test_the_summary_holds_the_table_how_it_was_run_and_the_command(tmp_path):
    how = ("sgd: stacked.", "peers:Fast: 12 separate runs: it is run as it is.")
    builder.write(SWEEP, records(), tmp_path, notes=how, recipe="wngrad sweep mine.py --seeds 3")
    text = (tmp_path / "summary.md").read_text()
    assert "| WNGrad | – | 1.01 ± 0.01 (n = 3) at 0.1 |" in text
    assert all(f"- {line}" in text for line in how)
    assert "```sh\nwngrad sweep mine.py --seeds 3\n```" in text
    assert "95 % interval over the seeds" in text


def test_a_sweep_of_which_every_lane_failed_still_has_a_report():
    lost = [Record(lane, "failed", "TypeError: no", None, {}) for lane in SWEEP.lanes]
    report = TaskReport(Results(SWEEP, lost))
    assert "36 of 36 lanes failed" in report.markdown()
    assert "36 of 36 lanes failed" in page.render(report)
    assert figures.draw(report).get_axes()
