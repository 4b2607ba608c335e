"""From records to a report: means and spreads, claims, pictures, and what must be said aloud."""

from __future__ import annotations

import io
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wngrad.lab.optimizers import OPTIMIZERS, SPARE_STYLES
from wngrad.lab.recipes import RECIPES
from wngrad.lab.report import builder, claims, figures, page
from wngrad.lab.report.cells import Cell, lead, more_is_better
from wngrad.lab.report.paper import PaperReport
from wngrad.lab.report.results import Results
from wngrad.lab.train.spec import Lane, Record, Sweep

AHEAD = claims.Ahead("WNGrad is ahead.", "test_loss", winner="wngrad", loser="sgd", lam=1.0)
SMALL = Sweep(
    name="small",
    claim="WNGrad is flat where SGD is not.",
    dataset="digits",
    model="mlp",
    optimizers=("sgd", "wngrad"),
    lam=(0.01, 0.1, 1.0, 10.0),
    epochs=3,
    seeds=(0, 1, 2),
    claims=(AHEAD,),
)
ENVIRONMENT = {"wngrad": "0.1.0", "commit": "abc", "device": "a <fast> one"}
LOSSES = {"sgd": 0.5, "wngrad": 0.2}


def spread(lane: Lane) -> float:
    """A loss for each optimizer, ± 0.01 over three seeds."""
    return LOSSES.get(lane.optimizer, 0.3) + 0.01 * (lane.seed - 1)


def records(
    sweep: Sweep = SMALL,
    final: Callable[[Lane], float | None] = spread,
    note: str = "",
    epochs: int | None = None,
) -> list[Record]:
    return [record(lane, final(lane), epochs or sweep.epochs, note) for lane in sweep.lanes]


def record(lane: Lane, final: float | None, epochs: int = 3, note: str = "") -> Record:
    """A loss that falls to `final`, also the error rate; None: it diverges at the last epoch."""
    fall: list[float | None] = [1.0 + k for k in range(epochs - 1, 0, -1)]
    accuracy = [0.1] * (epochs - 1) + [0.098 if final is None else max(0.0, 1 - final)]
    curves = {"train_loss": [*fall, final], "test_loss": [*fall, final], "test_accuracy": accuracy}
    made = {"precision": "float32", "data": "5eed", "note": note}
    return Record(lane, "done", "", epochs if final is None else None, curves, made, ENVIRONMENT)


def failed(lane: Lane, reason: str = "out of memory") -> Record:
    return Record(lane, "failed", reason, None, {}, {}, ENVIRONMENT)


def test_mean_and_spread_are_those_of_the_hand():
    cell = Cell.of("test_loss", [1.0, 2.0, 6.0])
    assert (cell.mean, cell.n) == (pytest.approx(3.0), 3)
    assert cell.sd == pytest.approx(math.sqrt(7.0))  # (4 + 1 + 9) / 2
    assert str(cell) == "3.00 ± 2.6 (n = 3)"


def test_the_spread_of_one_seed_is_a_dash():
    assert str(Cell.of("test_loss", [0.25])) == "0.250 (n = 1)"
    assert str(Cell.of("test_accuracy", [0.25])) == "25.00 % (n = 1)"


def test_a_mean_says_how_many_seeds_diverged():
    cell = Cell.of("test_loss", [1.0, math.nan, 3.0])
    assert str(cell) == "2.00 ± 1.4 (n = 2; 1 of 3 diverged)"
    assert str(Cell.of("test_loss", [math.nan] * 2)) == "diverged (2 of 2)"
    assert cell.cost == math.inf


@pytest.mark.parametrize(
    "metric",
    ["test_accuracy", "valid_answer_accuracy", "valid_certified_accuracy", "valid_score",
     "valid_power", "valid_lowered_return", "valid_timestep_return", "valid_f1", "valid_r2"],
)  # fmt: skip
def test_more_of_a_metric_is_better_unless_a_word_of_its_name_says_less(metric):
    assert more_is_better(metric)
    high, low = (Cell.of(metric, [value] * 2, range(2)) for value in (0.9, 0.5))
    assert lead(high, low).by > 0


@pytest.mark.parametrize(
    "metric",
    ["train_loss", "valid_logloss", "test_error", "valid_error_rate", "valid_errors", "valid_RMSE",
     "valid_mse", "valid_mae", "valid_ppl", "test_perplexity", "valid_wer", "valid_cer_clean",
     "valid_nll", "valid_fid", "valid_regret", "valid_distance", "valid_time", "valid_runtime",
     "valid_solver_steps", "valid_accuracy_loss"],
)  # fmt: skip
def test_less_of_a_loss_and_of_an_error_is_better(metric):
    assert not more_is_better(metric)


