"""The old address of `wngrad.lab.train.data`, which the docs of the lab once named."""

from wngrad.lab import _moved

__getattr__ = _moved(__name__, "wngrad.lab.train.data")
