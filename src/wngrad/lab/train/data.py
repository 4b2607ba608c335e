"""The data sets of the lab: scikit-learn's digits, MNIST, CIFAR-10, or data of your own.

Pixels are normalized by the training set's mean and standard deviation, and never augmented.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from wngrad.install import install_hint
from wngrad.lab.train.loader import load_callable
from wngrad.lab.train.objective import CLASSIFICATION, Objective

Array: TypeAlias = Any  # a NumPy array of bytes
File: TypeAlias = tuple[object, bytes]  # the path that an error names, and the content

_UNREADABLE = (OSError, EOFError, zlib.error, tarfile.TarError)
_RECORD = 1 + 3 * 32 * 32  # CIFAR-10: a label, then the red, green and blue planes
_MNIST = (  # file, its md5, and the md5 of its content
    ("train-images-idx3", "f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    ("train-labels-idx1", "d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    ("t10k-images-idx3", "9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    ("t10k-labels-idx1", "ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
)


class DataError(ValueError):
    """A file that is missing, truncated or wrong; the message names it and the way out."""


@dataclass(frozen=True, slots=True, eq=False)
class Data:
    """A problem to train on: the paper's are classifications, a task brings its own loss."""

    name: str
    train_x: Tensor  # (n, *shape); in the paper's float32
    train_y: Tensor  # (n, …); in the paper's the classes, int64
    test_x: Tensor
    test_y: Tensor
    classes: int  # 0 where there are none
    fingerprint: str  # sha256 of the raw arrays: whether two runs saw the same data
    published: bool | None = None  # whether the bytes are the published ones; None: unknown
    objective: Objective = CLASSIFICATION
    model: Callable[[], nn.Module] | None = None  # its own network; None: the sweep names one
    validation: tuple[Tensor, Tensor] | None = None  # what λ is chosen on; None: the test set

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.train_x.shape[1:])


@dataclass(frozen=True, slots=True)
class Source:
    """Where a data set lives, and what its files are called."""

    base: str  # its public home
    downloads: Mapping[str, str]  # what to fetch there, with its md5
    files: Mapping[str, str | None]  # what to read, with the md5 of its content where known
    folders: tuple[str, ...]  # where in a user's folder the files may be