def test_huge_losses_neither_overflow_nor_raise():
    cell = Cell.of("train_loss", [1.7e308, 1.7e308])
    assert cell.mean == pytest.approx(1.7e308)


def test_a_network_of_nan_has_no_accuracy_though_it_guesses():
    results = Results(SMALL, records(final=lambda lane: None))
    assert results.cell("sgd", 1.0, "test_accuracy").mean is None
    assert results.cell("sgd", 1.0, "test_accuracy", epoch=2).mean == pytest.approx(0.1)


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=12, max_size=12))
def test_a_lambda_with_a_diverged_lane_is_never_best(finals):
    lanes = [lane for lane in SMALL.lanes if lane.optimizer == "sgd"]
    ended = dict(zip(lanes, finals, strict=True))
    best = Results(SMALL, [record(lane, ended[lane]) for lane in lanes]).best("sgd")
    sound = [x for x in SMALL.lam if all(ended[Lane("sgd", x, s)] is not None for s in SMALL.seeds)]
    assert best.lam in sound if sound else best is None


def test_numbers_are_taken_at_the_last_epoch_that_every_lane_reached():
    young = [record(lane, 0.3, epochs=2) for lane in SMALL.lanes[:1]]
    results = Results(SMALL, [*young, *records()[1:]])
    assert results.epochs == 2
    assert results.cell("wngrad", 1.0, "train_loss").mean == pytest.approx(2.0)
    assert "at epoch 2, the last that every lane reached; the sweep asks for 3" in " ".join(
        results.left_out()
    )


def test_a_later_record_of_a_lane_replaces_the_earlier():
    lane = SMALL.lanes[0]
    results = Results(SMALL, [failed(lane), record(lane, 0.3)])
    assert (len(results.done), results.failed) == (1, [])


def test_missing_failed_and_foreign_lanes_are_said():
    first, second = SMALL.lanes[:2]
    said = " ".join(
        Results(SMALL, [record(first, 0.3), failed(second), failed(Lane("x", 1, 0))]).left_out()
    )
    assert "22 of 24 lanes have not been run: all of seed 1; all of seed 2; sgd, λ = 1, " in said
    assert "; and 2 more" in said
    assert "1 of 24 lanes failed: sgd, λ = 0.1, seed 0 (out of memory)" in said
    assert "Records of lanes that this sweep does not have, not used: 1." in said


def test_the_papers_rounded_lambdas_are_found_in_the_grid():
    results = Results(RECIPES["figure-1"], records(RECIPES["figure-1"]))
    assert results.nearest(0.056) == 10**-1.25
    assert results.nearest(17.8) == 10**1.25
    with pytest.raises(ValueError, match=r"report: `lam` must be a λ of .* got 0\.3; the nearest"):
        results.nearest(0.3)


# Claims, each against hand-made losses (the test accuracy is one minus the loss).

TRAINS = claims.Trains("", "wngrad", "sgd", up_to=10.0)
OVER = claims.AheadOver("", "test_accuracy", "wngrad", "sgd", lo=0.1, hi=10)
LEVEL = claims.Level("", "test_loss", "wngrad", "sgd", below=1.0, within=0.05)
BEST = claims.BestAt("", "test_accuracy", "sgd", 0.1)
WAY = claims.AlongTheWay("", "test_loss", "wngrad", "sgd", share=0.3)
ROBUST = claims.MoreRobust("", "wngrad", "sgd", within=0.05)
STILL = claims.Generalizes("", "sgd", 10.0, within=0.1)
FLAT = claims.Flat("", "test_loss", "wngrad")


def steep(lane: Lane) -> float | None:
    """SGD is best at 0.1, poor above, and diverges at 10; WNGrad is flat."""
    sgd = {0.01: 0.6, 0.1: 0.2, 1.0: 2.4, 10.0: None}
    base = sgd[lane.lam] if lane.optimizer == "sgd" else 0.21
    return None if base is None else base + 0.002 * lane.seed


def alike(lane: Lane) -> float:
    return 0.3 + 0.002 * lane.seed


