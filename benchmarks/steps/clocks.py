"""How long a step takes: on the device, as the host sees it, and inside a CUDA graph."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import torch

Work = Callable[[], object]
WARM = 3
MUCH = {"cuda": 2**31, "cpu": 2**28}  # bytes, many times any cache
HOST_LEAD = 1.5  # how much longer than the host needs to issue a step the device is kept waiting
MOST_LEAD = 0.02  # Seconds; who issues for longer fills the queue, and cannot be ahead.
MOST_CYCLES = 2e9  # of a GPU in a second, no less than there are


def clock(device: torch.device, work_bytes: int) -> HostClock:
    """The clock for steps over this many bytes of parameters."""
    return EventClock(device, work_bytes) if device.type == "cuda" else HostClock(device)


def seconds(work: Work) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


class HostClock:
    """Where a call returns when its work is done."""

    def __init__(self, device: torch.device) -> None:
        self._from = torch.ones(MUCH[device.type], dtype=torch.uint8, device=device)

    def wait(self) -> None:
        pass

    def used(self) -> int:
        """Bytes in use on the device; 0 where nobody counts."""
        return 0

    def extra(self, work: Work) -> int | None:
        """Bytes that are in use during the work and not before; None where nobody counts."""
        return None

    def warm(self, work: Work) -> float:
        """Seconds of a call when everything that is made once has been made."""
        for _ in range(WARM):
            work()
        return self.back_to_back(work, 1)

    def each(self, work: Work, times: int) -> list[float]:
        """Seconds of each call on the device."""
        return [seconds(work) for _ in range(times)]

    def back_to_back(self, work: Work, times: int, between: Work | None = None) -> float:
        """Seconds of a call as the host sees it: one after the other, one wait at the end.

        What is done `between` two calls is not counted.
        """
        self.wait()
        spent = 0.0
        for _ in range(times):
            if between is not None:
                between()
            spent += seconds(work)
        return (spent + seconds(self.wait)) / times

    def bandwidths(self, times: int) -> list[float]:
        """Bytes read and written in a second, going through much memory some times."""
        passes = self.each(self._read_and_write, times + 1)[1:]
        return [2 * self._from.numel() / t for t in passes]

    def _read_and_write(self) -> None:
        self._from.neg_()  # A copy would, unseen, also read what it overwrites.


class EventClock(HostClock):
    """A CUDA device, timed by its own events.

    Before each call the device is kept waiting for as long as the host needs to issue it, so that
    no gap is counted which is the host's; then, if the parameters would stay in the L2 cache, it
    reads other memory. (Writing would leave lines for the step to evict.)
    """

    def __init__(self, device: torch.device, work_bytes: int) -> None:
        super().__init__(device)
        self._to = torch.empty_like(self._from)
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self._others = self._from[: 4 * cache].view(torch.int32) if work_bytes < 8 * cache else None
        self._sum = torch.zeros((), dtype=torch.int64, device=device)
        self._side = torch.cuda.Stream(device)

    def _read_and_write(self) -> None:
        self._to.copy_(self._from)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def used(self) -> int:
        return torch.cuda.memory_allocated()

    def extra(self, work: Work) -> int | None:
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        self.wait()
        return torch.cuda.max_memory_allocated() - before

    def each(self, work: Work, times: int) -> list[float]:
        cycles = int(MOST_CYCLES * min(HOST_LEAD * self._issue(work), MOST_LEAD))
        events = []
        for _ in range(times):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(cycles)
            if self._others is not None:
                torch.sum(self._others, dim=0, out=self._sum)
            begin.record()
            work()
            end.record()
            events.append((begin, end))
        self.wait()
        return [begin.elapsed_time(end) / 1e3 for begin, end in events]

    def _issue(self, work: Work) -> float:
        """Seconds the host needs to issue a call, the device being idle."""
        found = []
        for _ in range(2):
            self.wait()
            found.append(seconds(work))
        return min(found)

    def capture(self, work: Work, times: int) -> torch.cuda.CUDAGraph:
        """A graph of so many calls, after some of them on the stream where it is captured."""
        main, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        self._side.wait_stream(main)
        try:
            with torch.cuda.stream(self._side), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that `capturable` is slow outside of a graph
                for _ in range(WARM):
                    work()
            main.wait_stream(self._side)
            with torch.cuda.graph(graph, stream=self._side):
                for _ in range(times):
                    work()
        finally:
            torch.cuda.set_stream(main)  # A capture that fails leaves us on its stream.
        return graph
