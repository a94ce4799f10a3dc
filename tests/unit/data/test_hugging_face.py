"""Clients from data sets of Hugging Face and from partitions."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as PillowImage
from torch import Tensor, nn

import fedclade as fc
from fedclade.core.inputs import tensors_of
from fedclade.data import hugging_face
from fedclade.errors import FedcladeWarning, InvalidInputError

datasets = pytest.importorskip("datasets", reason="the extra hf is not installed")

ROWS = {
    "hospital": ["south", "north", "south", "north", "south", "south", "north", "north"],
    "age": [10.0, 20, 30, 40, 50, 60, 70, 80],
    "stay": [1, 2, 3, 4, 5, 6, 7, 8],
    "vector": [[float(n), 0.0] for n in range(8)],
    "diagnosis": ["ill", "ill", "well", "well", "ill", "ill", "well", "well"],
    "cost": [0.5 * n for n in range(8)],
}


def table(**columns: Any) -> Any:
    return datasets.Dataset.from_dict(ROWS | columns)


def clients_of(data: Any, **options: Any) -> fc.data.Clients:
    given = {"client": "hospital", "x": "vector", "target": "diagnosis", "test": 0} | options
    return fc.data.from_hf(data, **given)


def refused(data: Any, **options: Any) -> str:
    with pytest.raises(InvalidInputError) as raised:
        clients_of(data, **options)
    return raised.value.field


def test_names_and_rows_stay() -> None:
    clients = clients_of(table(), x=["age", "stay"])
    assert clients.names.clients == ("north", "south")
    assert clients.names.classes == ("ill", "well")
    assert clients.names.features == ("age", "stay")
    x, y = clients.arrays("south")  # type: ignore[misc]
    assert x.tolist() == [[10, 1], [30, 3], [50, 5], [60, 6]]  # type: ignore[union-attr]
    assert y.tolist() == [0, 1, 0, 0]


def test_a_share_of_each_class_is_the_test_part() -> None:
    clients = clients_of(table(), test=0.5)
    assert clients.sizes.tolist() == clients.test_sizes.tolist() == [2, 2]
    x, _, x_test, y_test = clients.arrays("north")  # type: ignore[misc]
    assert sorted(torch.cat([x, x_test])[:, 0].tolist()) == [1, 3, 6, 7]  # type: ignore[list-item]
    assert len(y_test) == 2
    assert torch.equal(clients_of(table(), test=0.5).x_test, clients.x_test)  # type: ignore[arg-type]


def test_a_dictionary_of_splits_on_disk(tmp_path: Path) -> None:
    labels = datasets.ClassLabel(names=["ill", "well", "unknown"])
    data = table().cast_column("diagnosis", labels)
    parts = datasets.DatasetDict(train=data.select(range(6)), test=data.select([6]))
    parts.save_to_disk(tmp_path / "saved")
    for given in (parts, tmp_path / "saved"):
        with pytest.warns(FedcladeWarning, match="1 client has no test part"):
            clients = clients_of(given)
        assert clients.sizes.tolist() == [2, 4]
        assert clients.test_sizes.tolist() == [1, 0]
        assert clients.names.classes == ("ill", "well", "unknown")
        assert clients.classes == 3
    table().save_to_disk(tmp_path / "plain")
    assert clients_of(str(tmp_path / "plain")).sizes.tolist() == [4, 4]


def test_images_numbers_and_several_arguments() -> None:
    image = PillowImage.fromarray(np.zeros((4, 5, 3), np.uint8))
    images = clients_of(table(image=[image] * 8).cast_column("image", datasets.Image()), x="image")
    assert images.shape == (3, 4, 5)
    assert isinstance(images.x, Tensor)
    assert images.x.dtype == torch.uint8
    costs = clients_of(table(), x="age", target="cost", test=0.25)
    assert costs.classes is None
    assert costs.shape == (1,)
    assert costs.names.features == ("age",)
    several = clients_of(table(mask=[[1, 1]] * 8), x=["vector", "mask"])
    assert isinstance(several.x, dict)
    assert several.x["mask"].dtype == torch.int64


def test_whole_numbers_and_class_labels_name_clients() -> None:
    numbers = clients_of(table(site=[10, 9] * 4), client="site")
    assert numbers.names.clients == ("9", "10")
    labels = datasets.ClassLabel(names=["north", "south"])
    assert clients_of(table().cast_column("hospital", labels)).names.clients == ("north", "south")


def pictures(count: int) -> Any:
    """Images of two hospitals, as arrays."""
    images = np.random.default_rng(0).integers(0, 256, (count, 8, 8, 3), dtype=np.uint8)
    features = datasets.Features(
        image=datasets.Array3D((8, 8, 3), "uint8"),
        age=datasets.Value("float32"),
        hospital=datasets.Value("string"),
        diagnosis=datasets.Value("string"),
    )
    columns = {
        "image": list(images),
        "age": [float(number) for number in range(count)],
        "hospital": ["north", "south"] * (count // 2),
        "diagnosis": ["ill", "ill", "well", "well"] * (count // 4),
    }
    return datasets.Dataset.from_dict(columns, features)


def is_in_a_file(tensor: Tensor) -> bool:
    """Whether the memory of a tensor is a mapped file without a name."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(address, 16) for address in line.split()[0].split("-"))
        if first <= tensor.data_ptr() < last:
            return line.endswith("(deleted)")
    raise AssertionError("no such memory")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/maps of Linux says what is mapped")