def paired(lane: Lane) -> float:
    """Seeds differ far more than the optimizers, which differ alike in each: no noise."""
    return 0.3 + 0.1 * lane.seed + (0.01 + 1e-4 * lane.seed) * (lane.optimizer == "sgd")


def crossed(lane: Lane) -> float:
    """Ahead by a little in the mean, but not in every seed."""
    return 0.3 + (0.05 * lane.seed - 0.04) * (lane.optimizer == "sgd")


CASES = [
    (AHEAD, spread, True, "WNGrad 0.200 (n = 3), SGD 0.500 (n = 3): ahead by 0.300 ± "),
    (AHEAD, lambda lane: 0.7 - spread(lane), False, "WNGrad 0.500"),
    (AHEAD, crossed, True, "noise"),
    (replace(AHEAD, lam=0.1), paired, True, "SGD 0.410 (n = 3): ahead by 0.0101 ± 5.8e-05 ("),
    (replace(AHEAD, lam=10.0), steep, True, "SGD diverged (3 of 3)"),
    (AHEAD, lambda lane: None, False, "diverged (3 of 3)"),
    (AHEAD, lambda lane: None if lane.seed == 1 else spread(lane), False, "1 of 3 diverged"),
    (OVER, spread, True, "ahead at 3 of 3 λ; narrowest at λ = 0.1: ahead by 30.00 ± 0.00 %"),
    (OVER, steep, False, "ahead at 2 of 3 λ, not at λ = 0.1"),
    (LEVEL, alike, True, "level at 2 of 2 λ"),
    (LEVEL, spread, False, "level at 0 of 2 λ; widest at λ = 0.01: WNGrad is ahead by 0.300"),
    (BEST, steep, True, "best at λ = 0.1: test accuracy 79.80 % (n = 3); at 0.01: 39.80 % (n = 3)"),
    (BEST, alike, False, "best at λ = 0.01: test accuracy 69.80 % (n = 3); at 0.1: 69.80 % (n"),
    (WAY, spread, True, "ahead in 1 of 3 epochs; at the end ahead by 0.300"),
    (replace(WAY, share=0.9), spread, False, "ahead in 1 of 3 epochs"),
    (TRAINS, steep, True, "SGD trains at 2 of 4 λ, not at λ = 1, 10; 3 of 12 lanes diverged, at "),
    (TRAINS, spread, False, "WNGrad trains at 4 of 4 λ; the worst seed ends at 0.210, at λ = "),
    (TRAINS, spread, False, "SGD trains at 4 of 4 λ"),
    (ROBUST, steep, True, "WNGrad at 4 of 4 λ (0.01, 0.1, 1, 10), SGD at 1 of 4 λ (0.1)"),
    (ROBUST, alike, False, "SGD at 4 of 4 λ"),
    (
        STILL,
        alike,
        True,
        "69.80 % (n = 3); the best is 69.80 % (n = 3), SGD at λ = 0.01: behind by",
    ),
    (STILL, steep, False, "diverged (3 of 3); the best is 79.80"),
    (FLAT, steep, True, "lowest 0.212 (n = 3), highest 0.212 (n = 3), over 4 λ: the lowest is "),
    (FLAT, lambda lane: 0.1 + 0.1 * lane.lam, False, "highest 1.10"),
]


@pytest.mark.parametrize(("claim", "final", "holds", "said"), CASES)
def test_a_claim_is_judged_by_its_rule(claim, final, holds, said):
    finding = claim.measure(Results(SMALL, records(final=final)))
    assert finding.holds is holds, finding.measured
    assert said in finding.measured
    assert finding.n >= 3
    assert finding.rule
    assert "{" not in finding.rule


@pytest.mark.parametrize("claim", dict.fromkeys(case[0] for case in CASES))
def test_a_claim_whose_lanes_are_missing_is_not_judged(claim):
    finding = claim.measure(Results(SMALL, [record(Lane("adam", 1.0, 0), 0.1), *records()[:1]]))
    assert (finding.holds, finding.n, finding.verdict) == (None, 0, "cannot be judged")
    assert finding.measured.startswith("no run of ")


def test_a_claim_about_bests_is_not_judged_where_everything_diverged():
    results = Results(SMALL, records(final=lambda lane: None))
    assert "has no λ at which no seed diverged" in WAY.measure(results).measured
    assert ROBUST.measure(results).holds is None


