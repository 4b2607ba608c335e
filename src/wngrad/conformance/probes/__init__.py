"""The probes: each a question a drop-in optimizer should answer well, in plain code.

A probe takes `make`: `make(params)` is the optimizer, `make.step(opt, closure)` a step in the way
its authors document. It returns None or a measurement for a pass, and raises `Failed` or
`NotApplicable`. Any other exception is a failure too, with the exception as its reason.
"""

from wngrad.conformance.probes import (  # noqa: I001 - in the order of the table
    first_steps,
    rates,
    checkpoints,
    tensors,
    speed,
    bad_gradients,
)

__all__ = ["bad_gradients", "checkpoints", "first_steps", "rates", "speed", "tensors"]
