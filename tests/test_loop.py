"""The ready-made loop over DataLoaders: what it does in a step, and that it goes on as if never
stopped."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    TensorDataset,
)

from small_lab import contents
from wngrad import LoaderTask
from wngrad.lab.run.session import Interrupted, Session
from wngrad.lab.run.store import Store
from wngrad.lab.sweep.task_checks import checked_loaders
from wngrad.lab.train.programs import LoopRun
from wngrad.lab.train.programs.loop import moved
from wngrad.lab.train.schedules import factor
from wngrad.lab.train.spec import Sweep, packs

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


class Noisy(Dataset):
    """Augmentation: noise from two generators."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return X[index] + 0.1 * torch.randn(3) + random.gauss(0, 0.1), Y[index]


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.3), nn.Linear(5, 2)
    )


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def loaders() -> Any:
    rest = DataLoader(TensorDataset(X[24:], Y[24:]), 5)
    return DataLoader(Noisy(), 4, shuffle=True), rest, rest


def unshuffled() -> Any:
    train = DataLoader(TensorDataset(X[:24], Y[:24]), 4)
    return train, DataLoader(TensorDataset(X[24:], Y[24:]), 16)


def right(output: Any, target: Any) -> Any:
    return (output.argmax(1) == target).float().mean()


TASK = LoaderTask(
    "loop", model, loaders, loss=F.cross_entropy, metric=right, metric_name="accuracy",
    epochs=3, schedule="cosine", warmup=0.2, accumulate=2, clip=0.5,
)  # fmt: skip
PLAIN = LoaderTask("plain", plain, unshuffled, loss=F.cross_entropy, epochs=2)


def sweep(task: LoaderTask, **changes: Any) -> Sweep:
    made = Sweep(
        name="loop", claim="", dataset="loop", model="loop", optimizers=("sgd",), lam=(0.1,),
        epochs=task.epochs, seeds=(0,), program="loop", best_by="valid_loss", task="loop",
        metrics=("valid_loss", "train_loss"), epochs_fixed=task.epochs_fixed,
    )  # fmt: skip
    return replace(made, **changes)


def started(task: LoaderTask, **changes: Any) -> LoopRun:
    s = sweep(task, **changes)
    return LoopRun(s, packs(s.settings, s.seeds, 1)[0], task, "cpu")


def run(task: LoaderTask, **changes: Any) -> LoopRun:
    r = started(task, **changes)
    while not r.finished:
        r.advance(100)
    return r


def visit(folder: Path, task: LoaderTask, **options: Any) -> None:
    s = sweep(task, optimizers=("wnmuon", "adam"))
    Session(s, task, Store(folder), save_every=0, **options).run()


@pytest.mark.parametrize("after", [2, 3, 4, 7, 11])
def test_a_run_that_was_stopped_leaves_what_it_would_have_left(after, one_thread, tmp_path):
    """Augmented, with dropout, batch normalization, a schedule, and steps of two batches."""
    visit(tmp_path / "whole", TASK)
    asked = [0]

    def stop() -> bool:
        asked[0] += 1
        return asked[0] == after

    monkey = pytest.MonkeyPatch()
    monkey.setattr("wngrad.lab.run.session.CHUNK_SECONDS", 0.0)  # a step at a time
    with monkey.context(), pytest.raises(Interrupted):
        visit(tmp_path / "stopped", TASK, stop=stop)
    visit(tmp_path / "stopped", TASK)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