def test_one_diverged_seed_loses_against_none():
    finals = {"sgd": 0.9, "wngrad": 0.1}
    lost = records(
        final=lambda lane: None if lane == Lane("wngrad", 1.0, 2) else finals[lane.optimizer]
    )
    finding = AHEAD.measure(Results(SMALL, lost))
    assert finding.holds is False
    assert "1 of 3 diverged" in finding.measured


# Recipes.


def test_the_recipes_have_the_sizes_of_the_paper():
    sizes = {name: (len(s.lanes), s.epochs) for name, s in RECIPES.items()}
    assert sizes == {
        "figure-1": (200, 30),
        "figure-2": (110, 90),
        "figure-3": (84, 60),  # 56 settings, 14 of them with two more seeds
        "digits": (273, 15),
    }


@pytest.mark.parametrize("sweep", RECIPES.values(), ids=RECIPES)
def test_every_claim_of_a_recipe_can_be_judged_and_named(sweep):
    small = replace(sweep, seeds=(0, 1))
    results = Results(small, records(small, epochs=2))
    findings = PaperReport(results).findings
    assert findings
    assert all(finding.holds is not None for finding in findings)
    assert {f.source for f in findings} == {"ours" if sweep.name == "digits" else "paper"}


def test_the_commands_make_these_very_results_again():
    whole = PaperReport(Results(SMALL, records()))
    assert whole.commands() == ["wngrad run small", "wngrad report small"]
    part = [r for r in records(epochs=2, note="JPEG copy") if r.lane.seed == 0]
    run, report = PaperReport(Results(SMALL, part), recipe="mine:SMALL").commands()
    assert run == "wngrad run mine:SMALL --epochs 2 --seeds 1 --note 'JPEG copy'"
    assert report == "wngrad report mine:SMALL"


def test_records_of_another_experiment_are_foreign():
    other = [replace(r, settings={"dataset": "mnist"}) for r in records()]
    with pytest.raises(ValueError, match="must hold a lane of the sweep"):
        Results(SMALL, other)


def test_a_lambda_that_lost_seeds_is_not_the_best():
    fewer = [r for r in records(final=steep) if r.lane.lam != 0.1 or r.lane.seed == 0]
    assert Results(SMALL, fewer).best("sgd").lam != 0.1
    assert Results(SMALL, records(final=steep)).best("sgd").lam == 0.1


# The report.


def test_a_report_is_a_page_two_pictures_and_a_summary(tmp_path):
    paths = builder.write(SMALL, records(), tmp_path / "new", notes=["A JPEG copy."])
    assert [path.name for path in paths] == [
        "report.html",
        "figure.png",
        "figure.svg",
        "summary.md",
    ]
    text = paths[3].read_text()
    holds = (
        "| WNGrad is ahead. | paper | WNGrad 0.200 (n = 3), SGD 0.500 (n = 3): ahead by 0.300 ± "
    )
    assert holds in text
    assert (
        "| WNGrad | 0.01 | 0.200 ± 0.01 (n = 3) | 80.00 ± 1.00 % (n = 3) | 0 of 12 | 4 of 4 |"
        in text
    )
    assert "- A JPEG copy." in text
    assert "wngrad run small" in text


def test_the_order_of_the_records_changes_nothing():
    forth, back = (PaperReport(Results(SMALL, r)) for r in (records(), records()[::-1]))
    assert forth.markdown() == back.markdown()
    assert page.render(forth) == page.render(back)


SUBSETS = {
    "one record": records()[:1],
    "one that failed": [failed(SMALL.lanes[0])],
    "all diverged": records(final=lambda lane: None),
    "diverged at once": [record(lane, None, epochs=1) for lane in SMALL.lanes],
    "no curves": [replace(record(SMALL.lanes[0], 0.3), curves={})],
    "huge": records(final=lambda lane: 1e300 * (lane.seed + 1)),
    "zero": records(final=lambda lane: 0.0),
}


@pytest.mark.parametrize("subset", SUBSETS.values(), ids=SUBSETS)
def test_a_report_is_made_of_whatever_is_there(subset):
    sweep = replace(SMALL, claims=(AHEAD, TRAINS, WAY, ROBUST), curves_at=(0.1, 1.0))
    report, picture = PaperReport(Results(sweep, subset)), io.BytesIO()
    assert page.render(report)
    assert report.markdown()
    figures.draw(report).savefig(picture, dpi=20)
    assert picture.tell()


STATES = st.sampled_from(("none", "failed", "lost", "short", "done"))


