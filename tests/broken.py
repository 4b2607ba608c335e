"""Optimizers broken on purpose: for every probe one that must fail it, and some that misbehave.

Each is `Plain`, which passes every probe, with one thing wrong.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

import torch
from torch.distributed.tensor import DTensor


class Plain(torch.optim.Optimizer):
    """Gradient descent."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group["lr"])
        return loss

    def update(self, p, g, lr):
        p.sub_(lr * g)


class Lame(Plain):
    def update(self, p, g, lr):
        pass


class Chatty(Plain):
    def update(self, p, g, lr):
        print("Stepping!", flush=True)
        super().update(p, g, lr)


class NeedsEveryGradient(Plain):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad.clone())


class WritesGradients(Plain):
    def update(self, p, g, lr):
        p.sub_(g.mul_(lr))


class ClipsGradients(Plain):
    """It writes into gradients, but into large ones alone."""

    def update(self, p, g, lr):
        p.sub_(lr * g.clamp_(-1, 1))


class DividesByTheFirstNorm(Plain):
    def update(self, p, g, lr):
        norm = self.state[p].setdefault("norm", g.norm())
        p.sub_(lr * g / norm)


class CallsTwice(Plain):
    def step(self, closure=None):
        if closure is not None:
            closure()
        return super().step(closure)


class LeavesGradientsOff(Plain):
    def step(self, closure=None):
        torch.set_grad_enabled(False)
        loss = super().step(closure)
        torch.set_grad_enabled(True)
        return loss


class LargestRate(Plain):
    def update(self, p, g, lr):
        super().update(p, g, max(group["lr"] for group in self.param_groups))


class FirstRate(Plain):
    def update(self, p, g, lr):
        super().update(p, g, self.param_groups[0]["lr"])


class RemembersTheRate(Plain):
    def update(self, p, g, lr):
        super().update(p, g, self.state[p].setdefault("lr", float(lr)))


class CachesTheRate(Plain):
    def update(self, p, g, lr):
        super().update(p, g, vars(self).setdefault(f"rate {id(lr)}", float(lr)))


class KnowsItsFirstParameters(Plain):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.known = {id(p) for group in self.param_groups for p in group["params"]}

    def update(self, p, g, lr):
        if id(p) in self.known:
            super().update(p, g, lr)


class CountsInAnAttribute(Plain):
    count = 0

    def update(self, p, g, lr):
        self.count += 1
        super().update(p, g, lr / self.count)


class WideBuffer(Plain):
    """Its float32 buffer is rounded by load_state_dict."""

    def update(self, p, g, lr):
        m = self.state[p].setdefault("m", torch.zeros_like(p, dtype=torch.float32))
        p.sub_(lr * m.mul_(0.9).add_(g))


class SettingInAnAttribute(Plain):
    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)
        self.factor = 0.5

    def update(self, p, g, lr):
        super().update(p, g, lr * self.factor)


class CopyHoldsTheOriginal(Plain):
    def __deepcopy__(self, memo):
        return type(self)(self.param_groups[0]["params"])


class Broadcasts(Plain):
    def update(self, p, g, lr):
        m = self.state[p]["m"] = 0.9 * self.state[p].get("m", torch.zeros_like(p)) + g
        p.sub_(lr * m)


class RealPart(Plain):
    def update(self, p, g, lr):
        p.sub_(lr * g.real)


class MovesEveryRow(Plain):
    def update(self, p, g, lr):
        super().update(p, g.to_dense() + 0.01, lr)


class Timid(Plain):
    def update(self, p, g, lr):
        super().update(p, g, lr * 2e-3)


class LargestEntry(Plain):
    def update(self, p, g, lr):
        p.sub_(lr * g / (1 + g.abs().max()))


class Flattens(Plain):
    def update(self, p, g, lr):
        p.view(-1).sub_(lr * g.view(-1))


