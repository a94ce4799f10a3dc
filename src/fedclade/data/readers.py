"""Readers of published data sets. A damaged or wrong file is an `InvalidInputError` about it.

Every reader takes the files that `Published.find_files` returns. Archives are read in place:
nothing is unpacked to disk or unpickled, and at most `safe_read.MOST` bytes are unpacked in memory.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedclade.data import matlab, text_dataset
from fedclade.data.datasets import Dataset, dataset
from fedclade.errors import InvalidInputError
from fedclade.io import safe_read

Array: TypeAlias = NDArray[np.generic]
Bytes: TypeAlias = NDArray[np.uint8]
Content: TypeAlias = tuple[str, bytes]
"""The source of the bytes, for messages, and the bytes."""

IDX_PARTS = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "test-images-idx3-ubyte",
    "test-labels-idx1-ubyte",
)
CIFAR_PIXELS = 3 * 32 * 32
LEAF_PIXELS = 28 * 28
_AGAIN = "Download it again."


def idx(name: str, classes: int, files: Sequence[Path]) -> Dataset:
    """The format of MNIST: training images, training labels, test images, test labels; each plain
    or packed by gzip.
    """
    return _from_idx(name, classes, _contents(files), transposed=False)


def emnist(split: str, classes: int, files: Sequence[Path]) -> Dataset:
    """The four IDX files of a split of EMNIST ("balanced", "byclass"), or gzip.zip with them. The
    files hold transposed images, which are transposed back.
    """
    members = [f"gzip/emnist-{split}-{part}.gz" for part in IDX_PARTS]
    contents = _from_zip(files[0], members) if len(files) == 1 else _contents(files)
    return _from_idx(f"emnist_{split}", classes, contents, transposed=True)


def cifar(
    name: str, classes: int, label_bytes: int, members: Sequence[str], files: Sequence[Path]
) -> Dataset:
    """The binary version of CIFAR-10 and CIFAR-100: its .tar.gz, or the unpacked `members`. The
    last member is the test part.

    A record has `label_bytes` labels, of which the last is used (CIFAR-100: the fine one), and
    3 × 32 × 32 pixels.
    """
    contents = _from_tar(files[0], members) if len(files) == 1 else _contents(files)
    parts = [_cifar_records(content, classes, label_bytes) for content in contents]
    x_train, y_train = (np.concatenate(arrays) for arrays in zip(*parts[:-1], strict=True))
    x_test, y_test = parts[-1]
    return dataset(x_train, y_train, x_test, y_test, name)


def svhn(files: Sequence[Path]) -> Dataset:
    """The cropped digits of SVHN: train_32x32.mat and test_32x32.mat with X of 32 × 32 × 3 × N and
    y in 1 … 10, where 10 is the digit 0.
    """
    (x_train, y_train), (x_test, y_test) = (_svhn_part(file) for file in files)
    return dataset(x_train, y_train, x_test, y_test, "svhn")


def leaf(name: str, classes: int, folders: Sequence[Path]) -> Dataset:
    """The images of LEAF (FEMNIST): folders train and test of .json files with users, num_samples
    and user_data. The key is the writer.
    """
    (x_train, y_train, train), (x_test, y_test, test) = (
        _leaf_part(folder, classes) for folder in folders
    )
    return dataset(x_train, y_train, x_test, y_test, name, writer=(train, test))


def ag_news(files: Sequence[Path]) -> Dataset:
    """train.csv and test.csv of AG News (class 1 … 4, title, description) as a language-model data
    set. The key is the topic 0 … 3.
    """
    train, test = (_ag_news_part(file) for file in files)
    return text_dataset.language_model(train, test, name="ag_news")


def _contents(files: Sequence[Path]) -> list[Content]:
    return [(str(file), safe_read.read(file)) for file in files]


def _from_idx(name: str, classes: int, contents: Sequence[Content], transposed: bool) -> Dataset:
    (x_train, y_train), (x_test, y_test) = (
        _idx_part(contents[at], contents[at + 1], classes, transposed) for at in (0, 2)
    )
    return dataset(x_train, y_train, x_test, y_test, name)


def _idx_part(
    images: Content, labels: Content, classes: int, transposed: bool
) -> tuple[Bytes, Bytes]:
    x, y = _idx_array(images, 3), _idx_array(labels, 1)
    if len(x) != len(y):
        raise InvalidInputError(
            f"{images[0]} has {len(x)} images, but {labels[0]} has {len(y)} labels. {_AGAIN}",
            images[0],
        )
    _check_labels(labels[0], y, classes)
    return np.ascontiguousarray(x.transpose(0, 2, 1)) if transposed else x, y


def _idx_array(content: Content, axes: int) -> Bytes:
    """IDX: two zero bytes, 8 for unsigned bytes, the number of axes, the length of each axis as a
    big-endian 32-bit number, the values.
    """
    where, data = content
    start = 4 + 4 * axes
    packed = data[:2] == b"\x1f\x8b"
    with _translate_read_errors(where):
        head = safe_read.gunzip(data, start) if packed else data[:start]
    if head[:4] != bytes((0, 0, 8, axes)):
        first = head[:4].hex(" ") if head else "nothing: it is empty"
        raise InvalidInputError(
            f"{where} starts with {first}, an IDX file of this kind with 00 00 08 0{axes}. This is"
            f" the wrong file. {_AGAIN}",
            where,
        )
    shape = [int(length) for length in np.frombuffer(head[4:].ljust(4 * axes, b"\0"), ">u4")]
    expected = start + math.prod(shape)
    safe_read.allow(where, expected, note="by its header")
    with _translate_read_errors(where):
        data = safe_read.gunzip(data, expected + 1) if packed else data
    if len(data) != expected:
        length = len(data) if len(data) < expected else f"more than {expected}"
        raise InvalidInputError(
            f"{where} has {length} bytes, its header requires {expected}: damaged or cut short."
            f" {_AGAIN}",
            where,
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _cifar_records(content: Content, classes: int, label_bytes: int) -> tuple[Bytes, Bytes]:
    where, data = content
    length = label_bytes + CIFAR_PIXELS
    if len(data) % length:
        raise InvalidInputError(
            f"{where} has {len(data)} bytes, not a multiple of {length}, the size of a record: cut"
            f" short or the wrong file. {_AGAIN}",
            where,
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, length)
    labels = records[:, label_bytes - 1]
    _check_labels(where, labels, classes)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), labels


def _svhn_part(path: Path) -> tuple[Bytes, Array]:
    data = safe_read.read(path)
    try:
        by_name = matlab.arrays(path, data, ("X", "y"))
    except (ValueError, zlib.error) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(
            f"{path}: not a MATLAB file, damaged or cut short ({_reason(error)}). {_AGAIN}",
            str(path),
        ) from error
    if missing := [name for name in ("X", "y") if name not in by_name]:
        raise InvalidInputError(
            f"{path}: it has no array of numbers '{missing[0]}'. {_AGAIN}", str(path)
        )
    x, y = by_name["X"], by_name["y"].ravel()
    if x.dtype != np.uint8 or x.shape != (32, 32, 3, len(y)):
        raise InvalidInputError(
            f"{path}: X has shape {x.shape} and type {x.dtype} for {len(y)} labels. It must be"
            " uint8 of shape 32 × 32 × 3 × labels.",
            str(path),
        )
    if not np.isin(y, range(1, 11)).all():
        raise InvalidInputError(
            f"{path}: y has values other than 1 … 10 (10 is the digit 0). {_AGAIN}", str(path)
        )
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), (y % 10).astype(np.uint8)


def _leaf_part(folder: Path, classes: int) -> tuple[Bytes, Array, Array]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InvalidInputError(
            f"{folder}: there are no .json files. Put those of LEAF's preprocess.sh there.",
            str(folder),
        )
    images, labels, writers = [], [], []
    for file in files:
        for writer, x, y in _leaf_users(file, classes):
            images.append(x)
            labels.append(y)
            writers.append(np.full(len(y), writer))
    return np.concatenate(images), np.concatenate(labels), np.concatenate(writers)


def _leaf_users(path: Path, classes: int) -> Iterator[tuple[str, Bytes, Array]]:
    """The writer, the images and the labels of each user in a file. LEAF stores pixels as k / 255;
    as bytes k they need an eighth of the memory.
    """
    safe_read.fit(path, safe_read.size(path))  # a file may have any number of users
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"{path}: not JSON, damaged or cut short ({_reason(error)}). Make it again with LEAF's"
            " preprocess.sh.",
            str(path),
        ) from error
    try:
        for user, count in zip(content["users"], content["num_samples"], strict=True):
            x, y = (
                np.asarray(content["user_data"][user]["x"], np.float64),
                np.asarray(content["user_data"][user]["y"]),
            )
            if x.shape != (count, LEAF_PIXELS) or y.shape != (count,) or y.dtype.kind != "i":
                raise ValueError(
                    f"user {user} has x of shape {x.shape} and y of shape {y.shape} for {count}"
                    " samples"
                )
            pixels = x * 255
            if (
                not ((pixels >= 0) & (pixels < 255.5)).all()
                or not (np.abs(pixels - pixels.round()) < 1e-3).all()
            ):
                raise ValueError(f"user {user} has pixels that are not k/255 for k = 0 … 255")
            _check_labels(f"{path}: user {user}", y, classes)
            yield str(user), pixels.round().astype(np.uint8).reshape(count, 28, 28), y
    except InvalidInputError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(
            f"{path}: not a FEMNIST file of LEAF, which has users, num_samples and user_data with"
            f" {LEAF_PIXELS} pixels per sample: {_reason(error)}.",
            str(path),
        ) from error


def _ag_news_part(path: Path) -> text_dataset.Texts:
    texts, topics = [], []
    safe_read.allow(path, safe_read.size(path))
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file, strict=True)
            for row in rows:
                if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                    start = ", ".join(row)[:60]
                    raise InvalidInputError(
                        f"{path}: line {rows.line_num}: '{start}' is not class 1 … 4, title,"
                        f" description. {_AGAIN}",
                        str(path),
                    )
                topics.append(int(row[0]) - 1)
                texts.append(f"{row[1]} {row[2]}")
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"{path}: damaged or cut short after {len(texts)} texts ({_reason(error)}). {_AGAIN}",
            str(path),
        ) from error
    if not texts:
        raise InvalidInputError(f"{path}: it has no texts. {_AGAIN}", str(path))
    return texts, topics


def _from_tar(path: Path, members: Sequence[str]) -> list[Content]:
    by_name: dict[str, bytes] = {}
    safe_read.allow(path, safe_read.size(path))
    with _translate_read_errors(path), gzip.open(path) as packed:
        content = safe_read.Limited(packed, path)
        with tarfile.open(fileobj=content, mode="r|") as archive:  # type: ignore[call-overload]  # it only reads
            for member in archive:
                name = PurePosixPath(member.name).name
                # A sparse member may have any size without bytes in the archive.
                if (
                    name in members
                    and member.isreg()
                    and not member.issparse()
                    and (file := archive.extractfile(member)) is not None
                ):
                    safe_read.allow(f"{path}: {name}", member.size, note="by its header")
                    by_name[name] = file.read()
        while content.read(1 << 20):  # gzip verifies its checksum at the very end
            pass
    if missing := [name for name in members if name not in by_name]:
        raise InvalidInputError(
            f"{path}: {', '.join(missing)} missing. This is not the binary version (the Python"
            " version is never unpickled).",
            str(path),
        )
    return [(f"{path}: {name}", by_name[name]) for name in members]


def _from_zip(path: Path, members: Sequence[str]) -> list[Content]:
    safe_read.allow(path, safe_read.size(path))
    with _translate_read_errors(path), zipfile.ZipFile(path) as archive:
        if missing := sorted(set(members) - set(archive.namelist())):
            raise InvalidInputError(f"{path}: {', '.join(missing)} missing. {_AGAIN}", str(path))
        return [(f"{path}: {name}", _zipped(path, archive, name)) for name in members]


def _zipped(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    size = archive.getinfo(name).file_size
    safe_read.allow(f"{path}: {name}", size, note="by its header")
    with safe_read.member(path, archive, name) as file:
        return file.read(size + 1)


@contextmanager
def _translate_read_errors(where: str | Path) -> Iterator[None]:
    """A context in which the errors of an unpacker become an `InvalidInputError` about the file."""
    try:
        yield
    except (InvalidInputError, PermissionError):
        raise
    # gzip, tarfile and zipfile raise a dozen kinds of error for a damaged file.
    except Exception as error:
        raise InvalidInputError(
            f"{where}: damaged or cut short ({_reason(error)}). {_AGAIN}", str(where)
        ) from error


def _check_labels(where: str, labels: Array, classes: int) -> None:
    if len(labels) == 0:
        raise InvalidInputError(f"{where}: it has no samples. {_AGAIN}", where)
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise InvalidInputError(
            f"{where}: labels from {low} to {high}, only 0 … {classes - 1} are allowed. This is the"
            f" wrong file. {_AGAIN}",
            where,
        )


def _reason(error: BaseException) -> str:
    return str(error).split("\n", 1)[0] or type(error).__name__
