"""The data sets of the papers, if they are on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedclade.data import (
    Dataset,
    Iid,
    LabelClusters,
    LabelPermutation,
    NaturalId,
    PowerLawClusters,
    Rotation,
    load,
    partition,
)
from fedclade.data.partitioning.grouped import power_law
from fedclade.errors import InvalidInputError

Real = Callable[[str], Dataset]


@pytest.fixture
def real(real_data: Callable[[str], Path]) -> Real:
    return lambda name: load(name, root=real_data(name).parent)


def test_mnist_iid(real: Real) -> None:
    mnist = real("mnist")
    assert mnist.x_train.shape == (60000, 1, 28, 28)
    assert mnist.x_train.dtype == torch.uint8
    assert set(mnist.keys) == {"writer", "hsf"}
    assert partition(mnist, Iid(), 100).sizes.tolist() == [600] * 100
    clients = partition(mnist, Iid(), 100, probe=None)
    assert clients.sizes.tolist() == [575] * 100
    assert clients.probe is not None
    assert len(clients.probe) == 2500
    assert clients.describe().test_sizes.tolist() == [100] * 100
    assert clients.test.index.bincount().max() <= 2


def test_mnist_writers(real: Real) -> None:
    mnist = real("mnist")
    clients = partition(mnist, NaturalId("writer"), 539, probe=0)
    described = clients.describe()
    # Train and test writers differ, so that all test parts come from the training samples.
    assert clients.sizes.sum() + described.test_sizes.sum() == 60000
    assert clients.test_sample_id.min() >= 10000
    assert len(clients.test_sample_id) == described.test_sizes.sum()
    with pytest.raises(
        InvalidInputError, match="539", check=lambda error: error.field == "partition.clients"
    ):
        partition(mnist, NaturalId("writer"), 540, probe=0)


def test_mnist_scenarios_one_and_two(real: Real) -> None:
    mnist = real("mnist")
    one = partition(mnist, LabelClusters(5, 2), 100)
    assert one.sizes.min() > 500
    assert one.sizes.sum() == 60000
    assert len(one.test) == 5
    assert one.test.sizes.sum() == 10000
    two = partition(mnist, LabelClusters(5, 3, overlap=1), 100)
    assert two.sizes.sum() == 60000
    assert 15000 > two.test.sizes.sum() > 14000
    counts = two.describe().counts
    assert counts is not None
    assert ((counts > 0).sum(1) == 3).all()
    with pytest.raises(
        InvalidInputError, match="600", check=lambda error: error.field == "partition.samples"
    ):
        partition(mnist, LabelClusters(5, 2, samples=600), 100)
    assert (
        partition(mnist, LabelClusters(5, 3, overlap=1, samples=30), 500).sizes.tolist()
        == [30] * 500
    )


def test_emnist_scenario_four(real: Real) -> None:
    emnist = real("emnist47")
    clients = partition(emnist, PowerLawClusters(), 2400, probe=0)
    counts = clients.describe().counts
    assert counts is not None
    assert clients.groups is not None
    for group in range(10):
        params = clients.groups == group
        classes = counts[params].sum(0).nonzero().flatten().tolist()
        assert classes == ([45, 46] if group == 9 else list(range(5 * group, 5 * group + 5)))
        assert (
            clients.sizes[params].tolist()
            == power_law(int(clients.sizes[params].sum()), 240).tolist()
        )
    assert len(clients.test) == 10
    assert clients.sizes.sum() == 93785


def test_cifar_is_channels_first_and_rotates(real: Real) -> None:
    cifar = real("cifar100")
    assert cifar.x_train.shape == (10000, 3, 32, 32)
    assert cifar.classes == 100
    clients = partition(cifar, Rotation(4, samples=20), 8)
    assert clients.x.shape == (160, 3, 32, 32)
    assert clients.x_test.shape == (8000, 3, 32, 32)
    assert torch.equal(clients.x_test[2000:4000], torch.rot90(cifar.x_test, 1, (2, 3)))


def test_fashion_permuted_keeps_only_what_clients_have(real: Real) -> None:
    fashion = real("fashion_mnist")
    clients = partition(fashion, LabelPermutation(4, samples=50), 20)
    assert len(clients.x) == 1000
    assert len(clients.x_test) == 40000
    assert clients.test_sample_id.bincount().tolist() == [4] * 10000
