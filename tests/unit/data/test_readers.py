"""Readers of published files, on small files of the same formats, whole and damaged."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from fedclade.data import Dataset, readers
from fedclade.data.dataset_catalog import CATALOGUE, CIFAR10_FILES, CIFAR100_FILES, MNIST_FILES
from fedclade.errors import InvalidInputError

Write = Callable[[Path], Dataset]
DRAW = np.random.default_rng(0)
TRAIN = DRAW.integers(0, 256, (5, 28, 28), dtype=np.uint8)
TEST = DRAW.integers(0, 256, (3, 28, 28), dtype=np.uint8)
COLORS = DRAW.integers(0, 256, (12, 3, 32, 32), dtype=np.uint8)


def refused(field: object, *values: object) -> pytest.RaisesExc:
    """An `InvalidInputError` about this field, with these values in its message."""
    return pytest.raises(
        InvalidInputError,
        check=lambda error: (
            error.field == str(field) and all(str(value) in str(error) for value in values)
        ),
    )


def idx(array: np.ndarray) -> bytes:
    return (
        struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
        + array.astype(np.uint8).tobytes()
    )


def idx_contents() -> list[bytes]:
    return [idx(TRAIN), idx(np.array([0, 9, 1, 1, 2])), idx(TEST), idx(np.array([4, 0, 3]))]


def written(folder: Path, contents: dict[str, bytes]) -> list[Path]:
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return [folder / name for name in contents]


def tar_gz(members: dict[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


def cifar10_contents() -> dict[str, bytes]:
    """Two records a file: a label byte, then 1,024 red, 1,024 green, 1,024 blue pixels."""
    return {
        name: b"".join(
            bytes([(2 * number + i) % 10]) + COLORS[2 * number + i].tobytes() for i in (0, 1)
        )
        for number, name in enumerate(CIFAR10_FILES)
    }


def cifar100_contents() -> dict[str, bytes]:
    """A coarse label, a fine label, the pixels."""
    return {
        name: b"".join(
            bytes([19, 90 + 2 * number + i]) + COLORS[2 * number + i].tobytes() for i in (0, 1)
        )
        for number, name in enumerate(CIFAR100_FILES)
    }


def leaf_content(users: dict[str, Sequence[int]], first: int) -> bytes:
    """As LEAF's scripts write it: pixels divided by 255, in rows of 784."""
    images = iter((TRAIN[first + row].ravel() / 255).tolist() for row in range(5))
    data = {
        user: {"x": [next(images) for _ in labels], "y": list(labels)}
        for user, labels in users.items()
    }
    return json.dumps(
        {"users": list(users), "num_samples": [len(y) for y in users.values()], "user_data": data}
    ).encode()


def published(name: str) -> Callable[[Sequence[Path]], Dataset]:
    return CATALOGUE[name].read


