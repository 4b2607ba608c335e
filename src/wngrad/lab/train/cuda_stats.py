"""Time and memory on CUDA, where work is queued: nothing here does anything on a CPU."""

from __future__ import annotations

import gc

import torch


def free(device: str) -> None:
    """Let go of what the last program held."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it, so that a clock can be read."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class StepMemory:
    """The most memory of the device that torch has allocated in training steps.

    Parameters, gradients, activations, the optimizer's state and data on the device are all in it;
    tests are not, which may have larger batches.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.peak: int | None = None  # in bytes; None on a CPU

    def begin(self) -> None:
        """Training begins, or goes on."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def end(self) -> None:
        """It pauses, as for a test."""
        if self.device.type == "cuda":
            self.peak = max(self.peak or 0, torch.cuda.max_memory_allocated(self.device))