class LooksAtTheNorm(Plain):
    def update(self, p, g, lr):
        super().update(p, g, lr / max(1.0, g.norm().item()))


class NewCodeEveryStep(Plain):
    def update(self, p, g, lr):
        name = self.state[p]["name"] = self.state[p].get("name", "") + "x"
        super().update(p, g, lr * (0.5 if name == "y" else 1.0))


class ScalesByItself(Plain):
    """Says that it takes scaled gradients, and does not."""

    _step_supports_amp_scaling = True

    def step(self, closure=None, grad_scaler=None):
        return super().step(closure)


class HidesNaN(Plain):
    def update(self, p, g, lr):
        m = self.state[p].setdefault("m", torch.zeros_like(p))
        m.mul_(0.9).add_(g)
        p.sub_(torch.nan_to_num(lr * m, nan=0.0))


class PoisonedAttribute(Plain):
    total = 1.0

    def update(self, p, g, lr):
        self.total = self.total + g.norm()
        super().update(p, g, lr / self.total)


class NeverForgetsASpike(Plain):
    def update(self, p, g, lr):
        largest = self.state[p].setdefault("largest", torch.zeros_like(p))
        p.sub_(lr * torch.maximum(largest, g.abs(), out=largest) * g.sign())


class FourthPower(Plain):
    def update(self, p, g, lr):
        super().update(p, g, lr / g.pow(4).sum().sqrt())


class KeepsHistory(Plain):
    def update(self, p, g, lr):
        self.state[p].setdefault("history", []).append(g.clone())
        super().update(p, g, lr)


def local(t):
    return t.to_local() if isinstance(t, DTensor) else t


class NormOfTheShard(Plain):
    def update(self, p, g, lr):
        super().update(p, g, lr / (1 + float(local(g).norm())))


class EntryOfTheShard(Plain):
    def update(self, p, g, lr):
        local(g)[0]  # A rank may have none.
        super().update(p, g, lr)


class StateOfTheShard(Plain):
    def update(self, p, g, lr):
        m = self.state[p].setdefault("m", torch.zeros_like(local(p)))
        local(p).sub_(lr * m.mul_(0.9).add_(local(g)))


# The optimizer that fails the probe, and a word of the reason.
BROKEN = {
    "made": (Lame, "moved"),
    "quiet": (Chatty, "Stepping!"),
    "unused parameters": (NeedsEveryGradient, "NoneType"),
    "gradients untouched": (WritesGradients, "p.grad"),
    "zero first gradient": (DividesByTheFirstNorm, "NaN"),
    "closure": (CallsTwice, "2 times"),
    "autograd mode after an error": (LeavesGradientsOff, "stay off"),
    "lr = 0 group": (LargestRate, "lr = 0 has moved"),
    "per-group lr": (FirstRate, "quarter"),
    "scheduler to 0": (RemembersTheRate, "scheduler"),
    "tensor lr": (CachesTheRate, "other steps"),
    "late group": (KnowsItsFirstParameters, "added group"),
    "resume": (CountsInAnAttribute, "differ"),
    "resume in bfloat16": (WideBuffer, ""),
    "pickle": (SettingInAnAttribute, "factor"),
    "deepcopy": (CopyHoldsTheOriginal, "apart"),
    "mismatched state": (Broadcasts, "another shape"),
    "complex": (RealPart, "imaginary"),
    "sparse": (MovesEveryRow, "rows [0, 1, 2, 3, 4, 5] move"),
    "bfloat16": (Timid, "stands still"),
    "odd shapes": (LargestEntry, "max()"),
    "memory layouts": (Flattens, "view"),
    "host waits": (LooksAtTheNorm, "wait"),
    "compile": (NewCodeEveryStep, "anew"),
    "GradScaler": (ScalesByItself, "GradScaler"),
    "NaN gradient": (HidesNaN, "never move again"),
    "rollback after NaN": (PoisonedAttribute, "rollback"),
    "gradient spike": (NeverForgetsASpike, "where it started"),
    "loss scale": (FourthPower, "finite"),
    "state size": (KeepsHistory, "grow"),
    "FSDP2 even": (NormOfTheShard, "off"),
    "FSDP2 uneven": (EntryOfTheShard, "rank 1"),
    "DCP": (CountsInAnAttribute, "never stopped"),
    "2 → 4 resharding": (StateOfTheShard, ""),
}


