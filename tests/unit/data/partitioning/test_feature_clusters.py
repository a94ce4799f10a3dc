"""`FeatureClusters`: every client has all classes in a manner of its own, and is as far from the
others as asked for.
"""

from __future__ import annotations

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
from fedclade.data.partitioning.feature_clusters import nearest_with_room
from fedclade.errors import InvalidInputError

MANNERS = np.array([[0.0, 0.0], [4.0, 0.0], [0.0, 7.0]])


def in_manners(
    each: int = 20, test_each: int = 5, classes: int = 4, apart: float = 100.0
) -> Dataset:
    """Each class has a place `apart` from the next, and its samples lie there in three manners. x
    is the place, then class and manner.
    """
    rng = np.random.default_rng(0)

    def part(number: int) -> tuple[np.ndarray, np.ndarray]:
        y, manner = (
            np.repeat(np.arange(classes), 3 * number),
            np.tile(np.repeat(np.arange(3), number), classes),
        )
        place = (
            np.stack([apart * y, np.zeros(len(y))], 1)
            + MANNERS[manner]
            + rng.normal(0, 0.1, (len(y), 2))
        )
        order = rng.permutation(len(y))
        return np.column_stack([place, y, manner])[order].astype(np.float32), y[order]

    return dataset(*part(each), *part(test_each), name="in_manners")


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


def test_room_by_hand() -> None:
    codes, centres = np.array([[0.0], [1.0], [2.0], [9.0]]), np.array([[0.0], [10.0]])
    assert nearest_with_room(codes, centres, np.array([3, 1])).tolist() == [0, 0, 0, 1]
    assert nearest_with_room(codes, centres, np.array([2, 2])).tolist() == [
        0,
        0,
        1,
        1,
    ]  # 2 is the nearest to 10 of those that must go
    assert nearest_with_room(codes, centres, np.array([0, 4])).tolist() == [1, 1, 1, 1]
    assert nearest_with_room(codes[:0], centres, np.array([0, 0])).tolist() == []


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_room_is_kept_at_the_least_cost(room: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    codes, centres = rng.normal(size=(sum(room), 2)), rng.normal(size=(len(room), 2))
    chosen = nearest_with_room(codes, centres, np.array(room))
    assert np.bincount(chosen, minlength=len(room)).tolist() == room
    each_place = cdist(codes, centres.repeat(room, axis=0), "sqeuclidean")
    rows, columns = linear_sum_assignment(each_place)
    assert ((codes - centres[chosen]) ** 2).sum() == pytest.approx(each_place[rows, columns].sum())


@pytest.mark.parametrize("seed", range(4))
def test_each_client_has_one_manner_of_all_classes(seed: int) -> None:
    """The manners of one class go with the like manners of the others, in training and test
    part.
    """
    clients = partition(in_manners(), ByPlace(), 3, seed, probe=0)
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


def test_sizes_are_even_and_all_samples_are_dealt_once() -> None:
    data = load("digits")
    clients = partition(data, FeatureClusters(), 7)
    assert clients.sizes.max() - clients.sizes.min() <= 1
    assert (counts(clients).amax(0) - counts(clients).amin(0) <= 1).all()
    assert clients.test.sizes.max() - clients.test.sizes.min() <= 1
    rows = clients.train.index
    assert len(rows) == len(rows.unique()) == len(data.y_train) - 143
    assert sorted(clients.test.index.tolist()) == list(range(len(data.y_test)))


def test_the_wanted_distance_is_met() -> None:
    """Measured anew, with features and samples drawn otherwise, so that it is not met to the
    digit.
    """
    data = load("digits")
    most = earth_movers_distance(partition(data, FeatureClusters(), 5)).percent
    previous = 0.0
    for wanted in (4.0, 8.0):
        clients = partition(data, FeatureClusters(wanted), 5)
        measured = earth_movers_distance(clients).percent
        assert abs(measured - wanted) < 1.2
        assert previous < measured < most
        assert torch.equal(counts(clients), counts(partition(data, FeatureClusters(), 5))), (
            "classes stay as even as they were"
        )
        previous = measured


def test_mixing_moves_training_and_test_samples_alike() -> None:
    """Of samples dealt anew among three clients two thirds change hands."""
    data, wanted = in_manners(each=100, test_each=100, apart=10), 5.0
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
    first, again, other = (partition(data, FeatureClusters(4.0), 4, seed) for seed in (5, 5, 6))
    for a, b in ((first.train, again.train), (first.test, again.test)):
        assert torch.equal(a.index, b.index)
    assert not torch.equal(first.train.index, other.train.index)
    assert first.origin == {"emd": 4.0, "seed": 5, "probe": 143}


def test_without_test_samples_or_with_strange_ones() -> None:
    whole = in_manners()
    assert len(partition(dataset(whole.x_train, whole.y_train), FeatureClusters(), 3).test) == 0
    strange = dataset(
        whole.x_train, whole.y_train, whole.x_test, np.where(whole.y_test == 0, 9, whole.y_test)
    )
    clients = partition(strange, FeatureClusters(), 3)
    assert set(clients.y_test[clients.test.index].tolist()) == {
        1,
        2,
        3,
    }  # nobody is trained on class 9


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(InvalidInputError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("emd", [0, -1.0, float("nan"), "6"])
def test_an_emd_that_is_none(emd: float) -> None:
    assert (
        message_of(lambda: FeatureClusters(emd))
        == f"partition.emd = {emd!r}: must be a number above 0 (and finite)."
    )


def test_an_emd_out_of_reach_gives_the_range() -> None:
    data = load("digits")
    message = message_of(lambda: partition(data, FeatureClusters(80.0), 5))
    assert message.startswith("partition.emd = 80.0: 5 clients of these data can be 0.")
    most = float(message.split("ask for at most ")[1].split(" ")[0])
    assert earth_movers_distance(partition(data, FeatureClusters(most), 5)).percent > most - 1.2
    equal = dataset(np.zeros((40, 3), np.float32), np.arange(40) % 2)
    assert "percent apart; leave emd out." in message_of(
        lambda: partition(equal, FeatureClusters(5.0), 4)
    )
    assert partition(equal, FeatureClusters(), 4, probe=0).sizes.tolist() == [10] * 4


def test_what_has_too_few_samples_or_no_classes() -> None:
    few = dataset(np.random.default_rng(0).normal(size=(13, 2)), [0] * 10 + [1] * 3)
    assert (
        message_of(lambda: partition(few, FeatureClusters(), 4, probe=0))
        == "partition.clients = 4: every client has every class, and the smallest has 3 training"
        " samples besides the probe; ask for at most 3 clients."
    )
    assert counts(partition(few, FeatureClusters(), 3, probe=0)).min() == 1
    assert "needs class labels" in message_of(
        lambda: partition(dataset(np.eye(4), np.ones(4)), FeatureClusters(), 2)
    )
    assert "are sequences" in message_of(lambda: partition(genomic(reads=4), FeatureClusters(), 2))


@pytest.mark.slow
def test_emnist_at_three_distances(real_data: Callable[[str], Path]) -> None:
    data = load(real_data("emnist62"))
    for wanted in (2.0, 4.0, 6.0):
        assert (
            abs(
                earth_movers_distance(partition(data, FeatureClusters(wanted), 10)).percent - wanted
            )
            < 0.8
        )
