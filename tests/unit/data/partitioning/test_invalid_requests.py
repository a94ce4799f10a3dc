"""Partitions that are not possible: the error has the field, the value and a possible value, which
then works.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

from fedclade.data import (
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
    load,
    partition,
)
from fedclade.errors import InvalidInputError


def toy(counts: tuple[int, ...] = (10, 10, 10, 10)) -> Dataset:
    y = np.repeat(np.arange(len(counts)), counts)
    return dataset(
        np.zeros((len(y), 2), np.float32),
        y,
        np.zeros((4, 2), np.float32),
        [0, 1, 2, 3],
        name="toy",
        writer=np.arange(len(y)) // 4,
    )


def error_of(call: Callable[[], object]) -> InvalidInputError:
    with pytest.raises(InvalidInputError) as caught:
        call()
    return caught.value


def numbers_of(error: InvalidInputError) -> list[float]:
    return [float(number) for number in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", str(error))]


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (lambda: Dirichlet(0), "alpha", 0),
        (lambda: Dirichlet(-0.5), "alpha", -0.5),
        (lambda: Dirichlet(float("nan")), "alpha", float("nan")),
        (lambda: Dirichlet(float("inf")), "alpha", float("inf")),
        (lambda: Dirichlet("0.5"), "alpha", "0.5"),  # type: ignore[arg-type]
        (lambda: Dirichlet(min_size=0), "min_size", 0),
        (lambda: Dirichlet(balanced=1), "balanced", 1),  # type: ignore[arg-type]
        (lambda: QuantitySkew(0.0), "alpha", 0.0),
        (lambda: Pathological(0), "classes_per_client", 0),
        (lambda: Pathological(1.5), "classes_per_client", 1.5),  # type: ignore[arg-type]
        (lambda: Pathological(True), "classes_per_client", True),
        (lambda: NaturalId(""), "key", ""),
        (lambda: NaturalId(test_fraction=0.0), "test_fraction", 0.0),
        (lambda: NaturalId(test_fraction=1.0), "test_fraction", 1.0),
        (lambda: LabelClusters(0), "clusters", 0),
        (lambda: LabelClusters(classes=-1), "classes", -1),
        (lambda: LabelClusters(overlap=-1), "overlap", -1),
        (lambda: LabelClusters(classes=3, overlap=2), "overlap", 2),
        (lambda: LabelClusters(2, 2, 1), "clusters", 2),
        (lambda: LabelClusters(samples=0), "samples", 0),
        (lambda: PowerLawClusters(0), "clusters", 0),
        (lambda: PowerLawClusters(classes=0), "classes", 0),
        (lambda: LabelSwap(0), "clusters", 0),
        (lambda: LabelSwap(swaps=0), "swaps", 0),
        (lambda: LabelSwap(samples=-3), "samples", -3),
        (lambda: LabelPermutation(-1), "clusters", -1),
        (lambda: LabelPermutation(samples=0), "samples", 0),
        (lambda: Rotation(0), "clusters", 0),
        (lambda: Rotation(samples=0), "samples", 0),
    ],
)
def test_a_scheme_with_an_invalid_field(
    make: Callable[[], Scheme], field: str, value: object
) -> None:
    error = error_of(make)
    assert error.field == f"partition.{field}"
    assert str(error).startswith(f"partition.{field} = {value!r}: ")


@pytest.mark.parametrize(
    ("scheme", "clients", "field", "numbers"),
    [
        (Iid(), 0, "clients", [0, 1]),
        (Iid(), -4, "clients", [-4, 1]),
        (Iid(), 2.0, "clients", [2, 1]),
        # 40 training samples, 4 of them for the probe
        (Iid(), 37, "clients", [37, 36, 40, 4, 36]),
        (Dirichlet(min_size=4), 10, "min_size", [4, 36, 10, 3]),
        (Pathological(5), 4, "classes_per_client", [5, 4, 4]),
        (NaturalId(), 11, "clients", [11, 10, 10]),
        # clusters, and the classes that they need and that there are; how many are possible
        (LabelClusters(3, 2), 6, "clusters", [3, 3, 2, 0, 6, 4, 2]),
        (LabelClusters(3, 3, 1), 6, "clusters", [3, 3, 3, 1, 6, 4]),
        (LabelClusters(2, 2), 1, "clusters", [2, 1, 1, 2]),
        (PowerLawClusters(3, 2), 6, "clusters", [3, 4, 2, 2]),
        (PowerLawClusters(2, 2), 1, "clusters", [2, 1, 1, 2]),
        (LabelSwap(8), 4, "clusters", [8, 4, 6, 6]),
        (LabelSwap(5), 4, "clusters", [5, 4, 4, 5]),
        (LabelSwap(2, swaps=3), 4, "swaps", [3, 4, 2]),
        (LabelPermutation(25), 4, "clusters", [25, 4, 24, 24]),
        (LabelSwap(2, samples=10), 4, "samples", [10, 4, 40, 36, 9, 3]),
    ],
)
def test_a_partition_that_is_not_possible(
    scheme: Scheme, clients: int, field: str, numbers: list[float]
) -> None:
    error = error_of(lambda: partition(toy(), scheme, clients, probe=None))
    assert error.field == f"partition.{field}"
    assert numbers_of(error) == numbers


def test_more_clients_than_digits() -> None:
    digits = load("digits")
    error = error_of(lambda: partition(digits, Iid(), 5000, probe=None))
    assert error.field == "partition.clients"
    assert numbers_of(error) == [5000, 1295, 1438, 143, 1295]
    error = error_of(lambda: partition(digits, Pathological(12), 10, probe=None))
    assert error.field == "partition.classes_per_client"
    assert numbers_of(error) == [12, 10, 10]


def test_seed_probe_and_arguments_of_the_wrong_type() -> None:
    error = error_of(lambda: partition(toy(), Iid(), 4, seed=-1, probe=None))
    assert (error.field, numbers_of(error)) == ("partition.seed", [-1, 0])
    error = error_of(lambda: partition(toy(), Iid(), 4, probe=-1))
    assert (error.field, numbers_of(error)) == ("partition.probe", [-1, 0])
    error = error_of(lambda: partition(toy(), Iid(), 4, probe=40))
    assert (error.field, numbers_of(error)) == ("partition.probe", [40, 40, 36])
    error = error_of(lambda: partition(toy(), "iid", 4, probe=None))  # type: ignore[arg-type]
    assert error.field == "scheme"
    assert "'iid'" in str(error)
    error = error_of(lambda: partition(toy(), Iid, 4, probe=None))  # type: ignore[arg-type]
    assert error.field == "scheme"
    assert "class Iid" in str(error)
    error = error_of(lambda: partition("digits", Iid(), 4, probe=None))  # type: ignore[arg-type]
    assert error.field == "dataset"
    assert "str" in str(error)


def test_a_key_that_the_data_set_does_not_have() -> None:
    error = error_of(lambda: partition(toy(), NaturalId("author"), 3, probe=None))
    assert error.field == "partition.key"
    assert all(name in str(error) for name in ("'author'", "'toy'", "author_train", "writer"))
    error = error_of(lambda: partition(load("digits"), NaturalId(), 4, probe=None))
    assert error.field == "partition.key"
    assert "'digits'" in str(error)


@pytest.mark.parametrize(
    "scheme",
    [
        Dirichlet(),
        Pathological(),
        LabelClusters(),
        PowerLawClusters(),
        LabelSwap(),
        LabelPermutation(),
    ],
    ids=lambda s: s.name,
)
def test_schemes_that_need_labels(scheme: Scheme) -> None:
    data = dataset(np.zeros((40, 2)), np.zeros(40), name="prices")
    error = error_of(lambda: partition(data, scheme, 4, probe=None))
    assert error.field == "partition.name"
    names = (repr(scheme.name), "'prices'", "iid", "quantity_skew", "natural_id", "rotation")
    assert all(name in str(error) for name in names)


@pytest.mark.parametrize(
    "x", [np.zeros((40, 2)), np.zeros((40, 4, 5), np.uint8), np.zeros((40, 4, 4), int)]
)
def test_rotation_of_inputs_that_are_not_square_images(x: np.ndarray) -> None:
    data = dataset(x, np.zeros(40, int), name="toy")
    error = error_of(lambda: partition(data, Rotation(), 4, probe=None))
    assert error.field == "partition.name"
    shape = tuple(data.x_train.shape[1:])
    assert all(text in str(error) for text in ("'rotation'", "'toy'", str(shape), "label_swap"))


SCARCE = toy((3, 50, 50, 50))


@pytest.mark.parametrize(
    ("scheme", "clients", "numbers"),
    [
        # Class 0 has 3 samples for 10 of 40 clients.
        (Pathological(1), 40, [40, 1, 10, 0, 3]),
        (Pathological(3), 60, [60, 3]),
        (LabelClusters(4, 1), 40, [40]),
        (LabelClusters(4, 2, 1), 150, [150]),
        # Cluster 0 has 10 clients and 3 samples.
        (PowerLawClusters(4, 1), 40, [40, 0, 10, 3]),
    ],
)
def test_the_number_of_clients_in_the_message_works(
    scheme: Scheme, clients: int, numbers: list[float]
) -> None:
    error = error_of(lambda: partition(SCARCE, scheme, clients, probe=0))
    assert error.field == "partition.clients"
    assert numbers_of(error)[: len(numbers)] == numbers
    most = int(numbers_of(error)[-1])
    assert 1 <= most < clients
    assert partition(SCARCE, scheme, most, probe=0).sizes.min() >= 1


@pytest.mark.parametrize(
    ("classes", "overlap", "clients"), [(2, 0, 20), (3, 1, 20), (3, 0, 17), (2, 1, 13)]
)
def test_the_number_of_samples_in_the_message_works(
    classes: int, overlap: int, clients: int
) -> None:
    digits = load("digits")

    def make(samples: int) -> LabelClusters:
        return LabelClusters(3, classes, overlap, samples)

    error = error_of(lambda: partition(digits, make(400), clients, probe=None))
    assert error.field == "partition.samples"
    samples, cluster, needed, _, members, available, most = map(int, numbers_of(error))
    assert samples == 400
    assert cluster < 3
    assert members <= clients
    assert needed > available
    assert (partition(digits, make(most), clients, probe=None).sizes == most).all()
    error_of(lambda: partition(digits, make(most + classes), clients, probe=None))


def test_where_no_number_of_samples_works_the_message_has_none() -> None:
    data = toy((2, 30, 30, 30))
    error = error_of(lambda: partition(data, LabelClusters(2, 2, samples=30), 10, probe=0))
    assert error.field == "partition.samples"
    assert len(numbers_of(error)) == 6  # without a possible number
