"""Names of clients, classes and features in data sets and clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedclade as fc
from fedclade.data import Clients, Dataset, Split
from fedclade.errors import InvalidInputError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(24, 3)).astype("float32")
Y = np.arange(24) % 2
IDS = np.array(["south", "north", "Öst, <b>", "west"])[np.arange(24) % 4]
PAIR = (X[:6], Y[:6])


def field_is(field: str) -> pytest.RaisesExc[InvalidInputError]:
    return pytest.raises(InvalidInputError, check=lambda error: error.field == field)


def test_a_dictionary_or_a_list_gives_names() -> None:
    for clients in (
        fc.data.from_arrays({"south": PAIR, "north": PAIR}),
        fc.data.from_arrays([PAIR, PAIR], client=np.array(["south", "north"])),
    ):
        assert clients.names.clients == clients.metadata.names.clients == ("south", "north")
        assert np.array_equal(clients.arrays("north")[0], clients.arrays(1)[0])
        assert clients.only([1]).names.clients == ("north",)
        assert str(clients.describe()).splitlines()[1].split()[0] == "south"
    assert fc.data.from_arrays([PAIR]).names.clients is None


def test_an_unknown_name_is_an_error() -> None:
    with field_is("client"):
        fc.data.from_arrays({"south": PAIR}).arrays("north")


@pytest.mark.parametrize(
    ("clients", "options", "field"),
    [
        ([PAIR, PAIR], {"client": ["north", "north"]}, "client"),
        ([PAIR, PAIR], {"client": ["north"]}, "client"),
        ({"north": PAIR}, {"client": ["north"]}, "client"),
        ({3: PAIR}, {}, "client"),
        ({"north": PAIR, "=x": PAIR}, {}, "client"),
        ({}, {}, "clients"),
        ({"north": (X,)}, {}, "client north"),
        ([PAIR], {"class_names": ["cat"]}, "class_names"),
        ([(X, X[:, 0])], {"class_names": ["cat", "dog"]}, "class_names"),
        ([PAIR], {"class_names": ["cat", "cat"]}, "class_names"),
        ([PAIR], {"feature_names": ["age", "sex"]}, "feature_names"),
        ([(X[:, None], Y)], {"feature_names": ["a", "b", "c"]}, "feature_names"),
    ],
)
def test_bad_names_are_refused(clients: Any, options: dict[str, Any], field: str) -> None:
    with field_is(field):
        fc.data.from_arrays(clients, **options)


def test_an_error_about_a_client_has_its_name() -> None:
    with pytest.raises(InvalidInputError, match="north"):
        fc.data.from_arrays({"south": PAIR, "north": (X[:6] * np.nan, Y[:6])})


def test_class_and_feature_names_reach_the_clients() -> None:
    data = fc.data.dataset(
        X, Y, class_names=["cat", "dog", "never seen"], feature_names=["age", "weight", "height"]
    )
    clients = fc.data.partition(data, fc.data.Iid(), clients=3)
    assert clients.names.classes == ("cat", "dog")
    assert clients.names.features == ("age", "weight", "height")
    assert clients.classes == 2
    assert "y=dog" in str(clients.describe())


def by_site(data: Dataset, clients: int = 4) -> Clients:
    return fc.data.partition(data, fc.data.NaturalId("site"), clients=clients, seed=1)


def test_text_ids_are_the_names_of_clients() -> None:
    clients = by_site(fc.data.dataset(X, Y, site=IDS))
    assert clients.names.clients == ("north", "south", "west", "Öst, <b>")
    for name in clients.names.clients:
        x = clients.arrays(name)[0].numpy()
        assert all((X[name == IDS] == row).all(1).any() for row in x)
    some = by_site(fc.data.dataset(X, Y, site=IDS), clients=2)
    assert set(some.names.clients or ()) < set(IDS)
    numbers = np.unique(IDS, return_inverse=True)[1]
    plain = by_site(fc.data.dataset(X, Y, site=numbers))
    assert plain.names.clients is None
    assert np.array_equal(plain.train.index, clients.train.index)


def saved(folder: Path, **arrays: Any) -> Dataset:
    given = {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y, **arrays}
    np.savez(folder / "toy.npz", **given)
    return fc.data.load(folder / "toy.npz")


@pytest.mark.parametrize("dtype", [str, "S"])
def test_a_file_may_have_all_names(tmp_path: Path, dtype: Any) -> None:
    ids = IDS if dtype is str else np.char.encode(IDS, "utf-8")
    data = saved(
        tmp_path,
        site_train=ids,
        site_test=ids,
        class_names=np.array(["cat", "dog"], dtype),
        feature_names=np.array(["age", "weight", "height"], dtype),
    )
    clients = by_site(data)
    assert set(clients.names.clients or ()) == set(IDS)
    assert clients.names.classes == ("cat", "dog")
    assert clients.names.features == ("age", "weight", "height")


@pytest.mark.parametrize(
    ("arrays", "shown"),
    [
        ({"class_names": np.array([1, 2])}, "class_names"),
        ({"class_names": np.array(["cat"])}, "class_names"),
        ({"feature_names": np.array([["a", "b", "c"]])}, "feature_names"),
        ({"feature_names": np.array(["a", "b", "a"])}, "feature_names.*'a'"),
    ],
)
def test_bad_names_in_a_file_are_refused(
    tmp_path: Path, arrays: dict[str, Any], shown: str
) -> None:
    with pytest.raises(InvalidInputError, match=shown) as caught:
        saved(tmp_path, **arrays)
    assert "toy.npz" in str(caught.value)


@pytest.mark.parametrize("bad", ["", "two\nlines", "=x"])
def test_a_text_id_that_is_no_name_is_refused_when_it_becomes_a_client(bad: str) -> None:
    data = fc.data.dataset(X, Y, site=np.where(IDS == "west", bad, IDS))
    fc.data.partition(data, fc.data.Iid(), clients=2)
    with field_is("partition.key"):
        by_site(data)


class Halves:
    """A user's own scheme that names its clients."""

    name = "halves"

    def __init__(self, names: list[str]) -> None:
        self.names = names

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        return Split(np.array_split(np.arange(len(data.y_train)), clients), names=self.names)


def test_a_scheme_of_the_user_s_may_name_its_clients() -> None:
    data = fc.data.dataset(X, Y)
    clients = fc.data.partition(data, Halves(["left", "right"]), clients=2)
    assert clients.names.clients == ("left", "right")
    with pytest.raises(InvalidInputError, match="1 names for 2 clients"):
        fc.data.partition(data, Halves(["left"]), clients=2)
    with field_is("Halves.names"):
        fc.data.partition(data, Halves(["left", "left"]), clients=2)
