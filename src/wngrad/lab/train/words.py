"""Words that reports and the command line share."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """A number with its noun.

    >>> counted(1, "epoch"), counted(12, "separate run")
    ('1 epoch', '12 separate runs')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
