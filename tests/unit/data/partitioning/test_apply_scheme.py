"""Each scheme on small data, worked out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from fedclade.data import (
    PARTITIONS,
    Clients,
    Dataset,
    Dirichlet,
    Iid,
    LabelClusters,
    LabelPermutation,
    LabelSwap,
    NaturalId,
    Pathological,
    PowerLawClusters,
    QuantitySkew,
    Rotation,
    Split,
    dataset,
    from_arrays,
    load,
    partition,
)
from fedclade.data.partitioning.base import (
    assign_classes,
    blocks,
    by_class,
    fill_up,
    follow_labels,
    shares,
)
from fedclade.data.partitioning.grouped import power_law
from fedclade.errors import InvalidInputError


def toy(classes: int = 4, each: int = 10, test_each: int = 5) -> Dataset:
    """Sample i of the training data is the vector (i, 0), of the test data (i, 1); labels go
    round.
    """

    def part(number: int, mark: int) -> tuple[np.ndarray, np.ndarray]:
        return (
            np.stack([np.arange(number), np.full(number, mark)], 1).astype(np.float32),
            np.arange(number) % classes,
        )

    return dataset(*part(classes * each, 0), *part(classes * test_each, 1), name="toy")


def labels(clients: Clients, client: int) -> list[int]:
    return sorted(set(clients.y[clients.train[client]].tolist()))


def labels_of_test(clients: Clients, client: int) -> list[int]:
    return sorted(set(clients.y_test[clients.test[int(clients.test_part_id[client])]].tolist()))


# the pieces


def test_shares_by_largest_remainder() -> None:
    assert shares(10, np.array([1, 1, 1])).tolist() == [4, 3, 3]
    assert shares(7, np.array([0.5, 0.3, 0.2])).tolist() == [4, 2, 1]
    assert shares(3, np.array([0, 1, 0])).tolist() == [0, 3, 0]
    assert shares(0, np.array([2, 1])).tolist() == [0, 0]


def test_blocks_are_even_and_consecutive() -> None:
    assert blocks(7, 3).tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert blocks(3, 3).tolist() == [0, 1, 2]


def test_assign_classes_keeps_totals_even() -> None:
    pools = {0: np.arange(3), 1: np.arange(3, 6)}
    everyone = np.arange(4)
    parts = assign_classes(pools, {0: everyone, 1: everyone}, 4)
    assert sorted(map(len, parts)) == [
        1,
        1,
        2,
        2,
    ]  # client 3 got nothing of the remainder of class 0, and is first in class 1
    assert len(parts[3]) == 1
    assert sorted(np.concatenate(parts).tolist()) == list(range(6))


def test_fill_up_takes_from_the_largest() -> None:
    parts = fill_up(
        [np.arange(6), np.array([], np.int64), np.array([6, 7])], 2, np.random.default_rng(0)
    )
    assert [len(part) for part in parts] == [4, 2, 2]
    assert sorted(np.concatenate(parts).tolist()) == list(range(8))
    assert set(parts[2]) == {6, 7}


def test_follow_labels_by_hand() -> None:
    train_labels = np.array([0, 0, 0, 1, 1, 1, 1, 1])
    test = np.array([0, 0, 1, 1])  # half as many as training samples
    parts = follow_labels(
        [np.arange(4), np.arange(4, 8)], train_labels, test, np.random.default_rng(0)
    )
    assert sorted(test[parts[0]].tolist()) == [
        0,
        0,
    ]  # 3 : 1 of two is 1.5 : 0.5, a tie that goes to the lower label
    assert sorted(test[parts[1]].tolist()) == [1, 1]
    assert len(set(np.concatenate(parts).tolist())) == 4


def test_follow_labels_wraps_but_never_repeats_for_one_client() -> None:
    rng = np.random.default_rng(0)
    ones = np.zeros(12, np.int64)
    parts = follow_labels(np.array_split(np.arange(12), 6), ones, np.zeros(4, np.int64), rng)
    assert [len(part) for part in parts] == [1] * 6
    assert len({int(part[0]) for part in parts[:4]}) == 4
    alone = follow_labels(
        [np.array([0]), np.arange(1, 12)], np.array([1] + [0] * 11), np.array([0, 1, 1, 1, 1]), rng
    )
    assert len(alone[0]) == 1
    assert alone[1].tolist() == [0]


def test_follow_labels_where_a_class_has_no_test_samples() -> None:
    parts = follow_labels(
        [np.array([0]), np.array([1, 2])],
        np.array([0, 0, 1]),
        np.array([1, 1, 1]),
        np.random.default_rng(0),
    )
    assert len(parts[0]) == 0
    assert len(parts[1]) == 2


def one_by_one(
    train: list[np.ndarray], labels: np.ndarray, test_labels: np.ndarray, rng: np.random.Generator
) -> list[list[int]]:
    """What `follow_labels` does for all clients at once."""
    pools = by_class(test_labels, rng)
    used, parts = dict.fromkeys(pools, 0), []
    for part in train:
        held, counts = np.unique(
            [label for label in labels[part] if label in pools], return_counts=True
        )
        total = max(1, round(len(part) * len(test_labels) / len(labels)))
        parts.append([])
        for label, wanted in zip(held, shares(total, counts) if len(held) else [], strict=True):
            number = min(wanted, len(pools[label]))
            parts[-1] += [
                int(pools[label][(used[label] + i) % len(pools[label])]) for i in range(number)
            ]
            used[label] += number
    return parts


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 8),
    st.integers(1, 80),
    st.integers(0, 60),
    st.integers(1, 12),
    st.integers(0, 10**6),
)
def test_follow_labels_is_that_of_one_client_after_the_other(
    classes: int, samples: int, tests: int, clients: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    train = np.split(
        rng.permutation(samples), np.sort(rng.integers(0, samples + 1, clients - 1))
    )  # some are empty
    labels, test_labels = 5 * rng.integers(0, classes, samples), 5 * rng.integers(0, classes, tests)
    got = follow_labels(train, labels, test_labels, np.random.default_rng(seed))
    assert [part.tolist() for part in got] == one_by_one(
        train, labels, test_labels, np.random.default_rng(seed)
    )


@pytest.mark.parametrize(
    ("samples", "clients", "smallest", "largest", "median", "first"),
    [
        (12000, 240, 26, 259, 29, 124),
        (12000, 60, 101, 1256, None, None),
        (4800, 240, 11, 105, None, None),
        (4800, 60, 41, 429, None, None),
    ],
)
def test_power_law_sizes(
    samples: int, clients: int, smallest: int, largest: int, median: int | None, first: int | None
) -> None:
    sizes = power_law(samples, clients)
    assert sizes.sum() == samples
    assert sizes.min() == smallest
    assert sizes.max() == largest
    assert median is None or np.median(sizes) == median
    assert first is None or sizes[0] == first


@pytest.mark.parametrize(
    ("samples", "clients"),
    [(1, 1), (5, 1), (3, 3), (4, 3), (5, 3), (7, 3), (6, 3), (1000, 999), (10, 2)],
)
def test_power_law_gives_every_client_samples(samples: int, clients: int) -> None:
    sizes = power_law(samples, clients)
    assert sizes.sum() == samples
    assert sizes.min() >= 1
    assert (np.diff(sizes[1:]) >= 0).all()


# the probe


def test_the_usual_probe_is_a_tenth_and_the_same_for_every_scheme() -> None:
    data = toy()
    a, b = (
        partition(data, scheme, 4, seed=3, probe=None) for scheme in (Iid(), LabelClusters(2, 2))
    )
    assert a.probe is not None
    assert b.probe is not None
    assert a.probe.shape == (4, 2)
    assert torch.equal(a.probe, b.probe)
    used = set(a.x[a.train.index][:, 0].tolist())
    assert len(used) == 36
    assert used.isdisjoint(a.probe[:, 0].tolist())


def test_the_size_of_the_probe() -> None:
    assert partition(toy(), Iid(), 4).probe is None
    assert partition(toy(each=2), Iid(), 4, probe=None).probe is None  # a tenth of eight
    big = dataset(np.zeros((40000, 1), np.float32), np.zeros(40000, int))
    probe = partition(big, Iid(), 2, probe=None).probe
    assert probe is not None
    assert len(probe) == 2500
    assert partition(toy(), Iid(), 4, probe=30).sizes.tolist() == [3, 3, 2, 2]


class BySight:
    """Assigns the samples with the largest numbers to the last client, and stores its inputs."""

    name: ClassVar[str] = "by_sight"

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        self.inputs = data.x_train
        return Split(train=np.array_split(data.x_train[:, 0].argsort().numpy(), clients))


def test_the_pool_is_not_copied_and_a_scheme_sees_it_without_the_probe() -> None:
    data, scheme = toy(), BySight()
    clients = partition(data, scheme, 4, seed=3, probe=None)
    assert clients.probe is not None
    assert clients.x.data_ptr() == data.x_train.data_ptr()
    apart = set(clients.probe[:, 0].tolist())
    left = [number for number in range(40) if number not in apart]
    assert scheme.inputs[:, 0].tolist() == left
    assert sorted(clients.x[clients.train[3]][:, 0].tolist()) == left[27:]
    assert torch.equal(
        clients.y[clients.train.index], (clients.x[clients.train.index][:, 0] % 4).long()
    )


# the schemes


def test_iid() -> None:
    clients = partition(toy(), Iid(), 5, probe=0)
    assert clients.sizes.tolist() == [8] * 5
    assert clients.groups is not None
    assert clients.groups.tolist() == [0] * 5
    assert clients.describe().test_sizes.tolist() == [4] * 5
    assert clients.test_part_id.tolist() == [0, 1, 2, 3, 4]
    assert clients.classes == 4
    assert clients.dataset == "toy"
    assert clients.partition == "iid"
    assert clients.origin == {"seed": 0, "probe": 0}


def test_iid_for_regression() -> None:
    data = dataset(
        np.zeros((20, 3)), np.linspace(0, 1, 20), np.zeros((10, 3)), np.linspace(0, 1, 10)
    )
    clients = partition(data, Iid(), 4, probe=0)
    assert clients.classes is None
    assert clients.sizes.tolist() == [5] * 4
    assert clients.describe().counts is None
    assert clients.describe().test_sizes.tolist() == [2] * 4
    assert len(set(clients.test.index.tolist())) == 8


def test_without_a_test_part_clients_have_none() -> None:
    data = dataset(np.zeros((20, 1, 2, 2), np.float32), np.arange(20) % 4)
    for scheme in (Iid(), LabelClusters(2, 2), LabelSwap(2), Rotation(2)):
        clients = partition(data, scheme, 4, probe=None)
        assert clients.test_part_id.tolist() == [-1] * 4
        assert clients.describe().test_sizes.tolist() == [0] * 4


def test_dirichlet_concentration() -> None:
    data = toy(classes=10, each=100)
    narrow, wide = (
        partition(data, Dirichlet(alpha), 20, probe=None).describe().counts for alpha in (0.05, 1e6)
    )
    assert narrow is not None
    assert wide is not None
    assert (narrow > 0).sum(1).double().mean() < 4
    assert (wide > 0).all()
    assert wide.max() - wide.min() <= 3
    assert partition(data, Dirichlet(), 3, probe=None).groups is None


def test_dirichlet_repairs_to_the_smallest_size() -> None:
    clients = partition(toy(classes=2, each=50), Dirichlet(alpha=0.01, min_size=5), 18, probe=None)
    assert clients.sizes.min() >= 5
    assert clients.sizes.sum() == 90
    assert (
        partition(toy(classes=2, each=50), Dirichlet(alpha=0.01), 90, probe=None).sizes.tolist()
        == [1] * 90
    )


def test_balanced_dirichlet_gives_nothing_more_to_full_clients() -> None:
    data = toy(classes=10, each=100)
    for seed in range(5):
        clients = partition(data, Dirichlet(0.05, balanced=True), 20, seed=seed)
        counts = clients.describe().counts
        assert counts is not None
        before = counts.cumsum(1) - counts  # classes are divided in their order
        full = float(counts.sum()) / 20
        assert counts[before >= full].sum() == 0
        assert (before >= full).any()
        assert int(clients.sizes.sum()) == int(counts.sum()) == 1000


def test_balanced_dirichlet_repeats_draws_until_the_smallest_size() -> None:
    data = toy(classes=10, each=100)
    smallest = [
        int(partition(data, Dirichlet(0.1, min_size=5, balanced=True), 20, seed=seed).sizes.min())
        for seed in range(10)
    ]
    assert min(smallest) >= 5
    assert max(smallest) > 5  # a repaired draw has exactly the smallest size


def test_pathological() -> None:
    clients = partition(toy(classes=5, each=40), Pathological(2), 10, probe=None)
    counts = clients.describe().counts
    assert counts is not None
    assert ((counts > 0).sum(1) == 2).all()
    assert clients.groups is None
    for client in range(10):
        assert client % 5 in labels(clients, client)
        assert set(labels_of_test(clients, client)) <= set(labels(clients, client))
    for column in counts.T:
        owned = column[column > 0]
        assert owned.max() - owned.min() <= 1
    assert counts.sum() == 180


def test_pathological_with_few_clients_still_covers_the_classes() -> None:
    counts = partition(toy(classes=6), Pathological(3), 2, probe=None).describe().counts
    assert counts is not None
    assert (counts.sum(0) > 0).all()
    counts = partition(toy(classes=6), Pathological(1), 2, probe=None).describe().counts
    assert counts is not None
    assert (counts > 0).nonzero().tolist() == [[0, 0], [1, 1]]


def test_pathological_in_the_tightest_case() -> None:
    counts = partition(toy(classes=4, each=6), Pathological(3), 8, probe=0).describe().counts
    assert counts is not None
    assert (counts <= 1).all()
    assert ((counts > 0).sum(1) == 3).all()


def test_natural_id_with_test_samples_of_the_same_ids() -> None:
    writers = np.array([7, 7, 9, 9, 9, 5])
    data = dataset(
        np.arange(6.0)[:, None],
        np.arange(6),
        np.arange(100.0, 104)[:, None],
        [0, 1, 2, 3],
        who=(writers, [9, 7, 9, 3]),
    )
    clients = partition(data, NaturalId("who"), 3, probe=0)
    assert [sorted(clients.x[clients.train[i]].flatten().tolist()) for i in range(3)] == [
        [5],
        [0, 1],
        [2, 3, 4],
    ]
    tests = [clients.test[int(part)] for part in clients.test_part_id if part >= 0]
    assert [sorted(clients.x_test[rows].flatten().tolist()) for rows in tests] == [
        [101],
        [100, 102],
    ]
    assert clients.test_part_id.tolist() == [
        -1,
        0,
        1,
    ]  # writer 5 has one sample, and keeps it for training
    assert sorted(clients.test_sample_id.tolist()) == [0, 1, 2]
    assert clients.groups is None


def test_natural_id_makes_a_test_part_of_training_samples() -> None:
    data = dataset(np.arange(30.0)[:, None], np.arange(30) % 2, writer=np.repeat([1, 2, 3], 10))
    clients = partition(data, NaturalId(test_fraction=0.3), 3, probe=0)
    assert clients.sizes.tolist() == [7, 7, 7]
    assert clients.describe().test_sizes.tolist() == [3, 3, 3]
    for client in range(3):
        params = [
            *clients.x[clients.train[client]].flatten().tolist(),
            *clients.x_test[clients.test[client]].flatten().tolist(),
        ]
        assert sorted(params) == [float(i) for i in range(10 * client, 10 * client + 10)]
    assert torch.equal(clients.x_test.flatten(), clients.test_sample_id.float())
    assert len(partition(data, NaturalId(), 2, seed=1, probe=None)) == 2


def test_label_clusters_disjoint() -> None:
    clients = partition(toy(classes=10, each=20), LabelClusters(5, 2), 11, probe=0)
    assert clients.groups is not None
    assert clients.groups.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    sets = [labels(clients, client) for client in range(11)]
    assert sets[0] == sets[1] == sets[2]
    assert sets[3] == sets[4]
    assert all(len(s) == 2 for s in sets)
    assert sorted(label for client in (0, 3, 5, 7, 9) for label in sets[client]) == list(range(10))
    assert clients.sizes.tolist() == [14, 13, 13] + [20] * 8
    assert clients.test_part_id.tolist() == clients.groups.tolist()
    assert clients.test.sizes.tolist() == [10] * 5
    assert [labels_of_test(clients, client) for client in range(11)] == sets


def test_label_clusters_of_consecutive_classes() -> None:
    for seed in (0, 1):
        scheme = LabelClusters(2, 5, shuffle=False)
        clients = partition(toy(classes=10, each=20), scheme, 2, seed=seed, probe=0)
        own = [set(clients.y[rows].tolist()) for rows in clients.train]
        assert own == [{0, 1, 2, 3, 4}, {5, 6, 7, 8, 9}]
        assert clients.sizes.tolist() == [100, 100]  # all samples of the classes


def test_label_clusters_in_a_ring() -> None:
    clients = partition(toy(classes=10, each=20), LabelClusters(5, 3, overlap=1), 5, probe=0)
    sets = [set(labels(clients, client)) for client in range(5)]
    for c in range(5):
        assert len(sets[c]) == 3
        assert len(sets[c] & sets[(c + 1) % 5]) == 1
        assert not sets[c] & sets[(c + 2) % 5]
    assert set.union(*sets) == set(range(10))
    assert clients.sizes.tolist() == [40] * 5
    assert len(set(clients.train.index.tolist())) == 200
    assert clients.test.sizes.tolist() == [15] * 5


def test_clusters_may_reuse_the_samples_of_a_class_that_they_share() -> None:
    """As in the experiments of FLT's authors: a client has equally many samples of each class."""
    data, ring = toy(classes=10, each=20), LabelClusters(5, 3, overlap=1, samples=30, reuse=True)
    clients = partition(data, ring, 10, probe=0)
    counts = clients.describe().counts
    assert counts is not None
    assert sorted(counts[0].tolist()) == [0] * 7 + [10] * 3
    rows = [set(clients.train[client].tolist()) for client in range(10)]
    shared = rows[0] & rows[2]  # client 0 of the first cluster and of the next one
    assert {int(data.y_train[row]) for row in shared} == set(labels(clients, 0)) & set(
        labels(clients, 2)
    )
    assert len(shared) == 10
    assert not rows[0] & rows[1]  # two clients of one cluster


