"""The lab's data: small files of the published formats, every way they can be wrong, downloads."""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import sys
import tarfile
import threading
import types
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wngrad.install import install_hint
from wngrad.lab.train import data
from wngrad.lab.train.data import Data, DataError, load

IMAGES, LABELS, TEST_IMAGES, TEST_LABELS = data.SOURCES["mnist"].files
BATCHES = list(data.SOURCES["cifar10"].files)
TAR = "cifar-10-binary.tar.gz"


def random_bytes(*shape: int, seed: int = 0, below: int = 256) -> Any:
    return np.random.default_rng(seed).integers(0, below, shape, dtype=np.uint8)


HINT = re.escape(install_hint("lab"))

# Few values, so that gzip has something to compress.
X, Y = random_bytes(6, 28, 28, below=20), random_bytes(6, below=10)
TEST_X, TEST_Y = random_bytes(3, 28, 28, seed=1, below=99), random_bytes(3, seed=1, below=10)
MNIST = {IMAGES: X, LABELS: Y, TEST_IMAGES: TEST_X, TEST_LABELS: TEST_Y}


def idx(array: Any) -> bytes:
    sizes = np.array(array.shape, ">u4").tobytes()
    return bytes((0, 0, 8, array.ndim)) + sizes + array.tobytes()


