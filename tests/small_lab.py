"""A sweep that runs in a tenth of a second, ways to stop it, and optimizers that misbehave."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wngrad.lab.run import supervisor, worker
from wngrad.lab.run.job import Event, Job, Tell
from wngrad.lab.run.pool import Ended
from wngrad.lab.run.session import Session
from wngrad.lab.run.store import Store
from wngrad.lab.run.worker import open_session
from wngrad.lab.train.data import Data
from wngrad.lab.train.spec import Pack, Sweep, packs


def blobs(shape: tuple[int, ...], n: int = 200, seed: int = 0) -> Data:
    """Ten Gaussian clouds: learnable, and made in a moment."""
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(10, *shape, generator=g)
    y = torch.randint(10, (n,), generator=g)
    x = centres[y] + torch.randn(n, *shape, generator=g)
    cut = n * 4 // 5
    return Data("blobs", x[:cut], y[:cut], x[cut:], y[cut:], 10, f"blobs-{shape}-{n}-{seed}")


def data() -> Data:
    return blobs((4,))


def net(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 3), nn.ReLU(), nn.Linear(3, classes))


def dropping(shape: tuple[int, ...], classes: int) -> nn.Module:
    """A network that draws random numbers as it trains."""
    return nn.Sequential(nn.Linear(shape[0], 3), nn.Dropout(0.2), nn.Linear(3, classes))


class Says(nn.Module):
    """A network with an answer of its own."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.weight, self.answer = nn.Parameter(torch.ones(1)), answer

    def forward(self, x: Tensor) -> Any:
        nan = self.weight * torch.full((len(x), 10), torch.nan)
        return nan if self.answer == "nan" else self.answer


def says_nan(shape: tuple[int, ...], classes: int) -> Any:
    return Says("nan")


def says_none(shape: tuple[int, ...], classes: int) -> Any:
    return Says(None)


def says_text(shape: tuple[int, ...], classes: int) -> Any:
    return Says("seven")


def is_none(shape: tuple[int, ...], classes: int) -> Any:
    return None


STEPS = 10  # of an epoch
SWEEP = Sweep(
    name="small", claim="", dataset="small_lab:data", model="small_lab:net",
    optimizers=("sgd", "wngrad-momentum"), lam=(0.01, 0.1), epochs=2, seeds=(0, 1), batch=16,
    weight_decay=1e-3, lanes_per_pack=2,
)  # fmt: skip
ONE = replace(SWEEP, optimizers=("wngrad-momentum",), seeds=(0,))  # two lanes in one pack
PACK = packs(ONE.settings, ONE.seeds, None)[0]
LANE = PACK.lanes[0]
LONG = replace(SWEEP, name="long", epochs=25)  # a second, for processes that start slowly
GATED = replace(SWEEP, name="gated", program="lone", optimizers=("small_lab:Gated",))  # four packs


def job(out: Path, sweep: Sweep = SWEEP) -> Job:
    """A job that saves after every chunk."""
    return Job(sweep, out, device="cpu", save_every=0)


def commands(out: Path, sweep: Sweep = SWEEP) -> list[str]:
    """What a worker is sent that is to run the whole sweep."""
    packs = [{"pack": name, "failed": ""} for name in ("", *names(sweep))]
    return [json.dumps(line) for line in (job(out, sweep).to_json(), *packs)]


def names(sweep: Sweep) -> list[str]:
    return [pack.name for pack in sweep.cut(sweep.seeds)]


def supervised(out: str, name: str, workers: str = "1") -> None:
    """What `wngrad run` does, without the command line, and without Python's own shutting down."""
    start = supervisor._Process._start

    def started(*args: Any) -> Any:
        popen = start(*args)
        print("started", flush=True)
        return popen

    supervisor._Process._start = started  # type: ignore[method-assign]
    work = job(Path(out), globals()[name])
    os._exit(supervisor.supervise(work, lambda event: None, workers=int(workers)).status)


