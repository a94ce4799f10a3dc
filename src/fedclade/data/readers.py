"""Data sets read from their files as they are published. A file that is damaged, cut short or
something else is refused by its name.

Every reader takes the files that `published_datasets` found. Archives are read where they lie and
nothing is unpacked to disk or unpickled, nor in memory beyond `safe_read.MOST`.
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
"""Where the bytes came from, for messages, and the bytes."""

IDX_PARTS = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "test-images-idx3-ubyte",
    "test-labels-idx1-ubyte",
)
CIFAR_PIXELS = 3 * 32 * 32
LEAF_PIXELS = 28 * 28
_AGAIN = "get it again."


def idx(name: str, classes: int, files: Sequence[Path]) -> Dataset:
    """MNIST's format: training images, training labels, test images, test labels; each plain or
    packed by gzip.
    """
    return _from_idx(name, classes, _contents(files), transposed=False)


def emnist(split: str, classes: int, files: Sequence[Path]) -> Dataset:
    """EMNIST's four IDX files of a split ("balanced", "byclass"), or gzip.zip with them. Images lie
    transposed and are put upright.
    """
    members = [f"gzip/emnist-{split}-{part}.gz" for part in IDX_PARTS]
    contents = _from_zip(files[0], members) if len(files) == 1 else _contents(files)
    return _from_idx(f"emnist_{split}", classes, contents, transposed=True)


def cifar(
    name: str, classes: int, label_bytes: int, members: Sequence[str], files: Sequence[Path]
) -> Dataset:
    """The binary version of CIFAR-10 and CIFAR-100: its .tar.gz, or the `members` unpacked, of
    which the last is the test part.

    A record is `label_bytes` labels, the last of which counts (CIFAR-100: the fine one), and 3 × 32
    × 32 pixels.
    """
    contents = _from_tar(files[0], members) if len(files) == 1 else _contents(files)
    parts = [_cifar_records(content, classes, label_bytes) for content in contents]
    x_train, y_train = (np.concatenate(arrays) for arrays in zip(*parts[:-1], strict=True))
    x_test, y_test = parts[-1]
    return dataset(x_train, y_train, x_test, y_test, name)


def svhn(files: Sequence[Path]) -> Dataset:
    """SVHN's cropped digits: train_32x32.mat and test_32x32.mat, X of 32 × 32 × 3 × N and y in 1 …
    10, where 10 is the digit 0.
    """
    (x_train, y_train), (x_test, y_test) = (_svhn_part(file) for file in files)
    return dataset(x_train, y_train, x_test, y_test, "svhn")


def leaf(name: str, classes: int, folders: Sequence[Path]) -> Dataset:
    """LEAF's images (FEMNIST): folders train and test of .json files with users, num_samples and
    user_data. The key is the writer.
    """
    (x_train, y_train, train), (x_test, y_test, test) = (
        _leaf_part(folder, classes) for folder in folders
    )
    return dataset(x_train, y_train, x_test, y_test, name, writer=(train, test))


def ag_news(files: Sequence[Path]) -> Dataset:
    """AG News' train.csv and test.csv (class 1 … 4, title, description) as a language-model data
    set; the key is the topic 0 … 3.
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
            f"{images[0]} has {len(x)} images, {labels[0]} {len(y)} labels: they do not belong"
            " together."
        )
    _check_labels(labels[0], y, classes)
    return np.ascontiguousarray(x.transpose(0, 2, 1)) if transposed else x, y


def _idx_array(content: Content, axes: int) -> Bytes:
    """IDX: two zero bytes, 8 for unsigned bytes, the number of axes, each axis' length as a
    big-endian 32-bit number, the values.
    """
    where, data = content
    start = 4 + 4 * axes
    packed = data[:2] == b"\x1f\x8b"
    with _translate_read_errors(where):
        head = safe_read.gunzip(data, start) if packed else data[:start]
    if head[:4] != bytes((0, 0, 8, axes)):
        raise InvalidInputError(
            f"{where} begins with the bytes {head[:4].hex(' ') or 'of an empty file'}, an IDX file"
            f" of this kind with 00 00 08 0{axes}: this is another file; get it again."
        )
    shape = [int(length) for length in np.frombuffer(head[4:].ljust(4 * axes, b"\0"), ">u4")]
    promised = start + math.prod(shape)
    safe_read.allow(f"{where}, by its header", promised)
    with _translate_read_errors(where):
        data = safe_read.gunzip(data, promised + 1) if packed else data
    if len(data) != promised:
        found = len(data) if len(data) < promised else f"more than {promised}"
        raise InvalidInputError(
            f"{where} has {found} bytes, its header promises {promised}: cut short or damaged;"
            f" {_AGAIN}"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _cifar_records(content: Content, classes: int, label_bytes: int) -> tuple[Bytes, Bytes]:
    where, data = content
    length = label_bytes + CIFAR_PIXELS
    if len(data) % length:
        raise InvalidInputError(
            f"{where} has {len(data)} bytes, which is no multiple of a record's {length}: cut short"
            f" or another file; {_AGAIN}"
        )
    records = np.frombuffer(data, np.uint8).reshape(-1, length)
    labels = records[:, label_bytes - 1]
    _check_labels(where, labels, classes)
    return records[:, label_bytes:].reshape(-1, 3, 32, 32), labels


def _svhn_part(path: Path) -> tuple[Bytes, Array]:
    data = safe_read.read(path)
    try:
        found = matlab.arrays(path, data, ("X", "y"))
    except (ValueError, zlib.error) as error:
        if isinstance(error, InvalidInputError):
            raise
        raise InvalidInputError(
            f"{path}: no MATLAB file, damaged or cut short ({_reason(error)}); {_AGAIN}"
        ) from error
    if missing := [name for name in ("X", "y") if name not in found]:
        raise InvalidInputError(
            f"{path}: there is no array of numbers '{missing[0]}' in it; {_AGAIN}"
        )
    x, y = found["X"], found["y"].ravel()
    if x.dtype != np.uint8 or x.shape != (32, 32, 3, len(y)):
        raise InvalidInputError(
            f"{path}: X of shape {x.shape} and type {x.dtype} for {len(y)} labels: it must be"
            " uint8, 32 × 32 × 3 × labels."
        )
    if not np.isin(y, range(1, 11)).all():
        raise InvalidInputError(
            f"{path}: y has values other than 1 … 10 (10 is the digit 0); {_AGAIN}"
        )
    return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), (y % 10).astype(np.uint8)


