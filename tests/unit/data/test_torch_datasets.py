"""Clients from torch data sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import fedclade as fc
from fedclade.errors import InvalidInputError

X = torch.arange(24.0).reshape(8, 3)
Y = torch.arange(8) % 2
PAIRS = TensorDataset(X, Y)


class Items(Dataset[Any]):
    """A data set with the given items."""

    def __init__(self, *items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, number: int) -> Any:
        return self.items[number]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(X[0], 0)])


def test_names_samples_and_test_parts_stay() -> None:
    clients = fc.data.from_datasets(
        {
            "south": (Subset(PAIRS, [0, 2, 4]), Subset(PAIRS, [1])),
            "north": PAIRS,
            "west": (X[:2], Y[:2]),
            "east": ((X[2:4], Y[2:4]), (X[4:5], Y[4:5])),
            "center": (Items((X[7], 1)), None),
        },
        class_names=["low", "high"],
    )
    assert clients.names.clients == ("south", "north", "west", "east", "center")
    assert clients.names.classes == ("low", "high")
    assert clients.sizes.tolist() == [3, 8, 2, 2, 1]
    assert clients.test_sizes.tolist() == [1, 0, 0, 1, 0]
    x, y, x_test, y_test = clients.arrays("south")  # type: ignore[misc]
    assert torch.equal(x, X[[0, 2, 4]])  # type: ignore[arg-type]
    assert torch.equal(y, Y[[0, 2, 4]])
    assert torch.equal(x_test, X[[1]])
    assert y_test.tolist() == [1]


def test_items_may_be_images_numbers_or_several_tensors() -> None:
    image = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(2, 2, 3))
    images = fc.data.from_datasets({"a": Items((image, 0), (image, 1))})
    assert images.shape == (3, 2, 2)
    assert isinstance(images.x, Tensor)
    assert images.x.dtype == torch.uint8
    numbers = fc.data.from_datasets({"a": [([1.0, 2.0], 0.5), ([3.0, 4.0], 1.5)]})
    assert numbers.classes is None
    assert numbers.y.tolist() == [0.5, 1.5]
    several = fc.data.from_datasets({"a": Items(({"left": X[0], "right": Y[:2]}, 0))})
    assert isinstance(several.x, dict)
    assert several.x["right"].shape == (1, 2)


def test_a_run_trains_on_them() -> None:
    clients = fc.data.from_datasets({"a": (PAIRS, PAIRS), "b": (PAIRS, PAIRS)})
    result = fc.run(
        fc.FedAvg(), clients, model=nn.Linear(3, 2), rounds=1, clients_per_round=1.0, lr=0.01
    )
    assert result.clients["client"] == ["a", "b"]


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (Items(), "training"),
        (TensorDataset(X[:0], Y[:0]), "training"),
        ((PAIRS, Items()), "test"),
        (Stream(), "training"),
        (7, "training"),
        (Items((X[0], 0), (X[0, :2], 0)), "training"),
        (Items((X[0], 0), (X[0], 0.5)), "training"),
        (Items((X[0], 0), ((X[0],), 0)), "training"),
        (Items(({"a": X[0]}, 0), ({"b": X[0]}, 0)), "training"),
        (Items((X[0], 0, 1)), "training"),
        (Items(X[0]), "training"),
    ],
)
def test_an_error_names_the_client_and_its_part(source: Any, part: str) -> None:
    with pytest.raises(InvalidInputError) as raised:
        fc.data.from_datasets({"south": PAIRS, "north": source})
    assert raised.value.field == f"client north: its {part} data"


@pytest.mark.parametrize("item", [("text", 0), (X[0], "yes"), ([[1.0], [1.0, 2.0]], 0)])
def test_an_error_names_an_item_that_is_no_array(item: Any) -> None:
    with pytest.raises(InvalidInputError) as raised:
        fc.data.from_datasets({"north": Items((X[0], 0), item)})
    assert raised.value.field == "client north: its training data: item 1"


def test_an_item_that_raises_is_named() -> None:
    class Broken(Items):
        def __getitem__(self, number: int) -> Any:
            if number == 2:
                raise OSError("no such file")
            return X[0], 0

    with pytest.raises(InvalidInputError, match="item 2") as raised:
        fc.data.from_datasets({"north": Broken(1, 2, 3)})
    assert raised.value.field == "client north: its training data"


def test_clients_of_different_shapes_are_refused() -> None:
    with pytest.raises(InvalidInputError) as raised:
        fc.data.from_datasets({"south": PAIRS, "north": TensorDataset(X[:, :2], Y)})
    assert raised.value.field == "client north"
    with pytest.raises(InvalidInputError) as raised:
        fc.data.from_datasets([PAIRS])  # type: ignore[arg-type]
    assert raised.value.field == "clients"
