"""Partitions with planted groups: clients of a group share their classes, their labelling or their
view, and the groups are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from scipy.optimize import brentq

from fedclade.data.array_checks import type_name
from fedclade.data.datasets import Dataset
from fedclade.data.partitioning.base import (
    Index,
    Split,
    Transform,
    assign_classes,
    assign_randomly,
    blocks,
    by_class,
    cut,
    labels_of,
    shares,
)
from fedclade.data.partitioning.transforms import (
    distinct_permutations,
    distinct_swaps,
    relabel,
    rotate,
)
from fedclade.errors import InvalidInputError, require, require_int


@dataclass(frozen=True)
class LabelClusters:
    """Clients of a cluster share a few classes. FLT: Scenario 1 (`overlap=0`: random disjoint
    classes) and 2 (`classes=3, overlap=1`).

    With an overlap the clusters stand in a ring over a random order of the classes and neighbours
    share `overlap` of them. No sample goes to two clients (in FLT's experiments the clusters that
    share a class reuse its samples). `samples` is the number for each client, the same of each
    class; None deals out all there are. A cluster's test part is all test samples of its classes.
    `key`: the classes are those of a key of the data set ("topic") instead of its labels.
    """

    name: ClassVar[str] = "label_clusters"
    clusters: int = 5
    classes: int = 2
    overlap: int = 0
    samples: int | None = None
    key: str | None = None

    def __post_init__(self) -> None:
        require_int("partition.clusters", self.clusters, 1)
        require_int("partition.classes", self.classes, 1)
        require_int("partition.overlap", self.overlap, 0)
        require(
            2 * self.overlap <= self.classes,
            "partition.overlap",
            self.overlap,
            f"must be at most half of classes = {self.classes}",
        )
        require(
            self.overlap == 0 or self.clusters >= 3,
            "partition.clusters",
            self.clusters,
            "with an overlap there must be 3 or more",
        )
        if self.samples is not None:
            require_int("partition.samples", self.samples, 1)

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        labels, test_labels = self._labels(data)
        pools = by_class(labels, rng)
        own = self._classes_of_clusters(np.array(list(pools)), rng)
        groups = blocks(clients, self.clusters)
        members = np.bincount(groups)
        pieces: dict[tuple[int, int], Index] = {}  # what each cluster has of each of its classes
        for label in np.unique(own):
            sharing = np.flatnonzero((own == label).any(1))
            by_cluster = cut(pools[label], shares(len(pools[label]), members[sharing]))
            pieces |= {
                (int(cluster), int(label)): piece
                for cluster, piece in zip(sharing, by_cluster, strict=True)
            }
        mine = [
            {label: pieces[cluster, label] for label in labels}
            for cluster, labels in enumerate(own.tolist())
        ]
        at_least = [
            sum(len(pools[label]) // int((own == label).sum()) for label in labels)
            for labels in own.tolist()
        ]
        _check_members(
            [sum(map(len, rows.values())) for rows in mine],
            members,
            self.clusters * min(at_least),
            clients,
        )
        most = self.classes * min(
            len(piece) // int(members[cluster]) for (cluster, _), piece in pieces.items()
        )
        train: list[Index] = []
        for cluster, rows in enumerate(mine):
            train += self._assign(cluster, rows, int(members[cluster]), most)
        return Split(train, test=_test_rows(test_labels, own), test_part_id=groups, groups=groups)

    def _labels(self, data: Dataset) -> tuple[Index, Index]:
        """What makes the clusters, of the training and of the test samples."""
        if self.key is None:
            return labels_of(data, self.name)[0], data.y_test.numpy()
        allowed = f"the data set {data.name!r} has {', '.join(data.keys) or 'no keys'}"
        require(self.key in data.keys, "partition.key", self.key, allowed)
        train, test = data.keys[self.key]
        return train.numpy(), np.empty(0, np.int64) if test is None else test.numpy()

    def _classes_of_clusters(self, known: Index, rng: np.random.Generator) -> Index:
        step = self.classes - self.overlap
        most = len(known) // step
        fewer = (
            f"at most {most} clusters or fewer classes"
            if most >= (3 if self.overlap else 1)
            else "fewer classes"
        )
        require(
            self.clusters * step <= len(known),
            "partition.clusters",
            self.clusters,
            f"{self.clusters} clusters of {self.classes} classes with an overlap of {self.overlap}"
            f" need {self.clusters * step} classes and there are {len(known)}; ask for {fewer}",
        )
        order = rng.permutation(known)[: self.clusters * step]
        ring: Index = order[
            (step * np.arange(self.clusters)[:, None] + np.arange(self.classes)) % len(order)
        ]
        return ring

    def _assign(
        self, cluster: int, mine: Mapping[int, Index], members: int, most: int
    ) -> list[Index]:
        if self.samples is None:
            return assign_classes(mine, {label: np.arange(members) for label in mine}, members)
        each, left = divmod(self.samples, self.classes)
        quota = np.full((members, self.classes), each)
        # The odd samples go round the classes, so that each class gives equally many.
        quota[np.arange(members).repeat(left), np.arange(members * left) % self.classes] += 1
        for label, needed in zip(mine, quota.sum(0).tolist(), strict=True):
            if needed > len(mine[label]):
                fewer = f"at most {most} samples or fewer clients" if most else "fewer clients"
                raise InvalidInputError(
                    f"partition.samples = {self.samples}: cluster {cluster} needs {needed} training"
                    f" samples of class {label} for its {members} clients and has"
                    f" {len(mine[label])}; ask for {fewer}."
                )
        pieces = [cut(rows, quota[:, column]) for column, rows in enumerate(mine.values())]
        return [np.concatenate(parts) for parts in zip(*pieces, strict=True)]


@dataclass(frozen=True)
class PowerLawClusters:
    """Clusters of consecutive classes (the last has those that remain) with client sizes by a power
    law. FLT: Scenario 4, Algorithm 4.

    Of a cluster's N samples and M clients, client m = 1 … M gets floor(a + exp(b m²)) with a =
    floor(N / 2M) and b such that the sum is N; what rounding leaves goes to the first. A cluster's
    test part is all test samples of its classes.
    """

    name: ClassVar[str] = "power_law_clusters"
    clusters: int = 10
    classes: int = 5

    def __post_init__(self) -> None:
        require_int("partition.clusters", self.clusters, 1)
        require_int("partition.classes", self.classes, 1)

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        labels, _ = labels_of(data, self.name)
        known, groups = np.unique(labels), blocks(clients, self.clusters)
        most = (len(known) - 1) // self.classes + 1
        require(
            self.clusters <= most,
            "partition.clusters",
            self.clusters,
            f"{len(known)} classes are too few for these clusters of {self.classes}; ask for at"
            f" most {most} clusters or fewer classes",
        )
        own = np.split(known, self.classes * np.arange(1, self.clusters))
        rows = [rng.permutation(np.flatnonzero(np.isin(labels, mine))) for mine in own]
        available, members = [len(r) for r in rows], np.bincount(groups)
        _check_members(available, members, self.clusters * min(available), clients)
        train: list[Index] = []
        for mine, clients_here in zip(rows, members.tolist(), strict=True):
            train += cut(mine, power_law(len(mine), clients_here))
        return Split(
            train, test=_test_rows(data.y_test.numpy(), own), test_part_id=groups, groups=groups
        )


def power_law(samples: int, clients: int) -> Index:
    """The sizes of one cluster's clients in `PowerLawClusters`."""
    base, square = samples // (2 * clients), np.arange(1, clients + 1) ** 2
    # At the upper end the last client alone would have all samples, at 0 each has base + 1, which
    # is never too many.
    slope = brentq(
        lambda b: clients * base + np.exp(b * square).sum() - samples,
        0,
        math.log(samples) / clients**2,
    )
    sizes: Index = np.floor(base + np.exp(slope * square)).astype(np.int64)
    sizes[0] += samples - sizes.sum()
    return sizes