class InProcess:
    """Workers that are no processes: a pack is trained as it is sent."""

    limit = tries = 1

    def __init__(self, job: Job, limit: int) -> None:
        self.job, self.messages, self.packs = job, list[Event | Ended](), list[str]()

    def open(self, tell: Tell, check: Callable[[], None]) -> Ended | None:
        try:
            self.session = open_session(self.job, lambda e: self.messages.append(e), lambda: False)
            self.packs = [pack.name for pack in self.session.open()]
        except (ValueError, OSError, RuntimeError) as error:
            return Ended("", "error", " ".join(str(error).split()))
        for event in self.wait(0):
            tell(event)
        return None

    def send(self, pack: str, failed: str) -> None:
        self.session.run_pack(pack, failed)
        self.messages.append(Ended(pack))

    def wait(self, seconds: float) -> list[Any]:
        messages, self.messages = self.messages, []
        return messages

    def __enter__(self) -> InProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def wngrad(folder: Path, *words: str) -> Any:
    """The command as a user types it in `folder`, but in this process, and its workers, too."""
    import pytest
    from typer.testing import CliRunner

    from wngrad.cli.commands import app

    before = set(sys.modules)
    worker._data.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [str(folder), *sys.path])
        patch.setattr(sys, "argv", ["wngrad", *words])
        patch.setattr(supervisor, "Processes", InProcess)
        done = CliRunner().invoke(app, words, env={"COLUMNS": "200", "WNGRAD_DATA": ""})
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == folder:
            del sys.modules[name]
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done


def contents(folder: Path) -> dict[str, bytes]:
    """All that an interruption must not change: every file, the locks and the log of visits apart.

    What a stopped process leaves behind would show here as a file too many.
    """
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.parent.name != "locks" and path.name != "sessions.jsonl"
    }


def session(folder: Path, sweep: Sweep = ONE, **options: Any) -> tuple[Session, list[Any]]:
    """A visit that saves after every chunk, and the list it tells its events and warnings to."""
    events: list[Any] = []
    store = Store(folder, warn=lambda text: events.append({"kind": "warning", "text": text}))
    found = options.pop("data", None) or data()
    return Session(sweep, found, store, save_every=0, tell=events.append, **options), events


def visit(folder: Path, sweep: Sweep = ONE, **options: Any) -> list[Any]:
    """Run a session; what it told."""
    visitor, events = session(folder, sweep, **options)
    visitor.run()
    return events


class Stop(BaseException):
    """In place of the end of a process: nothing catches it."""


def halt(*args: object) -> None:
    raise Stop


def half_done(folder: Path, sweep: Sweep = ONE) -> Path:
    """The folder of a sweep that was stopped when it had a checkpoint, and one before."""
    with suppress(Stop), stopped(13, "after", halt):
        visit(folder, sweep)
    assert not list(folder.glob("records/*"))
    assert (folder / f"checkpoints/{PACK.name}.pt").exists()
    assert (folder / f"checkpoints/{PACK.name}.pt.old").exists()
    return folder


def position(store: Store, pack: Pack) -> float | None:
    """The epoch at which the pack's checkpoint stands; None if there is none to be read."""
    saved = store.load(pack)
    return None if saved is None else saved["state"]["epoch"] + saved["state"]["step"] / STEPS


def announced(events: list[dict[str, Any]]) -> tuple[dict[str, float], list[str]]:
    """Where each pack stood when it was last said to be saved, and the lanes said to be done."""
    at: dict[str, float] = {}
    saved: dict[str, float] = {}
    lanes = []
    for event in events:
        if event["kind"] == "progress":
            at[event["pack"]] = event["epochs"]
        elif event["kind"] == "saved":
            saved[event["pack"]] = at.get(event["pack"], 0.0)
        elif event["kind"] == "record":
            lanes.append(event["lane"])
    return saved, lanes


