"""Random sequences of steps, and of what users do between them, against an independent step.

The oracle reads parameters, gradients and state before a step, and works out in float64 what they
must be afterwards. Between the steps data and state are swapped, storages shared, tensors resized,
settings changed, groups added, checkpoints loaded, copies made. A step that cannot be taken must
be refused, and then nothing may have changed.

    python sequences.py ENGINE FIRST COUNT [FOLDER]    the library with the C kernels from FOLDER

ENGINE is plain, c, or cuda: the kernels that a GPU runs; the oracle works on the CPU.
"""

from __future__ import annotations

import copy
import pickle
import random
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wngrad import WNAdam, WNGrad

SHAPES = [(), (1,), (7,), (3, 5), (3, 5), (16, 16), (0,), (2, 3, 3, 3), (4, 2, 3), (2, 300)]
DTYPES = [torch.float32] * 5 + [torch.bfloat16] * 2 + [torch.float16, torch.float64]
DTYPES += [torch.complex64]
RATES = [1.0, 0.1, 1e-3, 3.0, 0.0]
RATE_TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SETTINGS = ["momentum", "weight_decay", "decoupled_weight_decay", "b_init", "hold_1d"]
SETTINGS += ["nonfinite", "maximize"]
COUNT_TYPES = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64]


# ---------------------------------------------------------------------------- the oracle


def wide(t: Tensor) -> Tensor:
    t = t.detach().resolve_neg().resolve_conj().clone().cpu()
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def block_of(shape: tuple[int, ...], per: Any) -> tuple[Tensor, int]:
    """The number of each entry's block, and how many blocks there are."""
    kept = {"neuron": 1, "tensor": 0, "model": 0, "slice": 2 if len(shape) > 2 else 1}[per]
    counts = [n if d < kept else 1 for d, n in enumerate(shape)]
    index = torch.zeros(shape, dtype=torch.int64)
    for d, count in enumerate(counts):
        along = torch.arange(shape[d]) if count > 1 else torch.zeros(shape[d], dtype=torch.int64)
        index = index * count + along.view([-1 if k == d else 1 for k in range(len(shape))])
    total = 1
    for count in counts:
        total *= count
    return index.flatten(), total


@dataclass
class Expected:
    """What a parameter and its state must be after a step, and how far off each may be."""

    x: Tensor
    x_off: Tensor
    b: Tensor | None = None
    b_off: Tensor | None = None
    t: Tensor | None = None
    v: Tensor | None = None
    v_off: Tensor | None = None
    moved: bool = True  # else all must be the same, to the last bit


class Member:
    """A parameter that has a gradient, with all that its step depends on, in float64."""

    def __init__(self, opt: Any, group: dict[str, Any], p: Tensor) -> None:
        self.p, state = p, opt.state.get(p, {})
        self.index, self.count = block_of(tuple(p.shape), group["per"])
        self.x, g = wide(p).flatten(), wide(p.grad).flatten()
        self.decay = float(group["weight_decay"])
        coupled = 0.0 if group["decoupled_weight_decay"] else self.decay
        self.g, self.size = -g if group["maximize"] else g, g.abs()
        if coupled:
            self.g = self.g + coupled * self.x
            self.size = self.size + coupled * self.x.abs()  # for the rounding of that sum
        self.b = wide(state["b"]).flatten() if "b" in state else torch.zeros(self.count).double()
        self.v = torch.zeros_like(self.x)  # what the step before moved it by
        if "velocity" in state:
            self.v = wide(state["velocity"]).flatten()
        self.t = wide(state["t"]).flatten() if "t" in state else torch.zeros(1).double()
        self.held = group["hold_1d"] and p.dim() == 1
        kind = torch.float32 if p.dtype == torch.complex64 else p.dtype
        self.eps, self.most = torch.finfo(kind).eps, torch.finfo(kind).max
        self.work_eps = min(self.eps, torch.finfo(torch.float32).eps)
        self.sq = self.sums(self.g.abs().square())
        self.sq_off = self.sums(self.size.square()) * self.work_eps

    def sums(self, entries: Tensor) -> Tensor:
        return torch.zeros(self.count).double().index_add_(0, self.index, entries)


