"""What holds for every scheme, whatever the data, the number of clients and the seed."""

from __future__ import annotations

import re

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedclade.data import (
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
    Scheme,
    dataset,
    partition,
)
from fedclade.errors import InvalidInputError

TEST = 1000  # test samples are numbered from here, so that a sample can be told from its pixels


@st.composite
def data_sets(draw: st.DrawFn) -> Dataset:
    """Images whose corner pixel is the number of the sample: turning them by quarters keeps the
    sum.
    """
    counts = draw(st.lists(st.integers(6, 20), min_size=2, max_size=7))
    test_counts = draw(st.lists(st.integers(0, 6), min_size=len(counts), max_size=len(counts)))
    order = np.random.default_rng(draw(st.integers(0, 3)))
    y, y_test = (
        order.permutation(np.repeat(np.arange(len(c)), c))
        for c in (counts, [*test_counts[:-1], test_counts[-1] + 1])
    )
    x, x_test = (
        np.zeros((len(y), 1, 2, 2), np.float32),
        np.zeros((len(y_test), 1, 2, 2), np.float32),
    )
    x[:, 0, 0, 0], x_test[:, 0, 0, 0] = np.arange(len(y)), TEST + np.arange(len(y_test))
    return dataset(x, y, x_test, y_test, writer=(np.arange(len(y)) % 9, np.arange(len(y_test)) % 4))


maybe_samples = st.none() | st.integers(1, 5)
label_clusters = st.one_of(
    st.builds(LabelClusters, st.integers(1, 4), st.integers(1, 3), samples=maybe_samples),
    st.builds(
        LabelClusters,
        st.integers(3, 4),
        st.integers(2, 3),
        overlap=st.just(1),
        samples=maybe_samples,
    ),
)
planted = st.one_of(
    st.builds(LabelSwap, st.integers(1, 5), st.integers(1, 2), maybe_samples),
    st.builds(LabelPermutation, st.integers(1, 5), maybe_samples),
    st.builds(Rotation, st.sampled_from([1, 2, 4]), maybe_samples),
)
followed = st.one_of(
    st.just(Iid()),
    st.builds(Dirichlet, st.sampled_from([1e-3, 0.1, 1.0, 100.0]), st.integers(1, 3)),
    st.builds(Pathological, st.integers(1, 4)),
    st.builds(QuantitySkew, st.sampled_from([1e-3, 0.1, 1.0, 100.0])),
)
clustered = st.one_of(
    label_clusters, st.builds(PowerLawClusters, st.integers(1, 3), st.integers(1, 3))
)
natural = st.builds(NaturalId, test_fraction=st.sampled_from([0.01, 0.2, 0.99]))
schemes: st.SearchStrategy[Scheme] = st.one_of(followed, clustered, planted, natural)
numbers_of_clients, seeds = st.integers(1, 25), st.integers(0, 2**40)


def try_to(data: Dataset, scheme: Scheme, clients: int, seed: int) -> Clients | None:
    """The clients, or None where the request cannot be met and the message says what to change."""
    try:
        return partition(data, scheme, clients, seed)
    except InvalidInputError as error:
        message = str(error)
    assert re.match(r"partition\.\w+ = \w+: .*ask for (at most|fewer)", message), message
    return None


def numbers(x: torch.Tensor) -> list[int]:
    return x.flatten(1).sum(1).long().tolist()


def original_labels(data: Dataset, samples: list[int]) -> list[int]:
    return [int(data.y_test[n - TEST] if n >= TEST else data.y_train[n]) for n in samples]


def test_part(clients: Clients, client: int) -> torch.Tensor:
    part = int(clients.test_part_id[client])
    return clients.test[part] if part >= 0 else torch.empty(0, dtype=torch.int64)


test_part.__test__ = False  # type: ignore[attr-defined]


@given(data_sets(), schemes, numbers_of_clients, seeds)
@settings(max_examples=400, deadline=None)
def test_every_partition(data: Dataset, scheme: Scheme, number: int, seed: int) -> None:
    clients = try_to(data, scheme, number, seed)
    if clients is None:
        return
    described = clients.describe()
    assert len(clients) == number == len(clients.test_part_id)
    assert clients.sizes.min() >= 1
    assert clients.groups is None or len(clients.groups) == number
    assert described.counts is not None
    assert torch.equal(described.counts.sum(1), clients.sizes)

    train = numbers(clients.x[clients.train.index])
    assert len(set(train)) == len(train), "no sample belongs to two clients"
    test = set(numbers(clients.x_test))
    assert set(train).isdisjoint(test)
    assert clients.probe is not None
    assert len(clients.probe) == len(data.y_train) // 10
    assert set(numbers(clients.probe)).isdisjoint(set(train) | test)

    for client in range(number):
        rows, test_rows = clients.train[client], test_part(clients, client)
        tested = numbers(clients.x_test[test_rows])
        assert len(set(tested)) == len(tested), "no test sample counts twice for a client"
        held, seen = set(clients.y[rows].tolist()), set(clients.y_test[test_rows].tolist())
        if scheme.name in ("iid", "dirichlet", "pathological", "quantity_skew"):
            assert seen <= held
        assert described.test_sizes[client] == len(test_rows)
    assert len(clients.test_sample_id) == len(clients.x_test)
    assert clients.test_part_id.min() >= -1
    assert clients.test_part_id.max() < len(clients.test)
    assert (clients.test.sizes > 0).all()
    if scheme.name != "natural_id":
        assert (
            torch.tensor(numbers(clients.x_test)) - TEST
        ).tolist() == clients.test_sample_id.tolist()


