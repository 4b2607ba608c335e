"""Where and with what a run is made: versions, commit, device, precision."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any, TypeAlias

import torch

import wngrad
from wngrad.lab.train.data import Data
from wngrad.lab.train.function_task import FunctionTask
from wngrad.lab.train.loader import did_you_mean, fingerprint
from wngrad.lab.train.loader_task import LoaderTask
from wngrad.lab.train.models import network
from wngrad.lab.train.spec import Precision, Sweep


def environment(device: str) -> dict[str, Any]:
    """What a record says of the machine and the libraries."""
    name = torch.cuda.get_device_name(device) if _on_cuda(device) else _processor()
    return {
        "wngrad": wngrad.__version__,
        "torch": str(torch.__version__),  # a class of its own, which no checkpoint may hold
        "python": platform.python_version(),
        "commit": _commit(),
        "device": name,
        "threads": torch.get_num_threads(),
    }


Trained: TypeAlias = Data | LoaderTask | FunctionTask  # what a run is made from


def conditions(
    sweep: Sweep, data: Trained, note: str, environment: dict[str, Any]
) -> dict[str, Any]:
    """What would change the numbers, the sweep's own settings apart."""
    source = fingerprint(sweep.task)
    return {
        "precision": sweep.precision,
        "data": data.fingerprint,
        "network": _network(sweep, data),
        "note": note,
        **{key: environment[key] for key in ("wngrad", "torch", "device")},
        **({"source": source} if source else {}),
    }


def precision_on(device: str, sweep: Sweep) -> Precision:
    """The precision that a sweep has on a device: the lower ones are for CUDA."""
    keeps = device.startswith("cuda") or sweep.precision == "float64"
    return sweep.precision if keeps else "float32"


def _network(sweep: Sweep, data: Trained) -> str:
    """A fingerprint of the network: its layers as it prints them, and their shapes."""
    if isinstance(data, FunctionTask):
        return ""  # known to its function alone
    try:
        model = data.model() if isinstance(data, LoaderTask) else network(sweep.model, data, 0)
        text = f"{model} {[tuple(p.shape) for p in model.parameters()]}"
    except Exception as error:  # each lane will say so for itself
        text = type(error).__name__
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _on_cuda(device: str) -> bool:
    if device != "cpu" and not re.fullmatch(r"cuda(:\d+)?", device):
        close = did_you_mean(device, ("auto", "cpu", "cuda"))
        raise ValueError(f"lab: `device` must be cpu, cuda or cuda:0, 1, …, got {device!r}{close}")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"lab: `device` must be cpu: torch finds no CUDA device for {device!r}.")
    return device != "cpu"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str | None:
    """The commit of the source this runs from, with a + if it was changed since.

    Where there is no repository the environment variable WNGRAD_COMMIT may say it.
    """
    if commit := os.environ.get("WNGRAD_COMMIT"):
        return commit
    try:
        _git("ls-files", "--error-unmatch", Path(__file__).name)  # not a repository around us
        return _git("describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    folder = Path(__file__).parent
    done = subprocess.run(
        ["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()
