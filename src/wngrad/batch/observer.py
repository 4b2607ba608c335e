"""The observers of a run: a callback by scipy's convention, a trace, a line of progress."""

from __future__ import annotations

import inspect
import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import numpy as np

from wngrad.batch import arrays
from wngrad.batch.arrays import Kind
from wngrad.batch.result import Trace


class Point(NamedTuple):
    """A point of the run."""

    x: Any
    g: Any
    sq: float
    value: float | None  # f, where the gradient came with it or an observer needs it


class Intermediate(NamedTuple):
    """What a callback with a parameter `intermediate_result` is given."""

    x: Any
    fun: float
    nit: int
    b: float
    sq_norm: float


class BestPoint:
    """A callback that keeps the point of the smallest f, before it calls another."""

    def __init__(self, callback: Any = None) -> None:
        self.callback = callback
        self.point: Point | None = None

    def see(self, point: Point) -> None:
        value, best = point.value, self.point
        if best is None or (value is not None and value < cast(float, best.value)):
            self.point = point


class Observer:
    """All that is shown every point of a run."""

    def __init__(self, kind: Kind, callback: Any, trace: bool, progress: bool) -> None:
        self._kind = kind
        self.needs_f = trace or callback is not None
        self._best = callback if isinstance(callback, BestPoint) else None
        callback = callback.callback if isinstance(callback, BestPoint) else callback
        self._callback = None if callback is None else _by_scipys_convention(callback, kind.copy)
        self._rows: list[tuple[float, ...]] | None = [] if trace else None
        self._progress = _Progress() if progress else None
        self._last: tuple[Point, float] | None = None  # and its ‖x‖

    @property
    def trace(self) -> Trace | None:
        return None if self._rows is None else Trace(*map(np.array, zip(*self._rows, strict=True)))

    def note(self, nit: int, point: Point, b: float) -> bool:
        """Show a new point to all; true if the callback wants to stop."""
        value = math.nan if point.value is None else float(point.value)
        if self._progress is not None:
            self._progress.show(nit, point.sq, b)
        if self._rows is not None:
            x_norm = arrays.norm(self._kind, point.x)
            self._rows.append((b, point.sq, value, *self._slope(point, x_norm), x_norm))
            # A copy: the function may use the gradient's memory again.
            self._last = point._replace(g=self._kind.copy(point.g)), x_norm
        if self._best is not None:
            self._best.see(point)
        if self._callback is None or nit == 0:
            return False
        return self._callback(Intermediate(point.x, value, nit, b, point.sq))

    def _slope(self, new: Point, x_norm: float) -> tuple[float, float]:
        """‖∇f(x_{k+1}) − ∇f(x_k)‖/‖x_{k+1} − x_k‖, and its condition.

        A gradient is rounded by ε‖∇f‖ and a point by ε‖x‖, which moves the gradient by slope·ε‖x‖;
        both are divided by the length of the step. Of a step of length ‖∇f‖/b that leaves ε·b.
        """
        if self._last is None:
            return math.nan, math.nan
        old, old_norm = self._last
        moved = arrays.norm(self._kind, new.x - old.x)
        if not moved:
            return math.nan, math.nan
        slope = arrays.norm(self._kind, new.g - old.g) / moved
        gradients = math.sqrt(new.sq) + math.sqrt(old.sq)
        return slope, (gradients + slope * (x_norm + old_norm)) / moved

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()


def _by_scipys_convention(
    callback: Any, copy: Callable[[Any], Any]
) -> Callable[[Intermediate], bool]:
    """A callback as a function that is true if it wants to stop."""
    if not callable(callback):
        raise TypeError(f"minimize: `callback` must be a function, got {callback!r}.")
    try:
        named = "intermediate_result" in inspect.signature(callback).parameters
    except ValueError:  # a built-in without a signature
        named = False

    def call(now: Intermediate) -> bool:
        now = now._replace(x=copy(now.x))
        try:
            answer = callback(intermediate_result=now) if named else callback(now.x)
        except StopIteration:
            return True
        return isinstance(answer, (bool, np.bool_)) and bool(answer)

    return call


class _Progress:
    """A line of progress on standard error, about once a second."""

    def __init__(self) -> None:
        self.since = self.last = time.monotonic()
        self.end = "\r" if sys.stderr.isatty() else "\n"

    def show(self, nit: int, sq: float, b: float) -> None:
        now = time.monotonic()
        if now - self.last >= 1.0:
            self.last = now
            took = now - self.since
            text = f"minimize: step {nit:,}  ‖∇f‖² {sq:.3e}  b {b:.3e}  {took:.0f} s"
            print(text, end=self.end, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self.end == "\r" and self.last > self.since:
            print(file=sys.stderr)