def expected(opt: Any) -> dict[Tensor, Expected] | str:
    """What the next step must make of every parameter; or why it must be refused."""
    result: dict[Tensor, Expected] = {}
    for group in opt.param_groups:
        lam = float(group["lr"])
        members = [Member(opt, group, p) for p in group["params"] if p.grad is not None]
        if lam == 0:
            continue
        shared = [m for m in members if not m.held] if group["per"] == "model" else []
        if shared:
            absent = [
                wide(opt.state[p]["b"]).flatten()
                for p in group["params"]
                if p.grad is None
                and "b" in opt.state.get(p, {})
                and not (group["hold_1d"] and p.dim() == 1)
            ]
            together = (
                torch.stack([*(m.b for m in shared), *absent]).amax(0),
                sum(m.sq for m in shared),
                sum(m.sq_off for m in shared),
            )
        for m in members:
            its = together if m in shared else (m.b, m.sq, m.sq_off)
            answer = stepped(opt, group, m, lam, *its)
            if isinstance(answer, str):
                return answer
            result[m.p] = answer
    return result


def stepped(
    opt: Any, group: dict[str, Any], m: Member, lam: float, b: Tensor, sq: Tensor, sq_off: Tensor
) -> Expected | str:
    """Algorithm 3, with momentum, or Algorithm 4, for one parameter."""
    start = ("gradient", 1.0) if group["b_init"] == "gradient" else group["b_init"]
    first = start[1] * lam * sq.sqrt() if isinstance(start, tuple) else torch.full_like(sq, start)
    least = torch.finfo(torch.float32 if m.eps > 1e-15 else torch.float64).tiny
    first = torch.where(first < least, 0.0, first)
    old = torch.where(b == 0, first, b)
    set_ = old > 0
    new = old if m.held else torch.where(old == 0, 0.0, old + lam**2 * sq / old)
    bad = ~sq.isfinite() | ~new.isfinite()
    if bad.any() and group["nonfinite"] == "raise":
        return "not finite"
    adam, mu = type(opt) is WNAdam, float(group["momentum"])
    each_b, live = new[m.index], set_[m.index]
    wrong = bad[m.index]
    keep = 1 - lam * m.decay if group["decoupled_weight_decay"] else 1.0
    x = torch.where(live, m.x * keep, m.x)
    over = torch.where(live, each_b, 1.0)
    move, size = lam * m.g / over, lam * m.size / over
    t, v, v_size = m.t + 1, m.v, 0.0
    if adam:  # λĝ is the mean of λg, and v was that over the b of its own last step
        t = torch.where(set_, m.t.expand(m.count) + 1, m.t.expand(m.count))
        mean = m.v * m.b[m.index]
        v = (mu * mean + (1 - mu) * lam * m.g) / over
        v_size = (mu * mean.abs() + (1 - mu) * lam * m.size) / over
        unbiased = 1 - mu ** t.clamp(min=1)[m.index]
        move, size = v / unbiased, v_size / unbiased
    elif mu:
        v, v_size = mu * m.v + move, mu * m.v.abs() + size
        move, size = v, v_size
    x, v = x - torch.where(live, move, 0), torch.where(live, v, m.v)
    if group["nonfinite"] == "skip":
        x, v = torch.where(wrong, m.x, x), torch.where(wrong, m.v, v)
        new = torch.where(bad, b if isinstance(start, tuple) else old, new)
        if adam:
            t = torch.where(bad, m.t.expand(m.count), t)
    else:
        x = x if m.held else torch.where(wrong, torch.nan, x)
        t = torch.where(bad, torch.nan, t) if adam else t  # it says no more
    grown = 0.0 if m.held else 8 * lam**2 * sq_off / torch.where(set_, old, 1.0)
    x, v = (torch.where(each.abs() > m.most, torch.inf, each) for each in (x, v))
    b_off = 8 * m.work_eps * new + grown
    relative = (b_off / new.clamp(min=1e-300))[m.index]
    size, v_size = (torch.where(live, each, 0.0) for each in (size, v_size + 0 * size))
    x_off = 2 * m.eps * (m.x.abs() + x.abs()) + size * (4 * m.eps + relative)
    v_off = v_size * (4 * m.eps + relative)
    return Expected(x, x_off, new, b_off, t, v if mu else None, v_off)


