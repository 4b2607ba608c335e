"""The conformance kit: our optimizers pass, broken ones fail, and nothing disturbs the table."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from broken import BROKEN, MISBEHAVED, Plain
from wngrad import conformance
from wngrad.conformance import PROBES, Failed, NotApplicable, check, light_probes
from wngrad.conformance.__main__ import main
from wngrad.conformance.peers import EVERYONE, PROFILES, Profile
from wngrad.conformance.runner import WARM, Outcome, Warm, judged, run_probes
from wngrad.conformance.table import BEGIN, END, Row, markdown, parse, record, show

ROOT = Path(__file__).parents[1]
LIGHT = [name for name, probe in PROBES.items() if not probe.distributed]
OURS = [
    one
    for target, kwargs in map(parse, EVERYONE["wngrad"])
    for one in light_probes(target, **(kwargs or {}))
]
IN_A_PROCESS = ("wngrad:WNGrad", None)  # The others are judged here: a fork takes its time.
# b only grows, so a spike ends the learning where momentum has carried the parameters by then.
KNOWN = {("wngrad:WNGrad", "momentum", "gradient spike")}


@pytest.fixture(autouse=True)
def _one_thread():
    """As in a probe's own process; threads that wait for each other make small steps slow."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.integrations
@pytest.mark.parametrize("probe", OURS, ids=lambda c: f"{c.target}-{c.kwargs}-{c}")
def test_our_optimizers_pass_every_probe_that_applies(probe):
    known = (probe.target, *(probe.kwargs or {}), probe.probe) in KNOWN
    if (probe.target, probe.kwargs) != IN_A_PROCESS and probe.probe != "quiet":
        verdict = judged(probe.target, probe.kwargs, probe.probe)
        status = verdict["status"]
    else:
        status = "pass"
        try:
            probe()
        except NotApplicable:
            status = "not applicable"
        except Failed:
            status = "fail"
    if status == "not applicable":
        assert probe.probe in ("sparse", "loss scale")
    else:
        assert status == ("fail" if known else "pass")


@pytest.mark.parametrize("name", [name for name in LIGHT if name != "quiet"])
def test_the_optimizer_of_the_docs_passes_what_applies_to_it(name):
    """The one that docs/new-optimizer.md writes; conftest has made a module of it."""
    verdict = judged("new_optimizer:WNSign", None, name)
    assert verdict["status"] in ("pass", "not applicable"), verdict["detail"]
    if verdict["status"] == "not applicable":
        assert name in ("sparse", "loss scale", "mismatched state")


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize("target", ["torch.optim:SGD", "torch.optim:AdamW", "broken:Plain"])
def test_sgd_and_adamw_pass_what_applies_to_them(target, name):
    found = judged(target, None, name)
    assert found["status"] in ("pass", "not applicable"), found["detail"]
    if found["status"] == "not applicable":
        assert name in ("sparse", "loss scale", "mismatched state")


@pytest.mark.parametrize("name", LIGHT)
def test_every_probe_fails_on_an_optimizer_broken_for_it(name):
    cls, reason = BROKEN[name]
    target = f"broken:{cls.__name__}"
    if name == "quiet":  # pytest listens to stdout itself
        (outcome,) = run_probes(target, None, [name])
        found = {"status": outcome.status, "detail": outcome.detail}
    else:
        found = judged(target, None, name)
    assert found["status"] == "fail"
    assert reason in found["detail"]


