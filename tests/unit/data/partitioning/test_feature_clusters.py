"""`FeatureClusters`: every client has all classes, but another cluster of each, at a given distance
from the others.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist

from fedclade.data import (
    Clients,
    Dataset,
    FeatureClusters,
    dataset,
    earth_movers_distance,
    genomic,
    load,
    partition,
)
from fedclade.data.feature_emd import Features
from fedclade.data.partitioning.feature_clusters import assign_with_capacity
from fedclade.errors import InvalidInputError

STYLES = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 7.0]])


def in_styles(
    each: int = 20, test_each: int = 5, classes: int = 4, apart: float = 100.0
) -> Dataset:
    """The centers of two classes are `apart`; each class has samples in three styles. x is the
    position, the class and the style.
    """
    rng = np.random.default_rng(0)

    def part(number: int) -> tuple[np.ndarray, np.ndarray]:
        y, style = (
            np.repeat(np.arange(classes), 3 * number),
            np.tile(np.repeat(np.arange(3), number), classes),
        )
        place = (
            np.stack([apart * y, np.zeros(len(y))], 1)
            + STYLES[style]
            + rng.normal(0, 0.1, (len(y), 2))
        )
        order = rng.permutation(len(y))
        return np.column_stack([place, y, style])[order].astype(np.float32), y[order]

    return dataset(*part(each), *part(test_each), name="in_styles")


class ByPlace(FeatureClusters):
    name = "by_place"

    def encoder(self, data: Dataset, rng: np.random.Generator) -> Features:
        return lambda x: x[:, :2]


def of_client(clients: Clients, client: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        clients.x[clients.train[client]],
        clients.x_test[clients.test[int(clients.test_part_id[client])]],
    )


def counts(clients: Clients) -> torch.Tensor:
    table = clients.describe().counts
    assert table is not None
    return table


def test_capacities_by_hand() -> None:
    codes, centers = np.array([[0.0], [1.0], [2.0], [9.0]]), np.array([[0.0], [10.0]])
    assert assign_with_capacity(codes, centers, np.array([3, 1])).tolist() == [0, 0, 0, 1]
    assert assign_with_capacity(codes, centers, np.array([2, 2])).tolist() == [
        0,
        0,
        1,
        1,
    ]  # 2 is the nearest to 10 of those that must go
    assert assign_with_capacity(codes, centers, np.array([0, 4])).tolist() == [1, 1, 1, 1]
    assert assign_with_capacity(codes[:0], centers, np.array([0, 0])).tolist() == []


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_capacities_are_respected_at_the_least_cost(room: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes, centers = rng.normal(size=(sum(room), 2)), rng.normal(size=(len(room), 2))
    chosen = assign_with_capacity(codes, centers, np.array(room))
    assert np.bincount(chosen, minlength=len(room)).tolist() == room
    each_place = cdist(codes, centers.repeat(room, axis=0), "sqeuclidean")
    rows, columns = linear_sum_assignment(each_place)
    assert ((codes - centers[chosen]) ** 2).sum() == pytest.approx(each_place[rows, columns].sum())


@pytest.mark.parametrize("seed", range(4))
def test_each_client_has_one_style_of_all_classes(seed: int) -> None:
    """A client has the same style of all classes, in the training and the test part."""
    clients = partition(in_styles(), ByPlace(), 3, seed, probe=0)
    own = []
    for client in range(3):
        train, test = of_client(clients, client)
        own.append(set(train[:, 3].tolist()))
        assert own[-1] == set(test[:, 3].tolist())
        assert set(train[:, 2].tolist()) == {0, 1, 2, 3}
        assert (len(train), len(test)) == (80, 20)
    assert sorted(map(tuple, own)) == [(0,), (1,), (2,)]
    assert clients.groups is None
    assert clients.partition == "by_place"


def test_sizes_are_even_and_all_samples_are_assigned_once() -> None:
    data = load("digits")
    clients = partition(data, FeatureClusters(), 7, probe=None)
    assert clients.sizes.max() - clients.sizes.min() <= 1
    assert (counts(clients).amax(0) - counts(clients).amin(0) <= 1).all()
    assert clients.test.sizes.max() - clients.test.sizes.min() <= 1
    rows = clients.train.index
    assert len(rows) == len(rows.unique()) == len(data.y_train) - 143
    assert sorted(clients.test.index.tolist()) == list(range(len(data.y_test)))


def test_the_distance_is_reached() -> None:
    """It is measured with other features and samples, so that it is not equal to the digit."""
    data = load("digits")
    most = earth_movers_distance(partition(data, FeatureClusters(), 5, probe=None)).percent
    previous = 0.0
    for wanted in (4.0, 8.0):
        clients = partition(data, FeatureClusters(wanted), 5, probe=None)
        measured = earth_movers_distance(clients).percent
        assert abs(measured - wanted) < 1.2
        assert previous < measured < most
        assert torch.equal(
            counts(clients), counts(partition(data, FeatureClusters(), 5, probe=None))
        ), "classes stay as even as they were"
        previous = measured


def test_mixing_moves_training_and_test_samples_equally() -> None:
    """Of samples assigned again at random to three clients, two thirds change the client."""
    data, wanted = in_styles(each=100, test_each=100, apart=10), 5.0
    clients = partition(data, ByPlace(wanted), 3, probe=0)
    strangers = []
    for client in range(3):
        parts = of_client(clients, client)
        own = parts[0][:, 3].mode().values
        strangers.append([float((part[:, 3] != own).float().mean()) for part in parts])
    train, test = np.mean(strangers, 0)
    assert 0.1 < train < 0.6
    assert abs(train - test) < 0.06


def test_the_seed_decides() -> None:
    data = load("digits")
    first, again, other = (
        partition(data, FeatureClusters(4.0), 4, seed, probe=None) for seed in (5, 5, 6)
    )
    for a, b in ((first.train, again.train), (first.test, again.test)):
        assert torch.equal(a.index, b.index)
    assert not torch.equal(first.train.index, other.train.index)
    assert first.origin == {"emd": 4.0, "seed": 5, "probe": 143}


def test_without_test_samples_or_with_other_classes() -> None:
    whole = in_styles()
    assert (
        len(partition(dataset(whole.x_train, whole.y_train), FeatureClusters(), 3, probe=None).test)
        == 0
    )
    strange = dataset(
        whole.x_train, whole.y_train, whole.x_test, np.where(whole.y_test == 0, 9, whole.y_test)
    )
    clients = partition(strange, FeatureClusters(), 3, probe=None)
    assert set(clients.y_test[clients.test.index].tolist()) == {
        1,
        2,
        3,
    }  # no client is trained on class 9


def error_of(call: Callable[[], object]) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as caught:
        call()
    return caught.value


@pytest.mark.parametrize("emd", [0, -1.0, float("nan"), "6"])
def test_an_invalid_emd(emd: float) -> None:
    error = error_of(lambda: FeatureClusters(emd))
    assert error.field == "partition.emd"
    assert repr(emd) in str(error)


def test_an_emd_out_of_reach_gives_the_range() -> None:
    data = load("digits")
    error = error_of(lambda: partition(data, FeatureClusters(80.0), 5, probe=None))
    assert error.field == "partition.emd"
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", str(error))]
    value, clients, low, high, _, most = numbers
    assert (value, clients) == (80, 5)
    assert low < 1 < most <= high
    assert (
        earth_movers_distance(partition(data, FeatureClusters(most), 5, probe=None)).percent
        > most - 1.2
    )
    equal = dataset(np.zeros((40, 3), np.float32), np.arange(40) % 2)
    error = error_of(lambda: partition(equal, FeatureClusters(5.0), 4, probe=None))
    assert error.field == "partition.emd"
    assert "0.00 to 0.00" in str(error)
    assert partition(equal, FeatureClusters(), 4, probe=0).sizes.tolist() == [10] * 4


def test_too_few_samples_or_no_classes() -> None:
    few = dataset(np.random.default_rng(0).normal(size=(13, 2)), [0] * 10 + [1] * 3)
    error = error_of(lambda: partition(few, FeatureClusters(), 4, probe=0))
    assert error.field == "partition.clients"
    assert re.findall(r"\d+", str(error)) == ["4", "3", "3"]
    assert counts(partition(few, FeatureClusters(), 3, probe=0)).min() == 1
    floats = dataset(np.eye(4), np.ones(4), name="prices")
    for data, kind in ((floats, "floats"), (genomic(reads=4), "sequences")):
        error = error_of(lambda data=data: partition(data, FeatureClusters(), 2, probe=None))  # type: ignore[misc]
        assert error.field == "partition.name"
        assert repr(data.name) in str(error)
        assert kind in str(error)


@pytest.mark.slow
def test_emnist_at_three_distances(real_data: Callable[[str], Path]) -> None:
    data = load(real_data("emnist62"))
    for wanted in (2.0, 4.0, 6.0):
        assert (
            abs(
                earth_movers_distance(
                    partition(data, FeatureClusters(wanted), 10, probe=None)
                ).percent
                - wanted
            )
            < 0.8
        )