# whole files


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_idx_plain_and_packed(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    files = written(tmp_path, dict(zip(MNIST_FILES, map(pack, idx_contents()), strict=True)))
    data = published(name)(files)
    assert data.name == name
    assert data.x_train.dtype == torch.uint8
    assert data.x_train.shape == (5, 1, 28, 28)
    np.testing.assert_array_equal(data.x_train[:, 0].numpy(), TRAIN)
    np.testing.assert_array_equal(data.x_test[:, 0].numpy(), TEST)
    assert data.y_train.tolist() == [0, 9, 1, 1, 2]
    assert data.y_test.tolist() == [4, 0, 3]


def emnist_zip(split: str) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for part, content in zip(readers.IDX_PARTS, idx_contents(), strict=True):
            archive.writestr(f"gzip/emnist-{split}-{part}.gz", gzip.compress(content))
    return packed.getvalue()


@pytest.mark.parametrize("split", ["balanced", "byclass"])
def test_emnist_is_transposed_from_the_archive_and_from_files(tmp_path: Path, split: str) -> None:
    names = [f"gzip/emnist-{split}-{part}.gz" for part in readers.IDX_PARTS]
    files = written(tmp_path, dict(zip(names, map(gzip.compress, idx_contents()), strict=True)))
    (tmp_path / "gzip.zip").write_bytes(emnist_zip(split))
    for data in (
        published(f"emnist_{split}")(files),
        published(f"emnist_{split}")([tmp_path / "gzip.zip"]),
    ):
        assert data.name == f"emnist_{split}"
        assert data.x_train[2, 0, 3, 20] == TRAIN[2, 20, 3]
        np.testing.assert_array_equal(data.x_test[:, 0].numpy(), TEST.transpose(0, 2, 1))
        assert data.y_train.tolist() == [0, 9, 1, 1, 2]


def test_cifar10_from_the_archive_and_unpacked(tmp_path: Path) -> None:
    contents = cifar10_contents()
    # The archive has the members in any order, among others.
    members = {f"cifar-10-batches-bin/{name}": contents[name] for name in reversed(contents)} | {
        "cifar-10-batches-bin/readme.html": b"x"
    }
    archive = written(tmp_path, {"cifar-10-binary.tar.gz": tar_gz(members)})
    for data in (published("cifar10")(archive), published("cifar10")(written(tmp_path, contents))):
        np.testing.assert_array_equal(data.x_train.numpy(), COLORS[:10])
        np.testing.assert_array_equal(data.x_test.numpy(), COLORS[10:])
        assert data.y_train.tolist() == list(range(10))
        assert data.y_test.tolist() == [0, 1]


def test_cifar100_has_fine_labels(tmp_path: Path) -> None:
    contents = cifar100_contents()
    archive = written(
        tmp_path,
        {
            "cifar-100-binary.tar.gz": tar_gz(
                {f"cifar-100-binary/{name}": contents[name] for name in contents}
            )
        },
    )
    for data in (
        published("cifar100")(archive),
        published("cifar100")(written(tmp_path, contents)),
    ):
        np.testing.assert_array_equal(data.x_train.numpy(), COLORS[:2])
        assert data.y_train.tolist() == [90, 91]
        assert data.y_test.tolist() == [92, 93]


def svhn_files(folder: Path, **changes: np.ndarray) -> list[Path]:
    """MATLAB's order: row, column, color, sample; labels in a column."""
    parts = {
        "train_32x32.mat": (
            {
                "X": COLORS[:4].transpose(2, 3, 1, 0),
                "y": np.array([[1], [10], [9], [2]], np.uint8),
            }
            | changes
        ),
        "test_32x32.mat": {
            "X": COLORS[4:6].transpose(2, 3, 1, 0),
            "y": np.array([[10], [5]], np.uint8),
        },
    }
    for name, content in parts.items():
        savemat(folder / name, content, do_compression=True)
    return [folder / name for name in parts]


def test_svhn_ten_is_zero(tmp_path: Path) -> None:
    data = published("svhn")(svhn_files(tmp_path))
    np.testing.assert_array_equal(data.x_train.numpy(), COLORS[:4])
    assert data.x_train.dtype == torch.uint8
    assert data.y_train.tolist() == [1, 0, 9, 2]
    assert data.y_test.tolist() == [0, 5]


def test_leaf_joins_files_and_numbers_writers(tmp_path: Path) -> None:
    written(
        tmp_path,
        {
            "train/all_data_0_niid_0_keep_0_train_9.json": leaf_content(
                {"f0001_41": [3, 61], "f0003_12": [7]}, 0
            ),
            "train/all_data_1_niid_0_keep_0_train_9.json": leaf_content({"f0002_10": [0]}, 0),
            "test/all_data_0_niid_0_keep_0_test_9.json": leaf_content(
                {"f0001_41": [4], "f0003_12": [5]}, 0
            ),
            "train/notes.txt": b"not read",
        },
    )
    data = published("femnist")([tmp_path / "train", tmp_path / "test"])
    assert data.x_train.dtype == torch.uint8  # k/255 is the byte k again
    np.testing.assert_array_equal(data.x_train[:, 0].numpy(), TRAIN[[0, 1, 2, 0]])
    assert data.y_train.tolist() == [3, 61, 7, 0]
    train, test = data.keys["writer"]
    assert test is not None
    assert train.tolist() == [0, 0, 2, 1]
    assert test.tolist() == [0, 2]


AG_NEWS = b'"3","Fears for T N","Unions say ""no"", again\\and again."\n"1","A title","%s"\n' % (
    b"word " * 40
)


def test_ag_news_csv(tmp_path: Path) -> None:
    data = published("ag_news")(written(tmp_path, {"train.csv": AG_NEWS, "test.csv": AG_NEWS}))
    assert data.name == "ag_news"
    assert data.x_train.shape == (
        1,
        30,
    )  # the third topic's eleven tokens are fewer than a window's
    assert data.keys["topic"][0].tolist() == [0]


# damaged files


def whole_files(kind: str, folder: Path) -> tuple[list[Path], Callable[[Sequence[Path]], Dataset]]:
    """Good files of every format; the first is the one that tests damage."""
    if kind in ("idx", "idx.gz"):
        pack = gzip.compress if kind == "idx.gz" else bytes
        return written(
            folder, dict(zip(MNIST_FILES, map(pack, idx_contents()), strict=True))
        ), published("mnist")
    if kind == "zip":
        return written(folder, {"gzip.zip": emnist_zip("balanced")}), published("emnist_balanced")
    if kind == "tar.gz":
        return written(folder, {"cifar-100-binary.tar.gz": tar_gz(cifar100_contents())}), published(
            "cifar100"
        )
    if kind == "bin":
        return written(folder, cifar10_contents()), published("cifar10")
    if kind == "mat":
        return svhn_files(folder), published("svhn")
    if kind == "json":
        contents = {
            "train/a.json": leaf_content({"a": [3, 61]}, 0),
            "test/a.json": leaf_content({"a": [0]}, 0),
        }
        first = written(folder, contents)[0]
        return [first], lambda _: published("femnist")([folder / "train", folder / "test"])
    return written(folder, {"train.csv": AG_NEWS, "test.csv": AG_NEWS}), published("ag_news")


KINDS = ["idx", "idx.gz", "zip", "tar.gz", "bin", "mat", "json", "csv"]


@pytest.mark.parametrize("keep", [0, 3, 10, 100, -1, -9, -200])
@pytest.mark.parametrize("kind", KINDS)
def test_truncated_files(tmp_path: Path, kind: str, keep: int) -> None:
    files, read = whole_files(kind, tmp_path)
    content = files[0].read_bytes().rstrip(b"\n")  # a CSV without its last line end is whole
    files[0].write_bytes(content[:keep])
    with pytest.raises(InvalidInputError) as caught:
        read(files)
    assert caught.value.field.startswith(str(files[0]))
    assert str(caught.value).startswith(str(files[0]))


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_something_else(tmp_path: Path, kind: str) -> None:
    files, read = whole_files(kind, tmp_path)
    files[0].write_bytes(b"<html><body>404</body></html>\n" * 50)
    with pytest.raises(InvalidInputError) as caught:
        read(files)
    assert caught.value.field.startswith(str(files[0]))
    assert str(caught.value).startswith(str(files[0]))


@pytest.mark.parametrize("kind", ["idx.gz", "zip", "tar.gz", "mat"])
def test_every_damaged_byte_range_is_refused_or_reads_the_same(tmp_path: Path, kind: str) -> None:
    """In formats with a checksum, bytes that may change have no meaning (a time stamp, a
    comment).
    """
    files, read = whole_files(kind, tmp_path)
    good, content = read(files), files[0].read_bytes()
    fields = []
    for start in range(0, len(content), 1 + len(content) // 60):
        files[0].write_bytes(
            content[:start]
            + bytes(b ^ 0xFF for b in content[start : start + 3])
            + content[start + 3 :]
        )
        try:
            data = read(files)
        except InvalidInputError as error:
            fields.append(error.field)
        else:
            assert torch.equal(data.x_train, good.x_train)
            assert torch.equal(data.y_train, good.y_train)
    assert len(fields) > 30
    assert all(field.startswith(str(files[0])) for field in fields)


def test_errors_of_idx(tmp_path: Path) -> None:
    files, read = whole_files("idx", tmp_path)
    images, labels = files[0].read_bytes(), files[1].read_bytes()
    files[0].write_bytes(labels)
    with refused(files[0], "00 00 08 01", "00 00 08 03"):
        read(files)
    files[0].write_bytes(images[:-10])
    with refused(files[0], len(images) - 10, len(images)):
        read(files)
    files[0].write_bytes(images)
    files[1].write_bytes(idx(np.array([0, 1, 2, 3])))
    with refused(files[0], "5 images", files[1], "4 labels"):
        read(files)
    files[1].write_bytes(idx(np.array([0, 1, 2, 3, 10])))
    with refused(files[1], "0 to 10", "0 … 9"):
        read(files)
    written(tmp_path, {files[0].name: idx(TRAIN[:0]), files[1].name: idx(np.array([]))})
    with refused(files[1], "no samples"):
        read(files)


def test_archives_without_the_members(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"cifar-10-binary.tar.gz": tar_gz({"cifar-10-batches-py/data_batch_1": b"pickle"})},
    )
    with refused(path[0], ", ".join(CIFAR10_FILES)):
        published("cifar10")(path)
    path = written(tmp_path, {"gzip.zip": emnist_zip("letters")})
    with refused(path[0], "gzip/emnist-balanced-test-images-idx3-ubyte.gz"):
        published("emnist_balanced")(path)


def test_labels_of_another_cifar(tmp_path: Path) -> None:
    contents = cifar10_contents()
    contents["data_batch_2.bin"] = bytes([10]) + contents["data_batch_2.bin"][1:]
    files = written(tmp_path, contents)
    with refused(files[1], "3 to 10", "0 … 9"):
        published("cifar10")(files)


@pytest.mark.parametrize(
    ("changes", "values"),
    [
        ({"X": np.zeros((32, 32, 3, 3), np.uint8)}, [(32, 32, 3, 3), "uint8", "4 labels"]),
        ({"X": np.zeros((32, 32, 3, 4))}, [(32, 32, 3, 4), "float64", "4 labels"]),
        ({"y": np.array([[0], [1], [2], [3]])}, ["1 … 10"]),
    ],
)
def test_errors_of_svhn(
    tmp_path: Path, changes: dict[str, np.ndarray], values: list[object]
) -> None:
    files = svhn_files(tmp_path, **changes)
    with refused(files[0], *values):
        published("svhn")(files)


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (
            {"users": ["a"], "user_data": {}},
            "'num_samples'",
        ),
        ({"users": ["a"], "num_samples": [1], "user_data": {}}, "'a'"),
        ({"users": ["a"], "num_samples": [1, 2], "user_data": {}}, "784"),
        (
            {
                "users": ["a"],
                "num_samples": [2],
                "user_data": {"a": {"x": [[0.0] * 784], "y": [1]}},
            },
            "(1, 784)",
        ),
        (
            {
                "users": ["a"],
                "num_samples": [1],
                "user_data": {"a": {"x": [[0.0] * 783], "y": [1]}},
            },
            "(1, 783)",
        ),
        (
            {
                "users": ["a"],
                "num_samples": [1],
                "user_data": {"a": {"x": [[0.3] * 784], "y": [1]}},
            },
            "k/255",
        ),
        (
            {
                "users": ["a"],
                "num_samples": [1],
                "user_data": {"a": {"x": [[2.0] * 784], "y": [1]}},
            },
            "k/255",
        ),
        (
            {
                "users": ["a"],
                "num_samples": [1],
                "user_data": {"a": {"x": [[0.0] * 784], "y": [62]}},
            },
            "62 to 62",
        ),
        ([1, 2], "784"),
    ],
)
def test_errors_of_leaf(tmp_path: Path, content: object, value: str) -> None:
    files, read = whole_files("json", tmp_path)
    files[0].write_text(json.dumps(content))
    with pytest.raises(InvalidInputError) as caught:
        read(files)
    in_a_user = f"{files[0]}: user a"
    assert caught.value.field in (str(files[0]), in_a_user)
    assert value in str(caught.value)


def test_leaf_without_files(tmp_path: Path) -> None:
    files, read = whole_files("json", tmp_path)
    files[0].unlink()
    with refused(tmp_path / "train", ".json", "preprocess.sh"):
        read(files)


@pytest.mark.parametrize(
    ("content", "values"),
    [
        (AG_NEWS + b'"5","a","b"\n', ["line 3", "'5, a, b'"]),
        (AG_NEWS + b'"1","a"\n', ["line 3", "'1, a'"]),
        (AG_NEWS + b'"1","a","\xff"\n', ["0xff"]),
        (AG_NEWS + b'"1","a","b', ["2 texts"]),
    ],
)
def test_errors_of_ag_news(tmp_path: Path, content: bytes, values: list[str]) -> None:
    files = written(tmp_path, {"train.csv": content, "test.csv": AG_NEWS})
    with refused(files[0], *values):
        published("ag_news")(files)