def _leaf_part(folder: Path, classes: int) -> tuple[Bytes, Array, Array]:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise InvalidInputError(
            f"{folder}: there are no .json files; put those that LEAF's preprocess.sh made there."
        )
    images, labels, writers = [], [], []
    for file in files:
        for writer, x, y in _leaf_users(file, classes):
            images.append(x)
            labels.append(y)
            writers.append(np.full(len(y), writer))
    return np.concatenate(images), np.concatenate(labels), np.concatenate(writers)


def _leaf_users(path: Path, classes: int) -> Iterator[tuple[str, Bytes, Array]]:
    """Images are stored as k / 255 for the byte k; as bytes they take an eighth of the memory and
    lose nothing.
    """
    safe_read.fit(path, safe_read.size(path))  # the number of users in a file is not fixed
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"{path}: no JSON, damaged or cut short ({_reason(error)}): make it again by LEAF's"
            " preprocess.sh."
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
            f"{path}: not as LEAF writes FEMNIST, with users, num_samples and user_data,"
            f" {LEAF_PIXELS} pixels a sample: {_reason(error)}."
        ) from error


def _ag_news_part(path: Path) -> text_dataset.Texts:
    texts, topics = [], []
    safe_read.allow(path, safe_read.size(path))
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = csv.reader(file, strict=True)
            for row in rows:
                if len(row) != 3 or row[0] not in ("1", "2", "3", "4"):
                    shown = ", ".join(row)[:60]
                    raise InvalidInputError(
                        f"{path}, line {rows.line_num}: '{shown}' is not class 1 … 4, title,"
                        f" description; {_AGAIN}"
                    )
                topics.append(int(row[0]) - 1)
                texts.append(f"{row[1]} {row[2]}")
    except (csv.Error, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"{path}: damaged or cut short after {len(texts)} texts ({_reason(error)}); {_AGAIN}"
        ) from error
    if not texts:
        raise InvalidInputError(f"{path}: there are no texts in it; {_AGAIN}")
    return texts, topics


def _from_tar(path: Path, members: Sequence[str]) -> list[Content]:
    found: dict[str, bytes] = {}
    safe_read.allow(path, safe_read.size(path))
    with _translate_read_errors(path), gzip.open(path) as packed:
        content = safe_read.Limited(packed, f"{path}, unpacked")
        with tarfile.open(fileobj=content, mode="r|") as archive:  # type: ignore[call-overload]  # it only reads
            for member in archive:
                name = PurePosixPath(member.name).name
                # A sparse member is of any size with nothing in the archive.
                if (
                    name in members
                    and member.isreg()
                    and not member.issparse()
                    and (file := archive.extractfile(member)) is not None
                ):
                    safe_read.allow(f"{path}: {name}, by its header", member.size)
                    found[name] = file.read()
        while content.read(1 << 20):  # gzip compares its checksum at the very end
            pass
    if missing := [name for name in members if name not in found]:
        raise InvalidInputError(
            f"{path}: {', '.join(missing)} missing; this is not the binary version (the Python"
            " version is never unpickled)."
        )
    return [(f"{path}: {name}", found[name]) for name in members]


def _from_zip(path: Path, members: Sequence[str]) -> list[Content]:
    safe_read.allow(path, safe_read.size(path))
    with _translate_read_errors(path), zipfile.ZipFile(path) as archive:
        if missing := sorted(set(members) - set(archive.namelist())):
            raise InvalidInputError(f"{path}: {', '.join(missing)} missing; {_AGAIN}")
        return [(f"{path}: {name}", _zipped(path, archive, name)) for name in members]


def _zipped(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    size = archive.getinfo(name).file_size
    safe_read.allow(f"{path}: {name}, by its header", size)
    with safe_read.member(path, archive, name) as file:
        return file.read(size + 1)


@contextmanager
def _translate_read_errors(where: str | Path) -> Iterator[None]:
    """What an unpacker says of a damaged file, said with the file's name."""
    try:
        yield
    except (InvalidInputError, PermissionError):
        raise
    # gzip, tarfile and zipfile raise a dozen kinds for a damaged file, and each means the same to a
    # user
    except Exception as error:
        raise InvalidInputError(
            f"{where}: damaged or cut short ({_reason(error)}); {_AGAIN}"
        ) from error


def _check_labels(where: str, labels: Array, classes: int) -> None:
    if len(labels) == 0:
        raise InvalidInputError(f"{where}: there are no samples in it; {_AGAIN}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise InvalidInputError(
            f"{where}: labels from {low} to {high}, where 0 … {classes - 1} are allowed: this is"
            f" another file; {_AGAIN}"
        )


def _reason(error: BaseException) -> str:
    return str(error).split("\n", 1)[0] or type(error).__name__
