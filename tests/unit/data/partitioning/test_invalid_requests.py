"""Requests that cannot be met: the message names the field, the value and what to ask for, and what
it asks for then works.
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


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(InvalidInputError) as caught:
        call()
    return str(caught.value)


WHOLE, POSITIVE = "must be a whole number of at least 1.", "must be a number above 0 (and finite)."


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Dirichlet(0), f"partition.alpha = 0: {POSITIVE}"),
        (lambda: Dirichlet(-0.5), f"partition.alpha = -0.5: {POSITIVE}"),
        (lambda: Dirichlet(float("nan")), f"partition.alpha = nan: {POSITIVE}"),
        (lambda: Dirichlet(float("inf")), f"partition.alpha = inf: {POSITIVE}"),
        (lambda: Dirichlet("0.5"), f"partition.alpha = '0.5': {POSITIVE}"),  # type: ignore[arg-type]
        (lambda: Dirichlet(min_size=0), f"partition.min_size = 0: {WHOLE}"),
        (lambda: QuantitySkew(0.0), f"partition.alpha = 0.0: {POSITIVE}"),
        (lambda: Pathological(0), f"partition.classes_per_client = 0: {WHOLE}"),
        (lambda: Pathological(1.5), f"partition.classes_per_client = 1.5: {WHOLE}"),  # type: ignore[arg-type]
        (lambda: Pathological(True), f"partition.classes_per_client = True: {WHOLE}"),
        (lambda: NaturalId(""), "partition.key = '': must be the name of a key of the data set."),
        (lambda: NaturalId(test_fraction=0.0), f"partition.test_fraction = 0.0: {POSITIVE}"),
        (lambda: NaturalId(test_fraction=1.0), "partition.test_fraction = 1.0: must be below 1."),
        (lambda: LabelClusters(0), f"partition.clusters = 0: {WHOLE}"),
        (lambda: LabelClusters(classes=-1), f"partition.classes = -1: {WHOLE}"),
        (
            lambda: LabelClusters(overlap=-1),
            "partition.overlap = -1: must be a whole number of at least 0.",
        ),
        (
            lambda: LabelClusters(classes=3, overlap=2),
            "partition.overlap = 2: must be at most half of classes = 3.",
        ),
        (
            lambda: LabelClusters(2, 2, 1),
            "partition.clusters = 2: with an overlap there must be 3 or more.",
        ),
        (lambda: LabelClusters(samples=0), f"partition.samples = 0: {WHOLE}"),
        (lambda: PowerLawClusters(0), f"partition.clusters = 0: {WHOLE}"),
        (lambda: PowerLawClusters(classes=0), f"partition.classes = 0: {WHOLE}"),
        (lambda: LabelSwap(0), f"partition.clusters = 0: {WHOLE}"),
        (lambda: LabelSwap(swaps=0), f"partition.swaps = 0: {WHOLE}"),
        (lambda: LabelSwap(samples=-3), f"partition.samples = -3: {WHOLE}"),
        (lambda: LabelPermutation(-1), f"partition.clusters = -1: {WHOLE}"),
        (lambda: LabelPermutation(samples=0), f"partition.samples = 0: {WHOLE}"),
        (lambda: Rotation(0), f"partition.clusters = 0: {WHOLE}"),
        (lambda: Rotation(samples=0), f"partition.samples = 0: {WHOLE}"),
    ],
)
def test_fields(make: Callable[[], Scheme], message: str) -> None:
    assert message_of(make) == message


@pytest.mark.parametrize(
    ("scheme", "clients", "message"),
    [
        (Iid(), 0, f"partition.clients = 0: {WHOLE}"),
        (Iid(), -4, f"partition.clients = -4: {WHOLE}"),
        (Iid(), 2.0, f"partition.clients = 2.0: {WHOLE}"),
        (
            Iid(),
            37,
            (
                "partition.clients = 37: there are 36 training samples (40 less 4 probe samples);"
                " ask for at most 36 clients."
            ),
        ),
        (
            Dirichlet(min_size=4),
            10,
            (
                "partition.min_size = 4: there are 36 training samples besides the probe for 10"
                " clients; ask for at most 3."
            ),
        ),
        (
            Pathological(5),
            4,
            "partition.classes_per_client = 5: there are 4 classes; ask for at most 4.",
        ),
        (
            NaturalId(),
            11,
            "partition.clients = 11: there are 10 different ids in 'writer'; ask for at most 10.",
        ),
        (
            NaturalId("author"),
            3,
            (
                "partition.key = 'author': data set 'toy' has no whole numbers or text author_train"
                " beside its samples (it has writer)."
            ),
        ),
        (
            LabelClusters(3, 2),
            6,
            (
                "partition.clusters = 3: 3 clusters of 2 classes with an overlap of 0 need 6"
                " classes and there are 4; ask for at most 2 clusters or fewer classes."
            ),
        ),
        (
            LabelClusters(3, 3, 1),
            6,
            (
                "partition.clusters = 3: 3 clusters of 3 classes with an overlap of 1 need 6"
                " classes and there are 4; ask for fewer classes."
            ),
        ),
        (
            LabelClusters(2, 2),
            1,
            (
                "partition.clusters = 2: there are 1 clients; ask for at most 1 clusters or at"
                " least 2 clients."
            ),
        ),
        (
            PowerLawClusters(3, 2),
            6,
            (
                "partition.clusters = 3: 4 classes are too few for these clusters of 2; ask for at"
                " most 2 clusters or fewer classes."
            ),
        ),
        (
            PowerLawClusters(2, 2),
            1,
            (
                "partition.clusters = 2: there are 1 clients; ask for at most 1 clusters or at"
                " least 2 clients."
            ),
        ),
        (
            LabelSwap(8),
            4,
            (
                "partition.clusters = 8: 4 classes allow no more than 6 different relabellings; ask"
                " for at most 6."
            ),
        ),
        (
            LabelSwap(5),
            4,
            (
                "partition.clusters = 5: there are 4 clients; ask for at most 4 clusters or at"
                " least 5 clients."
            ),
        ),
        (LabelSwap(2, swaps=3), 4, "partition.swaps = 3: there are 4 classes; ask for at most 2."),
        (
            LabelPermutation(25),
            4,
            (
                "partition.clusters = 25: 4 classes allow no more than 24 different relabellings;"
                " ask for at most 24."
            ),
        ),
        (
            LabelSwap(2, samples=10),
            4,
            (
                "partition.samples = 10: 4 clients would need 40 training samples and there are 36"
                " besides the probe; ask for at most 9 samples, or at most 3 clients."
            ),
        ),
    ],
)
def test_requests(scheme: Scheme, clients: int, message: str) -> None:
    assert message_of(lambda: partition(toy(), scheme, clients)) == message


def test_more_clients_than_digits() -> None:
    digits = load("digits")
    assert (
        message_of(lambda: partition(digits, Iid(), 5000))
        == "partition.clients = 5000: there are 1295 training samples (1438 less 143 probe"
        " samples); ask for at most 1295 clients."
    )
    many = message_of(lambda: partition(digits, Pathological(12), 10))
    assert many == "partition.classes_per_client = 12: there are 10 classes; ask for at most 10."


def test_seed_probe_and_wrong_things() -> None:
    assert (
        message_of(lambda: partition(toy(), Iid(), 4, seed=-1))
        == "partition.seed = -1: must be a whole number of at least 0."
    )
    assert (
        message_of(lambda: partition(toy(), Iid(), 4, probe=-1))
        == "partition.probe = -1: must be a whole number of at least 0."
    )
    assert (
        message_of(lambda: partition(toy(), Iid(), 4, probe=40))
        == "partition.probe = 40: there are 40 training samples; ask for at most 36."
    )
    assert "the scheme must be an object such as Iid()" in message_of(
        lambda: partition(toy(), "iid", 4)
    )  # type: ignore[arg-type]
    assert "not the class Iid." in message_of(lambda: partition(toy(), Iid, 4))  # type: ignore[arg-type]
    assert "must be a Dataset (from load or dataset), not str" in message_of(
        lambda: partition("digits", Iid(), 4)
    )  # type: ignore[arg-type]


def test_a_data_set_without_keys() -> None:
    assert "(it has none)" in message_of(lambda: partition(load("digits"), NaturalId(), 4))


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
    assert (
        message_of(lambda: partition(data, scheme, 4))
        == f"partition.name = {scheme.name!r}: needs class labels, and the targets of 'prices' are"
        " floats. Store labels as integers, or use iid, quantity_skew, natural_id or rotation."
    )


@pytest.mark.parametrize(
    "x", [np.zeros((40, 2)), np.zeros((40, 4, 5), np.uint8), np.zeros((40, 4, 4), int)]
)
def test_rotation_of_what_is_no_square_image(x: np.ndarray) -> None:
    message = message_of(
        lambda: partition(dataset(x, np.zeros(40, int), name="toy"), Rotation(), 4)
    )
    assert message.startswith(
        "partition.name = 'rotation': turns square images, and the inputs of 'toy' have shape ("
    )
    assert message.endswith("or use label_swap.")


SCARCE = toy((3, 50, 50, 50))


@pytest.mark.parametrize(
    ("scheme", "clients", "start"),
    [
        (
            Pathological(1),
            40,
            (
                "partition.clients = 40: with 1 classes each, class 0 has 10 owners and 3 training"
                " samples besides the probe"
            ),
        ),
        (Pathological(3), 60, "partition.clients = 60: with 3 classes each, class "),
        (LabelClusters(4, 1), 40, "partition.clients = 40: cluster "),
        (LabelClusters(4, 2, 1), 150, "partition.clients = 150: cluster "),
        (
            PowerLawClusters(4, 1),
            40,
            (
                "partition.clients = 40: cluster 0 has 10 clients and 3 training samples besides"
                " the probe"
            ),
        ),
    ],
)
def test_what_the_message_asks_for_works(scheme: Scheme, clients: int, start: str) -> None:
    message = message_of(lambda: partition(SCARCE, scheme, clients, probe=0))
    assert message.startswith(start)
    asked = re.search(r"ask for at most (\d+) clients\.$", message)
    assert asked is not None
    most = int(asked[1])
    assert 1 <= most < clients
    assert partition(SCARCE, scheme, most, probe=0).sizes.min() >= 1


@pytest.mark.parametrize(
    ("classes", "overlap", "clients"), [(2, 0, 20), (3, 1, 20), (3, 0, 17), (2, 1, 13)]
)
def test_the_samples_a_message_asks_for_are_there(classes: int, overlap: int, clients: int) -> None:
    digits = load("digits")

    def make(samples: int) -> LabelClusters:
        return LabelClusters(3, classes, overlap, samples)

    message = message_of(lambda: partition(digits, make(400), clients))
    asked = re.search(
        r"^partition.samples = 400: cluster \d needs \d+ training samples of class \d for its \d"
        r" clients and has \d+; "
        r"ask for at most (\d+) samples or fewer clients\.$",
        message,
    )
    assert asked is not None
    assert (partition(digits, make(int(asked[1])), clients).sizes == int(asked[1])).all()
    message_of(lambda: partition(digits, make(int(asked[1]) + classes), clients))


def test_samples_where_even_one_is_too_many() -> None:
    message = message_of(
        lambda: partition(toy((2, 30, 30, 30)), LabelClusters(2, 2, samples=30), 10, probe=0)
    )
    assert message.endswith("ask for fewer clients.")