@settings(max_examples=60)
@given(st.lists(STATES, min_size=24, max_size=24).filter(lambda s: set(s) != {"none"}), st.data())
def test_no_subset_of_records_makes_a_report_raise(states, draw):
    made = {
        "failed": failed,
        "lost": lambda lane: record(lane, None, draw.draw(st.integers(1, 3))),
        "short": lambda lane: record(lane, 0.4, 1),
        "done": lambda lane: record(lane, draw.draw(st.floats(0, 1e300))),
    }
    pairs = zip(SMALL.lanes, states, strict=True)
    sweep = replace(SMALL, claims=tuple(case[0] for case in CASES))
    report = PaperReport(
        Results(sweep, [made[state](lane) for lane, state in pairs if state in made])
    )
    assert "## Claims" in report.markdown()
    with mock.patch("plotly.offline.get_plotlyjs", return_value=""):  # megabytes
        assert "{{" not in page.render(report).partition('<script type="application')[0]


@pytest.mark.parametrize("strangers", [[], [failed(Lane("other", 1.0, 0))]])
def test_no_record_of_the_sweep_is_the_callers_mistake(strangers, tmp_path):
    with pytest.raises(ValueError, match="report: `records` must hold a lane of the sweep 'small'"):
        builder.write(SMALL, strangers, tmp_path)


def test_cells_of_a_markdown_table_escape_what_would_break_it():
    sweep = replace(SMALL, claims=(replace(AHEAD, text="one | two"),))
    text = PaperReport(Results(sweep, [failed(SMALL.lanes[0], "a | b\n<b>")])).markdown()
    assert r"| one \| two | paper |" in text
    assert "(a | b &lt;b>)" in text


def test_text_of_a_record_cannot_leave_its_place_in_the_page():
    evil = "</script><script>alert(1)</script>{{plotly}}"
    sweep = replace(SMALL, claims=(replace(AHEAD, text=evil),))
    text = page.render(PaperReport(Results(sweep, records(note=evil)), ["<img src=x>"]))
    assert evil not in text
    assert "&lt;/script&gt;&lt;script&gt;alert(1)&lt;/script&gt;{{plotly}}" in text
    assert "<img" not in text.partition("<script")[0]
    assert page.embedded({"a": evil}).count("<") == 0


def test_page_and_summary_say_once_what_the_best_lambda_is():
    report = PaperReport(Results(SMALL, records()))
    said = "The best λ is that of the best mean test accuracy at epoch 3"
    assert page.render(report).count(said) == 1
    assert report.markdown().count(said) == 1


def test_optimizers_keep_their_looks_and_strangers_get_one():
    every = figures.styles(("sgd", "my.module:Fast", "wngrad", "my.module:Slow"))
    assert every["sgd"] == OPTIMIZERS["sgd"].style
    assert len({style.color for style in every.values()}) == 4
    known = [*(row.style for row in OPTIMIZERS.values()), *SPARE_STYLES]
    for part in ("color", "marker", "symbol", "glyph"):
        assert len({getattr(style, part) for style in known}) == len(known)


def marks(final: Callable[[Lane], float | None], marker: str) -> list[int]:
    """How many points each panel marks so, on its edge or in itself."""
    fig = figures.draw(PaperReport(Results(SMALL, records(final=final))))
    lines = [[line for line in ax.lines if line.get_marker() == marker] for ax in fig.get_axes()]
    return [sum(len(line.get_xdata()) for line in panel) for panel in lines]


def test_a_figure_marks_lanes_that_diverged():
    assert marks(spread, "x") == [0, 0, 0, 0]
    assert marks(steep, "x") == [1, 1, 0, 0]  # λ = 10, in both panels over λ
    assert marks(lambda lane: None if lane.seed == 2 else 0.1, "x") == [8, 8, 0, 0]


def test_a_figure_marks_losses_above_its_ceiling_on_the_edge():
    def high(lane: Lane) -> float:
        return 1e5 if lane == Lane("sgd", 10.0, 0) else 0.5

    drawn = figures.draw(PaperReport(Results(SMALL, records(final=high)))).get_axes()[0]
    edge = [line for line in drawn.lines if line.get_markerfacecolor() == "white"]
    assert [x for line in edge for x in line.get_xdata()] == [10.0]
    assert drawn.get_ylim()[1] < 20


def test_importing_the_report_loads_neither_torch_nor_matplotlib():
    code = (
        "import sys; from wngrad.lab.report import builder; print('torch' in sys.modules, "
        "'matplotlib' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
