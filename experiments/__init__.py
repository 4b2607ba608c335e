"""Experiments that use the package, and are not in its wheel: run them from a checkout."""
