"""Golden trajectories, made once by the oracle: one file serves the paper, torch and JAX.

`python tests/golden.py` writes `golden.json` anew.
"""

from __future__ import annotations

import json
import math
from itertools import islice, product
from pathlib import Path

import paper

FILE = Path(__file__).with_name("golden.json")
STEPS = (1, 100)
LAM = 0.7
SHAPES = ((6,), (3, 4), (2, 3, 2, 2))
B_INIT = {"one": (1.0, None), "small": (0.01, None), "gradient": (1.0, 1.0), "twice": (1.0, 2.0)}
DECAY = {"none": (0.0, False), "coupled": (0.03, False), "decoupled": (0.03, True)}
RULES = ("wngrad", "momentum", "adam")


def gradient(x: list[float]) -> list[float]:
    """Of a bumpy bowl whose entries are coupled to their neighbours."""
    n = len(x)
    return [
        (1 + i % 3) * x[i] + 0.5 * math.sin(3 * x[(i + 1) % n]) - 0.1 * (i % 5) for i in range(n)
    ]


def start(shape: tuple[int, ...]) -> list[float]:
    return [math.cos(7 * i) for i in range(math.prod(shape))]


def blocks_of(shape: tuple[int, ...], per: str) -> list[list[int]]:
    """The blocks of one parameter as lists of flat indices, by counting."""
    keys = {
        "neuron": lambda at: at[0],
        "tensor": lambda at: 0,
        "model": lambda at: 0,
        "slice": lambda at: at[:2] if len(shape) > 2 else at[0],
        "last": lambda at: at[-1] // (shape[-1] // 2),  # two halves of the last dimension
    }
    found: dict[object, list[int]] = {}
    for i, at in enumerate(product(*map(range, shape))):
        found.setdefault(keys[per](at), []).append(i)
    return list(found.values())


def oracle(rule: str, shape: tuple[int, ...], per: str, b_init: str, decay: str, lam=LAM):
    """The trajectory of one case, on plain floats."""
    (b1, c), (w, decoupled) = B_INIT[b_init], DECAY[decay]
    common = (start(shape), gradient, lam, blocks_of(shape, per), b1, c)
    if rule == "adam":
        return paper.algorithm_4(*common, decay=w, decoupled=decoupled)
    mu = 0.9 if rule == "momentum" else 0.0
    return paper.algorithm_3(*common, mu=mu, decay=w, decoupled=decoupled)


def cases() -> list[tuple[str, tuple[int, ...], str, str, str]]:
    return list(product(RULES, SHAPES, ("neuron", "tensor"), B_INIT, DECAY))


def trajectory(case) -> list[dict[str, list[float]]]:
    points = list(islice(oracle(*case), max(STEPS)))
    return [{"x": points[k - 1][0], "b": points[k - 1][1]} for k in STEPS]


def load() -> list[tuple[tuple, list[dict[str, list[float]]]]]:
    rows = json.loads(FILE.read_text())
    return [
        ((r["rule"], tuple(r["shape"]), r["per"], r["b_init"], r["decay"]), r["after"])
        for r in rows
    ]


def main() -> None:
    names = ("rule", "shape", "per", "b_init", "decay")
    rows = [{**dict(zip(names, case, strict=True)), "after": trajectory(case)} for case in cases()]
    FILE.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    main()