@pytest.mark.parametrize("x", ["image", ["image", "age"], "age"], ids=["array", "named", "numbers"])
def test_inputs_larger_than_memory_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: Any
) -> None:
    """The folder has two Arrow files, and blocks of rows end within them and between them."""
    data = datasets.DatasetDict(train=pictures(40), test=pictures(12))
    data.save_to_disk(tmp_path / "saved", num_shards={"train": 2, "test": 1})
    monkeypatch.setattr(hugging_face, "_BLOCK_BYTES", 7 * 200)
    whole = clients_of(tmp_path / "saved", x=x)
    monkeypatch.setattr(hugging_face, "_SHARE_OF_MEMORY", 0.0)
    clients = clients_of(tmp_path / "saved", x=x)
    for name in ("x", "x_test"):
        pairs = zip(
            tensors_of(getattr(clients, name)), tensors_of(getattr(whole, name)), strict=True
        )
        for mapped, in_memory in pairs:
            assert is_in_a_file(mapped)
            assert not is_in_a_file(in_memory)
            assert torch.equal(mapped, in_memory)
    assert torch.equal(clients.train.index, whole.train.index)
    assert clients.sizes.tolist() == [20, 20]
    assert clients.test_sizes.tolist() == [6, 6]
    if x == "image":
        assert clients.x.dtype == torch.uint8  # type: ignore[union-attr]
        assert clients.shape == (3, 8, 8)
        first, second = (
            fc.run(fc.FedAvg(), data, model=fc.models.MLP(4), rounds=1, clients_per_round=2)
            for data in (clients, whole)
        )
        assert first.summary["loss"] == second.summary["loss"]


def test_a_full_disk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "_SHARE_OF_MEMORY", 0.0)
    usage = type("Usage", (), {"free": 63})  # 8 rows of 2 float32 numbers
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    assert refused(table()) == "data"


def test_rows_of_another_shape_in_a_later_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "_BLOCK_BYTES", 16)
    assert refused(table(vector=[[1.0, 2.0]] * 7 + [[1.0]])) == "vector"
    assert refused(table(vector=[[1.0, 2.0]] * 7 + [[1.0, np.nan]])) == "x[6:]"


class Partitioner:
    """Like a partitioner of Flower Datasets by natural id."""

    def __init__(self, parts: list[Any], ids: dict[int, str] | None = None) -> None:
        self.parts, self.partition_id_to_natural_id = parts, ids

    @property
    def num_partitions(self) -> int:
        return len(self.parts)

    def load_partition(self, partition_id: int) -> Any:
        return self.parts[partition_id]


class Federated:
    """Like a FederatedDataset, whose partitioner is ready after the first partition is loaded."""

    def __init__(self, partitioner: Partitioner) -> None:
        self.known, self.partitioners = partitioner, dict[str, Partitioner]()

    def load_partition(self, partition_id: int, split: str | None = None) -> Any:
        self.partitioners["train"] = self.known
        return self.known.load_partition(partition_id)


