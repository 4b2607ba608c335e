"""What a run may change for its whole process: put back after it, for the runs that follow."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch

from wngrad.lab.run.pool import SIGNALS


@contextmanager
def restored() -> Iterator[None]:
    """Settings of torch, NumPy and the process are afterwards what they were before."""
    before = [(write, read(), read) for read, write in _SETTINGS]
    try:
        yield
    finally:
        for write, value, read in before:
            if read() != value:
                write(value)


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _set_folder(folder: str) -> None:
    with suppress(OSError):
        os.chdir(folder)


def _set_environment(values: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(values)


def _set_device(device: torch.device) -> None:
    # "cpu" would be a mode that looks at every call; None is how torch begins.
    torch.set_default_device(None if device.type == "cpu" else device)


def _set_deterministic(values: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(values[0], warn_only=values[1])


def _set_cudnn(values: tuple[bool, bool]) -> None:
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = values


def _set_handlers(handlers: list[Any]) -> None:
    if threading.current_thread() is threading.main_thread():
        for number, handler in zip(SIGNALS, handlers, strict=True):
            signal.signal(number, handler)


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (_folder, _set_folder),
    (lambda: dict(os.environ), _set_environment),
    (lambda: [signal.getsignal(number) for number in SIGNALS], _set_handlers),
    (np.geterr, lambda values: np.seterr(**values)),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, _set_device),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _set_deterministic,
    ),
    (
        lambda: (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        _set_cudnn,
    ),
)