@dataclass(frozen=True)
class LabelSwap:
    """Same images, other labels: in each group `swaps` pairs of labels of its own are exchanged.
    Pairs are disjoint while the classes last.

    A subtler form of `LabelPermutation`. `samples` for each client; None deals out all. Test: the
    whole test set, labels exchanged.
    """

    name: ClassVar[str] = "label_swap"
    clusters: int = 4
    swaps: int = 1
    samples: int | None = None

    def __post_init__(self) -> None:
        require_int("partition.clusters", self.clusters, 1)
        require_int("partition.swaps", self.swaps, 1)
        if self.samples is not None:
            require_int("partition.samples", self.samples, 1)

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        labels, classes = labels_of(data, self.name)
        known = np.unique(labels)
        most = len(known) // 2
        require(
            self.swaps <= most,
            "partition.swaps",
            self.swaps,
            f"there are {len(known)} classes; ask for at most {most}",
        )
        ways = math.comb(len(known), 2 * self.swaps) * math.prod(range(1, 2 * self.swaps, 2))
        _check_ways(self.clusters, ways, len(known))
        tables = distinct_swaps(known, self.clusters, self.swaps, classes, rng.spawn(1)[0])
        return _planted(data, clients, self.clusters, self.samples, relabel(tables), rng)


@dataclass(frozen=True)
class LabelPermutation:
    """Same images, other labels: each group has its own random order of all labels, no two alike.
    As in CFL's experiments.

    `samples` for each client; None deals out all. Test: the whole test set, labels permuted.
    """

    name: ClassVar[str] = "label_permutation"
    clusters: int = 4
    samples: int | None = None

    def __post_init__(self) -> None:
        require_int("partition.clusters", self.clusters, 1)
        if self.samples is not None:
            require_int("partition.samples", self.samples, 1)

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        labels, classes = labels_of(data, self.name)
        known = np.unique(labels)
        _check_ways(self.clusters, math.factorial(min(len(known), 20)), len(known))
        tables = distinct_permutations(known, self.clusters, classes, rng.spawn(1)[0])
        return _planted(data, clients, self.clusters, self.samples, relabel(tables), rng)