@given(data_sets(), planted, numbers_of_clients, seeds)
@settings(max_examples=150, deadline=None)
def test_training_and_test_part_see_the_same_transformation(
    data: Dataset, scheme: Scheme, number: int, seed: int
) -> None:
    clients = try_to(data, scheme, number, seed)
    if clients is None:
        return
    assert clients.groups is not None
    tables: dict[int, dict[int, int]] = {}
    corners: dict[int, set[int]] = {}
    for client, group in enumerate(clients.groups.tolist()):
        for x, y, rows in (
            (clients.x, clients.y, clients.train[client]),
            (clients.x_test, clients.y_test, test_part(clients, client)),
        ):
            samples = numbers(x[rows])
            for original, label in zip(
                original_labels(data, samples), y[rows].tolist(), strict=True
            ):
                assert tables.setdefault(group, {}).setdefault(original, label) == label
            corners.setdefault(group, set()).update(
                x[rows][torch.tensor(samples) > 0].flatten(1).argmax(1).tolist()
            )
        assert len(test_part(clients, client)) == len(data.y_test)
    for group, table in tables.items():
        assert len(set(table.values())) == len(table)
        if scheme.name == "rotation":
            assert all(k == v for k, v in table.items())
            assert len(corners[group]) <= 1
        else:
            assert corners[group] <= {0}
    assert len(clients.x) == clients.sizes.sum()
    assert len(clients.x_test) == len(data.y_test) * len(set(clients.groups.tolist()))


@given(data_sets(), clustered, numbers_of_clients, seeds)
@settings(max_examples=150, deadline=None)
def test_clusters_are_made_of_classes(
    data: Dataset, scheme: LabelClusters | PowerLawClusters, number: int, seed: int
) -> None:
    clients = try_to(data, scheme, number, seed)
    if clients is None:
        return
    assert clients.groups is not None
    assert sorted(set(clients.groups.tolist())) == list(range(scheme.clusters))
    sizes = clients.groups.bincount()
    assert sizes.max() - sizes.min() <= 1
    own: list[set[int]] = [set() for _ in sizes]
    for client, group in enumerate(clients.groups.tolist()):
        own[group].update(clients.y[clients.train[client]].tolist())
    if isinstance(scheme, LabelClusters):
        assert all(len(classes) <= scheme.classes for classes in own)
        if scheme.samples is not None:
            assert (clients.sizes == scheme.samples).all()
        elif scheme.overlap == 0:
            for g in range(scheme.clusters):
                within = clients.sizes[clients.groups == g]
                assert within.max() - within.min() <= 1
    for client, group in enumerate(clients.groups.tolist()):
        tested = clients.y_test[test_part(clients, client)].tolist()
        seen = set(tested)
        assert len(tested) == sum(label in seen for label in data.y_test.tolist()), (
            "all test samples of these classes"
        )
        if not isinstance(scheme, LabelClusters) or scheme.samples is None:
            assert seen <= own[group]


@given(data_sets(), schemes, numbers_of_clients, seeds)
@settings(max_examples=100, deadline=None)
def test_the_seed_decides_everything(data: Dataset, scheme: Scheme, number: int, seed: int) -> None:
    first, again, other = (try_to(data, scheme, number, s) for s in (seed, seed, seed + 1))
    if first is None or again is None:
        assert first is again
        return
    for name in ("x", "y", "x_test", "y_test", "test_part_id", "test_sample_id", "probe"):
        assert getattr(first, name).numpy().tobytes() == getattr(again, name).numpy().tobytes()
    for a, b in ((first.train, again.train), (first.test, again.test)):
        assert torch.equal(a.index, b.index)
        assert torch.equal(a.offsets, b.offsets)
    if (
        other is not None
        and len(data.y_train) >= 30
        and first.probe is not None
        and other.probe is not None
    ):
        drawn = [
            (numbers(c.probe), numbers(c.x[c.train.index]))
            for c in (first, other)
            if c.probe is not None
        ]
        assert drawn[0] != drawn[1]


@given(data_sets(), followed, numbers_of_clients, seeds)
@settings(max_examples=100, deadline=None)
def test_followed_test_parts_have_the_right_size(
    data: Dataset, scheme: Scheme, number: int, seed: int
) -> None:
    clients = try_to(data, scheme, number, seed)
    if clients is None:
        return
    pool = len(data.y_train) - len(data.y_train) // 10
    described = clients.describe()
    assert described.counts is not None
    available = data.y_test.bincount(minlength=described.counts.shape[1])
    for client, size in enumerate(described.test_sizes.tolist()):
        wanted = max(1, round(int(clients.sizes[client]) * len(data.y_test) / pool))
        testable = available[described.counts[client] > 0]
        assert size <= wanted
        assert (size >= 1) == bool((testable > 0).any())
        if (testable >= wanted).all():
            assert size == wanted


@given(data_sets(), schemes, st.integers(20, 200), seeds)
@settings(max_examples=150, deadline=None)
def test_advice_on_the_number_of_clients_works(
    data: Dataset, scheme: Scheme, number: int, seed: int
) -> None:
    for _ in range(3):
        try:
            partition(data, scheme, number, seed)
            return
        except InvalidInputError as error:
            message = str(error)
        advice = re.match(r"partition\.clients = \d+: .*ask for at most (\d+)", message)
        if advice is None:
            return
        assert 1 <= int(advice[1]) < number, message
        number = int(advice[1])
    raise AssertionError("three times the advice was wrong")
