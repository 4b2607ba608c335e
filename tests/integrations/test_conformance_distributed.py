"""The probes over several processes: our optimizers and torch's pass, broken ones fail."""

from __future__ import annotations

import pytest

from broken import BROKEN
from wngrad.conformance import PROBES, all_probes
from wngrad.conformance.peers import EVERYONE
from wngrad.conformance.runner import run_probes
from wngrad.conformance.table import parse

pytestmark = pytest.mark.integrations

DISTRIBUTED = [name for name, probe in PROBES.items() if probe.distributed]
THEIRS = ("torch.optim:SGD", "torch.optim:SGD(lr=0.1, momentum=0.9)", "torch.optim:AdamW")
PASSING = [
    check
    for target, kwargs in map(parse, (*EVERYONE["wngrad"], *THEIRS, "broken:Plain"))
    for check in all_probes(target, **(kwargs or {}))
    if check.probe in DISTRIBUTED
]


@pytest.mark.parametrize("probe", PASSING, ids=lambda c: f"{c.target}-{c.kwargs}-{c}")
def test_our_optimizers_and_torchs_pass(probe):
    probe()


@pytest.mark.parametrize("name", DISTRIBUTED)
def test_every_distributed_probe_fails_on_an_optimizer_broken_for_it(name):
    cls, reason = BROKEN[name]
    (outcome,) = run_probes(f"broken:{cls.__name__}", None, [name])
    assert outcome.status == "fail"
    assert reason in outcome.detail


def test_a_rank_that_hangs_is_a_result():
    (outcome,) = run_probes("broken:Hangs", None, ["FSDP2 even"], timeout=3)
    assert outcome.detail == "hangs: stopped after 3 s"


def test_a_rank_that_is_killed_ends_the_others():
    (outcome,) = run_probes("broken:Killed", None, ["FSDP2 even"])
    assert "ended with exit code -9" in outcome.detail
    assert outcome.seconds < 30
