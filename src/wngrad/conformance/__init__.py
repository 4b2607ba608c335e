"""A conformance kit that any torch optimizer can be put through.

On the command line: `python -m wngrad.conformance some_module:SomeOptimizer`. In pytest:

    @pytest.mark.parametrize("probe", light_probes("some_module:SomeOptimizer"), ids=str)
    def test_conforms(probe):
        probe()
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    message = "wngrad.conformance needs torch: pip install torch."
    raise ModuleNotFoundError(message, name="torch") from None

from wngrad.conformance.registry import Probe
from wngrad.conformance.runner import PROBES, WARM, Outcome, run_probes
from wngrad.conformance.verdicts import Failed, NotApplicable

__all__ = [
    "PROBES",
    "Check",
    "Failed",
    "NotApplicable",
    "Outcome",
    "Probe",
    "all_probes",
    "check",
    "light_probes",
]


@dataclass(frozen=True, slots=True)
class Check:
    """One probe for one optimizer; calling it runs it in a process of its own.

    Raises:
        Failed: an AssertionError, with the reason.
        NotApplicable: a unittest.SkipTest, which pytest counts as skipped.
    """

    target: str
    kwargs: dict[str, Any] | None
    probe: str

    def __call__(self) -> None:
        outcome = WARM.run(self.target, self.kwargs, self.probe, PROBES[self.probe].seconds)
        if outcome.status == "fail":
            raise Failed(f"{outcome.detail}\n{outcome.printed}".rstrip())
        if outcome.status == "not applicable":
            raise NotApplicable(outcome.detail)

    def __str__(self) -> str:
        return self.probe


def light_probes(optimizer: str | type, **kwargs: Any) -> list[Check]:
    """The probes that need one process, as callables for `pytest.mark.parametrize`.

    Args:
        optimizer: "module:Class", or a class that can be imported from its module.
        kwargs: what the optimizer is made with; its defaults if none.
    """
    return _checks(optimizer, kwargs, (p for p in PROBES.values() if not p.distributed))


def all_probes(optimizer: str | type, **kwargs: Any) -> list[Check]:
    """All probes, those over several processes included."""
    return _checks(optimizer, kwargs, PROBES.values())


def check(optimizer: str | type, **kwargs: Any) -> list[Outcome]:
    """The outcomes of all probes.

    >>> from wngrad.conformance import check
    >>> outcomes = check("torch.optim:SGD", lr=0.1)  # doctest: +SKIP
    """
    return list(run_probes(_target(optimizer), kwargs or None))


def _checks(optimizer: str | type, kwargs: dict[str, Any], chosen: Iterable[Probe]) -> list[Check]:
    return [Check(_target(optimizer), kwargs or None, probe.name) for probe in chosen]


def _target(optimizer: str | type) -> str:
    if isinstance(optimizer, str):
        return optimizer
    if "<locals>" in optimizer.__qualname__ or optimizer.__module__ == "__main__":
        raise ValueError(
            f"light_probes: `optimizer` must be a class that another process can import, "
            f"got {optimizer.__module__}.{optimizer.__qualname__}."
        )
    return f"{optimizer.__module__}:{optimizer.__qualname__}"