def compare(opt: Any, want: dict[Tensor, Expected], before: dict[Tensor, Any]) -> None:
    """Everything after a step; parameters on one storage have taken each other's steps."""
    at: dict[int, Tensor] = {}
    for p, e in want.items():
        if p.numel():
            key = p.data_ptr()
            at[key] = at.get(key, 0) + (e.x - wide(before[p]["x"]).flatten())
    for group in opt.param_groups:
        for p in group["params"]:
            e = want.get(p)
            if e is None:
                stored = any(q is not p and q.data_ptr() == p.data_ptr() for q in want)
                x = wide(before[p]["x"])
                still = torch.equal(wide(p).nan_to_num(), x.nan_to_num())
                assert stored or still, "a parameter without a step has moved"
                continue
            tiny = torch.finfo(p.dtype).tiny
            x = wide(before[p]["x"]).flatten()
            x = x + at[p.data_ptr()] if p.numel() else x
            off = sum(o.x_off for q, o in want.items() if q is p or q.data_ptr() == p.data_ptr())
            near("x", wide(p).flatten(), x, off + tiny)
            state = opt.state[p]
            near("b", wide(state["b"]).flatten(), e.b, e.b_off, bad_too=False)
            if "t" in state:
                near("t", wide(state["t"]).flatten(), e.t, torch.zeros_like(e.t), bad_too=False)
            if e.v is not None:
                good = e.x.isfinite() & e.v.isfinite()
                v = wide(state["velocity"]).flatten()
                near("velocity", v[good], e.v[good], e.v_off[good] + tiny)