@dataclass(frozen=True)
class Rotation:
    """Same labels, turned images: group g sees square images turned by g * 360 / clusters degrees.
    IFCA: rotated MNIST.

    Quarter turns are exact. `samples` for each client; None deals out all. Test: the whole test
    set, turned.
    """

    name: ClassVar[str] = "rotation"
    clusters: int = 4
    samples: int | None = None

    def __post_init__(self) -> None:
        require_int("partition.clusters", self.clusters, 1)
        if self.samples is not None:
            require_int("partition.samples", self.samples, 1)

    def split(self, data: Dataset, clients: int, rng: np.random.Generator) -> Split:
        x = data.x_test  # alike, and nothing is copied to look at it
        if (
            x.ndim not in (3, 4)
            or x.shape[-1] != x.shape[-2]
            or x.dtype not in (torch.uint8, torch.float32)
        ):
            raise InvalidInputError(
                f"partition.name = {self.name!r}: turns square images, and the inputs of"
                f" {data.name!r} have shape {tuple(x.shape[1:])} and type {type_name(x)}. Give"
                " uint8 or float images of shape (channels, height, width), or use label_swap."
            )
        return _planted(data, clients, self.clusters, self.samples, rotate(self.clusters), rng)


def _planted(
    data: Dataset,
    clients: int,
    clusters: int,
    samples: int | None,
    transform: Transform,
    rng: np.random.Generator,
) -> Split:
    """Samples dealt at random, a transformation for each group, and the whole test set once for
    each.
    """
    groups = blocks(clients, clusters)
    train = assign_randomly(len(data.y_train), clients, samples, rng)
    return Split(
        train,
        test=[np.arange(len(data.y_test))],
        test_part_id=np.zeros(clients, np.int64),
        groups=groups,
        transform=transform,
    )


def _check_ways(clusters: int, ways: int, classes: int) -> None:
    """Whether there are as many different relabellings as clusters."""
    allowed = (
        f"{classes} classes allow no more than {ways} different relabellings; ask for at most"
        f" {ways}"
    )
    require(clusters <= ways, "partition.clusters", clusters, allowed)


def _check_members(available: Sequence[int], members: Index, most: int, clients: int) -> None:
    """Whether each cluster has a sample for each of its clients; `most` is the number of clients
    for which all have.
    """
    for cluster, (samples, wanted) in enumerate(zip(available, members, strict=True)):
        require(
            samples >= wanted,
            "partition.clients",
            clients,
            f"cluster {cluster} has {wanted} clients and {samples} training samples besides the"
            f" probe; ask for at most {most} clients",
        )


def _test_rows(labels: Index, own: Sequence[Index] | Index) -> list[Index]:
    return [np.flatnonzero(np.isin(labels, mine)) for mine in own]
