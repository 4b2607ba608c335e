"""Sweeps on Ray: real clusters of several nodes, whose processes are killed on purpose.

The oracle is the run that nothing disturbed, on this machine and without Ray, byte for byte.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from small_lab import contents
from wngrad.lab.run.store import Store

TESTS = Path(__file__).parents[1]
EXAMPLES = TESTS.parent / "examples"

# In the folder from which the commands are typed; every step leaves a line in `steps`.
LAB = '''
import os, signal, time
from dataclasses import replace
import torch
import small_lab

class Slow(torch.optim.SGD):
    """Takes its time; kills its process at λ = 7, hangs at λ = 8."""
    def __init__(self, params, lr, **options):
        super().__init__(params, lr=min(lr, 0.01), **options)
        self.name = lr
    def step(self, closure=None):
        time.sleep(float(os.environ.get("NAP", 0.02)))
        with open("steps", "a") as file:
            file.write(f"{os.getpid()} {os.getppid()} {self.name}\\n")
        if self.name == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.name == 8:
            time.sleep(600)
        return super().step(closure)

SLOW = replace(small_lab.SWEEP, name="slow", program="lone", optimizers=("lab:Slow",),
               lam=(0.001, 0.002, 0.003, 0.004), seeds=(0,), epochs=6)
DEADLY = replace(SLOW, lam=(0.001, 7.0, 0.002), epochs=1)
HUNG = replace(SLOW, lam=(0.001, 8.0), epochs=1)
'''
STEPS = 10 * 6  # of a lane of SLOW
LANES = 4
GUARD = 600  # seconds: only what hangs takes longer


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head without room for packs, and two nodes with room for one each."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        for _ in range(2):
            found.add_node(num_cpus=1)
        yield found
        found.shutdown()


ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "WNGRAD_COMMIT": "test",
    "WNGRAD_DATA": "",
    "PYTHONPATH": str(TESTS),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # else, at 15, workers starve beside other tests on the same cores
    "NAP": "0.03",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "lab.py").write_text(LAB)
    return tmp_path


def started(folder: Path, *words: str, before: str = "", **env: str) -> subprocess.Popen[str]:
    """What a user types, as a process and a group of its own."""
    command = [sys.executable, "-c", f"{before}\nfrom wngrad.cli import main; main()", *words]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, **ENVIRONMENT, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=GUARD)
    return process.returncode, out, err


def wngrad(folder: Path, *words: str, **options: str) -> tuple[int, str, str]:
    return ended(started(folder, *words, **options))


def until(true: Callable[[], Any]) -> Any:
    end = time.monotonic() + GUARD
    while not (found := true()):
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)
    return found


def steps(folder: Path) -> list[list[str]]:
    """Whole lines: pid, its parent's pid, λ."""
    path = folder / "steps"
    return [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def mid_pack(driver: subprocess.Popen[str], folder: Path, out: Path) -> list[str]:
    """The last step of a lane that has a checkpoint and has gone on since."""

    def found() -> list[str] | None:
        assert driver.poll() is None, ended(driver)  # nothing more will come
        if not list(out.glob("checkpoints/*.pt.old")):
            return None
        last = steps(folder)[-1]
        count = Counter(lam for _, _, lam in steps(folder))[last[2]]
        return last if 15 < count < STEPS - 15 else None

    return until(found)


def ends(out: Path) -> Counter[str]:
    """How often each pack was run to its end."""
    lines = (out / "sessions.jsonl").read_text().splitlines()
    return Counter(json.loads(line)["pack"] for line in lines)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What the slow sweep leaves without Ray; it need not be slow here."""
    there = tmp_path_factory.mktemp("whole")
    (there / "lab.py").write_text(LAB)
    status, _, err = wngrad(there, "run", "lab:SLOW", "--device", "cpu", "--out", "out", NAP="0")
    assert status == 0, err
    return contents(there / "out")


def slow(cluster: Cluster, out: str = "out") -> list[str]:
    words = ["run", "lab:SLOW", "--device", "cpu", "--out", out, "--save-every", "0"]
    return [*words, "--ray", cluster.address]


def is_whole(here: Path, whole: dict[str, bytes]) -> None:
    """Nothing lost, nothing run twice, and the records of a local run."""
    assert contents(here / "out") == whole
    assert ends(here / "out") == {f"pack-{k:04d}": 1 for k in range(1, LANES + 1)}


# ------------------------------------------------------------------------ what it leaves


def test_records_are_those_of_a_local_run_and_a_second_run_has_nothing_to_do(cluster, here, whole):
    status, out, err = wngrad(here, *slow(cluster))
    assert status == 0, err
    assert "6.0/6 epochs" in out
    assert "4 packs on 2 nodes, 2 at a time, 1 CPU each" in err
    is_whole(here, whole)
    assert len(steps(here)) == LANES * STEPS
    assert len({pid for pid, _, _ in steps(here)}) == 2  # workers, which stay from pack to pack
    status, out, _ = wngrad(here, *slow(cluster))
    assert status == 0
    assert len(steps(here)) == LANES * STEPS
    status, out, err = wngrad(here, "report", "lab:SLOW", "--out", "out")
    assert status == 0, err
    assert (here / "out/report.html").exists()


def test_packs_of_many_lanes_have_the_records_of_a_local_run(cluster, here):
    """As told, and by a measurement, here cut alike: products of more lanes may round otherwise."""
    common = ["run", "small_lab:SWEEP", "--device", "cpu"]
    on_ray = ["--ray", cluster.address]
    assert wngrad(here, *common, "--out", "local", "--lanes", "2")[0] == 0
    status, _, err = wngrad(here, *common, "--out", "ray", "--lanes", "2", *on_ray)
    assert status == 0, err
    assert contents(here / "ray") == contents(here / "local")
    status, _, err = wngrad(here, *common, "--out", "chosen", *on_ray)
    assert status == 0, err
    assert "measured: a step of 1 lane " in err
    assert re.search(r"packs on 2 nodes, 2 at a time, 1 CPU each, about [\d.]+ s in all", err)
    size = re.search(r"packs of at most (\d+) lanes: ", err)[1]
    assert wngrad(here, *common, "--out", "alike", "--lanes", size)[0] == 0
    assert curves(here / "chosen") == curves(here / "alike")


def curves(out: Path) -> dict[str, Any]:
    return {str(r.lane): (r.status, r.curves, r.settings) for r in Store(out).records()}


# --------------------------------------------------------------------- what is survived


def test_a_worker_killed_mid_pack_loses_nothing(cluster, here, whole):
    driver = started(here, *slow(cluster))
    pid, _, lam = mid_pack(driver, here, here / "out")
    os.kill(int(pid), signal.SIGKILL)
    status, _, err = ended(driver)
    assert status == 0, err
    assert "its process was lost" in err
    is_whole(here, whole)
    assert resumed(here, lam)


def test_a_node_removed_mid_pack_loses_nothing(cluster, here, whole):
    driver = started(here, *slow(cluster))
    _, raylet, lam = mid_pack(driver, here, here / "out")
    nodes = {str(raylet_of(node)): node for node in cluster.worker_nodes}
    cluster.remove_node(nodes[raylet], allow_graceful=False)
    status, _, err = ended(driver)
    cluster.add_node(num_cpus=1)
    assert status == 0, err
    assert "its node was lost" in err
    is_whole(here, whole)
    assert resumed(here, lam)


def test_a_node_that_has_just_gone_is_left_out(cluster, here, whole):
    """For some 15 s Ray lists it among the living."""
    node = cluster.add_node(num_cpus=1)
    node.kill_raylet()
    status, _, err = wngrad(here, *slow(cluster))
    cluster.remove_node(node, allow_graceful=False)
    assert status == 0, err
    assert "has gone: it is left out" in err
    is_whole(here, whole)


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def resumed(here: Path, lam: str) -> bool:
    """The lane went on from a checkpoint: it did not start anew."""
    return STEPS <= Counter(name for _, _, name in steps(here))[lam] < 2 * STEPS - 15


def test_a_driver_killed_and_restarted_loses_nothing(cluster, here, whole):
    driver = started(here, *slow(cluster))
    _, _, lam = mid_pack(driver, here, here / "out")
    driver.kill()
    driver.communicate()
    status, _, err = wngrad(here, *slow(cluster))
    assert status == 0, err
    is_whole(here, whole)
    assert resumed(here, lam)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_says_how_to_go_on_and_the_next_run_does(cluster, here, whole, number):
    driver = started(here, *slow(cluster))
    mid_pack(driver, here, here / "out")
    driver.send_signal(number)
    status, out, err = ended(driver)
    assert status == 128 + number, err
    assert "Stopped; everything so far is saved in out. Go on with: wngrad run lab:SLOW" in out
    done = len(steps(here))
    assert done < LANES * STEPS
    assert wngrad(here, *slow(cluster))[0] == 0
    is_whole(here, whole)
    assert len(steps(here)) == LANES * STEPS  # not one step was taken twice


def test_a_signal_before_the_first_pack_leaves_at_once(cluster, here):
    driver = started(here, *slow(cluster))
    until(lambda: list(here.glob("out/.seen-*")))  # the nodes are being looked at
    driver.send_signal(signal.SIGINT)
    status, out, err = ended(driver)
    assert status == 130, err
    assert "Stopped; everything so far is saved in out. Go on with: " in out
    assert not steps(here)


def test_ctrl_c_reaches_all_of_a_local_cluster_and_still_saves(here, whole):
    """A terminal sends it to every process of the group."""
    words = slow_locally()
    driver = started(here, *words)
    mid_pack(driver, here, here / "out")
    os.killpg(driver.pid, signal.SIGINT)
    status, out, err = ended(driver)
    assert status == 130, err
    assert "Stopped; everything so far is saved" in out
    assert wngrad(here, *words)[0] == 0
    is_whole(here, whole)
    assert len(steps(here)) == LANES * STEPS


def slow_locally() -> list[str]:
    words = ["run", "lab:SLOW", "--device", "cpu", "--out", "out", "--save-every", "0"]
    return [*words, "--ray", "local"]


def test_a_pack_that_kills_every_worker_is_recorded_as_failed_and_harms_no_other(cluster, here):
    words = ["run", "lab:DEADLY", "--device", "cpu", "--out", "out", "--ray", cluster.address]
    status, out, err = wngrad(here, *words)
    assert status == 1, err
    assert "its process was lost (killed, perhaps for want of memory), 3 times" in out
    found = {r.lane.lam: r.status for r in Store(here / "out").records()}
    assert found == {0.001: "done", 7.0: "failed", 0.002: "done"}
    assert Counter(lam for _, _, lam in steps(here))["7.0"] == 3


# Time that goes by only when the one pack is done and the other hangs.
HUNG_CLOCK = """
import functools, itertools, pathlib
from wngrad.lab.run import pool
ticks = itertools.count()
def clock():
    steps = pathlib.Path("steps")
    hangs = steps.exists() and " 8.0" in steps.read_text()
    return next(ticks) if hangs and list(pathlib.Path("out/records").glob("*")) else 0
pool.Pool = functools.partial(pool.Pool, clock=clock)
"""


def test_a_pack_that_hangs_is_ended_after_the_patience_and_harms_no_other(cluster, here):
    words = ["run", "lab:HUNG", "--device", "cpu", "--out", "out", "--ray", cluster.address]
    status, out, err = wngrad(here, *words, "--patience", "10", before=HUNG_CLOCK)
    assert status == 1, err
    assert "its process said nothing for 10 s" in out
    assert {r.lane.lam: r.status for r in Store(here / "out").records()} == {
        0.001: "done",
        8.0: "failed",
    }


# -------------------------------------------------------------------------- other places


def test_an_address_of_fsspec_is_a_folder_like_any_other(cluster, here, whole):
    address = (here / "far/away").as_uri()
    status, out, err = wngrad(here, *slow(cluster, address))
    assert status == 0, err
    assert f"next: wngrad report lab:SLOW --records {address}" in out
    far = contents(here / "far/away")
    records = [name for name in whole if name.startswith("records/")]
    assert {name: far[name] for name in records} == {name: whole[name] for name in records}
    status, _, err = wngrad(here, "report", "lab:SLOW", "--records", address, "--out", "told")
    assert status == 0, err
    assert (here / "told/report.html").exists()


def test_a_sweep_of_a_users_own_task_runs_on_ray_from_its_file_to_the_report(cluster, here):
    (here / "mine.py").write_text((EXAMPLES / "diabetes_task.py").read_text())
    words = ["sweep", "mine.py", "--lam", "0.001,0.1", "--seeds", "2", "--epochs", "2"]
    words += ["--optimizers", "sgd,wngrad,torch.optim:RMSprop", "--device", "cpu"]
    status, local, err = wngrad(here, *words, "--out", "local")
    assert status == 0, err
    status, out, err = wngrad(here, *words, "--out", "ray", "--ray", cluster.address)
    assert status == 0, err
    (ranking,) = [line for line in local.splitlines() if "Lowest test loss: " in line]
    assert ranking in out.splitlines()
    assert (here / "ray/report.html").exists()
    assert curves(here / "ray") == curves(here / "local")


@pytest.mark.parametrize("kind", ["train", "loaders"])
def test_a_training_of_a_users_own_leaves_on_ray_what_it_leaves_here(kind, cluster, here):
    assert wngrad(here, "sweep", "--init", kind, "mine.py")[0] == 0
    words = ["sweep", "mine.py", "--lam", "0.1", "--seeds", "2", "--epochs", "2", "--no-defaults"]
    words += ["--optimizers", "adamw(weight_decay=0.1),wnmuon", "--device", "cpu"]
    assert wngrad(here, *words, "--out", "local")[0] == 0
    status, out, err = wngrad(here, *words, "--out", "ray", "--ray", cluster.address)
    assert status == 0, err
    assert "4 of 4 lanes" in out
    assert curves(here / "ray") == curves(here / "local")


# --------------------------------------------------------------------- what is said first


def test_a_dry_run_prints_the_plan_and_leaves_nothing_behind(cluster, here):
    words = ["run", "small_lab:SWEEP", "--device", "cpu", "--out", "out", "--dry-run"]
    status, out, err = wngrad(here, *words, "--ray", cluster.address)
    assert status == 0, err
    assert "(node " in out
    assert ", 1 CPU, about " in out
    assert "8 lanes of 2 epochs in " in out
    assert "2 at a time, about " in out
    status, out, err = wngrad(here, *words, "--lanes", "2")
    assert status == 0, err
    assert "pack-0001 to pack-0004: 2 lanes each, " in out
    assert "8 lanes of 2 epochs in 4 packs, 1 at a time, about " in out
    assert sorted(path.name for path in here.iterdir() if path.name != "__pycache__") == ["lab.py"]


def refused(here: Path, *words: str, **options: str) -> str:
    """The one line that is said, before anything is trained."""
    status, out, err = wngrad(here, "run", "lab:SLOW", "--out", "out", *words, **options)
    assert status == 2, out + err
    assert not list(here.glob("out/records/*"))
    lines = err.splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("wngrad: ")
    return lines[0]


def test_an_address_at_which_nothing_or_no_ray_answers_is_one_line(here):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        assert "no Ray cluster answers there" in refused(here, "--ray", address)
        nobody.listen()
        soon = "import wngrad.lab.run.cluster.nodes as nodes; nodes.ANSWER = 3.0"
        said = refused(here, "--ray", address, before=soon)
        assert f"`--ray` {address}: no Ray cluster has answered within 3 s;" in said
    assert "must be local, auto or HOST:PORT" in refused(here, "--ray", "nowhere")


def test_too_few_gpus_for_a_pack_is_one_line(cluster, here):
    said = refused(here, "--ray", cluster.address, "--device", "cuda")
    assert "a pack needs 1 GPU and 1 CPU on one node; the cluster has 0 GPU and 2 CPU" in said
    said = refused(here, "--ray", cluster.address, "--device", "cpu", "--cpus", "2")
    assert "a pack needs 2 CPU on one node" in said


def test_a_gpu_that_torch_does_not_find_is_one_line_with_the_node(cluster, here):
    node = cluster.add_node(num_cpus=1, num_gpus=1)
    try:
        said = refused(here, "--ray", cluster.address)
        assert "(node " in said
        assert "torch finds no CUDA device" in said
    finally:
        cluster.remove_node(node)


@pytest.fixture
def older(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a node with another version of wngrad."""
    folder = tmp_path_factory.mktemp("older")
    (folder / "sitecustomize.py").write_text("import wngrad\nwngrad.__version__ = '0.0.1'\n")
    return {"PYTHONPATH": f"{folder}{os.pathsep}{TESTS}"}


def test_versions_that_differ_between_nodes_are_one_line(cluster, here, older):
    node = cluster.add_node(num_cpus=1, env_vars=older)
    try:
        said = refused(here, "--ray", cluster.address, "--device", "cpu")
        assert "versions differ between nodes: wngrad is " in said
        assert f"0.0.1 on {cluster.address.partition(':')[0]} (node {node.node_id[:8]})" in said
    finally:
        cluster.remove_node(node)


def test_a_node_that_joins_with_another_version_is_refused_and_nothing_is_lost(
    cluster, here, older
):
    driver = started(here, *slow(cluster), "--epochs", "20")
    until(lambda: steps(here))
    node = cluster.add_node(num_cpus=1, env_vars=older)
    try:
        status, _, err = ended(driver)
        assert status == 2, err
        assert "nodes differ: wngrad is " in err
        assert ", 0.0.1 on " in err
    finally:
        cluster.remove_node(node)
    assert wngrad(here, *slow(cluster), "--epochs", "20")[0] == 0
    assert len(steps(here)) == LANES * 10 * 20  # what had begun was saved


def test_a_folder_that_a_node_does_not_see_is_one_line(cluster, here):
    """The memory of one process is such a place."""
    words = ["run", "lab:SLOW", "--device", "cpu", "--ray", cluster.address]
    status, out, err = wngrad(here, *words, "--out", "memory://sweep")
    assert status == 2, out
    assert len(err.splitlines()) == 1, err
    assert "does not see memory://sweep: `--out` must be a folder or an address that all" in err


def test_a_second_driver_of_a_folder_is_one_line(cluster, here):
    words = ["run", "lab:HUNG", "--device", "cpu", "--out", "out", "--ray", cluster.address]
    driver = started(here, *words)
    try:
        until(lambda: steps(here))
        status, _, err = wngrad(here, *words)
        assert status == 2
        assert "out is being worked on by another `wngrad … --ray`" in err
        assert len(err.splitlines()) == 1
    finally:
        driver.kill()
        driver.communicate()


def test_a_sweep_made_under_other_conditions_is_refused_as_ever(cluster, here):
    assert wngrad(here, *slow(cluster), "--epochs", "1", NAP="0")[0] == 0
    status, _, err = wngrad(here, *slow(cluster), "--note", "another")
    assert status == 2
    assert "holds a sweep made under other conditions (note: '' there, 'another' now)" in err