def test_label_clusters_with_a_number_of_samples() -> None:
    clients = partition(toy(classes=6, each=20), LabelClusters(2, 3, samples=7), 4, probe=0)
    counts = clients.describe().counts
    assert counts is not None
    assert clients.sizes.tolist() == [7] * 4
    assert sorted(counts[0].tolist()) == [0, 0, 0, 2, 2, 3]
    assert sorted((counts[0] + counts[1]).tolist()) == [0, 0, 0, 4, 5, 5]
    few = partition(toy(classes=6, each=20), LabelClusters(2, 3, samples=1), 6, probe=0)
    assert (
        len({tuple(labels(few, c)) for c in range(3)}) == 3
    )  # the three clients of a cluster take turns


def test_power_law_clusters() -> None:
    clients = partition(toy(classes=7, each=60), PowerLawClusters(3, 3), 12, probe=0)
    assert [labels(clients, client) for client in (3, 7, 11)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert clients.sizes[:4].tolist() == power_law(180, 4).tolist()
    assert clients.sizes[8:].tolist() == power_law(60, 4).tolist()
    assert clients.groups is not None
    assert clients.groups.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert clients.test.sizes.tolist() == [15, 15, 5]
    assert labels_of_test(clients, 0) == [0, 1, 2]
    wide = partition(toy(classes=7), PowerLawClusters(2, 2), 2, probe=None)
    assert labels(wide, 1) == [2, 3, 4, 5, 6]  # the last takes all that remain


def tables(clients: Clients, data: Dataset) -> list[dict[int, int]]:
    """Original label -> label, for each group, from training and test rows; the first feature is
    the number of the sample.
    """
    assert clients.groups is not None
    found: list[dict[int, int]] = [{} for _ in range(int(clients.groups.max()) + 1)]
    for client, group in enumerate(clients.groups.tolist()):
        for x, y, rows, original in (
            (clients.x, clients.y, clients.train[client], data.y_train),
            (
                clients.x_test,
                clients.y_test,
                clients.test[int(clients.test_part_id[client])],
                data.y_test,
            ),
        ):
            for number, label in zip(x[rows][:, 0].long().tolist(), y[rows].tolist(), strict=True):
                assert found[group].setdefault(int(original[number]), label) == label
    return found


def test_label_swap() -> None:
    data = toy(classes=8)
    clients = partition(data, LabelSwap(clusters=4), 8, probe=None)
    swapped = [{k for k, v in table.items() if k != v} for table in tables(clients, data)]
    assert all(len(pair) == 2 for pair in swapped)
    assert set.union(*swapped) == set(range(8))
    assert clients.sizes.sum() == 72
    assert clients.test.sizes.tolist() == [40] * 4
    assert clients.test_sample_id.tolist() == list(range(40)) * 4
    assert clients.x.shape[0] == 72


def test_label_swap_where_pairs_cannot_be_disjoint() -> None:
    data = toy(classes=3)
    found = tables(partition(data, LabelSwap(clusters=3), 3, probe=None), data)
    assert len({frozenset(k for k, v in table.items() if k != v) for table in found}) == 3
    two = tables(
        partition(toy(classes=4), LabelSwap(clusters=3, swaps=2), 3, probe=None), toy(classes=4)
    )
    assert all(all(table[v] == k != v for k, v in table.items()) for table in two)
    assert len({tuple(sorted(t.items())) for t in two}) == 3


def test_label_permutation() -> None:
    data = toy(classes=3)
    found = tables(partition(data, LabelPermutation(clusters=6), 6, probe=None), data)
    assert len({tuple(sorted(table.items())) for table in found}) == 6
    assert all(sorted(t.values()) == [0, 1, 2] for t in found)


def test_the_labels_of_groups_do_not_depend_on_the_number_of_clients() -> None:
    data = toy(classes=8)
    assert tables(partition(data, LabelPermutation(3), 3, probe=None), data) == tables(
        partition(data, LabelPermutation(3), 9, probe=None), data
    )


def images(side: int = 4, dtype: type = np.uint8) -> Dataset:
    x: np.ndarray = (
        np.random.default_rng(0).integers(0, 255, (20, side, side)).astype(dtype)[:, None]
    )
    return dataset(x, np.arange(20) % 4, x[:5], np.arange(5) % 4)


def test_rotation_by_quarters_is_exact() -> None:
    data = images()
    clients = partition(data, Rotation(4), 4, probe=None)
    assert clients.x.dtype == torch.uint8
    for group in range(4):
        part = clients.x_test[clients.test[group]]
        np.testing.assert_array_equal(part.numpy(), np.rot90(data.x_test.numpy(), group, (2, 3)))
    assert clients.test_sample_id.tolist() == [0, 1, 2, 3, 4] * 4


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_rotation_by_other_angles(dtype: type) -> None:
    data = images(side=9, dtype=dtype)
    clients = partition(data, Rotation(8), 8, probe=None)
    part = clients.x_test[clients.test[1]].double().numpy()
    expected = ndimage.rotate(
        data.x_test.numpy().astype(np.float64), 45, axes=(3, 2), reshape=False, order=1
    )
    assert np.abs(part - expected).max() <= (0.51 if dtype is np.uint8 else 1e-3)
    assert clients.x.dtype == data.x_train.dtype


def test_both_ways_of_rotation_have_the_same_direction() -> None:
    image = np.arange(25.0).reshape(5, 5)
    np.testing.assert_allclose(
        ndimage.rotate(image, 90, axes=(-1, -2), reshape=False, order=1), np.rot90(image), atol=1e-6
    )


def test_schemes_with_groups_and_a_number_of_samples() -> None:
    for scheme in (LabelSwap(2, samples=3), LabelPermutation(2, samples=3), Rotation(2, samples=3)):
        clients = partition(images(), scheme, 5, probe=None)
        assert clients.sizes.tolist() == [3] * 5
        assert clients.x.shape[0] == 15
        assert clients.groups is not None
        assert clients.groups.tolist() == [0, 0, 0, 1, 1]


def test_quantity_skew() -> None:
    clients = partition(toy(each=100), QuantitySkew(0.3), 10, probe=None)
    assert clients.groups is not None
    assert clients.groups.tolist() == [0] * 10
    assert clients.sizes.sum() == 360
    assert clients.sizes.min() >= 1
    assert clients.sizes.max() > 3 * clients.sizes.median()
    assert partition(toy(), QuantitySkew(0.01), 36, probe=None).sizes.tolist() == [1] * 36


def test_classes_may_be_missing() -> None:
    y = np.array([2, 5, 9] * 20)
    data = dataset(
        np.zeros((60, 1, 2, 2), np.float32),
        y,
        np.zeros((6, 1, 2, 2), np.float32),
        [2, 5, 9, 2, 5, 3],
    )
    for scheme in (
        Pathological(3),
        LabelClusters(3, 1),
        PowerLawClusters(3, 1),
        LabelSwap(3),
        LabelPermutation(3),
        Dirichlet(),
    ):
        clients = partition(data, scheme, 6, probe=None)
        assert clients.classes == 10
        assert set(clients.y.tolist()) <= {2, 5, 9}


# own schemes and what is recorded


def test_every_scheme_has_a_name_and_records_its_settings() -> None:
    names = (
        "iid dirichlet pathological natural_id label_clusters power_law_clusters label_swap"
        " label_permutation rotation quantity_skew"
    )
    assert list(PARTITIONS) == [*names.split(), "feature_clusters", "flipped_id", "drift", "pfllib"]
    assert all(scheme.name == name for name, scheme in PARTITIONS.items())
    clients = partition(toy(), LabelClusters(2, 2), 4, seed=5, probe=None)
    settings = {"clusters": 2, "classes": 2, "overlap": 0, "shuffle": True, "reuse": False}
    assert clients.origin == {**settings, "seed": 5, "probe": 4}


class ByNumber:
    name: ClassVar[str] = "by_number"

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        return Split(train=np.array_split(np.arange(len(data.y_train)), clients))


def test_an_own_scheme_is_one_small_class() -> None:
    clients = partition(toy(), ByNumber(), 4, probe=0)
    assert clients.partition == "by_number"
    assert sorted(clients.train[1].tolist()) == list(range(10, 20))
    assert clients.groups is None
    assert clients.describe().test_sizes.tolist() == [5] * 4
    assert clients.origin == {"seed": 0, "probe": 0}


@dataclass(frozen=True)
class Answer:
    """A scheme that returns the given split."""

    given: Split
    name: ClassVar[str] = "answer"

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        return self.given


def test_an_own_scheme_may_return_lists_and_tensors() -> None:
    given = Split(
        [[0, 1], torch.tensor([2])], test=[[0]], test_part_id=[0, 0], groups=torch.tensor([1, 0])
    )  # type: ignore[arg-type, list-item]
    clients = partition(toy(), Answer(given), 2, probe=None)
    assert sorted(clients.train[0].tolist()) == [0, 1]
    assert clients.test_part_id.tolist() == [0, 0]
    assert clients.groups is not None
    assert clients.groups.tolist() == [1, 0]


def test_an_own_transform_in_any_order_of_groups() -> None:
    one = [np.array([i]) for i in range(4)]
    given = Split(
        one, groups=np.array([1, 0, 1, 0]), transform=lambda x, y, group: (x + 100 * group, y)
    )
    clients = partition(toy(), Answer(given), 4, probe=0)
    assert clients.x[clients.train.index][:, 0].tolist() == [100, 1, 102, 3]
    own = [
        clients.x_test[clients.test[int(part)]][:, 1].unique().tolist()
        for part in clients.test_part_id
    ]  # type: ignore[no-untyped-call]
    assert own == [[101], [1], [101], [1]]


def test_an_own_transform_gives_all_groups_the_same_kind_of_samples() -> None:
    given = Split(
        [np.array([0]), np.array([1])],
        groups=np.array([3, 5]),
        transform=lambda x, y, group: (x.to(torch.int64) if group > 3 else x, y),
    )
    with pytest.raises(InvalidInputError) as caught:
        partition(toy(), Answer(given), 2, probe=None)
    assert caught.value.field == "group 5"
    assert all(name in str(caught.value) for name in ("inputs", "int64", "group 3", "float32"))


def rows(*parts: list[int]) -> list[np.ndarray]:
    return [np.array(part, np.int64) for part in parts]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (Split(rows([0], [1], [2])), "3 train parts for 2 clients"),
        (Split(rows([0], [])), "client 1"),
        (Split(rows([0], [40])), "0 … 39"),
        (Split(rows([0], [-1])), "0 … 39"),
        (Split(rows([0], [1, 1])), "twice"),
        (Split(rows([0], [1]), test=rows([0], [20])), "0 … 19"),
        (Split(rows([0], [1]), test=rows([0])), "1 test parts for 2 clients"),
        (
            Split(rows([0], [1]), test=rows([0]), test_part_id=np.array([0, 1])),
            "test_part_id",
        ),
        (Split(rows([0], [1]), held_out=rows([2])), "1 held_out parts for 2 test parts"),
        (Split(rows([0], [1]), held_out=rows([2], [0])), "held_out"),
        (Split(rows([0], [1]), groups=np.array([0])), "1 groups for 2 clients"),
        (Split(rows([0], [1]), transform=lambda x, y, g: (x, y)), "transform"),
    ],
)
def test_the_split_of_an_own_scheme_is_checked(given: Split, problem: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        partition(toy(), Answer(given), 2, probe=0)
    assert caught.value.field == "Answer.split"
    assert problem in str(caught.value)


# describe


def test_describe_counts() -> None:
    clients = from_arrays(
        [(np.zeros((3, 1)), [0, 2, 2]), (np.zeros((1, 1)), [1], np.zeros((2, 1)), [0, 0])],
        groups=[4, 5],
    )
    described = clients.describe()
    assert described.counts is not None
    assert described.counts.dtype == torch.int64
    assert described.counts.tolist() == [[1, 0, 2], [0, 1, 0]]
    assert described.sizes.tolist() == [3, 1]
    assert described.test_sizes.tolist() == [0, 2]
    assert str(described).splitlines() == [
        "client  group  train  test  y=0  y=1  y=2",
        "     0      4      3     0    1    .    2",
        "     1      5      1     2    .    1    .",
        "2 clients, 2 groups; train min 1, median 2, max 3; test min 0, median 1, max 2",
    ]


def test_describe_is_short() -> None:
    lines = str(partition(load("digits"), Iid(), 50, probe=None).describe()).splitlines()
    assert len(lines) == 23
    assert lines[21] == "… and 30 more"
    assert lines[22].startswith("50 clients, 1 group; train min 25, median 26, max 26; test min 7")
    many = str(partition(toy(classes=30), Dirichlet(), 3, probe=None).describe()).splitlines()
    assert many[0].split() == ["client", "train", "test", "classes"]
    assert "groups not known" in many[-1]
    assert "y=" not in str(
        partition(dataset(np.zeros((9, 1)), np.zeros(9)), Iid(), 3, probe=None).describe()
    )


def test_only_keeps_the_data_of_the_chosen_clients(digits: Clients) -> None:
    some = digits.only([3, 1])
    assert len(some) == 2
    for place, client in enumerate((3, 1)):
        for params, theirs in zip(some.arrays(place), digits.arrays(client), strict=True):
            assert torch.equal(params, theirs)
    assert len(some.x) == int(some.sizes.sum())
    assert torch.equal(some.groups, digits.groups[torch.tensor([3, 1])])
