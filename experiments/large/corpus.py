"""The text: Python's sources and documentation, as they are installed beside this program."""

from __future__ import annotations

import hashlib
import os
import random
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SUFFIXES = (".py", ".pyi", ".md", ".rst", ".txt")
PACKAGES = ("site-packages", "dist-packages")  # as folders with installed packages are called
LARGEST = 1_000_000  # bytes of a file; beyond it are tables of numbers
MOST = 200_000_000  # bytes of all files
SEPARATOR = b"\0"  # between two files


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and to test on, from different files."""

    train: Tensor
    test: Tensor
    facts: dict[str, Any]  # that every record repeats


def installed() -> list[Path]:
    """The standard library and the folders of packages that this interpreter imports from."""
    packages = [Path(place) for place in sys.path if Path(place).name in PACKAGES]
    return [Path(sysconfig.get_path("stdlib")), *dict.fromkeys(packages)]


def load(folders: list[Path], test_bytes: int) -> Corpus:
    """All texts in these folders, no file twice, shuffled alike every time, up to `MOST` bytes.

    Args:
        folders: where to look.
        test_bytes: at least as many, and at least 1 %, are held out, in whole files.
    """
    paths = [path for folder in folders for path in _paths(folder)]
    random.Random(0).shuffle(paths)
    texts: dict[bytes, bytes] = {}  # by digest: packages carry copies of one another
    total = 0
    for path in paths:
        text = path.read_bytes() if path.stat().st_size <= LARGEST else b""
        digest = hashlib.sha256(text).digest()
        if text and digest not in texts and total + len(text) <= MOST:
            texts[digest] = text
            total += len(text)
    held_out, count = 0, 0
    files = list(texts.values())
    while count < len(files) and held_out < max(test_bytes, total // 100):
        held_out += len(files[count])
        count += 1
    train, test = SEPARATOR.join(files[count:]), SEPARATOR.join(files[:count])
    digest_of_all = hashlib.sha256(test + SEPARATOR + train).hexdigest()
    facts = {
        "files": len(files),
        "train_bytes": len(train),
        "test_bytes": len(test),
        "sha256": digest_of_all[:16],
    }
    return Corpus(_codes(train), _codes(test), facts)


def _paths(folder: Path) -> Iterator[Path]:
    """The texts below a folder in the order of their names; folders of packages are not entered."""
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in PACKAGES)
        yield from (Path(place, name) for name in sorted(names) if name.endswith(SUFFIXES))


def _codes(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, np.uint8).copy())
