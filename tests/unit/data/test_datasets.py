"""Data sets from arrays, files and names: inputs, results and errors."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from fedclade.data import DATASETS, Dataset, dataset, from_arrays, load
from fedclade.data.dataset_catalog import CATALOGUE
from fedclade.data.datasets import is_available
from fedclade.errors import InvalidInputError

Arrays = dict[str, np.ndarray]


def arrays(**changes: np.ndarray) -> Arrays:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(0, 256, (20, 4, 4), dtype=np.uint8),
        "y_train": np.arange(20, dtype=np.uint8) % 3,
        "x_test": rng.integers(0, 256, (6, 4, 4), dtype=np.uint8),
        "y_test": np.arange(6, dtype=np.uint8) % 3,
    } | changes


def saved(folder: Path, values: Arrays, name: str = "toy") -> Path:
    path = folder / f"{name}.npz"
    np.savez(path, allow_pickle=True, **values)
    return path


def refused(field: object, *values: object) -> pytest.RaisesExc:
    """An `InvalidInputError` about this field, with these values in its message."""
    return pytest.raises(
        InvalidInputError,
        check=lambda error: (
            error.field == str(field) and all(str(value) in str(error) for value in values)
        ),
    )


# results


def test_digits_are_embedded_and_split_class_by_class() -> None:
    digits = load("digits")
    assert digits.name == "digits"
    assert digits.classes == 10
    assert digits.x_train.shape == (1438, 1, 8, 8)
    assert digits.x_test.shape == (359, 1, 8, 8)
    assert digits.x_train.dtype == torch.float32
    assert digits.x_train.min() == 0
    assert digits.x_train.max() == 1
    share = digits.y_test.bincount() / (digits.y_test.bincount() + digits.y_train.bincount())
    assert torch.allclose(share, torch.full((10,), 0.2), atol=0.003)
    assert torch.equal(load("digits").x_test, digits.x_test)


def test_digits_test_part_is_the_last_fifth_of_a_class() -> None:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    raw = load_digits()
    zeros = raw.images[raw.target == 0] / 16
    digits = load("digits")
    params = torch.cat([digits.x_train[digits.y_train == 0], digits.x_test[digits.y_test == 0]])
    np.testing.assert_array_equal(params[:, 0].numpy(), zeros.astype(np.float32))


def test_uint8_images_get_a_channel_and_stay_bytes(tmp_path: Path) -> None:
    given = arrays()
    toy = load(saved(tmp_path, given))
    assert toy.name == "toy"
    assert toy.classes == 3
    assert toy.keys == {}
    assert toy.x_train.dtype == torch.uint8
    assert toy.y_train.dtype == torch.int64
    np.testing.assert_array_equal(toy.x_train.numpy()[:, 0], given["x_train"])


@pytest.mark.parametrize(
    ("given", "shape", "kind"),
    [
        (np.zeros((5, 6, 7, 3), np.uint8), (5, 3, 6, 7), torch.uint8),
        (np.zeros((5, 6, 7, 1), np.float64), (5, 1, 6, 7), torch.float32),
        (np.zeros((5, 3, 6, 7), np.uint8), (5, 3, 6, 7), torch.uint8),
        (np.zeros((5, 3, 6, 3), np.float32), (5, 3, 6, 3), torch.float32),
        (np.zeros((5, 6), np.float16), (5, 6), torch.float32),
        (np.zeros((5, 6), np.uint8), (5, 6), torch.uint8),
        (np.zeros((5, 6), np.int16), (5, 6), torch.int64),
        (np.zeros((5, 6), np.uint16), (5, 6), torch.int64),
        (np.zeros((5, 6), bool), (5, 6), torch.float32),
        (np.zeros((5, 6, 7), np.float32), (5, 6, 7), torch.float32),
        (np.zeros((5, 6), ">f8"), (5, 6), torch.float32),
        (torch.zeros(5, 6, 7, dtype=torch.uint8), (5, 1, 6, 7), torch.uint8),
        (torch.zeros(5, 6, dtype=torch.bfloat16), (5, 6), torch.float32),
        (torch.zeros(5, 6, dtype=torch.int32, requires_grad=False), (5, 6), torch.int64),
        ([[0.5, 1.0]] * 5, (5, 2), torch.float32),
    ],
)
def test_inputs_by_shape_and_type(given: object, shape: tuple[int, ...], kind: torch.dtype) -> None:
    made = dataset(given, np.arange(5))
    assert tuple(made.x_train.shape) == shape
    assert made.x_train.dtype == kind
    assert made.x_test.shape == (0, *shape[1:])
    assert len(made.y_test) == 0


def test_channels_last_images_keep_their_pixels() -> None:
    image = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    made = dataset(image, [0, 1])
    assert made.x_train[1, 2, 3, 4] == image[1, 3, 4, 2]


def test_targets_are_labels_or_numbers() -> None:
    x = np.zeros((4, 2), np.float32)
    assert dataset(x, np.array([True, False, True, True])).classes == 2
    assert dataset(x, np.array([0, 1, 7, 1], np.uint8)).classes == 8
    regression = dataset(x, np.array([0.5, 1, 2, 3]), x, np.array([0.5, 1, 2, 3]))
    assert regression.classes is None
    assert regression.y_train.dtype == torch.float32
    assert dataset(x, np.zeros((4, 3))).y_train.shape == (4, 3)


def test_classes_count_the_test_part_too() -> None:
    x = np.zeros((2, 2), np.float32)
    assert dataset(x, [0, 1], x, [3, 0]).classes == 4


def test_readonly_arrays_are_accepted() -> None:
    x = np.zeros((3, 2), np.float32)
    x.flags.writeable = False
    assert dataset(x, [0, 1, 1]).x_train.shape == (3, 2)


def test_keys_from_a_file_and_from_arrays(tmp_path: Path) -> None:
    numbers, weights = np.arange(20, dtype=np.uint16) % 4, np.ones(20)
    path = saved(
        tmp_path,
        arrays(
            writer_train=numbers,
            writer_test=numbers[:6],
            hand_train=numbers % 2,
            weight_train=weights,
        ),
    )
    keys = load(path).keys
    assert set(keys) == {"writer", "hand"}
    assert keys["hand"][1] is None
    train, test = keys["writer"]
    assert train.tolist() == numbers.tolist()
    assert test is not None
    assert test.tolist() == numbers[:6].tolist()
    x_train, y_train, x_test, y_test = arrays().values()
    made = dataset(
        x_train,
        y_train,
        x_test,
        y_test,
        "mine",
        writer=(numbers, numbers[:6]),
        hand=torch.arange(20),
    )
    assert made.name == "mine"
    assert made.keys["hand"][0].tolist() == list(range(20))


def test_the_same_text_key_has_the_same_number_in_both_parts() -> None:
    made = dataset(
        np.zeros((3, 1)),
        [0, 0, 1],
        np.zeros((2, 1)),
        [0, 1],
        writer=(np.array(["b", "a", "c"]), np.array(["c", "d"])),
    )
    train, test = made.keys["writer"]
    assert train.tolist() == [1, 0, 2]
    assert test is not None
    assert test.tolist() == [2, 3]


# the folders that are searched


def test_places_are_searched_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, here, by_variable, root = (
        tmp_path / name for name in ("home", "here", "variable", "root")
    )
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("FEDCLADE_DATA", str(by_variable))
    places = [root, by_variable, here / "data", home / ".cache/fedclade"]
    for number, place in enumerate(places):
        place.mkdir(parents=True)
        saved(place, arrays(y_train=np.full(20, number)))
    monkeypatch.chdir(here)
    for number, place in enumerate(places):
        assert load("toy", root=root).y_train[0] == number
        (place / "toy.npz").unlink()
    with pytest.raises(InvalidInputError) as caught:
        load("toy", root=root)
    assert caught.value.field == "toy"
    message = str(caught.value)
    for place in (
        root / "toy.npz",
        by_variable / "toy.npz",
        Path("data/toy.npz"),
        home / ".cache/fedclade/toy.npz",
    ):
        assert str(place) in message
    for name in (
        "toy.npz",
        "x_train, y_train, x_test, y_test",
        "--data-root",
        "$FEDCLADE_DATA",
        "digits",
    ):
        assert name in message


def test_a_path_is_not_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with space").mkdir()
    path = saved(tmp_path / "with space", arrays())
    assert len(load(str(path)).y_train) == 20
    assert len(load(path).y_train) == 20
    monkeypatch.chdir(path.parent)
    assert len(load("toy.npz").y_train) == 20
    with refused(tmp_path / "absent.npz", f"'{tmp_path}/absent.npz'", "no such file"):
        load(tmp_path / "absent.npz")
    with refused(tmp_path / "with space", "folder"):
        load(tmp_path / "with space")


def test_a_name_that_is_nearly_known() -> None:
    with refused("digit", "'digits'"):
        load("digit")


def test_data_sets_of_the_user_have_names(monkeypatch: pytest.MonkeyPatch) -> None:
    own = dataset(np.zeros((3, 2)), [0, 1, 2], name="own")
    monkeypatch.setitem(DATASETS, "own", lambda: own)
    assert load("own") is own


# errors


@pytest.mark.parametrize("keep", [0, 1, 3, 40, 200, -1, -30, -200])
def test_truncated_files(tmp_path: Path, keep: int) -> None:
    path = saved(tmp_path, arrays())
    whole = path.read_bytes()
    path.write_bytes(whole[:keep])
    with pytest.raises(InvalidInputError) as caught:
        load(path)
    assert caught.value.field.startswith(str(path))
    assert str(path) in str(caught.value)


def test_every_damaged_byte_range_is_an_invalid_input_or_reads(tmp_path: Path) -> None:
    path = tmp_path / "toy.npz"
    np.savez_compressed(path, allow_pickle=False, **arrays())
    whole = path.read_bytes()
    for start in range(0, len(whole), 7):
        path.write_bytes(
            whole[:start] + bytes(b ^ 0xFF for b in whole[start : start + 5]) + whole[start + 5 :]
        )
        field = str(path)
        try:
            assert isinstance(load(path), Dataset)
        except InvalidInputError as error:
            field = error.field
        assert field.startswith(str(path))


@pytest.mark.parametrize("content", [b"", b"hello", b"x" * 1000])
def test_files_that_are_something_else(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "toy.npz"
    path.write_bytes(content)
    with refused(path, "np.savez("):
        load(path)


def test_a_single_array_is_not_an_npz(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    (tmp_path / "toy.npz").write_bytes(buffer.getvalue())
    with refused(tmp_path / "toy.npz", "np.savez("):
        load(tmp_path / "toy.npz")


def test_a_zip_of_other_things(tmp_path: Path) -> None:
    path = tmp_path / "toy.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme.txt", "hello")
    with refused(path, "x_train, y_train, x_test, y_test", "readme.txt"):
        load(path)
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("x_train", "y_train", "x_test", "y_test", "writer_train"):
            archive.writestr(name, "hello")
    with refused(f"{path}: x_train"):
        load(path)


def test_pickled_objects_are_never_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path, arrays(x_train=np.array([{"a": 1}] * 20, dtype=object)))
    with refused(f"{path}: x_train", "Python objects"):
        load(path)


@pytest.mark.parametrize("key", ["x_train", "y_train", "x_test", "y_test"])
def test_missing_arrays(tmp_path: Path, key: str) -> None:
    given = arrays()
    del given[key]
    path = saved(tmp_path, given)
    with refused(path, f"{path}: {key} ", ", ".join(given), "x_train, y_train, x_test, y_test"):
        load(path)


def with_bad(value: float, *places: tuple[int, ...]) -> np.ndarray:
    x = np.zeros((20, 1, 4, 4))
    for place in places:
        x[place] = value
    return x


@pytest.mark.parametrize(
    ("changes", "field", "values"),
    [
        ({"y_train": np.zeros(19, int)}, "x_train", ["20", "y_train has 19"]),
        ({"x_test": np.zeros((5, 4, 4), np.uint8)}, "x_test", ["5", "y_test has 6"]),
        (
            {"x_train": np.zeros((0, 4, 4), np.uint8), "y_train": np.zeros(0, int)},
            "x_train",
            [(0, 4, 4)],
        ),
        ({"x_train": np.zeros((20, 0))}, "x_train", [(20, 0)]),
        ({"y_test": np.zeros(0, int)}, "y_test", [(0,)]),
        ({"x_train": np.zeros(20)}, "x_train", [(20,), "(samples, 1)"]),
        ({"x_train": np.float32(3)}, "x_train", [()]),
        (
            {"x_train": with_bad(np.nan, (17, 0, 1, 1), (17, 0, 2, 2), (18, 0, 0, 0))},
            "x_train",
            ["3 NaN", "sample 17"],
        ),
        (
            {"x_train": with_bad(np.inf, (3, 0, 0, 0))},
            "x_train",
            ["1 infinite", "float32", "sample 3"],
        ),
        (
            {"x_train": with_bad(1e300, (4, 0, 0, 0))},
            "x_train",
            ["1 infinite", "float32", "sample 4"],
        ),
        ({"y_train": np.array([0.5] * 19 + [np.nan])}, "y_train", ["1 NaN", "sample 19"]),
        ({"x_train": np.array(["a"] * 20)}, "x_train", ["text", "np.unique"]),
        ({"y_train": np.array(["cat"] * 20)}, "y_train", ["text", "np.unique"]),
        ({"x_train": np.zeros((20, 2), complex)}, "x_train", ["complex"]),
        ({"y_train": np.zeros(20, "datetime64[s]")}, "y_train", ["datetime64[s]"]),
        ({"y_train": np.array([0] * 5 + [-2, -3] + [0] * 13)}, "y_train", ["-3", "sample 6"]),
        ({"y_train": np.array([0] * 19 + [10**9])}, "y_train", ["1000000000", "sample 19"]),
        ({"y_train": np.eye(3, dtype=int)[np.arange(20) % 3]}, "y_train", [(20, 3), "y.argmax(1)"]),
        (
            {"x_test": np.zeros((6, 5, 5), np.uint8)},
            "the test part",
            ["inputs", (1, 5, 5), (1, 4, 4)],
        ),
        (
            {"x_test": np.zeros((6, 1, 4, 4), np.float32)},
            "the test part",
            ["inputs", "float32", "uint8"],
        ),
        ({"y_test": np.zeros(6)}, "the test part", ["targets", "float32", "int64"]),
        ({"writer_train": np.zeros(19, int)}, "writer_train", ["19", "20"]),
        (
            {"writer_train": np.zeros(20, int), "writer_test": np.zeros(5, int)},
            "writer_test",
            ["5", "6"],
        ),
        (
            {"writer_train": np.zeros(20, int), "writer_test": np.array(["a"] * 6)},
            "writer",
            ["text"],
        ),
        (
            {"writer_train": np.zeros(20, int), "writer_test": np.zeros(6)},
            "writer_test",
            ["float64", (6,)],
        ),
    ],
)
def test_bad_arrays_in_a_file(
    tmp_path: Path, changes: Arrays, field: str, values: list[object]
) -> None:
    path = saved(tmp_path, arrays(**changes))
    with refused(f"{path}: {field}", *values) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: {field}")


def test_bad_arrays_from_python() -> None:
    x, y = np.zeros((4, 2)), np.arange(4)
    with refused("x_train", "1 NaN", "sample 0"):
        dataset(torch.tensor([[float("nan"), 1.0]]), [0])
    with refused("x_train", "rectangular"):
        dataset([[1.0], [1.0, 2.0]], [0, 1])
    with refused("x_train", "Python objects"):
        dataset(np.array([None, 1], dtype=object), [0, 1])
    with refused("x_train", "complex"):
        dataset(torch.zeros(2, 2, dtype=torch.complex64), [0, 1])
    with refused("y_test"):
        dataset(x, y, x)
    with refused("x_test"):
        dataset(x, y, y_test=y)
    with refused("writer_train", "float64", (4,)):
        dataset(x, y, writer=np.zeros(4))
    with refused("writer_train", "int64", (2, 2)):
        dataset(x, y, writer=np.zeros((2, 2), int))


# arrays of each client


def test_own_data_per_client() -> None:
    x = torch.arange(10.0).reshape(5, 2)
    clients = from_arrays(
        [
            (x[:2], [0, 1]),
            (x[2:4].numpy(), np.array([2, 0]), x[:1], [3]),
            (x[4:], [1], x[1:3], [1, 1]),
        ],
        groups=[0, 0, 1],
    )
    assert len(clients) == 3
    assert clients.sizes.tolist() == [2, 2, 1]
    assert clients.shape == (2,)
    assert torch.equal(clients.x, x)
    assert clients.y.tolist() == [0, 1, 2, 0, 1]
    assert clients.train[1].tolist() == [2, 3]
    assert clients.test_part_id.tolist() == [-1, 0, 1]
    assert clients.test.sizes.tolist() == [1, 2]
    assert clients.test[1].tolist() == [1, 2]
    assert torch.equal(clients.x_test, torch.cat([x[:1], x[1:3]]))
    assert clients.test_sample_id.tolist() == [0, 1, 2]
    assert clients.classes == 4
    assert clients.probe is None
    assert clients.groups is not None
    assert clients.groups.tolist() == [0, 0, 1]
    assert clients.dataset == "arrays"
    assert clients.partition == "arrays"


def test_own_data_of_many_sizes_and_types_are_one_pool() -> None:
    rng = np.random.default_rng(0)
    given = [
        (rng.random((n, 3, 2)), rng.random(n), rng.random((1, 3, 2)).astype(np.float32), [0.5])
        for n in (1, 4, 2)
    ]
    clients = from_arrays(given)
    assert torch.equal(
        clients.x, torch.from_numpy(np.concatenate([x for x, *_ in given]).astype(np.float32))
    )
    assert torch.equal(
        clients.y, torch.from_numpy(np.concatenate([y for _, y, *_ in given]).astype(np.float32))
    )
    assert torch.equal(clients.x_test, torch.from_numpy(np.concatenate([x for *_, x, _ in given])))
    assert clients.train.offsets.tolist() == [0, 1, 5, 7]
    assert clients.test.offsets.tolist() == [0, 1, 2, 3]


def test_own_data_without_test_parts_or_classes() -> None:
    clients = from_arrays([(np.zeros((3, 2)), [0.5, 1.5, 2.5]), [np.ones((1, 2)), [0.5]]])
    assert clients.classes is None
    assert clients.groups is None
    assert clients.test_part_id.tolist() == [-1, -1]
    assert len(clients.test) == 0
    assert clients.x_test.shape == (0, 2)


GOOD = (np.zeros((3, 2)), np.array([0, 1, 2]))


@pytest.mark.parametrize(
    ("second", "field", "values"),
    [
        ((np.zeros((3, 4)), [0, 1, 2]), "client 1", ["inputs", (4,), "client 0", (2,)]),
        ((np.zeros((3, 2), np.uint8), [0, 1, 2]), "client 1", ["inputs", "uint8", "float32"]),
        ((np.zeros((3, 2)), [0.5, 1, 2]), "client 1", ["targets", "float32", "int64"]),
        ((np.full((3, 2), np.nan), [0, 1, 2]), "client 1: x", ["6 NaN", "sample 0"]),
        ((np.zeros((0, 2)), []), "client 1: x", [(0, 2)]),
        ((np.zeros((3, 2)), [0, 1]), "client 1: x", ["3", "y has 2"]),
        ((np.zeros((3, 2)), 1), "client 1: y", [()]),
        ((np.zeros((3, 2)), [0, -1, 1]), "client 1: y", ["-1", "sample 1"]),
        ((*GOOD, np.zeros((3, 2)), [0, 1]), "client 1: x_test", ["3", "y_test has 2"]),
        ((*GOOD, np.zeros((1, 3)), [0]), "client 1: its test part", ["inputs", (3,)]),
        ((np.zeros((3, 2)),), "client 1", ["(x, y)", "(x, y, x_test, y_test)", "1 value"]),
        ((*GOOD, np.zeros((3, 2))), "client 1", ["(x, y)", "(x, y, x_test, y_test)", "3 values"]),
        (np.zeros((2, 2)), "client 1", ["(x, y)", "(x, y, x_test, y_test)", "ndarray"]),
    ],
)
def test_bad_data_of_a_client(second: tuple[object, ...], field: str, values: list[object]) -> None:
    with refused(field, *values):
        from_arrays([GOOD, second])


def test_bad_groups_and_no_clients() -> None:
    with refused("clients", "(x, y)"):
        from_arrays([])
    with refused("groups", "1", "int64", "2"):
        from_arrays([GOOD, GOOD], groups=[0])
    with refused("groups", "2", "float32"):
        from_arrays([GOOD, GOOD], groups=torch.tensor([0.5, 1.0]))


def test_is_available_does_not_read_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDCLADE_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert is_available("digits")
    assert not is_available("mine", tmp_path)
    (tmp_path / "mine.npz").write_bytes(b"not an archive")
    assert is_available("mine", tmp_path)
    assert is_available(str(tmp_path / "mine.npz"))
    with refused(tmp_path / "mine.npz"):
        load("mine", tmp_path)
    assert not is_available("mnist", tmp_path)
    folder = tmp_path / CATALOGUE["mnist"].folder
    for file in CATALOGUE["mnist"].files:
        folder.mkdir(exist_ok=True)
        (folder / file.name).write_bytes(b"")
    assert is_available("mnist", tmp_path)
