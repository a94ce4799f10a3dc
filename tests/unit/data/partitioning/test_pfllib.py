"""PFLlib's partitions: classes, sizes, test parts from training and test samples together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade.data import Clients, Dataset, PFLlib, dataset, partition
from fedclade.errors import InvalidInputError


def numbered(samples: int, tests: int, classes: int) -> Dataset:
    """A data set whose inputs are the numbers 0, 1, … and whose labels are their remainders."""
    x = np.arange(samples + tests, dtype=np.float32)[:, None]
    y = np.arange(samples + tests) % classes
    return dataset(x[:samples], y[:samples], x[samples:], y[samples:])


def parts(clients: Clients, client: int) -> tuple[list[int], list[int]]:
    """The numbers of a client's training and test samples."""
    test = clients.test[int(clients.test_part_id[client])]
    return (
        clients.x[clients.train[client]].flatten().long().tolist(),
        clients.x_test[test].flatten().long().tolist(),
    )


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from([PFLlib(), PFLlib(skew="dirichlet", alpha=0.5)]),
    st.integers(0, 10**6),
    st.integers(2, 12),
)
def test_every_sample_is_in_one_part(scheme: PFLlib, seed: int, clients: int) -> None:
    data = numbered(1500, 500, 4)
    divided = partition(data, scheme, clients, seed=seed)
    every: list[int] = []
    for client in range(clients):
        train, test = parts(divided, client)
        assert len(train) == int(0.75 * (len(train) + len(test)))
        every += train + test
    # With fewer clients than classes divided by classes_per_client some classes have no client.
    assert len(set(every)) == len(every)
    if scheme.skew == "dirichlet" or 2 * clients >= 4:
        assert sorted(every) == list(range(2000))


def test_twenty_clients_and_ten_classes_are_five_groups_of_two_classes() -> None:
    divided = partition(numbered(6000, 1000, 10), PFLlib(), 20, seed=3)
    assert divided.groups is not None
    assert divided.groups.tolist() == [client // 4 for client in range(20)]
    for client in range(20):
        labels = {number % 10 for part in parts(divided, client) for number in part}
        assert labels == {client // 4 * 2, client // 4 * 2 + 1}
    assert len(set(divided.sizes.tolist())) > 10  # of random size
    assert any(number >= 6000 for number in parts(divided, 0)[0])  # test samples are for training


def test_dirichlet_clients_have_forty_samples_at_least() -> None:
    divided = partition(numbered(6000, 1000, 10), PFLlib(skew="dirichlet"), 20, seed=0)
    sizes = [sum(map(len, parts(divided, client))) for client in range(20)]
    assert min(sizes) >= 40
    assert divided.groups is None


def test_other_fractions() -> None:
    divided = partition(numbered(90, 10, 2), PFLlib(test_fraction=0.5), 2, seed=0)
    train, test = parts(divided, 0)
    assert len(train) == len(test)


@pytest.mark.parametrize(
    ("scheme", "clients", "field"),
    [
        ({"skew": "other"}, 2, "partition.skew"),
        ({"classes_per_client": 0}, 2, "partition.classes_per_client"),
        ({"alpha": 0.0}, 2, "partition.alpha"),
        ({"test_fraction": 1.0}, 2, "partition.test_fraction"),
        ({}, 51, "partition.clients"),
        ({"skew": "dirichlet", "alpha": 0.05}, 10, "partition.alpha"),
    ],
)
def test_bad_settings(scheme: dict[str, object], clients: int, field: str) -> None:
    with pytest.raises(InvalidInputError) as error:
        partition(numbered(90, 10, 2), PFLlib(**scheme), clients)  # type: ignore[arg-type]
    assert error.value.field == field


def test_keys_of_both_parts_are_merged() -> None:
    x, y = np.zeros((4, 1), np.float32), np.arange(4)
    data = dataset(x, y, x[:2], y[:2], writer=(y, y[:2]), site=y)
    merged = data.merged()
    assert torch.equal(merged.keys["writer"][0], torch.tensor([0, 1, 2, 3, 0, 1]))
    assert list(merged.keys) == ["writer"]
    assert (len(merged.y_train), len(merged.y_test)) == (6, 0)
