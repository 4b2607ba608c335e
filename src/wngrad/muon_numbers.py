"""WNMuon's inner numbers, the same in every framework; docs/log.md says how they were found."""

from __future__ import annotations

import math

VECTOR_SCALE = 0.3  # the step of a vector's entry in units of a neuron's
BETA2 = 0.99  # β₂ of Adam's direction, which vectors take

# Under `finetune`, the norm of a neuron whose weights are all 0: that of a row with entries drawn
# evenly from ±1/√in, as nn.Linear draws them. And the least norm that any other is taken for.
FRESH = 1 / math.sqrt(3)
LEAST = 0.1
