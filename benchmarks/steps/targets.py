"""What a step is meant to reach, each target with what a run measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Target:
    """`who`'s `measure` over that of `against` must be at most `most`.

    `against` is a contestant's label; "floor" and "parameters" mean the time and the bytes that
    `who` cannot do without.
    """

    set: str
    dtype: str
    who: str
    against: str
    most: float
    measure: str = "step"
    device: str = "cuda"

    def __str__(self) -> str:
        kinds = {"step": "time", "extra bytes": "peak extra memory"}
        kinds |= {"wall": "wall time", "graph": "time in a CUDA graph"}
        kinds |= {"moved": "wall time, gradients moved"}
        return (
            f"{self.set} {self.dtype}: {self.who} over {self.against}, {kinds[self.measure]} "
            f"≤ {self.most:g}"
        )


def _targets() -> Iterator[Target]:
    for dtype, three, five, sgd, adamw in (
        ("fp32", 1.06, 1.08, 0.85, 0.65),
        ("bf16", 1.08, 1.12, 0.87, 0.60),
    ):
        yield Target("llama", dtype, "WNGrad fused", "floor", three)
        yield Target("llama", dtype, "WNGrad-momentum fused", "floor", five)
        yield Target("llama", dtype, "WNAdam fused", "floor", five)
        yield Target("llama", dtype, "WNGrad fused", "SGD fused", sgd)
        yield Target("llama", dtype, "WNAdam fused", "AdamW fused", adamw)
        for name in ("WNGrad", "WNGrad-momentum", "WNAdam"):
            # Nothing proportional to the parameters: whatever tables take, it is not 1 % of them.
            yield Target("llama", dtype, f"{name} fused", "parameters", 0.01, "extra bytes")
        for small in ("resnet18", "mlp"):
            for measure, most in (("wall", 1.15), ("moved", 1.15), ("graph", 1.0)):
                yield Target(small, dtype, "WNGrad fused", "SGD fused", most, measure)
    for name, measure, most in (
        ("llama-hidden", "step", 0.5),
        ("resnet18-hidden", "wall", 0.7),
        ("transformer-hidden", "wall", 0.7),
    ):
        yield Target(name, "fp32", "WNMuon fused", "Muon default", most, measure)
    yield Target("38M", "fp32", "WNGrad default", "SGD default", 1.25, device="cpu")
    yield Target("38M", "fp32", "WNGrad default", "AdamW fused", 0.85, device="cpu")


TARGETS = list(_targets())
JUDGED = {label for target in TARGETS for label in (target.who, target.against)}


def verdicts(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The targets that speak of these results, each with its ratio and whether it is met."""
    found = {(r["set"], r["dtype"], r["device"]): r for r in results}
    return [
        judged(target, found[key])
        for target in TARGETS
        if (key := (target.set, target.dtype, target.device)) in found
    ]


def judged(target: Target, result: dict[str, Any]) -> dict[str, Any]:
    value, base = _value(result, target, target.who), _value(result, target, target.against)
    if value is None or not base:
        return {"target": str(target), "ratio": None, "met": None, "verdict": "not measured"}
    ratio = value / base
    met = ratio <= target.most
    verdict = "met" if met else f"missed by {ratio / target.most - 1:.1%}"
    return {"target": str(target), "ratio": ratio, "met": met, "verdict": verdict}


def _value(result: dict[str, Any], target: Target, label: str) -> float | None:
    rows = {row["label"]: row for row in result["rows"] if not row["failed"]}
    if label == "parameters":
        return float(result["bytes"])
    if label == "floor":
        return rows[target.who]["floor"] if target.who in rows else None
    found: Any = rows.get(label, {}).get(target.measure)
    value: float | None = found["median"] if isinstance(found, dict) else found
    return value
