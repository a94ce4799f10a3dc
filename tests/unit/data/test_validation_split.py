"""Validation data: a part of each client's training data."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedclade as fc
from fedclade.data import Clients
from fedclade.data.validation_split import validation_positions
from fedclade.errors import InvalidInputError


def rows(index: fc.data.RaggedIndex) -> list[list[int]]:
    return [index[part].tolist() for part in range(len(index))]


def split(clients: Clients) -> fc.data.RaggedIndex:
    assert clients.validation is not None
    return clients.validation


def test_validation_data_are_a_part_of_the_training_data(digits: Clients) -> None:
    parted = digits.with_validation(0.2)
    for before, train, validation in zip(
        rows(digits.train), rows(parted.train), rows(split(parted)), strict=True
    ):
        assert len(validation) == len(before) // 5
        # Nothing is lost, nothing is in both, and the order of the training data stays.
        assert train == [row for row in before if row not in validation]
        assert validation == [row for row in before if row not in train]
    assert torch.equal(parted.sizes + split(parted).sizes, digits.sizes)
    assert torch.equal(parted.test.index, digits.test.index)
    assert digits.validation is None


def test_every_class_has_about_the_same_share() -> None:
    labels = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    order = torch.from_numpy(np.random.default_rng(0).permutation(100))
    picked = labels[order][validation_positions(labels[order], 0.1, 0)]
    assert picked.bincount().tolist() == [6, 3, 1]


@pytest.mark.parametrize(
    ("size", "share", "count"),
    [(9, 0.1, 0), (10, 0.1, 1), (19, 0.1, 1), (100, 0.29, 29), (2, 0.5, 1), (1, 0.9, 0)],
)
def test_the_number_is_the_share_rounded_down(size: int, share: float, count: int) -> None:
    assert len(validation_positions(torch.zeros(size), share, 0)) == count


def test_a_client_with_too_few_examples_keeps_all(ragged: Clients) -> None:
    parted = ragged.with_validation(0.25)
    small = ragged.sizes < 4
    assert small.any()
    assert torch.equal(parted.sizes[small], ragged.sizes[small])
    assert torch.equal(split(parted).sizes == 0, small)


def test_the_split_depends_on_the_seed(digits: Clients) -> None:
    assert rows(split(digits.with_validation(0.2))) == rows(split(digits.with_validation(0.2, 0)))
    assert rows(split(digits.with_validation(0.2, 1))) != rows(split(digits.with_validation(0.2)))
    other = fc.data.partition(
        fc.data.load("digits"), fc.data.LabelClusters(clusters=5, classes=2), 20, seed=3
    )
    assert rows(split(other.with_validation(0.2))) == rows(split(other.with_validation(0.2, 3)))


def test_the_split_of_a_client_does_not_depend_on_the_others(digits: Clients) -> None:
    # A client on another machine makes the same split.
    ids = [7, 3, 11]
    together = digits.with_validation(0.3).only(ids)
    apart = digits.only(ids).with_validation(0.3)
    for client in range(3):
        for one, other in (
            (together.train, apart.train),
            (split(together), split(apart)),
        ):
            assert torch.equal(together.x[one[client]], apart.x[other[client]])
            assert torch.equal(together.y[one[client]], apart.y[other[client]])


def test_targets_without_classes_are_split_too() -> None:
    data = [(np.random.rand(40, 3).astype(np.float32), np.random.rand(40).astype(np.float32))]
    assert fc.data.from_arrays(data).with_validation(0.25).sizes.tolist() == [30]


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan"), "0.1", True])
def test_a_share_outside_0_and_1_is_refused(share: float, ragged: Clients) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "data.validation"):
        ragged.with_validation(share)


def test_clients_have_one_validation_part(ragged: Clients) -> None:
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "data.validation"):
        ragged.with_validation(0.2).with_validation(0.2)


def test_the_description_shows_validation_data(ragged: Clients) -> None:
    assert "validation" not in str(ragged.describe())
    text = str(ragged.with_validation(0.5).describe())
    assert "validation" in text.splitlines()[0]
    assert "; validation min 0," in text.splitlines()[-1]
