"""What the tests share: the table of optimizers, and small problems."""

from __future__ import annotations

import copy
import hashlib
import os
import platform
import re
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

# Each worker of pytest has a core to itself, and a second thread is slower than none on tensors as
# small as these. Said before torch is imported; processes that a test starts inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Some virtual machines name AMX among their instructions and do not let it be used: torch's
# products in bfloat16 then end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")
# By these of MKL's products a matrix does not depend on how many others are multiplied beside it,
# on whichever machine.
os.environ.setdefault("MKL_CBWR", "AVX2")

import torch
from hypothesis import HealthCheck, settings
from torch import Tensor, nn

if not torch.cuda.is_available():
    # For tests/test_fused.py: Triton decides when it is imported (by torch, too) who runs kernels.
    os.environ["TRITON_INTERPRET"] = "1"

import wngrad
from wngrad import WNAdam, WNGrad, WNMuon


def _compiled_for() -> str:
    """A name for this machine's instruction set, on which alone a compiled program runs."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.is_file() else platform.platform()
    flags = next((line for line in text.splitlines() if line.startswith("flags")), text)
    return hashlib.sha256(flags.encode()).hexdigest()[:16]


# Most of the time of JAX's tests is XLA's, which compiles a thousand small programs: in a hurry,
# and each of them once for all workers and processes.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault(
    "JAX_COMPILATION_CACHE_DIR",
    str(Path(__file__).parents[1] / ".pytest_cache" / "jax" / _compiled_for()),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

settings.register_profile(
    "default", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")


@dataclass(frozen=True)
class Row:
    """An optimizer of the table: every contract test runs over all of them."""

    name: str
    make: Callable[..., Any]
    options: dict[str, Any]

    def __call__(self, params: Any, **options: Any) -> Any:
        return self.make(params, **{**self.options, **options})


MOMENTUM_DECAY = {"momentum": 0.9, "weight_decay": 0.1}
GRADIENT_SKIP = {"b_init": ("gradient", 2.0), "nonfinite": "skip"}


@cache
def from_the_docs() -> Any:
    """The optimizer that docs/new-optimizer.md writes, as it stands there."""
    page = (Path(__file__).parents[1] / "docs/new-optimizer.md").read_text()
    module = types.ModuleType("new_optimizer")  # with a name, so that it can be pickled
    sys.modules[module.__name__] = module
    code = page.partition("```python\n")[2].partition("```")[0]
    exec(compile(code, "docs/new-optimizer.md", "exec", dont_inherit=True), vars(module))
    return module.WNSign


TABLE = [
    Row("wngrad", WNGrad, {}),
    Row("wngrad-momentum", WNGrad, {"momentum": 0.9}),
    Row("wngrad-momentum-decay", WNGrad, MOMENTUM_DECAY),
    Row("wngrad-gradient", WNGrad, {"b_init": "gradient"}),
    Row("wngrad-tensor", WNGrad, {"per": "tensor", "weight_decay": 0.01}),
    Row("wngrad-model", WNGrad, {"per": "model", "nonfinite": "skip"}),
    Row("wngrad-slice", WNGrad, {"per": "slice", "hold_1d": True}),
    Row("wngrad plain", WNGrad, {"fused": False}),
    Row("wngrad-momentum-decay plain", WNGrad, {**MOMENTUM_DECAY, "fused": False}),
    Row("wnadam", WNAdam, {}),
    Row("wnadam-gradient plain", WNAdam, {**GRADIENT_SKIP, "fused": False}),
    Row("sign", from_the_docs(), {}),
    Row("wnmuon", WNMuon, {}),
    Row("wnmuon-finetune", WNMuon, {"finetune": True}),
    Row("wngrad-average", WNGrad, {"average": 4.0, "momentum": 0.5}),
    Row("wnadam-decay", WNAdam, {"weight_decay": 0.1}),
    Row("wnadam-gradient", WNAdam, GRADIENT_SKIP),
    Row(
        "wnadam-model",
        WNAdam,
        {"per": "model", "weight_decay": 0.1, "decoupled_weight_decay": True},
    ),
]


@pytest.fixture(params=TABLE, ids=lambda row: row.name)
def optimizer(request: pytest.FixtureRequest) -> Row:
    row: Row = request.param
    return row


FEW = ("wngrad", "wngrad-momentum-decay", "wngrad-model", "wnadam-gradient", "sign", "wnmuon")


@pytest.fixture(params=[row for row in TABLE if row.name in FEW], ids=lambda row: row.name)
def one_of_few(request: pytest.FixtureRequest) -> Row:
    """A row for each direction and each kind of block: for tests that take seconds."""
    row: Row = request.param
    return row


@pytest.fixture(
    params=[row for row in TABLE if row.make in (WNGrad, WNAdam) and "fused" not in row.options],
    ids=lambda row: row.name,
)
def fused_optimizer(request: pytest.FixtureRequest) -> Row:
    """Those of the table that kernels know."""
    row: Row = request.param
    return row


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert torch.is_grad_enabled()


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that compare the lab's files byte for byte: they say under what they were made."""
    monkeypatch.setenv("WNGRAD_COMMIT", "test")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # for processes that the test starts
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def whole(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a small sweep of the lab leaves if nothing disturbs it."""
    from small_lab import contents, visit

    folder = tmp_path_factory.mktemp("whole")
    visit(folder)
    return contents(folder)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, Any]) -> None:
    doctest_namespace.update(torch=torch, **{n: getattr(wngrad, n) for n in wngrad.__all__})


def network() -> nn.Sequential:
    """A convolution, a normalization and a linear layer: parameters of 1, 2 and 4 dimensions."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4)
    )


