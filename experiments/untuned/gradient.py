"""The gradient of a task's network, over memory that stays where it is: on a GPU a CUDA graph.

The graph holds a batch's gathering, the forward and the backward pass; a run copies its first
weights in. On a core the same lines run one by one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.untuned.tasks import Split, Task
from wngrad.lab.run.environment import environment

EAGER = 3  # steps before a capture: state is made, kernels are chosen and compiled


class Gradient:
    """A network and its data on one device, and the gradient of a batch.

    Args:
        task: what is trained.
        device: "cpu" or "cuda".
        folder: where the data is.
        captured: whether it becomes a CUDA graph, on CUDA.
    """

    def __init__(self, task: Task, device: str, folder: Path | None, *, captured: bool) -> None:
        self.task, self.device, self.cuda = task, device, device != "cpu"
        self.captured = captured and self.cuda
        if self.cuda:
            torch.backends.cudnn.benchmark = True
            torch.set_float32_matmul_precision("high")
        self.split = task.load(folder).to(device)
        self.model = self._placed(task.network(0))
        self.params = list(self.model.parameters())
        self.draw = task.draws(len(self.split.train_x), 1, 0)[0].to(device)  # the batch to take
        self.loss = torch.zeros((), device=device)
        self.total = torch.zeros((), device=device)  # of the losses since it was last read
        self._first: dict[int, dict[str, Tensor]] = {}  # weights and statistics of every seed
        self._forward: Any = self.model
        self.backward: Callable[[], None] = self._backward
        self._grads: list[Tensor | None] = []
        if self.captured:
            self._capture()
        self.facts = {  # that every record repeats
            "precision": "bfloat16" if self._autocast else "TF32" if self.cuda else "float32",
            "compiled": self._forward is not self.model,
            "parameters": sum(p.numel() for p in self.params),
            "data": _fingerprint(self.split),
            "environment": environment(device),
        }

    def start(self, seed: int) -> None:
        """Take the network of a seed."""
        if seed not in self._first:
            self._first[seed] = self._placed(self.task.network(seed)).state_dict()
        self.model.load_state_dict(self._first[seed])
        self.model.train()
        self.total.zero_()
        self.attach()

    def attach(self) -> None:
        """Give every parameter the gradient that the graph writes; none without a graph."""
        for p, grad in zip(self.params, self._grads, strict=bool(self._grads)):
            p.grad = grad

    def mean(self, count: int) -> float:
        """The mean loss of the last `count` batches, all since the last call; waits for them."""
        mean = self.total.item() / count
        self.total.zero_()
        return mean

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def precision(self) -> Any:
        """The context of every forward pass."""
        kind = "cuda" if self.cuda else "cpu"
        # Without the cache: a copy of a weight must not outlive the capture it was made in.
        return torch.autocast(kind, torch.bfloat16, self._autocast, cache_enabled=False)

    @property
    def _autocast(self) -> bool:
        return self.task.bfloat16 and self.cuda

    def _placed(self, model: nn.Module) -> nn.Module:
        model = model.to(self.device)
        if self.task.augmented and self.cuda:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def _backward(self) -> None:
        """The loss and the gradients of the batch that `draw` names."""
        if not self.captured:
            self.model.zero_grad()
        x, y = self.task.examples(self.split, self.draw)
        with self.precision():
            output = self._forward(x)
        loss = self.task.loss(output, y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.loss.copy_(loss.detach())
        self.total.add_(self.loss)

    def _capture(self) -> None:
        if self.task.compiled:
            self._compile()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(EAGER):
                self._backward()
        torch.cuda.current_stream().wait_stream(side)
        for p in self.params:
            p.grad = None  # so that its memory is the graph's, and written by every replay
        self.backward = graph(self._backward)
        self._grads = [p.grad for p in self.params]

    def _compile(self) -> None:
        """Put torch.compile before the capture; the network stays as it is if that fails."""
        self._forward = torch.compile(self.model, dynamic=False)
        try:
            self._backward()
        except Exception as error:
            self._forward = self.model
            text = str(error).strip().splitlines() or [type(error).__name__]
            print(f"untuned: {self.task.name} is not compiled: {text[0]}", flush=True)


def graph(work: Callable[[], Any]) -> Callable[[], None]:
    """`work` as a CUDA graph: captured, not run.

    cuBLAS keeps its workspace from one call to the next. One that was made in a capture goes with
    that graph's memory, and one from before must not be written by two graphs: so none is kept.
    """
    made = torch.cuda.CUDAGraph()
    forget = getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)
    forget()
    with torch.cuda.graph(made):
        work()
    forget()
    return made.replay


def _fingerprint(split: Split) -> str:
    """The number of training examples and a digest of the test data."""
    raw = split.test_x.cpu().contiguous().flatten().view(torch.uint8).numpy()
    return f"{len(split.train_x)}+{hashlib.sha256(raw.data).hexdigest()[:12]}"
