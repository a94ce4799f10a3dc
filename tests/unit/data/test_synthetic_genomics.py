"""Synthetic genomic reads, and clients whose labels are reversed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedclade as fc
from fedclade.data import Dataset, FlippedId, NaturalId, dataset, genomic, load, partition
from fedclade.data.synthetic_genomics import _frequencies, _reads
from fedclade.errors import InvalidInputError


def kmers_of(*parts: torch.Tensor) -> list[np.ndarray]:
    """Numbers of the k-mers, the same code the same number in all parts."""
    codes = np.concatenate(
        [np.packbits(part.numpy() > 0, axis=-1).reshape(-1, 8) for part in parts]
    )
    numbers = np.unique(codes, axis=0, return_inverse=True)[1].reshape(-1, 30)
    return np.split(numbers, np.cumsum([len(part) for part in parts])[:-1])


def test_shapes_types_and_populations() -> None:
    data = genomic(populations=3, reads=40)
    assert (data.x_train.shape, data.x_test.shape) == ((120, 30, 64), (30, 30, 64))
    assert (data.y_train.shape, data.y_test.shape) == ((120, 30), (30, 30))
    assert data.x_train.dtype == torch.uint8
    assert data.x_train.unique().tolist() == [0, 255]
    assert data.classes == 2
    population, test_population = data.keys["population"]
    assert population.bincount().tolist() == [40, 40, 40]
    assert test_population is not None
    assert test_population.bincount().tolist() == [10, 10, 10]
    assert load("genomic").x_train.shape == (10_000, 30, 64)
    assert {item.__name__ for item in (fc.data.DATASETS["genomic"],)} == {"genomic"}


def test_labels_by_hand() -> None:
    """A reference of 150 times base 0; one copy with base 1 in places 7 and 8, in the second 5-mer,
    and base 3 in the last place.
    """
    reference = np.zeros(150, np.int64)
    copy = reference.copy()
    copy[[7, 8, 149]] = 1, 1, 3
    kmers, labels = _reads(np.stack([[copy], [reference]]), reference, 2, np.random.default_rng(0))
    assert kmers[0].tolist() == [0, 4**2 + 4, *[0] * 27, 3]  # 00110 and 00003, base 4
    assert labels[0].tolist() == [0, 1, *[0] * 27, 1]
    assert torch.equal(kmers[0], kmers[1])
    assert kmers[2:].abs().sum() == 0
    assert labels[2:].sum() == 0


def test_reads_begin_anywhere_on_the_grid() -> None:
    reference = np.arange(33 * 5) // 5 % 4  # AAAAA CCCCC GGGGG …: k-mer i is 341 (i mod 4)
    kmers, labels = _reads(reference[None, None], reference, 200, np.random.default_rng(0))
    assert set((kmers[:, 0] // 341).tolist()) == {0, 1, 2, 3}
    assert (kmers.diff(dim=1) % (4 * 341) == 341).all()
    assert labels.sum() == 0


def test_frequencies_follow_balding_and_nichols() -> None:
    ancestral = np.array([0.1, 0.5, 0.8])
    drawn = _frequencies(ancestral, 20_000, 0.3, np.random.default_rng(0))
    assert drawn.mean(0) == pytest.approx(ancestral, abs=0.01)
    assert drawn.var(0) == pytest.approx(0.3 * ancestral * (1 - ancestral), rel=0.05)
    assert (_frequencies(ancestral, 4, 0, np.random.default_rng(0)) == ancestral).all()


def test_a_kmer_predicts_its_label_and_with_its_neighbor_better() -> None:
    """Tables of the training reads predict the labels of other individuals better than the
    majority class.
    """
    data = genomic(populations=4, reads=500)
    (train, test), y, y_test = (
        kmers_of(data.x_train, data.x_test),
        data.y_train.numpy(),
        data.y_test.numpy(),
    )

    def accuracy(trained: np.ndarray, tested: np.ndarray) -> float:
        ones, total = (
            np.bincount(trained.ravel(), y[:, 1:].ravel(), 2**20),
            np.bincount(trained.ravel(), minlength=2**20),
        )
        return float(((2 * ones > total)[tested] == y_test[:, 1:]).mean())

    alone = accuracy(train[:, 1:], test[:, 1:])
    pair = accuracy(1024 * train[:, :-1] + train[:, 1:], 1024 * test[:, :-1] + test[:, 1:])
    majority = 1 - y_test.mean()
    assert 0.7 < majority < 0.85
    assert alone > majority + 0.08
    assert pair > alone + 0.03


def test_the_same_read_has_the_same_labels() -> None:
    data = genomic(populations=2, reads=2000, seed=3)
    known: dict[bytes, list[int]] = {}
    for read, labels in zip(kmers_of(data.x_train)[0], data.y_train.tolist(), strict=True):
        assert known.setdefault(read.tobytes(), labels) == labels
    assert len(known) < 4000


@pytest.mark.parametrize(("divergence", "equal"), [(0.0, True), (0.3, False)])
def test_individuals_of_a_population_are_similar(divergence: float, equal: bool) -> None:
    """The frequencies of k-mers in the test reads of a population are nearest to those in its
    training reads.
    """
    data = genomic(populations=5, reads=2000, divergence=divergence)
    train, test = kmers_of(data.x_train, data.x_test)
    population, test_population = (
        part.numpy() for part in data.keys["population"] if part is not None
    )

    def frequencies(reads: np.ndarray) -> np.ndarray:
        return np.bincount(reads.ravel(), minlength=1024) / reads.size

    far = np.array(
        [
            [
                np.abs(
                    frequencies(test[test_population == p]) - frequencies(train[population == q])
                ).sum()
                for q in range(5)
            ]
            for p in range(5)
        ]
    )
    nearest = (far.argmin(1) == np.arange(5)).sum()
    assert (nearest < 5) if equal else (nearest == 5)


def test_the_seed_decides() -> None:
    first, again, other = (genomic(populations=2, reads=10, seed=seed) for seed in (1, 1, 2))
    for name in ("x_train", "y_train", "x_test", "y_test"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert not torch.equal(first.x_train, other.x_train)


@pytest.mark.parametrize(
    ("field", "value"),
    [("populations", 0), ("reads", 1.5), ("divergence", 1.0), ("divergence", "high"), ("seed", -3)],
)
def test_invalid_arguments(field: str, value: object) -> None:
    with pytest.raises(InvalidInputError) as caught:
        genomic(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == f"genomic.{field}"
    assert repr(value) in str(caught.value)


# clients with reversed labels


def numbered(classes: int) -> Dataset:
    """x is the number of the sample, y its remainder; a writer has ten samples, and there are no
    test samples.
    """
    number = np.arange(80)
    return dataset(number[:, None].astype(np.float32), number % classes, writer=number // 10)


@pytest.mark.parametrize(
    ("classes", "flipped", "reversed_clients"),
    [(2, 0.5, 4), (3, 0.25, 2), (5, 0.0, 0), (2, 1.0, 8)],
)
def test_reversed_labels_are_two_true_groups(
    classes: int, flipped: float, reversed_clients: int
) -> None:
    clients = partition(numbered(classes), FlippedId("writer", flipped=flipped), 8, probe=0)
    assert clients.groups is not None
    assert int(clients.groups.sum()) == reversed_clients
    for client, group in enumerate(clients.groups.tolist()):
        parts = (
            (clients.x, clients.y, clients.train[client]),
            (clients.x_test, clients.y_test, clients.test[client]),
        )
        assert [len(rows) for _, _, rows in parts] == [8, 2]
        for x, y, rows in parts:
            original = x[rows, 0].long() % classes
            assert y[rows].tolist() == (classes - 1 - original if group else original).tolist()
            assert (x[rows, 0] // 10 == x[rows[0], 0] // 10).all(), "a client is one writer"


def test_populations_with_reversed_labels() -> None:
    clients = partition(genomic(populations=6, reads=50), FlippedId(), 6)
    assert clients.groups is not None
    for client, group in enumerate(clients.groups.tolist()):
        for y, rows in (
            (clients.y, clients.train[client]),
            (clients.y_test, clients.test[int(clients.test_part_id[client])]),
        ):
            assert (float(y[rows].float().mean()) > 0.5) == bool(group)
    assert clients.origin["flipped"] == 0.5


def test_labels_that_cannot_be_reversed() -> None:
    for flipped in (-0.1, 1.5, "half", True):
        with pytest.raises(InvalidInputError) as caught:
            FlippedId(flipped=flipped)  # type: ignore[arg-type]
        assert caught.value.field == "partition.flipped"
        assert repr(flipped) in str(caught.value)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "partition.key"):
        partition(numbered(2), FlippedId(), 4)
    with pytest.raises(InvalidInputError, check=lambda error: error.field == "partition.name"):
        partition(dataset(np.eye(4), np.ones(4), population=[0, 0, 1, 1]), FlippedId(), 2)


class _Swapped(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(-1, -2)


@pytest.mark.slow
def test_a_small_net_learns_it_unless_half_of_the_labels_are_reversed() -> None:
    data = genomic(populations=4, reads=500)
    net = [
        _Swapped(),
        nn.Conv1d(64, 64, 5, padding=2),
        nn.ReLU(),
        nn.Conv1d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv1d(64, 2, 1),
        _Swapped(),
    ]
    got = {}
    for scheme in (NaturalId("population"), FlippedId()):
        clients = partition(data, scheme, 4)
        run = fc.run(
            fc.FedAvg(),
            clients,
            nn.Sequential(*net),
            rounds=8,
            clients_per_round=1.0,
            lr=0.1,
            batch_size=20,
            epochs=5,
            eval_every=0,
            device="cpu",
        )
        got[scheme.name] = run.summary["accuracy"]
    assert got["natural_id"] > 90
    assert got["flipped_id"] < 65
