"""The C kernels, built with the package by `hatch_build.py`; or why they are not there."""

from __future__ import annotations

import ctypes
import hashlib
import os
from functools import cache
from pathlib import Path

from wngrad.optim.fused.records import C_RECORDS

_FOLDER = Path(__file__).parent
_SOURCES = ("cpu.c", "snapshot.c")


class Step(ctypes.Structure):
    """`Step` of cpu.c: numbers, and where tables lie."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            *("parameters", "shared", "absent", "rows", "pieces", "long_rows"),
            *("n_shared", "n_rows", "n_pieces", "n_long_rows"),
            *("sums", "factors", "bad", "groups", "gradients"),
            *("rule", "decay", "skip", "latch", "rated", "averages", "half", "proposed"),
            *("scale", "found_inf", "parallel"),
        )
    ]


@cache
def cpu() -> ctypes.CDLL | str:
    """The library, for calls that let other threads run."""
    return _loaded(ctypes.CDLL)


@cache
def snapshot() -> ctypes.CDLL | str:
    """The library, for calls that hold Python's lock."""
    return _loaded(ctypes.PyDLL)


def _loaded(kind: type[ctypes.CDLL]) -> ctypes.CDLL | str:
    if os.environ.get("WNGRAD_NATIVE") == "0":
        return "WNGRAD_NATIVE is 0"
    path = _FOLDER / "libkernels.so"
    if not path.is_file():
        return "wngrad was built without its C kernels: there was no C compiler"
    try:
        library = kind(str(path))
        reason = _why_stale(library)
    except (OSError, ValueError, AttributeError) as error:
        return f"its C kernels cannot be loaded ({' '.join(str(error).split())[:200]})"
    return reason or library


def _why_stale(library: ctypes.CDLL) -> str | None:
    """Why the library is not that of this version; None if it is."""
    sizes = [*(record.itemsize for record in C_RECORDS), ctypes.sizeof(Step)]
    built = list((ctypes.c_int64 * len(sizes)).in_dll(library, "record_sizes"))
    source = ctypes.string_at(ctypes.addressof(ctypes.c_char.in_dll(library, "source"))).decode()
    files = [_FOLDER / name for name in _SOURCES]
    if all(file.is_file() for file in files):  # in a checkout
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in files))
        same = source == digest.hexdigest()
    else:
        same = True
    if built == sizes and same:
        return None
    return "its C kernels are of another version: install wngrad again"


@cache
def level() -> int:
    """The instruction set of this machine, of those the library is compiled for."""
    library = cpu()
    assert not isinstance(library, str), library
    found = int(library.level())
    while not hasattr(library, f"step_{found}"):
        found -= 1
    return found


@cache
def parallel() -> int:
    """Where libgomp's `GOMP_parallel` lies, in torch's own copy or the system's; 0 if nowhere."""
    for name in (None, "libgomp.so.1"):
        try:
            function = ctypes.CDLL(name).GOMP_parallel
        except (OSError, AttributeError):
            continue
        return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0