def records(seed: int, n: int = 2) -> bytes:
    labels, pixels = random_bytes(n, 1, seed=seed, below=10), random_bytes(n, 3072, seed=seed)
    return np.hstack([labels, pixels // (seed + 1)]).tobytes()


CIFAR = {name: records(seed) for seed, name in enumerate(BATCHES)}


def write(folder: Path, files: dict[str, Any]) -> Path:
    """Arrays as gzipped IDX, bytes as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, what in files.items():
        packed = what if isinstance(what, bytes) else gzip.compress(idx(what), mtime=0)
        (folder / name).write_bytes(packed)
    return folder


def same(a: Data, b: Data) -> bool:
    tensors = ("train_x", "train_y", "test_x", "test_y")
    return a.fingerprint == b.fingerprint and all(
        torch.equal(getattr(a, name), getattr(b, name)) for name in tensors
    )


@pytest.fixture(autouse=True)
def _no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WNGRAD_DATA", raising=False)


# What is read.


def test_mnist_is_read_to_the_pixel_and_normalized_by_its_training_set(tmp_path):
    got = load("mnist", write(tmp_path, MNIST))
    assert got.shape == (1, 28, 28)
    assert (got.name, got.classes, got.train_x.dtype) == ("mnist", 10, torch.float32)
    assert got.train_y.tolist() == Y.tolist()
    assert got.test_y.tolist() == TEST_Y.tolist()
    assert abs(got.train_x.double().mean()) < 1e-7  # float32 rounds pixels of about 1
    assert abs(got.train_x.double().std(correction=0) - 1) < 1e-7
    for x, raw in ((got.train_x, X), (got.test_x, TEST_X)):
        back = x.double() * X.astype(float).std() + X.astype(float).mean()
        torch.testing.assert_close(back[:, 0].numpy(), raw.astype(float), atol=1e-4, rtol=0)


def test_cifar10_is_read_to_the_pixel_and_normalized_by_channel(tmp_path):
    got = load("cifar10", write(tmp_path, CIFAR))
    raw = np.frombuffer(b"".join(CIFAR.values()), np.uint8).reshape(-1, 3073)
    pixels = raw[:, 1:].reshape(-1, 3, 32, 32).astype(float)
    mean = pixels[:10].mean(axis=(0, 2, 3), keepdims=True)
    std = pixels[:10].std(axis=(0, 2, 3), keepdims=True)
    back = torch.cat([got.train_x, got.test_x]).double().numpy() * std + mean
    np.testing.assert_allclose(back, pixels, atol=1e-4)  # float32 holds 255 to 1e-5
    assert torch.cat([got.train_y, got.test_y]).tolist() == raw[:, 0].tolist()
    assert (got.shape, len(got.train_x), got.published) == ((3, 32, 32), 10, None)


def test_digits_are_split_by_a_fixed_shuffle():
    from sklearn.datasets import load_digits

    got, order = load("digits"), torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    assert (got.shape, got.classes, got.published) == ((64,), 10, None)
    assert got.test_y.tolist() == load_digits().target[order][1400:].tolist()
    x = torch.tensor(load_digits().data)[order]
    want = (x - x[:1400].mean()) / x[:1400].std(correction=0)
    torch.testing.assert_close(torch.cat([got.train_x, got.test_x]), want.float())


@pytest.mark.parametrize("place", ["mnist", "MNIST/raw", "."])
def test_mnist_is_found_in_each_layout(tmp_path, place):
    write(tmp_path / place, MNIST)
    assert len(load("mnist", tmp_path).train_x) == 6


@pytest.mark.parametrize("place", ["cifar-10-batches-bin", "."])
def test_cifar10_is_found_in_each_layout(tmp_path, place):
    write(tmp_path / place, CIFAR)
    assert len(load("cifar10", tmp_path).test_x) == 2


def test_the_folder_can_be_named_by_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WNGRAD_DATA", str(write(tmp_path / "a", MNIST)))
    assert len(load("mnist").train_x) == 6
    with pytest.raises(DataError, match="elsewhere"):  # An argument goes before.
        load("mnist", tmp_path / "elsewhere")


def test_files_are_published_if_their_content_has_the_known_md5(tmp_path, monkeypatch):
    write(tmp_path, MNIST)
    assert load("mnist", tmp_path).published is False
    known = {name: hashlib.md5(idx(array)).hexdigest() for name, array in MNIST.items()}
    monkeypatch.setitem(data.SOURCES, "mnist", replace(data.SOURCES["mnist"], files=known))
    assert load("mnist", tmp_path).published is True


@pytest.mark.parametrize("name", MNIST)
def test_one_changed_byte_changes_the_fingerprint(tmp_path, name):
    before = load("mnist", write(tmp_path, MNIST)).fingerprint
    changed = MNIST[name].copy()
    changed.flat[-1] ^= 1
    assert load("mnist", tmp_path).fingerprint == before
    assert load("mnist", write(tmp_path, {name: changed})).fingerprint != before


# What is refused.


def refuse(tmp_path: Path, files: dict[str, Any], name: str, what: str) -> None:
    """`files`, with `name` as the culprit, are refused with its path, `what` and a way out."""
    dataset = "mnist" if name in MNIST else "cifar10"
    write(tmp_path, {**(MNIST if dataset == "mnist" else CIFAR), **files})
    with pytest.raises(DataError, match=f"{name}: .*{what}.*; delete it and fetch it again"):
        load(dataset, tmp_path)


BROKEN_IDX = {
    "not gzip": (b"<html>404</html>", "Not a gzipped file"),
    "cut": (gzip.compress(idx(X))[:-9], "ended before"),
    "corrupt": (gzip.compress(idx(X))[:10] + b"\xff" * 99, "while decompressing"),
    "nothing": (b"", "00000803, found nothing"),
    "no sizes": (gzip.compress(idx(X)[:9]), "found 000008030000000600"),
    "labels": (Y, "starts 00000803, found 00000801"),
    "no images": (X[:0], r"\('n > 0', 28, 28\), found \(0, 28, 28\)"),
    "small images": (X[:, 1:], r"found \(6, 27, 28\)"),
    "too short": (gzip.compress(idx(X)[:-1]), "expected 4720 bytes unpacked, found 4719"),
    "too long": (gzip.compress(idx(X) + b"\0"), "expected 4720 bytes unpacked, found 4721"),
}


@pytest.mark.parametrize("fault", BROKEN_IDX)
@pytest.mark.parametrize("name", [IMAGES, TEST_IMAGES])
def test_a_broken_idx_file_is_named(tmp_path, name, fault):
    content, what = BROKEN_IDX[fault]
    refuse(tmp_path, {name: content}, name, what)


def test_a_label_that_is_no_digit_is_refused(tmp_path):
    refuse(tmp_path, {LABELS: Y + 10}, LABELS, "labels from 0 to 9, found 1")
    refuse(tmp_path, {"test_batch.bin": b"\x0a" + bytes(3072)}, "test_batch.bin", "found 10")


def test_images_and_labels_must_be_as_many(tmp_path):
    refuse(tmp_path, {TEST_LABELS: Y}, TEST_LABELS, "expected 3 labels, one per image, found 6")


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("size", [0, 1, 3072, 6145])
def test_a_cifar10_file_of_another_length_is_refused(tmp_path, name, size):
    refuse(tmp_path, {name: bytes(size)}, name, f"records of 3073 bytes, found {size} bytes")


def test_a_constant_training_set_is_refused(tmp_path):
    refuse(tmp_path, {IMAGES: np.full_like(X, 7)}, IMAGES, "images that differ")
    blue = np.frombuffer(records(0), np.uint8).reshape(2, 3073).copy()
    blue[:, 1:1025] = 200  # One constant channel is enough for a division by 0.
    refuse(tmp_path, dict.fromkeys(BATCHES, blue.tobytes()), BATCHES[0], "images that differ")


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write(tmp_path, MNIST)
    denied = PermissionError(13, "Permission denied")
    monkeypatch.setattr(Path, "read_bytes", lambda path: (_ for _ in ()).throw(denied))
    with pytest.raises(DataError, match=f"{IMAGES}: .*Permission denied"):
        load("mnist", tmp_path)


@pytest.mark.parametrize(("name", "files"), [("mnist", MNIST), ("cifar10", CIFAR)])
def test_files_missing_from_a_folder_are_named_and_not_downloaded(tmp_path, name, files):
    first, *others = files
    with pytest.raises(DataError, match=f"no {first}, {others[0]}.*correct --data or WNGRAD_DATA"):
        load(name, tmp_path / "nowhere")
    write(tmp_path, {file: files[file] for file in others})
    with pytest.raises(
        DataError, match=rf"no {first} \(all of {name} must be in one of .*download"
    ):
        load(name, tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Data]:
    folder = write(tmp_path_factory.mktemp("mnist"), MNIST)
    return folder, load("mnist", folder)


@settings(max_examples=300)
@given(name=st.sampled_from(list(MNIST)), cut=st.booleans(), draw=st.data())
def test_a_file_cut_or_changed_anywhere_is_refused_or_harmless(whole, name, cut, draw):
    folder, before = whole
    packed = bytearray(gzip.compress(idx(MNIST[name]), mtime=0))
    at = draw.draw(st.integers(0, len(packed) - 1))
    if cut:
        del packed[at:]
    else:
        packed[at] ^= draw.draw(st.integers(1, 255))
    write(folder, {**MNIST, name: bytes(packed)})
    try:
        good = same(load("mnist", folder), before)
    except DataError as error:
        good = name in str(error)
    assert good


# Data of the user's own.


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("my_data")
    monkeypatch.setitem(sys.modules, "my_data", module)
    return module


def test_a_function_of_the_user_gives_the_data(mine):
    made = Data("mine", *(torch.zeros(2, 5), torch.zeros(2).long()) * 2, 3, "f")
    mine.make = lambda: made
    assert torch.equal(load("my_data:make").train_x, made.train_x)
    assert (made.shape, made.published) == ((5,), None)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("imagenet", "digits, mnist, cifar10 or module:name, got 'imagenet'"),
        ("no_such_module:make", "No module named 'no_such_module'"),
        ("my_data:absent", "has no attribute 'absent'"),
        ("my_data:number", "must be callable, got 7"),
        ("my_data:list", r"must return a Data, got \[\]"),
    ],
)
def test_a_name_that_gives_no_data_is_explained(mine, name, what):
    mine.number, mine.list = 7, list
    with pytest.raises(ValueError, match=what):
        load(name)


# Downloads.


@dataclass
class Home:
    """A public home of data on this machine, and the cache that downloads go to."""

    folder: Path
    cache: Path
    monkeypatch: pytest.MonkeyPatch
    server: ThreadingHTTPServer
    asked: list[str] = field(default_factory=list)

    def publish(self, name: str, files: dict[str, Any]) -> None:
        """Serve the files, and make them the published ones."""
        write(self.folder, files)
        md5 = {file: hashlib.md5((self.folder / file).read_bytes()).hexdigest() for file in files}
        base = f"http://127.0.0.1:{self.server.server_port}/"
        source = replace(data.SOURCES[name], base=base, downloads=md5)
        self.monkeypatch.setitem(data.SOURCES, name, source)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path / "home"))

        def log_message(self, *args: Any) -> None:
            there.asked.append(self.path)

    pooch = pytest.importorskip("pooch")
    monkeypatch.setattr(pooch, "os_cache", lambda project: tmp_path / "cache" / project)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    there = Home(tmp_path / "home", tmp_path / "cache" / "wngrad", monkeypatch, server)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield there
    there.close()
    thread.join()


def tar(files: dict[str, bytes], *odd: tarfile.TarInfo) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for entry in odd:
            archive.addfile(entry, io.BytesIO(bytes(entry.size)))
        for name, content in files.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def test_mnist_is_downloaded_once(home):
    home.publish("mnist", MNIST)
    first = load("mnist")
    assert home.asked == [f"/{name}" for name in MNIST]
    home.close()
    assert same(load("mnist"), first)
    assert first.published is True


def test_cifar10_is_downloaded_once(home, tmp_path):
    home.publish("cifar10", {TAR: tar(CIFAR)})
    first = load("cifar10")
    home.close()
    assert same(load("cifar10"), first)
    assert same(load("cifar10", write(tmp_path / "unpacked", CIFAR)), first)
    assert first.published is True


def test_half_a_download_in_the_cache_is_fetched_again(home):
    home.publish("mnist", MNIST)
    write(home.cache / "mnist", {IMAGES: (home.folder / IMAGES).read_bytes()[:100]})
    assert len(load("mnist").train_x) == 6
    write(home.cache / "mnist", {IMAGES: b"half"})
    home.close()
    with pytest.raises(DataError, match=f"{IMAGES}: not downloaded, no whole answer"):
        load("mnist")


def test_a_download_with_another_md5_is_refused_and_not_kept(home):
    home.publish("mnist", MNIST)
    write(home.folder, {LABELS: Y[::-1]})
    with pytest.raises(DataError, match=f"http://.*{LABELS}: .*md5.*; try again, or fetch it"):
        load("mnist")
    assert [file.name for file in (home.cache / "mnist").iterdir()] == [IMAGES]


def test_a_file_the_server_lacks_is_named(home):
    home.publish("cifar10", {TAR: tar(CIFAR)})
    (home.folder / TAR).unlink()
    with pytest.raises(
        DataError, match=f"http://.*{TAR}: .*answered 404; try again, or .* unpack it and"
    ):
        load("cifar10")


def test_a_server_that_is_down_is_named_in_one_line(home):
    home.publish("mnist", MNIST)
    home.close()
    with pytest.raises(
        DataError, match=f"http://.*{IMAGES}: .*no whole answer .ConnectionError.;"
    ) as e:
        load("mnist")
    assert "\n" not in str(e.value)


def test_a_cache_that_cannot_be_written_is_named(home):
    home.publish("mnist", MNIST)
    home.cache.parent.mkdir()
    home.cache.write_text("a file where the folder should be")
    with pytest.raises(DataError, match=rf"{IMAGES}: .*Errno.*{home.cache}"):
        load("mnist")


def test_an_odd_archive_is_read_without_writing_anything(home, tmp_path):
    link, up, root = map(
        tarfile.TarInfo,
        ("cifar-10-batches-bin/data_batch_1.bin", "../up", f"{tmp_path}/root"),
    )
    link.type, link.linkname, up.size, root.size = tarfile.SYMTYPE, str(tmp_path), 9, 9
    home.publish("cifar10", {TAR: tar(CIFAR, link, up, root)})
    assert len(load("cifar10").train_x) == 10
    assert [file.name for file in (home.cache / "cifar10").iterdir()] == [TAR]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache", "home"]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"no archive", "whole .tar.gz"),
        (tar(CIFAR)[:-2000], "whole .tar.gz"),
        (tar({}), "expected cifar-10-batches-bin/data_batch_1.bin, .* found no such files"),
        (tar({**CIFAR, "test_batch.bin": b"short"}), "test_batch.bin: .*3073 bytes, found 5"),
    ],
    ids=["no archive", "cut", "empty", "short file"],  # gzip writes the time into its header
)
def test_a_wrong_archive_is_named(home, content, what):
    home.publish("cifar10", {TAR: content})
    with pytest.raises(DataError, match=f"{TAR}.*{what}"):
        load("cifar10")


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("progress", [True, False])
def test_a_bar_is_shown_only_on_a_terminal(home, monkeypatch, capsys, terminal, progress):
    home.publish("mnist", MNIST)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    load("mnist", progress=progress)
    assert ("100%" in capsys.readouterr().err) == (terminal and progress)


@pytest.mark.parametrize("package", ["pooch", "tqdm"])
def test_a_package_that_downloads_need_is_named(home, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(DataError, match=rf"{package}.*{HINT}, or .* --data"):
        load("mnist")


def test_digits_without_scikit_learn_name_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataError, match=rf"sklearn.*{HINT}\.$"):
        load("digits")
