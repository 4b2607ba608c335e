"""Whether all tensors of a step are as they were in an earlier one: `look.c`, and its notes."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
from torch import Tensor

from wngrad.optim import compiled

_NAME, _MAJOR = b"dlpack_exchange_api", 1  # of DLPack's C interface, and its version
_EXPORT = 40  # where in it the function lies that look.c calls, which need not be there
_EACH = 8  # words for each tensor, beside those for its dimensions
_CALLED = (
    *("PyList_Size", "PyList_GetItem", "PyDict_Next", "PyObject_GetAttr", "PyObject_Type"),
    *("PyObject_CallFunctionObjArgs", "PyObject_IsTrue", "Py_DecRef", "PyErr_Clear"),
)


class _Look(ctypes.Structure):
    """`Look` of look.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("exchange", *_CALLED)),
        *((name, ctypes.py_object) for name in ("none", "grad", "is_neg")),
        *((name, ctypes.c_int64) for name in ("words", "room", "gradients")),
    ]


class Look:
    """Notes of a step's tensors."""

    def __init__(self, call: Any, exchange: int, params: list[Tensor], state: dict[Any, Any]):
        kept = [t for mine in state.values() for t in mine.values()]
        tensors = 2 * len(params) + len(kept)
        dims = sum(2 * p.dim() for p in params) + sum(t.dim() for t in kept)
        live = sum(p.grad is not None for p in params)
        self._call, self._gradients = call, np.zeros(live, np.int64)
        self._words = np.zeros(1 + _EACH * tensors + 2 * dims, np.int64)
        called = (ctypes.cast(getattr(ctypes.pythonapi, f), ctypes.c_void_p) for f in _CALLED)
        places = (self._words.ctypes.data, len(self._words), self._gradients.ctypes.data)
        self._look = _Look(exchange, *called, None, "grad", Tensor.is_neg, *places)
        self._at = ctypes.addressof(self._look)
        self._look.room = self._call(self._at, params, state, True)

    @property
    def useful(self) -> bool:
        return bool(self._look.room)

    def __call__(self, params: list[Tensor], state: dict[Any, Any]) -> list[int] | None:
        """Where the gradients lie now, those there are, if all else is as noted."""
        same = self._call(self._at, params, state, False)
        found: list[int] | None = self._gradients.tolist() if same else None
        return found


def noted(params: list[Tensor], state: dict[Any, Any]) -> Look | None:
    """Notes for later; None where nothing can be compiled, or torch or Python are too different.

    Args:
        params: they, their gradients and all of the state are tensors in memory.
    """
    exchange, library = _exchange(), compiled.library("look", ctypes.PyDLL)
    if not exchange or isinstance(library, str):
        return None
    library.look.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.py_object, ctypes.c_int]
    library.look.restype = ctypes.c_int64
    look = Look(library.look, exchange, params, state)
    return look if look.useful else None


def _exchange() -> int | None:
    """Where DLPack's C interface to torch's tensors lies."""
    capsule = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    locked = getattr(sys, "_is_gil_enabled", lambda: True)()  # so that nobody changes what is read
    if capsule is None or not locked or sys.implementation.name != "cpython":
        return None
    kind = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    try:
        place: int = kind(("PyCapsule_GetPointer", ctypes.pythonapi))(capsule, _NAME)
    except ValueError:  # It is another capsule.
        return None
    export = ctypes.c_void_p.from_address(place + _EXPORT).value
    return place if export and ctypes.c_uint32.from_address(place).value == _MAJOR else None