def backward(model: nn.Module, seed: int = 0, scale: float = 1.0) -> Tensor:
    """The loss and gradients of one batch drawn from `seed`."""
    device = next(model.parameters()).device
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 2, 4, 4, generator=draw).to(device)
    y = torch.randint(4, (8,), generator=draw).to(device)
    dtype = next(model.parameters()).dtype
    loss = scale * nn.functional.cross_entropy(model(x.to(dtype)), y)
    loss.backward()
    return loss


def train(model: nn.Module, opt: Any, steps: int, first: int = 0) -> None:
    for seed in range(first, first + steps):
        opt.zero_grad()
        backward(model, seed)
        opt.step()


def twins() -> tuple[nn.Sequential, nn.Sequential]:
    model = network()
    return model, copy.deepcopy(model)


def same(a: nn.Module, b: nn.Module) -> bool:
    """Bit for bit."""
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def flat_state(opt: Any) -> list[Tensor]:
    return [
        value
        for group in opt.param_groups
        for p in group["params"]
        for _, value in sorted(opt.state.get(p, {}).items())
    ]


def same_state(a: Any, b: Any) -> bool:
    return all(
        x.dtype == y.dtype and torch.equal(x, y)
        for x, y in zip(flat_state(a), flat_state(b), strict=True)
    )


def jax_in_float64() -> AbstractContextManager[Any]:
    """JAX in 64 bits, as it is switched on in the installed release."""
    import jax

    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(True)
    from jax.experimental import enable_x64  # before JAX 0.8

    return enable_x64(True)


# What an older torch cannot do (docs/versions.md): the last release in which it was seen, the tests
# that need it, and what it is.
LACKING = [
    (
        (2, 8),
        "test_a_whole_compiled_training_step_is|test_a_compiled_step_follows_a_schedule_without|"
        r"test_a_whole_training_step_compiles_with|test_a_compiled_model_resumes|b_init_set_as_a_word.*\[True-",
        "cannot compile the step",
    ),
    (
        (2, 8),
        r"test_schedulers\.py::.*(SequentialLR|SWALR|ReduceLROnPlateau-\w+-True)",
        "its scheduler warns, or cannot be saved, or makes a tensor `lr` a number",
    ),
    ((2, 8), "every_change_is_seen.*Python-a gradient of another type", "has no `grad_dtype`"),
    ((2, 8), r"test_orthogonal_sharded\.py::", "cannot save these shards"),
    (
        (2, 6),
        r"test_sharded\.py::|test_fsdp2_|test_blocks_cut_between_ranks|test_ranks_that_must_agree",
        "has no FSDP2 on a CPU",
    ),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    for last, pattern, reason in LACKING:
        for item in items if version <= last else ():
            if re.search(pattern, item.nodeid):
                item.add_marker(pytest.mark.skip(reason=f"torch {torch.__version__} {reason}"))