def test_partitions_are_clients() -> None:
    parts = [table().select(range(5)), table().select(range(5, 8))]
    clients = clients_of(Partitioner(parts), client=None)
    assert clients.names.clients == ("0", "1")
    assert clients.sizes.tolist() == [5, 3]
    named = clients_of(Federated(Partitioner(parts, {0: "west", 1: "east"})), client=None)
    assert named.names.clients == ("west", "east")
    assert named.arrays("east")[1].tolist() == [0, 1, 1]
    result = fc.run(
        fc.FedAvg(), named, model=nn.Linear(2, 2), rounds=1, clients_per_round=1.0, lr=0.01
    )
    assert result.clients["client"] == ["west", "east"]


def test_wrong_partitions_are_named() -> None:
    part = table()
    nothing = part.select([])
    assert refused(Partitioner([part, nothing], {0: "a", 1: "b"}), client=None) == "client b"
    assert refused(Partitioner([{"train": part}]), client=None) == "data"
    assert refused(Partitioner([part])) == "client"
    assert (
        refused(Federated(Partitioner([part, table(vector=[[1.0]] * 8)])), client=None) == "vector"
    )
    unknown = type("Unknown", (), {"load_partition": lambda self, number: part})()
    assert refused(unknown, client=None) == "data"


def test_flower_datasets(tmp_path: Path) -> None:
    """It cannot be installed with Flower 1.41, whose version of rich it excludes."""
    flower = pytest.importorskip("flwr_datasets", reason="flwr-datasets is not installed")
    partitioner = flower.partitioner
    columns = {
        "hospital": ["north", "south", "west"] * 10,
        "age": np.arange(30.0).tolist(),
        "ill": ["yes", "no"] * 15,
    }
    table = datasets.Dataset.from_dict(columns)
    folder = tmp_path / "files"
    folder.mkdir()
    for split in ("train", "test"):
        table.to_csv(folder / f"{split}.csv")
    by_hospital = partitioner.NaturalIdPartitioner(partition_by="hospital")
    whole = flower.FederatedDataset(
        dataset=str(folder),
        partitioners={"train": by_hospital},
        cache_dir=str(tmp_path / "cache"),
    )
    local = partitioner.NaturalIdPartitioner(partition_by="hospital")
    local.dataset = table
    for data in (whole, local):
        clients = fc.data.from_hf(data, x="age", target="ill", test=0)
        assert clients.names.clients == ("north", "south", "west")
        ages = clients.arrays("south")[0]
        assert isinstance(ages, torch.Tensor)
        assert sorted(ages.flatten().tolist()) == list(range(1, 30, 3))
    thirds = partitioner.IidPartitioner(3)
    thirds.dataset = table
    assert fc.data.from_hf(thirds, x="age", target="ill").sizes.tolist() == [8, 8, 8]
    several = {"train": partitioner.IidPartitioner(3), "test": partitioner.IidPartitioner(3)}
    data = flower.FederatedDataset(dataset=str(folder), partitioners=several)
    with pytest.raises(InvalidInputError) as caught:
        fc.data.from_hf(data, x="age", target="ill")
    assert caught.value.field == "data"


def test_wrong_columns_are_named() -> None:
    assert refused(table(), client=None) == "client"
    assert refused(table(), client="hospitl") == "hospitl"
    assert refused(table(), x="hospital") == "hospital"
    assert refused(table(), x=[]) == "x"
    assert refused(table(), client="cost") == "client"
    assert refused(table(), test=2) == "test"
    assert refused(table(vector=[[1.0]] * 7 + [[1.0, 2.0]])) == "vector"
    assert refused(table(diagnosis=[None] + ["ill"] * 7)) == "diagnosis"
    assert refused(table(hospital=[None] + ["north"] * 7)) == "hospital"
    assert refused(table(hospital=["=1"] * 8)) == "client"


def test_wrong_data_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(table().to_iterable_dataset()) == "data"
    assert refused([1, 2]) == "data"
    assert refused(table().select([])) == "data"
    assert refused({"train": table(), "validation": table()}) == "data"
    assert refused({"test": table()}) == "data"
    assert refused({"train": table().select([0]), "test": table().select([1])}) == "client north"
    assert refused(tmp_path / "absent") == "data"
    assert refused(tmp_path) == "data"  # a folder that is no data set
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refused(tmp_path) == "datasets"