@contextmanager
def stopped(call: int, when: str, stop: Callable[..., None]) -> Iterator[list[str]]:
    """Stop "before", "half-way" through or "after" the `call`-th write, fsync or rename.

    `stop` is called with the arguments of that call. Yields the names of all that were made.
    """
    made: list[str] = []
    real = {name: getattr(os, name) for name in ("write", "fsync", "replace")}

    def watched(name: str) -> Callable[..., Any]:
        def instead(*args: Any) -> Any:
            made.append(name)
            if len(made) != call:
                return real[name](*args)
            if when == "half-way" and name == "write":
                real[name](args[0], args[1][: len(args[1]) // 2])
            elif when == "after":
                real[name](*args)
            return stop(*args)

        return instead

    for name in real:
        setattr(os, name, watched(name))
    try:
        yield made
    finally:
        for name, function in real.items():
            setattr(os, name, function)


class Gated(torch.optim.SGD):
    """SGD that says that it has begun, and does not step while there is no file `gate`."""

    def step(self, closure: Any = None) -> Any:
        Path(f"begun-{os.getpid()}").touch()
        while not Path("gate").exists():
            time.sleep(0.01)
        return super().step(closure)


class Misbehaving(torch.optim.SGD):
    """SGD that does at its fifth step what its λ says, unless BEHAVE is set."""

    def __init__(self, params: Any, lr: float, **options: Any) -> None:
        super().__init__(params, lr=0.01 if lr in DEEDS else lr, **options)
        self.deed = None if os.environ.get("BEHAVE") else DEEDS.get(lr)
        self.count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        if self.deed and self.count == 5:
            self.deed(self)
        return super().step(closure)


def misbehaving(params: Any, lr: float, **options: Any) -> Any:
    """None or a string in place of an optimizer, for two λ."""
    if lr in (NONE, TEXT) and not os.environ.get("BEHAVE"):
        return None if lr == NONE else "an optimizer"
    return Misbehaving(params, lr, **options)


def _raises(opt: Misbehaving) -> None:
    raise ArithmeticError("no such\n  root")


def _misses_a_file(opt: Misbehaving) -> None:
    raise FileNotFoundError("no table \udcff")


def _hangs(opt: Misbehaving) -> None:
    Path("hanging").write_text(str(os.getpid()))
    time.sleep(600)


def hung_clock(now: list[float] = [0.0]) -> float:  # noqa: B006 - it goes on from call to call
    """Time that goes by only while a run hangs, however busy the machine may be."""
    file = Path("hanging")
    pid = file.read_text() if file.exists() else ""
    state = Path(f"/proc/{pid}/stat")
    if pid and state.exists() and " Z " not in state.read_text():
        now[0] += 1
    return now[0]


def _is_killed(opt: Misbehaving) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leaves(opt: Misbehaving) -> None:
    raise SystemExit(0)


def _spoils(opt: Misbehaving) -> None:
    with torch.no_grad():
        for p in opt.param_groups[0]["params"]:
            p.fill_(torch.nan)


def _cannot_be_saved(opt: Misbehaving) -> None:
    opt.param_groups[0]["rule"] = lambda step: step


RAISES, MISSES, HANGS, KILLED, LEAVES, SPOILS, UNSAVED, NONE, TEXT = map(float, range(1, 10))
GOOD = (0.02, 0.03)
MISBEHAVING = replace(
    SWEEP, name="misbehaving", program="lone", optimizers=("small_lab:misbehaving",), seeds=(0,),
    lam=(GOOD[0], *map(float, range(1, 10)), GOOD[1]),
)  # fmt: skip
HUNG = replace(MISBEHAVING, lam=(HANGS,))
DEADLY = replace(MISBEHAVING, lam=(GOOD[0], KILLED, GOOD[1], RAISES))
DEEDS: dict[float, Callable[[Misbehaving], None]] = {
    RAISES: _raises,
    MISSES: _misses_a_file,
    HANGS: _hangs,
    KILLED: _is_killed,
    LEAVES: _leaves,
    SPOILS: _spoils,
    UNSAVED: _cannot_be_saved,
}