def test_the_kit_imports_nothing_of_the_library():
    """So that a copy of its folder runs alone."""
    for path in Path(conformance.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not name.startswith("wngrad") or name.startswith("wngrad.conformance"), path


def test_there_is_a_broken_optimizer_for_every_probe():
    assert BROKEN.keys() == PROBES.keys()


@pytest.mark.parametrize(
    ("target", "usage"),
    [
        ("broken:NeedsTraining", "NeedsTraining(params), step(), train() and eval()"),
        ("broken:NeedsTheLoss", "NeedsTheLoss(params), step(loss=loss)"),
        ("broken:NeedsARate", "NeedsARate(params, lr=0.01), step()"),
        ("torch.optim:LBFGS", "LBFGS(params), step(closure)"),
    ],
)
def test_an_optimizer_is_used_as_its_authors_say(target, usage, monkeypatch):
    monkeypatch.setitem(PROFILES, "broken:NeedsTheLoss", Profile(takes="loss"))
    for name in ("made", "resume", "closure", "GradScaler", "rollback after NaN", "bfloat16"):
        found = judged(target, None, name)
        assert found["usage"] == usage
        assert found["status"] == "pass" or (target, name) == ("torch.optim:LBFGS", "GradScaler")


@pytest.mark.parametrize(
    ("target", "name", "reason"),
    [
        ("broken:RefusesGroups", "late group", "it refuses: RefusesGroups takes one group"),
        ("broken:RefusesGroups", "per-group lr", "it refuses: RefusesGroups takes one group"),
        ("torch.optim:AdamW", "sparse", "it refuses: Adam does not support sparse gradients"),
        ("torch.optim:Rprop", "lr = 0 group", "lr is only where its own step sizes start"),
        ("torch.optim:SGD", "mismatched state", "it keeps no state"),
    ],
)
def test_what_an_optimizer_refuses_or_excludes_does_not_apply(target, name, reason):
    found = judged(target, None, name)
    assert found["status"] == "not applicable"
    assert found["detail"].startswith(reason)


def test_an_error_from_inside_a_tensor_operation_is_no_refusal():
    found = judged("broken:NeverForgetsASpike", None, "complex")
    assert found["status"] == "fail"
    assert "complex" in found["detail"]


def test_state_that_needs_pickle_is_a_failure_to_resume():
    found = judged("broken:KeepsAnObject", None, "resume")
    assert found["status"] == "fail"
    assert found["detail"].startswith("its state is not plain data: torch.load(weights_only=True)")


@pytest.mark.parametrize("target", MISBEHAVED)
def test_misbehaviour_is_a_row_that_says_so_and_the_next_row_is_unharmed(target):
    limit = 2 if target == "broken:Hangs" else None
    first, second = run_probes(target, None, ["made", "quiet"], timeout=limit)
    assert first.status == "fail"
    assert MISBEHAVED[target] in first.detail
    assert second.status == "not run"
    (after,) = run_probes("broken:Plain", None, ["made"])
    assert after.status == "pass"


@pytest.mark.integrations
def test_an_optimizer_that_stops_its_watcher_is_a_row_too():
    outcome = WARM.run("broken:StopsTheWatcher", None, "made", seconds=3, margin=1)
    assert (outcome.status, outcome.detail) == (
        "fail",
        "it stopped the process that watches the probe",
    )
    (after,) = run_probes("broken:Plain", None, ["made"])
    assert after.status == "pass"


def test_a_watcher_that_has_died_between_probes_is_started_anew(monkeypatch):
    registered = []
    monkeypatch.setattr("wngrad.conformance.runner.atexit.register", registered.append)
    # Instead of one that loads torch: it answers any job at once.
    code = """
import sys
for line in sys.stdin:
    print(0, flush=True)
    print('{"status": "pass"}', flush=True)
"""
    monkeypatch.setattr("wngrad.conformance.runner.SERVE", code)
    warm = Warm()
    for _ in range(3):
        assert warm.run("broken:Plain", None, "made", seconds=30).status == "pass"
        warm._process.kill()
        warm._process.wait()
    warm.close()
    assert registered == [warm.close]


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_processes_in_sessions_of_their_own_do_not_outlive_their_probe(tmp_path):
    file = tmp_path / "children"
    (outcome,) = run_probes("broken:Multiplies", {"file": str(file)}, ["made"], timeout=300)
    assert outcome.status == "pass", outcome.detail
    left = [int(line) for line in file.read_text().split()]
    assert left
    assert [pid for pid in left if Path(f"/proc/{pid}").exists()] == []


def test_a_table_with_odd_characters_can_be_written(tmp_path, capsys):
    path = tmp_path / "outcomes.json"
    assert main(["broken:SpeaksInSurrogates", "--only=made", f"--json={path}"]) == 1
    assert "half a character" in path.read_text()


def test_what_an_optimizer_prints_is_kept_from_the_terminal(capfd):
    (outcome,) = run_probes("broken:Chatty", None, ["deepcopy"])
    assert outcome.status == "pass"
    assert outcome.printed.startswith("Stepping!")
    assert capfd.readouterr() == ("", "")


def test_a_class_is_found_by_its_module_and_a_local_one_is_refused():
    assert light_probes(Plain)[0].target == "broken:Plain"

    class Local(Plain):
        pass

    with pytest.raises(ValueError, match=r"another process can import, got .*Local"):
        light_probes(Local)


def test_check_returns_every_outcome(monkeypatch):
    monkeypatch.setattr(
        "wngrad.conformance.run_probes", lambda *job: [Outcome("made", "pass"), job]
    )
    assert check("broken:Plain", lr=0.5)[1] == ("broken:Plain", {"lr": 0.5})


# ------------------------------------------------------------------ the command line


def test_the_command_line_prints_a_table_and_json(capsys, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"# Mine\n\n{BEGIN}{END}The end.\n")
    only = ["--only=made,quiet,resume", "--json=-", f"--markdown={page}"]
    code = main(["broken:CountsInAnAttribute(lr=0.2)", "torch.optim:SGD", *only, "--skip=quiet"])
    assert code == 1
    text = capsys.readouterr().out
    found = json.loads(text[text.index("\n{\n") :])
    first, second = found["optimizers"]
    assert [o["status"] for o in first["outcomes"]] == ["pass", "fail"]
    assert first["usage"] == "CountsInAnAttribute(params, lr=0.2), step()"
    assert [o["status"] for o in second["outcomes"]] == ["pass", "pass"]
    assert "resume: eight steps after resuming, parameters differ by" in page.read_text()
    assert page.read_text().endswith("The end.\n")


def test_a_class_that_is_called_as_an_emoji_keeps_its_name(capsys):
    show(Row("zoo:Tiger", [Outcome("made", "pass")]))
    assert capsys.readouterr().out.startswith("zoo:Tiger: 1 pass")


def test_a_gradient_that_is_clipped_in_place_is_found():
    (outcome,) = run_probes("broken:ClipsGradients", None, ["gradients untouched"])
    assert outcome.status == "fail"
    assert outcome.detail == "a step writes into p.grad if gradients are large"


def test_nothing_failed_is_exit_code_zero_and_kwargs_are_passed_on(capsys):
    assert main(["broken:NeedsArgument", "--kwargs", '{"total_steps": 9}', "--only=made"]) == 0
    assert "NeedsArgument(params, total_steps=9)" in capsys.readouterr().out


def test_without_rich_the_table_is_plain_text(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    show(Row("a:B", [Outcome("made", "pass"), Outcome("resume", "fail", "[red]no")]))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a:B: 1 pass, 1 fail"
    assert lines[2].split() == ["✗", "resume", "[red]no"]


def test_a_reader_that_closes_the_pipe_gets_no_traceback():
    """As `python -m wngrad.conformance --explain | head` does."""
    command = [sys.executable, "-m", "wngrad.conformance", "--explain"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_the_probes_are_listed_and_explained(capsys):
    assert main(["--list"]) == 0
    assert capsys.readouterr().out.splitlines() == list(PROBES)
    assert main(["--explain"]) == 0
    text = capsys.readouterr().out
    for probe in PROBES.values():
        assert all(line in text for line in (probe.name, probe.does, probe.why, probe.failing))


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ([], "name an optimizer as module:Class"),
        (["torch.optim.SGD"], "must be module:Class"),
        (["torch.optim:SGD(0.1)"], "must be module:Class"),
        (["torch.optim:SGD(lr=x)"], "must be module:Class"),
        (["torch.optim:SGD", "--only=spelling"], "no probe is called spelling"),
        (["torch.optim:SGD", "--only=made", "--skip=made"], "--only and --skip leave no probe"),
        (["torch.optim:SGD", "--timeout=-1"], "--timeout must be > 0, got -1"),
        (["torch.optim:SGD", "--json=no/such/file.json"], "--json must be a file in a folder"),
        (["torch.optim:SDG"], "torch.optim has no SDG, got torch.optim:SDG."),
        (["no_such_module:SGD"], "no module is called no_such_module, got"),
        (["torch.no_such:SGD"], "no module is called torch.no_such, got"),
        (["torch.optim:SGD", "--kwargs=[1]"], "--kwargs must be a JSON object"),
        (["torch.optim:SGD", "--kwargs={"], "Expecting property name"),
        (["torch.optim:SGD", "--markdown=no/such/page.md"], "No such file"),
        (["torch.optim:SGD", f"--markdown={ROOT / 'README.md'}"], "must have the lines"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_two(arguments, rule, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert rule in capsys.readouterr().err.splitlines()[-1]


# --------------------------------------------------------------------- the docs page


def test_the_published_table_is_what_the_record_says():
    found = json.loads((ROOT / "results" / "conformance.json").read_text())
    page = (ROOT / "docs" / "conformance.md").read_text()
    assert f"{BEGIN}\n{markdown(found)}\n{END}" in page
    names = [text for texts in EVERYONE.values() for text in texts]
    assert [optimizer["name"] for optimizer in found["optimizers"]] == names
    assert all(version != "not installed" for version in found["versions"].values())


def test_a_package_that_is_missing_is_named_as_such():
    found = record([Row("no_such_module:Nothing", [Outcome("made", "fail", "…")])], "make")
    assert found["versions"]["no_such_module"] == "not installed"