def near(name: str, ours: Tensor, theirs: Tensor, off: Tensor, bad_too: bool = True) -> None:
    good = theirs.isfinite() if not theirs.is_complex() else theirs.real.isfinite()
    far = (ours - theirs).abs()[good] > off[good]
    assert not far.any(), f"{name}: {ours[good][far][:3]} instead of {theirs[good][far][:3]}"
    if bad_too:
        assert not ours[~good].isfinite().any(), f"{name}: {ours[~good][:3]} hides what is bad"


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN included."""
    a, b = (t.detach().resolve_neg().clone(memory_format=torch.contiguous_format) for t in (a, b))
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.numel() == 0 or torch.equal(
        a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)
    )


# ------------------------------------------------------------------- what happens between steps


class Run:
    """One sequence: an optimizer, its parameters, and the random numbers that drive both."""

    def __init__(self, seed: int, fused: bool | None, device: str = "cpu") -> None:
        self.draw, self.fused, self.device = random.Random(seed), fused, device
        self.torch_draw = torch.Generator().manual_seed(seed)
        self.make = self.draw.choice([WNGrad, WNGrad, WNAdam])
        self.dtype = self.draw.choice(DTYPES)
        self.log: list[str] = []
        params = [self.parameter() for _ in range(self.draw.randint(1, 4))]
        self.opt = self.make(params, **self.options())
        self.default = torch.float32
        self.counts: Counter[str] = Counter()

    def options(self) -> dict[str, Any]:
        draw = self.draw
        return {
            "lr": draw.choice(RATES),
            "momentum": draw.choice([0.0, 0.9, 0.5]),
            "weight_decay": draw.choice([0.0, 0.0, 0.01]),
            "decoupled_weight_decay": draw.random() < 0.5,
            "b_init": draw.choice([1.0, 0.3, "gradient", ("gradient", 2.0)]),
            "per": draw.choice(["neuron", "neuron", "tensor", "model", "slice"]),
            "hold_1d": draw.random() < 0.3,
            "nonfinite": draw.choice(["propagate", "skip", "raise"]),
            "maximize": draw.random() < 0.3,
            "stochastic_rounding": draw.random() < 0.1,
            "fused": self.fused,
        }

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.opt.param_groups for p in group["params"]]

    def tensor(self, shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        kind = torch.complex128 if self.dtype.is_complex else torch.float64
        t = scale * torch.randn(shape, generator=self.torch_draw, dtype=kind)
        t = t.to(self.device, self.dtype)
        layout = self.draw.choice(["plain", "plain", "transposed", "negative", "gaps"])
        if layout == "transposed":
            back = tuple(reversed(range(t.dim())))
            return t.permute(back).contiguous().permute(back)
        if layout == "negative" and not t.is_complex():
            return torch._neg_view(-t)
        if layout == "gaps" and t.dim():
            return torch.stack([t, t], -1).flatten(-2)[..., ::2]
        return t

    def parameter(self) -> Tensor:
        return nn.Parameter(self.tensor(self.draw.choice(SHAPES)))

    def gradients(self) -> None:
        scale = self.draw.choice([1.0, 1.0, 1e-3, 30.0])
        for p in self.params:
            p.grad = None
            if self.draw.random() < 0.9:
                p.grad = self.tensor(tuple(p.shape), scale)
                if p.numel() and self.draw.random() < 0.03:
                    bad = self.draw.choice([torch.nan, torch.inf])
                    p.grad = p.grad.clone(memory_format=torch.contiguous_format)
                    p.grad.view(-1)[0] = bad
                if self.draw.random() < 0.05:
                    p.grad = torch.zeros_like(p.grad)

    # -- changes after which a step can be taken

    def pair(self, key: Any) -> tuple[Tensor, Tensor] | None:
        alike: dict[Any, list[Tensor]] = {}
        for p in self.params:
            alike.setdefault(key(p), []).append(p)
        pairs = [ps for ps in alike.values() if len(ps) > 1]
        return (pairs[0][0], pairs[0][1]) if pairs else None

    def swap_data(self) -> None:
        if found := self.pair(lambda p: (p.shape, p.is_neg())):
            p, q = found
            p.data, q.data = q.data, p.data

    def swap_state(self) -> None:
        group = self.draw.choice(self.opt.param_groups)
        if group["per"] != "model":
            mine = {id(p) for p in group["params"]}
            if found := self.pair(lambda p: (p.shape, id(p) in mine)):
                p, q = found
                if id(p) in mine and p in self.opt.state and q in self.opt.state:
                    state = self.opt.state
                    state[p], state[q] = state[q], state[p]

    def share(self) -> None:
        """Two parameters on one storage; without decay, so that their order does not matter."""
        found = self.pair(lambda p: (p.shape, p.is_neg()))
        if found and all(float(g["weight_decay"]) == 0 for g in self.opt.param_groups):
            found[1].data = found[0].data

    def unshare(self) -> None:
        for p in self.params:
            p.data = p.data.clone()

    def settings(self) -> None:
        group = self.draw.choice(self.opt.param_groups)
        name = self.draw.choice(SETTINGS)
        value = self.options()[name]
        group[name] = value
        self.log.append(f"{name} = {value}")
        if name == "weight_decay" and value:
            self.unshare()

    def rate(self) -> None:
        self.draw.choice(self.opt.param_groups)["lr"] = self.draw.choice(RATES)

    def tensor_rate(self) -> None:
        kind = self.draw.choice([*RATE_TYPES, *COUNT_TYPES])
        value = self.draw.choice([1, 2, 0]) if kind in COUNT_TYPES else self.draw.choice(RATES)
        shape = self.draw.choice([(), (1,)])
        group = self.draw.choice(self.opt.param_groups)
        group["lr"] = torch.full(shape, value, dtype=kind)
        if self.device != "cpu" and self.draw.random() < 0.5:
            group["lr"] = group["lr"].to(self.device)
        self.log.append(f"lr = {group['lr']}")

    def default_type(self) -> None:
        self.default = self.draw.choice([torch.float32, torch.float64, torch.bfloat16])

    def new_memory(self) -> None:
        p = self.draw.choice(self.params)
        p.data = self.tensor(tuple(p.shape)).resolve_neg()

    def add_group(self) -> None:
        if len(self.params) < 8:
            group = {"params": [self.parameter()], **self.options()}
            self.opt.add_param_group(group)
            if float(group["weight_decay"]):
                self.unshare()

    def load(self) -> None:
        saved = self.opt.state_dict()
        if not all(state["b"].isfinite().all() for state in saved["state"].values()):
            return  # It may be refused.
        groups = [{**g, "params": g["params"]} for g in self.opt.param_groups]
        self.opt = self.make(groups, fused=self.fused)
        self.opt.load_state_dict(saved)

    def copy(self) -> None:
        self.opt = copy.deepcopy(self.opt)

    def pickled(self) -> None:
        if not any(p.is_neg() for p in self.params):  # which torch does not pickle
            self.opt = pickle.loads(pickle.dumps(self.opt))

    # -- changes after which it must be refused; each returns what mends them

    def resize(self) -> Any:
        p = self.draw.choice([p for p in self.params if p.grad is not None])
        data, new = p.data, self.draw.choice([(300, 300), (3, 4), (9,)])
        if new == tuple(p.shape):
            return None
        p.data = torch.zeros(new, dtype=p.dtype, device=p.device)
        return lambda: setattr(p, "data", data)

    def resize_gradient(self) -> Any:
        p = self.draw.choice([p for p in self.params if p.grad is not None])
        if p.grad.is_neg() or tuple(p.shape) == (2, 2):
            return None
        p.grad.data = torch.zeros(2, 2, dtype=p.dtype, device=p.device)
        return lambda: setattr(p, "grad", None)

    def bad_setting(self) -> Any:
        group = self.draw.choice(self.opt.param_groups)
        name, value = self.draw.choice(
            [
                ("lr", "1"), ("lr", torch.ones(2)), ("b_init", -1.0), ("momentum", 1.5),
                ("b_init", ("gradient",)), ("nonfinite", "x"), ("weight_decay", -1.0),
                ("lr", float("nan")), ("per", "x"), ("lr", 1e39), ("joint", 3),
            ]
        )  # fmt: skip
        good, group[name] = group[name], value
        self.log.append(f"{name} = {value}")
        return lambda: group.update({name: good})


CHANGES = (
    *(Run.swap_data, Run.swap_state, Run.share, Run.unshare, Run.settings, Run.settings),
    *(Run.rate, Run.tensor_rate, Run.default_type, Run.new_memory, Run.add_group, Run.load),
    *(Run.copy, Run.pickled),
)
SPOILS = (Run.resize, Run.resize_gradient, Run.bad_setting)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def snapshot(opt: Any) -> dict[Tensor, Any]:
    return {
        p: {
            "x": p.detach().clone(),
            "state": {k: v.clone() for k, v in opt.state.get(p, {}).items()},
        }
        for group in opt.param_groups
        for p in group["params"]
    }


def unchanged(opt: Any, before: dict[Tensor, Any]) -> bool:
    def one(p: Tensor) -> bool:
        state, old = opt.state.get(p, {}), before[p]["state"]
        same = state.keys() == old.keys() and all(equal(state[k], old[k]) for k in old)
        return same and equal(p, before[p]["x"])

    return all(map(one, before))


def step(run: Run) -> None:
    """One step, held against the oracle; a refusal must change nothing."""
    before, want = snapshot(run.opt), expected(run.opt)
    with default_dtype(run.default):
        try:
            run.opt.step()
        except ValueError:
            assert isinstance(want, str), "a step was refused"
            assert unchanged(run.opt, before), "a refused step has changed something"
            run.counts["refused"] += 1
            return
    assert not isinstance(want, str), f"a step was taken: {want}"
    compare(run.opt, want, before)
    run.counts["steps"] += 1
    run.counts["fused"] += len(run.opt.why_plain()) < len(run.params)


def refused(run: Run, spoil: Any) -> None:
    if not any(p.grad is not None for p in run.params):
        return
    if (mend := spoil(run)) is None:
        return
    before = snapshot(run.opt)
    try:
        run.opt.step()
    except (ValueError, TypeError, RuntimeError):
        assert unchanged(run.opt, before), "a refused step has changed something"
        run.counts["refused"] += 1
    else:
        raise AssertionError("a step that cannot be taken was taken")
    mend()


def sequence(seed: int, fused: bool | None, device: str = "cpu", steps: int = 6) -> Counter[str]:
    """Run one; an AssertionError says what differs, and after what."""
    run = Run(seed, fused, device)
    try:
        for _ in range(steps):
            run.gradients()
            if run.draw.random() < 0.25:
                spoil = run.draw.choice(SPOILS)
                run.log.append(spoil.__name__)
                refused(run, spoil)
            for change in run.draw.sample(CHANGES, run.draw.randint(0, 2)):
                run.log.append(change.__name__)
                change(run)
                run.counts[change.__name__] += 1
            if any(p.grad is None for p in run.params) and run.draw.random() < 0.7:
                run.gradients()
            step(run)
            run.log.append("step")
    except Exception as error:
        what = f"{run.make.__name__}, {run.dtype}, {[tuple(p.shape) for p in run.params]}"
        settings = {k: v for k, v in run.opt.param_groups[0].items() if k != "params"}
        raise AssertionError(f"sequence {seed}: {error} ({what}, {settings}, {run.log})") from error
    return run.counts


def sequences(first: int, count: int, fused: bool | None, device: str = "cpu") -> Counter[str]:
    """The counts of so many, of which each must agree with the oracle."""
    counts: Counter[str] = Counter()
    for seed in range(first, first + count):
        counts += sequence(seed, fused, device)
    return counts


if __name__ == "__main__":
    engine, first, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if len(sys.argv) > 4:
        from wngrad.optim.fused import library

        library._FOLDER = Path(sys.argv[4])
    how = {"plain": (False, "cpu"), "c": (None, "cpu"), "cuda": (None, "cuda")}[engine]
    print(dict(sequences(first, count, *how)))
