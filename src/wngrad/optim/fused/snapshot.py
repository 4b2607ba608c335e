"""The cache key of a fused step: everything that its launches depend on.

A step whose parameters, state and settings are those of an earlier one finds its launches ready, so
this is all that it costs the host. It is written for speed: `snapshot.c` walks over the tensors,
and Python does where there is no such library, or a tensor that it cannot read.
"""

from __future__ import annotations

import ctypes
import math
import sys
from functools import cache, lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from wngrad.optim import memory, sharded
from wngrad.optim.fused import library
from wngrad.optim.fused.records import FLOAT32, FLOAT64, NUMBER, bits
from wngrad.optim.settings import Group, Settings

_KINDS = {torch.float32: FLOAT32, torch.float64: FLOAT64}
UNKNOWN_KIND = -1  # of a λ in a tensor of another type, on a device


class Scope(NamedTuple):
    """What a step is taken of: the groups of an optimizer, or some parameters of one of them."""

    optimizer: Any
    params: list[Tensor]
    groups: list[Group]
    settings: list[Settings]  # of the groups, checked


def momentum_setting(optimizer: Any) -> str | None:
    """The setting that holds the directions' μ or β; None if no kernel knows any of them."""
    return getattr(type(optimizer).direction, "momentum_setting", None)


class Snapshot(NamedTuple):
    """A step that is due."""

    tensors: object  # the parameters, their gradients and their state: comparable and hashable
    choices: tuple[object, ...]  # all else that the launches depend on
    words: list[int]  # what may differ: the numbers of each group, then the gradients' addresses


class Snapshots:
    """Takes snapshots of steps, and knows the latest again."""

    def __init__(self) -> None:
        self._room = _Room(256, 16)
        self._tensors_before: Any = None  # of the latest snapshot that was taken in C
        self._words_before: list[int] = []

    def take(self, scope: Scope, state: dict[Tensor, Any]) -> Snapshot | None:
        """The step that is due; None if no kernel knows the direction, or λ is not one number."""
        momentum = momentum_setting(scope.optimizer)
        if momentum is None:
            return None
        words: list[int] = []
        choices: list[Any] = []
        for group, settings in zip(scope.groups, scope.settings, strict=True):
            lr = group["lr"]
            if (lam := rate(lr)) is None:
                return None
            words += lam
            numbers, key = _read(settings, momentum)
            words += numbers
            still = lam == (0, NUMBER)  # A group without rate takes no part.
            far = None if lam[1] == NUMBER else (lam[1], lr.device)
            choices.append((key, len(group["params"]), still, far))
        tensors, gradients = self._tensors(scope.params, state)
        # Loads are 16 bytes wide where all addresses allow it.
        odd = reduce(or_, gradients, 0) % 16
        choices.append(tuple(place % 16 for place in gradients) if odd else None)
        words += gradients
        if words == self._words_before:
            words = self._words_before  # so that nobody need compare them again
        self._words_before = words
        return Snapshot(tensors, tuple(choices), words)

    def _tensors(self, params: list[Tensor], state: dict[Tensor, Any]) -> tuple[Any, list[int]]:
        walk, room = _walk(), self._room
        if walk is None:
            return _by_hand(params, state)
        if len(params) >= len(room.gradients):
            self._room = room = _Room(len(room.words), 2 * len(params))
        while (n := walk(params, state, room)) == _MORE_ROOM:
            self._room = room = _Room(2 * len(room.words), len(room.gradients))
        if n == 0:
            return _by_hand(params, state)
        if n != _SAME:
            self._tensors_before = room.keep(n)
        return self._tensors_before, room.gradients[1 : 1 + room.gradients[0]].tolist()


class _Room:
    """Memory for the words of a snapshot, for those of the one before, and for the gradients'."""

    def __init__(self, words: int, gradients: int) -> None:
        self.words, self._before = np.zeros((2, words), np.int64)
        self.gradients = np.zeros(gradients, np.int64)
        self._at = [a.ctypes.data for a in (self.words, self._before, self.gradients)]
        self._set(0)

    def _set(self, n: int) -> None:
        words, before, gradients = self._at
        self.arguments = (words, len(self.words), before, n, gradients)

    def keep(self, n: int) -> bytes:
        """Remember the words, and return them."""
        self._before[:n] = self.words[:n]
        self._set(n)
        return self.words[:n].tobytes()