SOURCES = {
    "mnist": Source(
        base="https://ossci-datasets.s3.amazonaws.com/mnist/",
        downloads={f"{stem}-ubyte.gz": packed for stem, packed, _ in _MNIST},
        files={f"{stem}-ubyte.gz": unpacked for stem, _, unpacked in _MNIST},
        folders=("mnist", "MNIST/raw", "."),
    ),
    "cifar10": Source(
        base="https://www.cs.toronto.edu/~kriz/",
        downloads={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        files=dict.fromkeys([*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]),
        folders=("cifar-10-batches-bin", "."),
    ),
}


def load(name: str, folder: Path | None = None, *, progress: bool = True) -> Data:
    """The data set `name`: from `folder`, from the folder WNGRAD_DATA names, or downloaded.

    Args:
        name: "digits", "mnist", "cifar10", or "module:function" that returns a `Data`.
        folder: where the files of MNIST or CIFAR-10 are; nothing is downloaded then.
        progress: show a bar while downloading, if stderr is a terminal.

    >>> digits = load("digits")
    >>> digits.shape, len(digits.train_x), len(digits.test_x)
    ((64,), 1400, 397)
    """
    if name == "digits":
        return _digits()
    if name not in SOURCES:
        return _custom(name)
    if folder is None and (named := os.environ.get("WNGRAD_DATA")):
        folder = Path(named)
    files = _download(name, progress) if folder is None else _read_all(name, folder.expanduser())
    # What was downloaded had the published md5.
    return (_mnist if name == "mnist" else _cifar10)(files, True if folder is None else None)


def _custom(name: str) -> Data:
    data = load_callable(name, "dataset", ("digits", *SOURCES))()
    if not isinstance(data, Data):
        raise DataError(f"lab: `dataset` {name!r} must return a Data, got {data!r}.")
    return data


# From bytes to Data.


def _data(
    name: str, where: object, raw: Sequence[Array], shape: tuple[int, ...], published: bool | None
) -> Data:
    """Normalize each channel of (n, channels, pixels) by its training mean and deviation."""
    train_x, train_y, test_x, test_y = raw
    count = train_x.size // train_x.shape[1]
    # Sums of integers are exact, and neither needs a second array of the size of the data.
    mean = train_x.sum(axis=(0, 2), dtype=np.int64) / count
    square = np.einsum("ncp,ncp->c", train_x, train_x, dtype=np.int64) / count
    std = np.sqrt(square - mean**2)
    if not std.all():
        raise _unusable(where, "expected training images that differ, found one value throughout")

    def normal(x: Array) -> Tensor:
        y = x.astype(np.float32)
        y -= mean[:, None]
        y /= std[:, None]
        return torch.from_numpy(y.reshape(-1, *shape))

    labels = [torch.from_numpy(y.astype(np.int64)) for y in (train_y, test_y)]
    tensors = normal(train_x), labels[0], normal(test_x), labels[1]
    return Data(name, *tensors, 10, _fingerprint(raw), published)


def _fingerprint(arrays: Sequence[Array]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(repr(array.shape).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _digits() -> Data:
    arrays = _needed("sklearn.datasets").load_digits(return_X_y=True)
    order = torch.randperm(len(arrays[1]), generator=torch.Generator().manual_seed(0)).numpy()
    pixels, y = (array[order].astype(np.uint8) for array in arrays)
    x = pixels.reshape(-1, 1, 64)
    return _data("digits", "digits", (x[:1400], y[:1400], x[1400:], y[1400:]), (64,), None)


def _mnist(files: Mapping[str, File], published: bool | None) -> Data:
    known = SOURCES["mnist"].files
    train_x, train_y, test_x, test_y = (files[name] for name in known)
    if not published:
        md5 = {name: hashlib.md5(files[name][1], usedforsecurity=False) for name in known}
        published = all(md5[name].hexdigest() == known[name] for name in known)
    raw = *_idx_pair(train_x, train_y), *_idx_pair(test_x, test_y)
    return _data("mnist", train_x[0], raw, (1, 28, 28), published)


def _idx_pair(images: File, labels: File) -> tuple[Array, Array]:
    x, y = _idx(*images, (28, 28)), _idx(*labels, ())
    if len(x) != len(y):
        raise _unusable(labels[0], f"expected {len(x)} labels, one per image, found {len(y)}")
    _check_labels(labels[0], y)
    return x.reshape(-1, 1, 784), y


def _idx(where: object, content: bytes, shape: tuple[int, ...]) -> Array:
    """An IDX file of n items of this shape: magic, sizes (big-endian), bytes."""
    magic, header = bytes((0, 0, 8, 1 + len(shape))), 8 + 4 * len(shape)
    if content[:4] != magic or len(content) < header:
        start = content[:header].hex() or "nothing"
        raise _unusable(where, f"expected an IDX header that starts {magic.hex()}, found {start}")
    n, *sizes = np.frombuffer(content[4:header], ">u4").tolist()
    if n == 0 or tuple(sizes) != shape:
        raise _unusable(where, f"expected sizes {('n > 0', *shape)}, found {(n, *sizes)}")
    if len(content) != (size := header + n * prod(shape)):
        raise _unusable(where, f"expected {size} bytes unpacked, found {len(content)}")
    return np.frombuffer(content, np.uint8, offset=header).reshape(n, *shape)


def _cifar10(files: Mapping[str, File], published: bool | None) -> Data:
    records = [_records(*files[name]) for name in SOURCES["cifar10"].files]
    raw = []
    for part in (records[:-1], records[-1:]):
        raw.append(np.concatenate([r[:, 1:] for r in part]).reshape(-1, 3, 1024))
        raw.append(np.concatenate([r[:, 0] for r in part]))
    return _data("cifar10", files["data_batch_1.bin"][0], raw, (3, 32, 32), published)


def _records(where: object, content: bytes) -> Array:
    if (size := len(content)) == 0 or size % _RECORD:
        raise _unusable(where, f"expected whole records of {_RECORD} bytes, found {size} bytes")
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD)
    _check_labels(where, records[:, 0])
    return records


def _check_labels(where: object, labels: Array) -> None:
    if labels.max() > 9:
        raise _unusable(where, f"expected labels from 0 to 9, found {labels.max()}")


def _unusable(where: object, what: str) -> DataError:
    way_out = "delete it and fetch it again, or give a folder with the published files as --data"
    return DataError(f"{where}: {what}; {way_out}.")


# From a folder, or the public home, to bytes.


def _read_all(name: str, folder: Path) -> dict[str, File]:
    """Read the files from the user's folder, in whichever layout it has."""
    files = SOURCES[name].files
    places = [folder / place for place in SOURCES[name].folders]
    missing = {at: [file for file in files if not os.path.isfile(at / file)] for at in places}
    best = min(places, key=lambda at: len(missing[at]))
    if missing[best]:
        raise DataError(
            f"{folder}: no {', '.join(missing[best])} (all of {name} must be in one of "
            f"{', '.join(map(str, places))}); correct --data or WNGRAD_DATA, or leave both out "
            "to download."
        )
    return {file: (best / file, _read(best / file)) for file in files}


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except _UNREADABLE as error:
        raise _unusable(path, f"expected a whole and readable file, found: {error}") from error


def _download(name: str, progress: bool) -> dict[str, File]:
    """Fetch into the cache what is not there whole, and read it."""
    source, bar = SOURCES[name], progress and sys.stderr.isatty()
    otherwise = ", or give a folder with the files as --data"
    pooch = _needed("pooch", otherwise)
    if bar:
        _needed("tqdm", otherwise)
    pooch.get_logger().setLevel("INFO" if bar else "WARNING")
    paths = [_fetch(pooch, name, file, bar) for file in source.downloads]
    if name == "cifar10":
        return _unpack(paths[0], source)
    return {path.name: (path, _read(path)) for path in paths}


def _fetch(pooch: Any, name: str, file: str, bar: bool) -> Path:
    url, known = SOURCES[name].base + file, f"md5:{SOURCES[name].downloads[file]}"
    try:
        # pooch checks what it finds in the cache, and puts there only what has the right md5.
        cache = pooch.os_cache("wngrad") / name
        return Path(pooch.retrieve(url, known, file, cache, progressbar=bar))
    except (OSError, ValueError) as error:
        what = "fetch it by hand" + (", unpack it" if file.endswith(".tar.gz") else "")
        way_out = f"try again, or {what} and give its folder as --data"
        raise DataError(f"{url}: not downloaded, {_why(error)}; {way_out}.") from error


def _why(error: Exception) -> str:
    if isinstance(error, ValueError):
        return "the md5 of what came is not the published one"
    if (response := getattr(error, "response", None)) is not None:
        return f"the server answered {response.status_code}"
    # An error of the disk has a number and names the file; one of the network is long.
    local = getattr(error, "errno", None)
    return str(error) if local else f"no whole answer ({type(error).__name__})"


def _unpack(archive: Path, source: Source) -> dict[str, File]:
    """Read the files inside the archive; nothing is written, so nothing astray or by half."""
    wanted = {f"{source.folders[0]}/{file}": file for file in source.files}
    files: dict[str, File] = {}
    try:
        with tarfile.open(archive, "r|gz") as tar:
            for entry in tar:
                if entry.isreg() and entry.name in wanted and (member := tar.extractfile(entry)):
                    files[wanted[entry.name]] = (archive / entry.name, member.read())
    except _UNREADABLE as error:
        raise _unusable(archive, f"expected a whole .tar.gz, found: {error}") from error
    if missing := [name for name, file in wanted.items() if file not in files]:
        raise _unusable(archive, f"expected {', '.join(missing)} in it, found no such files")
    return files


def _needed(module: str, otherwise: str = "") -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise DataError(f"lab: {error}: {install_hint('lab')}{otherwise}.") from error
