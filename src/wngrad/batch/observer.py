"""Who watches a run: a callback by scipy's convention, a trace, a line of progress.

A watcher is shown every point, from the first, and stops the run by returning True.
"""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from wngrad.batch import arrays
from wngrad.batch.arrays import Kind
from wngrad.batch.iterates import Point
from wngrad.batch.result import Trace

Watcher = Callable[[int, Point], bool]  # of (steps taken, point)


class Intermediate(NamedTuple):
    """What a callback with a parameter `intermediate_result` is given."""

    x: Any
    fun: float
    nit: int
    b: float
    sq_norm: float


def by_scipys_convention(callback: Any, kind: Kind) -> Watcher:
    """The watcher that hands a copy of every point but the first to a callback."""
    if not callable(callback):
        raise TypeError(f"minimize: `callback` must be a function, got {callback!r}.")
    try:
        named = "intermediate_result" in inspect.signature(callback).parameters
    except ValueError:  # a built-in without a signature
        named = False

    def watch(nit: int, point: Point) -> bool:
        if nit == 0:
            return False
        x = kind.copy(point.x)
        try:
            if named:
                now = Intermediate(x, float(point.value), nit, point.b, point.sq)
                answer = callback(intermediate_result=now)
            else:
                answer = callback(x)
        except StopIteration:
            return True
        return isinstance(answer, (bool, np.bool_)) and bool(answer)

    return watch


class BestPoint:
    """A watcher that keeps the point of the smallest f; `minimize` takes it for a callback."""

    def __init__(self, callback: Any, kind: Kind) -> None:
        self._watch = None if callback is None else by_scipys_convention(callback, kind)
        self.point: Point | None = None

    def __call__(self, nit: int, point: Point) -> bool:
        if self.point is None or point.value < self.point.value:
            self.point = point
        return self._watch is not None and self._watch(nit, point)


class Recorder:
    """A watcher that keeps the numbers of every point."""

    def __init__(self, kind: Kind) -> None:
        self._kind = kind
        self._rows: list[tuple[float, ...]] = []
        self._before: tuple[Point, float] | None = None  # the point before, and its ‖x‖

    def __call__(self, nit: int, point: Point) -> bool:
        x_norm = arrays.norm(self._kind, point.x)
        slope = self._slope(point, x_norm)
        self._rows.append((point.b, point.sq, float(point.value), *slope, x_norm))
        self._before = point, x_norm
        return False

    @property
    def trace(self) -> Trace:
        return Trace(*map(np.array, zip(*self._rows, strict=True)))

    def _slope(self, new: Point, x_norm: float) -> tuple[float, float]:
        """‖∇f(x_{k+1}) − ∇f(x_k)‖/‖x_{k+1} − x_k‖, and its condition.

        A gradient is rounded by ε‖∇f‖ and a point by ε‖x‖, which moves the gradient by slope·ε‖x‖;
        both are divided by the length of the step. Of a step of length ‖∇f‖/b that leaves ε·b.
        """
        if self._before is None:
            return math.nan, math.nan
        old, old_norm = self._before
        moved = arrays.norm(self._kind, new.x - old.x)
        if not moved:
            return math.nan, math.nan
        slope = arrays.norm(self._kind, new.g - old.g) / moved
        gradients = math.sqrt(new.sq) + math.sqrt(old.sq)
        return slope, (gradients + slope * (x_norm + old_norm)) / moved


class Progress:
    """A watcher that prints a line on standard error, about once a second."""

    def __init__(self) -> None:
        self.since = self.last = time.monotonic()
        self.end = "\r" if sys.stderr.isatty() else "\n"

    def __call__(self, nit: int, point: Point) -> bool:
        now = time.monotonic()
        if now - self.last >= 1.0:
            self.last = now
            took = now - self.since
            text = f"minimize: step {nit:,}  ‖∇f‖² {point.sq:.3e}  b {point.b:.3e}  {took:.0f} s"
            print(text, end=self.end, file=sys.stderr, flush=True)
        return False

    def close(self) -> None:
        if self.end == "\r" and self.last > self.since:
            print(file=sys.stderr)
