"""Memory-mapped arrays: neither copied nor read as a whole, and the same bytes as in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedclade import FedAvg, run
from fedclade.core.inputs import Inputs, tensors_of
from fedclade.data import Clients, Dataset, Iid, NaturalId, dataset, load, partition
from fedclade.data.array_checks import is_mapped
from fedclade.data.datasets import is_available
from fedclade.data.partitioning import apply_scheme
from fedclade.errors import InvalidInputError
from fedclade.models import MLP, SmallCNN
from fedclade.training.experiment_file import experiment

SITES = np.array(["north", "south", "west"]).repeat(20)


def images(count: int = 60, shape: tuple[int, ...] = (16, 16, 3)) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


def labels(count: int = 60) -> NDArray[np.int64]:
    return np.random.default_rng(1).integers(0, 4, count)


def write(folder: Path, **arrays: object) -> Path:
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


def mapped(path: Path, array: NDArray[np.generic]) -> NDArray[np.generic]:
    np.save(path, array)
    return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]


def addresses(x: Inputs) -> list[int]:
    return [value.data_ptr() for value in tensors_of(x)]


def trained(clients: Clients, model: MLP | SmallCNN) -> list[Tensor]:
    result = run(FedAvg(), clients, model=model, rounds=2, clients_per_round=2, lr=0.1, seed=3)
    return [*result.model_of(0).state_dict().values(), torch.tensor(result.summary["loss"])]


@pytest.mark.parametrize("shape", [(16, 16, 3), (3, 16, 16), (16, 16)])
@pytest.mark.parametrize("model", [MLP(8), SmallCNN()], ids=lambda model: model.name)
def test_a_folder_gives_the_bytes_of_the_arrays(
    tmp_path: Path, shape: tuple[int, ...], model: MLP | SmallCNN
) -> None:
    x, y = images(shape=shape), labels()
    in_memory = partition(dataset(x, y, site=SITES), NaturalId("site"), clients=3)
    folder = write(tmp_path / "wards", x_train=x, y_train=y, site_train=SITES)
    from_folder = partition(load(folder), NaturalId("site"), clients=3)
    assert from_folder.dataset == "wards"
    assert from_folder.names.clients == ("north", "south", "west")
    pairs = zip(trained(in_memory, model), trained(from_folder, model), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_floats_and_several_inputs_are_not_copied(tmp_path: Path) -> None:
    first = mapped(tmp_path / "first.npy", np.ones((6, 2), np.float32))
    second = mapped(tmp_path / "second.npy", np.arange(12).reshape(6, 2))
    data = dataset({"a": first, "b": second}, np.arange(6) % 2)
    assert addresses(data.x_train) == [first.ctypes.data, second.ctypes.data]
    assert partition(data, Iid(), clients=2).x is data.x_train


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.int64])
def test_views_of_a_mapped_file_are_not_copied(tmp_path: Path, dtype: type) -> None:
    array = mapped(tmp_path / "x.npy", np.arange(40).reshape(10, 4).astype(dtype))
    view = np.asarray(array)[2:8]
    assert is_mapped(view)
    assert not is_mapped(np.array(view))
    assert addresses(dataset(view, np.zeros(6, int)).x_train) == [view.ctypes.data]


@pytest.mark.parametrize("dtype", ["<f8", ">f4", "<i2"])
def test_other_types_are_converted(tmp_path: Path, dtype: str) -> None:
    array = mapped(tmp_path / "x.npy", np.arange(40).reshape(10, 4).astype(dtype))
    x = dataset(array, np.zeros(10, int)).x_train
    assert isinstance(x, Tensor)
    assert x.dtype == (torch.int64 if dtype == "<i2" else torch.float32)
    assert x.tolist() == np.arange(40).reshape(10, 4).tolist()


def test_a_reversed_view_is_copied(tmp_path: Path) -> None:
    array = mapped(tmp_path / "x.npy", np.arange(8, dtype=np.float32).reshape(4, 2))
    x = dataset(array[::-1], np.zeros(4, int)).x_train
    assert isinstance(x, Tensor)
    assert x.tolist() == [[6, 7], [4, 5], [2, 3], [0, 1]]


def test_other_types_must_fit_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.lib.format.open_memmap(path, "w+", np.float64, (1 << 20, 1 << 20)).flush()  # type: ignore[no-untyped-call]
    with pytest.raises(InvalidInputError) as caught:
        dataset(np.load(path, mmap_mode="r"), np.zeros(1 << 20, int))
    assert caught.value.field == "x_train"


def test_large_test_parts_of_training_samples_are_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = dataset(images(), labels(), site=SITES)
    copied = partition(data, NaturalId("site"), clients=3)
    monkeypatch.setattr(apply_scheme, "MOST_COPIED", 0)
    shared = partition(data, NaturalId("site"), clients=3)
    assert shared.x_test is shared.x
    assert copied.x_test is not copied.x
    for client in range(3):
        arrays = zip(copied.arrays(client), shared.arrays(client), strict=True)
        assert all(torch.equal(a, b) for a, b in arrays)  # type: ignore[arg-type]
    assert shared.metadata.test_samples == copied.metadata.test_samples == 12
    pairs = zip(trained(copied, MLP(8)), trained(shared, MLP(8)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_large_test_parts_of_both_pools_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataset(
        images(), labels(), images(4), labels(4), site=(SITES, np.array(["north"]).repeat(4))
    )
    monkeypatch.setattr(apply_scheme, "MOST_COPIED", 0)
    clients = partition(data, NaturalId("site"), clients=3)
    assert clients.test_sizes.tolist() == [4, 4, 4]
    assert len(clients.y_test) == 12


class TestFolder:
    def test_by_name_in_a_place(self, tmp_path: Path) -> None:
        write(tmp_path / "wards", x_train=images(), y_train=labels(), class_names=list("abcd"))
        assert is_available("wards", tmp_path)
        data = load("wards", tmp_path)
        assert isinstance(data, Dataset)
        assert data.names.classes == ("a", "b", "c", "d")
        assert len(data.y_test) == 0

    def test_writing_to_a_sample_does_not_change_the_file(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "wards", x_train=images(), y_train=labels())
        before = (folder / "x_train.npy").read_bytes()
        x = load(folder).x_train
        assert isinstance(x, Tensor)
        x[0] += 1
        assert (folder / "x_train.npy").read_bytes() == before

    @pytest.mark.parametrize("name", ["y_train", "x_test", "y_test"])
    def test_a_missing_file_is_named(self, tmp_path: Path, name: str) -> None:
        arrays = {"x_train": images(), "y_train": labels(), "x_test": images(), "y_test": labels()}
        folder = write(tmp_path / "wards", **{n: a for n, a in arrays.items() if n != name})
        with pytest.raises(InvalidInputError) as caught:
            load(folder)
        assert caught.value.field == str(folder / f"{name}.npy")

    @pytest.mark.parametrize("content", [b"", b"no array", b"\x93NUMPY\x01\x00"])
    def test_another_file_is_named(self, tmp_path: Path, content: bytes) -> None:
        folder = write(tmp_path / "wards", x_train=images(), y_train=labels())
        (folder / "x_train.npy").write_bytes(content)
        with pytest.raises(InvalidInputError) as caught:
            load(folder)
        assert caught.value.field == str(folder / "x_train.npy")

    def test_a_truncated_file_is_named(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "wards", x_train=images(), y_train=labels())
        path = folder / "x_train.npy"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(InvalidInputError) as caught:
            load(folder)
        assert caught.value.field == str(path)

    def test_objects_are_never_unpickled(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "wards", x_train=images(), y_train=labels())
        np.save(folder / "x_train.npy", np.array([{}, {}], object), allow_pickle=True)
        with pytest.raises(InvalidInputError) as caught:
            load(folder)
        assert caught.value.field == str(folder / "x_train.npy")

    def test_other_files_are_ignored(self, tmp_path: Path) -> None:
        folder = write(tmp_path / "wards", x_train=images(), y_train=labels(), notes=labels())
        (folder / "notes.npy").write_bytes(b"no array")
        assert load(folder).keys == {}

    def test_an_experiment_file_names_it_by_its_path(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = write(tmp_path / "wards", x_train=images(), y_train=labels(), site_train=SITES)
        monkeypatch.chdir(tmp_path)
        from_file = experiment(
            {
                "data": {"name": "./wards"},
                "partition": {"name": "natural_id", "key": "site", "clients": 3},
                "model": {"name": "mlp"},
                "method": {"name": "fedavg"},
            }
        )
        assert from_file.clients().dataset == str(folder.resolve())
