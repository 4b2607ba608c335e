"""The types of a transformation's settings."""

from __future__ import annotations

from typing import Any, Literal

import optax

from wngrad.transforms.layouts import LayoutFunction
from wngrad.transforms.neurons import Axes, AxisFunction

PyTree = Any
Number = Any  # a float, or an array of one
Rate = optax.ScalarOrSchedule
NeuronAxis = Axes | AxisFunction
BInit = Number | Literal["gradient"] | tuple[Literal["gradient"], float]
Per = Literal["neuron", "tensor", "model"]
Nonfinite = Literal["propagate", "skip"]
Layout = LayoutFunction | PyTree  # or a tree of labels
