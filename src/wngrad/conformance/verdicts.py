"""Verdicts: how a probe says that an optimizer fails, or that a question does not apply to it."""

from __future__ import annotations

import linecache
import traceback
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Failed(AssertionError):  # noqa: N818, a verdict rather than an error
    """The optimizer does not do what the probe asks; the message says what it does instead."""


class NotApplicable(unittest.SkipTest):
    """The question makes no sense for this optimizer, or cannot be asked on this machine."""


def first_line(error: BaseException) -> str:
    """The first sentence or two of a message."""
    text = " ".join(line.strip() for line in str(error).strip().splitlines()[:2])
    return text if len(text) <= 200 else f"{text[:197]}..."


def described(error: BaseException) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1:]
    text = first_line(error) or " ".join(f"in {Path(w.filename).name}: {w.line}" for w in where)
    return f"{type(error).__name__}: {text}"


def refusal(error: Exception, *words: str) -> str | None:
    """What the optimizer says when it refuses something by itself, in a `raise` that names it.

    An error out of a tensor operation is no refusal: nobody has thought of the case.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not any(word in str(error).lower() for word in words):
        return None
    line = linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno).strip()
    asserted = isinstance(error, AssertionError) and line.startswith("assert ")
    return first_line(error) if asserted or line.startswith("raise ") else None


@contextmanager
def unless_refused(*words: str) -> Iterator[None]:
    """What an optimizer refuses by itself, naming one of the words, does not apply to it."""
    try:
        yield
    except Exception as error:
        reason = refusal(error, *words)
        if reason is None:
            raise
        raise NotApplicable(f"it refuses: {reason}") from error
