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


class Callback:
    """A watcher that hands a copy of every point but the first to a callback, as scipy does."""

    raised = False  # StopIteration, which stops the run as True does

    def __init__(
        self, callback: Any, kind: Kind, record: Callable[..., Any] = Intermediate
    ) -> None:
        if not callable(callback):
            raise TypeError(f"minimize: `callback` must be a function, got {callback!r}.")
        try:
            self._named = "intermediate_result" in inspect.signature(callback).parameters
        except ValueError:  # a built-in without a signature
            self._named = False
        self._callback, self._copy, self._record = callback, kind.copy, record

    def __call__(self, nit: int, point: Point) -> bool:
        if nit == 0:
            return False
        x, value = self._copy(point.x), float(point.value)
        now = self._record(x=x, fun=value, nit=nit, b=point.b, sq_norm=point.sq)
        try:
            answer = self._callback(intermediate_result=now) if self._named else self._callback(x)
        except StopIteration:
            self.raised = True
            return True
        return isinstance(answer, (bool, np.bool_)) and bool(answer)


class BestPoint:
    """A watcher that keeps the point of the smallest f; `minimize` takes it for a callback."""

    def __init__(self, callback: Callback | None) -> None:
        self.callback = callback
        self.point: Point | None = None

    def __call__(self, nit: int, point: Point) -> bool:
        if self.point is None or point.value < self.point.value:
            self.point = point
        return self.callback is not None and self.callback(nit, point)


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