class Turning(Sampler[list[int]]):
    """Batches of its own, which depend on the epoch it has been told."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        return iter([[(k + self.epochs[-1]) % 24] * 4 for k in range(6)])

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def drawn(kind: str) -> Any:
    """Loaders that draw from generators of their own."""
    data, own = TensorDataset(X[:24], Y[:24]), torch.Generator().manual_seed(0)
    options: dict[str, Any] = {
        "loader": {"batch_size": 4, "shuffle": True, "generator": own},
        "sampler": {"batch_size": 4, "sampler": RandomSampler(data, generator=own)},
        "batches": {"batch_sampler": BatchSampler(RandomSampler(data, generator=own), 4, False)},
    }[kind]
    return DataLoader(data, **options), unshuffled()[1]


@pytest.mark.parametrize("kind", ["loader", "sampler", "batches"])
def test_generators_of_the_loaders_are_seeded_so_that_a_run_can_be_repeated_and_resumed(kind):
    task = LoaderTask("own", plain, lambda: drawn(kind), loss=F.cross_entropy, epochs=3)
    whole = run(task)
    assert run(task).curves == whole.curves  # with what the first has left of its generators
    for steps in (3, 6, 8):
        first = started(task)
        while first._done() < steps:
            first.advance(1)
        again = started(replace(task, loaders=lambda: drawn(kind)))
        again.load(deepcopy(first.state()))
        while not again.finished:
            again.advance(100)
        assert again.curves == whole.curves


def test_tests_are_repeated_also_where_batch_statistics_are_taken_from_shuffled_batches():
    def normed() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))

    loaders = drawn("loader")
    task = LoaderTask("own", normed, lambda: loaders, loss=F.cross_entropy, epochs=2)
    first, again = (run(task, optimizers=("test_trial:Switching",)) for _ in range(2))
    assert (first.start, first.curves) == (again.start, again.curves)


def test_a_batch_sampler_is_told_the_epoch():
    own = Turning()
    train = DataLoader(TensorDataset(X[:24], Y[:24]), batch_sampler=own)
    run(replace(PLAIN, loaders=lambda: (train, unshuffled()[1]), epochs=3))
    assert list(dict.fromkeys(own.epochs)) == [0, 1, 2]


def test_loaders_of_a_class_that_cannot_be_hashed_are_made_once():
    @dataclass
    class Made:
        times: int = 0

        def __call__(self) -> Any:
            self.times += 1
            return unshuffled()

    made, equal = Made(), Made()
    task = replace(PLAIN, loaders=made)
    assert task.data() is task.data()
    assert made.times == 1
    assert replace(PLAIN, loaders=equal).data() is not task.data()


def test_a_plain_run_is_the_loop_that_anyone_would_write():
    r = run(PLAIN)
    net = _fresh(plain)
    opt, curve = torch.optim.SGD(net.parameters(), lr=0.1), []
    for _ in range(2):
        losses = []
        for x, y in zip(X[:24].split(4), Y[:24].split(4), strict=True):
            opt.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            opt.step()
            losses.append(loss.item())
        curve.append(sum(losses) / 6)
    assert [row[0] for row in r.curves["train_loss"]] == pytest.approx(curve)
    assert r.curves["valid_loss"][-1][0] == pytest.approx(
        F.cross_entropy(net(X[24:]), Y[24:]).item()
    )
    assert r.start["valid_loss"][0] == pytest.approx(
        F.cross_entropy(_fresh(plain)(X[24:]), Y[24:]).item()
    )


def _fresh(make: Any) -> nn.Module:
    from wngrad.lab.train.seeding import seed_all

    seed_all(0)
    net: nn.Module = make()
    return net


def test_two_batches_accumulated_are_one_of_twice_the_size():
    twos = DataLoader(TensorDataset(X[:24], Y[:24]), 2)
    halves = replace(PLAIN, loaders=lambda: (twos, [(X, Y)]), accumulate=2)
    whole = replace(PLAIN, loaders=lambda: (unshuffled()[0], [(X, Y)]))
    for name, rows in run(whole).curves.items():
        assert [row[0] for row in run(halves).curves[name]] == pytest.approx(
            [row[0] for row in rows], rel=1e-5
        )


def test_the_gradient_is_cut_to_its_norm_and_lambda_follows_the_schedule():
    class Watched(torch.optim.SGD):
        def step(self, closure=None):
            params = self.param_groups[0]["params"]
            seen.append((self.param_groups[0]["lr"], torch.nn.utils.get_total_norm(
                [p.grad for p in params]).item()))  # fmt: skip
            return super().step(closure)

    seen: list[tuple[float, float]] = []
    monkey = pytest.MonkeyPatch()
    monkey.setattr("torch.optim.SGD", Watched)
    with monkey.context():
        run(replace(PLAIN, clip=0.01, schedule="linear", warmup=0.25))
    monkey.undo()
    assert [lam for lam, _ in seen] == pytest.approx(
        [0.1 * factor("linear", k, 12, 0.25) for k in range(12)]
    )
    assert all(norm <= 0.01 * 1.001 for _, norm in seen)


@pytest.mark.parametrize(
    ("schedule", "first", "last"), [("constant", 1, 1), ("linear", 1, 0.1), ("cosine", 1, 0.024)]
)
def test_schedules_begin_at_one_and_fall_to_nothing(schedule, first, last):
    assert factor(schedule, 0, 10, 0.0) == first
    assert factor(schedule, 9, 10, 0.0) == pytest.approx(last, abs=1e-3)
    assert factor(schedule, 0, 10, 0.5) == 0.2


class Speaks(nn.Module):
    """As Hugging Face's: takes a dictionary's entries, and has the loss in its output."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        logits = self.inner(features)
        return SimpleNamespace(loss=F.cross_entropy(logits, labels), logits=logits)


def test_dictionaries_are_given_by_name_and_the_loss_is_the_models_own():
    batches = [{"features": X[k : k + 8], "labels": Y[k : k + 8]} for k in range(0, 40, 8)]
    spoken = LoaderTask("speaks", Speaks, lambda: (batches, batches[3:]), epochs=2,
                        metric=lambda out, batch: right(out.logits, batch["labels"]))  # fmt: skip
    pairs = [(b["features"], b["labels"]) for b in batches]
    tuples = LoaderTask("tuples", lambda: nn.Linear(3, 2), lambda: (pairs, pairs[3:]), epochs=2,
                        loss=F.cross_entropy, metric=right)  # fmt: skip
    assert run(spoken).curves == run(tuples).curves