# --------------------------------------------------------- right, but used in another way


class NeedsTraining(Plain):
    training = False

    def train(self):
        self.training = True

    def eval(self):
        self.training = False

    def update(self, p, g, lr):
        assert self.training
        super().update(p, g, lr)


class NeedsTheLoss(Plain):
    def step(self, closure=None, loss=None):
        assert (closure is None) != (loss is None)
        return super().step(closure)


class NeedsARate(Plain):
    def __init__(self, params, lr):
        super().__init__(params, lr)


class RefusesGroups(Plain):
    def add_param_group(self, group):
        if self.param_groups:
            raise ValueError("RefusesGroups takes one group of parameters")
        super().add_param_group(group)


class KeepsAnObject(Plain):
    def update(self, p, g, lr):
        self.state[p]["clock"] = time.struct_time(range(9))
        super().update(p, g, lr)


# ------------------------------------------------------------------------ misbehaviour


class NeedsArgument(Plain):
    def __init__(self, params, total_steps):
        super().__init__(params, lr=1 / total_steps)


class Hangs(Plain):
    def update(self, p, g, lr):
        time.sleep(1000)


class Exits(Plain):
    def update(self, p, g, lr):
        os._exit(3)


class Leaves(Plain):
    def update(self, p, g, lr):
        sys.exit("enough")


class Killed(Plain):
    def update(self, p, g, lr):
        os.kill(os.getpid(), signal.SIGKILL)


class KillsTheWatcher(Plain):
    def update(self, p, g, lr):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1000)


class PrintsForEver(Plain):
    def update(self, p, g, lr):
        while True:
            os.write(1, b"x" * (1 << 20))


class StopsTheWatcher(Plain):
    def update(self, p, g, lr):
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(1000)


class Forges(Plain):
    def update(self, p, g, lr):
        for descriptor in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(descriptor, b'{"status": "pass", "detail": "", "usage": ""}\n')
        os._exit(0)


class Hoards(Plain):
    def update(self, p, g, lr):
        self.hoard = [torch.empty(1 << 30, dtype=torch.uint8) for _ in range(16)]


class SpeaksInSurrogates(Plain):
    def update(self, p, g, lr):
        raise ValueError("half a character: \ud83d")


class Multiplies(Plain):
    """Leaves a process in a session of its own, whose number it writes down."""

    def __init__(self, params, lr=0.1, file=""):
        super().__init__(params, lr)
        if os.fork() == 0:
            os.setsid()
            if (pid := os.fork()) == 0:
                time.sleep(1000)
            with open(file, "a") as numbers:
                numbers.write(f"{pid}\n")
            os._exit(0)
        os.wait()


MISBEHAVED = {
    "no_such_module:Nothing": "cannot be imported: ModuleNotFoundError",
    "broken:Nothing": "cannot be imported: AttributeError",
    "broken:NeedsArgument": "total_steps",
    "broken:Hangs": "hangs: stopped after 2 s",
    "broken:Exits": "its process ended by itself, with exit code 3",
    "broken:Leaves": "SystemExit: enough",
    "broken:Killed": "its process was killed by SIGKILL",
    "broken:KillsTheWatcher": "killed the process that watches",
    "broken:PrintsForEver": "File too large",
    "broken:Forges": "its process ended by itself, with exit code 0",
    "broken:Hoards": "can't allocate memory",
    "broken:SpeaksInSurrogates": "half a character: \\ud83d",
}
