"""The federations of benchmarks/diagnosis.py, with the expected diagnosis of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

import fedclade as fc
from fedclade.data import Clients, Dataset
from fedclade.data.partitioning.base import Index, Split, assign_randomly, blocks
from fedclade.data.partitioning.transforms import rotate

CLIENTS, SAMPLES = 40, 200


@dataclass(frozen=True)
class Planted:
    """The expected diagnosis; `groups` is None if there are no groups."""

    kind: str
    groups: int | None


EXPECTED = {
    "IID": Planted("iid", None),
    "quantity skew": Planted("quantity skew", None),
    "label clusters": Planted("label skew", 5),
    "Dirichlet 0.1": Planted("label skew", None),
    "label swap": Planted("concept shift", 4),
    "label permutation": Planted("concept shift", 4),
    "rotation": Planted("feature shift in groups", 4),
    "rotation with label skew": Planted("feature shift in groups and label skew", 4),
}


@dataclass(frozen=True)
class TurnedHalves:
    """Four groups: images upright or rotated by 90 degrees, from one half of the classes or the
    other.
    """

    name: ClassVar[str] = "turned_halves"
    samples: int = SAMPLES

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        labels, test_labels = data.y_train.numpy(), data.y_test.numpy()
        halves = np.array_split(rng.permutation(np.unique(labels)), 2)
        groups = blocks(clients, 4)
        train: list[Index] = []
        for half, own in enumerate(halves):
            rows = np.flatnonzero(np.isin(labels, own))
            dealt = assign_randomly(len(rows), int((groups // 2 == half).sum()), self.samples, rng)
            train += [rows[part] for part in dealt]
        test = [np.flatnonzero(np.isin(test_labels, own)) for own in halves]
        quarter = rotate(4)

        def transform(x: Tensor, y: Tensor, group: int) -> tuple[Tensor, Tensor]:
            return quarter(x, y, group % 2)

        return Split(train, test=test, test_part_id=groups // 2, groups=groups, transform=transform)


def federation(
    data: Dataset, name: str, seed: int, clients: int = CLIENTS, samples: int = SAMPLES
) -> Clients:
    """One of the federations. For Dirichlet, IID and quantity skew, `samples` is the mean."""
    classes = data.classes or 0
    schemes = {
        "IID": fc.data.Iid(),
        "quantity skew": fc.data.QuantitySkew(1.0),
        "label clusters": fc.data.LabelClusters(5, classes // 5, samples=samples),
        "Dirichlet 0.1": fc.data.Dirichlet(0.1),
        "label swap": fc.data.LabelSwap(
            4, swaps=max(1, classes // 9), samples=samples
        ),  # about a fifth of the classes in each group
        "label permutation": fc.data.LabelPermutation(4, samples=samples),
        "rotation": fc.data.Rotation(4, samples=samples),
        "rotation with label skew": TurnedHalves(samples),
    }
    whole = name in ("IID", "quantity skew", "Dirichlet 0.1")
    return fc.data.partition(
        _some(data, clients * samples, seed) if whole else data,
        schemes[name],
        clients,
        seed,
        probe=0,
    )


def _some(data: Dataset, count: int, seed: int) -> Dataset:
    """A random part of the training samples."""
    rows = np.random.default_rng([seed, 1]).permutation(len(data.x_train))[:count]
    return fc.data.dataset(
        data.x_train[rows], data.y_train[rows], data.x_test, data.y_test, name=data.name
    )
