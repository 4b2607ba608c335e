"""What pictures and verdicts say: no more than was measured, and where it was."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from test_lab_report import AHEAD, ROBUST, SMALL, STILL, records, spread, steep
from wngrad.lab.report import figures, page
from wngrad.lab.report.cells import Cell, lead
from wngrad.lab.report.paper import PaperReport
from wngrad.lab.report.results import Results
from wngrad.lab.train.spec import Lane, Setting, Sweep


def dotted(final: Callable[[Lane], float | None], panel: int) -> list[float]:
    """Where a panel has dotted lines across, in the unit of its axis."""
    ax = figures.draw(PaperReport(Results(SMALL, records(final=final)))).get_axes()[panel]
    lines = [line for line in ax.lines if line.get_linestyle() == ":"]
    assert all(line.get_transform() != ax.transAxes for line in lines)
    return [line.get_ydata()[0] for line in lines]


def high_at_10(lane: Lane) -> float:
    return 1e5 if lane.lam == 10.0 and lane.optimizer == "sgd" else 0.5


def test_the_dotted_line_stands_where_the_caption_says():
    report = PaperReport(Results(SMALL, records(final=high_at_10)))
    assert "a mean loss above 10, which is where the dotted line is" in report.marks()
    assert dotted(high_at_10, 0) == [10.0]
    assert dotted(high_at_10, 1) == []  # of an accuracy nothing is beyond


def test_marks_of_what_is_beyond_lie_beyond_the_dotted_line():
    ax = figures.draw(PaperReport(Results(SMALL, records(final=high_at_10)))).get_axes()[0]
    low, high = map(math.log10, ax.get_ylim())
    at = (1 - low) / (high - low)  # of the line, in the height of the panel
    edge = [line for line in ax.lines if line.get_markerfacecolor() == "white"]
    assert [y > at for line in edge for y in line.get_ydata()] == [True]


def test_without_anything_beyond_there_is_no_dotted_line():
    assert [dotted(steep, k) for k in range(4)] == [[]] * 4  # it diverges, and has a cross


def headline(final: Callable[[Lane], float | None], part: Callable[[Lane], bool]) -> list[str]:
    """The title of a report, and what it says below, of some lanes."""
    some = [r for r in records(final=final) if part(r.lane)]
    report = PaperReport(Results(SMALL, some))
    texts = [text.get_text() for fig in figures.draw(report).subfigs[:1] for text in fig.texts]
    assert page.render(report).count(f"<title>small: {report.headline()}</title>") == 1
    return texts


def test_a_title_asserts_only_what_held():
    everything = headline(spread, lambda lane: True)
    assert everything == ["small: WNGrad is flat where SGD is not.", "1 of 1 claims hold."]
    lost = headline(lambda lane: 0.7 - spread(lane), lambda lane: True)
    assert lost[0] == "small: Claimed: WNGrad is flat where SGD is not."
    assert lost[1] == "0 of 1 claims hold; 1 does not."
    part = headline(spread, lambda lane: lane.seed < 2)
    assert part[0].startswith("small: Claimed: ")


def test_a_verdict_on_one_seed_is_a_look():
    one = Results(SMALL, [r for r in records() if r.lane.seed == 0])
    finding = AHEAD.measure(one)
    assert (finding.verdict, finding.look) == ("a look (n = 1): yes", True)
    report = PaperReport(one)
    assert report.verdict().startswith("A look at n = 1, no more, at 1 of 1 claims: 1 yes, 0 no.")
    assert "| a look (n = 1): yes |" in report.markdown()
    assert "hold" not in report.verdict()
    assert '<span class="badge open">a look (n = 1): yes</span>' in page.render(report)
    worse = [r for r in records(final=lambda lane: 0.7 - spread(lane)) if r.lane.seed == 0]
    assert AHEAD.measure(Results(SMALL, worse)).verdict == "a look (n = 1): no"


def test_a_lead_counts_the_seeds_that_both_have():
    ours = Cell.of("test_loss", [0.2, 0.9, 1.0], [0, 1, 2])
    apart = lead(ours, Cell.of("test_loss", [0.3], [0]))
    assert (apart.by, apart.error) == (pytest.approx(0.1), None)


AT_ONE = tuple(setting for setting in SMALL.settings if setting.lam == 1.0)
UNEVEN = replace(SMALL, repeat=AT_ONE, claims=(AHEAD, ROBUST, STILL))


def test_some_lambda_have_every_seed_and_the_others_the_first():
    assert len(UNEVEN.lanes) == 8 + 2 * 2
    assert UNEVEN.settings_of(0) == SMALL.settings
    assert UNEVEN.settings_of(1) == AT_ONE
    assert Sweep.from_json(json.loads(json.dumps(UNEVEN.to_json()))).repeat == AT_ONE
    with pytest.raises(ValueError, match=r"Sweep: `repeat` must be of the sweep's settings, got"):
        replace(SMALL, repeat=(Setting("sgd", 7.0),))


def test_a_report_says_where_it_has_more_seeds():
    report = PaperReport(Results(UNEVEN, records(UNEVEN, final=steep)))
    assert "n = 1 to 3 seeds (3 at λ = 1), 3 epochs, 12 of 12 lanes" in report.markdown()
    assert report.results.left_out() == []
    assert "Provisional" not in report.verdict()
    assert [finding.look for finding in report.findings] == [False, False, True]


@pytest.mark.parametrize(
    ("repeat", "where"),
    [
        ([("wngrad", 1.0)], "of WNGrad at λ = 1"),
        ([("sgd", 1.0), ("wngrad", 1.0), ("wngrad", 10.0)], "at λ = 1; of WNGrad at λ = 10"),
        ([("wngrad", lam) for lam in SMALL.lam], "of WNGrad"),
    ],
)
def test_a_report_says_of_whom_it_has_more_seeds(repeat, where):
    some = replace(SMALL, repeat=tuple(Setting(*pair) for pair in repeat))
    text = PaperReport(Results(some, records(some, final=steep))).markdown()
    assert f"n = 1 to 3 seeds (3 {where}), 3 epochs" in text


def test_more_seeds_elsewhere_do_not_keep_a_lambda_from_being_best():
    assert Results(UNEVEN, records(UNEVEN, final=steep)).best("sgd").lam == 0.1  # of one seed
    first = [r for r in records(UNEVEN, final=steep) if r.lane.seed == 0]
    assert Results(UNEVEN, first).best("sgd").lam == 0.1


def test_what_single_seeds_near_the_limit_could_turn_is_a_look():
    """The best is 0.8, and so the limit 0.75; at λ = 1 the seeds spread by 0.01."""

    def near(loss: float) -> Callable[[Lane], float]:
        def final(lane: Lane) -> float:
            if lane.optimizer == "wngrad":
                return 0.2
            return 0.9 if lane.lam < 1 else loss if lane.lam > 1 else 0.5 + 0.01 * lane.seed

        return final

    far = ROBUST.measure(Results(UNEVEN, records(UNEVEN, final=near(0.9))))
    assert (far.verdict, far.look) == ("holds", False)
    assert "6 of 8 means are of one seed, 0 of these so close" in far.measured
    assert far.measured.endswith("(within 4 points, 4 of the largest sd)")
    sweep = replace(UNEVEN, lam=(1.0, 10.0))
    results = Results(sweep, records(sweep, final=near(0.26)))
    assert ROBUST.measure(results).verdict == "holds"  # 2 to 0: one of them cannot turn it
    close = replace(ROBUST, within=0.32)  # λ = 1 is usable now: 2 to 1
    results = Results(sweep, records(sweep, final=near(0.53)))
    assert close.measure(results).verdict == "a look (n = 1): yes"


def test_single_seeds_that_could_only_speak_for_a_claim_do_not_make_it_a_look():
    """The limit is 0.75: WNGrad is usable at λ = 1 and 10, SGD at 1, and WNGrad at 0.1 nearly."""
    losses = {("wngrad", 0.1): 0.26, ("sgd", 0.1): 0.9, ("sgd", 10.0): 0.9}
    sweep = replace(UNEVEN, lam=(0.1, 1.0, 10.0))

    def final(lane: Lane) -> float:
        return losses.get((lane.optimizer, lane.lam), 0.2 + 0.01 * lane.seed)

    results = Results(sweep, records(sweep, final=final))
    assert ROBUST.measure(results).verdict == "holds"
    losses["sgd", 0.1] = 0.26
    results = Results(sweep, records(sweep, final=final))
    assert ROBUST.measure(results).verdict == "a look (n = 1): yes"
    turned = replace(ROBUST, robust="sgd", fragile="wngrad")
    assert turned.measure(results).verdict == "does not hold"  # 1 to 2, and it takes two to turn it


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [
        (0.22, "holds"),
        (0.26, "a look (n = 1): yes"),
        (0.3, "a look (n = 1): no"),
        (0.5, "does not hold"),
    ],
)
def test_a_best_of_one_seed_decides_nothing_that_is_far_from_its_limit(loss, verdict):
    """The best is 0.8 at one seed, and so the limit 0.7; the seeds at λ = 1 spread by 0.01."""

    def final(lane: Lane) -> float:
        if lane.optimizer == "wngrad":
            return 0.2 if lane.lam == 0.1 else 0.9
        return 0.9 if lane.lam != 1 else loss + 0.01 * lane.seed

    claim = replace(STILL, lam=1.0)
    finding = claim.measure(Results(UNEVEN, records(UNEVEN, final=final)))
    assert finding.verdict == verdict
    assert finding.look == ("may move that limit by 4 points" not in finding.measured)