def rate(lr: float | Tensor) -> tuple[int, int] | None:
    """λ as a kernel reads it, a word and its kind; None if it is not one number."""
    if not isinstance(lr, Tensor):
        return bits(float(lr) + 0.0), NUMBER  # −0 becomes 0
    if lr.numel() != 1 or lr.dim() > 2 or lr.is_complex():
        return None
    if lr.device.type == "cpu":
        return bits(lr.item() + 0.0), NUMBER
    return lr.data_ptr(), _KINDS.get(lr.dtype, UNKNOWN_KIND)


@lru_cache(maxsize=1024)
def _read(settings: Settings, momentum: str) -> tuple[tuple[int, ...], tuple[object, ...]]:
    """A group's numbers but λ, as words of `records.GROUP`; and its choices."""
    mu: float = getattr(settings, momentum)
    log_mu = math.log2(mu) if mu > 0 else -math.inf
    c = settings.b_init[1] if isinstance(settings.b_init, tuple) else settings.b_init
    sign, eta = -1.0 if settings.maximize else 1.0, settings.average or 0.0
    numbers = (mu, log_mu, settings.weight_decay, c, sign, eta)
    return tuple(map(bits, numbers)), settings.key


# --------------------------------------------------------------------------- in Python


def _by_hand(params: list[Tensor], state: dict[Tensor, Any]) -> tuple[Any, list[int]]:
    """The tensors of a step, one by one: shards, sparse gradients and empty ones among them."""
    facts: list[Any] = []
    gradients = []
    for p in params:
        of_gradient: Any = None
        if p.grad is not None:
            g = sharded.local(p.grad)
            gradients.append(place := _address(g))
            solid = bool(place)  # not if its memory was freed
            on_p = solid and bool(_address(p)) and memory.overlap(sharded.local(p), g)
            of_gradient = _kind(p.grad), solid, on_p
        facts.append((id(p), _kind(p), _address(p), of_gradient))
    for p, kept in state.items():
        facts.append((id(p), *((name, _kind(t), _address(t)) for name, t in kept.items())))
    return tuple(facts), gradients


def _address(t: Any) -> int:
    """Where it lies: a shard's part on this rank; nowhere if it has no memory, or is no tensor."""
    if not isinstance(t, Tensor) or t.layout != torch.strided:
        return 0
    try:
        return sharded.local(t).data_ptr()
    except RuntimeError:  # one that torch.func has wrapped
        return 0


def _kind(t: Any) -> tuple[Any, ...]:
    """Its type, shape, strides and sign, a shard's on this rank; what is no tensor has none."""
    if not isinstance(t, Tensor):
        return ()
    if t.layout != torch.strided:
        return type(t), t.dtype, t.shape, t.device, t.layout
    strides, placements = sharded.local(t).stride(), getattr(t, "placements", None)
    return type(t), t.dtype, t.shape, t.device, strides, t.is_neg(), placements


# --------------------------------------------------------------------------------- in C

_NAME, _MAJOR = b"dlpack_exchange_api", 1  # of DLPack's C interface, and its version
_SAME, _MORE_ROOM = -2, -1  # what snapshot.c may answer instead of a number of words
_EXPORT = 40  # where in it the function lies that snapshot.c calls, which need not be there
_CALLED = (
    *("PyList_Size", "PyList_GetItem", "PyDict_Next", "PyObject_GetAttr", "PyObject_Type"),
    *("PyObject_CallFunctionObjArgs", "PyObject_IsTrue", "Py_DecRef", "PyErr_Clear"),
)


class _Python(ctypes.Structure):
    """`Python` of snapshot.c."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("exchange", *_CALLED)),
        *((name, ctypes.py_object) for name in ("none", "grad", "is_neg")),
        *((name, ctypes.py_object) for name in ("tensor", "parameter")),
    ]


@cache
def _walk() -> Any:
    """snapshot.c's function of (params, state, room); None where it cannot be used."""
    exchange, loaded = _exchange(), library.snapshot()
    if not exchange or isinstance(loaded, str):
        return None
    called = (ctypes.cast(getattr(ctypes.pythonapi, f), ctypes.c_void_p) for f in _CALLED)
    python = _Python(exchange, *called, None, "grad", Tensor.is_neg, Tensor, nn.Parameter)
    call, at = loaded.snapshot, ctypes.addressof(python)
    objects, words, count = [ctypes.py_object] * 2, ctypes.c_void_p, ctypes.c_int64
    call.argtypes = [words, *objects, words, count, words, count, words]
    call.restype = count

    def walk(params: list[Tensor], state: Any, room: _Room, _: Any = python) -> int:
        n: int = call(at, params, state, *room.arguments)
        return n

    return walk


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