def test_frozen_parameters_stay_as_they_are():
    def half() -> nn.Module:
        net = plain()
        net[0].requires_grad_(False)
        return net

    r = run(replace(PLAIN, model=half), optimizers=("adamw",))
    fresh = _fresh(plain)
    assert torch.equal(r.model[0].weight, fresh[0].weight)
    assert not torch.equal(r.model[2].weight, fresh[2].weight)


def test_a_run_whose_validation_loss_no_longer_falls_ends_at_its_best_epoch():
    s = {"epochs": 30, "optimizers": ("adam",), "lam": (1.0,)}
    r, whole = run(replace(PLAIN, patience=2), **s), run(PLAIN, **s)
    losses = [row[0] for row in whole.curves["valid_loss"]]
    stop = next(k for k in range(2, 30) if min(losses[k - 1 : k + 1]) >= min(losses[: k - 1]))
    best = losses.index(min(losses[: stop + 1]))
    assert r.ended == "early stop"
    assert [row[0] for row in r.curves["valid_loss"]] == losses[: best + 1]
    assert r.epoch < 30


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        while True:
            yield X[0], Y[0]


def test_a_stream_needs_a_number_of_steps():
    endless = replace(PLAIN, loaders=lambda: (DataLoader(Stream(), 4), unshuffled()[1]))
    with pytest.raises(ValueError, match="LoaderTask: `steps` must be given: DataLoader has no le"):
        run(endless)
    assert run(replace(endless, steps=3)).epoch == 2


def test_lanes_of_a_seed_see_the_same_batches_and_other_seeds_others():
    first, same = run(TASK, lam=(1e-9,)), run(TASK, lam=(1e-9,), optimizers=("adam",))
    assert first.curves["train_loss"][0] == pytest.approx(same.curves["train_loss"][0], rel=1e-4)
    assert first.curves["train_loss"] != run(TASK, lam=(1e-9,), seeds=(1,)).curves["train_loss"]


def test_autocast_runs_the_network_in_bfloat16():
    kinds = set()

    def loss(output, target):
        kinds.add(output.dtype)
        return F.cross_entropy(output.float(), target)

    run(replace(PLAIN, loss=loss, autocast="bfloat16"))
    assert kinds == {torch.bfloat16}


def test_a_small_lambda_of_the_grid_is_not_warned_about():
    run(PLAIN, optimizers=("wngrad",), lam=(1e-4,), epochs=60)  # more than 100 steps: warnings fail


class Graphs:
    """A batch of a class of its own, as libraries for graphs have them."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, where: str = "") -> None:
        self.x, self.y, self.where = x, y, where

    def to(self, device: torch.device) -> Graphs:
        return Graphs(self.x, self.y, str(device))


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_batches_of_a_class_of_their_own_are_moved_and_keep_their_class():
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = plain()

        def forward(self, batch: Graphs) -> torch.Tensor:
            assert batch.where == "cpu"
            return self.inner(batch.x)

    task = replace(
        PLAIN, model=Net, loaders=lambda: ([Graphs(X, Y)] * 2, [Graphs(X, Y)]), metric=None,
        loss=lambda output, batch: F.cross_entropy(output, batch.y),
    )  # fmt: skip
    checked_loaders(task, "mine.py")
    assert run(task).curves["valid_loss"][-1][0] > 0
    pair = moved({"pair": Pair(X, Y)}, torch.device("cpu"))["pair"]
    assert isinstance(pair, Pair)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loaders": lambda: 3}, "`loaders` must return (train, validation) or"),
        ({"loss": None}, "`loss` must be given: the model's Tensor has none"),
        ({"loss": lambda o, t: o}, "`loss` must return one number with a gradient"),
        ({"metric": lambda o, t: o}, "`metric` must return one number"),
        ({"model": dict}, "`model` must return a network with parameters"),
        ({"loaders": lambda: ([], [])}, "`loaders` must give some training batches"),
        ({"model": lambda: nn.Linear(7, 2)}, "`model` raised: RuntimeError"),
    ],
)
def test_a_task_that_cannot_work_is_told_in_a_line_before_anything_is_trained(changes, said):
    with pytest.raises(ValueError, match=r"^(mine|LoaderTask)") as error:
        checked_loaders(replace(PLAIN, **changes), "mine.py")
    assert said in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [{"name": " "}, {"model": 3}, {"model": nn.Linear(2, 1)}, {"epochs": 0}, {"clip": 0.0},
     {"warmup": 1.0}, {"patience": 0}, {"schedule": "step"}, {"autocast": "float16"},
     {"accumulate": 0}],
)  # fmt: skip
def test_wrong_settings_are_named(changes):
    with pytest.raises(ValueError, match=f"LoaderTask: `{next(iter(changes))}` must be"):
        replace(PLAIN, **changes)
